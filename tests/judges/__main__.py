"""`scripts/judges NAME [CHECKOUT]`: run a suite, and write what it found into docs/JUDGES.md.
`scripts/judges --all`: run all, one after the other; checkouts are in the folder `QMQ_CHECKOUTS`.
Without arguments, fetch what suites need of PyPI.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from judges import page
from judges.runner import Report, checkout_in, fetch, judge, no_checkout
from judges.suite import Suite, Unusable
from judges.suites import SUITES

USAGE = f"usage: scripts/judges [--all | NAME [CHECKOUT]], where NAME is one of {', '.join(SUITES)}"
SHOWN_CHARS = 20_000


def main(arguments: list[str]) -> int:
    if arguments != ["--all"] and (
        len(arguments) > 2 or (arguments and arguments[0] not in SUITES)
    ):
        print(USAGE, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    if not arguments:
        return fetched()
    if arguments == ["--all"]:
        return every(os.environ.get("QMQ_CHECKOUTS"))
    return judged(SUITES[arguments[0]], Path(arguments[1]) if len(arguments) == 2 else None)


def fetched() -> int:
    try:
        for each in SUITES.values():
            fetch(each)
    except Unusable as why:
        print(f"not fetched: {why}", file=sys.stderr)
        return 2
    return 0


def every(checkouts: str | None) -> int:
    """Judge by all suites, but not by those that need a checkout and have none in this folder."""
    worst = 0
    for suite in SUITES.values():
        checkout = checkout_in(checkouts, suite)
        if suite.needs_checkout and checkout is None:
            print(f"{suite.name}: skipped: {no_checkout(suite)}")
        else:
            worst = max(worst, judged(suite, checkout))
    return worst


def judged(suite: Suite, checkout: Path | None) -> int:
    try:
        fetch(suite)
        report = judge(suite, checkout)
    except Unusable as why:
        print(f"{suite.name}: not judged: {why}", file=sys.stderr)
        return 2
    if not report.verdict.holds:
        print(report.output[-SHOWN_CHARS:])
    print(said(report))
    # With it some tests are run, such as `-k NAME`, and the page counts whole suites.
    if report.verdict.passed and not os.environ.get("PYTEST_ADDOPTS"):
        page.write(report)
    return 0 if report.verdict.holds else 1


def said(report: Report) -> str:
    """The counts, and the tests that do not do what is documented."""
    found = report.verdict
    lines = [
        f"{report.suite.name}, {report.source}: {len(found.passed)} passed, "
        f"{len(found.different)} fail and are documented, {len(found.failed)} fail and are not, "
        f"{len(found.skipped)} were skipped"
    ]
    lines += [f"fails, and is not documented: {each}" for each in found.failed]
    lines += [f"passes, and is documented as failing: {each}" for each in found.mended]
    lines += [f"is documented as failing, and did not run: {each}" for each in found.missing]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
