"""What the delay groups say of delayed messages and of themselves, as values. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from qmq.client.due_times import time_of
from qmq.model import MessageId

if TYPE_CHECKING:
    from qmq.proto.v1 import delay_pb2 as pb
    from qmq.proto.v1 import meta_pb2


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A delayed message as its delay group has it. Times are in UTC."""

    id: str
    """What a receipt's `delayed_id` says; it stays through moves and runs."""
    subject: str
    message_id: MessageId
    """As consumers will see it: of a recurring message, the next run's."""
    due: datetime
    create_time: datetime
    """When it was handed to the producer, by the producer's clock."""
    key_bytes: bytes | None
    tags: tuple[str, ...]
    headers: Mapping[str, bytes]
    body: bytes | None
    """None where the delay group did not read it: in lists, and of what was cancelled or moved. See `Delayed.show`."""
    body_bytes: int
    state: str
    """"pending", "planned" (on its way), "delivered", "cancelled", or "moved" (and not pending any more where it was moved to)."""
    cron: str
    """Of a recurring message; empty of others."""
    zone: str
    delay_group: str

    @property
    def key(self) -> str | None:
        """Its key as text; None if it has none. Raises UnicodeDecodeError for a key that is no UTF-8: see `key_bytes`."""
        return None if self.key_bytes is None else self.key_bytes.decode()


@dataclass(frozen=True, slots=True)
class DelayBucket:
    """One bucket of a delay group: what is due within `length` from `start` on."""

    start: datetime
    length: timedelta
    messages: int
    pending: int
    """Not delivered, cancelled or moved yet."""
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class DelayTrouble:
    """A subject whose due messages cannot be delivered just now."""

    subject: str
    waiting: int
    reason: str


@dataclass(frozen=True, slots=True)
class DelayGroup:
    """How one delay group stands."""

    name: str
    replica: str
    """Its master."""
    buckets: tuple[DelayBucket, ...]
    """Those with anything pending, in order."""
    pending: int
    waiting: int
    """Due, and not planned yet."""
    planned: int
    """On their way."""
    delivered: int
    lateness_p50: timedelta
    """From due to stored at the real-time brokers, over the last minute's deliveries."""
    lateness_p99: timedelta
    wheel_messages: int
    wheel_bytes: int
    horizon: datetime
    """What is pending and due before this is in memory."""
    troubles: tuple[DelayTrouble, ...]
    time: datetime
    """By its clock."""
    clock_step: timedelta
    """How far its machine's clock is ahead of it."""


@dataclass(frozen=True, slots=True)
class DelayStats:
    """How delivery stands: all delay groups, and why those that did not answer did not."""

    groups: tuple[DelayGroup, ...]
    silent: Mapping[str, str]

    @property
    def pending(self) -> int:
        """Messages that wait, in the groups that answered."""
        return sum(group.pending for group in self.groups)


def message_of(found: pb.DelayedMessage) -> DelayedMessage:
    """Raises InvalidArgument if its message id is none."""
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
    """What a metaserver gathered."""
    return DelayStats(tuple(map(_group_of, found.delays)), dict(found.silent))


def _group_of(found: pb.DelayDescription) -> DelayGroup:
    troubles = tuple(DelayTrouble(each.subject, each.waiting, each.reason) for each in found.troubles)
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
    return DelayBucket(time_of(found.start_ms), length, found.messages, found.pending, found.stored_bytes)
