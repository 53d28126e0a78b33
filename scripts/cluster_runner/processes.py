"""Starts processes that outlive the command, and recognises them in later commands.

A pid is reused, so a process is identified by pid and start time (/proc/PID/stat, in clock ticks
since boot). Both are compared before any signal is sent. A service leads its own session, so a
pause or a kill also reaches its children, as for a container.

`posix_spawn` is used instead of `subprocess`, because it runs no Python code between fork and exec
(with gRPC loaded, that sometimes hangs or crashes the child), and because no object complains about
a process that is left running on purpose.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster_runner.errors import ClusterError

POLL_S: Final = 0.01
KILLED_S: Final = 10.0
"""A process that is alive this long after SIGKILL hangs in the kernel."""
PYTHON_IGNORES: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these, and an ignored signal is inherited."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, distinguished from a later one with the same pid."""

    pid: int
    started: int


_STATUSES: Final[dict[Process, int]] = {}
"""The kernel tells it once."""


def spawn(
    argv: Sequence[str], environment: Mapping[str, str], log: Path, *, dies_with_us: bool = False
) -> Process:
    """Start a command in its own session, with its output at the log's end."""
    if dies_with_us:
        argv = [shutil.which("setpriv") or "setpriv", "--pdeathsig", "KILL", "--", *argv]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    try:
        pid = os.posix_spawn(
            argv[0],
            list(argv),
            dict(environment),
            file_actions=actions,
            setsid=True,
            setsigdef=PYTHON_IGNORES,
        )
    except OSError as cause:
        raise ClusterError(f"{argv[0]} does not start: {cause.strerror}") from cause
    found = _stat(pid)
    assert found is not None, "a child that was not waited for has an entry"
    return Process(pid, found.started)


def state(process: Process) -> str:
    """'running', 'paused' or 'dead'."""
    found = _stat(process.pid)
    if found is None or found.started != process.started:
        return "dead"
    if found.letter in "ZX":
        with suppress(ChildProcessError):
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if pid:
                _STATUSES[process] = os.waitstatus_to_exitcode(status)
        return "dead"
    return "paused" if found.letter in "Tt" else "running"


def exit_status(process: Process) -> int | None:
    """How a child of this program ended: its status, or the signal's number, negative. None if it
    runs, or is another program's child.
    """
    if state(process) != "dead":
        return None
    # The kernel tells it when the last thread has ended, which may be later.
    until(lambda: state(process) == "dead" and _is_reaped(process), KILLED_S)
    return _STATUSES.get(process)


def _is_reaped(process: Process) -> bool:
    return process in _STATUSES or _stat(process.pid) is None


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to the process only, if it is still the same one."""
    if state(process) != "dead":
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def kill(process: Process) -> None:
    """SIGKILL to the process and its session; returns when they are gone."""
    doomed = [process, *members(process)]
    for each in doomed:
        send(each, signal.SIGKILL)
    if not until(lambda: all(state(each) == "dead" for each in doomed), KILLED_S):
        raise ClusterError(f"process {process.pid} does not die")


def stop(processes: Mapping[Process, float]) -> list[Process]:
    """Send SIGTERM, then SIGKILL to processes that still run after their grace period (in seconds).
    Returns the killed processes.
    """
    begin = time.monotonic()
    families = {each: members(each) for each in processes}
    for each in processes:
        send(each, signal.SIGTERM)
        send(each, signal.SIGCONT)  # a stopped process gets no other signal
    stubborn = []
    for each, grace_s in processes.items():
        if not _is_gone(each, grace_s - (time.monotonic() - begin)):
            stubborn.append(each)
        for one in (each, *families[each]):
            kill(one)
    return stubborn


def pause(process: Process) -> None:
    """SIGSTOP to the process and its session; returns when the process stands."""
    for each in (process, *members(process)):
        send(each, signal.SIGSTOP)
    until(lambda: state(process) != "running", KILLED_S)


def resume(process: Process) -> None:
    """SIGCONT to the process and its session; returns when the process runs."""
    for each in (process, *members(process)):
        send(each, signal.SIGCONT)
    until(lambda: state(process) != "paused", KILLED_S)


def members(process: Process) -> list[Process]:
    """The others in the session that the process leads."""
    if state(process) == "dead":
        return []
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = [(pid, _stat(pid)) for pid in pids if pid != process.pid]
    return [
        Process(pid, each.started)
        for pid, each in found
        if each is not None and each.session == process.pid
    ]


def until(condition: Callable[[], bool], within_s: float) -> bool:
    """Wait for a condition. Returns its last value."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _is_gone(process: Process, within_s: float) -> bool:
    return until(lambda: state(process) == "dead", within_s)


@dataclass(frozen=True, slots=True)
class _Stat:
    letter: str
    session: int
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and brackets
    return _Stat(fields[0], int(fields[3]), int(fields[19]))
