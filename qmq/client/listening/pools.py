"""Runs a listener: of an unordered subject with a pool of workers, of an ordered one by the consumer's `run`.

A worker takes the next messages, handles them, and comes back for more.

    consumer ──take──▶ worker ──handle──▶ verdict        `concurrency` of these; no task for each message
       ▲                                    │
       └────────────────────────────────────┘

Rules:
* A worker is *idle* while it waits for messages: it may be cancelled then without loss. Otherwise it is handling messages.
* The end is the same for all causes (the application, a signal, a failed consumer, a cancelled task): idle workers are cancelled, unseen
  messages return to the group immediately, the others finish, the consumer leaves. Only then is an error raised.

The ordered consumer's `run` handles up to `concurrency` keys at a time. After `stop`, a message that comes to a worker is not begun, but
held until the others are finished; then the consumer puts it back, and leaves. The consumer alone would cancel handlers after half a lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final, Protocol

from qmq import limits
from qmq.client.consuming.consumer import Consumer
from qmq.client.consuming.message import Message, Messages
from qmq.client.consuming.ordered.consumer import OrderedConsumer
from qmq.client.consuming.ordered.message import OrderedMessage, OrderedMessages
from qmq.client.listening.message_handling import MessageHandling
from qmq.client.listening.stopping import Stop, cancel, failure_of, finish, wait_for_first

_WAIT: Final = timedelta(seconds=20)
_GLANCE: Final = timedelta(milliseconds=500)
"""How often a worker that must not be cancelled while it waits checks whether to stop."""
_TURNS: Final = 64
"""After this many handlers in a row that never awaited, other tasks get a turn."""


class WorkSource(Protocol):
    """Gives a worker its next messages."""

    may_cancel: bool
    """Whether `first` may be cancelled without loss."""

    def ready(self) -> Any:
        """Messages that are available without waiting, as `more` returns them; None if that is not known."""
        ...

    async def first(self) -> Any:
        """The next message, or something empty after a while. Raises the error that stopped the consumer."""
        ...

    async def more(self, found: Any) -> Any:
        """The found message and those that go with it."""
        ...


class Pool:
    """Workers on one consumer. The module describes them."""

    def __init__(
        self, consumer: Consumer | OrderedConsumer, source: WorkSource, work: Callable[[Any], Awaitable[None]], concurrency: int, stop: Stop
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
        turns = 0
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
            turns += 1
            if turns == _TURNS:
                turns = 0
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

    def __init__(self, consumer: Consumer, count: int, wait: timedelta, stop: Stop, *, is_most_once: bool) -> None:
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
                found = list(await self._consumer.pull(self._count, _GLANCE if self._is_most_once else _WAIT))
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
            while self._has_room(found, size) and (left_s := until_s - now_s()) > 0 and not self._stop.wanted.is_set():
                more = list(await self._consumer.pull(self._count - len(found), min(timedelta(seconds=left_s), _GLANCE)))
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
    def __init__(self, consumer: OrderedConsumer, handling: MessageHandling, concurrency: int, stop: Stop) -> None:
        self._consumer, self._handling = consumer, handling
        self._concurrency, self._stop = concurrency, stop
        self._unsettled = 0
        self._is_at_rest = asyncio.Event()
        self._is_at_rest.set()

    async def run(self) -> None:
        """Run until it is stopped. Raises the error that stopped the consumer."""
        loop = asyncio.get_running_loop()
        # Not the `run` of an intercepted consumer: here interceptors surround all of the handling, where they see how it ends.
        running = loop.create_task(OrderedConsumer.run(self._consumer, self._handle, concurrency=self._concurrency))
        try:
            await wait_for_first([running], self._stop.wanted)
        finally:
            self._stop.begin()
            at_rest = loop.create_task(self._is_at_rest.wait())
            try:
                await finish([at_rest], self._stop, self._consumer.name)
            finally:
                await cancel([running], self._stop, self._consumer.name)
                await self._consumer.close()
        failure = failure_of([running])
        if failure is not None:
            raise failure

    async def _handle(self, message: OrderedMessage) -> None:
        if self._stop.wanted.is_set():
            await asyncio.get_running_loop().create_future()  # until it is cancelled, which puts the message back
        self._unsettled += 1
        self._is_at_rest.clear()
        try:
            await self._handling.handle(message)
        finally:
            self._unsettled -= 1
            if not self._unsettled:
                self._is_at_rest.set()
