"""The trail of one message of an ordered subject: like `trail.py`, for lanes. Pure: actions in, events out.

Lanes record finished messages, not deliveries. So the events are: `grant` (a consumer got the lane, and reads on from its position),
`done`, `nack` (the message failed for the `attempt`-th time), `park` (parked with its key), `replay`, `drop`, `reset`, `skip`.
"""

from __future__ import annotations

from typing import Any

from qmq.log.actions import LaneAction, LaneBegin, LaneDone, LaneFail, LaneGrant, LanePark, LaneReset, LaneUnpark
from qmq.log.lane_share import LaneHolder, LaneShare
from qmq.log.trail import MessagePlace, TrailEvent

_KINDS = {LaneBegin: "skip", LaneDone: "done", LanePark: "park", LaneReset: "reset"}


class LaneTrail:
    """One message in one logical partition, for one group."""

    __slots__ = ("group", "last", "lp", "sequence", "share")

    def __init__(self, group: str, sequence: int, lp: int, share: LaneShare | None = None) -> None:
        self.group = group
        self.sequence = sequence
        self.lp = lp
        self.share = share or LaneShare()
        self.last: TrailEvent | None = None

    def apply(self, action: LaneAction, time_ms: int) -> list[TrailEvent]:
        """Apply the group's next action and return its effect on the message."""
        before, holder = where(self.share, self.sequence, self.lp), holder_of(self.share, self.lp)
        self.share.apply(action)
        after = where(self.share, self.sequence, self.lp)
        event = self._event(action, time_ms, before, after, holder)
        if event is None:
            return []
        self.last = event
        return [event]

    def _event(
        self, action: LaneAction, time_ms: int, before: MessagePlace, after: MessagePlace, holder: LaneHolder | None
    ) -> TrailEvent | None:
        consumer = holder.consumer if holder is not None else ""
        if isinstance(action, LaneGrant):
            is_its = action.first <= self.lp < action.end and before is MessagePlace.NEW
            return TrailEvent(time_ms, self.group, "grant", action.consumer) if is_its else None
        if isinstance(action, LaneFail):
            is_its = action.sequence == self.sequence and holder is not None and holder.token == action.token
            return TrailEvent(time_ms, self.group, "nack", consumer, action.attempts) if is_its else None
        if before is after:
            return None
        if isinstance(action, LaneUnpark):
            return TrailEvent(time_ms, self.group, "replay" if action.replays else "drop")
        kind = _KINDS.get(type(action))
        return TrailEvent(time_ms, self.group, kind, consumer if kind in ("done", "park") else "") if kind is not None else None

    def to_state(self) -> list[Any]:
        return [self.group, self.lp, self.share.to_state(), tuple(self.last) if self.last is not None else None]

    @classmethod
    def from_state(cls, sequence: int, state: list[Any]) -> LaneTrail:
        """The inverse of `to_state`."""
        trail = cls(state[0], sequence, state[1], LaneShare.from_state(state[2]))
        trail.last = TrailEvent(*state[3]) if state[3] is not None else None
        return trail


def where(share: LaneShare, sequence: int, lp: int) -> MessagePlace:
    """The message's state; `WAITING` means parked with its key."""
    if any(sequence in parked.sequences for parked in share.parked.values()):
        return MessagePlace.WAITING
    for part in share.progress:
        if part.lps.first <= lp < part.lps.end:
            is_done = sequence < part.done_before or any(first <= sequence < end for first, end in part.done)
            return MessagePlace.DONE if is_done else MessagePlace.NEW
    return MessagePlace.NEW


def holder_of(share: LaneShare, lp: int) -> LaneHolder | None:
    """The consumer that reads the message's lane."""
    return next((each for each in share.holders if each.lps.first <= lp < each.lps.end), None)
