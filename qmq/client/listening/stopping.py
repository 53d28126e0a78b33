"""How listeners stop, in two steps that are the same for all listeners of a client.

    wanted    take no more messages; unseen ones return to the group, those in progress are finished and acknowledged
    now       the grace period has ended, or a second stop was requested: handlers are cancelled, their messages handed back

Of SIGINT and SIGTERM while listeners run, the first signal asks them to stop, the second to stop immediately. Previous handlers are
restored afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

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


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def asked_by_signals(ask: Callable[[], None]) -> Iterator[None]:
    """For code inside the event loop. Where a loop cannot handle signals (outside the main thread, on Windows), signals keep their usual
    effect.
    """
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                found = signal.getsignal(each)
                try:
                    loop.add_signal_handler(each, ask)
                except NotImplementedError:
                    break
                before[each] = found
        yield
    finally:
        for each, found in before.items():
            loop.remove_signal_handler(each)
            signal.signal(each, found if found is not None else signal.SIG_DFL)


@contextmanager
def asked_in_main_thread(ask: Callable[[], None]) -> Iterator[None]:
    """For a thread that waits for an event loop in another thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(each, signal.signal(each, lambda *_: ask())) for each in _SIGNALS]
    try:
        yield
    finally:
        for each, found in before:
            signal.signal(each, found if found is not None else signal.SIG_DFL)
