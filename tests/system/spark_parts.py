"""The processes of Spark below a process: drivers, executors, and those in which tasks run."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

DRIVER: Final = "a driver"
EXECUTOR: Final = "an executor"
TASK: Final = "a task's process"
DRIVERS: Final = (b"campaign.spark_driver", b"pyspark_qmq.jobs.archive")
"""Programs of drivers."""


def spark_parts(root: int) -> dict[str, list[int]]:
    """Process ids by kind, of those kinds that there are. An executor has its own JVM; PySpark's
    daemon forks a process for each task that runs.
    """
    family = _families()
    found: defaultdict[str, list[int]] = defaultdict(list)
    daemons = set()
    for pid in descendants(root, family):
        words = _words(pid).split(b"\0")
        if b"-m" in words and set(DRIVERS) & set(words):
            found[DRIVER].append(pid)
        elif any(each.endswith(b"CoarseGrainedExecutorBackend") for each in words):
            found[EXECUTOR].append(pid)
        elif b"pyspark.daemon" in words:
            daemons.add(pid)
    tasks = [child for pid in daemons for child in family.get(pid, ()) if child in daemons]
    return {**found, **({TASK: tasks} if tasks else {})}


def descendants(root: int, family: dict[int, list[int]] | None = None) -> Iterator[int]:
    """The processes below a process, each after its parent."""
    family = _families() if family is None else family
    for child in family.get(root, ()):
        yield child
        yield from descendants(child, family)


def kill_tree(root: int) -> int:
    """SIGKILL to a process and all below it; to how many."""
    doomed = [root, *descendants(root)]
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(doomed)


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that nobody waits for does not."""
    found = _stat(pid)
    return found is not None and found[0] not in "ZX"


def _families() -> dict[int, list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            found[int(stat[1])].append(int(entry.name))
    return dict(found)


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
