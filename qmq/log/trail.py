"""The trail of one message: what the groups of its queue did with it, found in the action log. Pure: actions in, events out.

A share's actions name messages by pull sequence, and say nothing of a message that is in a range of others. To follow one message, little
of a share has to be known (qmq/log/share.py has all of it):

    which pull sequence each consumer gets next     from JOIN on, counted on by every PULL
    where the message is                            new ▶ held by a consumer, as its pull sequence n ▶ waiting ▶ ... ▶ dying, done

so the work for an action does not grow with what the group holds, and what is known can travel in a cursor. A trail begins with the
snapshot at the beginning of a segment, or with a group that is new.

The events' kinds are those of deliveries in docs/SPARK_JOBS.md, and `pull`, `skip` (the group began behind it), `forget`:

    pull                          handed out                 return, left, lost, again      taken back from its consumer
    ack, nack, release, dead      its consumer's verdict     expired, passed, reset, skip   done without being worked on
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final, NamedTuple

from qmq.log.actions import Begin, Buried, Cause, Forget, Join, Leave, PullAction, Reset, Return, SettleAction, ShareAction
from qmq.log.share import EXPIRED, Share
from qmq.wire.settle_payloads import Verdict


class MessagePlace(StrEnum):
    """Where a message is, for one group."""

    NEW = "new"
    """It was handed to nobody."""
    HELD = "held"
    WAITING = "waiting"
    """It came back."""
    DYING = "dying"
    """On its way to the dead-letter queue, or there: only the queue knows."""
    DONE = "done"


class TrailEvent(NamedTuple):
    """Something happened to the message, for a group."""

    time_ms: int
    group: str
    kind: str
    consumer: str = ""
    attempt: int = 0
    """From 1: how often it was handed out, this time included."""
    delay_ms: int = 0
    error: str = ""


_VERDICTS: Final = {Verdict.ACK: "ack", Verdict.NACK: "nack", Verdict.RELEASE: "release", Verdict.DEAD: "dead"}
_CAUSES: Final = {Cause.LOST: "lost", Cause.LEFT: "left", Cause.AGAIN: "again"}


class Trail:
    """One message and one group."""

    __slots__ = ("_next_pulls", "_pull", "_pulls", "attempt", "consumer", "due_ms", "group", "last", "sequence", "where")

    def __init__(self, group: str, sequence: int, share: Share | None = None) -> None:
        self.group = group
        self.sequence = sequence
        self.last: TrailEvent | None = None
        self.due_ms = 0
        self._pull = -1
        self._load(share or Share())

    def _load(self, share: Share) -> None:
        self.consumer = ""
        self.attempt = 1
        """Which one it is, or the next one will be."""
        self._pulls = share.pulls
        self._next_pulls = {name: holder.next_pull for name, holder in share.holders.items()}
        self.where = MessagePlace.NEW if self.sequence >= share.next_sequence else MessagePlace.DONE
        for name, holder in share.holders.items():
            for item in holder.held:
                if item.first <= self.sequence < item.first + item.count:
                    self.where, self.consumer, self.attempt = MessagePlace.HELD, name, item.attempt
                    self._pull = item.pull + self.sequence - item.first
        for back in share.requeued:
            if back.first <= self.sequence < back.first + back.count:
                self.where, self.attempt, self.due_ms = MessagePlace.WAITING, back.attempt, back.due_ms
        for dying in share.dying:
            if dying.first <= self.sequence < dying.first + dying.count:
                self.where, self.attempt, self.consumer = MessagePlace.DYING, dying.attempt, dying.consumer
                self.last = TrailEvent(dying.died_ms, self.group, "dead", dying.consumer, dying.attempt, 0, dying.error)

    def apply(self, action: ShareAction, time_ms: int) -> list[TrailEvent]:
        """What the group's next action did to the message."""
        found = list(_APPLY[type(action)](self, action, time_ms))
        if found:
            self.last = found[-1]
        return found

    def _event(self, time_ms: int, kind: str, delay_ms: int = 0, error: str = "") -> TrailEvent:
        return TrailEvent(time_ms, self.group, kind, self.consumer, self.attempt, delay_ms, error)

    # --- handed out ----------------------------------------------------------------------------------------------------

    def _pulled(self, action: PullAction, time_ms: int) -> Iterator[TrailEvent]:
        pull = self._next_pulls.get(action.consumer, self._pulls)
        for each in action.ranges:
            is_here = each.first_sequence <= self.sequence < each.first_sequence + each.count
            if is_here and each.attempt == EXPIRED:
                yield self._done(time_ms, "expired")
            elif is_here:
                self.where, self.consumer, self.attempt = MessagePlace.HELD, action.consumer, each.attempt
                self._pull = pull + self.sequence - each.first_sequence
                yield self._event(time_ms, "pull")
            elif self.where is MessagePlace.NEW and each.first_sequence > self.sequence:
                yield self._done(time_ms, "passed")
            if each.attempt != EXPIRED:
                pull += each.count
        self._next_pulls[action.consumer] = pull
        self._pulls = max(self._pulls, pull)

    def _done(self, time_ms: int, kind: str) -> TrailEvent:
        self.where, self.consumer = MessagePlace.DONE, ""
        return TrailEvent(time_ms, self.group, kind)

    # --- settled -------------------------------------------------------------------------------------------------------

    def _settled(self, action: SettleAction, time_ms: int) -> Iterator[TrailEvent]:
        for at, (first, last, verdict, delay_ms) in enumerate(action.settlements):
            if self._is_held_by(action.consumer) and first <= self._pull <= last:
                kind = _VERDICTS[Verdict(verdict)]
                if verdict in (Verdict.NACK, Verdict.RELEASE):
                    kind = _CAUSES.get(Cause(action.cause), kind)
                event = self._event(time_ms, kind, delay_ms, dict(action.errors).get(at, ""))
                yield event
                self._go(Verdict(verdict), action.now_ms + delay_ms)

    def _go(self, verdict: Verdict, due_ms: int) -> None:
        if verdict in (Verdict.NACK, Verdict.RELEASE):
            self.where, self.due_ms = MessagePlace.WAITING, due_ms if verdict is Verdict.NACK else 0
            self.attempt += verdict is Verdict.NACK
            self.consumer = ""
        else:
            self.where = MessagePlace.DONE if verdict is Verdict.ACK else MessagePlace.DYING

    def _is_held_by(self, consumer: str) -> bool:
        return self.where is MessagePlace.HELD and self.consumer == consumer

    # --- taken back ----------------------------------------------------------------------------------------------------

    def _joined(self, action: Join, time_ms: int) -> Iterator[TrailEvent]:
        yield from self._taken_back(action.consumer, time_ms, "again")
        self._pulls = self._next_pulls[action.consumer] = max(self._pulls, action.received + 1)

    def _left(self, action: Leave, time_ms: int) -> Iterator[TrailEvent]:
        yield from self._taken_back(action.consumer, time_ms, "lost" if action.expired else "left")
        self._next_pulls.pop(action.consumer, None)

    def _taken_back(self, consumer: str, time_ms: int, kind: str) -> Iterator[TrailEvent]:
        if self._is_held_by(consumer):
            yield self._event(time_ms, kind)
            self._go(Verdict.NACK, 0)

    def _returned(self, action: Return, time_ms: int) -> Iterator[TrailEvent]:
        if self._is_held_by(action.consumer) and self._pull > action.received:
            yield self._event(time_ms, "return")
            self._go(Verdict.RELEASE, 0)

    # --- the group itself ----------------------------------------------------------------------------------------------

    def _began(self, action: Begin, time_ms: int) -> Iterator[TrailEvent]:
        if self.sequence < action.sequence:
            yield self._done(time_ms, "skip")

    def _reset(self, action: Reset, time_ms: int) -> Iterator[TrailEvent]:
        where = MessagePlace.DONE if self.sequence < action.sequence else MessagePlace.NEW
        if self.where is not where:
            yield TrailEvent(time_ms, self.group, "reset", self.consumer)
        self.where, self.consumer, self.attempt = where, "", 1

    def _buried(self, action: Buried, time_ms: int) -> Iterator[TrailEvent]:
        """Copies are in the dead-letter queue; of which messages, only their numbers say."""
        return iter(())

    def _forgotten(self, action: Forget, time_ms: int) -> Iterator[TrailEvent]:
        yield TrailEvent(time_ms, self.group, "forget")
        self._load(Share())

    # --- keeping -------------------------------------------------------------------------------------------------------

    def to_state(self) -> list[Any]:
        return [
            self.group,
            self.where.value,
            self.consumer,
            self.attempt,
            self.due_ms,
            self._pull,
            self._pulls,
            self._next_pulls,
            tuple(self.last) if self.last is not None else None,
        ]

    @classmethod
    def from_state(cls, sequence: int, state: list[Any]) -> Trail:
        """The inverse of `to_state`."""
        trail = cls(state[0], sequence)
        trail.where = MessagePlace(state[1])
        trail.consumer, trail.attempt, trail.due_ms, trail._pull, trail._pulls = state[2:7]
        trail._next_pulls = dict(state[7])
        trail.last = TrailEvent(*state[8]) if state[8] is not None else None
        return trail


_APPLY: Final[dict[type[Any], Callable[[Trail, Any, int], Iterator[TrailEvent]]]] = {
    Begin: Trail._began,
    Join: Trail._joined,
    Return: Trail._returned,
    PullAction: Trail._pulled,
    SettleAction: Trail._settled,
    Leave: Trail._left,
    Reset: Trail._reset,
    Buried: Trail._buried,
    Forget: Trail._forgotten,
}
