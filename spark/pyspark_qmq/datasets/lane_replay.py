"""Replays one group's lanes on a partition of an ordered subject: messages done, failed and parked. Pure.

The lanes are the broker's own code (qmq/log/lane_share.py). Before it applies an action, the replay determines what the action will change.
The log does not record deliveries, so their times are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec
from qmq_ordering.route import LpRange

from pyspark_qmq.datasets.delivery_fate import Delivery, DeliveryFate, ShareKey
from qmq.log.actions import LaneAction, LaneDone, LaneFail, LanePark, LaneReset, LaneUnpark
from qmq.log.lane_share import LaneShare


class LaneReplay:
    """One group's lanes on one partition."""

    __slots__ = ("key", "share")

    def __init__(self, key: ShareKey, share: LaneShare | None = None) -> None:
        self.key = key
        self.share = share or LaneShare()

    def apply(self, action: LaneAction, time_ms: int) -> Iterator[Delivery]:
        """Apply an action and yield the deliveries that it ended. Consume the iterator before the next call."""
        if isinstance(action, LaneDone):
            for first, last in action.ranges:
                yield from self._done(action, first, last, time_ms)
                self.share.apply(msgspec.structs.replace(action, ranges=((first, last),)))  # One by one, because they may overlap.
            return
        if isinstance(action, LaneFail):
            holder = self.share.holder(action.token)
            if holder is not None:
                yield self._one(action.consumer, action.sequence, holder.lps, DeliveryFate.NACK, time_ms)._replace(attempt=action.attempts)
        elif isinstance(action, LanePark):
            yield from self._parked(action, time_ms)
        elif isinstance(action, LaneUnpark):
            yield from self._parked_of(action.key, DeliveryFate.REPLAY if action.replays else DeliveryFate.DROP, time_ms)
        elif isinstance(action, LaneReset):
            for key in self.share.parked:
                yield from self._parked_of(key, DeliveryFate.RESET, time_ms)
        self.share.apply(action)

    def _one(self, consumer: str, sequence: int, lps: LpRange, fate: DeliveryFate, time_ms: int | None) -> Delivery:
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
                        self.key, action.consumer, c, d - 1, attempt, None, time_ms, DeliveryFate.DONE, 0, part.lps.cut(holder.lps)
                    )

    def _by_attempt(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        failures = self.share.failures
        marks = sorted({begin, end, *[mark for at in failures if begin <= at < end for mark in (at, at + 1)]})
        for a, b in pairwise(marks):
            yield a, b, 1 + failures.get(a, 0)

    def _parked(self, action: LanePark, time_ms: int) -> Iterator[Delivery]:
        holder = self.share.holder(action.token)
        if holder is None or not holder.lps.first <= action.lp < holder.lps.end:
            return
        before = self.share.parked.get(action.key)
        if before is not None and action.sequence in before.sequences:
            return
        attempt = 1 + self.share.failures.get(action.sequence, 0) if before is None else self.share.failures.get(action.sequence, 0)
        found = self._one(action.consumer, action.sequence, LpRange(action.lp, action.lp + 1), DeliveryFate.PARK, time_ms)
        yield found._replace(attempt=attempt, key=action.key)

    def _parked_of(self, key: bytes, fate: DeliveryFate, time_ms: int | None) -> Iterator[Delivery]:
        parked = self.share.parked.get(key)
        for sequence in parked.sequences if parked is not None else ():
            yield self._one("", sequence, LpRange(parked.lp, parked.lp + 1), fate, time_ms)._replace(key=key)  # type: ignore[union-attr]

    def rest(self) -> Iterator[Delivery]:
        """Messages that wait for a retry, and parked messages."""
        whole = LpRange(self.share.progress[0].lps.first, self.share.progress[-1].lps.end) if self.share.progress else LpRange(0, 1)
        for sequence, attempts in self.share.failures.items():
            yield self._one("", sequence, whole, DeliveryFate.WAITING, None)._replace(attempt=attempts + 1)
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
