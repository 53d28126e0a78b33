"""Cutting delayed batches keeps each message's columns, for every set of columns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_support import START, delayed

from qmq.delay.batches import Pieces, run_id
from qmq.errors import CorruptBatch
from qmq.model import SCHEDULE_ID, MessageId
from qmq.wire.batch import BatchView, Envelope
from qmq.wire.batch_columns import Compression

UNPLACED = Envelope(0, 0, 0, -1, 0, 0, 0, 0)
TEXT = st.text(max_size=4)


@st.composite
def batches(draw: st.DrawFn) -> tuple[bytes, int]:
    """(region, messages)."""
    count = draw(st.integers(1, 7))

    def column(item: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(item, min_size=count, max_size=count))

    region, _ = delayed(
        draw(st.lists(st.integers(0, 1 << 42), min_size=count, max_size=count)),
        number=draw(st.integers(0, (1 << 48) - 1)),
        flags=draw(st.integers(0, 15)),
        subject=draw(st.text("abc", min_size=1, max_size=12)),
        bodies=draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count)),
        compression=draw(st.sampled_from(list(Compression))),
        keys=column(st.binary(max_size=9)),
        tags=column(st.lists(TEXT, max_size=3).map(tuple)),
        headers=column(st.dictionaries(TEXT, st.binary(max_size=9), max_size=3)),
        create_deltas=column(st.integers(0, 1000)),
        message_ids=column(st.binary(min_size=16, max_size=16)),
        logical_partitions=column(st.integers(0, 65_535)),
    )
    return region, count


def messages(region: bytes) -> list[tuple[Any, ...]]:
    """Each message with all its attributes."""
    view = BatchView(UNPLACED, region)
    count, nothing = view.count, [None] * view.count
    ids = view.message_ids() or [
        MessageId(view.header.producer_id, view.header.batch_sequence, place).to_bytes()
        for place in range(count)
    ]
    columns = (
        view.bodies(),
        view.keys() or nothing,
        view.tags() or nothing,
        view.headers() or nothing,
        view.create_times_ms(),
        ids,
        view.logical_partitions() or nothing,
        view.due_times_ms() or nothing,
    )
    head = (
        view.subject,
        view.header.producer_id,
        view.header.batch_sequence,
        view.header.flags,
        view.header.partition,
    )
    return [(*head, *each) for each in zip(*columns, strict=True)]


@given(batches(), st.data())
def test_cut_in_whatever_way_each_message_keeps_all_it_has(
    batch: tuple[bytes, int], data: st.DataObject
) -> None:
    region, count = batch
    whole = messages(region)
    order = data.draw(st.permutations(range(count)))
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=3))})
    pieces = Pieces(region)
    for first, end in pairwise(cuts):
        places = order[first:end]
        piece = pieces.piece(places)
        assert messages(piece) == [whole[place] for place in places]
        assert pieces.one(places[0]) == pieces.piece(places[:1])


@given(batches())
def test_cut_into_one_piece_tag_hashes_and_layout_are_the_producers(
    batch: tuple[bytes, int],
) -> None:
    region, count = batch
    before, after = (
        BatchView(UNPLACED, each) for each in (region, Pieces(region).piece(range(count)))
    )
    assert after.tag_hashes() == before.tag_hashes()
    assert after.header.compression == 0
    assert len(after.region) % 8 == 0


@given(batches(), st.data())
def test_a_moved_message_differs_only_in_its_due_time(
    batch: tuple[bytes, int], data: st.DataObject
) -> None:
    region, count = batch
    place = data.draw(st.integers(0, count - 1))
    assert messages(Pieces(region).moved(place, 77)) == [(*messages(region)[place][:-1], 77)]


@given(batches(), st.data())
def test_a_run_differs_in_id_due_time_and_one_header(
    batch: tuple[bytes, int], data: st.DataObject
) -> None:
    region, count = batch
    place = data.draw(st.integers(0, count - 1))
    first = bytes(range(16))
    before = messages(region)[place]
    after = messages(Pieces(region).next_run(place, first, START))[0]
    headers = dict(before[8] or {}) | {SCHEDULE_ID: first.hex().encode()}
    assert after == (*before[:8], headers, before[9], run_id(first, START), before[11], START)
    again = Pieces(Pieces(region).next_run(place, first, START)).next_run(0, first, START + 1)
    assert messages(again)[0][8] == headers


def test_a_run_is_named_by_the_first_id_and_its_time() -> None:
    assert run_id(bytes(16), 0) != run_id(bytes(16), 1) != run_id(bytes([1]) * 16, 1)
    assert run_id(bytes(16), 1).hex() == "8d7ec495a76038357ec1ff0d6f5f3ba8"


def test_messages_too_large_for_one_batch_become_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.delay.batches.REGION_BYTES_MAX", 400)
    region, _ = delayed([START] * 9, bodies=[bytes([place]) * 50 for place in range(9)])
    found = Pieces(region).cut(range(9))
    assert len(found) > 1
    assert all(len(piece) <= 400 for _, piece in found)
    assert [each for _, piece in found for each in messages(piece)] == messages(region)
    assert [place for places, _ in found for place in places] == list(range(9))


def test_bodies_that_cannot_be_decompressed_are_reported_as_corrupt() -> None:
    region, _ = delayed([START], bodies=[b"x" * 100], compression=Compression.ZSTD)
    with pytest.raises(CorruptBatch):
        Pieces(region[:-24] + bytes(24))
