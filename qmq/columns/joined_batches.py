"""Presents the columns of several stored batches as if they were one batch. Pure.

A `JoinedBatches` finds a column's buffers in each of its spans and concatenates them (buffers.py). Unused columns are not read: bodies are
decompressed only for a schema with the body, tags are read only for a schema with tags or a selection by tags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq import limits
from qmq.columns.buffers import Ints, Joined, Strings, join, stacked
from qmq.columns.coalescing import Span, bodies_bytes
from qmq.errors import CorruptBatch
from qmq.wire.batch_columns import Compression, decompress, last_offset

_ZEROS: Final = np.zeros(limits.BATCH_MESSAGES_MAX + 1, np.int32)


class Tags(NamedTuple):
    """Row i has the tags `marks[i]` to `marks[i + 1]` - 1."""

    marks: Ints
    names: Joined


class Headers(NamedTuple):
    """Row i has the headers `marks[i]` to `marks[i + 1]` - 1."""

    marks: Ints
    names: Joined
    values: Joined


class JoinedBatches:
    """The rows of one or more spans. All columns raise CorruptBatch if their offsets are invalid."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.counts = np.array([span.rows for span in spans], np.int64)
        self.rows = int(self.counts.sum())

    def each(self, value: Callable[[Span], int], kind: type[np.generic] = np.int64) -> npt.NDArray[Any]:
        """Expand one number per span to one number per row."""
        found = np.array([value(span) for span in self.spans], kind)
        return found.repeat(self.counts)

    def has(self, column: str) -> bool:
        """Whether any of the batches has a column, by its name in `Layout`."""
        return any(getattr(span.layout, column) >= 0 for span in self.spans)

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """Each row's position in its stored batch."""
        shifts = np.array([span.first for span in self.spans], np.int64) - (np.cumsum(self.counts) - self.counts)
        return np.arange(self.rows) + shifts.repeat(self.counts)

    def create_deltas(self) -> npt.NDArray[Any]:
        """Offsets to add to the batches' create times; 0 if absent."""
        return np.concatenate([_numbers(span, span.layout.create_delta, "<u4", 0) for span in self.spans])

    def lps(self) -> npt.NDArray[np.int32]:
        """The logical partitions; -1 if absent."""
        return np.concatenate([_numbers(span, span.layout.logical_partition, "<u2", -1).astype(np.int32) for span in self.spans])

    def stored_ids(self) -> npt.NDArray[np.uint8]:
        """The stored ids, 16 bytes per row; zeros if a batch stores no ids."""
        return np.concatenate([_stored_ids(span) for span in self.spans])

    @cached_property
    def keys(self) -> Joined:
        """The keys; empty if absent."""
        return join([_keys(span) for span in self.spans])

    def bodies(self) -> Joined:
        return join([_bodies(span) for span in self.spans])

    @cached_property
    def tags(self) -> Tags:
        """The rows' tags; empty for a batch without the column."""
        marks = [_list_marks(span, span.layout.tag_list) for span in self.spans]
        names = [
            _part(s.region, s.layout.tag, s.layout.tag_data, int(each[0]), int(each[-1])) for s, each in zip(self.spans, marks, strict=True)
        ]
        return Tags(stacked(marks), join(names))

    @cached_property
    def tag_hashes(self) -> npt.NDArray[np.uint64]:
        """The stored hashes of the tags, one for each of `tags.names`."""
        marks = [_list_marks(span, span.layout.tag_list) for span in self.spans]
        return np.concatenate([_hashes(s, int(each[0]), int(each[-1])) for s, each in zip(self.spans, marks, strict=True)])

    def headers(self) -> Headers:
        """The rows' headers; empty for a batch without the column."""
        ranges = [_list_marks(span, span.layout.header_list) for span in self.spans]
        both = [(s.region, s.layout, int(r[0]), int(r[-1])) for s, r in zip(self.spans, ranges, strict=True)]
        names = [_part(region, at.header_name, at.header_name_data, first, end) for region, at, first, end in both]
        values = [_part(region, at.header_value, at.header_value_data, first, end) for region, at, first, end in both]
        return Headers(stacked(ranges), join(names), join(values))


def _numbers(span: Span, at: int, code: str, missing: int) -> npt.NDArray[Any]:
    if at < 0:
        return np.full(span.rows, missing, np.int32)
    return np.frombuffer(span.region, code, span.header.count, at)[span.first : span.end]


def _stored_ids(span: Span) -> npt.NDArray[np.uint8]:
    at = span.layout.message_id
    if at < 0:
        return np.zeros((span.rows, 16), np.uint8)
    return np.frombuffer(span.region, np.uint8, 16 * span.rows, at + 16 * span.first).reshape(-1, 16)


def _part(region: bytes | memoryview, marks_at: int, data_at: int, first: int, end: int) -> Strings:
    """Items `first` to `end` - 1 of an offsets-and-bytes column; none if it is absent, and then `first` and `end` are 0."""
    if marks_at < 0:
        return Strings(_ZEROS[: end - first + 1], b"")
    marks = np.frombuffer(region, "<i4", end - first + 1, marks_at + 4 * first)
    return Strings(marks, memoryview(region)[data_at:])


def _keys(span: Span) -> Strings:
    return _part(span.region, span.layout.key, span.layout.key_data, span.first, span.end)


def _bodies(span: Span) -> Strings:
    region, header, at = span.region, span.header, span.layout.body
    marks = np.frombuffer(region, "<i4", span.rows + 1, at + 4 * span.first)
    stored = memoryview(region)[span.layout.body_data : span.layout.body_data + header.body_bytes]
    if not header.compression:
        return Strings(marks, stored)
    try:
        kind = Compression(header.compression)
    except ValueError:
        raise CorruptBatch(f"bodies of compression {header.compression}, which this release does not know") from None
    return Strings(marks, decompress(kind, bytes(stored), bodies_bytes(span)))


def _list_marks(span: Span, at: int) -> Ints:
    """Where the lists of a span's rows begin, and the last one ends."""
    if at < 0:
        return _ZEROS[: span.rows + 1]
    marks = np.frombuffer(span.region, "<i4", span.rows + 1, at + 4 * span.first)
    if not 0 <= marks[0] <= marks[-1] <= last_offset(span.region, at, span.header.count):
        raise CorruptBatch(
            f"the lists at byte {at} of a region do not rise, although its checksum holds: the program that wrote it has a bug"
        )
    return marks


def _hashes(span: Span, first: int, end: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(span.region, "<u8", end - first, max(span.layout.tag_hash, 0) + 8 * first)
