"""The producer of an ordered subject: messages of a key are stored in the order in which they were
sent, also while the route changes.

    send ─▶ open batch of the key's stream ─▶ stream ─▶ connection ─▶ the partition's broker group
                  ▲                              │ settled after a change
                  └────── partitioner ◀── route ─┘ batched again

The ordered producer works as the unordered one does (`qmq/client/producing/producer.py`), with one
open batch for each partition. A batch leaves when it is full, or when no other batch is on its way
to its partition. While the broker group has much to answer, a batch that no caller awaits gathers
messages for `gather_s` (`ClientTiming`): otherwise batches to eight partitions would be an eighth
as long as to one. docs/ORDERING.md has the guarantees; `stream.py` has the pure cores that keep
them, `partition_sender.py` the open batches, and this file the public class and the I/O.

A message that is not stored within `delivery_timeout` fails, and with it all messages that wait
behind it in its partition: no message is stored after one that was skipped. Messages sent later are
unaffected. Only an invalid message fails alone.

The streams follow the newest route: batches are passed to their streams, and those of settled
streams are cut again.

* Until the first route is known, batches wait in a stream without a partition (`_unrouted`); they
  are cut when the route is known.
* The producer asks for the route when a partition answers that it is sealed (repeatedly, with the
  locator's pauses, until the route is newer), when a metaserver pushes, and when a broker group
  does not answer.
* Decisions are taken from a stream before it is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from qmq_ordering.routes import LpRange, PhysicalPartition

from qmq.client.connection.pool import ConnectionPool
from qmq.client.consuming.ordered.membership import GroupLoad
from qmq.client.metadata.cache import Ordering
from qmq.client.producing.batch import body_bytes, check_length, columns_of, cut, size_of
from qmq.client.producing.ordered.partition_sender import (
    BatchBuilder,
    Encode,
    Key,
    OpenBatches,
    StreamCalls,
    StreamConnection,
    bad_key,
)
from qmq.client.producing.ordered.stream import (
    OrderedBatch,
    Stream,
    StreamPartitioner,
    choose,
    pick,
)
from qmq.client.producing.producer import (
    BUFFER_BYTES_MAX,
    ProducerBase,
    ProducerOptions,
    ignored,
)
from qmq.client.producing.receipts import BatchReceipt, SpreadTickets, Ticket, TicketChunk, Tickets
from qmq.delivery.window import final
from qmq.errors import ClientClosed, InvalidArgument, OrderMismatch, Outcome, QmqError, Unavailable
from qmq.model import Order
from qmq.process.event_loop import ms_of
from qmq.wire.batch import encode
from qmq.wire.batch_columns import BatchFlag, Columns
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import Produced

NOWHERE: Final = PhysicalPartition(0, LpRange(0, 0), "")


LIGHT: Final = 16
"""With more than this part of a full batch unanswered at a broker group,
open batches for it gather messages.
"""


@dataclass(frozen=True, slots=True)
class ProducerCalls:
    """What the streams tell their producer, and ask it."""

    encode: Encode
    stored: Callable[[Stream, OrderedBatch, Produced], None]
    failed: Callable[[OrderedBatch, QmqError], None]
    answered: Callable[[], None]
    """Batches were decided, or may have been."""


class Streams:
    """`new_id` returns a new producer id; `unknown` is as in `Stream`."""

    def __init__(
        self,
        links: ConnectionPool,
        subject: str,
        options: ProducerOptions,
        open_batches: OpenBatches,
        new_id: Callable[[], int],
        unknown: str,
        calls: ProducerCalls,
    ) -> None:
        self._subject = subject
        self._kind = options.kind
        self._open_batches = open_batches
        self._links = links
        self._new_id, self._unknown = new_id, unknown
        self._load_light = options.batch_messages // LIGHT, options.batch_bytes // LIGHT
        self._loads: dict[str, GroupLoad] = {}
        """What is unanswered, by broker group."""
        self._producer = calls
        self._calls = StreamCalls(calls.encode, self._changed, self._gather, self._give_up)
        self._loop = asyncio.get_running_loop()
        self._order = Order.NONE
        self._partitioner = StreamPartitioner(self._make)
        self._connections: dict[int, StreamConnection] = {}
        self._unrouted = Stream(NOWHERE, new_id)
        self._finding: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._refusal: QmqError | None = None
        self._is_closed = False

    # --- the way out ------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises OrderMismatch, InvalidArgument if this producer cannot send to the subject."""
        if self._refusal is not None:
            raise self._refusal

    def may_leave(self, builder: BatchBuilder) -> bool:
        """Whether an open batch that is not full need not gather more.
        See `ClientTiming.gather_s`.
        """
        connection = builder.connection
        if connection is None:
            return self._unrouted.is_idle
        stream, now = connection.stream, self._loop.time()
        if self._order is Order.BEST_EFFORT and stream.is_troubled(now):
            return True
        if not stream.is_idle:
            return False
        gathers_until = self._open_batches.filled[builder] + self._links.timing.gather_s
        return connection.load.is_light or builder.ticket.is_awaited or now >= gathers_until

    def put(self, connection: StreamConnection | None, batch: OrderedBatch) -> None:
        """Add a batch; it is sent as soon as possible."""
        if connection is None:
            self._unrouted.put(batch)
            self._loop.call_at(batch.until, self._tick_unrouted)
            if self._finding is None and not self._is_closed:
                self._finding = self._loop.create_task(self._find())
            return
        self._links.locator.touch(self._subject)
        connection.stream.put(batch)
        if not self._bend():
            connection.pump()

    # --- what changes -----------------------------------------------------------------------------

    def _changed(self, connection: StreamConnection) -> None:
        """See `StreamCalls`."""
        stream = connection.stream
        self._take_decided(stream)
        if stream.is_settled:
            self._settle()
        else:
            self._let_go(connection)
            if not self._bend():
                connection.pump()
        if self._following is None and self._partitioner.wants_route and not self._is_closed:
            self._following = self._loop.create_task(self._follow())
        self._producer.answered()

    def _gather(self, connection: StreamConnection) -> None:
        """Put the open batch behind the stream's batches."""
        batch = self._open_batches.take_of(connection)
        if batch is not None:
            connection.stream.put(batch)

    def _let_go(self, connection: StreamConnection) -> None:
        """A batch of this stream was answered, so open batches of the same broker group may leave.
        The caller pumps the stream itself.
        """
        for builder in list(self._open_batches.filled):
            other = builder.connection
            if other is not None and other.load is connection.load and self.may_leave(builder):
                self._gather(other)
                if other is not connection:
                    other.pump()

    def _take_decided(self, stream: Stream) -> None:
        for batch, result in stream.take_decided():
            if isinstance(result, QmqError):
                self._producer.failed(batch, result)
            else:
                self._producer.stored(stream, batch, result)

    def _bend(self) -> bool:
        """Best-effort order: let healthy groups take the batches of troubled ones. Returns whether
        any moved; then all streams were pumped.
        """
        if self._order is not Order.BEST_EFFORT:
            return False
        given = self._partitioner.bend(self._loop.time())
        for stream in given:
            self._connections[stream.partition.number].reach(ahead=True)
        if given:
            self._pump()
        return bool(given)

    @property
    def bent(self) -> int:
        """Messages that went to another partition than their own."""
        return self._partitioner.bent

    @property
    def version(self) -> int:
        """The version of the route that the streams follow; 0 before a route is known."""
        return self._partitioner.version

    def _pump(self) -> None:
        for connection in list(self._connections.values()):
            connection.pump()

    # --- routes -----------------------------------------------------------------------------------

    async def _find(self) -> None:
        """Fetch the first route."""
        locator = self._links.locator
        try:
            while (
                not self._unrouted.is_idle and not self._partitioner.version and not self._is_closed
            ):
                try:
                    ordering = await locator.ordering(
                        self._subject, refresh=locator.book.groups(self._subject) is None
                    )
                    self._open(ordering)
                except Unavailable as failure:
                    self._unrouted.trouble = failure
        except QmqError as failure:
            self._give_up(failure)
        finally:
            self._finding = None

    def _open(self, ordering: Ordering | None) -> None:
        """Raises OrderMismatch, InvalidArgument if this producer cannot send to the subject."""
        if ordering is None:
            self._refusal = OrderMismatch(
                f"subject {self._subject!r} is unordered: send to it with Client.producer"
            )
        elif ordering.order is Order.STRICT and self._kind == FrameKind.PRODUCE_FAST:
            self._refusal = InvalidArgument(
                f"subject {self._subject!r} has strict order: its messages need "
                "acks='quorum' or 'flushed'"
            )
        self.check_usable()
        assert ordering is not None
        self._order = ordering.order
        self._links.locator.listen(self._subject, self._rerouted)
        self._rerouted()
        self._cut_unrouted()

    def _rerouted(self) -> None:
        """The locator has news about the subject or its groups."""
        ordering = self._links.locator.book.ordering(self._subject)
        if ordering is None or self._is_closed:
            return
        self._partitioner.learn(ordering.route, ordering.fenced, self._loop.time())
        self._settle()
        for connection in list(self._connections.values()):
            connection.moved()

    def _make(self, part: PhysicalPartition) -> Stream:
        stream = Stream(
            part, self._new_id, unknown=self._unknown, ask_s=self._links.timing.fenced_s
        )
        connection = StreamConnection(
            self._links, self._subject, self._kind, stream, self._load_of(part.group), self._calls
        )
        self._connections[part.number] = connection
        connection.reach(ahead=True)
        return stream

    def _load_of(self, group: str) -> GroupLoad:
        return self._loads.setdefault(group, GroupLoad(*self._load_light))

    def _settle(self) -> None:
        """Take the batches of settled streams. Streams that are left still take new batches for
        their ranges.
        """
        for stream in list(self._partitioner.partitions.values()):
            if stream.is_settled:
                self._gather(self._connections[stream.partition.number])
        settled = self._partitioner.settle()
        for stream in settled:
            self._take_decided(stream)
            self._connections.pop(stream.partition.number).close()
        if settled:
            self._reroute_open_batches()
        self._pump()

    def _reroute_open_batches(self) -> None:
        self._open_batches.rerouted(
            [self._connections[stream.partition.number] for stream in self._partitioner.by_lp]
        )

    def _cut_unrouted(self) -> None:
        """The first route is known: distribute the waiting batches."""
        self._gather_unrouted()
        self._reroute_open_batches()
        for batch in self._unrouted.take_left():
            batch.columns.logical_partitions = self._open_batches.keys.of_many(
                batch.columns.keys or ()
            )
            self._partitioner.put_cut([batch])
        self._pump()

    async def _follow(self) -> None:
        """Ask for the route until it is newer; the locator keeps the pauses."""
        try:
            while self._partitioner.wants_route and not self._is_closed:
                try:
                    await self._links.locator.ordering(self._subject, refresh=True)
                except Unavailable:
                    continue
        except QmqError as failure:
            self._give_up(failure)
        finally:
            self._following = None

    # --- the end ----------------------------------------------------------------------------------

    def _tick_unrouted(self) -> None:
        if self._unrouted.is_late(self._loop.time()):
            self._gather_unrouted()
            self._unrouted.tick(self._loop.time())
            self._take_decided(self._unrouted)

    def _gather_unrouted(self) -> None:
        batch = self._open_batches.take_of(None)
        if batch is not None:
            self._unrouted.put(batch)

    def _give_up(self, failure: QmqError) -> None:
        """See `StreamCalls`."""
        self._drop(lambda batch: final(failure, batch))

    def _drop(self, failure_of: Callable[[OrderedBatch], QmqError]) -> None:
        self._gather_unrouted()
        for connection in self._connections.values():
            self._gather(connection)
        for stream in [
            self._unrouted,
            *[connection.stream for connection in self._connections.values()],
        ]:
            stream.drop(failure_of)
            self._take_decided(stream)
        self._producer.answered()

    def abort(self) -> None:
        """End now: all undecided batches fail with ClientClosed."""
        self._is_closed = True
        self._links.locator.unlisten(self._subject, self._rerouted)
        for task in (self._finding, self._following):
            if task is not None:
                task.cancel()
        self._drop(_closed)
        for connection in self._connections.values():
            connection.close()


