"""Run the replication simulator: many seeds on all processors, or the planted bugs, or one seed with its story."""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from sim.bugs import BUGS
from sim.run import Result, Simulation, simulate
from sim.story import Story

CHUNK: Final = 4
BUG_SEEDS_MAX: Final = 300
console = Console()
errors = Console(stderr=True)


# --- in the workers ------------------------------------------------------------------------------------------------------


def run_seed(job: tuple[int, int]) -> Result:
    """One seed of the product."""
    return simulate(*job)


def hunt(job: tuple[str, int, int]) -> tuple[str, Result | None, float]:
    """The first seed from `first` on that finds a planted bug, and the seconds it took."""
    name, first, minutes = job
    began = time.perf_counter()
    for seed in range(first, first + BUG_SEEDS_MAX):
        result = simulate(seed, minutes, BUGS[name])
        if result.failure:
            return name, result, time.perf_counter() - began
    return name, None, time.perf_counter() - began


# --- seeds ---------------------------------------------------------------------------------------------------------------


def spread(options: argparse.Namespace, work: Any, jobs: list[Any], what: str) -> Iterator[Any]:
    """Run the jobs in separate processes. Yields results in the order of completion."""
    with mp.get_context("spawn").Pool(options.processes) as pool:
        chunk = CHUNK if len(jobs) > 100 else 1
        yield from track(pool.imap_unordered(work, jobs, chunk), what, len(jobs), console=errors, disable=options.json)


def run_seeds(options: argparse.Namespace) -> int:
    """All seeds; 1 if one failed."""
    jobs = [(seed, options.minutes) for seed in range(options.first, options.first + options.seeds)]
    began = time.perf_counter()
    results: list[Result] = []
    for result in spread(options, run_seed, jobs, "simulating"):
        results.append(result)
        if result.failure:
            again = f"scripts/sim --replay {result.seed} --minutes {options.minutes}"
            errors.print(f"[red]seed {result.seed}[/] ({again}): {result.failure[:200]}", soft_wrap=True)
    totals = sum_up(results, time.perf_counter() - began)
    if options.json:
        print(json.dumps(totals))
    else:
        show(totals)
    return 1 if totals["failures"] else 0


def sum_up(results: Iterable[Result], seconds: float) -> dict[str, Any]:
    found = sorted(results, key=lambda each: each.seed)
    faults: Counter[str] = Counter()
    for each in found:
        faults.update(each.faults)
    hours = sum(each.simulated_ms for each in found) / 3_600_000
    return {
        "seeds": len(found),
        "failures": [each.seed for each in found if each.failure],
        "seconds": round(seconds, 1),
        "simulated hours": round(hours, 1),
        "simulated hours per hour": round(hours / seconds * 3600),
        "events": sum(each.events for each in found),
        "acknowledged": sum(each.acknowledged for each in found),
        "masters": sum(each.masters for each in found),
        "faults": dict(faults.most_common()),
    }


def show(totals: dict[str, Any]) -> None:
    table = Table(show_header=False, title="simulated")
    for name, value in totals.items():
        if name != "faults":
            table.add_row(name, f"{value:,}" if isinstance(value, int | float) else str(value or "none"))
    faults = Table(show_header=False, title="faults injected")
    for name, count in totals["faults"].items():
        faults.add_row(name, f"{count:,}")
    console.print(table, faults)


# --- planted bugs --------------------------------------------------------------------------------------------------------


def run_bugs(options: argparse.Namespace) -> int:
    """Hunt each planted bug; 1 if one was not found."""
    jobs = [(name, options.first, options.minutes) for name in BUGS]
    found: dict[str, tuple[str, Result | None, float]] = {each[0]: each for each in spread(options, hunt, jobs, "hunting")}
    if options.json:
        print(json.dumps({name: result.seed if (result := found[name][1]) else None for name in BUGS}))
    else:
        caught = sum(result is not None for _, result, _ in found.values())
        table = Table("planted bug", "seed", "seconds", "how it shows", title=f"{caught} of {len(BUGS)} planted bugs found")
        for name in BUGS:
            _, result, seconds = found[name]
            seed, failure = (str(result.seed), result.failure[:60]) if result else ("[red]not found[/]", "")
            table.add_row(name, seed, f"{seconds:.1f}", failure)
        console.print(table)
    return 0 if all(each[1] is not None for each in found.values()) else 1


# --- one seed ------------------------------------------------------------------------------------------------------------


def replay(options: argparse.Namespace) -> int:
    """One seed with its story, of the product or of a planted bug."""
    story = Story()
    simulation = (
        Simulation(options.replay, options.minutes, BUGS[options.bug], story=story)
        if options.bug
        else Simulation(options.replay, options.minutes, story=story)
    )
    result = simulation.run()
    for now_ms, name, what in story.lines[-options.lines :]:
        style = "yellow" if what.startswith("FAULT") else "green" if "LEAD" in what else "cyan" if name == "etcd" else ""
        console.print(f"{now_ms / 1000:9.3f}  {name:5} {what}", style=style, markup=False, highlight=False, soft_wrap=True)
    console.print(simulation.plan)
    console.print(result.failure or "all is well", style="red" if result.failure else "green", markup=False)
    return 1 if result.failure else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--from", dest="first", type=int, default=1, metavar="SEED", help="the first one (default: %(default)s)")
    parser.add_argument("--minutes", type=int, default=10, help="simulated minutes with faults, per seed (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one per processor")
    parser.add_argument("--bugs", action="store_true", help=f"hunt the planted bugs instead, {BUG_SEEDS_MAX} seeds each at most")
    parser.add_argument("--json", action="store_true", help="figures as one line of JSON, and no progress bar")
    parser.add_argument("--replay", type=int, metavar="SEED", help="tell what happens in one seed")
    parser.add_argument("--bug", choices=list(BUGS), help="with --replay: plant this bug", metavar="NAME")
    parser.add_argument("--lines", type=int, default=200, help="with --replay: how many of the last lines (default: %(default)s)")
    options = parser.parse_args()
    if options.replay is not None:
        return replay(options)
    return run_bugs(options) if options.bugs else run_seeds(options)


if __name__ == "__main__":
    sys.exit(main())
