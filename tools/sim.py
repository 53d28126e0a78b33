"""Run the replication simulator: many seeds on all processors, or the planted bugs, or one seed
with its story.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "tests")
)  # Before scripts/, which also has a sim.py.

from sim.bugs import BUGS
from sim.node import Node
from sim.run import Result, Simulation, Story
from simulator_runs import Simulator, console, main, sum_faults


def simulate(seed: int, minutes: int, bug: str, story: Story | None) -> Result:
    simulation = Simulation(seed, minutes, BUGS[bug] if bug else Node, story=story)
    if story is not None:
        console.print(simulation.plan)
    return simulation.run()


def figures(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "simulated hours": round(sum(each.simulated_ms for each in results) / 3_600_000, 1),
        "events": sum(each.events for each in results),
        "acknowledged": sum(each.acknowledged for each in results),
        "masters": sum(each.masters for each in results),
        "faults": sum_faults(results),
    }


if __name__ == "__main__":
    sys.exit(
        main(
            Simulator(
                "tools/run sim", str(__doc__), simulate, list(BUGS), figures, Story, minutes=10
            )
        )
    )
