"""Runs: sorted places, 8 bytes each, of which a wheel consists. Pure, and safe in a thread.

A run holds places of one bucket whose due times agree in their upper bits, its *era* (`due_ms >> 32`: seven weeks). The rest of a place
then fits into one number, and the order of the numbers is the order of (due, ordinal):

    key = (due_ms & 0xFFFF_FFFF) << 32 | ordinal

    due 1_763_730_000_250 of ordinal 7:  era 410, key 2_812_640_506 << 32 | 7

Sorting a run is therefore sorting 64-bit integers in place, which is the fastest sort there is; merging runs is joining and sorting them.
A run is read from its front only. The part that was read is cut off when it is a quarter of the array, so memory follows the messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.delay.interfaces import Places

RUN_MESSAGES_MAX: Final = 1 << 18
"""Longer runs are cut: sorting this many places takes a few milliseconds, for which the event loop waits."""
_TRIM_MIN: Final = 1024
_ERA_BITS: Final = 32
_LOW: Final = (1 << 32) - 1
_SHIFT: Final = np.uint64(32)
_LOW_BITS: Final = np.uint64(_LOW)


class WheelRun:
    """Sorted keys of one bucket and era. `keys` belongs to the run; the keys before `at` have left."""

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
        """The due times of every `step`-th of the first `most` messages: at each, `step` more messages are due."""
        return self._due_times_ms(self.keys[self.at + step - 1 : self.at + most : step])

    def first(self, count: int) -> Places:
        """The first `count` places; they stay in the run."""
        keys = self.keys[self.at : self.at + count]
        return Places(self._due_times_ms(keys), np.full(len(keys), self.bucket, np.int32), (keys & _LOW_BITS).astype(np.uint32))

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
    """Sort places in any order into runs: one for each bucket and era; long ones are cut in order."""
    if not len(places):
        return []
    eras = places.due_times_ms >> _ERA_BITS
    keys = (places.due_times_ms & _LOW).astype(np.uint64) << _SHIFT | places.ordinals
    if eras.min() == eras.max() and places.buckets.min() == places.buckets.max():
        return _cut(int(eras[0]), int(places.buckets[0]), keys)
    order = np.lexsort((places.buckets, eras))
    eras, buckets, keys = eras[order], places.buckets[order], keys[order]
    bounds = [0, *(np.flatnonzero((eras[1:] != eras[:-1]) | (buckets[1:] != buckets[:-1])) + 1).tolist(), len(keys)]
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
