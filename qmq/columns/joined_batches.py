"""Combines stored batches, so that Spark gets record batches of an efficient size, and makes Arrow
arrays of their buffers. Pure.

*Chunks of batches.*

A stored batch may hold a single message, and a record batch costs Spark as much as hundreds of
messages do, so several become one:

    stored batches ──spans──▶ the rows of each that are wanted
    ──chunks──▶ spans that become one record batch ──shaped──▶ what Spark gets

A chunk has at most 8,192 rows and 4 MiB, counted uncompressed. If a selection leaves few rows of
several chunks, they are combined once more; the rows of one large batch are cut. So a record batch
has at most 65,536 rows, and at most 32 MiB unless it has one row.

*Buffers.*

A batch stores a column of byte strings in Arrow's layout: int32 offsets ("marks"), then bytes. A
column of one batch is used without a copy. Columns of several batches are concatenated, which costs
far less than another record batch costs Spark.

A batch is validated even if its checksums are right: brokers check offsets at intake, but the
writer of a file is unknown. Marks that decrease or point outside the column would let Arrow and the
JVM read foreign memory, so they raise CorruptBatch; one vector operation over all lengths finds
them. Invalid UTF-8 in names is replaced by U+FFFD, as consumers see it, because Spark does not
check it.

*Columns of several batches.*

A `JoinedBatches` finds a column's buffers in each of its spans and concatenates them. Unused
columns are not read: bodies are decompressed only for a schema with the body, tags are read only
for a schema with tags or a selection by tags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qmq import limits
from qmq.columns.model import QueuePiece, SourceBatch
from qmq.errors import CorruptBatch
from qmq.wire.batch import Envelope, Kind
from qmq.wire.batch_columns import (
    Compression,
    Layout,
    RegionHeader,
    decompress,
    last_offset,
    parse_header,
)

ROWS_WANTED: Final = 8192
BYTES_WANTED: Final = 4 * limits.MIB
"""Measured: from about 4,000 rows on, the fixed cost of a record batch is negligible; beyond a few
MiB, only memory use grows.
"""
ROWS_MAX: Final = 65_536
BYTES_MAX: Final = 32 * limits.MIB
BODIES_BYTES_MAX: Final = 4 * limits.BATCH_BYTES_MAX
"""The largest uncompressed size that compressed bodies may claim."""
ROWS_FEW: Final = 1024
"""Record batches with fewer rows are combined with others."""


class Span(NamedTuple):
    """The messages at positions `first` to `end` - 1 of a stored batch."""

    envelope: Envelope
    region: bytes | memoryview
    header: RegionHeader
    layout: Layout
    first: int
    end: int

    @property
    def rows(self) -> int:
        """The number of messages; at least one."""
        return self.end - self.first


def spans(
    batches: Iterable[SourceBatch], piece: QueuePiece, *, with_directed: bool
) -> Iterator[Span]:
    """The parts of the batches that lie within the piece and are visible to applications.
    Raises CorruptBatch.
    """
    for envelope, region in batches:
        if envelope.kind != Kind.DATA:
            continue
        header = parse_header(region)
        first = max(piece.first - envelope.base_sequence, 0)
        end = min(piece.end - envelope.base_sequence, header.count)
        if first < end and (with_directed or not header.is_directed):
            yield Span(envelope, region, header, Layout.walk(region, header), first, end)


def bodies_bytes(span: Span) -> int:
    """The uncompressed size of all bodies of the batch.
    Raises CorruptBatch if the size is impossible.
    """
    size = int(np.frombuffer(span.region, "<i4", 1, span.layout.body + 4 * span.header.count)[0])
    if not 0 <= size <= BODIES_BYTES_MAX:
        raise CorruptBatch(f"a batch claims an impossible size of its bodies: {size} bytes")
    return size


def chunks(found: Iterable[Span]) -> Iterator[list[Span]]:
    """Lists of spans; each list is within ROWS_WANTED and BYTES_WANTED, or has one span.
    Raises CorruptBatch.
    """
    hand: list[Span] = []
    rows = size = 0
    for span in found:
        span_bytes = len(span.region) + (bodies_bytes(span) if span.header.compression else 0)
        if hand and (rows + span.rows > ROWS_WANTED or size + span_bytes > BYTES_WANTED):
            yield hand
            hand, rows, size = [], 0, 0
        hand.append(span)
        rows += span.rows
        size += span_bytes
    if hand:
        yield hand


def shaped(found: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in record batches that are not too large and, where possible, not tiny."""
    few: list[pa.RecordBatch] = []
    rows = 0
    for batch in found:
        if batch.num_rows >= ROWS_FEW and not few:
            yield from _cut(batch)
            continue
        few.append(batch)
        rows += batch.num_rows
        if rows >= ROWS_FEW or sum(each.nbytes for each in few) >= BYTES_WANTED:
            yield from _cut(pa.concat_batches(few))
            few, rows = [], 0
    if few:
        yield from _cut(few[0] if len(few) == 1 else pa.concat_batches(few))


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halve a record batch until each part is small enough."""
    rows = batch.num_rows
    if rows <= ROWS_MAX and (batch.nbytes <= BYTES_MAX or rows == 1):
        if rows:
            yield batch
        return
    yield from _cut(batch.slice(0, rows // 2))
    yield from _cut(batch.slice(rows // 2))


Ints = npt.NDArray[np.int32]
Bytes = bytes | memoryview

_HEX: Final = np.frombuffer("".join(f"{each:02x}" for each in range(256)).encode(), "<u2")
"""The two hexadecimal digits of each byte value, as one number."""
_PLACES: Final = np.frombuffer("".join(f"{each:04x}" for each in range(65_536)).encode(), "S4")
"""The last four digits of the message id, for each position in a batch."""


class Strings(NamedTuple):
    """Byte strings of one batch: item i is `data[marks[i]:marks[i + 1]]`."""

    marks: Ints
    data: Bytes


class Joined(NamedTuple):
    """Validated byte strings of several batches.
    `marks` begin at 0 and rise to the length of `data`.
    """

    marks: Ints
    data: Bytes

    def array(self, kind: pa.DataType, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
        """An Arrow array of strings or binaries. `valid`: which items are not null (None: all)."""
        bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
        return pa.Array.from_buffers(
            kind, len(self.marks) - 1, [bits, pa.py_buffer(self.marks), pa.py_buffer(self.data)]
        )


def marks_of(lengths: npt.NDArray[Any]) -> Ints:
    """The start of each item of the given lengths, and the end of the last one."""
    marks = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=marks[1:])
    return marks


def stacked(marks: Sequence[Ints]) -> Ints:
    """The marks of one or more batches, concatenated and starting at 0. Raises CorruptBatch if
    marks decrease.
    """
    if len(marks) == 1:
        only = marks[0]
        joined = only if only[0] == 0 and only.flags.aligned else only - only[0]
    else:
        joined = np.zeros(sum(map(len, marks)) - len(marks) + 1, np.int32)
        at = end = 0
        for each in marks:
            first, last, rows = int(each[0]), int(each[-1]), len(each) - 1
            np.add(each[1:], end - first, out=joined[at + 1 : at + 1 + rows])
            at += rows
            end += last - first
    if (joined[1:] < joined[:-1]).any():
        raise CorruptBatch(
            "the offsets of a column do not rise, although the batch's checksum holds: the "
            "program that wrote it has a bug"
        )
    return joined


def join(parts: Sequence[Strings]) -> Joined:
    """Concatenate the items of one or more batches. Raises CorruptBatch if marks decrease or point
    outside the column.
    """
    chunks = [data[_within(marks, len(data))] for marks, data in parts]
    return Joined(
        stacked([marks for marks, _ in parts]), chunks[0] if len(chunks) == 1 else b"".join(chunks)
    )


def _within(marks: Ints, size: int) -> slice:
    """The range of bytes spanned by a column's marks. Raises CorruptBatch if it exceeds `size`."""
    first, last = int(marks[0]), int(marks[-1])
    if not 0 <= first <= last <= size:
        raise CorruptBatch(
            "an offset points outside its column, although the batch's checksum holds: the "
            "program that wrote it has a bug"
        )
    return slice(first, last)


