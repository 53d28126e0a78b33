"""The hand-written part of the blocking client: the event loop's thread, and what has another shape without asyncio.

`qmq/blocking.py` and `qmq/blocking_parts.py` are made from the asyncio client (scripts/generate_blocking.py). Their classes derive
from these.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from qmq.client.client import Client
from qmq.client.consumer import Consumer
from qmq.client.interceptors import Chain
from qmq.client.listening.listener_options import ListenerOptions
from qmq.client.listening.process_signals import asked_in_main_thread
from qmq.client.message import Message, Messages, Settler, Slice
from qmq.client.outbox_entry import GRACE
from qmq.errors import ClientClosed
from qmq.wire.settle_payloads import Verdict

if TYPE_CHECKING:
    from qmq.sql.outbox import Outbox
    from qmq.sql.outbox_blocking import BlockingOutbox

_R = TypeVar("_R")
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class LoopThread:
    """The event loop of an asyncio client, for callers in other threads: in a thread that it starts, or in one of the application."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is the application's, which starts and stops it. Without one there is a new loop; `start` begins its thread."""
        self.is_own = loop is None
        self.loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="qmq-client", daemon=True)

    def start(self) -> None:
        """Begin the loop's own thread."""
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _R]) -> _R:
        """Run a coroutine in the loop, and wait for it. Raises what it raises, ClientClosed."""
        if self.loop.is_closed():
            work.close()
            raise ClientClosed("the client is closed: make a new one with qmq.blocking.connect()")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], _R]) -> _R:
        """Call a function in the loop's thread, and wait for it. Raises what it raises, ClientClosed."""

        async def called() -> _R:
            return function()

        return self.run(called())

    def iterate(self, items: AsyncIterator[_R]) -> Iterator[_R]:
        """The items, each fetched when it is asked for."""
        end = object()

        async def following() -> object:
            return await anext(items, end)

        while (item := self.run(following())) is not end:
            yield item  # type: ignore[misc]

    def stop(self) -> None:
        """End the loop's own thread, and close the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class BlockingPart:
    """A part of a blocking client."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread


class BlockingClientBase(BlockingPart):
    def __init__(self, client: Client, thread: LoopThread) -> None:
        super().__init__(thread)
        self._client = client

    @overload
    def run(self) -> None: ...

    @overload
    def run(self, work: Coroutine[Any, Any, _R]) -> _R: ...

    def run(self, work: Coroutine[Any, Any, _R] | None = None) -> _R | None:
        """Run the listeners until they are stopped: see `qmq.Client.run`. Or run a coroutine of the asyncio client in the loop's thread,
        and wait for it. Raises ClientClosed.
        """
        if work is not None:
            return self._thread.run(work)
        with asked_in_main_thread(self.stop):
            return self._thread.run(self._client.run())

    @property
    def interceptors(self) -> Chain:
        """See `qmq.Client.interceptors`. They are called in the loop's thread for what is sent, in the caller's for what is handled."""
        return self._client.interceptors

    def outbox(self, connection: Any, *, table: str = "qmq_outbox", grace: timedelta = GRACE) -> BlockingOutbox:
        """See `qmq.Client.outbox`; on sync connections, sessions and engines: `with mq.outbox(connection) as box: box.send(...)`."""
        made: Outbox = self._thread.call(lambda: self._client.outbox(connection, table=table, grace=grace))
        from qmq.sql.outbox_blocking import BlockingOutbox  # after the check whether the client can be imported

        return BlockingOutbox(made, self._thread.run)

    def listener(self, subject: str, group: str, **options: Unpack[ListenerOptions]) -> Callable[[_Handler], _Handler]:
        """See `qmq.Client.listener`. Plain functions run in threads, and their context's `mq` is a blocking client."""

        def register(handler: _Handler) -> _Handler:
            self.listen(subject, handler, group, **options)
            return handler

        return register

    def listen(self, subject: str, handler: Callable[..., Any], group: str, **options: Unpack[ListenerOptions]) -> None:
        """See `qmq.Client.listen`."""
        self._thread.call(lambda: self._client.listen(subject, handler, group, **options))

    def provide(self, kind: type[Any], factory: Callable[..., Any]) -> None:
        """See `qmq.Client.provide`."""
        self._client.provide(kind, factory)

    def stop(self) -> None:
        """See `qmq.Client.stop`. From any thread."""
        self._thread.loop.call_soon_threadsafe(self._client.stop)

    def close(self) -> None:
        """See `qmq.Client.close`. A client beside an asyncio client is closed with that one, and not here."""
        if not self._thread.is_own or self._thread.loop.is_closed():
            return
        try:
            self._thread.run(self._client.close())
        finally:
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class BlockingConsumerBase(BlockingPart):
    def __init__(self, thread: LoopThread, consumer: Consumer, interceptors: Chain) -> None:
        super().__init__(thread)
        self._consumer = consumer
        self._interceptors = interceptors

    def _wrap(self, settler: Settler) -> Settler:
        return _FromAnyThread(self._thread, settler)

    def __iter__(self) -> Iterator[Message]:
        while True:
            # Not the loop's own interception: a message is handled in the caller's thread and context.
            message = self._thread.run(Consumer.__anext__(self._consumer))
            message.settle_through(self._wrap)
            with self._interceptors.handling(message, self._consumer.group):
                yield message

    def pull(self, messages_max: int = 1000, wait: timedelta = timedelta(seconds=20)) -> Messages:
        """See `qmq.Consumer.pull`."""
        found = self._thread.run(self._consumer.pull(messages_max, wait))
        found.settle_through(self._wrap)
        return found

    def ack(self, messages: Message | Messages) -> None:
        """They were worked on. Does not wait for the broker; see `qmq.Message.ack`."""
        messages.ack_later()

    def ack_sync(self, messages: Message | Messages) -> None:
        """The same; returns when the broker has it. Raises as `qmq.Message.ack_sync`."""
        self._thread.run(messages.ack_sync())

    def nack(self, messages: Message | Messages, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """Have them handed out again. See `qmq.Message.nack`."""
        messages.nack(delay, error)

    def reject(self, messages: Message | Messages, error: str | BaseException = "") -> None:
        """To the group's dead-letter queue. See `qmq.Message.reject`."""
        messages.reject(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.run(self._consumer.close(error))


class _FromAnyThread:
    """Carries verdicts from any thread into the loop's."""

    def __init__(self, thread: LoopThread, settler: Settler) -> None:
        self._thread = thread
        self._settler = settler
        self.subject = settler.subject
        self.broker_group = settler.broker_group

    def ack(self, pull: int) -> None:
        self.settle(pull, pull, Verdict.ACK)

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        self._thread.call(lambda: self._settler.settle(first, last, verdict, delay, error))

    def nack(self, part: Slice, delay: timedelta | None, error: str = "") -> None:
        self._thread.call(lambda: self._settler.nack(part, delay, error))

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        await self._settler.settle_now(first, last, verdict)
