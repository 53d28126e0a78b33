"""Delayed messages and delay groups as values. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from qmq.clock import time_of
from qmq.model import MessageId

if TYPE_CHECKING:
    from qmq.proto.v1 import delay_pb2 as pb
    from qmq.proto.v1 import meta_pb2


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
    """None where the delay group did not read it: in lists, and for cancelled or moved messages. See `Delayed.show`."""
    body_bytes: int
    state: str
    """"half" (waiting for a decision), "pending", "planned" (on its way), "delivered", "cancelled", or "moved" (and no longer pending at
    its new time).
    """
    cron: str
    """The schedule of a recurring message; empty for others."""
    zone: str
    delay_group: str

    @property
    def key(self) -> str | None:
        """The message's key as text; None if it has none. Raises UnicodeDecodeError for a key that is not UTF-8: see `key_bytes`."""
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
