"""The client without asyncio, for scripts: the same names, each call waits.

    with qmq.blocking.connect("localhost:20880") as mq:
        mq.send("flight.departed", b"...", key="N14228")
        for message in mq.consumer("flight.departed", group="ops"):
            ...

An event loop runs in a thread of its own; any thread may call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from qmq.client.client import Client
from qmq.client.consumer import Consumer
from qmq.client.dues import When
from qmq.client.message import Message, Messages, Settler, Slice
from qmq.client.receipts import Receipt, Receipts
from qmq.errors import ClientClosed

if TYPE_CHECKING:
    from qmq.client.delayed import Delayed
    from qmq.client.delayed_message import DelayedMessage, DelayStats

_R = TypeVar("_R")


class BlockingClient:
    """See `qmq.Client`."""

    def __init__(self, addresses: str | Sequence[str], *, create_subjects: bool = True) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="qmq-client", daemon=True)
        self._client = Client(addresses, create_subjects=create_subjects)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _R]) -> _R:
        """Run a coroutine of the asyncio client in the thread, and wait for it. Raises ClientClosed."""
        if self._loop.is_closed():
            work.close()
            raise ClientClosed("the client is closed: make a new one with qmq.blocking.connect()")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def send(
        self, subject: str, body: bytes, *, key: str | bytes | None = None, tags: Iterable[str] | None = None,
        headers: Mapping[str, str | bytes] | None = None, delay: timedelta | None = None, at: datetime | None = None,
        cron: str | None = None, zone: str | None = None,
    ) -> Receipt:  # fmt: skip
        """See `qmq.Client.send`."""
        return self.run(
            self._client.send(subject, body, key=key, tags=tags, headers=headers, delay=delay, at=at, cron=cron, zone=zone)
        )

    def send_many(
        self, subject: str, bodies: Sequence[bytes], *, keys: Sequence[str | bytes | None] | None = None,
        tags: Sequence[Iterable[str]] | None = None, headers: Sequence[Mapping[str, str | bytes]] | None = None,
        delays: Sequence[timedelta] | timedelta | None = None, ats: Sequence[datetime] | datetime | None = None,
    ) -> Receipts:  # fmt: skip
        """See `qmq.Client.send_many`."""
        return self.run(self._client.send_many(subject, bodies, keys=keys, tags=tags, headers=headers, delays=delays, ats=ats))

    @property
    def delayed(self) -> BlockingDelayed:
        """See `qmq.Client.delayed`."""
        return BlockingDelayed(self, self._client.delayed)

    def consumer(self, subject: str, group: str, **options: Any) -> BlockingConsumer:
        """See `qmq.Client.consumer`."""

        async def make() -> Consumer:
            return self._client.consumer(subject, group, **options)

        return BlockingConsumer(self, self.run(make()))

    def close(self) -> None:
        """See `qmq.Client.close`."""
        if self._loop.is_closed():
            return
        try:
            self.run(self._client.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlockingDelayed:
    """See `qmq.client.delayed.Delayed`."""

    def __init__(self, client: BlockingClient, delayed: Delayed) -> None:
        self._client = client
        self._delayed = delayed

    def cancel(self, id: str) -> DelayedMessage:
        """See `Delayed.cancel`."""
        return self._client.run(self._delayed.cancel(id))

    def move(self, id: str, when: When) -> DelayedMessage:
        """See `Delayed.move`."""
        return self._client.run(self._delayed.move(id, when))

    def show(self, id: str) -> DelayedMessage:
        """See `Delayed.show`."""
        return self._client.run(self._delayed.show(id))

    def list(
        self, subject: str = "", start: datetime | None = None, end: datetime | None = None, limit: int | None = None
    ) -> Iterator[DelayedMessage]:
        """See `Delayed.list`."""
        found = self._delayed.list(subject, start, end, limit)

        async def following() -> DelayedMessage | None:
            return await anext(found, None)

        while (message := self._client.run(following())) is not None:
            yield message

    def stats(self) -> DelayStats:
        """See `Delayed.stats`."""
        return self._client.run(self._delayed.stats())


class BlockingConsumer:
    """See `qmq.Consumer`."""

    def __init__(self, client: BlockingClient, consumer: Consumer) -> None:
        self._client = client
        self._consumer = consumer

    def _wrap(self, settler: Settler) -> Settler:
        return _FromAnyThread(self._client, settler)

    def __iter__(self) -> Iterator[Message]:
        while True:
            message = self._client.run(self._consumer.__anext__())
            message.settle_through(self._wrap)
            yield message

    def pull(self, messages_max: int = 1000, wait: timedelta = timedelta(seconds=20)) -> Messages:
        """See `qmq.Consumer.pull`."""
        found = self._client.run(self._consumer.pull(messages_max, wait))
        found.settle_through(self._wrap)
        return found

    def ack(self, messages: Message | Messages) -> None:
        """Acknowledge, and wait until the broker has it. Raises StaleDelivery."""
        self._client.run(messages.ack())

    def nack(self, messages: Message | Messages, delay: timedelta | None = None) -> None:
        """Have them handed out again."""
        messages.nack(delay)

    def close(self) -> None:
        """See `qmq.Consumer.close`."""
        self._client.run(self._consumer.close())

    def __enter__(self) -> BlockingConsumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _FromAnyThread:
    """Carries verdicts from any thread into the loop's."""

    def __init__(self, client: BlockingClient, settler: Settler) -> None:
        self._client = client
        self._settler = settler
        self.subject = settler.subject
        self.broker_group = settler.broker_group

    def settle(self, first: int, last: int, verdict: int, delay: int = 0) -> None:
        async def say() -> None:
            self._settler.settle(first, last, verdict, delay)

        self._client.run(say())

    def nack(self, part: Slice, delay: timedelta | None) -> None:
        async def say() -> None:
            self._settler.nack(part, delay)

        self._client.run(say())

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        await self._settler.settle_now(first, last, verdict)


def connect(addresses: str | Sequence[str] = "localhost:20880", *, create_subjects: bool = True) -> BlockingClient:
    """See `qmq.connect`."""
    return BlockingClient(addresses, create_subjects=create_subjects)
