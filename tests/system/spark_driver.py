"""A Spark driver in a separate process, with its JVM, and a way to kill both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A compiler and a collector of Java for short lives."""
ROOT = Path(__file__).resolve().parents[2]
END_S = 900.0
LOOK_S = 0.02
EXECUTOR, TASK, ENDED = "an executor", "a task's process", "it had ended"


class DriverProcess:
    """Python, and what it starts: one process group, killed as one, as when a machine goes."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.words = list(words)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin."""
        path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "spark"), os.environ.get("PYTHONPATH", "")])
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, *self.words],
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "JAVA_TOOL_OPTIONS": QUICK},
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL to all processes of the driver, and wait until they have ended."""
        process, self._process = self._process, None
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def kill_part(self, coin: Random) -> str:
        """Send SIGKILL to an executor, or to a Python process in which a task runs. Returns which, or ""; Spark repeats the tasks."""
        process = self._process
        found = _parts(process.pid) if process is not None else {}
        if not found:
            return ""
        kind = coin.choice(sorted(found))
        try:
            os.kill(coin.choice(found[kind]), signal.SIGKILL)
        except ProcessLookupError:
            return ""
        return kind

    def finish(self) -> int:
        """Wait until the process ends; return the exit status. Raises AssertionError if it does not end."""
        assert self._process is not None
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the driver did not end: {self.tail()}") from None

    @property
    def written(self) -> int:
        """The bytes of its output."""
        return self.log.stat().st_size if self.log.exists() else 0

    def said(self, since: int) -> str:
        """Its output since it had written so many bytes."""
        return self.log.read_bytes()[since:].decode(errors="replace")

    def tail(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-3000:]


def _parts(session: int) -> dict[str, list[int]]:
    """The executors of a session that have their own JVM, and the processes that PySpark's daemons forked for tasks, by kind."""
    parents: dict[int, int] = {}
    executors: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "cmdline").read_bytes() if int(fields[3]) == session else b""
        except (OSError, ValueError, IndexError):
            continue  # no process, or one that has just ended
        if b"pyspark.daemon" in words:
            parents[int(entry.name)] = int(fields[1])
        elif b"CoarseGrainedExecutorBackend" in words:
            executors.append(int(entry.name))
    forked = [pid for pid, parent in parents.items() if parent in parents]
    return {kind: found for kind, found in ((EXECUTOR, executors), (TASK, forked)) if found}


def kill_at_random(
    driver: DriverProcess,
    kills: int,
    coin: Random,
    progress: Callable[[], int],
    done: Callable[[str], None] = lambda _: None,
    parts: Callable[[], int] = lambda: 0,
) -> dict[str, int]:
    """Start it again and again, and kill it each time at another moment; which moments those were.

    Half of the deaths come some time behind the first sign of progress of that life, the others at any time, its start included. Before a
    death, `parts` says how many executors and processes of tasks are killed.
    """
    moments = {"while it started": 0, "while it worked": 0, ENDED: 0, TASK: 0, EXECUTOR: 0}
    for _ in range(kills):
        before = progress()
        driver.start()
        if coin.random() < 0.75:
            _until(lambda before=before: progress() > before or not driver.is_running)
            for _ in range(parts()):
                _pause(coin.uniform(0.0, 1.2))
                if kind := driver.kill_part(coin):
                    moments[kind] += 1
                    done(kind)
            _pause(coin.uniform(0.0, 2.0))
        else:
            _pause(coin.uniform(1.0, 9.0))
        moment = ENDED if not driver.is_running else "while it worked" if progress() > before else "while it started"
        driver.kill()
        moments[moment] += 1
        done(moment)
    return moments


def _pause(seconds: float) -> None:
    time.sleep(seconds)  # a random moment is the point


def _until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + END_S
    while not condition():
        if time.monotonic() > until:
            raise AssertionError("the driver made no progress")
        time.sleep(LOOK_S)
