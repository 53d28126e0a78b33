"""The location of a piece: all that a task needs to read it, without a checkpoint and without a walk. Small and picklable.

A location has one of two forms. For a moderate number of batches, it has the position and the Bloom filter of tags of each batch, so that
batches without the wanted tags are not read. If the queue has most batches of a stretch of the log, it has only the stretch, and the task
skips the batches of other queues.
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
    """A range of one segment."""

    base: int
    begin: int
    """The position of the first batch of the piece."""
    end: int
    """The end of the last batch."""
    count: int
    """The number of the queue's batches in the stretch."""
    positions: bytes = b""
    """The positions of the batches, i64 each; empty if the whole stretch must be read."""
    blooms: bytes = b""
    """The Bloom filters of their tags, u64 each."""

    def wanted(self, any_of: Sequence[int], all_of: Sequence[int]) -> NDArray[np.int64]:
        """The positions of batches that may have tags with these hashes."""
        may_have = may_have_tags(np.frombuffer(self.blooms, np.uint64), any_of, all_of)
        return np.frombuffer(self.positions, np.int64)[may_have]


@dataclass(frozen=True, slots=True)
class PieceLocation:
    """A piece's stretches in the segments of `folder`. Sequences before `start` had been deleted when the piece was planned."""

    folder: str
    start: int
    stretches: tuple[FileStretch, ...]


def place_of(files: SegmentFiles, start: int, entries: Entries) -> PieceLocation:
    """The location of these batches of a queue."""
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
