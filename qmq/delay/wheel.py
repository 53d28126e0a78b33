"""The wheel: messages due in the near future, 8 bytes each; and the loader, which fills it from the
schedule. Pure.

The wheel returns due messages tick by tick, oldest first. The classic wheel is an array of slots,
one for each tick: a message is put into the slot of its due time, and each tick empties a slot.
Here the slots are *computed*: messages are in a few sorted runs (below), and a tick's slot is the
front of each run up to that tick.

    tick 500 ms, two runs:  A  due  100  400  700 1300         B  due  450  900
    advance( 499)  boundary    0: nothing is due               A  100 ...         B  450 ...
    advance( 500)  boundary  500: A gives 100 400, B gives 450 A  700 1300        B  900
    advance( 999)  boundary  500: nothing more
    advance(1200)  boundary 1000: A gives 700, B gives 900     A  1300            B  (gone)

Advantages: a loaded slice of two million messages becomes a run by sorting it, in a thread, and
adding the run costs nothing; a message takes 8 bytes and no object; a slot takes no memory, whether
the wheel has an hour or a minute; and the messages of a slot are in order. With real slots, each
message would need a search for its slot, and each slot a growing array: 7,200 an hour, most of them
half empty.

Single messages and small lots go to a *basket*, which is unsorted and searched at every tick; a
full basket becomes a run. Four runs of similar size are merged into one, up to `RUN_MESSAGES_MAX`.
A message is therefore sorted three times in all, and there are few runs: one for every 65,536
waiting messages, and a handful.

The wheel never removes single messages. A message that was cancelled or moved leaves it like any
other, and the caller skips it.

A run holds sorted places, 8 bytes each, and is made safely in a thread. It holds places of one
bucket whose due times agree in their upper bits, its *era* (`due_ms >> 32`: seven weeks). The rest
of a place then fits into one number, and the order of the numbers is the order of (due, ordinal):

    key = (due_ms & 0xFFFF_FFFF) << 32 | ordinal

    due 1_763_730_000_250 of ordinal 7:  era 410, key 2_812_640_506 << 32 | 7

Sorting a run is therefore sorting 64-bit integers in place, which is the fastest sort there is;
merging runs is joining and sorting them. A run is read from its front only. The part that was read
is cut off when it is a quarter of the array, so memory follows the messages.

A *slice* is the first pending messages of a bucket in a span of time, found in one scan of its
index (`sift`). A bucket's index is in the order of arrival, and may be larger than memory, so it is
read in pieces through a *sieve*, which keeps messages that are pending and due in [first_ms,
end_ms). When it has kept one and a half times `messages_max`, it lowers `end_ms` so that at most
`messages_max` remain, and drops the others: the next slice begins there.

    messages_max 3, [0, 1000):   pieces 500 20 300 900 | 40 700 | 60
    kept:                        500 20 300 900
    with 40 700 too many:        [0, 500) 20 300 40
    at the end:                  [0, 300) 20 40 60

The cut is by due time only, so a slice is all that is due in [first_ms, end_ms). If more than
`messages_max` are due in its first millisecond, the slice is that millisecond, whole.

The *loader* advances the horizon, and puts every message that is due before it into the wheel,
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
from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qmq.delay.batches import Places
from qmq.delay.buckets import BucketReader
from qmq.delay.schedule import Schedule
from qmq.errors import LogDamaged

RUN_MESSAGES_MAX: Final = 1 << 18
"""Longer runs are cut: sorting this many places takes a few milliseconds,
for which the event loop waits.
"""
_TRIM_MIN: Final = 1024
_ERA_BITS: Final = 32
_LOW: Final = (1 << 32) - 1
_SHIFT: Final = np.uint64(32)
_LOW_BITS: Final = np.uint64(_LOW)


class WheelRun:
    """Sorted keys of one bucket and era. `keys` belongs to the run;
    the keys before `at` have left.
    """

    __slots__ = ("at", "bucket", "era", "head_ms", "keys")

    def __init__(self, era: int, bucket: int, keys: npt.NDArray[np.uint64]) -> None:
        self.era = era
        self.bucket = bucket
        self.keys = keys
        self.at = 0
        self.head_ms = self.due_ms(0)
        """The due time of the run's first message."""

    def __len__(self) -> int:
        return len(self.keys) - self.at

    @property
    def nbytes(self) -> int:
        """The memory of the keys, in bytes."""
        return self.keys.nbytes

    def due_ms(self, at: int) -> int:
        """The due time of key number `at`."""
        return (self.era << _ERA_BITS) + (int(self.keys[at]) >> 32)

    def until(self, due_ms: int) -> int:
        """How many messages are due at or before a time."""
        if due_ms >> _ERA_BITS != self.era:
            return len(self) if due_ms >> _ERA_BITS > self.era else 0
        last = np.uint64((due_ms & _LOW) << 32 | _LOW)
        return int(self.keys[self.at :].searchsorted(last, "right"))

    def samples(self, step: int, most: int) -> npt.NDArray[np.int64]:
        """The due times of every `step`-th of the first `most` messages: at each, `step` more
        messages are due.
        """
        return self._due_times_ms(self.keys[self.at + step - 1 : self.at + most : step])

    def first(self, count: int) -> Places:
        """The first `count` places; they stay in the run."""
        keys = self.keys[self.at : self.at + count]
        return Places(
            self._due_times_ms(keys),
            np.full(len(keys), self.bucket, np.int32),
            (keys & _LOW_BITS).astype(np.uint32),
        )

    def _due_times_ms(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        return (keys >> _SHIFT).astype(np.int64) + (self.era << _ERA_BITS)

    def leave(self, count: int) -> bool:
        """Remove the first `count` places; True if the run is then empty."""
        self.at += count
        if self.at >= len(self.keys):
            return True
        if self.at >= _TRIM_MIN and self.at * 4 >= len(self.keys):
            self.keys, self.at = self.keys[self.at :].copy(), 0
        self.head_ms = self.due_ms(self.at)
        return False

    def keep(self, count: int) -> None:
        """Keep only the first `count` places."""
        self.keys, self.at = self.keys[self.at : self.at + count].copy(), 0

    def check(self) -> None:
        """The whole invariant, for tests."""
        left = self.keys[self.at :]
        assert len(left), "an empty run"
        assert (left[1:] >= left[:-1]).all(), "out of order"
        assert self.keys.base is None, "it holds more memory than it says"
        assert self.head_ms == self.due_ms(self.at)


def runs_of(places: Places) -> list[WheelRun]:
    """Sort places in any order into runs: one for each bucket and era;
    long ones are cut in order.
    """
    if not len(places):
        return []
    eras = places.due_times_ms >> _ERA_BITS
    keys = (places.due_times_ms & _LOW).astype(np.uint64) << _SHIFT | places.ordinals
    if eras.min() == eras.max() and places.buckets.min() == places.buckets.max():
        return _cut(int(eras[0]), int(places.buckets[0]), keys)
    order = np.lexsort((places.buckets, eras))
    eras, buckets, keys = eras[order], places.buckets[order], keys[order]
    bounds = [
        0,
        *(np.flatnonzero((eras[1:] != eras[:-1]) | (buckets[1:] != buckets[:-1])) + 1).tolist(),
        len(keys),
    ]
    found: list[WheelRun] = []
    for first, end in pairwise(bounds):
        found += _cut(int(eras[first]), int(buckets[first]), keys[first:end].copy())
    return found


def merged(runs: Iterable[WheelRun]) -> list[WheelRun]:
    """Merge runs of the same bucket and era."""
    runs = list(runs)
    return _cut(runs[0].era, runs[0].bucket, np.concatenate([run.keys[run.at :] for run in runs]))


def _cut(era: int, bucket: int, keys: npt.NDArray[np.uint64]) -> list[WheelRun]:
    keys.sort()
    if len(keys) <= RUN_MESSAGES_MAX:
        return [WheelRun(era, bucket, keys)]
    starts = range(0, len(keys), RUN_MESSAGES_MAX)
    return [WheelRun(era, bucket, keys[at : at + RUN_MESSAGES_MAX].copy()) for at in starts]


MOST: Final = 65_536
"""The default limit of messages that one `advance` returns."""
BASKET: Final = 8192
_FAN: Final = 4
_SAMPLES: Final = 16
_NEVER: Final = -(1 << 62)
NOTHING: Final = Places(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint32))
"""No places."""


