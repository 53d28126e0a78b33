"""A consumer of an ordered subject in a separate process, which a test can kill and stop.

    python -m system.ordered_consumer --server A --subject S --group G --name N --history FILE

It appends its deliveries to the history, which other processes write too (each line is appended whole), and closes cleanly on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from history import Recorder

import qmq
from system.ordered_workload import LEASE_MS, consume, reads_in_bulk

TESTS = Path(__file__).resolve().parents[1]
GRACE_S = 20.0


class ConsumerProcess:
    """One consumer. Each process of the consumer has its own name in the history: the incarnation."""

    def __init__(
        self, server: str, subject: str, group: str, name: str, history: Path, *, lease_ms: int = LEASE_MS, gate: str = ""
    ) -> None:
        self.name = name
        self.group = group
        self._words = [
            *("--server", server),
            *("--subject", subject),
            *("--group", group),
            *("--name", name),
            *("--history", str(history)),
            *("--lease-ms", str(lease_ms)),
            *("--gate", gate),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin a life."""
        path = os.pathsep.join(
            [str(TESTS), str(TESTS.parent / "examples"), str(TESTS.parent / "scripts"), os.environ.get("PYTHONPATH", "")]
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "system.ordered_consumer", *self._words],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )

    @property
    def is_alive(self) -> bool:
        """Whether the process exists, running or stopped."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: the consumer holds its lanes until their leases end, and does not notice."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the process does not end."""
        self._end(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._signal(number)
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def run(chosen: argparse.Namespace) -> None:
    """Consume until SIGTERM, or until the parent process ends."""
    with Recorder(chosen.history) as recorder:
        async with qmq.connect(chosen.server) as client:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            orphaned = asyncio.create_task(end_with_parent(task))
            await consume(
                client,
                recorder,
                chosen.subject,
                chosen.group,
                chosen.name,
                gate=chosen.gate,
                lease_ms=chosen.lease_ms,
                in_bulk=reads_in_bulk(chosen.name),
            )
            orphaned.cancel()


async def end_with_parent(task: asyncio.Task[None]) -> None:
    """Cancel the task when the parent process has ended, since no other process would end this one."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(1.0)
    task.cancel()


def main() -> int:
    """The command line; the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    for name in ("--server", "--subject", "--group", "--name"):
        options.add_argument(name, required=True)
    options.add_argument("--history", type=Path, required=True)
    options.add_argument("--lease-ms", type=int, default=LEASE_MS)
    options.add_argument("--gate", default="")
    try:
        asyncio.run(run(options.parse_args()))
    except asyncio.CancelledError:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
