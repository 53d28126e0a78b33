"""The slow twin of projector.py: makes rows of stored batches by a loop over messages, and makes
batches for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from qmq.columns.model import ALL, QueueKey, QueuePiece, ReadSelection, SourceBatch
from qmq.model import MessageId
from qmq.wire.batch import BatchView, Envelope, Kind, encode, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Columns, Compression

QUEUE = QueueKey("orders", 3, "g1")
NAMES = (
    "subject",
    "partition",
    "broker_group",
    "sequence",
    "route_version",
    "key",
    "body",
    "tags",
    "headers",
    "message_id",
    "create_time",
    "append_time",
    "epoch",
    "producer_id",
    "batch_sequence",
    "place",
    "logical_partition",
    "is_bent",
    "entry",
)


def stored(
    columns: Columns,
    base: int = 0,
    *,
    flags: int = 0,
    compression: Compression = Compression.NONE,
    producer_id: int = 2**63 + 5,
    batch_sequence: int = 77,
    create_time_ms: int = 1_700_000_000_000,
    epoch: int = 3,
    entry: int = 9,
    append_time_ms: int = 1_700_000_000_123,
) -> SourceBatch:
    """A row as a log returns it."""
    sent, region = encode(
        b"orders",
        columns,
        producer_id=producer_id,
        batch_sequence=batch_sequence,
        create_time_ms=create_time_ms,
        flags=flags,
        partition=3,
        compression=compression,
    )
    total, crc = sent_sizes(sent)
    return SourceBatch(
        Envelope(Kind.DATA, total, crc, base, epoch, entry, append_time_ms, 0), region
    )


def whole(end: int = 2**62) -> QueuePiece:
    return QueuePiece(QUEUE, 0, end)


def expected(
    batches: Iterable[SourceBatch],
    piece: QueuePiece,
    selection: ReadSelection = ALL,
    version: int | None = None,
) -> list[dict[str, Any]]:
    """The expected rows."""
    return [
        row
        for batch in batches
        for row in _rows(batch, piece.queue, version)
        if _is_wanted(row, piece, selection)
    ]


def _rows(batch: SourceBatch, queue: QueueKey, version: int | None) -> Iterator[dict[str, Any]]:
    view = BatchView(batch.envelope, bytes(batch.region))
    header, envelope = view.header, batch.envelope
    keys, tags, headers, ids, lps = (
        view.keys(),
        view.tags(),
        view.headers(),
        view.message_ids(),
        view.logical_partitions(),
    )
    for place, (body, created) in enumerate(
        zip(view.bodies(), view.create_times_ms(), strict=True)
    ):
        yield {
            "subject": queue.subject,
            "partition": queue.partition,
            "broker_group": queue.broker_group,
            "sequence": envelope.base_sequence + place,
            "route_version": version,
            "key": (keys[place] or None) if keys else None,
            "body": body,
            "tags": list(tags[place]) if tags else [],
            "headers": headers[place] if headers else {},
            "message_id": ids[place].hex()
            if ids
            else str(MessageId(header.producer_id, header.batch_sequence, place)),
            "create_time": created * 1000,
            "append_time": envelope.append_time_ms * 1000,
            "epoch": envelope.epoch,
            "producer_id": f"{header.producer_id:016x}",
            "batch_sequence": header.batch_sequence,
            "place": place,
            "logical_partition": lps[place] if lps else None,
            "is_bent": bool(header.flags & BatchFlag.BENT),
            "entry": envelope.index,
            "is_directed": bool(header.flags & BatchFlag.DIRECTED),
        }


def _is_wanted(row: Mapping[str, Any], piece: QueuePiece, selection: ReadSelection) -> bool:
    key, lp = row["key"], row["logical_partition"]
    return (
        piece.first <= row["sequence"] < piece.end
        and (selection.with_directed or not row["is_directed"])
        and (not selection.tags_any or any(tag in row["tags"] for tag in selection.tags_any))
        and all(tag in row["tags"] for tag in selection.tags_all)
        and (not selection.has_keys or key is not None)
        and (not selection.keys or key in selection.keys)
        and (selection.key_from is None or key >= selection.key_from)
        and (selection.key_until is None or key < selection.key_until)
        and (
            not piece.lps
            or (lp is not None and any(each.first <= lp < each.end for each in piece.lps))
        )
    )


def rows_of(found: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Record batches as rows; times in microseconds, headers as a dict (each name once)."""
    rows: list[dict[str, Any]] = []
    for batch in found:
        batch.validate(full=True)
        columns = {name: _plain(batch.column(name)) for name in batch.schema.names}
        rows += [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
    return rows


def _plain(column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64()).to_pylist()
    if not pa.types.is_map(column.type):
        return column.to_pylist()
    pairs = column.to_pylist()
    assert all(len(each) == len(dict(each)) for each in pairs)
    return [dict(each) for each in pairs]
