"""Splits a task's rows into chunks at positions that depend only on the rows. Pure.

A chunk ends before the row that would exceed the number of rows, `CHUNK_BYTES` (a larger row is alone), or the range of create times that a
batch can store. So two attempts with the same rows make the same chunks, however Spark splits its record batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pyspark_qmq.sink import arrow_vectors, row_checks
from pyspark_qmq.sink.row_identity import ROWS_MAX
from pyspark_qmq.sink.sink_schema import Fields
from qmq.errors import InvalidArgument
from qmq.limits import MIB

CHUNK_BYTES: Final = 4 * MIB
SPREAD_MS_MAX: Final = (1 << 32) - 1
"""Create times in a batch are stored as the earliest one and 32-bit differences."""
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RowChunk:
    """Consecutive rows; `first_row` is the number of the first one in the task."""

    number: int
    first_row: int
    batch: pa.RecordBatch
    sizes: Int64
    """Bytes of each row."""


def cut(batches: Iterable[pa.RecordBatch], fields: Fields, rows_max: int) -> Iterator[RowChunk]:
    """Yields chunks. Raises InvalidArgument or MessageTooLarge (`row_checks.check`) before the chunk with the invalid row."""
    cutter = Cutter(fields, rows_max)
    for batch in batches:
        if batch.num_rows:
            yield from cutter.put(batch)
    yield from cutter.end()


class Cutter:
    """Record batches in, chunks out."""

    def __init__(self, fields: Fields, rows_max: int, bytes_max: int = CHUNK_BYTES) -> None:
        self._fields = fields
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._parts: list[tuple[pa.RecordBatch, Int64]] = []
        self._rows = self._bytes = 0
        self._earliest: int | None = None
        self._latest = 0
        self._count = self._next_row = 0

    def put(self, batch: pa.RecordBatch) -> Iterator[RowChunk]:
        """Add a record batch and yield the chunks that are complete. Raises InvalidArgument, MessageTooLarge."""
        first_row = self._next_row + self._rows
        if first_row + batch.num_rows > ROWS_MAX:
            raise InvalidArgument(f"more than {ROWS_MAX} rows in one Spark partition: repartition")
        sizes = row_checks.check(batch, self._fields, first_row)
        times = self._times(batch)
        ends = np.cumsum(sizes)
        at = 0
        while at < batch.num_rows:
            count = self._fitting(ends, at)
            if times is not None:
                count = self._near(times[at : at + count])
            if count:
                self._add(batch.slice(at, count), sizes[at : at + count])
                at += count
            if at < batch.num_rows:
                yield self._whole()

    def end(self) -> Iterator[RowChunk]:
        if self._rows:
            yield self._whole()

    def _times(self, batch: pa.RecordBatch) -> Int64 | None:
        return arrow_vectors.milliseconds(batch.column(self._fields.create_time), up=False) if self._fields.create_time >= 0 else None

    def _fitting(self, ends: Int64, at: int) -> int:
        """How many rows from `at` on fit into the open chunk."""
        room = self._bytes_max - self._bytes + (int(ends[at - 1]) if at else 0)
        count = min(int(np.searchsorted(ends, room, "right")) - at, self._rows_max - self._rows, len(ends) - at)
        return 1 if count <= 0 and not self._rows else max(count, 0)

    def _near(self, times: Int64) -> int:
        """How many of these rows have create times near enough to each other and to the open chunk."""
        if not len(times):
            return 0
        earliest, latest = np.minimum.accumulate(times), np.maximum.accumulate(times)
        if self._earliest is not None:
            earliest, latest = np.minimum(earliest, self._earliest), np.maximum(latest, self._latest)
        count = int(np.searchsorted(latest - earliest, SPREAD_MS_MAX, "right"))
        if count:
            self._earliest, self._latest = int(earliest[count - 1]), int(latest[count - 1])
        return count

    def _add(self, batch: pa.RecordBatch, sizes: Int64) -> None:
        self._parts.append((batch, sizes))
        self._rows += batch.num_rows
        self._bytes += int(sizes.sum())

    def _whole(self) -> RowChunk:
        batches, sizes = zip(*self._parts, strict=True)
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        chunk = RowChunk(self._count, self._next_row, batch, np.concatenate(sizes))
        self._next_row += self._rows
        self._count += 1
        self._parts, self._rows, self._bytes, self._earliest = [], 0, 0, None
        return chunk
