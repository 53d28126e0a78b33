"""A slice: the first pending messages of a bucket in a span of time, found in one scan of its index. Pure.

A bucket's index is in the order of arrival, and may be larger than memory, so it is read in pieces through a *sieve*, which keeps messages
that are pending and due in [first_ms, end_ms). When it has kept one and a half times `messages_max`, it lowers `end_ms` so that at most
`messages_max` remain, and drops the others: the next slice begins there.

    messages_max 3, [0, 1000):   pieces 500 20 300 900 | 40 700 | 60
    kept:   500 20 300 900    with 40 700 too many: [0, 500) 20 300 40    at the end [0, 300): 20 40 60

The cut is by due time only, so a slice is all that is due in [first_ms, end_ms). If more than `messages_max` are due in its first
millisecond, the slice is that millisecond, whole.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.delay.interfaces import Places, RowReader
from qmq.delay.wheel import WheelRun, runs_of

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
        places = np.flatnonzero((due_times_ms >= self.first_ms) & (due_times_ms < self.end_ms) & ~settled)
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
        self._due_times_ms, self._ordinals, self._kept = [due_times_ms], [ordinals], len(due_times_ms)

    def _joined(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        self._due_times_ms = [np.concatenate(self._due_times_ms or [np.empty(0, np.int64)])]
        self._ordinals = [np.concatenate(self._ordinals or [np.empty(0, np.uint32)])]
        return self._due_times_ms[0], self._ordinals[0]

    def result(self, bucket: int) -> list[WheelRun]:
        """The messages that are due in [first_ms, end_ms), for the wheel."""
        self._draw_nearer()
        due_times_ms, ordinals = self._joined()
        return runs_of(Places(due_times_ms, np.full(len(due_times_ms), bucket, np.int32), ordinals))


def sift(sieve: Sieve, bucket: int, reader: RowReader, settled: npt.NDArray[np.bool_], count: int, piece: int = PIECE) -> list[WheelRun]:
    """Pass a bucket's first `count` rows through the sieve; in a thread. Raises LogDamaged, OSError."""
    for first in range(0, count, piece):
        end = min(first + piece, count)
        sieve.take(first, reader.read(first, end), settled[first:end])
    return sieve.result(bucket)
