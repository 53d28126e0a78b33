"""A queue in the store: its numbers, its consume log, its producers, and the groups' shares; and in
one table what each action changes, for a master that acts, for a slave that follows, and for every
replay.

The actions of a schedule are not in the table: they change no queue, and go to the store's
projection (`qmq.log.store`).

Producing is idempotent. A producer numbers its batches over all its subjects, and sends a batch
again under the same number if its outcome is unknown. A queue remembers the newest `WINDOW` numbers
of each producer with the batches' positions. If a batch's number is in the window, the broker
answers with the stored position. Numbers may have gaps (other subjects) and may arrive out of order
(a refused batch, tried again after later ones), so the window is a set, not a high-water mark. For
a number older than the window the queue searches its consume log, which is exact but slower.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
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
    StepAction,
    StepDone,
    StepPlan,
    StepVoid,
)
from qmq.log.consume_log import ConsumeLog, IndexEntry
from qmq.log.disk import Disk
from qmq.log.group_state import GroupState, ShareEvent
from qmq.log.lane_state import GroupLaneState
from qmq.log.step_record import Settlement
from qmq.log.step_state import StepState
from qmq.model import STEPS, QueueId
from qmq.rpc.channel import LOOK_INSIDE
from qmq.wire.batch import BatchView
from qmq.wire.batch_columns import BatchFlag, RegionHeader, tag_bloom
from qmq.wire.frame_payloads import Produced

_AGAIN: Final = int(BatchFlag.AGAIN)
"""A plain number, because every batch is tested for this flag,
and an enum's `&` creates a new member.
"""
LANES_STATE: Final = 1
"""Marks the state of a `GroupLaneState`."""
STEPS_STATE: Final = 2
"""Marks the state of a `StepState`."""

WINDOW: Final = 64
"""The numbers that a window keeps:
at least as many as the batches that a client keeps in flight.
"""

PRODUCERS_MAX: Final = 9_000
"""The producers that a queue remembers. Beyond this number the producer that was silent for the
longest time is forgotten. Their windows have at most 1,760 bytes each in a snapshot, so that a
queue's state fits into one entry.
"""

CLOCKS_MS: Final = 24 * 3600 * 1000
"""The largest difference between the clocks of a producer and a broker. With a producer's clock
that is further ahead, a queue does not recognise a batch that is sent again after more than an
hour, once the queue has messages from after the producer's time.
"""


def birth_ms(producer_id: int) -> int:
    """The time when the producer was created, by its own clock: its id contains the time. None of
    its batches is older.
    """
    return max((producer_id >> 20) - CLOCKS_MS, 0)


class ProducerWindow:
    """The newest batches of one producer in one queue."""

    __slots__ = ("last_ms", "newest", "oldest_ever", "stored")

    def __init__(self) -> None:
        self.stored: dict[int, Produced] = {}
        """The newest numbers, with the places of their batches."""
        self.newest = -1
        """The highest number that was ever stored. On a partition of an ordered subject the next
        one must be its successor.
        """
        self.last_ms = 0
        self.oldest_ever = 0
        """Below this number the window does not know whether a batch was stored."""

    def may_have_forgotten(self, batch_sequence: int) -> bool:
        """True if a batch may have been stored although its number is not in the window."""
        return batch_sequence < self.oldest_ever

    @property
    def tells_from(self) -> int:
        """The number from which on the window is complete,
        even if the producer was forgotten before.
        """
        return self.oldest_ever or min(self.stored)

    def stored_below(self, before: int) -> list[tuple[int, Produced]]:
        """The stored numbers below `before` with their places, the highest first; complete from
        `tells_from` on.
        """
        begin = self.tells_from
        return sorted(
            [(number, where) for number, where in self.stored.items() if begin <= number < before],
            reverse=True,
        )

    def to_state(self) -> list[int]:
        """For checkpoint and snapshot."""
        flat = [self.oldest_ever, self.last_ms]
        for number, (base_sequence, append_time_ms) in self.stored.items():
            flat += (number, base_sequence, append_time_ms)
        return flat

    @classmethod
    def from_state(cls, flat: list[int]) -> ProducerWindow:
        """The inverse of `to_state`."""
        window = cls()
        window.oldest_ever, window.last_ms = flat[0], flat[1]
        for at in range(2, len(flat), 3):
            window.stored[flat[at]] = Produced(flat[at + 1], flat[at + 2])
        window.newest = max([*window.stored, window.oldest_ever - 1])
        return window


class Producers:
    """The windows of one queue."""

    __slots__ = ("windows",)

    def __init__(self) -> None:
        self.windows: OrderedDict[int, ProducerWindow] = OrderedDict()
        """By producer id: those that sent to this queue lately. The one that was silent for the
        longest time comes first.
        """

    def add(self, producer_id: int, batch_sequence: int, produced: Produced) -> None:
        """Remember a stored batch of a producer."""
        window = self.windows.get(producer_id)
        if window is None:
            if len(self.windows) >= PRODUCERS_MAX:
                self.windows.popitem(last=False)
            window = self.windows[producer_id] = ProducerWindow()
        else:
            self.windows.move_to_end(producer_id)
        stored = window.stored
        stored[batch_sequence] = produced
        if batch_sequence > window.newest:
            window.newest = batch_sequence
        window.last_ms = produced.append_time_ms
        if len(stored) > WINDOW:
            oldest = next(iter(stored))
            del stored[oldest]
            if oldest >= window.oldest_ever:
                window.oldest_ever = oldest + 1

    def expire(self, before_ms: int) -> None:
        """Forget producers that were silent since `before_ms` (append time, so that all replicas
        forget the same producers).
        """
        windows = self.windows
        while windows and windows[next(iter(windows))].last_ms < before_ms:
            windows.popitem(last=False)

    def to_state(self) -> dict[int, list[int]]:
        """For checkpoint and snapshot."""
        return {producer_id: window.to_state() for producer_id, window in self.windows.items()}

    @classmethod
    def from_state(cls, state: dict[int, list[int]]) -> Producers:
        """The inverse of `to_state`."""
        producers = cls()
        found = [
            (producer_id, ProducerWindow.from_state(flat)) for producer_id, flat in state.items()
        ]
        found.sort(
            key=lambda each: each[1].last_ms
        )  # release 0.2 wrote more of them, and in another order
        producers.windows.update(found[-PRODUCERS_MAX:])
        return producers


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
        "steps",
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
        self.steps = StepState() if queue_id.subject == STEPS else None
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
        self.note(entry, Produced(entry.base_sequence, entry.append_time_ms))

    def note(self, entry: IndexEntry, produced: Produced) -> None:
        """Count a stored batch that is in the consume log already."""
        self.next_sequence = entry.base_sequence + entry.count
        self.cumulative_bytes = entry.cumulative_bytes + entry.total_bytes
        self.last_append_ms = entry.append_time_ms
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
            found = window.stored.get(number)
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
            [self.id.subject, self.id.partition, group, lanes.to_state(), LANES_STATE]
            for group, lanes in self.lanes.items()
        ]

    def step_states(self) -> list[list[object]]:
        """Like `share_states`, of the queue of steps."""
        if self.steps is None:
            return []
        return [[self.id.subject, self.id.partition, "", self.steps.to_state(), STEPS_STATE]]

    def load_share(self, state: list[Any]) -> None:
        """Load one of `share_states`, `lane_states` or `step_states`."""
        _, _, group, share, *kind = state
        if kind and kind[0] == STEPS_STATE:
            self.steps = StepState.from_state(share)
        elif kind:
            self.lanes[group] = GroupLaneState.from_state(share)
        else:
            self.shares[group] = GroupState.from_state(share)

    def share(self, group: str) -> GroupState:
        """The group's share. It is created if absent."""
        share = self.shares.get(group)
        if share is None:
            share = self.shares[group] = GroupState()
        return share

    def holds(self, settlement: Settlement) -> bool:
        """True if a step may settle these messages: all are held by the consumer, or the token is
        that of a lane, and none is settled.
        """
        if isinstance(settlement, SettleAction):
            share = self.shares.get(settlement.group)
            return share is not None and all(
                share.holds(settlement.consumer, first, last)
                for first, last, _, _ in settlement.settlements
            )
        lanes = self.lanes.get(settlement.group)
        return lanes is not None and lanes.may_settle(settlement.token, settlement.ranges)

    def settle_step(self, action: Settlement) -> None:
        """A step acknowledged messages of a group. A group that is not here has no progress to
        change: in a replay, its state comes later.
        """
        parts: Container[str] = self.lanes if isinstance(action, LaneDone) else self.shares
        if action.group in parts:
            apply(self, action)

    def forget(self, action: Forget) -> None:
        """The group is deleted here: its share and its lanes."""
        self.shares.pop(action.group, None)
        self.lanes.pop(action.group, None)

    def forget_all(self, _: DropQueue) -> None:
        """Every group is deleted here."""
        self.shares.clear()
        self.lanes.clear()
        if self.steps is not None:
            self.steps = StepState()

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


def _steps(queue: Queue, _group: str) -> StepState:
    return queue.steps or StepState()


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
    StepPlan: (_steps, StepState.plan),
    StepDone: (_steps, StepState.finish),
    StepVoid: (_steps, StepState.void),
}
"""For each kind of action: the part of the queue that it changes, found by the action's group, and
the function that changes it.
"""


def apply(queue: Queue, action: ShareAction | LaneAction | StepAction) -> Any:
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
