"""The *share* of a group: its progress in one queue. Pure: actions in, state out. The state is the
same on every replica and after every restart.

A share has four parts; every message of the queue is in exactly one of them, or done:

    next_sequence    the first message that was never handed out
    holders          consumers, each with its pull log: the ranges it was handed and has not settled
    requeued         ranges that came back (failed, released, consumer lost), each with the time
                     from which it may go out again
    dying            ranges that failed for good, on their way to the dead-letter queue; numbered in
                     the order in which they died

    new --PULL--> held --ACK--> done
                  held --NACK, RELEASE, LEAVE, JOIN again--> requeued --PULL--> held
                  held --DEAD--> dying --DEAD_LETTERED--> done

A consumer names messages by *pull sequence*: its own count of the messages it was handed. Pull
sequences never repeat within a share (a new consumer starts above all earlier ones), so a late
verdict from before a lost lease cannot settle other messages.

`attempt` counts from 1 how often a message was handed out and processed: a NACK, a lost lease and a
new incarnation add one. A RELEASE (of an unprocessed message) adds none.

Only the functions in the table of `qmq.log.queue` change state; `due` only reads. They can report
the effects of an action on messages as events; a message's trail and Spark's deliveries are made
from them. The kinds:

    pull                          handed out
    return, left, lost, again     taken back from its consumer
    ack, nack, release, dead      its consumer's verdict
    expired, passed, reset, skip  done without processing
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple

from qmq.errors import InvariantBroken
from qmq.log.actions import (
    Begin,
    Cause,
    DeadLettered,
    Join,
    Leave,
    PullAction,
    Pulled,
    Reset,
    Return,
    SettleAction,
)
from qmq.wire.frame_payloads import Verdict


class ShareEventKind(StrEnum):
    PULL = "pull"
    ACK = "ack"
    NACK = "nack"
    RELEASE = "release"
    DEAD = "dead"
    RETURN = "return"
    """The consumer never received the message: the connection was lost."""
    LEFT = "left"
    LOST = "lost"
    """The consumer's lease ended."""
    AGAIN = "again"
    """The consumer came back as another incarnation."""
    EXPIRED = "expired"
    """Retention deleted the message before its redelivery."""
    PASSED = "passed"
    """The message was skipped: it has other tags, or is for another group."""
    RESET = "reset"
    """An operator moved the group to a place after or before the message."""
    SKIP = "skip"
    """The group began after the message."""


class ShareEvent(NamedTuple):
    """An event of `count` messages from sequence `first` on."""

    kind: ShareEventKind
    consumer: str
    """The consumer that holds the messages, or held them last; empty if none."""
    first: int
    count: int  # type: ignore[assignment]
    attempt: int = 0
    """The number of the attempt, from 1; 0 if the messages were not delivered."""
    pull: int = -1
    """The consumer's pull sequence of the first message."""
    delay_ms: int = 0
    error: str = ""


_VERDICTS: Final = {
    Verdict.ACK: ShareEventKind.ACK,
    Verdict.NACK: ShareEventKind.NACK,
    Verdict.RELEASE: ShareEventKind.RELEASE,
    Verdict.DEAD: ShareEventKind.DEAD,
}
_CAUSES: Final = {
    Cause.LOST: ShareEventKind.LOST,
    Cause.LEFT: ShareEventKind.LEFT,
    Cause.AGAIN: ShareEventKind.AGAIN,
}


def settlement_kind(verdict: int, cause: int) -> ShareEventKind:
    """The kind of a settlement, by its verdict or by the reason why the master put
    the messages back.
    """
    kind = _VERDICTS[Verdict(verdict)]
    return _CAUSES.get(Cause(cause), kind) if verdict in (Verdict.NACK, Verdict.RELEASE) else kind


Events = list[ShareEvent] | None
"""The list to which an action adds its events; None means no events."""

EXPIRED: Final = 0
"""The `attempt` of a range that a PULL removes from the requeued ones because retention
deleted its messages.
"""


RANGES_MAX: Final = 100_000
"""The ranges, requeued or dying, from which on a group gets no new messages of the queue. The
requeued ones go out when they are due.
"""
_FEW: Final = 16


class HeldMessages(NamedTuple):
    """A range in a consumer's pull log: the messages with `count` pull sequences from `pull` on are
    the sequences from `first` on.
    """

    pull: int
    first: int
    count: int  # type: ignore[assignment]
    attempt: int


