"""Fails if this tree takes over 10 % more CPU time a message than the last release, measured side
by side in one run.

`scripts/bench --guard` runs it, in CI after the tests. The release is the newest tag `v*` that this
commit descends from; in a clone without tags, the commit in `bench/peers/release_base`. Its tree is
exported, and both trees run in turns with the same interpreter and libraries. CPU time, of server
and client together, does not count waiting, and the least of all rounds counts, so other work on
the machine does little. What seems slower is measured again before it is called so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

import bare_exchange
from guard_verdict import RISE_MAX, Compared, compared
from rows import Row
from servers import PEERS, qmq
from session import Session, Times

ROOT: Final = Path(__file__).parents[2]
BASE_FILE: Final = Path(__file__).parent / "release_base"
PACKAGES: Final = ("", "replication", "ordering", "coordination", "spark")
WARM_S: Final = 0.5
TRIES: Final = 2
ALONE: Final = "one task awaits each send"
ROWS: Final = (
    Row(ALONE, "awaited"),
    Row("256 tasks await each send", "awaited", {"tasks": 256}),
    Row("publish, 100 B", "publish", {"each": True}),
    Row("backlog, one by one, 100 B", "publish", {"each": True}, consumers=1, is_backlog=True),
    Row("publish, 1 KB", "publish", {"each": True, "size": 1024}),
)

Rounds = dict[str, list[float]]
"""By row, microseconds of CPU time a message."""


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def release() -> str:
    """The release to compare with."""
    found = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD~"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() if found.returncode == 0 else BASE_FILE.read_text().split()[0]


def export(commit: str, folder: Path) -> None:
    """The tree of a commit."""
    with tempfile.TemporaryFile() as archive:
        subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=archive, check=True)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(folder, filter="data")


def environment(tree: Path) -> dict[str, str]:
    """The environment in which Python imports QMQ from a tree."""
    return {"PYTHONPATH": os.pathsep.join(str(tree / each) for each in PACKAGES)}


def measure(tree: Path, seconds: float, rounds: Rounds) -> None:
    """All rows once."""
    words = environment(tree)
    server = qmq(Path(), environment=words)
    try:
        session = Session(PEERS[0], server, Path(sys.executable), environment=words)
        for row in ROWS:
            figures = session.measure(row, Times(WARM_S, seconds))
            rounds.setdefault(row.name, []).append(figures["server, us"] + figures["clients, us"])
    finally:
        server.stop()


def compare(base: Path, runs: int, seconds: float) -> tuple[list[Compared], float]:
    """The comparison, and the CPU time of a bare exchange in the same rounds."""
    before: Rounds = {}
    now: Rounds = {}
    bare_us = []
    for _ in range(runs):
        measure(base, seconds, before)
        measure(ROOT, seconds, now)
        each = bare_exchange.measured(is_fast=False)
        bare_us.append(each.client_us + each.server_us)
    return compared(before, now), min(bare_us)


def main() -> int:
    options = argparse.ArgumentParser(prog="scripts/bench --guard", description=__doc__)
    options.add_argument("--base", default="", help="a commit or tag to compare with")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--seconds", type=float, default=1.0)
    chosen = options.parse_args()
    commit = chosen.base or release()
    folder = Path(tempfile.mkdtemp(prefix="qmq-guard-"))
    try:
        export(commit, folder)
        for _ in range(TRIES):
            found, bare_us = compare(folder, chosen.runs, chosen.seconds)
            for each in found:
                sys.stdout.write(
                    f"{each.row}: {each.base_us:.2f} us in {commit[:12]}, {each.new_us:.2f} "
                    f"us here, ratio {each.ratio:.2f}\n"
                )
            alone = next(each for each in found if each.row == ALONE)
            sys.stdout.write(
                f"a bare exchange of two asyncio protocols: {bare_us:.1f} us; "
                f"{ALONE}: {alone.base_us / bare_us:.1f} times that in {commit[:12]}, "
                f"{alone.new_us / bare_us:.1f} times here\n"
            )
            if not any(each.is_slower for each in found):
                return 0
            sys.stdout.write(f"more than {100 * RISE_MAX:.0f} % slower: measuring again\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(
        "this tree takes more CPU time a message than the release: profile it "
        "(docs/BENCH.md, 'The guard')\n"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
