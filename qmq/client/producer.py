"""The batching producer: messages in, batches out, receipts back; nothing twice, nothing forgotten.

Batches form by themselves, without lingering: the first message leaves at the end of this round of the event loop; what is sent while a
batch is on its way leaves together, when that batch is answered or when 1,000 messages or 256 KiB have gathered.

A batch keeps its number through every retry, and the broker stores a number once. So a lost answer, a broken connection or a busy broker is
mended by sending again, until `delivery_timeout`; only then does the ticket fail, and its error says whether the batch is known not to be
stored or whether nobody knows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final

from qmq import limits
from qmq.batch import Columns, encode
from qmq.client import content
from qmq.client.connection import Connection
from qmq.client.link import Links
from qmq.client.outbox import Batch, OpenBatch, cut, size_of
from qmq.client.receipts import BatchReceipt, Ticket, Tickets
from qmq.compression import Compression
from qmq.errors import (
    BufferFull,
    ClientClosed,
    CorruptBatch,
    DeadlineExceeded,
    InvalidArgument,
    Outcome,
    ProtocolViolation,
    QmqError,
    Unavailable,
    UnknownSubject,
)
from qmq.wire import messages as wire
from qmq.wire.frame import Frame, FrameKind

log = logging.getLogger("qmq.client")

BATCH_MESSAGES: Final = 1_000
BATCH_BYTES: Final = 256 * limits.KIB
INFLIGHT_BATCHES_MAX: Final = 32
"""Half of the broker's window of remembered batches (qmq/log/producers.py), so that a retry always falls into it."""
INFLIGHT_BYTES_MAX: Final = 8 * limits.MIB
ANSWER_S: Final = 15.0
"""A broker that has not answered a batch by then is asked again."""
DRAIN_BYTES: Final = 4 * limits.MIB
BUFFER_BYTES_MAX: Final = 64 * limits.MIB
_RETRY_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def new_producer_id() -> int:
    """64 bits: milliseconds since 1970 in the upper 44, random in the lower 20. No message of it is older than it."""
    return (time.time_ns() // 1_000_000) << 20 | int.from_bytes(os.urandom(3), "little") & 0xFFFFF


class Identity:
    """A producer's id and the number of its next batch, over all subjects."""

    def __init__(self) -> None:
        self.producer_id = new_producer_id()
        self._next = 0

    def next_sequence(self) -> int:
        """Numbers from 0 on."""
        self._next += 1
        return self._next - 1


class Producer:
    """Sends to one subject. Make it with `Client.producer`; use it with `async with`, or `flush` and `close` it."""

    def __init__(
        self, links: Links, identity: Identity, subject: str, *, batch_messages: int = BATCH_MESSAGES,
        batch_bytes: int = BATCH_BYTES, delivery_timeout_s: float = 120.0,
        compression: Compression = Compression.NONE, body_bytes_max: int = limits.BODY_BYTES_MAX,
    ) -> None:  # fmt: skip
        if not 0 < batch_messages <= limits.BATCH_MESSAGES_MAX:
            raise InvalidArgument(f"batch_messages is 1 to {limits.BATCH_MESSAGES_MAX}, not {batch_messages}")
        self.subject = subject
        self._subject = subject.encode()
        self._links = links
        self._identity = identity
        self._loop = asyncio.get_running_loop()
        self._batch_messages = batch_messages
        self._batch_bytes = batch_bytes
        self._timeout_s = delivery_timeout_s
        self._compression = compression
        self._body_bytes_max = body_bytes_max
        self._open = OpenBatch()
        self._is_awake = False
        self._waiting: deque[Batch] = deque()
        self._inflight: dict[int, Batch] = {}
        self._inflight_bytes = 0
        self._closed_bytes = 0
        self._last_count = 0
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._timers: set[asyncio.TimerHandle] = set()
        self._drained: list[asyncio.Future[None]] = []
        self._failed: list[tuple[Ticket, QmqError]] = []
        self._is_closed = False

    # --- sending -------------------------------------------------------------------------------------------------------

    def send(
        self, body: bytes, key: str | bytes | None = None, tags: Iterable[str] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Ticket:  # fmt: skip
        """Put a message into the open batch; `await` the ticket to know that it is stored.

        Look at `full` now and then, and `await drain()`.

        Raises:
            InvalidArgument, MessageTooLarge: the message cannot be sent, to anybody.
            BufferFull: more than 64 MiB are waiting to be stored.
            ClientClosed: the producer or its client was closed.
        """
        if type(body) is not bytes or len(body) > self._body_bytes_max:
            body = content.body_bytes(body, self._body_bytes_max)
        if not self._is_awake or self._closed_bytes > BUFFER_BYTES_MAX:
            self._wake()
        batch = self._open
        bodies = batch.bodies
        bodies.append(body)
        batch.bytes += len(body)
        if key is not None or tags is not None or headers is not None or batch.keys or batch.tags or batch.headers:
            batch.add_columns(key, tags, headers)
        ticket = batch.ticket
        if len(bodies) >= self._batch_messages or batch.bytes >= self._batch_bytes:
            self._close_open()
        return ticket

    def _wake(self) -> None:
        """First message of this round of the event loop: stamp the time, and flush at its end."""
        if self._is_closed or self._links.is_closed:
            raise ClientClosed("the producer is closed: make a new one")
        if self._closed_bytes > BUFFER_BYTES_MAX:
            raise BufferFull(f"{self._closed_bytes} bytes wait to be stored: `await producer.drain()` before sending more")
        self._is_awake = True
        self._open.stamp()
        self._loop.call_soon(self._end_of_round)

    def _end_of_round(self) -> None:
        self._is_awake = False
        self._pump()
        if self._connection is not None:
            self._connection.stream.flush()

    def send_many(
        self, bodies: Sequence[bytes], keys: Sequence[str | bytes | None] | None = None,
        tags: Sequence[Iterable[str]] | None = None, headers: Sequence[Mapping[str, str | bytes]] | None = None,
    ) -> Tickets:  # fmt: skip
        """Send many messages with less work for each; the columns, where given, have one item a message. Raises as `send`."""
        bodies = list(bodies)
        for name, column in (("keys", keys), ("tags", tags), ("headers", headers)):
            if column is not None and len(column) != len(bodies):
                raise InvalidArgument(f"{len(bodies)} bodies, but {len(column)} {name}: give one for each message")
        self._close_open()
        if bodies and (set(map(type, bodies)) != {bytes} or max(map(len, bodies)) > self._body_bytes_max):
            bodies = [content.body_bytes(body, self._body_bytes_max) for body in bodies]
        columns = Columns(
            bodies,
            [content.key_bytes(key) for key in keys] if keys else None,
            [content.tag_tuple(each) for each in tags] if tags else None,
            [content.header_map(each) for each in headers] if headers else None,
        )
        if not self._is_awake or self._closed_bytes > BUFFER_BYTES_MAX:
            self._wake()
        tickets: list[Ticket] = []
        for begin in range(0, len(bodies), self._batch_messages):
            self._add_many(tickets, cut(columns, begin, begin + self._batch_messages))
        return Tickets(tickets)

    def _add_many(self, tickets: list[Ticket], columns: Columns) -> None:
        size, count = size_of(columns), len(columns.bodies)
        if size > self._batch_bytes and count > 1:
            self._add_many(tickets, cut(columns, 0, count // 2))
            self._add_many(tickets, cut(columns, count // 2, count))
            return
        tickets.append(self._open.fill(columns, size))
        self._close_open()

    def _close_open(self) -> None:
        """The open batch is full, or its time has come."""
        if not self._open.bodies:
            return
        batch = self._open.close(self._identity.next_sequence())
        batch.until = self._loop.time() + self._timeout_s
        self._closed_bytes += batch.size
        self._last_count = batch.count
        self._waiting.append(batch)
        self._open = OpenBatch()
        if self._is_awake:
            self._open.stamp()
        self._transmit_waiting()

    def place_of_last(self, ticket: Ticket) -> int:
        """Place in its batch of the message that `send` just took; valid only right after it."""
        return (len(self._open.bodies) if ticket is self._open.ticket else self._last_count) - 1

    # --- the way out ---------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send what can be sent; the open batch leaves if nothing is on its way."""
        if self._open.bodies and not self._inflight and not self._waiting:
            self._close_open()
        else:
            self._transmit_waiting()

    def _transmit_waiting(self) -> None:
        connection = self._connection
        if connection is None or not connection.is_open:
            if self._waiting and self._connecting is None:
                self._connecting = self._loop.create_task(self._connect())
            return
        room = min(INFLIGHT_BYTES_MAX, connection.inflight_bytes_max)
        while self._waiting and len(self._inflight) < INFLIGHT_BATCHES_MAX and connection.is_open:
            if (self._inflight and connection.produce_bytes + self._waiting[0].size > room) or not connection.stream.is_writable:
                return
            self._transmit(connection, self._waiting.popleft())

    def _transmit(self, connection: Connection, batch: Batch) -> None:
        try:
            if batch.encoded is None:
                batch.encoded = encode(
                    self._subject, batch.columns, producer_id=self._identity.producer_id,
                    batch_sequence=batch.sequence, create_time_ms=batch.create_time_ms, compression=self._compression,
                )  # fmt: skip
        except QmqError as failure:
            self._fail(batch, failure)
            return
        self._inflight[batch.sequence] = batch
        self._inflight_bytes += batch.size
        batch.attempts += 1
        left_s = min(max(batch.until - self._loop.time(), 0.1), ANSWER_S)
        connection.request(
            FrameKind.PRODUCE, lambda answer: self._answered(batch, answer), *batch.encoded, timeout_s=left_s
        )

    async def _connect(self) -> None:
        attempt = 0
        try:
            while self._waiting and not self._is_closed:
                try:
                    self._use(await self._links.connection(self.subject))
                    return
                except Unavailable as failure:
                    self._expire(failure)
                    await asyncio.sleep(_backoff(attempt, failure))
                    attempt += 1
                except QmqError as failure:
                    self._fail_all(failure)
                    self._close_open()
        finally:
            self._connecting = None
            self._transmit_waiting() if self._connection is not None else None

    def _use(self, connection: Connection) -> None:
        self._connection = connection
        connection.on_closed.append(self._connection_lost)
        connection.on_writable.append(self._transmit_waiting)

    def _connection_lost(self) -> None:
        self._connection = None
        if self._waiting and not self._is_closed:
            self._loop.call_soon(self._transmit_waiting)

    # --- the way back --------------------------------------------------------------------------------------------------

    def _answered(self, batch: Batch, answer: Frame | QmqError) -> None:
        if batch.sequence not in self._inflight:
            return
        produced = None if isinstance(answer, QmqError) else _single(wire.unpack_produced(answer.payload))
        del self._inflight[batch.sequence]
        self._inflight_bytes -= batch.size
        if isinstance(answer, QmqError):
            self._refused(batch, answer)
        elif produced is not None:
            self._closed_bytes -= batch.size
            batch.ticket.resolve(
                BatchReceipt(
                    self.subject, 0, produced.base_sequence, batch.count, self._identity.producer_id, batch.sequence,
                    produced.append_time_ms,
                )
            )  # fmt: skip
        if self._open.bodies:
            self._close_open()
        else:
            self._transmit_waiting()
        if self._drained:
            self._wake_drained()

    def _refused(self, batch: Batch, failure: QmqError) -> None:
        batch.is_uncertain |= failure.outcome is Outcome.UNKNOWN
        is_retried = isinstance(failure, Unavailable | CorruptBatch | UnknownSubject)
        if not is_retried or self._is_closed or self._loop.time() >= batch.until:
            self._fail(batch, _final(failure, batch))
        elif failure.outcome is Outcome.UNKNOWN:
            self._requeue(batch)
        else:
            delay_s = _backoff(batch.attempts, failure)
            timer = self._loop.call_later(delay_s, self._again, batch)
            self._timers = {each for each in self._timers if not each.cancelled() and each.when() > self._loop.time()}
            self._timers.add(timer)
            self._inflight[batch.sequence] = batch
            self._inflight_bytes += batch.size

    def _again(self, batch: Batch) -> None:
        if self._inflight.pop(batch.sequence, None) is not None:
            self._inflight_bytes -= batch.size
            self._requeue(batch)
            self._transmit_waiting()

    def _requeue(self, batch: Batch) -> None:
        """Send again, in the order of the batches' numbers."""
        place = 0
        while place < len(self._waiting) and self._waiting[place].sequence < batch.sequence:
            place += 1
        self._waiting.insert(place, batch)

    def _expire(self, failure: QmqError) -> None:
        now = self._loop.time()
        for batch in [each for each in self._waiting if each.until <= now]:
            self._waiting.remove(batch)
            self._fail(batch, _final(failure, batch))
        if not self._waiting:
            self._close_open()

    def _fail_all(self, failure: QmqError) -> None:
        while self._waiting:
            self._fail(self._waiting.popleft(), failure)

    def _fail(self, batch: Batch, failure: QmqError) -> None:
        self._closed_bytes -= batch.size
        batch.ticket.fail(failure)
        if not batch.ticket.seen:
            self._failed.append((batch.ticket, failure))
        self._wake_drained()

    # --- back-pressure and the end -------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether it is time to `await drain()`."""
        return self._closed_bytes > DRAIN_BYTES

    async def drain(self) -> None:
        """Wait until there is room again."""
        while self._closed_bytes > DRAIN_BYTES // 2:
            await self._wait_for_answer()

    async def flush(self) -> None:
        """Wait until everything sent so far is decided. Raises the first failure that no ticket's owner saw."""
        self._close_open()
        while self._closed_bytes > 0 or self._inflight or self._waiting:
            await self._wait_for_answer()
        failed, self._failed = self._failed, []
        for ticket, failure in failed:
            if not ticket.seen:
                raise failure

    async def _wait_for_answer(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._drained.append(future)
        await future

    def _wake_drained(self) -> None:
        drained, self._drained = self._drained, []
        for future in drained:
            if not future.done():
                future.set_result(None)

    async def close(self) -> None:
        """Flush, then end. What cannot be stored in time fails its ticket."""
        if self._is_closed:
            return
        try:
            await self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """End now; tickets that are open fail with ClientClosed."""
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        for batch in [*self._inflight.values(), *self._waiting]:
            is_known = not batch.is_uncertain and batch.sequence not in self._inflight
            outcome = Outcome.NOT_STORED if is_known else Outcome.UNKNOWN
            batch.ticket.fail(ClientClosed("the producer was closed before the answer came", outcome=outcome))
        self._inflight.clear()
        self._waiting.clear()
        self._closed_bytes = 0
        self._wake_drained()

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _backoff(attempt: int, failure: QmqError) -> float:
    base = _RETRY_S[min(attempt, len(_RETRY_S) - 1)]
    asked = (failure.retry_after_ms or 0) / 1000 if attempt > 1 else 0.0
    return max(base, min(asked, 1.0)) * random.uniform(0.7, 1.3)  # noqa: S311 - jitter, not a secret


def _final(failure: QmqError, batch: Batch) -> QmqError:
    """What the ticket says: after an unanswered try nobody knows, whatever the last refusal was."""
    if not isinstance(failure, Unavailable):
        return failure
    outcome = Outcome.UNKNOWN if batch.is_uncertain else Outcome.NOT_STORED
    return DeadlineExceeded(f"not stored in time after {batch.attempts} tries; the last: {failure}", outcome=outcome)


def _single(results: list[wire.Produced]) -> wire.Produced:
    if len(results) != 1:
        raise ProtocolViolation(f"PRODUCED answers one batch with {len(results)}")
    return results[0]