class Requeued(NamedTuple):
    """A range that may go out again from `due_ms` on."""

    due_ms: int
    first: int
    count: int  # type: ignore[assignment]
    attempt: int


class Dying(NamedTuple):
    """A range that failed for good: its messages have the numbers from `number` on."""

    number: int
    first: int
    count: int  # type: ignore[assignment]
    attempt: int
    died_ms: int
    error: str
    consumer: str
    """The last consumer that had the range."""


@dataclass(slots=True)
class ShareHolder:
    """One consumer. `held` is ordered by pull sequence."""

    incarnation: str
    lease_ms: int
    next_pull: int
    held: list[HeldMessages]
    unacked: int = 0


class Settled(NamedTuple):
    """The number of messages that a SETTLE settled, and the number that did not belong to the
    consumer any more.
    """

    settled: int
    stale: int


class GroupState:
    """One group's consumption of one queue."""

    __slots__ = (
        "born_ms",
        "deaths",
        "dying",
        "expired",
        "holders",
        "next_sequence",
        "pulls",
        "requeued",
    )

    def __init__(self, next_sequence: int = 0) -> None:
        self.next_sequence = next_sequence
        self.born_ms = 0
        """When the group began on this queue. The time distinguishes it from a deleted group of the
        same name.
        """
        self.deaths = 0
        """The number of messages that died so far, which is the number of the next one."""
        self.dying: list[Dying] = []
        self.pulls = 0
        self.expired = 0
        self.holders: dict[str, ShareHolder] = {}
        self.requeued: list[Requeued] = []

    # --- reading ----------------------------------------------------------------------------------

    def due(self, now_ms: int, messages_max: int) -> list[Requeued]:
        """The ranges that are due for redelivery, the longest due first, with at most
        `messages_max` messages.
        """
        found: list[Requeued] = []
        for item in self.requeued:
            if item.due_ms > now_ms or messages_max <= 0:
                break
            found.append(item._replace(count=min(item.count, messages_max)))
            messages_max -= item.count
        return found

    @property
    def is_full(self) -> bool:
        """True if so many ranges wait for their next attempt, or for the dead-letter queue, that no
        new messages are handed out.
        """
        return len(self.requeued) + len(self.dying) >= RANGES_MAX

    def next_due_ms(self) -> int | None:
        """When the next range is due for redelivery."""
        return self.requeued[0].due_ms if self.requeued else None

    def settled_before(self) -> int:
        """The sequence before which every message is done."""
        firsts = [item.first for item in self.requeued] + [item.first for item in self.dying]
        firsts += [item.first for holder in self.holders.values() for item in holder.held]
        return min(firsts, default=self.next_sequence)

    def unacked(self) -> int:
        """The number of delivered messages that are not settled."""
        return sum(holder.unacked for holder in self.holders.values())

    def waiting_again(self) -> int:
        """The number of requeued messages."""
        return sum(item.count for item in self.requeued)

    def dying_messages(self) -> int:
        """The number of messages on their way to the dead-letter queue."""
        return sum(item.count for item in self.dying)

    def holds(self, consumer: str, first: int, last: int) -> bool:
        """True if the consumer holds all messages with these pull sequences."""
        holder = self.holders.get(consumer)
        if holder is None:
            return False
        begin = max(bisect_right(holder.held, first, key=_pull_of) - 1, 0)
        end = bisect_right(holder.held, last, key=_pull_of)
        held = sum(
            [
                max(min(last + 1, each.pull + each.count) - max(first, each.pull), 0)
                for each in holder.held[begin:end]
            ]
        )
        return held == last + 1 - first

    # --- changing ---------------------------------------------------------------------------------

    def begin(self, action: Begin, events: Events = None) -> None:
        self.next_sequence, self.born_ms = action.sequence, action.now_ms
        if events is not None:
            events.append(ShareEvent(ShareEventKind.SKIP, "", 0, action.sequence))

    def reset(self, action: Reset, events: Events = None) -> None:
        if events is not None:
            events += self._reset_events(action.sequence)
        self.next_sequence = action.sequence
        self.requeued.clear()
        self.dying.clear()
        for holder in self.holders.values():
            holder.held.clear()
            holder.unacked = 0

    def _reset_events(self, sequence: int) -> Iterator[ShareEvent]:
        """The events of a reset. Ranges that no consumer holds come last, and may contain ranges
        that were reported before.
        """
        for name, holder in self.holders.items():
            for item in holder.held:
                yield ShareEvent(
                    ShareEventKind.RESET, name, item.first, item.count, item.attempt, item.pull
                )
        for each in self.requeued:
            yield ShareEvent(ShareEventKind.RESET, "", each.first, each.count)
        for dead in self.dying:
            yield ShareEvent(ShareEventKind.RESET, "", dead.first, dead.count)
        first, end = sorted((sequence, self.next_sequence))
        yield ShareEvent(ShareEventKind.RESET, "", first, end - first)

    def join(self, action: Join, events: Events = None) -> None:
        self._put_back(action.consumer, ShareEventKind.AGAIN, events)
        self.pulls = max(self.pulls, action.received + 1)
        self.holders[action.consumer] = ShareHolder(
            action.incarnation, action.lease_ms, self.pulls, []
        )

    def leave(self, action: Leave, events: Events = None) -> None:
        self._put_back(
            action.consumer, ShareEventKind.LOST if action.expired else ShareEventKind.LEFT, events
        )
        self.holders.pop(action.consumer, None)

    def _put_back(self, consumer: str, kind: ShareEventKind, events: Events) -> None:
        holder = self.holders.get(consumer)
        if holder is not None:
            self._requeue(
                [Requeued(0, item.first, item.count, item.attempt + 1) for item in holder.held]
            )
            if events is not None:
                events += [
                    ShareEvent(kind, consumer, item.first, item.count, item.attempt, item.pull)
                    for item in holder.held
                ]

    def take_back(self, action: Return, events: Events = None) -> None:
        holder = self._holder(action.consumer)
        cut = _cut_out(holder, action.received + 1, holder.next_pull)
        self._requeue([Requeued(0, item.first, item.count, item.attempt) for item in cut])
        if events is not None:
            kind = ShareEventKind.RETURN
            events += [
                ShareEvent(kind, action.consumer, item.first, item.count, item.attempt, item.pull)
                for item in cut
            ]

    def _holder(self, consumer: str) -> ShareHolder:
        """The consumer's holder. It must exist, because the master delivered messages to it."""
        holder = self.holders.get(consumer)
        if holder is None:
            raise InvariantBroken(f"{consumer} was handed messages, and is no consumer")
        return holder

    def pull(self, action: PullAction, events: Events = None) -> None:
        holder = self._holder(action.consumer)
        if events is not None:
            events += self._pull_events(action, holder.next_pull)
        for each in action.ranges:
            if each.first_sequence >= self.next_sequence:
                self.next_sequence = each.first_sequence + each.count
            else:
                self._take_requeued(each)
            if each.attempt == EXPIRED:
                self.expired += each.count
            elif each.count:
                holder.held.append(
                    HeldMessages(holder.next_pull, each.first_sequence, each.count, each.attempt)
                )
                holder.next_pull += each.count
                holder.unacked += each.count
        self.pulls = max(self.pulls, holder.next_pull)

    def _pull_events(self, action: PullAction, pull: int) -> Iterator[ShareEvent]:
        following = self.next_sequence
        for first, count, attempt in [
            (each.first_sequence, each.count, each.attempt) for each in action.ranges
        ]:
            if first > following:
                yield ShareEvent(ShareEventKind.PASSED, "", following, first - following)
            following = max(following, first + count)
            if attempt == EXPIRED:
                yield ShareEvent(ShareEventKind.EXPIRED, "", first, count)
            elif count:
                yield ShareEvent(ShareEventKind.PULL, action.consumer, first, count, attempt, pull)
                pull += count

    def _take_requeued(self, wanted: Pulled) -> None:
        for at, item in enumerate(self.requeued):
            if item.first == wanted.first_sequence:
                del self.requeued[at]
                if item.count > wanted.count:
                    rest = item._replace(
                        first=item.first + wanted.count, count=item.count - wanted.count
                    )
                    insort(self.requeued, rest)
                return
        raise InvariantBroken(f"{wanted} was pulled, but nothing that came back begins there")

    def settle(self, action: SettleAction, events: Events = None) -> Settled:
        holder = self.holders.get(action.consumer)
        settled = asked = 0
        errors = dict(action.errors)
        back: list[Requeued] = []
        for at, (first, last, verdict, delay_ms) in enumerate(action.settlements):
            asked += last - first + 1
            for item in _cut_out(holder, first, last + 1) if holder else ():
                settled += item.count
                if events is not None:
                    kind, error = settlement_kind(verdict, action.cause), errors.get(at, "")
                    events.append(
                        ShareEvent(
                            kind,
                            action.consumer,
                            item.first,
                            item.count,
                            item.attempt,
                            item.pull,
                            delay_ms,
                            error,
                        )
                    )
                if verdict == Verdict.NACK:
                    due = action.now_ms + delay_ms
                    back.append(Requeued(due, item.first, item.count, item.attempt + 1))
                elif verdict == Verdict.RELEASE:
                    back.append(Requeued(0, item.first, item.count, item.attempt))
                elif verdict == Verdict.DEAD:
                    self._die(item, action, errors.get(at, ""))
        self._requeue(back)
        return Settled(settled, asked - settled)

    def _requeue(self, back: list[Requeued]) -> None:
        if len(back) < _FEW:
            for item in back:
                insort(self.requeued, item)
        else:  # sort once: many separate insertions would be quadratic
            self.requeued += back
            self.requeued.sort()

    def _die(self, item: HeldMessages, action: SettleAction, error: str) -> None:
        self.dying.append(
            Dying(
                self.deaths,
                item.first,
                item.count,
                item.attempt,
                action.now_ms,
                error,
                action.consumer,
            )
        )
        self.deaths += item.count

    def dead_lettered(self, action: DeadLettered, _: Events = None) -> None:
        for number, count in action.numbers:
            low = max(bisect_right(self.dying, number, key=_number_of) - 1, 0)
            high = bisect_left(self.dying, number + count, key=_number_of)
            self.dying[low:high] = [
                part
                for item in self.dying[low:high]
                for part in _without(item, number, number + count)
            ]

    # --- keeping ----------------------------------------------------------------------------------

    def to_state(self) -> list[Any]:
        """For checkpoint and snapshot."""
        holders = {
            name: (
                holder.incarnation,
                holder.lease_ms,
                holder.next_pull,
                [tuple(item) for item in holder.held],
            )
            for name, holder in self.holders.items()
        }
        return [
            self.next_sequence,
            self.pulls,
            self.expired,
            holders,
            [tuple(item) for item in self.requeued],
            self.born_ms,
            self.deaths,
            [tuple(item) for item in self.dying],
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> GroupState:
        """The inverse of `to_state`."""
        share = cls(state[0])
        share.pulls, share.expired = state[1], state[2]
        for name, (incarnation, lease_ms, next_pull, held) in state[3].items():
            ranges = [HeldMessages(*item) for item in held]
            unacked = sum(item.count for item in ranges)
            share.holders[name] = ShareHolder(incarnation, lease_ms, next_pull, ranges, unacked)
        share.requeued = [Requeued(*item) for item in state[4]]
        if len(state) > 5:
            share.born_ms, share.deaths = state[5], state[6]
            share.dying = [Dying(*item) for item in state[7]]
        return share


_number_of: Final = attrgetter("number")
_pull_of: Final = attrgetter("pull")


def _without(item: Dying, begin: int, end: int) -> list[Dying]:
    """The rest of a range without the dead numbers from `begin` to before `end`."""
    low = min(max(begin - item.number, 0), item.count)
    high = min(max(end - item.number, low), item.count)
    parts = ((0, low), (high, item.count))
    return [
        item._replace(number=item.number + a, first=item.first + a, count=b - a)
        for a, b in parts
        if b > a
    ]


def _cut_out(holder: ShareHolder, begin: int, end: int) -> list[HeldMessages]:
    """Remove the pull sequences from `begin` to before `end` from those held.
    Returns the removed parts.
    """
    held = holder.held
    at = max(bisect_right(held, begin, key=lambda item: item.pull) - 1, 0)
    removed: list[HeldMessages] = []
    kept: list[HeldMessages] = []
    stop = at
    while stop < len(held) and held[stop].pull < end:
        before, middle, after = _split(held[stop], begin, end)
        removed += middle
        kept += before + after
        stop += 1
    held[at:stop] = kept
    holder.unacked -= sum(item.count for item in removed)
    return removed


def _split(
    item: HeldMessages, begin: int, end: int
) -> tuple[list[HeldMessages], list[HeldMessages], list[HeldMessages]]:
    low = min(max(begin - item.pull, 0), item.count)
    high = min(max(end - item.pull, low), item.count)
    parts = ((0, low), (low, high), (high, item.count))
    before, middle, after = (
        [HeldMessages(item.pull + a, item.first + a, b - a, item.attempt)] if b > a else []
        for a, b in parts
    )
    return before, middle, after
