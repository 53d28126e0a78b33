"""The batching producer of delayed messages: like `Producer`, with a column of due times, and with delay groups instead of broker groups.

Any delay group may take a message of an unordered subject. All delayed messages of an ordered subject go to one delay group, its home
(delay_home.py), one batch at a time, so that messages of a key that are due in the same millisecond keep their order; and each message
needs a key.

The producer learns whether the subject is ordered when it locates its delay groups: before a batch leaves, but perhaps after its first
messages were sent. If the producer knows, `send` refuses a message without a key; otherwise the whole batch is refused and not stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, SupportsIndex

from qmq import headers as system
from qmq import limits
from qmq.batch import encode
from qmq.batch_columns import BatchFlag, Columns
from qmq.client import due_times, message_checks
from qmq.client.backlog import BUFFER_BYTES_MAX, ignored
from qmq.client.delay_home import DelayHome
from qmq.client.due_times import DueTimes, When
from qmq.client.links import Links
from qmq.client.open_batch import Batch
from qmq.client.pipe import INFLIGHT_BATCHES_MAX
from qmq.client.producer import BATCH_BYTES, BATCH_MESSAGES, Producer, ProducerIdentity, frame_kind
from qmq.client.receipts import BatchReceipt, DelayedBatchReceipt, Ticket, Tickets
from qmq.client.route_book import delayed_target
from qmq.clock import ms_of
from qmq.errors import InvalidArgument
from qmq.wire.frame_payloads import Produced


class DelayGroupDestination:
    """The destination of a subject's delayed batches: any delay group, or the home of an ordered subject."""

    def __init__(self, links: Links, subject: str, identity: ProducerIdentity, kind: int, flags: BatchFlag) -> None:
        self.target, self.kind = delayed_target(subject), kind
        self._subject = subject
        self._identity = identity
        self._flags = flags
        self._book = links.locator.book
        self._home = DelayHome(subject)
        self._time_s = asyncio.get_running_loop().time

    @property
    def is_ordered(self) -> bool:
        """Whether the subject is known to be ordered."""
        return self._book.ordering(self.target) is not None

    @property
    def inflight_max(self) -> int:
        """One batch for an ordered subject. If a batch were refused while the next one is stored, it would end up behind it."""
        return 1 if self.is_ordered else INFLIGHT_BATCHES_MAX

    def usable(self, groups: Mapping[str, bool]) -> Mapping[str, bool]:
        """The groups to use. An ordered subject uses only its home."""
        return self._home.choose(groups, self._time_s()) if self.is_ordered else groups

    def encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises MessageTooLarge, InvalidArgument."""
        is_ordered = self.is_ordered
        if is_ordered and is_keyless(batch.columns):
            raise _keyless(self._subject)
        return encode(
            self._subject.encode(),
            batch.columns,
            producer_id=self._identity.producer_id,
            batch_sequence=batch.sequence,
            create_time_ms=batch.create_time_ms,
            flags=batch.flags | self._flags | (BatchFlag.ORDERED if is_ordered else 0),
        )


class DelayedProducer(Producer):
    """A producer of delayed messages for one subject. Make it with `Client.delayed_producer`; use it with `async with`, or `flush` and
    `close` it.
    """

    def __init__(
        self,
        links: Links,
        identity: ProducerIdentity,
        subject: str,
        *,
        batch_messages: int = BATCH_MESSAGES,
        batch_bytes: int = BATCH_BYTES,
        delivery_timeout_s: float = 120.0,
        body_bytes_max: int = limits.LONG_BODY_BYTES_MAX,
        acks: str = "quorum",
        is_half: bool = False,
        on_closed: Callable[[Self], object] = ignored,
    ) -> None:
        flags = BatchFlag.HALF if is_half else BatchFlag(0)
        self._delay_groups = DelayGroupDestination(links, subject, identity, frame_kind(acks, batch_messages), flags)
        self._latest_ms = 0
        """The latest allowed due time, computed once for each round of the event loop."""
        self._needs_key = False
        super().__init__(
            links,
            identity,
            subject,
            batch_messages=batch_messages,
            batch_bytes=batch_bytes,
            delivery_timeout_s=delivery_timeout_s,
            body_bytes_max=body_bytes_max,
            acks=acks,
            destination=self._delay_groups,
            on_closed=on_closed,
        )

    # --- sending -------------------------------------------------------------------------------------------------------

    def send(
        self,
        body: bytes,
        key: str | bytes | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        *,
        due: When | None = None,
        due_ms: int | None = None,
    ) -> Ticket:
        """Put a message into the open batch; `await` the ticket to know that it is stored.

        `due` is a timedelta from now, or a datetime with a time zone. `due_ms`, milliseconds since 1970, is the fastest way. A time in the
        past means now. Raises as `Producer.send`, and DelayTooLong.
        """
        if type(body) is not bytes or len(body) > self._body_bytes_max:
            body = message_checks.body_bytes(body, self._body_bytes_max)
        if not self._is_awake or self._closed_bytes > BUFFER_BYTES_MAX:
            self._wake()
        if type(due_ms) is not int or due is not None or not 0 <= due_ms <= self._latest_ms:
            due_ms = _due(due, due_ms, self._links.now_ns())
        if self._needs_key and not key:
            raise _keyless(self.subject)
        batch = self._open
        bodies = batch.bodies
        bodies.append(body)
        batch.bytes += len(body)
        if key is not None or tags is not None or headers is not None or batch.keys or batch.tags or batch.headers:
            batch.add_columns(key, tags, headers)
        if batch.due_times_ms is None:
            batch.due_times_ms = []
        batch.due_times_ms.append(due_ms)
        ticket = batch.ticket
        if len(bodies) >= self._batch_messages or batch.bytes >= self._batch_bytes:
            self._close_open()
        return ticket

    def send_many(
        self,
        bodies: Sequence[bytes],
        keys: Sequence[str | bytes | None] | None = None,
        tags: Sequence[Iterable[str]] | None = None,
        headers: Sequence[Mapping[str, str | bytes]] | None = None,
        *,
        due: DueTimes | None = None,
        due_ms: Sequence[int] | int | None = None,
    ) -> Tickets:
        """Send many messages with less work for each; `due` or `due_ms` has one item a message, or is one for all. Raises as `send`."""
        if (due is None) == (due_ms is None):
            raise _one_of_two()
        columns = message_checks.columns_of(bodies, tags, headers, self._body_bytes_max)
        count = len(columns.bodies)
        message_checks.check_length("keys", keys, count)
        columns.keys = [message_checks.key_bytes(key) for key in keys] if keys else None
        now_ns = self._links.now_ns()
        columns.due_times_ms = due_times.many_ms(due_ms, count, now_ns) if due is None else due_times.many(due, count, now_ns)
        return self.put(columns)

    def send_recurring(
        self,
        body: bytes,
        cron: str,
        zone: str,
        *,
        start_ms: int | None = None,
        key: str | bytes | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Ticket:
        """Send a recurring message: it is delivered at the times of `cron`, in the time zone `zone`, from `start_ms` (default: now) on.

        The message is the only one of its batch. Its first run is the first time after `start_ms`. Raises as `send`.
        """
        cron, zone = due_times.check_recurrence(cron, zone)
        now_ns = self._links.now_ns()
        found = message_checks.header_map(headers) | {system.CRON: cron.encode(), system.ZONE: zone.encode()}
        columns = Columns([message_checks.body_bytes(body, self._body_bytes_max)], headers=[found])
        columns.keys = [message_checks.key_bytes(key)] if key else None
        columns.tags = [message_checks.tag_tuple(tags)] if tags is not None else None
        columns.due_times_ms = [ms_of(now_ns) if start_ms is None else due_times.checked(start_ms, now_ns)]
        (ticket,) = self.put(columns, BatchFlag.RECURRING).tickets
        return ticket

    def put(self, columns: Columns, flags: int = 0, *, create_time_ms: int | None = None) -> Tickets:
        """Send columns unchecked, in separate batches: for messages that QMQ itself makes.

        Their create time is now, or `create_time_ms` plus the columns' `create_deltas`.

        Raises InvalidArgument if due times or required keys are missing; BufferFull, ClientClosed.
        """
        if columns.due_times_ms is None or len(columns.due_times_ms) != len(columns.bodies):
            raise _one_of_two()
        if self._is_keyless(columns):
            raise _keyless(self.subject)
        return self._put(columns, flags, create_time_ms)

    def _wake(self) -> None:
        super()._wake()
        self._latest_ms = ms_of(self._links.now_ns()) + limits.DELAY_MS_MAX
        self._needs_key = self._delay_groups.is_ordered

    def _is_keyless(self, columns: Columns) -> bool:
        return self._delay_groups.is_ordered and is_keyless(columns)

    def _receipt(self, group: str, batch: Batch, produced: Produced) -> BatchReceipt:
        return DelayedBatchReceipt(
            self.subject,
            0,
            produced.base_sequence,
            batch.count,
            self._identity.producer_id,
            batch.sequence,
            produced.append_time_ms,
            group,
            batch.columns.message_ids,
            batch.columns.due_times_ms or (),
        )


def is_keyless(columns: Columns) -> bool:
    """Whether any message lacks a key."""
    return columns.keys is None or b"" in columns.keys


def _due(due: When | None, due_ms: SupportsIndex | None, now_ns: int) -> int:
    if (due is None) == (due_ms is None):
        raise _one_of_two()
    return due_times.checked(due_ms, now_ns) if due is None else due_times.due_ms(due, now_ns)


def _one_of_two() -> InvalidArgument:
    return InvalidArgument("a delayed message needs its time, once: due (a timedelta, or a datetime with a time zone) or due_ms")


def _keyless(subject: str) -> InvalidArgument:
    return InvalidArgument(f"subject {subject!r} is ordered, so a delayed message to it needs a key: nothing of its batch is stored")
