"""The last states of a cluster that were read, for all pages of one caller.

Rules:
* Nothing is read in the background: a page that asks gets the last state, or a new one if that is too old. A closed page costs nothing.
* The next read starts no sooner than RESTS times the duration of the last one, so open pages use less than a hundredth of the cluster's
  time. At least REST_S lies between two, at most REST_S_MAX.
* Pages that ask at the same time share one read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from qmq.console.cluster_look import ClusterLook, LookRates, rates

RESTS: Final = 100
REST_S: Final = 2.0
REST_S_MAX: Final = 60.0
POINTS_MAX: Final = 900


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The values of one look that curves show."""

    time_s: float
    """Seconds since 1970."""
    stored: float
    done: float
    lag: int
    lag_s: float


class ClusterWatch:
    """Looks at the cluster on request, if the last look is too old. `wall_s` is the time of day, `monotonic_s` measures the pauses."""

    def __init__(
        self,
        look: Callable[[float, ClusterLook | None], Awaitable[ClusterLook]],
        monotonic_s: Callable[[], float],
        wall_s: Callable[[], float],
    ) -> None:
        self._look, self._monotonic_s, self._wall_s = look, monotonic_s, wall_s
        self._last: ClusterLook | None = None
        self._before: ClusterLook | None = None
        self._under_way: asyncio.Task[ClusterLook] | None = None
        self.asked_s = monotonic_s()
        """When a page last asked."""
        self.points: deque[CurvePoint] = deque(maxlen=POINTS_MAX)

    @property
    def rates(self) -> LookRates:
        """The rates between the last two looks."""
        return LookRates() if self._last is None else rates(self._last, self._before)

    @property
    def last(self) -> ClusterLook | None:
        """The last look, however old; None before the first."""
        return self._last

    async def latest(self) -> ClusterLook:
        """The last look, or a new one if the last look is older than the rules allow."""
        self.asked_s = self._monotonic_s()
        if self._last is not None and self.asked_s < self._last.monotonic_s + rest_s(self._last.took_s):
            return self._last
        if self._under_way is None:
            self._under_way = asyncio.create_task(self._take())
        return await asyncio.shield(self._under_way)

    async def _take(self) -> ClusterLook:
        try:
            found = await self._look(self._monotonic_s(), self._last)
        finally:
            self._under_way = None
        self._before, self._last = self._last, found
        seen = self.rates
        self.points.append(CurvePoint(self._wall_s(), seen.stored, seen.done, found.lag, found.lag_ms / 1000))
        return found


def rest_s(took_s: float) -> float:
    """How long a look stays valid, from its duration."""
    return min(max(REST_S, RESTS * took_s), REST_S_MAX)
