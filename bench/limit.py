"""Limits the CPU time of processes: a watcher stops a process (SIGSTOP) while it has used more than its part of a core.

A machine with few cores shows in this way what more processes give as long as there are cores for them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

TICK_S: Final = 0.005
BURST_S: Final = 0.02
"""The CPU time that a limited process may use at once after it has rested."""


@dataclass(slots=True)
class Allowance:
    """The CPU time that a limited process may still use: it gains `core_part` of each second, up to BURST_S. Pure."""

    core_part: float
    now: float
    used_s: float
    left_s: float = 0.0

    def may_run(self, now: float, used_s: float) -> bool:
        """Whether the process may run on, if it has used so much CPU time since its start."""
        self.left_s = min(self.left_s + (now - self.now) * self.core_part, BURST_S) - (used_s - self.used_s)
        self.now, self.used_s = now, used_s
        return self.left_s > 0


def cpu_s(pid: int) -> float:
    """CPU time of a process with all its threads, by the kernel's clock of that process, in nanoseconds (clock_getcpuclockid)."""
    return time.clock_gettime(~pid << 3 | 2)


@contextmanager
def limited(pids: Sequence[int], core_part: float) -> Iterator[None]:
    """Let each process use only a part of a core."""
    over = threading.Event()

    def watch() -> None:
        allowances = {pid: Allowance(core_part, time.monotonic(), cpu_s(pid)) for pid in pids}
        while not over.wait(TICK_S):
            for pid, allowance in allowances.items():
                os.kill(pid, signal.SIGCONT if allowance.may_run(time.monotonic(), cpu_s(pid)) else signal.SIGSTOP)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
