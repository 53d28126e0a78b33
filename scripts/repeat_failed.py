"""Runs the failed tests of the last run once more, alone and with the same seed. Fails if one fails again, or if many failed.

    .venv/bin/python scripts/repeat_failed.py [--most N] [arguments of pytest]

For `.ci/run`: of 8,000 tests on real processes, one fails now and then because the machine was too slow for it. A defect fails many tests,
or fails again. Each test that passes here is named, since it is a defect too: of the test, or a rare one of QMQ.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
LAST_FAILED: Final = ROOT / ".pytest_cache/v/cache/lastfailed"
_GROUP: Final = re.compile(r"@[\w.-]+$")
"""What pytest-xdist appends to the id of a test in a group."""


def failed_tests(last_failed: Path = LAST_FAILED) -> list[str]:
    """Ids of tests, and files that could not be collected, in the words of pytest's command line."""
    return sorted({_GROUP.sub("", each) for each in json.loads(last_failed.read_text())}) if last_failed.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--most", type=int, default=5, metavar="N", help="how many failed tests run again; with more, the run has failed (default: 5)"
    )
    options, others = parser.parse_known_args()
    most: int = options.most
    failed = failed_tests()
    if not 0 < len(failed) <= most:
        return _say(f"{len(failed)} tests failed: at most {most} would run once more")
    _say("these tests failed, and run once more:", *failed)
    if subprocess.run([sys.executable, "-m", "pytest", *others, *failed], cwd=ROOT, check=False).returncode:
        return _say("tests failed twice")
    _say("these tests failed once and passed when they ran by themselves:", *failed)
    return 0


def _say(*lines: str) -> int:
    print(*lines, sep="\n  ", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
