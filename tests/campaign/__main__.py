"""The command `scripts/campaign`. Exit status: 0 if every test passed or was skipped, 1 if one did
not, 2 for a wrong command line.

With --bugs it plants each bug into the servers and runs the test that must find it: a pass is a
test that fails by one of the bug's checkers.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from campaign import table
from campaign.machine import missing
from campaign.report import as_json, as_page
from campaign.run import run_test
from campaign.values import Bug, CampaignTest
from campaign.verdict import Result


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="scripts/campaign", description=__doc__)
    options.add_argument("--list", action="store_true", help="the tests, or the bugs with --bugs")
    options.add_argument(
        "--test", action="append", default=[], metavar="NAME", help="or a pattern, such as 'log-*'"
    )
    options.add_argument(
        "--ci", action="store_true", help="tests of about an hour, others with each --seed"
    )
    options.add_argument("--bugs", action="store_true", help="plant bugs; --test names some")
    options.add_argument(
        "--minutes", type=float, default=0.5, help="under faults, of each test (0.5)"
    )
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", type=Path, metavar="FILE")
    options.add_argument("--report", type=Path, metavar="FILE", help="a page in Markdown")
    options.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="histories and logs of all tests"
    )
    return options


def chosen_from(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Those that a pattern names, in their order; all without a pattern."""
    return [
        name
        for name in names
        if not patterns or any(fnmatch.fnmatchcase(name, each) for each in patterns)
    ]


def show(tests: Sequence[CampaignTest]) -> None:
    for test in tests:
        reason = missing(test.fault.needs) or test.workload.lacks()
        notes = ["long"] if test.workload.is_long else []
        notes += [f"skipped here: {reason}"] if reason else []
        said = f" ({'; '.join(notes)})" if notes else ""
        sys.stdout.write(f"{test.name}: {test.workload.what}; {test.fault.what}{said}\n")
    hours = sum(test.minutes for test in tests) / 60
    sys.stdout.write(f"{len(tests)} tests, about {hours:.1f} hours on two cores\n")


def say(line: str) -> None:
    """Progress of a test."""
    sys.stderr.write(f"    {line}\n")


async def run_one(test: CampaignTest, chosen: argparse.Namespace, bug: Bug | None = None) -> Result:
    """In a folder that stays if it is to be kept, or if something was found."""
    name = test.name if bug is None else f"{test.name}+{bug.name.replace(' ', '-')}"
    base = chosen.keep or Path(tempfile.mkdtemp(prefix="campaign-"))
    folder = base / name
    folder.mkdir(parents=True)
    sys.stderr.write(f"{name} ...\n")
    result = await run_test(
        test,
        folder,
        seed=chosen.seed,
        seconds=chosen.minutes * 60,
        bug=bug,
        tell=say,
    )
    shutil.rmtree(folder / "images", ignore_errors=True)
    shutil.rmtree(folder / "cluster" / "volumes", ignore_errors=True)
    if bug is not None:
        result = found(bug, result)
    say(f"{result.verdict}, {result.seconds:.0f} s {result.reason}")
    for line in (*result.unmet, *result.anomalies):
        say(line)
    if chosen.keep is None and result.verdict in ("pass", "skipped"):
        shutil.rmtree(base)
    else:
        say(f"histories and logs: {folder}")
    return result


def found(bug: Bug, result: Result) -> Result:
    """The verdict on the campaign itself: whether it found the bug."""
    if result.verdict == "skipped":
        return result
    names = sorted(set(result.found) & set(bug.finds))
    is_found = bool(names)
    return replace(
        result,
        verdict="pass" if is_found else "fail",
        reason=f"{bug.name}: {'found by ' + ', '.join(names) if is_found else 'not found'}",
        anomalies=() if is_found else result.anomalies,
        unmet=() if is_found else result.unmet,
        found={} if is_found else result.found,
    )


async def run_all(chosen: argparse.Namespace) -> list[Result]:
    """SIGTERM ends the run as Ctrl-C does: with all that it started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if chosen.bugs:
        bugs = [table.bugs()[name] for name in chosen_from(known(chosen), chosen.test)]
        return [await run_one(table.tests()[bug.found_by], chosen, bug) for bug in bugs]
    names = chosen_from(known(chosen), chosen.test)
    return [await run_one(table.tests()[name], chosen) for name in names]


def known(chosen: argparse.Namespace) -> list[str]:
    """The names that --test may choose from."""
    if chosen.bugs:
        return list(table.bugs())
    return table.an_hour(chosen.seed) if chosen.ci else list(table.tests())


def main() -> int:
    chosen = parser().parse_args()
    names = chosen_from(known(chosen), chosen.test)
    if not names:
        sys.stderr.write(f"no such name: {', '.join(chosen.test)}; --list has all\n")
        return 2
    if chosen.list and chosen.bugs:
        for bug in table.bugs().values():
            sys.stdout.write(f"{bug.name}: {bug.what}; found by {bug.found_by}\n")
        return 0
    if chosen.list:
        show([table.tests()[name] for name in names])
        return 0
    results = asyncio.run(run_all(chosen))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(as_json(table.tests(), results), indent=1) + "\n")
    page = as_page(table.tests(), results)
    if chosen.report is not None:
        chosen.report.write_text(page)
    sys.stdout.write(page)
    return 0 if all(each.verdict in ("pass", "skipped") for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
