"""How listeners stop, in two steps that are the same for all listeners of a client.

wanted    take no more messages; unseen ones return to the group, those in progress are finished and acknowledged
now       the grace period has ended, or a second stop was requested: handlers are cancelled, their messages handed back
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger("qmq.client")


class Stop:
    """The two steps, as events. An event that is set stays set."""

    def __init__(self, grace_s: float, cancel_s: float) -> None:
        self.wanted = asyncio.Event()
        self.now = asyncio.Event()
        self._grace_s = grace_s
        self.cancel_s = cancel_s
        """How long a handler may take to end after it was cancelled."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Stop, with grace. Harmless to call again."""
        if not self.wanted.is_set():
            self.wanted.set()
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self.now.set)

    def again(self) -> None:
        """A stop was requested: the first request stops with grace, the second immediately."""
        if self.wanted.is_set():
            self.now.set()
        self.begin()

    def over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def wait_for_first(tasks: Iterable[asyncio.Task[Any]], event: asyncio.Event) -> None:
    """Wait until a task is done, or the event is set."""
    heard = asyncio.get_running_loop().create_task(event.wait())
    try:
        await asyncio.wait((heard, *tasks), return_when=asyncio.FIRST_COMPLETED)
    finally:
        heard.cancel()


async def finish(tasks: Iterable[asyncio.Task[Any]], stop: Stop, spoken: str) -> None:
    """Wait for the tasks until `stop.now`, then cancel them. Cancelling the caller means `now`."""
    left = {each for each in tasks if not each.done()}
    try:
        while left and not stop.now.is_set():
            await wait_for_first(left, stop.now)
            left = {each for each in left if not each.done()}
    except asyncio.CancelledError:
        stop.now.set()
        await cancel(left, stop, spoken)
        raise
    await cancel(left, stop, spoken)


async def cancel(tasks: Iterable[asyncio.Task[Any]], stop: Stop, spoken: str) -> None:
    """Cancel tasks and wait for them, for a limited time."""
    left = {each for each in tasks if not each.done()}
    for each in left:
        each.cancel()
    if left:
        _, stubborn = await asyncio.wait(left, timeout=stop.cancel_s)
        if stubborn:
            log.error("%s: %d handlers did not end after cancellation and are abandoned", spoken, len(stubborn))


def failure_of(tasks: Iterable[asyncio.Task[Any]]) -> BaseException | None:
    """The first failure of these tasks. All exceptions count as retrieved."""
    found = [each.exception() for each in tasks if each.done() and not each.cancelled()]
    return next((each for each in found if each is not None), None)