class Wheel:
    """The messages that are due soon. They leave at multiples of `tick_ms`."""

    def __init__(self, tick_ms: int = 500) -> None:
        self.tick_ms = tick_ms
        self.clear()

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """The memory of its arrays, in bytes."""
        return (
            sum(run.nbytes for run in self._runs)
            + self._due_times_ms.nbytes
            + self._buckets.nbytes
            + self._ordinals.nbytes
        )

    def clear(self) -> None:
        self._runs: list[WheelRun] = []
        self._due_times_ms = np.empty(BASKET, np.int64)
        self._buckets = np.empty(BASKET, np.int32)
        self._ordinals = np.empty(BASKET, np.uint32)
        self._gathered = 0
        self._count = 0
        self.left_ms = _NEVER
        """The latest due time of all messages that left."""

    # --- coming in --------------------------------------------------------------------------------

    def add(self, places: Places) -> None:
        """Add messages in any order and with any due times, past ones included."""
        count = len(places)
        if count >= BASKET:
            self.add_runs(runs_of(places))
            return
        if self._gathered + count > BASKET:
            self._empty_basket()
        end = self._gathered + count
        self._due_times_ms[self._gathered : end] = places.due_times_ms
        self._buckets[self._gathered : end] = places.buckets
        self._ordinals[self._gathered : end] = places.ordinals
        self._gathered = end
        self._count += count

    def add_runs(self, runs: Iterable[WheelRun]) -> None:
        """Add runs made by `runs_of`, perhaps in a thread. They belong to the wheel from now on."""
        for run in runs:
            self._count += len(run)
            self._insert(run)

    def _empty_basket(self) -> None:
        for run in runs_of(self._basket()):
            self._insert(run)
        self._gathered = 0

    def _basket(self) -> Places:
        end = self._gathered
        return Places(self._due_times_ms[:end], self._buckets[:end], self._ordinals[:end])

    def _insert(self, run: WheelRun) -> None:
        self._runs.append(run)
        size = _size_class(run)
        if _FAN ** (size + 2) > RUN_MESSAGES_MAX:
            return
        same_size = [
            each
            for each in self._runs
            if each.bucket == run.bucket and each.era == run.era and _size_class(each) == size
        ]
        if len(same_size) >= _FAN:
            same_size = same_size[-_FAN:]
            self._runs = [each for each in self._runs if each not in same_size]
            for one in merged(same_size):
                self._insert(one)

    # --- going out --------------------------------------------------------------------------------

    def advance(self, now_ms: int, most: int = MOST) -> Places:
        """Remove and return the messages that are due at or before the last tick up to `now_ms`, in
        the order (due, bucket, ordinal); at most `messages_max`, the oldest. The rest comes with
        the next call. `now_ms` may be smaller than in the call before.
        """
        boundary_ms = now_ms // self.tick_ms * self.tick_ms
        self._sort_due(boundary_ms)
        due = [run for run in self._runs if run.head_ms <= boundary_ms]
        if not due or most <= 0:
            return NOTHING
        found = self._take(due, boundary_ms, most)
        self._count -= len(found)
        self.left_ms = max(self.left_ms, int(found.due_times_ms[-1]))
        return found

    def _sort_due(self, boundary_ms: int) -> None:
        """Make a run of the unsorted messages that are due."""
        basket = self._basket()
        is_due = basket.due_times_ms <= boundary_ms
        if not is_due.any():
            return
        due, rest = basket[is_due], basket[~is_due]
        self._gathered = 0
        self._count -= len(basket)
        self.add(rest)
        self.add_runs(runs_of(due))

    def _take(self, due: list[WheelRun], boundary_ms: int, most: int) -> Places:
        if len(due) > 1:
            boundary_ms = min(boundary_ms, _cut_ms(due, most))
            due = [run for run in due if run.head_ms <= boundary_ms]
        counts = [min(run.until(boundary_ms), most) for run in due]
        found = [run.first(count) for run, count in zip(due, counts, strict=True)]
        places = found[0]
        if len(due) > 1:
            places = Places(
                *(
                    np.concatenate([getattr(each, name) for each in found])
                    for name in ("due_times_ms", "buckets", "ordinals")
                )
            )
            order = np.lexsort((places.ordinals, places.buckets, places.due_times_ms))[:most]
            places = places[order]
            counts = np.bincount(
                np.repeat(np.arange(len(due)), counts)[order], minlength=len(due)
            ).tolist()
        gone = {
            id(run) for run, count in zip(due, counts, strict=True) if count and run.leave(count)
        }
        if gone:
            self._runs = [run for run in self._runs if id(run) not in gone]
        return places

    # --- shrinking --------------------------------------------------------------------------------

    def shrink(self, messages: int, first_ms: int = _NEVER) -> int | None:
        """Remove the messages with the latest due times, so that at most `messages` stay. Returns
        the due time from which on messages were removed; None if none were. The cut is by due time:
        after all messages that ever left, not before `first_ms`, and the messages that are due
        first stay.
        """
        if self._count <= messages:
            return None
        self._empty_basket()
        head_ms = min(run.head_ms for run in self._runs)
        cut_ms = max(self._first_beyond(messages), head_ms + 1, self.left_ms + 1, first_ms)
        before = self._count
        kept: list[WheelRun] = []
        for run in self._runs:
            count = run.until(cut_ms - 1)
            if 0 < count < len(run):
                run.keep(count)
            if count:
                kept.append(run)
        self._runs, self._count = kept, sum(map(len, kept))
        return cut_ms if self._count < before else None

    def _first_beyond(self, messages: int) -> int:
        """The highest due time with at most `messages` messages before it."""
        low, high = (
            min(run.head_ms for run in self._runs),
            max(run.due_ms(-1) for run in self._runs),
        )
        while low < high:
            middle = (low + high + 1) // 2
            if sum(run.until(middle - 1) for run in self._runs) <= messages:
                low = middle
            else:
                high = middle - 1
        return low

    def check(self) -> None:
        """The whole invariant, for tests."""
        for run in self._runs:
            run.check()
        assert self._count == self._gathered + sum(map(len, self._runs))
        assert 0 <= self._gathered <= BASKET