def texts(joined: Joined) -> pa.Array:
    """An Arrow array of strings. Bytes that are not valid UTF-8 are replaced by U+FFFD."""
    if bytes(joined.data).isascii():
        return joined.array(pa.string())
    found = joined.array(pa.binary())
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        distinct = found.dictionary_encode()
        mended = [each.decode(errors="replace") for each in distinct.dictionary.to_pylist()]
        return pa.array(mended, pa.string()).take(distinct.indices)


def hex_texts(digits: npt.NDArray[np.uint8]) -> pa.Array:
    """Rows of equally many ASCII digits, as strings."""
    rows, width = digits.shape
    marks = np.arange(0, rows * width + 1, width, dtype=np.int32)
    return Joined(marks, digits.data.cast("B", (rows * width,))).array(pa.string())


def hex_of(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Rows of bytes as rows of twice as many hexadecimal digits."""
    digits: npt.NDArray[np.uint8] = np.asarray(_HEX[raw]).view(np.uint8)
    return digits


def place_digits(places: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Four hexadecimal digits for each position in a batch."""
    digits: npt.NDArray[np.uint8] = _PLACES[places].view(np.uint8).reshape(-1, 4)
    return digits


def map_array(marks: Ints, names: pa.Array, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """An Arrow array with a map per message, from marks into names and values."""
    entries = pa.StructArray.from_arrays([names, values], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(
        kind, len(marks) - 1, [None, pa.py_buffer(marks)], children=[entries]
    )


def list_array(marks: Ints, items: pa.Array, kind: pa.DataType) -> pa.Array:
    """An Arrow array with a list per message, from marks into items."""
    return pa.Array.from_buffers(
        kind, len(marks) - 1, [None, pa.py_buffer(marks)], children=[items]
    )


def last_of_each(rows: npt.NDArray[Any], names: pa.Array) -> npt.NDArray[np.bool_] | None:
    """A mask that keeps the last of equal names within a row; None if no row repeats a name. `rows`
    is ascending.
    """
    codes = pc.dictionary_encode(names)
    width = max(len(codes.dictionary), 1)
    marks = rows.astype(np.int64) * width + codes.indices.to_numpy()
    if (
        np.diff(marks) > 0
    ).all():  # The common case, because messages usually have their headers in the same order.
        return None
    _, newest = np.unique(marks[::-1], return_index=True)
    if len(newest) == len(marks):
        return None
    keeps = np.zeros(len(marks), np.bool_)
    keeps[len(marks) - 1 - newest] = True
    return keeps


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
    """The rows of one or more spans. All columns raise CorruptBatch if their
    offsets are invalid.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.counts = np.array([span.rows for span in spans], np.int64)
        self.rows = int(self.counts.sum())

    def each(
        self, value: Callable[[Span], int], kind: type[np.generic] = np.int64
    ) -> npt.NDArray[Any]:
        """Expand one number per span to one number per row."""
        found = np.array([value(span) for span in self.spans], kind)
        return found.repeat(self.counts)

    def has(self, column: str) -> bool:
        """Whether any of the batches has a column, by its name in `Layout`."""
        return any(getattr(span.layout, column) >= 0 for span in self.spans)

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """Each row's position in its stored batch."""
        shifts = np.array([span.first for span in self.spans], np.int64) - (
            np.cumsum(self.counts) - self.counts
        )
        return np.arange(self.rows) + shifts.repeat(self.counts)

    def create_deltas(self) -> npt.NDArray[Any]:
        """Offsets to add to the batches' create times; 0 if absent."""
        return np.concatenate(
            [_numbers(span, span.layout.create_delta, "<u4", 0) for span in self.spans]
        )

    def lps(self) -> npt.NDArray[np.int32]:
        """The logical partitions; -1 if absent."""
        return np.concatenate(
            [
                _numbers(span, span.layout.logical_partition, "<u2", -1).astype(np.int32)
                for span in self.spans
            ]
        )

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
            _part(s.region, s.layout.tag, s.layout.tag_data, int(each[0]), int(each[-1]))
            for s, each in zip(self.spans, marks, strict=True)
        ]
        return Tags(stacked(marks), join(names))

    @cached_property
    def tag_hashes(self) -> npt.NDArray[np.uint64]:
        """The stored hashes of the tags, one for each of `tags.names`."""
        marks = [_list_marks(span, span.layout.tag_list) for span in self.spans]
        return np.concatenate(
            [
                _hashes(s, int(each[0]), int(each[-1]))
                for s, each in zip(self.spans, marks, strict=True)
            ]
        )

    def headers(self) -> Headers:
        """The rows' headers; empty for a batch without the column."""
        ranges = [_list_marks(span, span.layout.header_list) for span in self.spans]
        both = [
            (s.region, s.layout, int(r[0]), int(r[-1]))
            for s, r in zip(self.spans, ranges, strict=True)
        ]
        names = [
            _part(region, at.header_name, at.header_name_data, first, end)
            for region, at, first, end in both
        ]
        values = [
            _part(region, at.header_value, at.header_value_data, first, end)
            for region, at, first, end in both
        ]
        return Headers(stacked(ranges), join(names), join(values))


def _numbers(span: Span, at: int, code: str, missing: int) -> npt.NDArray[Any]:
    if at < 0:
        return np.full(span.rows, missing, np.int32)
    return np.frombuffer(span.region, code, span.header.count, at)[span.first : span.end]


def _stored_ids(span: Span) -> npt.NDArray[np.uint8]:
    at = span.layout.message_id
    if at < 0:
        return np.zeros((span.rows, 16), np.uint8)
    return np.frombuffer(span.region, np.uint8, 16 * span.rows, at + 16 * span.first).reshape(
        -1, 16
    )


def _part(region: bytes | memoryview, marks_at: int, data_at: int, first: int, end: int) -> Strings:
    """Items `first` to `end` - 1 of an offsets-and-bytes column; none if it is absent, and then
    `first` and `end` are 0.
    """
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
        raise CorruptBatch(
            f"bodies of compression {header.compression}, which this release does not know"
        ) from None
    return Strings(marks, decompress(kind, bytes(stored), bodies_bytes(span)))


def _list_marks(span: Span, at: int) -> Ints:
    """Where the lists of a span's rows begin, and the last one ends."""
    if at < 0:
        return _ZEROS[: span.rows + 1]
    marks = np.frombuffer(span.region, "<i4", span.rows + 1, at + 4 * span.first)
    if not 0 <= marks[0] <= marks[-1] <= last_offset(span.region, at, span.header.count):
        raise CorruptBatch(
            f"the lists at byte {at} of a region do not rise, although its checksum holds: "
            "the program that wrote it has a bug"
        )
    return marks


def _hashes(span: Span, first: int, end: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(span.region, "<u8", end - first, max(span.layout.tag_hash, 0) + 8 * first)
