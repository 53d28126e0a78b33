"""The command `scripts/campaign emulator`: see `campaign.emulator`. Exit status: 0 for a pass, 1
otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

from campaign import emulator
from campaign.emulator import TEST, CannotRun, say
from campaign.report import as_json, as_page
from campaign.table import checkers


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="scripts/campaign emulator", description=emulator.__doc__
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--kills", type=int, default=2)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--lies", action="store_true", help="the disk ignores flushes: must fail")
    options.add_argument("--json", type=Path, metavar="FILE")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="history, consoles and disk")
    return options


def main() -> int:
    chosen = parser().parse_args()
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="emulator-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = asyncio.run(
            emulator.run(
                folder.resolve(), checkers(), kills=chosen.kills, seed=chosen.seed, lies=chosen.lies
            )
        )
    except CannotRun as failure:
        say(str(failure))
        return 1
    tests = {TEST.name: TEST}
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(as_json(tests, [result]), indent=1) + "\n")
    sys.stdout.write(as_page(tests, [result]))
    if chosen.keep is None and result.verdict == "pass":
        shutil.rmtree(folder)
    else:
        say(f"history, consoles and disk: {folder}")
    return 0 if result.verdict == "pass" else 1


if __name__ == "__main__":
    sys.exit(main())
