"""Converts stored batches to Arrow record batches of the wanted rows. Pure, and without loops over
messages.

A `Projector` belongs to one task. It has a *maker* for each column of its schema: a function of a
`JoinedBatches`. Other columns are not made:

    stored batches ─▶ spans ─▶ chunks ─▶ wanted rows ─▶ makers
    ─▶ record batches, shaped (joined_batches.py)

Bodies, keys, tags and headers use the log's own buffers. Columns derived from a batch's header are
computed as vectors: sequence and times by addition, message ids by tables of hexadecimal digits.
Columns that are constant within a piece (subject, partition, broker group, route version) are
slices of one array.

The log skips whole batches that cannot match. The rows of a chunk are selected exactly, with vector
operations:

* A tag is looked up by its hash and then compared as a string, because two tags may have the same
  hash.
* Keys compare as unsigned bytes. A message without a key matches no set of keys and no range.
* The logical partition is taken from the batch. Rows of a batch without that column do not match.

The types are exactly those that Spark requires. Spark compares the first record batch of a task
with its own schema: names, order, types, names of inner fields, and nullability. With a large
string, a dictionary, or a field that is wrongly nullable, the task fails. Spark does not check
later batches, and would read another type as garbage, so all batches are built with one schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from qmq_ordering.routes import LpRange

from qmq.columns.joined_batches import (
    JoinedBatches,
    Span,
    chunks,
    hex_of,
    hex_texts,
    last_of_each,
    list_array,
    map_array,
    marks_of,
    place_digits,
    shaped,
    spans,
    texts,
)
from qmq.columns.model import ALL, QueueKey, QueuePiece, ReadSelection, SourceBatch
from qmq.errors import InvalidArgument
from qmq.wire.batch_columns import BatchFlag, tag_hash

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
TAGS: Final = pa.list_(pa.field("element", pa.string(), nullable=True))
HEADERS: Final = pa.map_(
    pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary(), nullable=True)
)

TYPES: Final[dict[str, pa.DataType]] = {
    "subject": pa.string(),
    "partition": pa.int32(),
    "broker_group": pa.string(),
    "sequence": pa.int64(),
    "route_version": pa.int64(),
    "key": pa.binary(),
    "body": pa.binary(),
    "tags": TAGS,
    "headers": HEADERS,
    "message_id": pa.string(),
    "create_time": TIMESTAMP,
    "append_time": TIMESTAMP,
    "epoch": pa.int64(),
    "producer_id": pa.string(),
    "batch_sequence": pa.int64(),
    "place": pa.int32(),
    "logical_partition": pa.int32(),
    "is_bent": pa.bool_(),
    "entry": pa.int64(),
}
"""The types of all columns."""

ColumnNames = Mapping[str, bool] | Sequence[str]
"""The names of columns in their order; as a mapping, with whether the column may be null (default:
it may).
"""


def arrow_schema(columns: ColumnNames) -> pa.Schema:
    """The schema of record batches with these columns, in this order. Raises InvalidArgument for an
    unknown column.
    """
    nullable: Mapping[str, bool] = (
        columns if isinstance(columns, Mapping) else dict.fromkeys(columns, True)
    )
    unknown = [name for name in nullable if name not in TYPES]
    if unknown:
        raise InvalidArgument(f"the log has no column {unknown[0]!r}; columns: {', '.join(TYPES)}")
    return pa.schema(
        [pa.field(name, TYPES[name], nullable=may_be) for name, may_be in nullable.items()]
    )


Mask = npt.NDArray[np.bool_]


def wanted(chunk: JoinedBatches, selection: ReadSelection, lps: Sequence[LpRange]) -> Mask | None:
    """A mask of the selected rows; None if all are selected. `lps` empty: any logical partition.
    Raises CorruptBatch.
    """
    masks: list[Mask] = []
    if selection.has_keys:
        masks.append(_by_key(chunk, selection))
    if lps:
        masks.append(_by_lp(chunk, lps))
    if selection.tags_any:
        masks.append(np.logical_or.reduce([_with_tag(chunk, tag) for tag in selection.tags_any]))
    masks += [_with_tag(chunk, tag) for tag in selection.tags_all]
    if not masks:
        return None
    mask: Mask = np.logical_and.reduce(masks)
    return None if mask.all() else mask


def narrowed(chunk: JoinedBatches, mask: Mask) -> tuple[list[Span], Mask]:
    """The spans cut to their first and last selected rows, and the mask of the rest. Spans without
    selected rows are dropped.
    """
    spans: list[Span] = []
    parts: list[Mask] = []
    for span, part in zip(chunk.spans, np.split(mask, np.cumsum(chunk.counts)[:-1]), strict=True):
        found = np.flatnonzero(part)
        if len(found):
            first, end = int(found[0]), int(found[-1]) + 1
            spans.append(span._replace(first=span.first + first, end=span.first + end))
            parts.append(part[first:end])
    return spans, np.concatenate(parts) if parts else mask[:0]


def _by_key(chunk: JoinedBatches, selection: ReadSelection) -> Mask:
    keys = chunk.keys.array(pa.binary())
    masks: list[Mask] = [np.diff(chunk.keys.marks) > 0]
    if selection.keys:
        masks.append(_mask(pc.is_in(keys, pa.array(selection.keys, pa.binary()))))
    if selection.key_from is not None:
        masks.append(_mask(pc.greater_equal(keys, pa.scalar(selection.key_from, pa.binary()))))
    if selection.key_until is not None:
        masks.append(_mask(pc.less(keys, pa.scalar(selection.key_until, pa.binary()))))
    found: Mask = np.logical_and.reduce(masks)
    return found


def _by_lp(chunk: JoinedBatches, lps: Sequence[LpRange]) -> Mask:
    found = chunk.lps()
    mask: Mask = np.logical_or.reduce([(found >= each.first) & (found < each.end) for each in lps])
    return mask


def _with_tag(chunk: JoinedBatches, tag: str) -> Mask:
    (marks, names), hashes = chunk.tags, chunk.tag_hashes
    mask = np.zeros(len(marks) - 1, np.bool_)
    near = np.flatnonzero(hashes == np.uint64(tag_hash(tag)))
    if len(near):
        is_it = pc.equal(
            names.array(pa.binary()).take(pa.array(near)), pa.scalar(tag.encode(), pa.binary())
        )
        mask[np.searchsorted(marks, near[_mask(is_it)], side="right") - 1] = True
    return mask


def _mask(found: pa.Array) -> Mask:
    mask: Mask = found.to_numpy(zero_copy_only=False)
    return mask


Maker = Callable[[JoinedBatches], pa.Array]

_BENT: Final = int(BatchFlag.BENT)
_BATCH_SEQUENCE_MASK: Final = (1 << 48) - 1


class Projector:
    """Makes record batches with these columns, in their order.

    `routes` maps partitions, as (subject, number), to the route version that opened them. For a
    missing partition, route_version is null.

    Raises:
        InvalidArgument: a column is unknown.
    """

    def __init__(
        self,
        columns: ColumnNames,
        *,
        routes: Mapping[tuple[str, int], int] | None = None,
        selection: ReadSelection = ALL,
    ) -> None:
        self.schema = arrow_schema(columns)
        self._versions = routes or {}
        self._selection = selection
        self._constants: dict[tuple[str, object], pa.Array] = {}

    def convert(
        self, batches: Iterable[SourceBatch], piece: QueuePiece
    ) -> Iterator[pa.RecordBatch]:
        """Yields the selected rows of a piece of the log, in order. Raises CorruptBatch, and what
        `batches` raises.
        """
        makers = [self._maker(name, piece.queue) for name in self.schema.names]
        return shaped(self._record_batches(batches, piece, makers))

    def _record_batches(
        self, batches: Iterable[SourceBatch], piece: QueuePiece, makers: list[Maker]
    ) -> Iterator[pa.RecordBatch]:
        selection = self._selection
        for hand in chunks(spans(batches, piece, with_directed=selection.with_directed)):
            chunk = JoinedBatches(hand)
            mask = wanted(chunk, selection, piece.lps)
            if mask is not None:
                hand, mask = narrowed(chunk, mask)
                if not hand:
                    continue
                chunk = JoinedBatches(hand)
            arrays = [make(chunk) for make in makers]
            batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
            yield batch if mask is None or mask.all() else batch.filter(pa.array(mask))

    def _maker(self, name: str, queue: QueueKey) -> Maker:
        match name:
            case "subject":
                return self._constant(name, queue.subject)
            case "partition":
                return self._constant(name, queue.partition)
            case "broker_group":
                return self._constant(name, queue.broker_group)
            case "route_version":
                return self._constant(name, self._versions.get((queue.subject, queue.partition)))
            case "tags":
                none = self._constant(name, ())
                return lambda chunk: _tags(chunk) if chunk.has("tag_list") else none(chunk)
            case "headers":
                none = self._constant(name, ())
                return lambda chunk: _headers(chunk) if chunk.has("header_list") else none(chunk)
            case _:
                return _MAKERS[name]

    def _constant(self, name: str, value: object) -> Maker:
        """A constant column: slices of one array that is as long as the longest record batch."""

        def make(chunk: JoinedBatches) -> pa.Array:
            found = self._constants.get((name, value))
            if found is None or len(found) < chunk.rows:
                rows = 1 << (chunk.rows - 1).bit_length()
                found = self._constants[name, value] = pa.repeat(
                    pa.scalar(value, TYPES[name]), rows
                )
            return found.slice(0, chunk.rows)

        return make


def _made(kind: pa.DataType, numbers: npt.NDArray[Any]) -> pa.Array:
    """An Arrow array over a vector's memory, without a copy."""
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _sequence(chunk: JoinedBatches) -> pa.Array:
    return _made(pa.int64(), chunk.each(lambda span: span.envelope.base_sequence) + chunk.places)


