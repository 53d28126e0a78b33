"""Delayed messages at the client: their producer, their due times, the delay group that takes them,
and what is done with them until they are due.

`DelayedProducer` is like `Producer`, with a column of due times, and with delay groups instead of
broker groups. Any delay group may take a message of an unordered subject. All delayed messages of
an ordered subject go to one delay group, its home (`DelayHome`), one batch at a time, so that
messages of a key that are due in the same millisecond keep their order; and each message needs a
key.

The producer learns whether the subject is ordered when it locates its delay groups: before a batch
leaves, but perhaps after its first messages were sent. If the producer knows, `send` refuses a
message without a key; otherwise the whole batch is refused and not stored.

Due times are milliseconds since 1970, made from timedeltas and datetimes without a clock: the
caller passes the current time.

* A `timedelta` counts from now. A `datetime` needs a time zone, since without one it means another
  moment on each machine.
* Fractions of a millisecond are rounded up: a message is never early.
* A time in the past is allowed and means now; a time before 1970 counts as 1970.
* Delays longer than `limits.DELAY_MS_MAX` are refused here. A delay group may be configured for
  less, and refuses them itself.
* Only the shape of a recurrence is checked here; the delay server knows cron's grammar and the time
  zones.

All clients send an ordered subject's delayed messages to its *home*. The guarantee about the order
of a key (docs/DELAY.md, 5) holds within one delay group, because delay groups do not communicate
with each other. Each subject has an order of preference among the delay groups, by a hash of both
names: subjects are spread over the groups, and clients agree without communicating. The home is the
first delay group that takes messages.

* A drained group is skipped immediately, and is the home again when it is resumed.
* A group that is missing in an answer has no master, usually for seconds: it stays the home for
  `MISSING_S`, and messages wait.

`Delayed` cancels, moves, shows and lists pending messages. Requests go through a metaserver to the
master of the delay group. If the answer to a change is lost, the client repeats the request until
it knows the outcome, or until its time limit:

* Cancel: a cancelled message answers as cancelled, so repeating is harmless. TooLate means that the
  message is delivered, whichever request came first.
* Move: the new due time is fixed at the first request, so repeating changes nothing more. If the
  first request moved the message and it was delivered since, the second one gets TooLate: then the
  client asks for the message's due time, and if that is not known, the error's outcome is unknown.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from array import array
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self, SupportsIndex, TypeAlias

import grpc

from qmq import limits, model
from qmq.client.connection.connection import TIMING, ClientTiming, pause_s
from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import delayed_target, subject_of
from qmq.client.producing.batch import (
    Batch,
    body_bytes,
    check_length,
    columns_of,
    header_map,
    key_bytes,
    tag_tuple,
)
from qmq.client.producing.group_sender import INFLIGHT_BATCHES_MAX, BrokerGroupDestination
from qmq.client.producing.producer import (
    BUFFER_BYTES_MAX,
    Producer,
    ProducerIdentity,
    ProducerOptions,
    ignored,
)
from qmq.client.producing.receipts import BatchReceipt, DelayedBatchReceipt, Ticket, Tickets
from qmq.errors import (
    DelayTooLong,
    InvalidArgument,
    NotConnected,
    Outcome,
    QmqError,
    TooLate,
    Unavailable,
)
from qmq.model import DelayedId, MessageId, check_name
from qmq.process.event_loop import ms_of, time_of
from qmq.proto.v1 import delay_pb2 as pb
from qmq.rpc.channel import CODE
from qmq.wire.batch import encode
from qmq.wire.batch_columns import BatchFlag, Columns
from qmq.wire.frame_payloads import Produced

if TYPE_CHECKING:
    from qmq.client.metadata.service import MetadataClient
    from qmq.proto.v1 import delay_pb2 as pb
    from qmq.proto.v1 import meta_pb2

When: TypeAlias = timedelta | datetime
"""How long from now, or when (with a time zone)."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_NS_PER_MS: Final = 1_000_000
_FIELD: Final = re.compile(r"[0-9A-Za-z*,/#-]+", re.ASCII)
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*", re.ASCII)
CRON_CHARS_MAX: Final = 1_000
DECIDE_S: Final = 30.0
"""How long the client asks for the outcome of a change to a delayed message. A delay group elects a
new master much faster than this.
"""


