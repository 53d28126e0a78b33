"""Encodes a packet's rows as a batch from Arrow's buffers, column by column, without a loop over
rows. Pure.

docs/FORMAT.md has the layout. The parts of Arrow's buffers are concatenated once.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pyspark_qmq.sink import arrow_vectors
from pyspark_qmq.sink.options import Fields
from pyspark_qmq.sink.packets import Load, Packet
from pyspark_qmq.sink.row_identity import RowWriter
from qmq.wire.batch import sent_envelope
from qmq.wire.batch_columns import (
    REGION,
    BatchFlag,
    Column,
    Compression,
    compress,
    padded,
    tag_hash,
)

Buffer = bytes | memoryview

_PADS: Final = [bytes(size) for size in range(8)]


def encode(
    packet: Packet,
    writer: RowWriter,
    fields: Fields,
    *,
    now_ms: int,
    is_ordered: bool,
    compression: Compression = Compression.NONE,
) -> tuple[bytes, bytes]:
    """(envelope, region), ready to send. Raises MessageTooLarge, InvalidArgument (a library for
    compression is missing).
    """
    load, to = packet.load, packet.to
    columns = _Columns(load, fields)
    create_time_ms = columns.create_times(now_ms)
    columns.message_ids(writer)
    columns.keys()
    columns.logical_partitions()
    columns.tags()
    columns.headers()
    columns.due_times_ms()
    body_bytes, bodies = columns.bodies(
        compression if load.due_times_ms is None else Compression.NONE
    )
    subject = to.subject.encode()
    header = REGION.pack(
        writer.producer_id(to),
        packet.number,
        flags_of(packet, is_ordered=is_ordered),
        len(load.rows),
        create_time_ms,
        columns.present,
        to.partition,
        body_bytes,
        len(subject),
        compression if load.due_times_ms is None else Compression.NONE,
        0,
    )
    region = b"".join([header, padded(subject), *columns.buffers, *bodies])
    return sent_envelope(region), region


def flags_of(packet: Packet, *, is_ordered: bool) -> int:
    """The batch's flags. A partition must search its log for duplicates, because the writer may
    have been silent for hours.
    """
    if not is_ordered:
        return 0
    return int(BatchFlag.ORDERED) if packet.to.is_delayed else int(BatchFlag.AGAIN)


def _aligned(data: Any) -> list[Buffer]:
    """A buffer padded with zeros to the alignment."""
    view = memoryview(data)
    short = -view.nbytes & 7
    raw = view.cast("B") if view.nbytes else b""
    return [raw, _PADS[short]] if short else [raw]


class _Columns:
    """Collects the buffers of a region's columns, in their order."""

    def __init__(self, load: Load, fields: Fields) -> None:
        assert load.places is not None
        self._load = load
        self._fields = fields
        self._places: npt.NDArray[np.int64] = load.places
        self.present = 0
        self.buffers: list[Buffer] = []

    def _column(self, place: int) -> pa.Array:
        return arrow_vectors.taken(self._load.chunk.batch.column(place), self._places)

    def _add(self, column: Column, *buffers: Any) -> None:
        self.present |= column
        for each in buffers:
            self.buffers += _aligned(each)

    def create_times(self, now_ms: int) -> int:
        if self._fields.create_time < 0:
            return now_ms
        times = arrow_vectors.milliseconds(self._column(self._fields.create_time), up=False)
        earliest = int(times.min())
        deltas = (times - earliest).astype("<u4")
        if deltas.any():
            self._add(Column.CREATE_DELTA, deltas)
        return earliest

    def message_ids(self, writer: RowWriter) -> None:
        """The rows' own message ids, or the writer's."""
        ids = writer.message_ids(self._load.rows) if self._load.ids is None else self._load.ids
        self._add(Column.MESSAGE_ID, np.ascontiguousarray(ids))

    def keys(self) -> None:
        """The column of keys; omitted if no row has any."""
        if self._fields.key >= 0:
            marks, data = arrow_vectors.strings(self._column(self._fields.key))
            if marks[-1]:
                self._add(Column.KEY, marks, data)

    def logical_partitions(self) -> None:
        """Of an ordered subject's partition."""
        if self._load.lps is not None:
            self._add(Column.LOGICAL_PARTITION, np.ascontiguousarray(self._load.lps))

    def tags(self) -> None:
        """The column of tags; omitted if no row has any. Hashes are computed for distinct tags."""
        fields = self._fields
        if fields.tags >= 0:
            marks, (items,) = arrow_vectors.lists(self._column(fields.tags))
        elif fields.tag >= 0:
            array = self._column(fields.tag)
            marks = np.concatenate(([0], np.cumsum(arrow_vectors.valid(array)))).astype(np.int32)
            items = array.drop_null()
        else:
            return
        if marks[-1]:
            distinct = items.dictionary_encode()
            hashes = np.array([tag_hash(each) for each in distinct.dictionary.to_pylist()], "<u8")
            self._add(
                Column.TAGS,
                marks,
                hashes[distinct.indices.to_numpy()],
                *arrow_vectors.strings(items),
            )

    def headers(self) -> None:
        """The column of headers; omitted if no row has any."""
        if self._fields.headers >= 0:
            marks, (names, values) = arrow_vectors.lists(self._column(self._fields.headers))
            if marks[-1]:
                self._add(
                    Column.HEADERS,
                    marks,
                    *arrow_vectors.strings(names),
                    *arrow_vectors.strings(values),
                )

    def due_times_ms(self) -> None:
        if self._load.due_times_ms is not None:
            self._add(Column.DUE, np.ascontiguousarray(self._load.due_times_ms))

    def bodies(self, compression: Compression) -> tuple[int, list[Buffer]]:
        """(stored bytes, the buffers)."""
        marks, data = arrow_vectors.strings(self._column(self._fields.body))
        if compression:
            data = compress(compression, bytes(data))
        return len(data), [*_aligned(marks), *_aligned(data)]
