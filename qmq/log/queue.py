"""A queue in the store: its numbers, its consume log, its producers, and the groups' shares; and in
one table what each action changes, for a master that acts, for a slave that follows, and for every
replay.

The actions of a schedule are not in the table: they change no queue, and go to the store's
projection (`qmq.log.store`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from qmq_ordering.routes import LpRange

from qmq.log.actions import (
    Begin,
    DeadLettered,
    DropQueue,
    Forget,
    Join,
    LaneAction,
    LaneBegin,
    LaneDone,
    LaneFail,
    LaneGrant,
    LaneInherit,
    LanePark,
    LaneRelease,
    LaneReset,
    LaneUnpark,
    Leave,
    PullAction,
    Reset,
    Return,
    SettleAction,
    ShareAction,
)
from qmq.log.consume_log import ConsumeLog, IndexEntry
from qmq.log.disk import Disk
from qmq.log.group_state import GroupState, ShareEvent
from qmq.log.lane_state import GroupLaneState
from qmq.log.producers import Producers, birth_ms
from qmq.model import QueueId
from qmq.rpc.channel import LOOK_INSIDE
from qmq.wire.batch import BatchView
from qmq.wire.batch_columns import BatchFlag, RegionHeader, tag_bloom
from qmq.wire.frame_payloads import Produced

_AGAIN: Final = int(BatchFlag.AGAIN)
"""A plain number, because every batch is tested for this flag,
and an enum's `&` creates a new member.
"""
_LANES: Final = 1
"""Marks the state of a `GroupLaneState`."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The command message at `sequence` that closed a partition."""

    sequence: int
    change_id: str
    to_version: int


class Queue:
    """All derived state of one queue: a subject's messages on this broker group, or one partition
    of an ordered subject.

    `start_sequence <= visible_sequence <= next_sequence`: retention deleted messages before the
    first; consumers see messages before the second (they are committed); the next message gets the
    third.
    """

    __slots__ = (
        "cumulative_bytes",
        "id",
        "index",
        "is_ordered",
        "lanes",
        "last_append_ms",
        "next_sequence",
        "producers",
        "sealed",
        "shares",
        "start_sequence",
        "visible_sequence",
    )

    def __init__(self, disk: Disk, folder: Path, queue_id: QueueId) -> None:
        self.id = queue_id
        self.is_ordered = queue_id.partition > 0
        """True if the queue is a partition of an ordered subject.
        Partitions are numbered from 1.
        """
        self.index = ConsumeLog(disk, folder, queue_id)
        self.producers = Producers()
        self.shares: dict[str, GroupState] = {}
        self.lanes: dict[str, GroupLaneState] = {}
        self.sealed: Sealed | None = None
        self.start_sequence = 0
        self.next_sequence = 0
        self.visible_sequence = 0
        self.cumulative_bytes = 0
        self.last_append_ms = 0

    def entry_of(self, view: BatchView, position: int) -> IndexEntry:
        """The consume-log entry of the queue's next batch, at `position` in the message log."""
        envelope, header = view.envelope, view.header
        bloom = LOOK_INSIDE if header.is_directed else tag_bloom(view.tag_hashes())
        return IndexEntry(
            envelope.base_sequence,
            position,
            envelope.append_time_ms,
            header.producer_id,
            header.batch_sequence,
            bloom,
            self.cumulative_bytes,
            envelope.total_bytes,
            header.count,
        )

    def add(self, entry: IndexEntry) -> None:
        """Index a stored batch and remember its producer.
        Called when appending and when replaying.
        """
        self.index.append(entry)
        self.note(entry)

    def note(self, entry: IndexEntry) -> None:
        """Count a stored batch that is in the consume log already."""
        self.next_sequence = entry.base_sequence + entry.count
        self.cumulative_bytes = entry.cumulative_bytes + entry.total_bytes
        self.last_append_ms = entry.append_time_ms
        produced = Produced(entry.base_sequence, entry.append_time_ms)
        self.producers.add(entry.producer_id, entry.batch_sequence, produced)

    def drop(self) -> list[Path]:
        """Drop the content of the queue, because its subject was deleted. Sequences continue.
        Returns files to delete.
        """
        self.start_sequence = self.visible_sequence = self.next_sequence
        self.producers = Producers()
        self.sealed = None
        return self.index.drop_before(self.index.count)

    def purge(self) -> None:
        """Drop all stored messages, as retention does.
        The disk space becomes free with whole segments.
        """
        self.start_sequence = self.visible_sequence = self.next_sequence

    @property
    def is_blank(self) -> bool:
        """True if a drop would change nothing."""
        has_past = (
            self.index.count > self.index.first
            or self.producers.to_state()
            or self.sealed is not None
        )
        return (
            not (has_past or self.shares or self.lanes)
            and self.start_sequence == self.next_sequence
        )

    def find_duplicate(self, header: RegionHeader) -> Produced | None:
        """The position of the batch, if the queue has it. For a producer that was silent for a long
        time, the log is searched only if the batch has the flag AGAIN.
        """
        producer_id, number, is_again = (
            header.producer_id,
            header.batch_sequence,
            header.flags & _AGAIN,
        )
        window, first = self.producers.windows.get(producer_id), self.index.first
        if window is not None:
            # nearly always so: this decides without the window's dict, which is out of the caches
            if number > window.newest:
                return None
            found = window.find(number)
            if (
                found is not None
                or number >= window.tells_from
                or not (is_again or window.may_have_forgotten(number))
            ):
                return found
        elif is_again:
            # An id from behind the newest message may be from a clock that is years ahead: then
            # everything is searched.
            born_ms = birth_ms(producer_id)
            first = (
                self.index.find_time(born_ms)
                if born_ms <= self.last_append_ms
                else self.index.first
            )
        else:
            return None
        entry = self.index.find_batch(producer_id, number, first)
        return Produced(entry.base_sequence, entry.append_time_ms) if entry is not None else None

    def to_snapshot(self) -> list[Any]:
        """The state in a segment's opening snapshot: enough to continue the numbers and to
        recognise duplicates.
        """
        return [
            self.id.subject,
            self.id.partition,
            self.next_sequence,
            self.cumulative_bytes,
            self.last_append_ms,
            self.producers.to_state(),
            astuple(self.sealed) if self.sealed is not None else None,
        ]

    def load_snapshot(self, state: list[Any]) -> None:
        """Load the state of `to_snapshot`. The queue then has a history and no stored messages."""
        self.next_sequence, self.cumulative_bytes, self.last_append_ms = state[2:5]
        self.start_sequence = self.visible_sequence = self.next_sequence
        self.producers = Producers.from_state(state[5])
        sealed = state[6] if len(state) > 6 else None
        self.sealed = Sealed(*sealed) if sealed else None

    def share_states(self) -> list[list[object]]:
        """The states of the groups' shares in a segment's opening snapshot."""
        return [
            [self.id.subject, self.id.partition, group, share.to_state()]
            for group, share in self.shares.items()
        ]

    def lane_states(self) -> list[list[object]]:
        """Like `share_states`, for groups that read lanes."""
        return [
            [self.id.subject, self.id.partition, group, lanes.to_state(), _LANES]
            for group, lanes in self.lanes.items()
        ]

    def load_share(self, state: list[Any]) -> None:
        """Load one of `share_states` or `lane_states`."""
        _, _, group, share, *kind = state
        if kind:
            self.lanes[group] = GroupLaneState.from_state(share)
        else:
            self.shares[group] = GroupState.from_state(share)

    def share(self, group: str) -> GroupState:
        """The group's share. It is created if absent."""
        share = self.shares.get(group)
        if share is None:
            share = self.shares[group] = GroupState()
        return share

    def forget(self, action: Forget) -> None:
        """The group is deleted here: its share and its lanes."""
        self.shares.pop(action.group, None)
        self.lanes.pop(action.group, None)

    def forget_all(self, _: DropQueue) -> None:
        """Every group is deleted here."""
        self.shares.clear()
        self.lanes.clear()

    def lane_share(self, group: str) -> GroupLaneState:
        """The group's lanes. They are created if absent."""
        share = self.lanes.get(group)
        if share is None:
            share = self.lanes[group] = GroupLaneState()
        return share

    def is_finished(self, share: GroupLaneState | None, lps: LpRange) -> bool:
        """True if the partition is closed, and all of the range, including the command message, is
        done by the group or deleted by retention.

        False for a group that never began here.
        """
        if self.sealed is None:
            return False
        if self.start_sequence >= self.sealed.sequence:
            return True
        parts = share.progress_of(lps) if share is not None else []
        return bool(parts) and all(each.done_before > self.sealed.sequence for each in parts)


