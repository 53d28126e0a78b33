"""How late messages are: a histogram of the last minute, in milliseconds. Pure.

Up to 1,023 ms every millisecond has a bin; above, each doubling has 512 bins, so that a percentile is at most 0.2 % too high. There are six
slots of ten seconds, which are reused in turn: a percentile is about the last 50 to 60 seconds.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.metrics.figures import Histogram

SLOT_MS: Final = 10_000
SLOTS: Final = 6
BOUNDS_S: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Upper ends of the bins of `Lateness.histogram`: a tick is half a second."""
_BOUNDS_MS: Final = np.array([round(1000 * each) for each in BOUNDS_S], np.int64)
_EXACT: Final = 1024
_BINS: Final = 512
_DOUBLINGS: Final = 30
"""Up to 2^40 ms: 34 years."""
_LATENESS_MAX: Final = (_EXACT << _DOUBLINGS) - 1


class Lateness:
    """`delivered` counts all messages."""

    def __init__(self) -> None:
        self.delivered = 0
        self._bins = np.zeros(len(BOUNDS_S) + 1, np.int64)
        self._sum_ms = 0
        self._counts = np.zeros((SLOTS, _EXACT + _BINS * _DOUBLINGS), np.uint32)
        self._slots = [-1] * SLOTS
        """Which ten seconds each slot is for."""

    def note(self, now_ms: int, lateness_ms: npt.NDArray[np.int64]) -> None:
        """Messages were delivered this late. Negative values count as zero."""
        slot = now_ms // SLOT_MS
        place = slot % SLOTS
        if self._slots[place] != slot:
            self._slots[place] = slot
            self._counts[place] = 0
        np.add.at(self._counts[place], _bins(lateness_ms), 1)
        self.delivered += len(lateness_ms)
        self._bins += np.bincount(np.searchsorted(_BOUNDS_MS, lateness_ms), minlength=len(self._bins))
        self._sum_ms += int(np.maximum(lateness_ms, 0).sum())

    def histogram(self) -> Histogram:
        """The histogram of all messages, in seconds."""
        return Histogram(BOUNDS_S, self._bins.tolist(), self._sum_ms / 1000)

    def p50(self, now_ms: int) -> int:
        """The median of the last minute, in milliseconds; 0 without messages."""
        return self.percentile(now_ms, 50)

    def p99(self, now_ms: int) -> int:
        """The 99th percentile of the last minute, in milliseconds; 0 without messages."""
        return self.percentile(now_ms, 99)

    def percentile(self, now_ms: int, percent: int) -> int:
        """A percentile of the last minute, in milliseconds; 0 without messages."""
        now = now_ms // SLOT_MS
        recent = [place for place, slot in enumerate(self._slots) if now - SLOTS < slot <= now]
        totals = self._counts[recent].sum(axis=0, dtype=np.int64).cumsum()
        if not totals[-1]:
            return 0
        rank = -(-int(totals[-1]) * percent // 100)
        return _highest(int(totals.searchsorted(rank)))


def _bins(lateness_ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = np.clip(lateness_ms, 0, _LATENESS_MAX)
    doublings = np.maximum(np.frexp(values.astype(np.float64))[1].astype(np.int64) - 10, 0)
    bins: npt.NDArray[np.int64] = (values >> doublings) + _BINS * doublings
    return bins


def _highest(place: int) -> int:
    """The largest value of a bin."""
    if place < _EXACT:
        return place
    doublings = place // _BINS - 1
    return ((place - _BINS * doublings + 1) << doublings) - 1
