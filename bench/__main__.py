"""Measures QMQ on this machine (docs/BENCH.md).

    scripts/bench                                  all scenarios
    scripts/bench NAME ...                         these: {scenarios}
    scripts/bench PROGRAM [OPTIONS]                a program with options of its own: {programs}

Scenarios run `--runs` times in turns, so that a change of the machine's speed affects all of them.
Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Final

from bench.processes import Figures

Scenarios = dict[str, Callable[[], Figures]]
"""By name."""

PROGRAMS: Final = (
    "cluster",
    "everyday",
    "delayed",
    "flush",
    "security",
    "gateway",
    "integrations",
)


def every(scale: float) -> dict[str, Scenarios]:
    """The scenarios by the name that chooses them."""
    # Not above: everyday.py runs with older checkouts, too, where not all that these import is in
    # its place.
    from bench import costs, shards, waits

    def n(count: int) -> int:
        return max(int(count * scale) // 1000 * 1000, 2000)

    return {
        "replicated": {
            "100 B, one replica": lambda: costs.replicated(1, n(3_000_000), 100),
            "100 B, three replicas": lambda: costs.replicated(3, n(3_000_000), 100),
            "1 KB, one replica": lambda: costs.replicated(1, n(600_000), 1024),
            "1 KB, three replicas": lambda: costs.replicated(3, n(600_000), 1024),
        },
        "subjects": {"10,000 subjects": lambda: costs.subjects(10_000)},
        "shards": {
            f"shards, {name}": scenario for name, scenario in shards.scenarios(scale).items()
        },
        "cold": {"2 GiB that is on the disk only": lambda: waits.cold(n(2_000_000))},
        "backup": {"a backup of 2 GiB": lambda: waits.backup(int(2048 * scale))},
        "changes": {"changes of a route": lambda: waits.changes(max(int(30 * scale), 6))},
        "spark": {"micro-batch of 1,000 rows": lambda: costs.micro_batches(60)},
    }


def measure(scenarios: Scenarios, runs: int) -> Figures:
    """The medians of all figures."""
    found: dict[str, list[float]] = {}
    for run in range(runs):
        for name, scenario in scenarios.items():
            print(f"run {run + 1} of {runs}: {name}", file=sys.stderr, flush=True)
            for figure, value in scenario().items():
                found.setdefault(f"{name}, {figure}", []).append(value)
    return {figure: statistics.median(values) for figure, values in found.items()}


def main() -> None:
    words = sys.argv[1:]
    if words and words[0] in PROGRAMS:
        import_module(f"bench.{words[0]}").main(words[1:])
        return
    by_name = every(1)
    text = (__doc__ or "").format(scenarios=", ".join(by_name), programs=", ".join(PROGRAMS))
    parser = argparse.ArgumentParser(
        "scripts/bench", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="fewer or more messages")
    asked = parser.parse_args(words)
    if unknown := set(asked.names) - set(by_name):
        parser.error(
            f"there is no scenario {', '.join(sorted(unknown))}, only {', '.join(by_name)}"
        )
    scenarios = {
        name: work
        for kind, some in every(asked.scale).items()
        if kind in (asked.names or by_name)
        for name, work in some.items()
    }
    found = measure(scenarios, asked.runs)
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    print(f"medians of {asked.runs}")
    for figure, value in found.items():
        print(f"{figure:80} {value:12,.0f}" if value >= 100 else f"{figure:80} {value:12,.3f}")


if __name__ == "__main__":
    main()
