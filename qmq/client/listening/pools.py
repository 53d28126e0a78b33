"""Runs a listener: of an unordered subject with a pool of workers, of an ordered one by the
consumer's `run`.

A worker takes the next messages, handles them, and comes back for more.

    consumer ──take──▶ worker ──handle──▶ verdict    `concurrency` of these; no task for each
       ▲                                    │        message
       └────────────────────────────────────┘

Rules:
* A worker is *idle* while it waits for messages: it may be cancelled then without loss. Otherwise
  it is handling messages.
* The end is the same for all causes (the application, a signal, a failed consumer, a cancelled
  task): idle workers are cancelled, unseen messages return to the group immediately, the others
  finish, the consumer leaves. Only then is an error raised.

The ordered consumer's `run` handles up to `concurrency` keys at a time. After `stop`, a message
that comes to a worker is not begun, but held until the others are finished; then the consumer puts
it back, and leaves. The consumer alone would cancel handlers after half a lease.

Listeners stop in two steps (`Stop`), which are the same for all listeners of a client:

    wanted    take no more messages; unseen ones return to the group, those in progress are finished
              and acknowledged
    now       the grace period has ended, or a second stop was requested: handlers are cancelled,
              their messages handed back

Of SIGINT and SIGTERM while listeners run, the first signal asks them to stop, the second to stop
immediately. Previous handlers are restored afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Protocol

from qmq import limits
from qmq.client.consuming.consumer import Consumer
from qmq.client.consuming.message import Message, Messages
from qmq.client.consuming.ordered.consumer import OrderedConsumer
from qmq.client.consuming.ordered.message import OrderedMessage, OrderedMessages
from qmq.client.listening.message_handling import MessageHandling

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


async def finish(tasks: Iterable[asyncio.Task[Any]], stop: Stop, name: str) -> None:
    """Wait for the tasks until `stop.now`, then cancel them. Cancelling the caller means `now`."""
    left = {each for each in tasks if not each.done()}
    try:
        while left and not stop.now.is_set():
            await wait_for_first(left, stop.now)
            left = {each for each in left if not each.done()}
    except asyncio.CancelledError:
        stop.now.set()
        await cancel(left, stop, name)
        raise
    await cancel(left, stop, name)


async def cancel(tasks: Iterable[asyncio.Task[Any]], stop: Stop, name: str) -> None:
    """Cancel tasks and wait for them, for a limited time."""
    left = {each for each in tasks if not each.done()}
    for each in left:
        each.cancel()
    if left:
        _, stubborn = await asyncio.wait(left, timeout=stop.cancel_s)
        if stubborn:
            log.error(
                "%s: %d handlers did not end after cancellation and are abandoned",
                name,
                len(stubborn),
            )


def failure_of(tasks: Iterable[asyncio.Task[Any]]) -> BaseException | None:
    """The first failure of these tasks. All exceptions count as retrieved."""
    found = [each.exception() for each in tasks if each.done() and not each.cancelled()]
    return next((each for each in found if each is not None), None)


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def asked_by_signals(ask: Callable[[], None]) -> Iterator[None]:
    """For code inside the event loop. Where a loop cannot handle signals (outside the main thread,
    on Windows), signals keep their usual effect.
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


_WAIT: Final = timedelta(seconds=20)
_GLANCE: Final = timedelta(milliseconds=500)
"""How often a worker that must not be cancelled while it waits checks whether to stop."""
_HANDLERS_IN_A_ROW: Final = 64
"""After this many handlers in a row that never awaited, other tasks get a turn."""


class WorkSource(Protocol):
    """Gives a worker its next messages."""

    may_cancel: bool
    """Whether `first` may be cancelled without loss."""

    def ready(self) -> Any:
        """Messages that are available without waiting, as `more` returns them;
        None if that is not known.
        """
        ...

    async def first(self) -> Any:
        """The next message, or something empty after a while.
        Raises the error that stopped the consumer.
        """
        ...

    async def more(self, found: Any) -> Any:
        """The found message and those that go with it."""
        ...