def _key(chunk: JoinedBatches) -> pa.Array:
    keys = chunk.keys
    valid = keys.marks[1:] > keys.marks[:-1]
    return keys.array(pa.binary(), None if valid.all() else valid)


def _body(chunk: JoinedBatches) -> pa.Array:
    return chunk.bodies().array(pa.binary())


def _tags(chunk: JoinedBatches) -> pa.Array:
    marks, names = chunk.tags
    return list_array(marks, texts(names), TYPES["tags"])


def _headers(chunk: JoinedBatches) -> pa.Array:
    """If a message has a header twice, the last one counts: consumers see it that way, and Spark
    forbids duplicate keys in a map.
    """
    marks, names, values = chunk.headers()
    lengths = np.diff(marks)
    rows = np.arange(chunk.rows).repeat(lengths)
    keys, items = texts(names), values.array(pa.binary())
    keeps = last_of_each(rows, keys)
    if keeps is not None:
        kept = pa.array(keeps)
        keys, items = keys.filter(kept), items.filter(kept)
        marks = marks_of(np.bincount(rows[keeps], minlength=chunk.rows))
    return map_array(marks, keys, items, TYPES["headers"])


def _message_id(chunk: JoinedBatches) -> pa.Array:
    """The stored id, or one made of producer id (16 digits),
    batch sequence (12) and position (4).
    """
    heads = "".join(
        [
            f"{s.header.producer_id:016x}{s.header.batch_sequence & _BATCH_SEQUENCE_MASK:012x}0000"
            for s in chunk.spans
        ]
    )
    digits = np.frombuffer(heads.encode(), np.uint8).reshape(-1, 32).repeat(chunk.counts, axis=0)
    digits[:, 28:] = place_digits(chunk.places)
    if chunk.has("message_id"):
        stored = chunk.each(lambda span: span.layout.message_id >= 0, np.bool_)
        digits[stored] = hex_of(chunk.stored_ids()[stored])
    return hex_texts(digits)