def _whole(queue: Queue, _group: str) -> Queue:
    return queue


CHANGES: Final[dict[type[Any], tuple[Callable[[Queue, str], Any], Callable[..., Any]]]] = {
    Begin: (Queue.share, GroupState.begin),
    Join: (Queue.share, GroupState.join),
    Return: (Queue.share, GroupState.take_back),
    PullAction: (Queue.share, GroupState.pull),
    SettleAction: (Queue.share, GroupState.settle),
    Leave: (Queue.share, GroupState.leave),
    Reset: (Queue.share, GroupState.reset),
    DeadLettered: (Queue.share, GroupState.dead_lettered),
    LaneBegin: (Queue.lane_share, GroupLaneState.begin),
    LaneGrant: (Queue.lane_share, GroupLaneState.grant),
    LaneRelease: (Queue.lane_share, GroupLaneState.release),
    LaneDone: (Queue.lane_share, GroupLaneState.done),
    LaneFail: (Queue.lane_share, GroupLaneState.fail),
    LanePark: (Queue.lane_share, GroupLaneState.park),
    LaneUnpark: (Queue.lane_share, GroupLaneState.unpark),
    LaneReset: (Queue.lane_share, GroupLaneState.reset),
    LaneInherit: (Queue.lane_share, GroupLaneState.inherit),
    Forget: (_whole, Queue.forget),
    DropQueue: (_whole, Queue.forget_all),
}
"""For each kind of action: the part of the queue that it changes, found by the action's group, and
the function that changes it.
"""


def apply(queue: Queue, action: ShareAction | LaneAction) -> Any:
    """Apply an action to its queue; the group's share, or its lanes, are created if absent. Returns
    what the table's function returns.
    """
    part, change = CHANGES[type(action)]
    return change(part(queue, action.group), action)


def apply_to(
    state: GroupState | GroupLaneState, action: ShareAction | LaneAction, *events: list[ShareEvent]
) -> Any:
    """As `apply`, on a share or a group's lanes that are kept without their queue. A share adds its
    events to the list.
    """
    return CHANGES[type(action)][1](state, action, *events)
