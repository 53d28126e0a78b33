"""Selections are exact even where the log's summaries are not. (test_columns.py compares random
ones with a loop.)
"""

from __future__ import annotations

import struct

from row_twin import expected, rows_of, stored, whole

from qmq.columns.model import ALL, QueuePiece, ReadSelection, SourceBatch
from qmq.columns.projector import Projector
from qmq.wire.batch_columns import Columns, Layout, parse_header, tag_hash


def sequences(
    batches: list[SourceBatch], selection: ReadSelection = ALL, piece: QueuePiece | None = None
) -> list[int]:
    found = Projector(["sequence"], selection=selection).convert(iter(batches), piece or whole())
    return [row["sequence"] for row in rows_of(found)]


def test_a_tag_with_the_hash_of_another_is_not_taken_for_it() -> None:
    batch = stored(Columns([b"0", b"1", b"2"], tags=[("AA",), ("UA",), ("AA", "UA")]))
    region = bytearray(batch.region)
    at = Layout.walk(batch.region, parse_header(batch.region)).tag_hash
    struct.pack_into("<4Q", region, at, *[tag_hash("UA")] * 4)
    colliding = SourceBatch(batch.envelope, bytes(region))
    assert sequences([colliding], ReadSelection(tags_any=("UA",))) == [1, 2]
    assert sequences([colliding], ReadSelection(tags_all=("UA",))) == [1, 2]
    assert sequences([colliding], ReadSelection(tags_any=("AA",))) == []


def test_keys_compare_as_unsigned_bytes() -> None:
    keys = [b"", b"\x00", b"a", b"a\x00", b"a\xff", b"b", b"\x7f", b"\x80", b"\xff"]
    batch = stored(Columns([b""] * len(keys), keys))
    for low in keys:
        for high in keys:
            wanted = [i for i, key in enumerate(keys) if key and low <= key < high]
            assert sequences([batch], ReadSelection(key_from=low, key_until=high)) == wanted
    assert sequences([batch], ReadSelection(key_from=b"a\xff")) == [4, 5, 6, 7, 8]
    assert sequences([batch], ReadSelection(key_until=b"a\x00")) == [1, 2]


def test_few_rows_of_many_large_batches_are_cut_out_before_anything_else_is_made() -> None:
    keys = [[b"%d" % (n % 997) for n in range(base, base + 1000)] for base in range(0, 8000, 1000)]
    batches = [
        stored(Columns([bytes(1000)] * 1000, each), 1000 * number)
        for number, each in enumerate(keys)
    ]
    selection = ReadSelection(keys=(b"500",))
    found = list(
        Projector(["sequence", "body"], selection=selection).convert(iter(batches), whole())
    )
    assert rows_of(found) == [
        {name: row[name] for name in ("sequence", "body")}
        for row in expected(batches, whole(), selection)
    ]
    assert len(found) == 1
