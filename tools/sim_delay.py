"""Run the simulator of delay groups:
many seeds on all processors, or the planted bugs, or one seed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "tests")
)  # Before scripts/, which also has a sim.py.

from delaysim import run
from delaysim.run import BUGS, Result, planted
from simulator_runs import Simulator, main


def simulate(seed: int, minutes: int, bug: str, _: None) -> Result:
    """Seven more minutes follow, in which all must arrive."""
    with planted(bug) if bug else nullcontext():
        return run.simulate(seed, minutes)


def figures(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "messages": sum(each.sent for each in results),
        "delivered": sum(each.delivered for each in results),
        "cancelled": sum(each.cancelled for each in results),
        "runs of recurring messages": sum(each.runs for each in results),
        "lives of masters": sum(each.lives for each in results),
    }


if __name__ == "__main__":
    sys.exit(
        main(
            Simulator(
                "tools/run sim_delay",
                str(__doc__),
                simulate,
                list(BUGS),
                figures,
                seeds=100,
                minutes=12,
                bug_seeds_max=100,
            )
        )
    )