def _closed(batch: OrderedBatch) -> QmqError:
    outcome = Outcome.UNKNOWN if batch.is_uncertain else Outcome.NOT_STORED
    return ClientClosed("the producer was closed before the answer came", outcome=outcome)


class OrderedProducer(ProducerBase):
    """Sends to one ordered subject. Make it with `Client.ordered_producer`; use it with `async
    with`, or `flush` and `close` it.
    """

    def __init__(
        self,
        links: ConnectionPool,
        new_id: Callable[[], int],
        subject: str,
        options: ProducerOptions,
        *,
        unknown: str = "resend",
        on_closed: Callable[[Self], object] = ignored,
    ) -> None:
        if unknown not in ("resend", "fail"):
            raise InvalidArgument(f"unknown is 'resend' or 'fail', not {unknown!r}")
        super().__init__(links, subject, options, on_closed)
        self._subject = subject.encode()
        self._compression = options.compression
        self._open = OpenBatches(links, options.delivery_timeout_s, self._took)
        self._streams = Streams(
            links,
            subject,
            options,
            self._open,
            new_id,
            unknown,
            ProducerCalls(self._encode, self._stored, self._batch_failed, self._wake_waiting),
        )
        self._keys, self._by_lp, self._filled = self._open.keys, self._open.by_lp, self._open.filled
        self._last_count = 0
        self._is_awake = False
        """Whether this round of the event loop has begun. False while the buffer is full, so that
        `send` checks.
        """

    # --- sending ----------------------------------------------------------------------------------

    def send(
        self,
        body: bytes,
        key: str | bytes,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Ticket:
        """Add a message behind earlier ones of its key; `await` the ticket to know that it is
        stored.

        Check `full` from time to time, and `await drain()`.

        Raises: InvalidArgument, MessageTooLarge: the message is invalid, or has no key.
        OrderMismatch: the subject is unordered. BufferFull: more than 64 MiB are waiting to be
        stored. ClientClosed: the producer or its client was closed.
        """
        if type(body) is not bytes or len(body) > self._body_bytes_max:
            body = body_bytes(body, self._body_bytes_max)
        try:
            lp = self._keys[key]
        except TypeError as cause:
            raise bad_key(cause) from None
        if not self._is_awake:
            self._wake()
        batch = self._by_lp[lp]
        bodies = batch.bodies
        if not bodies:
            self._filled[batch] = self._loop.time()
            batch.stamp(ms_of(self._links.now_ns()))
        bodies.append(body)
        batch.bytes += len(body) + len(key)
        if tags is not None or headers is not None or batch.tags or batch.headers:
            batch.add_columns(None, tags, headers)
        batch.raw_keys.append(key)
        batch.lps.append(lp)
        ticket = batch.ticket
        if len(bodies) >= self._batch_messages or batch.bytes >= self._batch_bytes:
            self._close(batch)
        return ticket

    def send_many(
        self,
        bodies: Sequence[bytes],
        keys: Sequence[str | bytes],
        tags: Sequence[Iterable[str]] | None = None,
        headers: Sequence[Mapping[str, str | bytes]] | None = None,
    ) -> Tickets:
        """Send many messages with less work for each; each column has one item for each message.
        Raises as `send`.

        The receipts are in the order of the messages, although the messages go to several
        partitions.
        """
        columns = columns_of(bodies, tags, headers, self._body_bytes_max)
        count = len(columns.bodies)
        if keys is None:
            raise InvalidArgument("messages to an ordered subject need keys: give one for each")
        check_length("keys", keys, count)
        columns.logical_partitions = self._keys.of_many(keys)
        if not self._is_awake:
            self._wake()
        chunks: list[TicketChunk] = []
        if len(self._open.all) == 1:
            self._extend(self._open.all[0], chunks, columns, keys, range(count))
            return SpreadTickets(chunks)
        chosen: list[list[int]] = [[] for _ in self._open.all]
        slots = self._open.slots
        for index, lp in enumerate(columns.logical_partitions):
            chosen[slots[lp]].append(index)
        for builder, indices in zip(list(self._open.all), chosen, strict=True):
            if indices:
                self._extend(
                    builder, chunks, pick(columns, indices), choose(keys, indices), indices
                )
        return SpreadTickets(chunks)

    def put(self, columns: Columns, *, create_time_ms: int | None = None) -> list[TicketChunk]:
        """Send columns unchecked, in separate batches, one for each partition: for messages that
        QMQ itself makes, which may have ids. The create time is now, or `create_time_ms` plus the
        columns' `create_deltas`.

        Pass no more messages than fit one batch. Raises InvalidArgument without keys;
        OrderMismatch, BufferFull, ClientClosed.
        """
        if columns.keys is None:
            raise InvalidArgument("messages to an ordered subject need keys: give one for each")
        columns.logical_partitions = lps = self._keys.of_many(columns.keys)
        if not self._is_awake:
            self._wake()
        chosen: dict[BatchBuilder, list[int]] = {}
        for index, lp in enumerate(lps):
            chosen.setdefault(self._by_lp[lp], []).append(index)
        chunks: list[TicketChunk] = []
        for builder, indices in chosen.items():
            if builder in self._filled:
                self._close(builder)
            self._begin(builder)
            part = pick(columns, indices)
            chunks.append(TicketChunk(builder.ticket, 0, indices))
            builder.fill_with_keys(part, size_of(part), create_time_ms)
            self._close(builder)
        return chunks

    def _extend(
        self,
        builder: BatchBuilder,
        chunks: list[TicketChunk],
        columns: Columns,
        keys: Sequence[Key],
        indices: Sequence[int],
    ) -> None:
        """Fill open batches of one stream, one after another."""
        at, count = 0, len(columns.bodies)
        while at < count:
            before = len(builder.bodies)
            end = min(at + self._batch_messages - before, count)
            part, size = self._part(columns, keys, at, end)
            if before and builder.bytes + size > self._batch_bytes:
                self._close(builder)
                continue
            while size > self._batch_bytes and end - at > 1:
                end = at + (end - at) // 2
                part, size = self._part(columns, keys, at, end)
            self._begin(builder)
            chunks.append(TicketChunk(builder.ticket, before, indices[at:end]))
            builder.extend(part, keys[at:end], size)
            if len(builder.bodies) >= self._batch_messages or builder.bytes >= self._batch_bytes:
                self._close(builder)
            at = end

    def _part(
        self, columns: Columns, keys: Sequence[Key], begin: int, end: int
    ) -> tuple[Columns, int]:
        if end - begin < len(keys):
            columns, keys = cut(columns, begin, end), keys[begin:end]
        return columns, size_of(columns) + sum(map(len, keys))

    def _begin(self, builder: BatchBuilder) -> None:
        """An empty open batch gets messages."""
        if builder not in self._filled:
            self._filled[builder] = self._loop.time()
            builder.stamp(ms_of(self._links.now_ns()))

    def _wake(self) -> None:
        """First message in this round of the event loop: stamp the time, and close batches at the
        end of the round.
        """
        self._check_open()
        self._streams.check_usable()
        self._is_awake = True
        now_ms = ms_of(self._links.now_ns())
        for builder in self._filled:
            builder.stamp(now_ms)
        self._links.round.at_end(self._end_of_round)

    def _end_of_round(self) -> None:
        self._is_awake = False
        for builder in list(self._filled):
            if self._streams.may_leave(builder):
                self._close(builder)

    def _close(self, builder: BatchBuilder) -> None:
        """Close an open batch that is full, or whose round has ended."""
        batch = self._open.take(builder)
        if batch is not None:
            self._streams.put(builder.connection, batch)

    def _took(self, batch: OrderedBatch) -> None:
        """An open batch was closed."""
        self._last_count = batch.count
        self._taken(batch.size)
        if self.waiting_bytes > BUFFER_BYTES_MAX:
            self._is_awake = False

    def place_of_last(self, ticket: Ticket) -> int:
        """The place, in its batch, of the message that `send` just took;
        valid only right after `send`.
        """
        builder = next((each for each in self._filled if each.ticket is ticket), None)
        return (len(builder.bodies) if builder is not None else self._last_count) - 1

    @property
    def bent(self) -> int:
        """Best-effort order: the number of messages that went to another partition than their own,
        because its broker group could not take them.
        """
        return self._streams.bent

    @property
    def route_version(self) -> int:
        """The version of the route by which messages are sent; 0 before a route is known."""
        return self._streams.version

    # --- for the streams --------------------------------------------------------------------------

    def _encode(self, stream: Stream, batch: OrderedBatch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises MessageTooLarge, InvalidArgument."""
        columns = batch.columns
        if batch.is_bent:
            lps = stream.partition.range
            columns = replace(
                columns,
                logical_partitions=[
                    lps.first + lp % lps.width for lp in columns.logical_partitions or ()
                ],
            )
        return encode(
            self._subject,
            columns,
            producer_id=batch.producer_id,
            batch_sequence=batch.number,
            create_time_ms=batch.create_time_ms,
            flags=BatchFlag.BENT if batch.is_bent else 0,
            partition=stream.partition.number,
            compression=self._compression,
        )

    def _stored(self, stream: Stream, batch: OrderedBatch, produced: Produced) -> None:
        """The batch is stored."""
        part = stream.partition
        self._count_stored(batch, batch.count, part.group)
        batch.claim.stored(
            batch.places,
            BatchReceipt(
                self.subject,
                part.number,
                produced.base_sequence,
                batch.count,
                batch.producer_id,
                batch.number,
                produced.append_time_ms,
                part.group,
                batch.columns.message_ids,
            ),
        )
        self._settle(batch)

    def _batch_failed(self, batch: OrderedBatch, failure: QmqError) -> None:
        """The batch failed; the failure says whether it may be stored."""
        self._counters.failed += batch.count
        batch.claim.failed(failure)
        self._settle(batch)
        self._wake_waiting()

    def _settle(self, batch: OrderedBatch) -> None:
        claim = batch.claim
        if not claim.pieces:
            self._decided(claim.ticket, claim.size, claim.failure)

    # --- the end ----------------------------------------------------------------------------------

    @property
    def _has_open(self) -> bool:
        return any(each.bodies for each in self._open.all)

    def _close_all(self) -> None:
        for builder in list(self._filled):
            self._close(builder)

    def _abandon_all(self) -> None:
        self._streams.abort()
