"""The loader advances the horizon, and puts every message that is due before it into the wheel,
once.

`begin` divides the schedule at the *origin*, the time at which this master begins:

    due <  origin, stored before `begin`     late:  `more_late` puts it into `late`, oldest first, a
                                                    slice at a time
    due <  origin, stored since              `stored` puts it into the wheel
    due >= origin, and < horizon             in the wheel: by `ahead` if it was stored before the
                                             horizon passed it, else by `stored`
    due >= horizon                           on disk only

Every message belongs to exactly one of these lines at any time, because its due time and its
ordinal never change (a moved message is another one). The bucket's count at `begin` shows which
messages were stored before.

A slice is read in a thread. Messages up to the bucket's count at that time come from the index.
Messages that are stored during the read and belong to the slice are kept by `stored`, and join the
slice when it has been read; only then does the horizon move:

    horizon 13:00, bucket 13 has 900 messages:   ahead: a thread reads ordinals 0 to 899; ordinal
                                                 900 is stored then, due 13:20
    the slice ended at 14:00:                    it goes into the wheel, and 900 with it
    it ended at 13:15:                           900 is on disk, in the next slice

Settled messages are not loaded. A message that is settled while it is read, or later in the wheel,
leaves the wheel like any other, and the engine skips it.

Which buckets: a bucket has the messages due in its hour; only the first kept one, `closed_before`,
may also have messages that were due earlier. So at any horizon one bucket has the next messages,
and buckets of distant hours are not read.

How far: the horizon stays `load_ahead_ms` ahead of now, if the wheel has room for a slice. If more
messages are stored before the horizon than the wheel may hold, the loader drops the latest ones
from the wheel, which are on disk too, and moves the horizon back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from qmq.delay.batches import Places
from qmq.delay.schedule import Schedule
from qmq.delay.wheel import Sieve, Wheel, WheelRun, sift
from qmq.errors import LogDamaged

_EVER: Final = -(1 << 62)


InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a blocking function in a thread; the simulator has none."""


