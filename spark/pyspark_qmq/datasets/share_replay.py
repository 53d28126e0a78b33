"""One group's share of a queue, replayed: what it was handed when, and what became of it. Pure.

The share is the broker's own (qmq/log/share.py). Before an action changes it, the replay looks at what the action will take out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from pyspark_qmq.datasets.delivery_fate import Delivery, DeliveryFate, ShareKey
from qmq.log.actions import Buried, Cause, Join, Leave, PullAction, Reset, Return, SettleAction
from qmq.log.share import EXPIRED, Share, ShareHolder
from qmq.wire.settle_payloads import Verdict

_PULLS_KEPT: Final = 512
"""Pulls of a consumer whose times are remembered before those that are settled are looked for."""
_FATES: Final = (DeliveryFate.ACK, DeliveryFate.NACK, DeliveryFate.RELEASE, DeliveryFate.DEAD)
"""By wire verdict."""
_LOST: Final = {Cause.LOST: DeliveryFate.LOST, Cause.LEFT: DeliveryFate.LEFT, Cause.AGAIN: DeliveryFate.AGAIN}
"""By whose decision it was, if it was not the consumer's."""


class ShareReplay:
    """One share, with the times at which its ranges were handed out."""

    __slots__ = ("_pulls", "key", "share")

    def __init__(self, key: ShareKey, share: Share | None = None) -> None:
        self.key = key
        self.share = share or Share()
        self._pulls: dict[str, _PullTimes] = {}

    def apply(self, action: Any, time_ms: int) -> Iterator[Delivery]:
        """Apply it; give what it ended. Exhaust it before the next."""
        if isinstance(action, SettleAction):
            for each in action.settlements:
                yield from self._settled(action, *each, time_ms)
                self.share.apply(msgspec.structs.replace(action, settlements=(each,), errors=()))  # one by one: they may overlap
            return
        if isinstance(action, Buried):  # copies are in the dead-letter queue, which ends no delivery
            self.share.apply(action)
            return
        if isinstance(action, PullAction):
            yield from self._never_handed(action, time_ms)
            self._note_pull(action, time_ms)
            return
        yield from self._taken_back(action, time_ms)
        self.share.apply(action)

    def _settled(self, action: SettleAction, first: int, last: int, verdict: int, delay_ms: int, time_ms: int) -> Iterator[Delivery]:
        holder = self.share.holders.get(action.consumer)
        fate = _FATES[verdict] if verdict == Verdict.DEAD else _LOST.get(Cause(action.cause), _FATES[verdict])
        if holder is not None:
            for each in self._held(action.consumer, holder, first, last + 1):
                yield each._replace(settled_ms=time_ms, fate=fate, delay_ms=delay_ms)

    def _held(self, consumer: str, holder: ShareHolder, begin: int = 0, end: int = 1 << 62) -> Iterator[Delivery]:
        """What the consumer has of pull sequences `begin` to before `end`."""
        held, times = holder.held, self._pulls.get(consumer)
        for item in held[max(bisect_right(held, begin, key=lambda each: each.pull) - 1, 0) :]:
            if item.pull >= end:
                return
            low, high = max(begin - item.pull, 0), min(end - item.pull, item.count)
            if low < high:
                pulled_ms = times.at(item.pull) if times is not None else None
                yield Delivery(
                    self.key, consumer, item.first + low, item.first + high - 1, item.attempt, pulled_ms, None, DeliveryFate.OPEN
                )

    def _never_handed(self, action: PullAction, time_ms: int) -> Iterator[Delivery]:
        following = self.share.next_sequence
        for each in action.ranges:
            if each.attempt == EXPIRED:
                last = each.first_sequence + each.count - 1
                yield Delivery(self.key, "", each.first_sequence, last, None, None, time_ms, DeliveryFate.EXPIRED)
            if each.first_sequence > following:
                yield Delivery(self.key, "", following, each.first_sequence - 1, None, None, time_ms, DeliveryFate.PASSED)
            if each.first_sequence >= following:
                following = each.first_sequence + each.count

    def _note_pull(self, action: PullAction, time_ms: int) -> None:
        holder = self.share.holders[action.consumer]
        first = holder.next_pull
        self.share.apply(action)
        if holder.next_pull > first:
            times = self._pulls.setdefault(action.consumer, _PullTimes())
            times.add(first, time_ms, holder.held[0].pull)

    def _taken_back(self, action: Any, time_ms: int) -> Iterator[Delivery]:
        if isinstance(action, Reset):
            for name, each in self.share.holders.items():
                yield from self._ended(name, each, 0, DeliveryFate.RESET, time_ms)
            return
        holder = self.share.holders.get(action.consumer) if isinstance(action, Join | Leave | Return) else None
        if holder is None:
            return
        if isinstance(action, Return):
            yield from self._ended(action.consumer, holder, action.received + 1, DeliveryFate.RETURN, time_ms)
        elif isinstance(action, Join):
            yield from self._ended(action.consumer, holder, 0, DeliveryFate.AGAIN, time_ms)
        elif isinstance(action, Leave):
            yield from self._ended(action.consumer, holder, 0, DeliveryFate.LOST if action.expired else DeliveryFate.LEFT, time_ms)

    def _ended(self, consumer: str, holder: ShareHolder, begin: int, fate: DeliveryFate, time_ms: int) -> Iterator[Delivery]:
        for each in self._held(consumer, holder, begin):
            yield each._replace(settled_ms=time_ms, fate=fate)

    def rest(self) -> Iterator[Delivery]:
        """What is not settled."""
        for name, holder in self.share.holders.items():
            yield from self._held(name, holder)
        for item in self.share.requeued:
            yield Delivery(self.key, "", item.first, item.first + item.count - 1, item.attempt, None, None, DeliveryFate.WAITING)


class _PullTimes:
    """When a consumer's pull sequences were handed out: of each pull its first, and the time. Both ascend."""

    __slots__ = ("_firsts", "_times")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._times: list[int] = []

    def add(self, first: int, time_ms: int, oldest: int) -> None:
        """A pull; what lies before `oldest` is not asked for any more."""
        if len(self._firsts) >= _PULLS_KEPT:
            done = max(bisect_right(self._firsts, oldest) - 1, 0)
            del self._firsts[:done], self._times[:done]
        self._firsts.append(first)
        self._times.append(time_ms)

    def at(self, pull: int) -> int | None:
        """When it was handed out; None if that was before the log begins."""
        place = bisect_right(self._firsts, pull) - 1
        return self._times[place] if place >= 0 else None
