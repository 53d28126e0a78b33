"""Schedules the next check of each item, so that the cost of a tick depends on the due items only. Pure: the caller passes the time.

Each item has at most one time, the earliest that was requested. A due item is forgotten: the caller that checks it sets the next time. An
item whose own deadline moved (a lease was renewed, a pull was answered) does not change its time here: the check comes too early, and sets
a later time. Renewing therefore costs nothing, and an item is checked about once for each lease or wait that it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class CheckTimes(Generic[T]):
    """Check times of items, which are distinguished by identity. Times are milliseconds of a monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._at: dict[int, int] = {}
        """The time of each item, by `id`; other entries of it in the heap are outdated."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._at)

    def at(self, item: T, time_ms: int) -> None:
        """Have the item looked at by then, unless it is to be looked at before."""
        known = self._at.get(id(item))
        if known is None or time_ms < known:
            self._at[id(item)] = time_ms
            heappush(self._heap, (time_ms, next(self._numbers), item))

    def due(self, now_ms: int) -> Iterator[T]:
        """The due items, the earliest first. An item that is added meanwhile comes with the next call, even if it is due."""
        found: list[T] = []
        while self._heap and self._heap[0][0] <= now_ms:
            time_ms, _, item = heappop(self._heap)
            if self._at.get(id(item)) == time_ms:
                del self._at[id(item)]
                found.append(item)
        return iter(found)
