"""A clock that the test moves. Wall time stops until `advance`; the event loop's time keeps
running, and `advance` moves it, too.

Why the loop's time must move: heartbeats sleep, retries pause, long polls time out, and all of them
use the event loop's time. The loop's time is moved in steps with a little real time in between: a
live server sends its heartbeats at each step, and keeps its leases; a server that hangs loses them.
The rule:

    up to two minutes    wall time and the loop's time move together, a second a step at most
    more                 the wall time is moved in 60 steps; the loop's time by two minutes, a
                         second a step, the second half of it when the wall time has its new value
                         already

All code that reads the wall clock at least once a minute reads the new time in the second half. So
one long advance does not end a lease of more than two minutes, but several advances of two minutes
do.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final

from qmq.errors import InvalidArgument
from qmq.process.event_loop import SystemClock

STEP_S: Final = 1.0
LOOP_S_MAX: Final = 120.0
"""The most by which one `advance` moves the loop's time."""
PAUSE_S: Final = 0.005
"""The real time between two steps, for sockets and threads."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


def virtual(start: datetime | None = None) -> VirtualClock:
    """A clock for one `TestCluster`. It stops at `start` (with a time zone; default: the current
    second) until it is advanced. Raises InvalidArgument if `start` has no time zone.
    """
    if start is None:
        return VirtualClock(SystemClock().time_ms() // 1000 * 1000)
    if start.utcoffset() is None:
        raise InvalidArgument(f"start={start.isoformat()} has no time zone, so it names no moment")
    return VirtualClock((start - _EPOCH) // _MILLISECOND)


class LoopTime:
    """The time of one event loop, with the added time. The addition stays as long as the loop
    lives: time never goes back.
    """

    def __init__(self, real: Callable[[], float]) -> None:
        self._real = real
        self.added_s = 0.0

    def __call__(self) -> float:
        return self._real() + self.added_s


def loop_time_of(loop: asyncio.AbstractEventLoop) -> LoopTime:
    """Replace the loop's time function, once. Raises InvalidArgument for a loop whose time cannot
    be replaced.
    """
    if not isinstance(loop, asyncio.BaseEventLoop):
        raise InvalidArgument(
            "virtual time needs asyncio's own event loop, and this one is "
            f"{type(loop).__module__}.{type(loop).__name__}, whose time "
            "cannot be moved: run the test without uvloop, or give TestCluster no clock"
        )
    found = loop.time
    if not isinstance(found, LoopTime):
        found = LoopTime(found)
        loop.time = found  # type: ignore[method-assign]
    return found


@contextmanager
def _unhurried(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """In asyncio's debug mode: do not report a step as a slow callback."""
    before, loop.slow_callback_duration = loop.slow_callback_duration, math.inf
    try:
        yield
    finally:
        loop.slow_callback_duration = before


class VirtualClock:
    """A `qmq.process.event_loop.Clock`. Make it with `virtual()`;
    it works once its cluster has started.
    """

    def __init__(self, start_ms: int) -> None:
        self._wall_ms = start_ms
        self._loop_time: LoopTime | None = None
        self._moving = asyncio.Lock()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use the loop in which the cluster starts. Raises InvalidArgument for a loop whose time
        cannot be moved.
        """
        found = loop_time_of(loop)
        if self._loop_time not in (None, found):
            raise InvalidArgument(
                "this clock belongs to another event loop: make a new one with virtual()"
            )
        self._loop_time = found

    def time_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; constant until the clock is advanced."""
        return self._wall_ms

    def monotonic_ms(self) -> int:
        """The event loop's time."""
        return int(self._required()() * 1000)

    def now(self) -> datetime:
        """The current wall time, in UTC."""
        return _EPOCH + self._wall_ms * _MILLISECOND

    def _required(self) -> LoopTime:
        if self._loop_time is None:
            raise InvalidArgument(
                "this clock has no cluster yet: `async with TestCluster(clock=clock)` first"
            )
        return self._loop_time

    async def advance(
        self,
        by: timedelta | None = None,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
        milliseconds: float = 0,
    ) -> None:
        """Let time pass, as the module describes: `by` plus the other arguments. When this returns,
        messages that became due are on their way. Raises InvalidArgument for a negative time, or a
        clock without a cluster.
        """
        span = timedelta(
            days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds
        )
        span += by if by is not None else timedelta()
        if span < timedelta():
            raise InvalidArgument("time cannot go back: advance by a positive time")
        async with self._moving:
            with _unhurried(asyncio.get_running_loop()):
                await self._pass(self._required(), -(-span // _MILLISECOND))

    async def _pass(self, loop_time: LoopTime, total_ms: int) -> None:
        start_ms, total_s = self._wall_ms, total_ms / 1000
        is_long = total_s > LOOP_S_MAX
        steps = int(LOOP_S_MAX / STEP_S) if is_long else max(math.ceil(total_s / STEP_S), 1)
        wall_steps = steps // 2 if is_long else steps
        for step in range(1, steps + 1):
            self._wall_ms = start_ms + total_ms * min(step, wall_steps) // wall_steps
            loop_time.added_s += STEP_S if is_long else total_s / steps
            await asyncio.sleep(PAUSE_S)
