"""Jobs replay or purge dead letters in the background. A job ends with the console or with the login.

Handled letters stay handled, and the rest waits in the queue: starting the same filter again continues there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from qmq.errors import QmqError

log = logging.getLogger("qmq.console")


@dataclass(slots=True, eq=False)
class ReplayJob:
    """`state` is running, done, stopped or failed; `count` is how many letters are done."""

    group: str
    verb: str
    command: str
    began_ms: int
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "running"
    count: int = 0
    failure: str = ""
    _task: asyncio.Task[None] | None = None

    def tell(self, count: int) -> None:
        """Set the number of finished letters."""
        self.count = count

    def start(self, work: Coroutine[Any, Any, int]) -> None:
        """Run the job as a task."""
        self._task = asyncio.create_task(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, int]) -> None:
        try:
            self.count = await work
            self.state = "done"
        except asyncio.CancelledError:
            self.state = "stopped"
            raise
        except Exception as failure:  # a job that nothing works on must not be shown as running
            self.state, self.failure = "failed", str(failure) if isinstance(failure, QmqError) else repr(failure)
            if not isinstance(failure, QmqError):
                log.exception("a job of the console failed: %s", self.command)

    async def stop(self) -> None:
        """Stop the job, if it still runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
