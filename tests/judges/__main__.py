"""`scripts/judges NAME [CHECKOUT]`: run a suite, and write what it found into docs/JUDGES.md.
Without arguments, fetch what suites need of PyPI.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from judges import page
from judges.runner import Report, fetch, judge
from judges.suite import Unusable
from judges.suites import SUITES

USAGE = f"usage: scripts/judges [NAME [CHECKOUT]], where NAME is one of {', '.join(SUITES)}"
SHOWN_CHARS = 20_000


def main(arguments: list[str]) -> int:
    if len(arguments) > 2 or (arguments and arguments[0] not in SUITES):
        print(USAGE, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    try:
        if not arguments:
            for each in SUITES.values():
                fetch(each)
            return 0
        suite = SUITES[arguments[0]]
        fetch(suite)
        report = judge(suite, Path(arguments[1]) if len(arguments) == 2 else None)
    except Unusable as why:
        print(f"not judged: {why}", file=sys.stderr)
        return 2
    if not report.verdict.holds:
        print(report.output[-SHOWN_CHARS:])
    print(said(report))
    if report.verdict.passed:
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
