"""One cluster, one set of queries, and as many deaths as one likes: drivers, tasks and brokers are
killed at random moments, while all sources and targets change.

    scripts/campaign spark --kills 1000

It is the campaign's test `spark-all-kill-any` with a number of kills instead of a time, with the
same checkers and gates: 0 lost, 0 twice, keys in order. Besides, at least one driver must have died
in a micro-batch, and a repeated micro-batch must have found rows that were stored. Exit status: 0
for a pass, 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from history.events import Recorder

from campaign.cluster import World
from campaign.nemesis import strike
from campaign.report import as_json, as_page
from campaign.run import Disturb, run_test
from campaign.table import tests
from campaign.verdict import Result

TEST: Final = "spark-all-kill-any"
CALM_S: Final = (0.0, 2.0)
EPOCH: Final = re.compile(r"qmq: epoch \d+: (\d+) rows in \d+ batches, (\d+) were stored already")


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def killing(count: int, minutes: float) -> Disturb:
    """So many strikes of the test's fault; none begins after that time."""

    async def disturb(world: World, recorder: Recorder, answered: Callable[[], int]) -> None:
        end_s = time.monotonic() + minutes * 60
        for number in range(count):
            if time.monotonic() >= end_s:
                return
            await asyncio.sleep(world.random.uniform(*CALM_S))
            await strike(world, recorder, answered)
            if not (number + 1) % 10:
                say(f"    {number + 1} of {count} kills")

    return disturb


def kills_of(effects: Iterable[str]) -> tuple[Counter[str], Counter[str]]:
    """Kills by kind, and those that hit a micro-batch in work. Pure."""
    effects = list(effects)
    return (
        Counter(each.partition(":")[0] for each in effects),
        Counter(each.partition(":")[0] for each in effects if "in work" in each),
    )


def found_again(folder: Path) -> tuple[int, int, int]:
    """By what drivers say: epochs, those that found rows of an earlier attempt, and these rows."""
    epochs = [
        (int(rows), int(found))
        for log in folder.glob("driver*.log")
        for rows, found in EPOCH.findall(log.read_text(errors="replace"))
    ]
    return len(epochs), sum(found > 0 for _, found in epochs), sum(found for _, found in epochs)


def unmet(result: Result, found: tuple[int, int, int]) -> list[str]:
    """What a pass must have shown besides the test's gates. Pure."""
    _, hit = kills_of(result.effects)
    reasons = [] if hit["kill-driver"] else ["no driver died in a micro-batch"]
    return reasons if found[1] else [*reasons, "no repeated micro-batch found rows"]


def summary(result: Result, found: tuple[int, int, int]) -> str:
    """A table for people. Pure."""
    kinds, hit = kills_of(result.effects)
    rows = [f"| {kind} | {count:,} | {hit[kind]:,} |" for kind, count in sorted(kinds.items())]
    return "\n".join(
        [
            "| kill | times | in a micro-batch |",
            "|---|---:|---:|",
            *rows,
            f"| all | {kinds.total():,} | {hit.total():,} |",
            "",
            f"{found[0]:,} epochs were stored, {found[1]:,} of them found rows of an earlier "
            f"attempt ({found[2]:,} rows).",
            "",
        ]
    )


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="scripts/campaign spark", description=__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--kills", type=int, default=10)
    options.add_argument(
        "--minutes", type=float, default=24 * 60.0, help="no kill begins after so many"
    )
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", type=Path, metavar="FILE")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="histories and logs")
    return options


async def run(chosen: argparse.Namespace, folder: Path) -> tuple[Result, str]:
    """The verdict, and the table. SIGTERM ends the run as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    result = await run_test(
        tests()[TEST],
        folder,
        seed=chosen.seed,
        seconds=0.0,
        tell=say,
        disturb=killing(chosen.kills, chosen.minutes),
    )
    if result.verdict in ("skipped", "error"):
        return result, ""
    found = found_again(folder)
    more = unmet(result, found)
    if more:
        verdict = "no proof" if result.verdict == "pass" else result.verdict
        result = replace(result, verdict=verdict, unmet=[*result.unmet, *more])
    return result, summary(result, found)


def main() -> int:
    chosen = parser().parse_args()
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="spark-kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    result, page = asyncio.run(run(chosen, folder.resolve()))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(as_json(tests(), [result]), indent=1) + "\n")
    sys.stdout.write(as_page(tests(), [result]) + "\n" + page)
    if chosen.keep is None and result.verdict in ("pass", "skipped"):
        shutil.rmtree(folder)
    else:
        say(f"histories and logs: {folder}")
    return 0 if result.verdict in ("pass", "skipped") else 1


if __name__ == "__main__":
    sys.exit(main())
