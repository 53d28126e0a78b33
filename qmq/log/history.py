"""The trail of one message: what the groups of its queue, or of its lanes, did with it, by the
action log. Pure: actions in, events out.

A trail uses a share (qmq/log/group_state.py) that keeps this one message only, and takes the
message's events from it. So the work for an action does not grow with the group's state, and the
trail's state fits into a cursor. A trail begins with the snapshot at the beginning of a segment, or
with a new group.

The events' kinds are those of `group_state.py`, and `forget`.

On an ordered subject lanes record finished messages, not deliveries. So the events are: `grant` (a
consumer got the lane, and reads on from its position), `done`, `nack` (the message failed for the
`attempt`-th time), `park` (parked with its key), `replay`, `drop`, `reset`, `skip`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from qmq.log.actions import (
    DeadLettered,
    Forget,
    LaneAction,
    LaneBegin,
    LaneDone,
    LaneFail,
    LaneGrant,
    LanePark,
    LaneReset,
    LaneUnpark,
    Pulled,
    ShareAction,
)
from qmq.log.group_state import GroupState, ShareEvent, ShareEventKind, ShareHolder
from qmq.log.lane_state import GroupLaneState, LaneHolder
from qmq.log.queue import apply_to


class MessagePlace(StrEnum):
    """The state of a message for one group."""

    NEW = "new"
    """The message was not delivered yet."""
    HELD = "held"
    WAITING = "waiting"
    """The message waits for its next delivery."""
    DYING = "dying"
    """The message is on its way to the dead-letter queue, or there already.
    Only that queue knows.
    """
    DONE = "done"


class TrailEvent(NamedTuple):
    """An event of a message in one group."""

    time_ms: int
    group: str
    kind: str
    consumer: str = ""
    attempt: int = 0
    """The number of the attempt, from 1."""
    delay_ms: int = 0
    error: str = ""


class MessageStanding(NamedTuple):
    """The state of a message, with details."""

    where: MessagePlace
    consumer: str = ""
    attempt: int = 1
    """The number of the message's current or next attempt."""
    due_ms: int = 0


def standing(share: GroupState, sequence: int) -> MessageStanding:
    """The state of a message in a share."""
    for name, holder in share.holders.items():
        for item in holder.held:
            if item.first <= sequence < item.first + item.count:
                return MessageStanding(MessagePlace.HELD, name, item.attempt)
    for back in share.requeued:
        if back.first <= sequence < back.first + back.count:
            return MessageStanding(MessagePlace.WAITING, "", back.attempt, back.due_ms)
    for dying in share.dying:
        if dying.first <= sequence < dying.first + dying.count:
            return MessageStanding(MessagePlace.DYING, dying.consumer, dying.attempt)
    return MessageStanding(
        MessagePlace.NEW if sequence >= share.next_sequence else MessagePlace.DONE
    )


class _OneMessageShare(GroupState):
    """A share that drops every range without the message."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: int, whole: GroupState) -> None:
        super().__init__(whole.next_sequence)
        self._sequence = sequence
        self.pulls, self.deaths = whole.pulls, whole.deaths
        self.holders = {
            name: ShareHolder(each.incarnation, each.lease_ms, each.next_pull, each.held)
            for name, each in whole.holders.items()
        }
        self.requeued, self.dying = whole.requeued, whole.dying
        self.narrow()

    def narrow(self) -> None:
        """Drop the ranges without the message that the last action brought."""
        at = self._sequence
        for holder in self.holders.values():
            holder.held = [
                each for each in holder.held if each.first <= at < each.first + each.count
            ]
            holder.unacked = sum(each.count for each in holder.held)
        self.requeued = [
            each for each in self.requeued if each.first <= at < each.first + each.count
        ]
        self.dying = [each for each in self.dying if each.first <= at < each.first + each.count]

    def _holder(self, consumer: str) -> ShareHolder:
        return self.holders.setdefault(consumer, ShareHolder("", 0, self.pulls, []))

    def _take_requeued(self, wanted: Pulled) -> None:
        if wanted.first_sequence <= self._sequence < wanted.first_sequence + wanted.count:
            self.requeued.clear()


class MessageEvents:
    """One message and one group."""

    __slots__ = ("_share", "group", "last", "sequence")

    def __init__(self, group: str, sequence: int, share: GroupState | None = None) -> None:
        self.group = group
        self.sequence = sequence
        self.last: TrailEvent | None = None
        self._share = _OneMessageShare(sequence, share or GroupState())
        for dead in self._share.dying:
            self.last = TrailEvent(
                dead.died_ms, group, "dead", dead.consumer, dead.attempt, 0, dead.error
            )

    @property
    def now(self) -> MessageStanding:
        """The message's state. A dead message stays DYING here,
        because DEAD_LETTERED has only numbers.
        """
        return standing(self._share, self.sequence)

    def apply(self, action: ShareAction, time_ms: int) -> list[TrailEvent]:
        """The events of the group's next action for the message."""
        if isinstance(action, DeadLettered):
            return []
        if isinstance(action, Forget):
            self._share = _OneMessageShare(self.sequence, GroupState())
            self.last = TrailEvent(time_ms, self.group, "forget")
            return [self.last]
        events: list[ShareEvent] = []
        apply_to(self._share, action, events)
        self._share.narrow()
        its = [each for each in events if each.first <= self.sequence < each.first + each.count]
        if its and its[0].kind is ShareEventKind.RESET:
            del its[1:]
        found = [self._event(each, time_ms) for each in its]
        if found:
            self.last = found[-1]
        return found

    def _event(self, event: ShareEvent, time_ms: int) -> TrailEvent:
        attempt = 0 if event.kind is ShareEventKind.RESET else event.attempt
        return TrailEvent(
            time_ms,
            self.group,
            event.kind.value,
            event.consumer,
            attempt,
            event.delay_ms,
            event.error,
        )

    def to_state(self) -> list[Any]:
        return [
            self.group,
            self._share.to_state(),
            tuple(self.last) if self.last is not None else None,
        ]

    @classmethod
    def from_state(cls, sequence: int, state: list[Any]) -> MessageEvents:
        """The inverse of `to_state`."""
        trail = cls(state[0], sequence, GroupState.from_state(state[1]))
        trail.last = TrailEvent(*state[2]) if state[2] is not None else None
        return trail


