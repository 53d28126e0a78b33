"""Fuzz the targets of tests/fuzz, each in its own process, for a share of the time. An input that
reaches new code is kept in tests/fuzz/corpus, unless a shorter input reaches the same code;
counts.json there has the number of inputs. If an input ends a target with anything but a typed
error, the script prints the input and exits with 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fuzz.targets import TARGETS, add_count, counts, inputs_of, keep, seeds_of

ONE_TARGET: Final = Path(__file__).with_name("fuzz_target.py")
INPUT_BYTES_MAX: Final = 2_048
COUNTING: Final = Lock()


def main() -> int:
    """Exit code 0: no target ended with anything but a typed error."""
    parser = argparse.ArgumentParser(description=__doc__, prog="tools/run fuzz")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10,
        help="how long in all, with all workers (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="targets at one time (default: %(default)s)"
    )
    parser.add_argument(
        "--target", action="append", choices=list(TARGETS), help="only this target; may be repeated"
    )
    options = parser.parse_args()
    names = options.target or list(TARGETS)
    share_s = max(int(options.minutes * 60 * options.workers / len(names)), 1)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        results = list(pool.map(lambda name: fuzz(name, share_s, Path(folder) / name), names))
    tried, failed = sum(each for each, _ in results), sum(not is_well for _, is_well in results)
    in_all = sum(counts().values())
    print(
        f"{tried:,} inputs in {time.monotonic() - begun:,.0f} s, {in_all:,} so far; {failed} "
        f"of {len(names)} targets failed"
    )
    return 1 if failed else 0


def fuzz(name: str, seconds: int, folder: Path) -> tuple[int, bool]:
    """Fuzz a target. Returns the number of inputs, and whether the target accepted all of them.
    Replaces the corpus by the inputs that are kept.
    """
    grown, least, found = folder / "grown", folder / "least", folder / "found"
    for each in (grown, least, found):
        each.mkdir(parents=True)
    for number, data in enumerate(inputs_of(name) + seeds_of(name)):
        (grown / str(number)).write_bytes(data)
    said = run(
        name,
        grown,
        f"-max_total_time={seconds}",
        f"-max_len={INPUT_BYTES_MAX}",
        "-print_final_stats=1",
        f"-artifact_prefix={found}/",
    )
    counted = re.search(r"number_of_executed_units: (\d+)", said)
    crashes = sorted(found.iterdir())
    for each in crashes:
        print(
            (
                f"{name} fails on {each.read_bytes()!r}:\n"
                f"{said[said.find('Uncaught Python exception') :][:3_000]}"
            ),
            flush=True,
        )
    run(name, least, grown, "-merge=1", f"-max_len={INPUT_BYTES_MAX}")
    kept = [each.read_bytes() for each in least.iterdir()]
    keep(name, kept or [each.read_bytes() for each in grown.iterdir()])
    tried = int(counted[1]) if counted else 0
    with COUNTING:
        add_count(name, tried)
    print(f"{name}: {tried:,} inputs, {len(kept)} kept", flush=True)
    return tried, not crashes and counted is not None


def run(name: str, *arguments: object) -> str:
    """Run libFuzzer. Returns its output."""
    command = [sys.executable, str(ONE_TARGET), name, *map(str, arguments)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, check=False
    ).stderr


if __name__ == "__main__":
    sys.exit(main())
