"""Combines stored batches into chunks, so that Spark gets record batches of an efficient size. Pure.

A stored batch may hold a single message, and a record batch costs Spark as much as hundreds of messages do, so several become one:

    stored batches ──spans──▶ the rows of each that are wanted ──chunks──▶ spans that become one record batch ──shaped──▶ what Spark gets

A chunk has at most 8,192 rows and 4 MiB, counted uncompressed. If a selection leaves few rows of several chunks, they are combined once
more; the rows of one large batch are cut. So a record batch has at most 65,536 rows, and at most 32 MiB unless it has one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from qmq import limits
from qmq.columns.model import QueuePiece, SourceBatch
from qmq.errors import CorruptBatch
from qmq.wire.batch import Envelope, Kind
from qmq.wire.batch_columns import Layout, RegionHeader, parse_header

ROWS_WANTED: Final = 8192
BYTES_WANTED: Final = 4 * limits.MIB
"""Measured: from about 4,000 rows on, the fixed cost of a record batch is negligible; beyond a few MiB, only memory use grows."""
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


def spans(batches: Iterable[SourceBatch], piece: QueuePiece, *, with_directed: bool) -> Iterator[Span]:
    """The parts of the batches that lie within the piece and are visible to applications. Raises CorruptBatch."""
    for envelope, region in batches:
        if envelope.kind != Kind.DATA:
            continue
        header = parse_header(region)
        first = max(piece.first - envelope.base_sequence, 0)
        end = min(piece.end - envelope.base_sequence, header.count)
        if first < end and (with_directed or not header.is_directed):
            yield Span(envelope, region, header, Layout.walk(region, header), first, end)


def bodies_bytes(span: Span) -> int:
    """The uncompressed size of all bodies of the batch. Raises CorruptBatch if the size is impossible."""
    size = int(np.frombuffer(span.region, "<i4", 1, span.layout.body + 4 * span.header.count)[0])
    if not 0 <= size <= BODIES_BYTES_MAX:
        raise CorruptBatch(f"a batch claims an impossible size of its bodies: {size} bytes")
    return size


def chunks(found: Iterable[Span]) -> Iterator[list[Span]]:
    """Lists of spans; each list is within ROWS_WANTED and BYTES_WANTED, or has one span. Raises CorruptBatch."""
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
