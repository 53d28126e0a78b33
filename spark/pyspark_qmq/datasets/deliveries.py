"""Deliveries, their outcomes and the progress of groups, from a replay of a broker group's action
log. Pure: takes entries, returns values.

The replay uses the brokers' own code for shares and lanes. It loops over ranges, as the log does,
never over messages.

Every message of a share has one event of (ack, expired, passed) in the end, and every message of a
partition one of (done, park); more than one only if an operator returned it. A log that begins with
snapshots begins with the deliveries that were open then.

A share of a queue (qmq/log/group_state.py) emits an event for each change of a message; the replay
adds the times of delivery.

Lanes on a partition of an ordered subject (qmq/log/lane_state.py) have messages done, failed and
parked. Before they apply an action, the replay determines what the action will change. The log does
not record deliveries, so their times are unknown.

The progress of each group is the replay, sampled once a second. There is one row for each second in
which a group made progress on a queue: its state after that second's last entry. The newest row is
the state at the end of the log. Together with the queue's end at that time (known from the
messages' append times) it gives the group's lag:

    for a share        end - next_sequence messages were never delivered; `held` + `waiting` were
                       delivered but are not done
    for a partition    at most end - done_before messages are not done: lanes progress
                       independently, and the slowest one counts

A delivery is a range of sequences with the same outcome. Deliveries with `settled_ms` are events.
Those without describe the state at the end of the action log:

    open       a consumer holds it
    waiting    returned, waits for its next delivery
    parked     set aside with its key

Events of shares, where any consumer of the group gets messages:

    ack, nack, release     the consumer's verdict
    return                 the consumer never got them: the connection was lost before
    left, lost, again      the consumer left; its lease ended; it reconnected as a new incarnation
    reset                  an operator moved the group
    expired                they were returned, and retention deleted them before their next delivery
    passed                 they were skipped: other tags, or directed to another group

Events of lanes, which do not record deliveries, so `pulled_ms` is unknown:

    done                   acknowledged: all messages of `lps` in these sequences
    nack                   it failed for the `attempt`-th time
    park                   set aside; `attempt` 0: only because an earlier message of its key failed
    replay, drop, reset    an operator replayed parked messages, skipped them, or moved the group
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec
from qmq_ordering.routes import LpRange

from qmq.errors import CorruptBatch, LogDamaged
from qmq.log.actions import (
    AnyAction,
    DropQueue,
    Forget,
    LaneAction,
    LaneDone,
    LaneFail,
    LanePark,
    LaneReset,
    LaneUnpark,
    ScheduleAction,
    StepAction,
    decode_actions,
)
from qmq.log.group_state import GroupState, ShareEvent, ShareEventKind
from qmq.log.lane_state import GroupLaneState
from qmq.log.queue import STEPS_STATE, apply_to
from qmq.wire.batch import Envelope, Kind, unwrap


class DeliveryFate(StrEnum):
    OPEN = "open"
    WAITING = "waiting"
    PARKED = "parked"
    ACK = "ack"
    NACK = "nack"
    DEAD = "dead"
    RELEASE = "release"
    RETURN = "return"
    LEFT = "left"
    LOST = "lost"
    AGAIN = "again"
    RESET = "reset"
    EXPIRED = "expired"
    PASSED = "passed"
    DONE = "done"
    PARK = "park"
    REPLAY = "replay"
    DROP = "drop"


class ShareKey(NamedTuple):
    """A consumer group on one queue of the broker group."""

    subject: str
    partition: int
    group: str


class Delivery(NamedTuple):
    """A range of sequences, both ends included, with its outcome.
    Times are milliseconds since 1970.
    """

    share: ShareKey
    consumer: str
    """Empty if no consumer is involved."""
    first: int
    last: int
    attempt: int | None
    """Counts from 1; for waiting messages, the next attempt."""
    pulled_ms: int | None
    """When it was delivered; None if it was not, or if the time is unknown."""
    settled_ms: int | None
    """None: this is the current state."""
    fate: DeliveryFate
    delay_ms: int = 0
    """For a nack: the delay that the consumer asked for."""
    lps: LpRange | None = None
    """For ordered subjects: only messages of these logical partitions."""
    key: bytes | None = None
    """The key of parked messages."""


_PULLS_KEPT: Final = 512
"""How many pulls of a consumer are kept before settled ones are removed."""


class ShareReplay:
    """A share, with the delivery times of its ranges."""

    __slots__ = ("_pulls", "key", "share")

    def __init__(self, key: ShareKey, share: GroupState | None = None) -> None:
        self.key = key
        self.share = share or GroupState()
        self._pulls: dict[str, _PullTimes] = {}

    def apply(self, action: Any, time_ms: int) -> Iterator[Delivery]:
        """Apply an action and yield the deliveries that it ended. Consume the iterator before the
        next call.
        """
        events: list[ShareEvent] = []
        apply_to(self.share, action, events)
        for each in events:
            if each.kind is ShareEventKind.PULL:
                times = self._pulls.setdefault(each.consumer, _PullTimes())
                times.add(each.pull, time_ms, self.share.holders[each.consumer].held[0].pull)
            elif each.kind is not ShareEventKind.SKIP and (
                each.consumer or each.kind is not ShareEventKind.RESET
            ):
                yield self._delivery(
                    each.consumer, each.pull, each.first, each.count, each.attempt
                )._replace(
                    settled_ms=time_ms, fate=DeliveryFate(each.kind.value), delay_ms=each.delay_ms
                )

    def _delivery(self, consumer: str, pull: int, first: int, count: int, attempt: int) -> Delivery:
        """A range that was delivered and is not settled."""
        times = self._pulls.get(consumer)
        pulled_ms = times.at(pull) if times is not None else None
        return Delivery(
            self.key,
            consumer,
            first,
            first + count - 1,
            attempt or None,
            pulled_ms,
            None,
            DeliveryFate.OPEN,
        )

    @property
    def times_kept(self) -> int:
        """How many times of pulls are kept, of all consumers."""
        return sum(map(len, self._pulls.values()))

    def unsettled(self) -> Iterator[Delivery]:
        """Yields the deliveries that are not settled."""
        for name, holder in self.share.holders.items():
            for each in holder.held:
                yield self._delivery(name, *each)
        for item in self.share.requeued:
            yield Delivery(
                self.key,
                "",
                item.first,
                item.first + item.count - 1,
                item.attempt,
                None,
                None,
                DeliveryFate.WAITING,
            )


class _PullTimes:
    """The times of a consumer's pulls: the first pull sequence of each pull, and its time.
    Both are ascending.
    """

    __slots__ = ("_firsts", "_times")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._times: list[int] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self, first: int, time_ms: int, oldest: int) -> None:
        """Add a pull. Pulls before `oldest` are no longer needed."""
        if len(self._firsts) >= _PULLS_KEPT:
            done = max(bisect_right(self._firsts, oldest) - 1, 0)
            del self._firsts[:done], self._times[:done]
        if not self._times or self._times[-1] != time_ms:
            self._firsts.append(first)
            self._times.append(time_ms)

    def at(self, pull: int) -> int | None:
        """The time of a pull sequence; None if it was before the start of the log."""
        place = bisect_right(self._firsts, pull) - 1
        return self._times[place] if place >= 0 else None


class LaneReplay:
    """One group's lanes on one partition."""

    __slots__ = ("key", "share")

    def __init__(self, key: ShareKey, share: GroupLaneState | None = None) -> None:
        self.key = key
        self.share = share or GroupLaneState()

    def apply(self, action: LaneAction, time_ms: int) -> Iterator[Delivery]:
        """Apply an action and yield the deliveries that it ended. Consume the iterator before the
        next call.
        """
        if isinstance(action, LaneDone):
            for first, last in action.ranges:
                yield from self._done(action, first, last, time_ms)
                apply_to(
                    self.share, msgspec.structs.replace(action, ranges=((first, last),))
                )  # One by one, because they may overlap.
            return
        if isinstance(action, LaneFail):
            holder = self.share.holder(action.token)
            if holder is not None:
                yield self._one(
                    action.consumer, action.sequence, holder.lps, DeliveryFate.NACK, time_ms
                )._replace(attempt=action.attempts)
        elif isinstance(action, LanePark):
            yield from self._parked(action, time_ms)
        elif isinstance(action, LaneUnpark):
            yield from self._parked_of(
                action.key, DeliveryFate.REPLAY if action.replays else DeliveryFate.DROP, time_ms
            )
        elif isinstance(action, LaneReset):
            for key in self.share.parked:
                yield from self._parked_of(key, DeliveryFate.RESET, time_ms)
        apply_to(self.share, action)

    def _one(
        self, consumer: str, sequence: int, lps: LpRange, fate: DeliveryFate, time_ms: int | None
    ) -> Delivery:
        return Delivery(self.key, consumer, sequence, sequence, None, None, time_ms, fate, 0, lps)

    def _done(self, action: LaneDone, first: int, last: int, time_ms: int) -> Iterator[Delivery]:
        """The messages of the range that were not done before, in any part of the lane."""
        holder = self.share.holder(action.token)
        if holder is None:
            return
        for part in self.share.progress_of(holder.lps):
            for a, b in _without(first, last + 1, [(0, part.done_before), *part.done]):
                for c, d, attempt in self._by_attempt(a, b):
                    yield Delivery(
                        self.key,
                        action.consumer,
                        c,
                        d - 1,
                        attempt,
                        None,
                        time_ms,
                        DeliveryFate.DONE,
                        0,
                        part.lps.cut(holder.lps),
                    )

    def _by_attempt(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        failures = self.share.failures
        marks = sorted(
            {begin, end, *[mark for at in failures if begin <= at < end for mark in (at, at + 1)]}
        )
        for a, b in pairwise(marks):
            yield a, b, 1 + failures.get(a, 0)

    def _parked(self, action: LanePark, time_ms: int) -> Iterator[Delivery]:
        holder = self.share.holder(action.token)
        if holder is None or not holder.lps.first <= action.lp < holder.lps.end:
            return
        before = self.share.parked.get(action.key)
        if before is not None and action.sequence in before.sequences:
            return
        attempt = (
            1 + self.share.failures.get(action.sequence, 0)
            if before is None
            else self.share.failures.get(action.sequence, 0)
        )
        found = self._one(
            action.consumer,
            action.sequence,
            LpRange(action.lp, action.lp + 1),
            DeliveryFate.PARK,
            time_ms,
        )
        yield found._replace(attempt=attempt, key=action.key)

    def _parked_of(self, key: bytes, fate: DeliveryFate, time_ms: int | None) -> Iterator[Delivery]:
        parked = self.share.parked.get(key)
        for sequence in parked.sequences if parked is not None else ():
            yield self._one(
                "",
                sequence,
                LpRange(parked.lp, parked.lp + 1),  # type: ignore[union-attr]
                fate,
                time_ms,
            )._replace(key=key)

    def unsettled(self) -> Iterator[Delivery]:
        """Messages that wait for a retry, and parked messages."""
        whole = (
            LpRange(self.share.progress[0].lps.first, self.share.progress[-1].lps.end)
            if self.share.progress
            else LpRange(0, 1)
        )
        for sequence, attempts in self.share.failures.items():
            yield self._one("", sequence, whole, DeliveryFate.WAITING, None)._replace(
                attempt=attempts + 1
            )
        for key in self.share.parked:
            yield from self._parked_of(key, DeliveryFate.PARKED, None)


def _without(begin: int, end: int, done: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """[begin, end) without the given spans, which are ascending."""
    for first, after in done:
        if first >= end:
            break
        if first > begin:
            yield begin, first
        begin = max(begin, after)
    if begin < end:
        yield begin, end


class Replay:
    """A broker group's action log, from its first entry on."""

    def __init__(self) -> None:
        self.shares: dict[ShareKey, ShareReplay] = {}
        self.lanes: dict[ShareKey, LaneReplay] = {}
        self.touched: set[ShareKey] = set()
        """The changes since the last look; the reader may clear it."""
        self._begins = True

    def entry(self, envelope: Envelope, region: bytes | memoryview) -> Iterator[Delivery]:
        """Apply the next entry and yield the deliveries that it ended. Consume the iterator before
        the next call.

        Raises LogDamaged if the entry does not continue the earlier ones, because entries between
        are missing.
        """
        try:
            if envelope.kind == Kind.SNAPSHOT:
                self._snapshot(bytes(region))
            elif envelope.kind == Kind.ACTIONS:
                self._begins = False
                for action in decode_actions(unwrap(bytes(region))):
                    if not isinstance(action, ScheduleAction | StepAction):
                        yield from self._apply(action, envelope.append_time_ms)
        except (AssertionError, CorruptBatch, KeyError) as cause:
            raise LogDamaged(
                f"entry {envelope.index} of the action log does not fit the entries before "
                f"it ({cause!r}): segments are missing or damaged"
            ) from cause

    def _apply(self, action: AnyAction, time_ms: int) -> Iterator[Delivery]:
        assert not isinstance(action, ScheduleAction | StepAction), action
        key = ShareKey(action.subject, action.partition, action.group)
        if isinstance(action, Forget | DropQueue):
            return self._ended(action, time_ms)
        self.touched.add(key)
        if isinstance(action, LaneAction):
            lanes = self.lanes.get(key)
            if lanes is None:
                lanes = self.lanes[key] = LaneReplay(key)
            return lanes.apply(action, time_ms)
        share = self.shares.get(key)
        if share is None:
            share = self.shares[key] = ShareReplay(key)
        return share.apply(action, time_ms)

    def _ended(self, action: Forget | DropQueue, time_ms: int) -> Iterator[Delivery]:
        """A group was deleted on a queue, or the queue with all its groups:
        end their open deliveries.
        """
        for found in (self.shares, self.lanes):
            for key in [
                key
                for key in found
                if (key.subject, key.partition) == (action.subject, action.partition)
            ]:
                if isinstance(action, DropQueue) or key.group == action.group:
                    self.touched.discard(key)
                    for each in found.pop(key).unsettled():
                        yield each._replace(settled_ms=time_ms, fate=DeliveryFate.RESET)

    def _snapshot(self, region: bytes) -> None:
        """Apply a snapshot. Only the one at the start of the log has new information."""
        if not self._begins:
            return
        for subject, partition, group, state, *kind in msgspec.msgpack.decode(
            unwrap(region), strict=False
        ):
            if kind == [STEPS_STATE]:
                continue
            key = ShareKey(subject, partition, group)
            self.touched.add(key)
            if kind:
                self.lanes[key] = LaneReplay(key, GroupLaneState.from_state(state))
            else:
                self.shares[key] = ShareReplay(key, GroupState.from_state(state))

    def unsettled(self) -> Iterator[Delivery]:
        """Deliveries that are open, waiting or parked at the end of the log."""
        for share in self.shares.values():
            yield from share.unsettled()
        for lanes in self.lanes.values():
            yield from lanes.unsettled()


def deliveries(entries: Iterable[tuple[Envelope, bytes | memoryview]]) -> Iterator[Delivery]:
    """All of a broker group's action log, then what is so where it ends.
    Raises as `Replay.entry`.
    """
    replay = Replay()
    for envelope, region in entries:
        yield from replay.entry(envelope, region)
    yield from replay.unsettled()


STEP_MS: Final = 1_000


class GroupStanding(NamedTuple):
    """The progress of one group on one queue."""

    share: ShareKey
    time_ms: int
    done_before: int
    """Everything before this sequence is done."""
    next_sequence: int | None
    """The first message that was not yet delivered; None for partitions of ordered subjects, where
    it is not recorded.
    """
    held: int
    """Messages held by consumers."""
    waiting: int
    """Messages that were returned and wait for another delivery."""
    parked: int
    expired: int
    """Messages that retention deleted before they were done, as far as the group has noticed."""
    consumers: int


def standings(entries: Iterable[tuple[Envelope, bytes | memoryview]]) -> Iterator[GroupStanding]:
    """Replay a broker group's action log. Raises as `Replay.entry`."""
    replay = Replay()
    second = last_ms = 0
    for envelope, region in entries:
        now = envelope.append_time_ms // STEP_MS
        if now != second:
            yield from _look(replay, last_ms)
            second = now
        last_ms = envelope.append_time_ms
        for _ in replay.entry(envelope, region):
            pass
    yield from _look(replay, last_ms)


def _look(replay: Replay, time_ms: int) -> Iterator[GroupStanding]:
    for key in sorted(replay.touched):
        found = (
            _of_share(replay, key, time_ms)
            if key in replay.shares
            else _of_lanes(replay, key, time_ms)
        )
        if found is not None:
            yield found
    replay.touched.clear()


def _of_share(replay: Replay, key: ShareKey, time_ms: int) -> GroupStanding:
    share = replay.shares[key].share
    return GroupStanding(
        key,
        time_ms,
        share.settled_before(),
        share.next_sequence,
        share.unacked(),
        share.waiting_again(),
        0,
        share.expired,
        len(share.holders),
    )


def _of_lanes(replay: Replay, key: ShareKey, time_ms: int) -> GroupStanding | None:
    share = replay.lanes[key].share
    if not share.progress:
        return None
    parked = sum(len(each.sequences) for each in share.parked.values())
    consumers = len({each.consumer for each in share.holders})
    return GroupStanding(
        key,
        time_ms,
        share.done_before(),
        None,
        0,
        len(share.failures),
        parked,
        share.expired,
        consumers,
    )
