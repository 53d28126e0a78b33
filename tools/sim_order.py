"""Run the simulator of ordered subjects: many seeds on all processors, or the planted bugs, or one
seed with its story.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "tests")
)  # Before scripts/, which also has a sim.py.

from ordersim import run
from ordersim.bugs import BUGS
from ordersim.loop import Story
from ordersim.run import Result
from simulator_runs import Simulator, main, sum_faults


def simulate(seed: int, _: int, bug: str, story: Story | None) -> Result:
    return run.simulate(seed, BUGS[bug]() if bug else None, story=story)


def figures(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "simulated hours": round(sum(each.simulated_ms for each in results) / 3_600_000, 1),
        "events": sum(each.events for each in results),
        "messages stored": sum(each.stored for each in results),
        "messages handed out": sum(each.handed for each in results),
        "of these again": sum(each.again for each in results),
        "versions of routes": sum(each.versions for each in results),
        "faults": sum_faults(results),
    }


if __name__ == "__main__":
    sys.exit(
        main(Simulator("tools/run sim_order", str(__doc__), simulate, list(BUGS), figures, Story))
    )