def _size_class(run: WheelRun) -> int:
    """The n for which a run has at least 4^n and fewer than 4^(n+1) messages."""
    return (len(run).bit_length() - 1) // 2


def _cut_ms(runs: list[WheelRun], most: int) -> int:
    """A due time by which at least `most` of the messages are due, and not many times as many; or
    the latest due time.
    """
    step = -(-most // _SAMPLES)
    samples = np.concatenate([run.samples(step, most) for run in runs])
    needed = -(-most // step)
    if len(samples) < needed:
        return max(run.due_ms(-1) for run in runs)
    return int(np.partition(samples, needed - 1)[needed - 1])


PIECE: Final = 1 << 18
"""Index rows that are read at once: 4 MiB."""


class Sieve:
    """`end_ms` is the end of the slice so far."""

    def __init__(self, first_ms: int, end_ms: int, messages_max: int) -> None:
        self.first_ms = first_ms
        self.end_ms = end_ms
        self.messages_max = messages_max
        self._due_times_ms: list[npt.NDArray[np.int64]] = []
        self._ordinals: list[npt.NDArray[np.uint32]] = []
        self._kept = 0
        self._kept_max = messages_max + messages_max // 2

    def take(self, first: int, rows: npt.NDArray[np.void], settled: npt.NDArray[np.bool_]) -> None:
        """Take index rows from ordinal `first` on; `settled` says which of them are settled."""
        due_times_ms = rows["due"]
        places = np.flatnonzero(
            (due_times_ms >= self.first_ms) & (due_times_ms < self.end_ms) & ~settled
        )
        self._due_times_ms.append(due_times_ms[places].astype(np.int64))
        self._ordinals.append((places + first).astype(np.uint32))
        self._kept += len(places)
        if self._kept > self._kept_max:
            self._draw_nearer()
            self._kept_max = max(self.messages_max, self._kept) * 3 // 2

    def _draw_nearer(self) -> None:
        due_times_ms, ordinals = self._joined()
        if len(due_times_ms) > self.messages_max:
            surplus_ms = int(np.partition(due_times_ms, self.messages_max)[self.messages_max])
            self.end_ms = max(surplus_ms, int(due_times_ms.min()) + 1)
            mask = due_times_ms < self.end_ms
            due_times_ms, ordinals = due_times_ms[mask], ordinals[mask]
        self._due_times_ms, self._ordinals, self._kept = (
            [due_times_ms],
            [ordinals],
            len(due_times_ms),
        )

    def _joined(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        self._due_times_ms = [np.concatenate(self._due_times_ms or [np.empty(0, np.int64)])]
        self._ordinals = [np.concatenate(self._ordinals or [np.empty(0, np.uint32)])]
        return self._due_times_ms[0], self._ordinals[0]

    def result(self, bucket: int) -> list[WheelRun]:
        """The messages that are due in [first_ms, end_ms), for the wheel."""
        self._draw_nearer()
        due_times_ms, ordinals = self._joined()
        return runs_of(Places(due_times_ms, np.full(len(due_times_ms), bucket, np.int32), ordinals))


def sift(
    sieve: Sieve,
    bucket: int,
    reader: BucketReader,
    settled: npt.NDArray[np.bool_],
    count: int,
    piece: int = PIECE,
) -> list[WheelRun]:
    """Pass a bucket's first `count` rows through the sieve; in a thread.
    Raises LogDamaged, OSError.
    """
    for first in range(0, count, piece):
        end = min(first + piece, count)
        sieve.take(first, reader.read(first, end), settled[first:end])
    return sieve.result(bucket)


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
        self.origin_ms = _NEVER
        self.horizon_ms = _NEVER
        self._schedule = schedule
        self._run = run
        self._wheel_messages_max = wheel_messages_max
        self._slice_messages_max = min(slice_messages_max, wheel_messages_max)
        self._load_ahead_ms = load_ahead_ms
        self._aside: list[Places] | None = None
        """Messages stored while a slice is read, due between the horizon and `_aside_end_ms`. None:
        no slice is being read.
        """
        self._aside_end_ms = _NEVER
        self._late_buckets: deque[tuple[int, int]] = deque()
        """(bucket, its count at `begin`) for buckets that may have late messages."""
        self._late_ms = _NEVER
        """Late messages due before this are in `late`."""
        self._is_late_read = False

    @property
    def reach_ms(self) -> int:
        """Messages due later need not be told to `stored`."""
        return max(self.horizon_ms, self._aside_end_ms if self._aside is not None else 0)

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
        self._shrink_wheel()
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

    def _shrink_wheel(self) -> None:
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
