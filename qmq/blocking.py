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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from qmq.client.client import Client
from qmq.client.consumer import Consumer
from qmq.client.due_times import When
from qmq.client.interceptors import Chain, Interceptor
from qmq.client.listening.listener_options import ListenerOptions
from qmq.client.listening.process_signals import asked_in_main_thread
from qmq.client.message import Message, Messages, Settler, Slice
from qmq.client.outbox_entry import GRACE
from qmq.client.receipts import Receipt, Receipts
from qmq.client.state_folder import StateDir
from qmq.errors import ClientClosed
from qmq.security.client_tokens import Token
from qmq.security.contexts import default_server
from qmq.security.tls import Tls
from qmq.security.tls_network import network_of
from qmq.wire.settle_payloads import Verdict

if TYPE_CHECKING:
    from qmq.client.delayed import Delayed
    from qmq.client.delayed_message import DelayedMessage, DelayStats
    from qmq.metrics.exposition import Collector
    from qmq.sql.outbox import Outbox
    from qmq.sql.outbox_blocking import BlockingOutbox

_R = TypeVar("_R")
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class BlockingClient:
    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        create_subjects: bool = True,
        interceptors: Iterable[Interceptor] = (),
        name: str | None = None,
        state_dir: StateDir = None,
        tls: Tls | None = None,
        token: Token = None,
    ) -> None:
        network = network_of(tls, token)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="qmq-client", daemon=True)
        self._client = Client(
            addresses,
            create_subjects=create_subjects,
            interceptors=interceptors,
            name=name,
            state_dir=state_dir,
            network=network,
            for_threads=BesideLoop,
        )
        self._thread.start()

    @overload
    def run(self) -> None: ...

    @overload
    def run(self, work: Coroutine[Any, Any, _R]) -> _R: ...

    def run(self, work: Coroutine[Any, Any, _R] | None = None) -> _R | None:
        """Run the listeners until they are stopped: see `qmq.Client.run`. Or run a coroutine of the asyncio client in the loop's thread,
        and wait for it. Raises ClientClosed.
        """
        if work is None:
            with asked_in_main_thread(self.stop):
                return self.run(self._client.run())
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
        self,
        subject: str,
        body: object,
        *,
        key: str | bytes | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        cron: str | None = None,
        zone: str | None = None,
        acks: str = "quorum",
    ) -> Receipt:
        """See `qmq.Client.send`."""
        return self.run(
            self._client.send(subject, body, key=key, tags=tags, headers=headers, delay=delay, at=at, cron=cron, zone=zone, acks=acks)
        )

    def send_many(
        self,
        subject: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[str | bytes | None] | None = None,
        tags: Sequence[Iterable[str]] | None = None,
        headers: Sequence[Mapping[str, str | bytes]] | None = None,
        delays: Sequence[timedelta] | timedelta | None = None,
        ats: Sequence[datetime] | datetime | None = None,
        acks: str = "quorum",
    ) -> Receipts:
        """See `qmq.Client.send_many`."""
        return self.run(self._client.send_many(subject, bodies, keys=keys, tags=tags, headers=headers, delays=delays, ats=ats, acks=acks))

    @property
    def interceptors(self) -> Chain:
        """See `qmq.Client.interceptors`. They are called in the loop's thread for what is sent, in the caller's for what is handled."""
        return self._client.interceptors

    @property
    def metrics(self) -> Collector:
        """See `qmq.Client.metrics`."""
        return self._client.metrics

    def serve_metrics(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """See `qmq.Client.serve_metrics`."""
        return self.run(self._client.serve_metrics(port, host))

    def outbox(self, connection: Any, *, table: str = "qmq_outbox", grace: timedelta = GRACE) -> BlockingOutbox:
        """See `qmq.Client.outbox`; on sync connections, sessions and engines: `with mq.outbox(connection) as box: box.send(...)`."""

        async def make() -> Outbox:
            return self._client.outbox(connection, table=table, grace=grace)

        box = self.run(make())
        from qmq.sql.outbox_blocking import BlockingOutbox

        return BlockingOutbox(box, self.run)

    @property
    def delayed(self) -> BlockingDelayed:
        """See `qmq.Client.delayed`."""
        return BlockingDelayed(self, self._client.delayed)

    def consumer(self, subject: str, group: str, **options: Any) -> BlockingConsumer:
        """See `qmq.Client.consumer`."""

        async def make() -> Consumer:
            return self._client.consumer(subject, group, **options)

        return BlockingConsumer(self, self.run(make()))

    def listener(self, subject: str, group: str, **options: Unpack[ListenerOptions]) -> Callable[[_Handler], _Handler]:
        """See `qmq.Client.listener`. Plain functions run in threads, and their context's `mq` is a blocking client."""

        def register(handler: _Handler) -> _Handler:
            self.listen(subject, handler, group, **options)
            return handler

        return register

    def listen(self, subject: str, handler: Callable[..., Any], group: str, **options: Unpack[ListenerOptions]) -> None:
        """See `qmq.Client.listen`."""

        async def register() -> None:
            self._client.listen(subject, handler, group, **options)

        self.run(register())

    def provide(self, kind: type[Any], factory: Callable[..., Any]) -> None:
        """See `qmq.Client.provide`."""
        self._client.provide(kind, factory)

    def stop(self) -> None:
        """See `qmq.Client.stop`. From any thread."""
        self._loop.call_soon_threadsafe(self._client.stop)

    @property
    def is_paused(self) -> bool:
        """See `qmq.Client.is_paused`."""
        return self._client.is_paused

    def pause(self) -> None:
        """See `qmq.Client.pause`."""
        self._client.pause()

    def resume(self) -> None:
        """See `qmq.Client.resume`."""

        async def go_on() -> None:
            self._client.resume()

        self.run(go_on())

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class BesideLoop(BlockingClient):
    """An asyncio client for threads beside its event loop: plain handlers of listeners have it. It is not theirs to close."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._client = client

    def close(self) -> None:
        """Does nothing: whoever has the asyncio client closes it."""


class BlockingDelayed:
    """See `qmq.client.delayed.Delayed`."""

    def __init__(self, client: BlockingClient, delayed: Delayed) -> None:
        self._client = client
        self._delayed = delayed

    def cancel(self, id: str) -> DelayedMessage:
        return self._client.run(self._delayed.cancel(id))

    def move(self, id: str, when: When) -> DelayedMessage:
        return self._client.run(self._delayed.move(id, when))

    def show(self, id: str) -> DelayedMessage:
        return self._client.run(self._delayed.show(id))

    def list(
        self,
        subject: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        limit: int | None = None,
        *,
        silent: dict[str, str] | None = None,
    ) -> Iterator[DelayedMessage]:
        found = self._delayed.list(subject, start, end, limit, silent=silent)

        async def following() -> DelayedMessage | None:
            return await anext(found, None)

        while (message := self._client.run(following())) is not None:
            yield message

    def stats(self) -> DelayStats:
        return self._client.run(self._delayed.stats())


class BlockingConsumer:
    def __init__(self, client: BlockingClient, consumer: Consumer) -> None:
        self._client = client
        self._consumer = consumer

    def _wrap(self, settler: Settler) -> Settler:
        return _FromAnyThread(self._client, settler)

    def __iter__(self) -> Iterator[Message]:
        while True:
            # Not the loop's own interception: a message is handled in the caller's thread and context.
            message = self._client.run(Consumer.__anext__(self._consumer))
            message.settle_through(self._wrap)
            with self._client.interceptors.handling(message, self._consumer.group):
                yield message

    def pull(self, messages_max: int = 1000, wait: timedelta = timedelta(seconds=20)) -> Messages:
        """See `qmq.Consumer.pull`."""
        found = self._client.run(self._consumer.pull(messages_max, wait))
        found.settle_through(self._wrap)
        return found

    @property
    def is_paused(self) -> bool:
        """See `qmq.Consumer.is_paused`."""
        return self._consumer.is_paused

    def pause(self) -> None:
        """See `qmq.Consumer.pause`."""
        self._consumer.pause()

    def resume(self) -> None:
        """See `qmq.Consumer.resume`."""

        async def go_on() -> None:
            self._consumer.resume()

        self._client.run(go_on())

    def ack(self, messages: Message | Messages) -> None:
        """They were worked on. Does not wait for the broker; see `qmq.Message.ack`."""
        messages.ack_later()

    def ack_sync(self, messages: Message | Messages) -> None:
        """The same; returns when the broker has it. Raises as `qmq.Message.ack_sync`."""
        self._client.run(messages.ack_sync())

    def nack(self, messages: Message | Messages, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """Have them handed out again. See `qmq.Message.nack`."""
        messages.nack(delay, error)

    def reject(self, messages: Message | Messages, error: str | BaseException = "") -> None:
        """To the group's dead-letter queue. See `qmq.Message.reject`."""
        messages.reject(error)

    def close(self, error: BaseException | None = None) -> None:
        """See `qmq.Consumer.close`."""
        self._client.run(self._consumer.close(error))

    def __enter__(self) -> BlockingConsumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(error)


class _FromAnyThread:
    """Carries verdicts from any thread into the loop's."""

    def __init__(self, client: BlockingClient, settler: Settler) -> None:
        self._client = client
        self._settler = settler
        self.subject = settler.subject
        self.broker_group = settler.broker_group

    def ack(self, pull: int) -> None:
        self.settle(pull, pull, Verdict.ACK)

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        async def say() -> None:
            self._settler.settle(first, last, verdict, delay, error)

        self._client.run(say())

    def nack(self, part: Slice, delay: timedelta | None, error: str = "") -> None:
        async def say() -> None:
            self._settler.nack(part, delay, error)

        self._client.run(say())

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        await self._settler.settle_now(first, last, verdict)


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    create_subjects: bool = True,
    interceptors: Iterable[Interceptor] = (),
    name: str | None = None,
    state_dir: StateDir = None,
    tls: Tls | None = None,
    token: Token = None,
) -> BlockingClient:
    """A client whose calls wait; `qmq.connect` explains the parameters and the errors."""
    return BlockingClient(
        addresses or default_server(),
        create_subjects=create_subjects,
        interceptors=interceptors,
        name=name,
        state_dir=state_dir,
        tls=tls,
        token=token,
    )
