"""Where a piece lies: all that a task needs to read it, without a checkpoint and without a walk. Small, and can be sent.

Two ways to say it. Where there are not too many batches, each one's position, with its bloom of tags, so that those without the wanted tags
are not even looked at. Otherwise, if the queue has most of a stretch of the log, that stretch; the task passes over what is others'.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pyspark_qmq.files.mapped_segments import SegmentFiles
from pyspark_qmq.files.queue_index import Entries
from qmq.log.batch_filter import may_have_tags

_POSITIONS_MAX: Final = 32_768
_FILL_MIN: Final = 0.5


@dataclass(frozen=True, slots=True)
class FileStretch:
    """A part of one segment."""

    base: int
    begin: int
    """Position of the first batch that is wanted."""
    end: int
    """Behind the last one."""
    count: int
    """How many of the queue's batches lie in it."""
    positions: bytes = b""
    """i64 each: where the batches lie; empty if all of the stretch has to be looked at."""
    blooms: bytes = b""
    """u64 each: which tags may be in them."""

    def wanted(self, any_of: Sequence[int], all_of: Sequence[int]) -> NDArray[np.int64]:
        """Positions of the batches that may have tags with such hashes."""
        may_have = may_have_tags(np.frombuffer(self.blooms, np.uint64), any_of, all_of)
        return np.frombuffer(self.positions, np.int64)[may_have]


@dataclass(frozen=True, slots=True)
class PieceLocation:
    """A piece's stretches, in the segments of `folder`; sequences before `start` were gone when it was planned."""

    folder: str
    start: int
    stretches: tuple[FileStretch, ...]


def place_of(files: SegmentFiles, start: int, entries: Entries) -> PieceLocation:
    """Where these batches of a queue lie."""
    return PieceLocation(str(files.folder), start, tuple(_stretch(base, part) for base, part in _by_segment(files, entries)))


def _by_segment(files: SegmentFiles, entries: Entries) -> Iterator[tuple[int, Entries]]:
    done, count = 0, len(entries)
    while done < count:
        base = files.base_of(int(entries["position"][done]))
        after = bisect_right(files.bases, base)
        until = int(np.searchsorted(entries["position"], files.bases[after])) if after < len(files.bases) else count
        yield base, entries[done:until]
        done = until


def _stretch(base: int, entries: Entries) -> FileStretch:
    begin = int(entries["position"][0])
    end = int(entries["position"][-1]) + int(entries["bytes"][-1])
    is_full = int(entries["bytes"].sum(dtype=np.int64)) >= _FILL_MIN * (end - begin)
    if len(entries) > _POSITIONS_MAX and is_full:
        return FileStretch(base, begin, end, len(entries))
    return FileStretch(base, begin, end, len(entries), entries["position"].tobytes(), entries["bloom"].tobytes())