class Pool:
    """Workers on one consumer. The module describes them."""

    def __init__(
        self,
        consumer: Consumer | OrderedConsumer,
        source: WorkSource,
        work: Callable[[Any], Awaitable[None]],
        concurrency: int,
        stop: Stop,
    ) -> None:
        self._consumer, self._source, self._work = consumer, source, work
        self._concurrency, self._stop = concurrency, stop
        self._idle: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until it is stopped. Raises the error that stopped the consumer."""
        loop = asyncio.get_running_loop()
        workers = [loop.create_task(self._run_worker()) for _ in range(self._concurrency)]
        try:
            await wait_for_first(workers, self._stop.wanted)
        finally:
            self._stop.begin()
            for each in self._idle:
                each.cancel()
            if isinstance(self._consumer, Consumer):
                self._consumer.drain()
            try:
                await finish(workers, self._stop, self._consumer.name)
            finally:
                await self._consumer.close()
        failure = failure_of(workers)
        if failure is not None:
            raise failure

    async def _run_worker(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        source, work, idle, wanted = self._source, self._work, self._idle, self._stop.wanted
        handled = 0
        while not wanted.is_set():
            ready = source.ready()
            if ready is None:
                if source.may_cancel:
                    idle.add(task)
                found = await source.first()
                idle.discard(task)
                if not found:
                    continue
                ready = await source.more(found)
            await work(ready)
            handled += 1
            if handled == _HANDLERS_IN_A_ROW:
                handled = 0
                await asyncio.sleep(0)


class Singles:
    """Single messages of an unordered subject."""

    def __init__(self, consumer: Consumer, *, is_most_once: bool) -> None:
        self._consumer = consumer
        self.ready: Callable[[], Message | None] = consumer.ready.take
        self._is_most_once = is_most_once
        self._wait = _GLANCE if is_most_once else _WAIT
        self.may_cancel = not is_most_once

    async def first(self) -> Messages:
        return await self._consumer.pull(1, self._wait)

    async def more(self, found: Messages) -> Message:
        message = found.slices[0].message(0)
        message.is_settled = self._is_most_once
        return message


class Batches:
    """Batches of messages; one worker gathers at a time, so that batches fill."""

    def __init__(
        self, consumer: Consumer, count: int, wait: timedelta, stop: Stop, *, is_most_once: bool
    ) -> None:
        self._consumer = consumer
        self._count, self._wait_s, self._stop = count, wait.total_seconds(), stop
        self._is_most_once = is_most_once
        self._is_free = asyncio.Lock()
        self.may_cancel = not is_most_once

    def ready(self) -> None:
        return None

    async def first(self) -> list[Message]:
        await self._is_free.acquire()
        try:
            if self._stop.wanted.is_set():
                found: list[Message] = []
            else:
                found = list(
                    await self._consumer.pull(self._count, _GLANCE if self._is_most_once else _WAIT)
                )
        except BaseException:
            self._is_free.release()
            raise
        if not found:
            self._is_free.release()
        return found

    async def more(self, found: list[Message]) -> list[Message]:
        try:
            now_s = asyncio.get_running_loop().time
            until_s = now_s() + self._wait_s
            size = _bytes_of(found)
            while (
                self._has_room(found, size)
                and (left_s := until_s - now_s()) > 0
                and not self._stop.wanted.is_set()
            ):
                more = list(
                    await self._consumer.pull(
                        self._count - len(found), min(timedelta(seconds=left_s), _GLANCE)
                    )
                )
                size += _bytes_of(more)
                found += more
        finally:
            self._is_free.release()
        for each in found:
            each.is_settled = self._is_most_once
        return found

    def _has_room(self, found: list[Message], size: int) -> bool:
        return len(found) < self._count and size < limits.PULL_BYTES_MAX


def _bytes_of(messages: list[Message]) -> int:
    return sum([len(each.body) for each in messages])


class Runs:
    """Runs of messages of one lane of an ordered subject."""

    may_cancel = True

    def __init__(self, consumer: OrderedConsumer, count: int) -> None:
        self._consumer, self._count = consumer, count

    def ready(self) -> None:
        return None

    async def first(self) -> OrderedMessages:
        return await self._consumer.pull(self._count, _WAIT)

    async def more(self, found: OrderedMessages) -> OrderedMessages:
        return found


class OrderedPool:
    def __init__(
        self, consumer: OrderedConsumer, handling: MessageHandling, concurrency: int, stop: Stop
    ) -> None:
        self._consumer, self._handling = consumer, handling
        self._concurrency, self._stop = concurrency, stop
        self._unsettled = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def run(self) -> None:
        """Run until it is stopped. Raises the error that stopped the consumer."""
        loop = asyncio.get_running_loop()
        # Not the `run` of an intercepted consumer: here interceptors surround all of the handling,
        # where they see how it ends.
        running = loop.create_task(
            OrderedConsumer.run(self._consumer, self._handle, concurrency=self._concurrency)
        )
        try:
            await wait_for_first([running], self._stop.wanted)
        finally:
            self._stop.begin()
            idle = loop.create_task(self._is_idle.wait())
            try:
                await finish([idle], self._stop, self._consumer.name)
            finally:
                await cancel([running], self._stop, self._consumer.name)
                await self._consumer.close()
        failure = failure_of([running])
        if failure is not None:
            raise failure

    async def _handle(self, message: OrderedMessage) -> None:
        if self._stop.wanted.is_set():
            await (
                asyncio.get_running_loop().create_future()
            )  # until it is cancelled, which puts the message back
        self._unsettled += 1
        self._is_idle.clear()
        try:
            await self._handling.handle(message)
        finally:
            self._unsettled -= 1
            if not self._unsettled:
                self._is_idle.set()