class Loader:
    """Call `begin` once, `ahead` and `more_late` in a task each, all on one event loop."""

    def __init__(
        self,
        schedule: Schedule,
        wheel: Wheel,
        run: InThread,
        *,
        wheel_messages_max: int = 16_000_000,
        slice_messages_max: int = 2_000_000,
        load_ahead_ms: int = 600_000,
    ) -> None:
        self.wheel = wheel
        self.late = Wheel(wheel.tick_ms)
        self.origin_ms = _EVER
        self.horizon_ms = _EVER
        self._schedule = schedule
        self._run = run
        self._wheel_messages_max = wheel_messages_max
        self._slice_messages_max = min(slice_messages_max, wheel_messages_max)
        self._load_ahead_ms = load_ahead_ms
        self._aside: list[Places] | None = None
        """Messages stored while a slice is read, due between the horizon and `_aside_end_ms`. None:
        no slice is being read.
        """
        self._aside_end_ms = _EVER
        self._late_buckets: deque[tuple[int, int]] = deque()
        """(bucket, its count at `begin`) for buckets that may have late messages."""
        self._late_ms = _EVER
        """Late messages due before this are in `late`."""
        self._is_late_read = False

    def begin(self, now_ms: int) -> None:
        """This master serves from now on."""
        self.origin_ms = self.horizon_ms = now_ms
        last = max(now_ms // self._schedule.bucket_ms, self._schedule.closed_before)
        self._late_buckets.extend(
            (info.bucket, info.messages)
            for info in self._schedule.buckets()
            if info.pending and info.bucket <= last
        )

    def stored(self, places: Places) -> None:
        """These messages became pending: those due before the horizon go into the wheel."""
        is_near = places.due_times_ms < self.horizon_ms
        if is_near.all():
            self.wheel.add(places)
            return
        if is_near.any():
            self.wheel.add(places[is_near])
        if self._aside is not None:
            is_meant = ~is_near & (places.due_times_ms < self._aside_end_ms)
            if is_meant.any():
                self._aside.append(places[is_meant])

    # --- ahead ------------------------------------------------------------------------------------

    async def ahead(self, now_ms: int) -> bool:
        """Advance the horizon by a slice, if it is near and the wheel has room. True if there may
        be more to load immediately.
        """
        if self._aside is not None:
            return False
        self._give_back()
        target_ms = now_ms + self._load_ahead_ms
        if (
            self.horizon_ms >= target_ms
            or self._wheel_messages_max - len(self.wheel) < self._slice_messages_max
        ):
            return False
        bucket, first_ms = self._next_bucket()
        if bucket is None or first_ms >= target_ms:
            # Without pending messages the horizon advances farther than needed, so that buckets
            # need not be listed at every tick.
            self.horizon_ms = min(first_ms, target_ms + self._load_ahead_ms)
            return False
        await self._load(bucket, first_ms)
        return True

    def _give_back(self) -> None:
        """Remove enough from the wheel that half a slice has room; otherwise it would be loaded
        again immediately.
        """
        if len(self.wheel) > self._wheel_messages_max:
            cut_ms = self.wheel.shrink(
                self._wheel_messages_max - self._slice_messages_max // 2, self.origin_ms
            )
            if cut_ms is not None:
                self.horizon_ms = cut_ms

    def _next_bucket(self) -> tuple[int | None, int]:
        """The first bucket that may have messages due from the horizon on, and the earliest
        possible due time.
        """
        bucket_ms = self._schedule.bucket_ms
        here = self.horizon_ms // bucket_ms
        bucket = min(
            (
                info.bucket
                for info in self._schedule.buckets()
                if info.pending and info.bucket >= here
            ),
            default=None,
        )
        if bucket is None:
            return None, 1 << 62
        is_first = bucket <= self._schedule.closed_before
        return bucket, self.horizon_ms if is_first else max(self.horizon_ms, bucket * bucket_ms)

    async def _load(self, bucket: int, first_ms: int) -> None:
        sieve = Sieve(first_ms, (bucket + 1) * self._schedule.bucket_ms, self._slice_messages_max)
        aside: list[Places] = []
        self._aside, self._aside_end_ms = aside, sieve.end_ms
        try:
            runs = await self._read(bucket, sieve, None)
        finally:
            self._aside = None
        self.wheel.add_runs(runs)
        self.horizon_ms = sieve.end_ms
        for places in aside:
            self.wheel.add(places[places.due_times_ms < sieve.end_ms])

    async def _read(self, bucket: int, sieve: Sieve, count: int | None) -> list[WheelRun]:
        """The bucket's first `count` messages (default: all) through the sieve."""
        if not self._schedule.count(bucket):
            return []
        reader, settled = self._schedule.reader(bucket), self._schedule.settled(bucket)
        upto = reader.count if count is None else count
        try:
            found: list[WheelRun] = await self._run(
                lambda: sift(sieve, bucket, reader, settled, upto)
            )
        except (OSError, LogDamaged):
            if self._schedule.count(bucket):
                raise
            return []  # the bucket was closed in the meantime: it had no pending message
        return found

    # --- late -------------------------------------------------------------------------------------

    @property
    def is_late_done(self) -> bool:
        """Whether all late messages are in `late`, or have left it."""
        return not self._late_buckets

    async def more_late(self) -> None:
        """Load the next slice of late messages; `late` has at most one slice.
        Raises LogDamaged, OSError.
        """
        room = self._slice_messages_max - len(self.late)
        if self._is_late_read or not self._late_buckets or room <= 0:
            return
        bucket, count = self._late_buckets[0]
        end_ms = min(self.origin_ms, (bucket + 1) * self._schedule.bucket_ms)
        sieve = Sieve(self._late_ms, end_ms, room)
        self._is_late_read = True
        try:
            runs = await self._read(bucket, sieve, count)
        finally:
            self._is_late_read = False
        self.late.add_runs(runs)
        self._late_ms = sieve.end_ms
        if sieve.end_ms >= end_ms:
            self._late_buckets.popleft()
