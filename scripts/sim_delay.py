"""Run the simulator of delay groups (tests/delaysim) over many seeds, or hunt planted bugs with it.

Exit status 1 if a seed violates a property, or a planted bug is not found. `--replay SEED` runs one seed and prints the result.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]  # Before scripts/, which also has a sim.py.

from delaysim.bugs import BUGS, planted  # noqa: E402
from delaysim.run import Result, simulate  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

TRIES: Final = 100
"""Seeds in which a planted bug must be found."""


def found_at(name: str, minutes: int) -> tuple[str, int]:
    """The first seed that finds a bug; 0 if none does."""
    with planted(name):
        return name, next((seed for seed in range(1, TRIES + 1) if simulate(seed, minutes).failure), 0)


def run(seeds: range, minutes: int, processes: int, *, quiet: bool) -> dict[str, object]:
    """Run all seeds. Returns the sums of their actions, and the failures."""
    results: list[Result] = []
    begin = time.monotonic()
    with mp.get_context("spawn").Pool(processes) as pool, Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("seeds", total=len(seeds))
        for result in pool.imap_unordered(partial(simulate, minutes=minutes), seeds):
            results.append(result)
            bar.advance(task)
    return {
        "seeds": f"{seeds.start} to {seeds.stop - 1}",
        "simulated minutes each": minutes,
        "seconds": round(time.monotonic() - begin, 1),
        "messages": sum(each.sent for each in results),
        "delivered": sum(each.delivered for each in results),
        "cancelled": sum(each.cancelled for each in results),
        "runs of recurring messages": sum(each.runs for each in results),
        "lives of masters": sum(each.lives for each in results),
        "failures": [each.failure for each in results if each.failure],
    }


def hunt(minutes: int, processes: int) -> dict[str, object]:
    """Each planted bug, and the seed that finds it."""
    with mp.get_context("spawn").Pool(processes) as pool:
        found = dict(pool.map(partial(found_at, minutes=minutes), BUGS, chunksize=1))
    return {"found at": found, "failures": [f"not found: {name}" for name, seed in found.items() if not seed]}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=100)
    options.add_argument("--from", type=int, default=1, dest="first")
    options.add_argument("--minutes", type=int, default=12, help="simulated, under load; seven more follow, in which all must arrive")
    options.add_argument("--processes", type=int, default=mp.cpu_count())
    options.add_argument("--bugs", action="store_true", help="hunt the planted bugs instead")
    options.add_argument("--replay", type=int, help="one seed, in this process")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    if chosen.replay is not None:
        result = simulate(chosen.replay, chosen.minutes)
        Console().print(result)
        return 1 if result.failure else 0
    if chosen.bugs:
        found = hunt(chosen.minutes, chosen.processes)
    else:
        seeds = range(chosen.first, chosen.first + chosen.seeds)
        found = run(seeds, chosen.minutes, chosen.processes, quiet=chosen.json)
    if chosen.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        Console().print(found)
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
