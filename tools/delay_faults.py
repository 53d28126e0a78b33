"""Kill, stop, hand over and cut off a delay group's replicas and jump their clocks, under load;
check every message against a simple model.

Exit status 1 if a message was early, duplicated, lost, or delivered although it was cancelled.
`--seed` repeats a run's choices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from system.delay_run import FAULTS, DelayRun, Outcome  # noqa: E402

PER_RUN: Final = 20
"""Rounds with one cluster, before a new cluster with another seed."""


def percentile(sorted_values: list[int], share: float) -> int:
    """The value below which that share of them lies."""
    return (
        sorted_values[min(int(len(sorted_values) * share), len(sorted_values) - 1)]
        if sorted_values
        else 0
    )


async def run(
    rounds: int,
    seed: int,
    faults: tuple[str, ...],
    away_s: float,
    keep: Path | None,
    *,
    quiet: bool,
) -> list[Outcome]:
    """Run the rounds, on as many clusters as necessary."""
    outcomes: list[Outcome] = []
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("faults", total=rounds)
        left = rounds
        while left > 0:
            folder = Path(tempfile.mkdtemp(prefix="qmq-delay-", dir=keep))

            def step(name: str) -> None:
                bar.update(task, description=name, advance=1)

            one = DelayRun(
                folder, seed + len(outcomes), faults=faults, away_s=away_s, progress=step, brokers=1
            )
            outcomes.append(await one.run(min(left, PER_RUN)))
            left -= PER_RUN
            if keep is None and not outcomes[-1].anomalies:
                _remove(folder)
    return outcomes


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def summed(outcomes: list[Outcome]) -> dict[str, object]:
    """The sums over all runs."""
    faults: Counter[str] = Counter()
    for each in outcomes:
        faults.update(each.faults)
    late = sorted(value for each in outcomes for value in each.lateness_ms)
    return {
        "seeds": [each.seed for each in outcomes],
        "faults": dict(sorted(faults.items())),
        "sent": sum(each.sent for each in outcomes),
        "acknowledged": sum(each.acknowledged for each in outcomes),
        "cancelled": sum(each.cancelled for each in outcomes),
        "delivered": sum(each.delivered for each in outcomes),
        "lateness p50, ms": percentile(late, 0.5),
        "lateness p99, ms, outages included": percentile(late, 0.99),
        "latest, ms": late[-1] if late else 0,
        "anomalies": [f"seed {each.seed}: {text}" for each in outcomes for text in each.anomalies][
            :20
        ],
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--seed", type=int, default=random.randrange(10**6))
    options.add_argument("--faults", default=",".join(FAULTS), help="which, comma-separated")
    options.add_argument(
        "--away", type=float, default=5.0, help="seconds for which brokers or all replicas are away"
    )
    options.add_argument(
        "--keep", type=Path, default=None, help="a folder for the clusters' folders, which stay"
    )
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    outcomes = asyncio.run(
        run(
            chosen.rounds,
            chosen.seed,
            tuple(chosen.faults.split(",")),
            chosen.away,
            chosen.keep,
            quiet=chosen.json,
        )
    )
    found = summed(outcomes)
    if chosen.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        table = Table(title="faults of a delay group", show_header=False)
        table.add_column()
        table.add_column()
        for name, value in found.items():
            table.add_row(
                name, "\n".join(map(str, value)) if isinstance(value, list) else str(value)
            )
        Console().print(table)
    return 1 if found["anomalies"] else 0


if __name__ == "__main__":
    sys.exit(main())