def time_ms(at: object, what: str = "at") -> int:
    """A datetime as milliseconds since 1970, rounded up. Raises InvalidArgument if it is not a
    datetime, or has no time zone.
    """
    if not isinstance(at, datetime):
        raise InvalidArgument(f"{what} is a datetime with a time zone, not {type(at).__name__}")
    if at.utcoffset() is None:
        raise InvalidArgument(
            f"{what}={at.isoformat()} has no time zone: add one, datetime(..., "
            "tzinfo=ZoneInfo('Europe/Berlin'))"
        )
    return -((_EPOCH - at) // _MILLISECOND)


def due_at_ms(when: object, now_ns: int) -> int:
    """When a message is due, in milliseconds since 1970; `now_ns` is the current time in
    nanoseconds. Raises InvalidArgument, DelayTooLong.
    """
    if isinstance(when, timedelta):
        # `when // timedelta(microseconds=1)` is slower, and some applications pass a delay with
        # every message
        microseconds = (when.days * 86_400 + when.seconds) * 1_000_000 + when.microseconds
        due = -(-(now_ns + microseconds * 1000) // _NS_PER_MS)
    elif isinstance(when, datetime):
        due = time_ms(when)
    else:
        raise InvalidArgument(
            "a delay is a timedelta, and a time is a datetime with a time zone, not "
            f"{type(when).__name__}"
        )
    return _bounded(due, now_ns)


def checked(due: object, now_ns: int) -> int:
    """Check a due time that was given as a number. Raises InvalidArgument, DelayTooLong."""
    if isinstance(due, bool) or not hasattr(due, "__index__"):
        raise InvalidArgument(
            f"a due time is a whole number of milliseconds since 1970, not {type(due).__name__}"
        )
    return _bounded(int(due), now_ns)


def _bounded(due: int, now_ns: int) -> int:
    now = ms_of(now_ns)
    if due > now + limits.DELAY_MS_MAX:
        raise DelayTooLong(
            f"{_span(due - now)} from now is too long: the longest delay is "
            f"{_span(limits.DELAY_MS_MAX)} (two years)"
        )
    return due if due > 0 else 0


def due_of(delay: object, at: object, now_ns: int) -> int:
    """When a message that has `delay` or `at` is due. Raises InvalidArgument, DelayTooLong."""
    if delay is not None and at is not None:
        raise InvalidArgument(
            "give delay or at, not both: delay counts from now, at is a date and time"
        )
    if delay is not None and not isinstance(delay, timedelta):
        raise InvalidArgument(
            f"delay is a timedelta, not {type(delay).__name__}: write "
            "timedelta(seconds=...), or give a date and time as `at`"
        )
    if at is not None and not isinstance(at, datetime):
        raise InvalidArgument(f"at is a datetime with a time zone, not {type(at).__name__}")
    return due_at_ms(at if delay is None else delay, now_ns)


def many(due_times: object, count: int, now_ns: int, what: str = "due") -> list[int]:
    """When `count` messages are due: one item for each, or one for all.
    Raises InvalidArgument, DelayTooLong.
    """
    if isinstance(due_times, timedelta | datetime):
        return [due_at_ms(due_times, now_ns)] * count
    return [due_at_ms(each, now_ns) for each in _column(due_times, count, what)]


def many_ms(due_times_ms: Any, count: int, now_ns: int) -> Sequence[int]:
    """`many` for milliseconds since 1970, with little work for each message. Raises
    InvalidArgument, DelayTooLong.
    """
    if hasattr(due_times_ms, "__index__"):
        return [checked(due_times_ms, now_ns)] * count
    found = _column(due_times_ms, count, "due_ms")
    latest = ms_of(now_ns) + limits.DELAY_MS_MAX
    try:
        numbers = array("q", found)
    except (TypeError, OverflowError):
        return [checked(each, now_ns) for each in found]
    # A bool is 0 or 1, so a list whose least item is larger has none.
    if not found or (min(found) > 1 and max(found) <= latest):
        return numbers
    return [checked(each, now_ns) for each in found]


def many_of(delays: object, ats: object, count: int, now_ns: int) -> list[int]:
    """When messages that have `delays` or `ats` are due. Raises InvalidArgument, DelayTooLong."""
    if delays is not None and ats is not None:
        raise InvalidArgument(
            "give delays or ats, not both: delays count from now, ats are dates and times"
        )
    kind, what, given = (timedelta, "delays", delays) if ats is None else (datetime, "ats", ats)
    items = [given] if isinstance(given, timedelta | datetime) else _column(given, count, what)
    for each in items:
        if not isinstance(each, kind):
            raise InvalidArgument(
                f"{what} are {kind.__name__}s, one for each message or one for all, not "
                f"{type(each).__name__}"
            )
    return many(given, count, now_ns, what)


def _column(items: object, count: int, what: str) -> list[Any]:
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise InvalidArgument(
            f"{what} are one for each message, or one for all, not {type(items).__name__}"
        )
    found = list(items)
    if len(found) != count:
        raise InvalidArgument(
            f"{count} bodies, but {len(found)} {what}: give one for each message, or one for all"
        )
    return found


def check_recurrence(cron: object, zone: object) -> tuple[str, str]:
    """Check the shape of a recurrence: five fields, and a time zone. Raises InvalidArgument."""
    if not isinstance(cron, str):
        raise InvalidArgument(
            f'cron is a str of five fields, such as "0 9 * * *", not {type(cron).__name__}'
        )
    fields = cron.split()
    if len(fields) != 5 or len(cron) > CRON_CHARS_MAX or not all(map(_FIELD.fullmatch, fields)):
        raise InvalidArgument(
            'cron is five fields (minute, hour, day, month, weekday), such as "0 9 * * *", '
            f"not {cron[:80]!r}"
        )
    if not isinstance(zone, str) or len(zone) > limits.NAME_CHARS_MAX or not _ZONE.fullmatch(zone):
        raise InvalidArgument(
            f'cron={cron!r} needs a time zone, such as zone="Europe/Berlin", not {zone!r}'
        )
    return " ".join(fields), zone


def _span(ms: int) -> str:
    days = ms / 86_400_000
    return f"{days:,.0f} days" if days == round(days) else f"{days:,.3f} days"


DueTimes: TypeAlias = Sequence[When] | When
"""Due times of many messages: one item for each, or one for all."""


MISSING_S: Final = 15.0
"""Longer than a failover takes, and much shorter than the time in which a
message must be stored.
"""


class DelayHome:
    def __init__(self, name: str) -> None:
        self._name = name
        self._seen_s: dict[str, float] = {}

    def choose(self, groups: Mapping[str, bool], now_s: float) -> dict[str, bool]:
        """The answer of a metaserver (whether each group is writable),
        with only the home writable.
        """
        for group, is_writable in groups.items():
            if is_writable:
                self._seen_s[group] = now_s
            else:
                self._seen_s.pop(group, None)
        self._seen_s = {
            group: seen_s for group, seen_s in self._seen_s.items() if now_s - seen_s < MISSING_S
        }
        home = max(self._seen_s, key=self._rank, default=None)
        return {group: group == home for group in groups}

    def _rank(self, group: str) -> bytes:
        return hashlib.blake2b(f"{self._name}~{group}".encode(), digest_size=8).digest()


class DelayGroupDestination(BrokerGroupDestination):
    """The destination of a subject's delayed batches:
    any delay group, or the home of an ordered subject.
    """

    def __init__(
        self,
        links: ConnectionPool,
        subject: str,
        identity: ProducerIdentity,
        kind: int,
        flags: BatchFlag,
    ) -> None:
        super().__init__(delayed_target(subject), kind, subject, identity.producer_id)
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
        """One batch for an ordered subject. If a batch were refused while the next one is stored,
        it would end up behind it.
        """
        return 1 if self.is_ordered else INFLIGHT_BATCHES_MAX

    def usable(self, groups: Mapping[str, bool]) -> Mapping[str, bool]:
        """The groups to use. An ordered subject uses only its home."""
        return self._home.choose(groups, self._time_s()) if self.is_ordered else groups

    def encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises MessageTooLarge, InvalidArgument."""
        is_ordered = self.is_ordered
        if is_ordered and is_keyless(batch.columns):
            raise _keyless(subject_of(self.target))
        return encode(
            self._subject,
            batch.columns,
            producer_id=self._producer_id,
            batch_sequence=batch.sequence,
            create_time_ms=batch.create_time_ms,
            flags=batch.flags | self._flags | (BatchFlag.ORDERED if is_ordered else 0),
        )


class DelayedProducer(Producer):
    """A producer of delayed messages for one subject. Make it with `Client.delayed_producer`; use
    it with `async with`, or `flush` and `close` it.
    """

    def __init__(
        self,
        links: ConnectionPool,
        identity: ProducerIdentity,
        subject: str,
        options: ProducerOptions,
        *,
        is_half: bool = False,
        on_closed: Callable[[Self], object] = ignored,
    ) -> None:
        flags = BatchFlag.HALF if is_half else BatchFlag(0)
        self._delay_groups = DelayGroupDestination(links, subject, identity, options.kind, flags)
        self._latest_ms = 0
        """The latest allowed due time, computed once for each round of the event loop."""
        self._needs_key = False
        super().__init__(
            links,
            identity,
            subject,
            options,
            destination=self._delay_groups,
            on_closed=on_closed,
        )

    # --- sending ----------------------------------------------------------------------------------

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

        `due` is a timedelta from now, or a datetime with a time zone. `due_ms`, milliseconds since
        1970, is the fastest way. A time in the past means now. Raises as `Producer.send`, and
        DelayTooLong.
        """
        if type(body) is not bytes or len(body) > self._body_bytes_max:
            body = body_bytes(body, self._body_bytes_max)
        if not self._is_awake or self.waiting_bytes > BUFFER_BYTES_MAX:
            self._wake()
        if type(due_ms) is not int or due is not None or not 0 <= due_ms <= self._latest_ms:
            due_ms = _due(due, due_ms, self._links.now_ns())
        if self._needs_key and not key:
            raise _keyless(self.subject)
        batch = self._open
        bodies = batch.bodies
        bodies.append(body)
        batch.bytes += len(body)
        if (
            key is not None
            or tags is not None
            or headers is not None
            or batch.keys
            or batch.tags
            or batch.headers
        ):
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
        """Send many messages with less work for each; `due` or `due_ms` has one item a message, or
        is one for all. Raises as `send`.
        """
        if (due is None) == (due_ms is None):
            raise _one_of_two()
        columns = columns_of(bodies, tags, headers, self._body_bytes_max)
        count = len(columns.bodies)
        check_length("keys", keys, count)
        columns.keys = [key_bytes(key) for key in keys] if keys else None
        now_ns = self._links.now_ns()
        columns.due_times_ms = (
            many_ms(due_ms, count, now_ns) if due is None else many(due, count, now_ns)
        )
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
        """Send a recurring message: it is delivered at the times of `cron`, in the time zone
        `zone`, from `start_ms` (default: now) on.

        The message is the only one of its batch. Its first run is the first time after `start_ms`.
        Raises as `send`.
        """
        cron, zone = check_recurrence(cron, zone)
        now_ns = self._links.now_ns()
        found = header_map(headers) | {model.CRON: cron.encode(), model.ZONE: zone.encode()}
        columns = Columns([body_bytes(body, self._body_bytes_max)], headers=[found])
        columns.keys = [key_bytes(key)] if key else None
        columns.tags = [tag_tuple(tags)] if tags is not None else None
        columns.due_times_ms = [ms_of(now_ns) if start_ms is None else checked(start_ms, now_ns)]
        (ticket,) = self.put(columns, BatchFlag.RECURRING).tickets
        return ticket

    def put(
        self, columns: Columns, flags: int = 0, *, create_time_ms: int | None = None
    ) -> Tickets:
        """Send columns unchecked, in separate batches: for messages that QMQ itself makes.

        Their create time is now, or `create_time_ms` plus the columns' `create_deltas`.

        Raises InvalidArgument if due times or required keys are missing; BufferFull, ClientClosed.
        """
        if columns.due_times_ms is None or len(columns.due_times_ms) != len(columns.bodies):
            raise _one_of_two()
        if self._is_keyless(columns):
            raise _keyless(self.subject)
        return super().put(columns, flags, create_time_ms=create_time_ms)

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
            len(batch.columns.bodies),
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
    return checked(due_ms, now_ns) if due is None else due_at_ms(due, now_ns)


def _one_of_two() -> InvalidArgument:
    return InvalidArgument(
        "a delayed message needs its time, once: due (a timedelta, or a datetime with a time "
        "zone) or due_ms"
    )


def _keyless(subject: str) -> InvalidArgument:
    return InvalidArgument(
        f"subject {subject!r} is ordered, so a delayed message to it needs a key: nothing of "
        "its batch is stored"
    )


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A delayed message as its delay group has it. Times are in UTC."""

    id: str
    """The receipt's `delayed_id`; it stays the same through moves and runs."""
    subject: str
    message_id: MessageId
    """The message id that consumers will see; for a recurring message, that of the next run."""
    due: datetime
    create_time: datetime
    """When the producer got the message, by the producer's clock."""
    key_bytes: bytes | None
    tags: tuple[str, ...]
    headers: Mapping[str, bytes]
    body: bytes | None
    """None where the delay group did not read it: in lists, and for cancelled or moved messages.
    See `Delayed.show`.
    """
    body_bytes: int
    state: str
    """"half" (waiting for a decision), "pending", "planned" (on its way), "delivered", "cancelled",
    or "moved" (and no longer pending at its new time).
    """
    cron: str
    """The schedule of a recurring message; empty for others."""
    zone: str
    delay_group: str

    @property
    def key(self) -> str | None:
        """The message's key as text; None if it has none. Raises UnicodeDecodeError for a key that
        is not UTF-8: see `key_bytes`.
        """
        return None if self.key_bytes is None else self.key_bytes.decode()


@dataclass(frozen=True, slots=True)
class DelayBucket:
    """The messages of a delay group that are due within `length` from `start` on."""

    start: datetime
    length: timedelta
    messages: int
    pending: int
    """Messages that are not delivered, cancelled or moved."""
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class DelayTrouble:
    """A subject whose due messages cannot be delivered at the moment."""

    subject: str
    waiting: int
    reason: str


@dataclass(frozen=True, slots=True)
class DelayGroup:
    """The state of one delay group."""

    name: str
    replica: str
    """The master replica."""
    buckets: tuple[DelayBucket, ...]
    """Buckets with pending messages, in order."""
    pending: int
    waiting: int
    """Messages that are due and not planned yet."""
    planned: int
    """Messages that are on their way."""
    delivered: int
    lateness_p50: timedelta
    """From due to stored at the real-time brokers, over the last minute's deliveries."""
    lateness_p99: timedelta
    wheel_messages: int
    wheel_bytes: int
    horizon: datetime
    """Pending messages that are due before this are in memory."""
    troubles: tuple[DelayTrouble, ...]
    time: datetime
    """The delay group's time."""
    clock_step: timedelta
    """How far the machine's clock is ahead of the delay group's time."""


@dataclass(frozen=True, slots=True)
class DelayStats:
    """The state of all delay groups, and why groups did not answer."""

    groups: tuple[DelayGroup, ...]
    silent: Mapping[str, str]

    @property
    def pending(self) -> int:
        """Pending messages in the groups that answered."""
        return sum(group.pending for group in self.groups)


def message_of(found: pb.DelayedMessage) -> DelayedMessage:
    """Convert a protobuf message. Raises InvalidArgument if its message id is malformed."""
    has_body = not found.body_bytes or found.body_bytes == len(found.body)
    return DelayedMessage(
        found.id,
        found.subject,
        MessageId.parse(found.message_id),
        time_of(found.due_ms),
        time_of(found.create_time_ms),
        found.key or None,
        tuple(found.tags),
        {each.name: each.value for each in found.headers},
        found.body if has_body else None,
        found.body_bytes or len(found.body),
        found.state,
        found.cron,
        found.zone,
        found.group,
    )


def stats_of(found: meta_pb2.DescribeDelaysResponse) -> DelayStats:
    """Convert the metaserver's answer."""
    return DelayStats(tuple(map(_group_of, found.delays)), dict(found.silent))


def _group_of(found: pb.DelayDescription) -> DelayGroup:
    troubles = tuple(
        DelayTrouble(each.subject, each.waiting, each.reason) for each in found.troubles
    )
    return DelayGroup(
        found.group,
        found.replica,
        tuple(map(_bucket_of, found.buckets)),
        found.pending,
        found.waiting,
        found.planned,
        found.delivered,
        timedelta(milliseconds=found.lateness_p50_ms),
        timedelta(milliseconds=found.lateness_p99_ms),
        found.wheel_messages,
        found.wheel_bytes,
        time_of(found.horizon_ms),
        troubles,
        time_of(found.time_ms),
        timedelta(milliseconds=found.clock_step_ms),
    )


def _bucket_of(found: pb.DelayBucket) -> DelayBucket:
    length = timedelta(milliseconds=found.length_ms)
    return DelayBucket(
        time_of(found.start_ms), length, found.messages, found.pending, found.stored_bytes
    )


PAGE: Final = 500


class Delayed:
    """Pending delayed messages: `Client.delayed`. An `id` is a receipt's `delayed_id`."""

    def __init__(
        self,
        metadata: Callable[[], MetadataClient],
        now_ns: Callable[[], int] = time.time_ns,
        timing: ClientTiming = TIMING,
    ) -> None:
        self._metadata = metadata
        self._now_ns = now_ns
        self._timing = timing

    async def cancel(self, id: str | DelayedId) -> DelayedMessage:
        """Cancel a delayed message, or all further runs of a recurring one. Cancelling it again has
        the same result.

        Raises TooLate if the message is on its way or delivered, MessageNotFound, InvalidArgument;
        Unavailable (see its `outcome`), ClientClosed.
        """
        found = await self._ask("CancelDelayed", pb.CancelDelayedRequest(id=_id_text(id)))
        return message_of(found)

    async def move(self, id: str | DelayedId, when: When) -> DelayedMessage:
        """Change the due time, by a timedelta from now or a datetime; a time in the past means now.
        For a recurring message this moves the next run only: the runs between its time by the
        schedule and the new one come after it, late, and none comes twice.

        Raises as `cancel`, and DelayTooLong.
        """
        request = pb.MoveDelayedRequest(
            id=_id_text(id), due_ms=max(due_at_ms(when, self._now_ns()), 1)
        )
        try:
            found = await self._ask("MoveDelayed", request)
        except TooLate as late:
            if late.outcome is not Outcome.UNKNOWN:
                raise
            found = await self._moved(request, late)
        return message_of(found)

    async def _moved(self, request: pb.MoveDelayedRequest, late: TooLate) -> pb.DelayedMessage:
        """The message, if this client's request moved it before it was delivered."""
        try:
            found: pb.DelayedMessage = await self._ask(
                "ShowDelayed", pb.ShowDelayedRequest(id=request.id)
            )
        except QmqError:
            raise late from None
        if found.due_ms != request.due_ms:
            raise late
        return found

    async def show(self, id: str | DelayedId) -> DelayedMessage:
        """The message and its state. Raises MessageNotFound, InvalidArgument,
        Unavailable, ClientClosed.
        """
        found = await self._ask("ShowDelayed", pb.ShowDelayedRequest(id=_id_text(id)))
        return message_of(found)

    async def list(
        self,
        subject: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        limit: int | None = None,
        *,
        is_half: bool = False,
        silent: dict[str, str] | None = None,
    ) -> AsyncIterator[DelayedMessage]:
        """Pending messages of a subject (default: all subjects) that are due from `start` on and
        before `end`, ordered by due time, without bodies; at most `limit`. With `is_half`, only
        half messages, which wait for a decision: see `Client.delayed_producer`.

        Raises InvalidName, InvalidArgument; NotConnected if a delay group does not answer, because
        the list would be incomplete. With a dict as `silent` an incomplete list is returned if at
        least one group answers; the dict then says which groups are missing, and why.
        """
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 0
        ):
            raise InvalidArgument(f"limit is a number of messages, not {limit!r}")
        request = pb.ListDelayedRequest(
            subject=check_name("subject", subject) if subject else "",
            from_ms=0 if start is None else max(time_ms(start, "start"), 1),
            to_ms=0 if end is None else max(time_ms(end, "end"), 1),
            is_half=is_half,
        )
        left = limit
        while left is None or left > 0:
            request.messages_max = PAGE if left is None else min(left, PAGE)
            page = await self._metadata().list_delayed(request)
            if page.silent and silent is None:
                raise NotConnected(
                    f"{', '.join(sorted(page.silent))} did not answer, so those messages are "
                    f"missing: {'; '.join(page.silent.values())}"
                )
            if silent is not None:
                silent.update(page.silent)
            for found in page.messages:
                yield message_of(found)
            left = None if left is None else left - len(page.messages)
            if not page.next:
                return
            request.after = page.next

    async def stats(self) -> DelayStats:
        """Pending messages, lateness of deliveries, and which delay groups did not answer. Raises
        NotConnected, ClientClosed.
        """
        return stats_of(await self._metadata().describe_delays())

    async def _ask(self, method: str, request: Any) -> Any:
        """The answer. A failure after an earlier try that may have done the request has an unknown
        outcome, except TooLate to a cancel.
        """
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        is_uncertain, attempt = False, 0
        while True:
            try:
                return await self._metadata().ask_delayed(method, request)
            except Unavailable as failure:
                is_uncertain |= method != "ShowDelayed" and _may_be_done(failure)
                rest_s = pause_s(self._timing.decide_retry_s, attempt) * random.uniform(0.7, 1.3)  # noqa: S311 - jitter, not a secret
                if loop.time() + rest_s > begun_s + DECIDE_S:
                    raise _in_doubt(failure) if is_uncertain else failure from failure
            except QmqError as failure:
                if is_uncertain and not (
                    method == "CancelDelayed" and isinstance(failure, TooLate)
                ):
                    raise _in_doubt(failure) from failure
                raise
            attempt += 1
            await asyncio.sleep(rest_s)


def _id_text(given: object) -> str:
    """The id as text. Raises InvalidArgument if it is malformed."""
    return str(given if isinstance(given, DelayedId) else DelayedId.parse(given))  # type: ignore[arg-type]


def _may_be_done(failure: Unavailable) -> bool:
    """Whether the delay group may have done the request.
    A broken connection says nothing about it.
    """
    cause = failure.__cause__
    trailers = (
        cause.trailing_metadata() or ()
        if isinstance(cause, grpc.aio.AioRpcError | grpc.Call)
        else ()
    )
    is_said = CODE in {key for key, _ in trailers}
    return failure.outcome is Outcome.UNKNOWN or not is_said


def _in_doubt(failure: QmqError) -> QmqError:
    found = type(failure)(
        f"{failure.message} (an earlier answer was lost, so it may have been done)",
        outcome=Outcome.UNKNOWN,
    )
    found.code = failure.code
    return found
