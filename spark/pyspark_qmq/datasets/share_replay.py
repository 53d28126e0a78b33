"""Replays one group's share of a queue: when messages were delivered, and their outcomes. Pure.

The share is the broker's own code (qmq/log/share.py), which emits an event for each change of a message. The replay adds the times of
delivery.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Final

from pyspark_qmq.datasets.delivery_fate import Delivery, DeliveryFate, ShareKey
from qmq.log.share import Share
from qmq.log.share_events import ShareEvent, ShareEventKind

_PULLS_KEPT: Final = 512
"""How many pulls of a consumer are kept before settled ones are removed."""


class ShareReplay:
    """A share, with the delivery times of its ranges."""

    __slots__ = ("_pulls", "key", "share")

    def __init__(self, key: ShareKey, share: Share | None = None) -> None:
        self.key = key
        self.share = share or Share()
        self._pulls: dict[str, _PullTimes] = {}

    def apply(self, action: Any, time_ms: int) -> Iterator[Delivery]:
        """Apply an action and yield the deliveries that it ended. Consume the iterator before the next call."""
        events: list[ShareEvent] = []
        self.share.apply(action, events)
        for each in events:
            if each.kind is ShareEventKind.PULL:
                times = self._pulls.setdefault(each.consumer, _PullTimes())
                times.add(each.pull, time_ms, self.share.holders[each.consumer].held[0].pull)
            elif each.kind is not ShareEventKind.SKIP and (each.consumer or each.kind is not ShareEventKind.RESET):
                yield self._delivery(each.consumer, each.pull, each.first, each.count, each.attempt)._replace(
                    settled_ms=time_ms, fate=DeliveryFate(each.kind.value), delay_ms=each.delay_ms
                )

    def _delivery(self, consumer: str, pull: int, first: int, count: int, attempt: int) -> Delivery:
        """A range that was delivered and is not settled."""
        times = self._pulls.get(consumer)
        pulled_ms = times.at(pull) if times is not None else None
        return Delivery(self.key, consumer, first, first + count - 1, attempt or None, pulled_ms, None, DeliveryFate.OPEN)

    def rest(self) -> Iterator[Delivery]:
        """Yields the deliveries that are not settled."""
        for name, holder in self.share.holders.items():
            for each in holder.held:
                yield self._delivery(name, *each)
        for item in self.share.requeued:
            yield Delivery(self.key, "", item.first, item.first + item.count - 1, item.attempt, None, None, DeliveryFate.WAITING)


class _PullTimes:
    """The times of a consumer's pulls: the first pull sequence of each pull, and its time. Both are ascending."""

    __slots__ = ("_firsts", "_times")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._times: list[int] = []

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