_KINDS = {LaneBegin: "skip", LaneDone: "done", LanePark: "park", LaneReset: "reset"}


class LaneMessageEvents:
    """One message in one logical partition, for one group."""

    __slots__ = ("group", "last", "lp", "sequence", "share")

    def __init__(
        self, group: str, sequence: int, lp: int, share: GroupLaneState | None = None
    ) -> None:
        self.group = group
        self.sequence = sequence
        self.lp = lp
        self.share = share or GroupLaneState()
        self.last: TrailEvent | None = None

    def apply(self, action: LaneAction, time_ms: int) -> list[TrailEvent]:
        """Apply the group's next action and return its effect on the message."""
        before, holder = where(self.share, self.sequence, self.lp), holder_of(self.share, self.lp)
        apply_to(self.share, action)
        after = where(self.share, self.sequence, self.lp)
        event = self._event(action, time_ms, before, after, holder)
        if event is None:
            return []
        self.last = event
        return [event]

    def _event(
        self,
        action: LaneAction,
        time_ms: int,
        before: MessagePlace,
        after: MessagePlace,
        holder: LaneHolder | None,
    ) -> TrailEvent | None:
        consumer = holder.consumer if holder is not None else ""
        if isinstance(action, LaneGrant):
            is_its = action.first <= self.lp < action.end and before is MessagePlace.NEW
            return TrailEvent(time_ms, self.group, "grant", action.consumer) if is_its else None
        if isinstance(action, LaneFail):
            is_its = (
                action.sequence == self.sequence
                and holder is not None
                and holder.token == action.token
            )
            return (
                TrailEvent(time_ms, self.group, "nack", consumer, action.attempts)
                if is_its
                else None
            )
        if before is after:
            return None
        if isinstance(action, LaneUnpark):
            return TrailEvent(time_ms, self.group, "replay" if action.replays else "drop")
        kind = _KINDS.get(type(action))
        return (
            TrailEvent(time_ms, self.group, kind, consumer if kind in ("done", "park") else "")
            if kind is not None
            else None
        )

    def to_state(self) -> list[Any]:
        return [
            self.group,
            self.lp,
            self.share.to_state(),
            tuple(self.last) if self.last is not None else None,
        ]

    @classmethod
    def from_state(cls, sequence: int, state: list[Any]) -> LaneMessageEvents:
        """The inverse of `to_state`."""
        trail = cls(state[0], sequence, state[1], GroupLaneState.from_state(state[2]))
        trail.last = TrailEvent(*state[3]) if state[3] is not None else None
        return trail


def where(share: GroupLaneState, sequence: int, lp: int) -> MessagePlace:
    """The message's state; `WAITING` means parked with its key."""
    if any(sequence in parked.sequences for parked in share.parked.values()):
        return MessagePlace.WAITING
    for part in share.progress:
        if part.lps.first <= lp < part.lps.end:
            is_done = sequence < part.done_before or any(
                first <= sequence < end for first, end in part.done
            )
            return MessagePlace.DONE if is_done else MessagePlace.NEW
    return MessagePlace.NEW


def holder_of(share: GroupLaneState, lp: int) -> LaneHolder | None:
    """The consumer that reads the message's lane."""
    return next((each for each in share.holders if each.lps.first <= lp < each.lps.end), None)
