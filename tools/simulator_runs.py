"""Runs a simulator over many seeds on all processors, hunts its planted bugs, or runs one seed with
its story.

`sim.py`, `sim_order.py` and `sim_delay.py` each describe a `Simulator`, and call `main`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rich.console import Console
from rich.progress import track
from rich.table import Table

CHUNK: Final = 2
console = Console()
errors = Console(stderr=True)

Simulate = Callable[[int, int, str, Any], Any]
"""(seed, simulated minutes, the planted bug or "", a story or None) -> the result of the seed."""


@dataclass(frozen=True, slots=True)
class Simulator:
    prog: str
    about: str
    simulate: Simulate
    """A function of a module, since other processes call it."""
    bugs: Sequence[str]
    figures: Callable[[Sequence[Any]], dict[str, Any]]
    """Sums of the results, which are in the order of their seeds. Under "faults": how often each
    was injected.
    """
    make_story: Callable[[], Any] | None = None
    """None: a seed has no story to tell."""
    seeds: int = 200
    minutes: int = 0
    """0: the seed decides how long it runs."""
    bug_seeds_max: int = 300
    """Seeds in which a planted bug must be found."""


# --- in the workers -------------------------------------------------------------------------------


def run_seed(simulate: Simulate, minutes: int, seed: int) -> Any:
    """One seed of the product."""
    return simulate(seed, minutes, "", None)


def hunt(simulate: Simulate, minutes: int, seeds: range, name: str) -> tuple[str, Any, float]:
    """The result of the first seed that finds a planted bug, or None, and the seconds it took."""
    began = time.perf_counter()
    for seed in seeds:
        result = simulate(seed, minutes, name, None)
        if result.failure:
            return name, result, time.perf_counter() - began
    return name, None, time.perf_counter() - began


# --- seeds ----------------------------------------------------------------------------------------


def spread(
    options: argparse.Namespace, work: Callable[[Any], Any], jobs: Sequence[Any], what: str
) -> Iterator[Any]:
    """Run the jobs in separate processes. Yields results in the order of completion."""
    with mp.get_context("spawn").Pool(options.processes) as pool:
        chunk = CHUNK if len(jobs) > 100 else 1
        yield from track(
            pool.imap_unordered(work, jobs, chunk),
            what,
            len(jobs),
            console=errors,
            disable=options.json,
        )


def run_seeds(simulator: Simulator, options: argparse.Namespace) -> int:
    """All seeds; 1 if one failed."""
    began = time.perf_counter()
    again = f" --minutes {options.minutes}" if simulator.minutes else ""
    results: list[Any] = []
    seeds = range(options.first, options.first + options.seeds)
    for result in spread(
        options, partial(run_seed, simulator.simulate, options.minutes), seeds, "simulating"
    ):
        results.append(result)
        if result.failure:
            command = f"{simulator.prog} --replay {result.seed}{again}"
            errors.print(
                f"[red]seed {result.seed}[/] ({command}): {result.failure[:300]}", soft_wrap=True
            )
    results.sort(key=lambda each: each.seed)
    totals = {
        "seeds": len(results),
        "failures": [each.seed for each in results if each.failure],
        "seconds": round(time.perf_counter() - began, 1),
        **simulator.figures(results),
    }
    if options.json:
        print(json.dumps(totals))
    else:
        show(totals)
    return 1 if totals["failures"] else 0


def sum_faults(results: Sequence[Any]) -> dict[str, int]:
    """How often each fault was injected, the most frequent first."""
    faults: Counter[str] = Counter()
    for each in results:
        faults.update(each.faults)
    return dict(faults.most_common())


def show(totals: dict[str, Any]) -> None:
    table = Table(show_header=False, title="simulated")
    for name, value in totals.items():
        if name != "faults":
            table.add_row(
                name, f"{value:,}" if isinstance(value, int | float) else str(value or "none")
            )
    console.print(table)
    if "faults" in totals:
        faults = Table(show_header=False, title="faults injected, changes wanted")
        for name, count in totals["faults"].items():
            faults.add_row(name, f"{count:,}")
        console.print(faults)


# --- planted bugs ---------------------------------------------------------------------------------


def run_bugs(simulator: Simulator, options: argparse.Namespace) -> int:
    """Hunt each planted bug; 1 if one was not found."""
    names = [name for name in simulator.bugs if options.bug in ("", name)]
    seeds = range(options.first, options.first + simulator.bug_seeds_max)
    found = {
        each[0]: each
        for each in spread(
            options, partial(hunt, simulator.simulate, options.minutes, seeds), names, "hunting"
        )
    }
    if options.json:
        print(
            json.dumps(
                {name: result.seed if (result := found[name][1]) else None for name in names}
            )
        )
    else:
        caught = sum(result is not None for _, result, _ in found.values())
        table = Table(
            "planted bug",
            "seed",
            "seconds",
            "how it shows",
            title=f"{caught} of {len(names)} planted bugs found",
        )
        for name in names:
            _, result, seconds = found[name]
            seed, failure = (
                (str(result.seed), result.failure[:70]) if result else ("[red]not found[/]", "")
            )
            table.add_row(name, seed, f"{seconds:.1f}", failure)
        console.print(table)
    return 0 if all(each[1] is not None for each in found.values()) else 1


# --- one seed -------------------------------------------------------------------------------------


def replay(simulator: Simulator, options: argparse.Namespace) -> int:
    """One seed with its story, of the product or of a planted bug."""
    story = simulator.make_story() if simulator.make_story is not None else None
    result = simulator.simulate(options.replay, options.minutes, options.bug, story)
    for now_ms, name, what in story.lines[-options.lines :] if story is not None else ():
        style = (
            "yellow"
            if what.startswith("FAULT")
            else "green"
            if "LEAD" in what
            else "cyan"
            if name == "etcd"
            else ""
        )
        console.print(
            f"{now_ms / 1000:9.3f}  {name:8} {what}",
            style=style,
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if story is None:
        console.print(result)
    console.print(
        result.failure or "all is well", style="red" if result.failure else "green", markup=False
    )
    return 1 if result.failure else 0


def main(simulator: Simulator) -> int:
    parser = argparse.ArgumentParser(prog=simulator.prog, description=simulator.about)
    parser.add_argument(
        "--seeds", type=int, default=simulator.seeds, help="how many (default: %(default)s)"
    )
    parser.add_argument(
        "--from",
        dest="first",
        type=int,
        default=1,
        metavar="SEED",
        help="the first one (default: %(default)s)",
    )
    if simulator.minutes:
        parser.add_argument(
            "--minutes",
            type=int,
            default=simulator.minutes,
            help="simulated with faults, per seed (default: %(default)s)",
        )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="default: one per processor"
    )
    parser.add_argument(
        "--bugs",
        action="store_true",
        help=f"hunt the planted bugs instead, {simulator.bug_seeds_max} seeds each at most",
    )
    parser.add_argument(
        "--json", action="store_true", help="figures as one line of JSON, and no progress bar"
    )
    parser.add_argument("--replay", type=int, metavar="SEED", help="tell what happens in one seed")
    parser.add_argument(
        "--bug",
        choices=list(simulator.bugs),
        default="",
        help="with --replay: plant this bug; with --bugs: hunt it alone",
        metavar="NAME",
    )
    parser.add_argument(
        "--lines",
        type=int,
        default=200,
        help="with --replay: how many of the last lines (default: %(default)s)",
    )
    parser.set_defaults(minutes=simulator.minutes)
    options = parser.parse_args()
    if options.replay is not None:
        return replay(simulator, options)
    return run_bugs(simulator, options) if options.bugs else run_seeds(simulator, options)