def _create_time(chunk: JoinedBatches) -> pa.Array:
    times = chunk.each(lambda span: span.header.create_time_ms)
    if chunk.has("create_delta"):
        times += chunk.create_deltas()
    return _made(TYPES["create_time"], times * 1000)


def _append_time(chunk: JoinedBatches) -> pa.Array:
    return _made(TYPES["append_time"], chunk.each(lambda span: span.envelope.append_time_ms) * 1000)


def _producer_id(chunk: JoinedBatches) -> pa.Array:
    digits = "".join([f"{span.header.producer_id:016x}" for span in chunk.spans])
    return hex_texts(
        np.frombuffer(digits.encode(), np.uint8).reshape(-1, 16).repeat(chunk.counts, axis=0)
    )


def _batch_sequence(chunk: JoinedBatches) -> pa.Array:
    return _made(
        pa.int64(), chunk.each(lambda span: span.header.batch_sequence & _BATCH_SEQUENCE_MASK)
    )


def _logical_partition(chunk: JoinedBatches) -> pa.Array:
    if not chunk.has("logical_partition"):
        return pa.nulls(chunk.rows, pa.int32())
    lps = chunk.lps()
    return pa.array(lps, pa.int32(), mask=lps < 0)


def _of_span(value: Callable[[Span], int]) -> Maker:
    return lambda chunk: _made(pa.int64(), chunk.each(value))


_MAKERS: Final[dict[str, Maker]] = {
    "sequence": _sequence,
    "key": _key,
    "body": _body,
    "message_id": _message_id,
    "create_time": _create_time,
    "append_time": _append_time,
    "epoch": _of_span(lambda span: span.envelope.epoch),
    "producer_id": _producer_id,
    "batch_sequence": _batch_sequence,
    "place": lambda chunk: _made(pa.int32(), chunk.places.astype(np.int32)),
    "logical_partition": _logical_partition,
    "is_bent": lambda chunk: pa.array(
        chunk.each(lambda span: span.header.flags & _BENT != 0, np.bool_)
    ),
    "entry": _of_span(lambda span: span.envelope.index),
}
