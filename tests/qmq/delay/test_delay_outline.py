"""Outlines: single messages out of a batch that was checked, without reading it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_support import START, delayed

from qmq.delay.batches import (
    OUTLINED_BYTES_MIN,
    STRETCH_MAX,
    BatchOutline,
    SchedulePlace,
    StoredBatch,
    is_outlined,
)
from qmq.errors import CorruptBatch
from qmq.wire.batch import Envelope
from qmq.wire.batch_columns import Compression

COLUMNS: dict[str, Any] = {
    "keys": st.binary(max_size=9),
    "tags": st.lists(st.text(max_size=5), max_size=3).map(tuple),
    "headers": st.dictionaries(st.text(max_size=5), st.binary(max_size=9), max_size=3),
    "create_deltas": st.integers(0, 2**32 - 1),
    "message_ids": st.binary(min_size=16, max_size=16),
    "logical_partitions": st.integers(0, 65_535),
}


def stored(region: bytes, crc: int, first: int = 0) -> StoredBatch:
    return StoredBatch(Envelope(0, 64 + len(region), crc, first, 0, 1, START + 5, 0), region)


def reader(region: bytes) -> Any:
    return lambda at, size: region[at : at + size]


@given(st.data())
def test_a_message_by_outline_is_the_message_of_the_batch(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    every = lambda items: st.lists(items, min_size=count, max_size=count)  # noqa: E731
    columns = {
        name: data.draw(every(items))
        for name, items in COLUMNS.items()
        if data.draw(st.booleans(), name)
    }
    due_times_ms = data.draw(every(st.integers(0, 2**62)))
    region, crc = delayed(
        due_times_ms,
        number=2**40 + 3,
        flags=2,
        bodies=data.draw(every(st.binary(max_size=20))),
        **columns,
    )
    batch = stored(region, crc, 10)
    outline = BatchOutline(batch.view)
    for place in range(count):
        at = SchedulePlace(7, 10 + place)
        assert outline.message(reader(region), place, due_times_ms[place], at) == batch.message(
            place, at
        )


@pytest.mark.parametrize("place", [0, 1, 1_500, 2_999])
def test_due_time_and_body_are_found_in_one_read_or_in_two(place: int) -> None:
    due_times_ms = [START + each for each in range(3_000)]
    region, crc = delayed(due_times_ms)
    assert 8 * len(due_times_ms) > STRETCH_MAX
    batch = stored(region, crc)
    sizes: list[int] = []

    def read(at: int, size: int) -> bytes:
        sizes.append(size)
        return region[at : at + size]

    found = BatchOutline(batch.view).message(
        read, place, due_times_ms[place], SchedulePlace(7, place)
    )
    assert found == batch.message(place, SchedulePlace(7, place))
    assert len(sizes) <= 3
    assert max(sizes) <= STRETCH_MAX


def test_another_message_than_the_one_that_is_meant_is_not_given() -> None:
    region, crc = delayed([START, START + 1])
    outline = BatchOutline(stored(region, crc, 10).view)
    read = reader(region)
    assert outline.message(read, 1, START + 1, SchedulePlace(7, 11)) is not None
    assert outline.message(read, 1, START, SchedulePlace(7, 11)) is None  # due at another time
    assert outline.message(read, 1, START + 1, SchedulePlace(7, 12)) is None  # another ordinal
    assert outline.message(read, 2, START, SchedulePlace(7, 12)) is None  # not in this batch


def test_offsets_that_the_disk_changed_later_are_damage() -> None:
    region, crc = delayed([START, START + 1])
    batch = stored(region, crc)
    outline = BatchOutline(batch.view)
    data = bytearray(region)
    data[batch.view.layout.body + 4 * 2 + 2] ^= 1  # the end of the second body: 64 KiB further
    assert outline.message(reader(bytes(data)), 0, START, SchedulePlace(7, 0)) == batch.message(
        0, SchedulePlace(7, 0)
    )
    with pytest.raises(CorruptBatch, match="outside the batch"):
        outline.message(reader(bytes(data)), 1, START + 1, SchedulePlace(7, 1))


def test_small_and_compressed_batches_have_no_outline() -> None:
    large = [b"x" * OUTLINED_BYTES_MIN]
    assert is_outlined(stored(*delayed([START], bodies=large)).view)
    assert not is_outlined(
        stored(*delayed([START], bodies=[b"x" * (OUTLINED_BYTES_MIN - 200)])).view
    )
    noise = [bytes(range(256)) * 100]
    assert not is_outlined(
        stored(*delayed([START], bodies=noise, compression=Compression.ZSTD)).view
    )
