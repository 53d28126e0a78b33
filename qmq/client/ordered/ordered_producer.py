"""The producer of an ordered subject: messages of a key are stored in the order in which they were sent, also while the route changes.

    send ─▶ open batch of the key's stream ─▶ stream ─▶ connection ─▶ the partition's broker group
                  ▲                              │ settled after a change
                  └────── partitioner ◀── route ─┘ batched again

The ordered producer works as the unordered one does (`qmq/client/producer.py`), with one open batch for each partition. A batch leaves when
it is full, or when no other batch is on its way to its partition. While the broker group has much to answer, a batch that no caller awaits
gathers messages for `gather_s` (`ClientTiming`): otherwise batches to eight partitions would be an eighth as long as to one.
docs/ORDERING.md has the guarantees; `stream.py` and `stream_partitioner.py` are the pure cores that keep them, `streams.py` does the I/O,
`open_batches.py` has the open batches, and this file the public class.

A message that is not stored within `delivery_timeout` fails, and with it all messages that wait behind it in its partition: no message is
stored after one that was skipped. Messages sent later are unaffected. Only an invalid message fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Self

from qmq import limits
from qmq.batch import encode
from qmq.batch_columns import BatchFlag, Columns
from qmq.client import message_checks
from qmq.client.backlog import BUFFER_BYTES_MAX, Backlog, ignored
from qmq.client.links import Links
from qmq.client.open_batch import cut, size_of
from qmq.client.ordered.batch_builder import BatchBuilder, Key, bad_key
from qmq.client.ordered.open_batches import OpenBatches
from qmq.client.ordered.ordered_batch import OrderedBatch, choose, pick
from qmq.client.ordered.spread_tickets import SpreadTickets, TicketChunk
from qmq.client.ordered.stream import Stream
from qmq.client.ordered.streams import Streams
from qmq.client.producer import BATCH_BYTES, BATCH_MESSAGES, frame_kind
from qmq.client.receipts import BatchReceipt, Ticket, Tickets
from qmq.compression import Compression
from qmq.errors import InvalidArgument, QmqError
from qmq.wire.frame_payloads import Produced

LIGHT: Final = 16
"""With more than this part of a full batch unanswered at a broker group, open batches for it gather messages."""


class OrderedProducer(Backlog):
    """Sends to one ordered subject. Make it with `Client.ordered_producer`; use it with `async with`, or `flush` and `close` it."""

    def __init__(
        self,
        links: Links,
        new_id: Callable[[], int],
        subject: str,
        *,
        batch_messages: int = BATCH_MESSAGES,
        batch_bytes: int = BATCH_BYTES,
        delivery_timeout_s: float = 120.0,
        compression: Compression = Compression.NONE,
        body_bytes_max: int = limits.LONG_BODY_BYTES_MAX,
        acks: str = "quorum",
        unknown: str = "resend",
        on_closed: Callable[[Self], object] = ignored,
    ) -> None:
        super().__init__(links, on_closed)
        if unknown not in ("resend", "fail"):
            raise InvalidArgument(f"unknown is 'resend' or 'fail', not {unknown!r}")
        self.subject = subject
        self.kind = frame_kind(acks, batch_messages)
        self.stored_by_group: dict[str, int] = {}
        """Stored messages by broker group."""
        self._subject = subject.encode()
        self._batch_messages, self._batch_bytes = batch_messages, batch_bytes
        self._timeout_s = delivery_timeout_s
        self._compression = compression
        self._body_bytes_max = body_bytes_max
        self._open = OpenBatches(links, delivery_timeout_s, self._took)
        self._streams = Streams(
            links,
            subject,
            self.kind,
            self._open,
            new_id=new_id,
            load_light=(batch_messages // LIGHT, batch_bytes // LIGHT),
            unknown=unknown,
            encode=self._encode,
            stored=self._stored,
            failed=self._batch_failed,
            answered=self._answered,
        )
        self._counters = links.counters.sending(subject)
        self._keys, self._by_lp, self._filled = self._open.keys, self._open.by_lp, self._open.filled
        self._last_count = 0
        self._is_awake = False
        """Whether this round of the event loop has begun. False while the buffer is full, so that `send` checks."""

    # --- sending -------------------------------------------------------------------------------------------------------

    def send(
        self, body: bytes, key: str | bytes, tags: Iterable[str] | None = None, headers: Mapping[str, str | bytes] | None = None
    ) -> Ticket:
        """Add a message behind earlier ones of its key; `await` the ticket to know that it is stored.

        Check `full` from time to time, and `await drain()`.

        Raises: InvalidArgument, MessageTooLarge: the message is invalid, or has no key. OrderMismatch: the subject is unordered.
        BufferFull: more than 64 MiB are waiting to be stored. ClientClosed: the producer or its client was closed.
        """
        if type(body) is not bytes or len(body) > self._body_bytes_max:
            body = message_checks.body_bytes(body, self._body_bytes_max)
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
            batch.stamp()
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
        """Send many messages with less work for each; each column has one item for each message. Raises as `send`.

        The receipts are in the order of the messages, although the messages go to several partitions.
        """
        columns = message_checks.columns_of(bodies, tags, headers, self._body_bytes_max)
        count = len(columns.bodies)
        if keys is None:
            raise InvalidArgument("messages to an ordered subject need keys: give one for each")
        message_checks.check_length("keys", keys, count)
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
                self._extend(builder, chunks, pick(columns, indices), choose(keys, indices), indices)
        return SpreadTickets(chunks)

    def put(self, columns: Columns, *, create_time_ms: int | None = None) -> list[TicketChunk]:
        """Send columns unchecked, in separate batches, one for each partition: for messages that QMQ itself makes, which may have ids. The
        create time is now, or `create_time_ms` plus the columns' `create_deltas`.

        Pass no more messages than fit one batch. Raises InvalidArgument without keys; OrderMismatch, BufferFull, ClientClosed.
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
            builder.hold(part, size_of(part), create_time_ms)
            self._close(builder)
        return chunks

    def _extend(
        self, builder: BatchBuilder, chunks: list[TicketChunk], columns: Columns, keys: Sequence[Key], indices: Sequence[int]
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

    def _part(self, columns: Columns, keys: Sequence[Key], begin: int, end: int) -> tuple[Columns, int]:
        if end - begin < len(keys):
            columns, keys = cut(columns, begin, end), keys[begin:end]
        return columns, size_of(columns) + sum(map(len, keys))

    def _begin(self, builder: BatchBuilder) -> None:
        """An empty open batch gets messages."""
        if builder not in self._filled:
            self._filled[builder] = self._loop.time()
            builder.stamp()

    def _wake(self) -> None:
        """First message in this round of the event loop: stamp the time, and close batches at the end of the round."""
        self._check_open()
        self._streams.check_usable()
        self._is_awake = True
        for builder in self._filled:
            builder.stamp()
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
        if self._closed_bytes > BUFFER_BYTES_MAX:
            self._is_awake = False

    def place_of_last(self, ticket: Ticket) -> int:
        """The place, in its batch, of the message that `send` just took; valid only right after `send`."""
        builder = next((each for each in self._filled if each.ticket is ticket), None)
        return (len(builder.bodies) if builder is not None else self._last_count) - 1

    @property
    def bent(self) -> int:
        """Best-effort order: the number of messages that went to another partition than their own, because its broker group could not take
        them.
        """
        return self._streams.bent

    # --- for the streams -----------------------------------------------------------------------------------------------

    def _encode(self, stream: Stream, batch: OrderedBatch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises MessageTooLarge, InvalidArgument."""
        columns = batch.columns
        if batch.is_bent:
            lps = stream.partition.range
            columns = replace(columns, logical_partitions=[lps.first + lp % lps.width for lp in columns.logical_partitions or ()])
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
        self._counters.stored(batch.count, batch.size, max(batch.attempts, 1), self._loop.time() - batch.until + self._timeout_s)
        self.stored_by_group[part.group] = self.stored_by_group.get(part.group, 0) + batch.count
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

    def _answered(self) -> None:
        """An answer came: there may be room for waiters."""
        self._wake_waiting()

    # --- the end -------------------------------------------------------------------------------------------------------

    @property
    def _has_open(self) -> bool:
        return any(each.bodies for each in self._open.all)

    def _close_all(self) -> None:
        for builder in list(self._filled):
            self._close(builder)

    def _abandon_all(self) -> None:
        self._streams.abort()
