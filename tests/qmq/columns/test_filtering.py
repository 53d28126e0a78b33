"""Selections are exact even where the log's summaries are not. (test_columns.py compares random
ones with a loop.)
"""

from __future__ import annotations

import struct

import pytest
from qmq_ordering.routes import LpRange
from row_twin import QUEUE, expected, rows_of, stored, whole

from qmq.columns.model import ALL, QueuePiece, ReadSelection, SourceBatch
from qmq.columns.projector import Projector
from qmq.wire.batch_columns import BatchFlag, Columns, Layout, parse_header, tag_hash


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


def test_any_tag_and_all_tags() -> None:
    batches = [
        stored(Columns([b""] * 4, tags=[("a",), ("b", "a"), (), ("c", "b")])),
        stored(Columns([b""] * 2), 4),
    ]
    assert sequences(batches, ReadSelection(tags_any=("a", "c"))) == [0, 1, 3]
    assert sequences(batches, ReadSelection(tags_all=("a", "b"))) == [1]
    assert sequences(batches, ReadSelection(tags_any=("c",), tags_all=("b",))) == [3]
    assert sequences(batches, ReadSelection(tags_any=("nothing",))) == []


def test_keys_compare_as_unsigned_bytes() -> None:
    keys = [b"", b"\x00", b"a", b"a\x00", b"a\xff", b"b", b"\x7f", b"\x80", b"\xff"]
    batch = stored(Columns([b""] * len(keys), keys))
    for low in keys:
        for high in keys:
            wanted = [i for i, key in enumerate(keys) if key and low <= key < high]
            assert sequences([batch], ReadSelection(key_from=low, key_until=high)) == wanted
    assert sequences([batch], ReadSelection(key_from=b"a\xff")) == [4, 5, 6, 7, 8]
    assert sequences([batch], ReadSelection(key_until=b"a\x00")) == [1, 2]


@pytest.mark.parametrize(
    "selection",
    [ReadSelection(keys=(b"",)), ReadSelection(key_from=b""), ReadSelection(key_until=b"\xff")],
)
def test_a_message_without_a_key_is_in_no_selection_of_keys(selection: ReadSelection) -> None:
    assert (
        sequences([stored(Columns([b"", b""], [b"", b""])), stored(Columns([b""]), 2)], selection)
        == []
    )


def test_exact_keys_of_several_batches() -> None:
    batches = [
        stored(Columns([b""] * 3, [b"a", b"b", b"c"])),
        stored(Columns([b""]), 3),
        stored(Columns([b""] * 2, [b"bb", b"b"]), 4),
    ]
    assert sequences(batches, ReadSelection(keys=(b"b", b"c"))) == [1, 2, 5]


def test_logical_partitions_of_a_piece() -> None:
    batches = [
        stored(Columns([b""] * 4, logical_partitions=[0, 65_535, 40_000, 7])),
        stored(Columns([b""] * 2), 4),
    ]
    assert sequences(
        batches, ALL, QueuePiece(QUEUE, 0, 9, lps=(LpRange(5, 8), LpRange(40_000, 65_536)))
    ) == [1, 2, 3]
    assert sequences(batches, ALL, QueuePiece(QUEUE, 0, 9, lps=(LpRange(1, 5),))) == []


def test_directed_batches_are_left_out_unless_they_are_wanted() -> None:
    batches = [
        stored(Columns([b""])),
        stored(Columns([b""]), 1, flags=BatchFlag.DIRECTED),
        stored(Columns([b""]), 2),
    ]
    assert sequences(batches) == [0, 2]
    assert sequences(batches, ReadSelection(with_directed=True)) == [0, 1, 2]


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
