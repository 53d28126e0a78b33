"""Reading stored segments through the cache: what is here, what is fetched, a store that fails or
has other bytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from google_crc32c import value as crc32c
from support import eventually
from support.tiered_log import FaultyObjects, in_memory

from qmq.broker.reading.cold_reads import through_cold_reads
from qmq.errors import Overloaded
from qmq.log.reading import ColdRead, ObjectDamaged
from qmq.log.segment_index import SegmentIndex
from qmq.testing.virtual_clock import loop_time_of
from qmq.tiering.object_store import Objects
from qmq.tiering.stored_reads import DAMAGED_S, LOOK_AGAIN_S, StoredReads
from qmq.tiering.stored_segment import ObjectNames, SealedSegment

CHUNK = 1000
DATA = Random(1).randbytes(9_500)
NAMES = ObjectNames("g")
SEGMENT = SealedSegment(7_000, len(DATA))


def chunks(chunk_bytes: int = CHUNK) -> Iterator[bytes]:
    for at in range(0, len(DATA), chunk_bytes):
        yield DATA[at : at + chunk_bytes]


INDEX = SegmentIndex(SEGMENT.base, SEGMENT.size, CHUNK, tuple(map(crc32c, chunks())), DATA[:64])
FINE = SegmentIndex(SEGMENT.base, SEGMENT.size, 100, tuple(map(crc32c, chunks(100))), DATA[:64])


def filled(index: SegmentIndex = INDEX) -> Objects:
    objects = in_memory()
    objects.create(NAMES.owner, b"")
    for number, chunk in enumerate(chunks(index.chunk_bytes)):
        objects.create(NAMES.chunk(SEGMENT, number), chunk)
    return objects


@asynccontextmanager
async def reads(
    objects: Objects, folder: Path, cache_bytes: int = 100_000
) -> AsyncIterator[StoredReads]:
    found = StoredReads(objects, "g", folder / "cache", cache_bytes)
    try:
        yield found
    finally:
        found.close()


async def test_any_range_is_read_and_a_missing_one_is_an_error_at_once(tmp_path: Path) -> None:
    random = Random(2)
    async with reads(filled(), tmp_path) as stored:
        with pytest.raises(ColdRead):
            stored.read(INDEX, 0, 10)
        for _ in range(50):
            at, size = random.randrange(len(DATA)), random.randrange(1, 4 * CHUNK)
            size = min(size, len(DATA) - at)
            assert await through_cold_reads(stored.read, INDEX, at, size) == DATA[at : at + size]
            assert stored.read(INDEX, at, size) == DATA[at : at + size], "now it is here"
        assert stored.counters.fetched_bytes == stored.cached_bytes == len(DATA), (
            "each chunk was fetched once"
        )
        assert not list((tmp_path / "cache").iterdir()), "files of the cache have no names"


async def test_the_cache_keeps_to_its_bytes_and_everything_can_still_be_read(
    tmp_path: Path,
) -> None:
    async with reads(filled(), tmp_path, cache_bytes=3 * CHUNK) as stored:
        for at in [*range(0, len(DATA), 100), *range(0, len(DATA), 700)]:
            assert await through_cold_reads(stored.read, INDEX, at, 50) == DATA[at : at + 50]
            assert stored.cached_bytes <= 3 * CHUNK
        assert stored.counters.fetched_bytes > len(DATA)


async def test_many_readers_at_different_places_all_come_to_their_end_in_a_small_cache(
    tmp_path: Path,
) -> None:
    async def whole(stored: StoredReads, begin: int) -> bytes:
        places = [(begin + step) % 95 for step in range(95)]
        found = {at: await through_cold_reads(stored.read, FINE, at * 100, 100) for at in places}
        return b"".join([found[at] for at in range(95)])

    async with reads(filled(FINE), tmp_path, cache_bytes=16 * FINE.chunk_bytes) as stored:
        assert (
            await asyncio.gather(*[whole(stored, begin) for begin in range(0, 95, 12)])
            == [DATA] * 8
        )


async def test_a_store_that_is_away_fails_the_read_and_a_later_one_succeeds(tmp_path: Path) -> None:
    objects = FaultyObjects(filled(), lambda call: call <= 3)
    async with reads(objects, tmp_path) as stored:
        with pytest.raises(Overloaded, match="in this test") as failure:
            await through_cold_reads(stored.read, INDEX, 0, 10)
        assert failure.value.retry_after_ms == 1000
        await eventually(lambda: objects.calls >= 3)
        assert await through_cold_reads(stored.read, INDEX, 0, 10) == DATA[:10]


@pytest.mark.parametrize("fault", ["changed", "short", "gone"])
async def test_bytes_that_are_not_the_logs_are_never_given_out(tmp_path: Path, fault: str) -> None:
    objects, name = filled(), NAMES.chunk(SEGMENT, 4)
    right = objects.get(name)
    assert right is not None
    objects.delete(name)
    if fault != "gone":
        objects.create(name, right[:-1] + (bytes([right[-1] ^ 1]) if fault == "changed" else b""))
    async with reads(objects, tmp_path) as stored:
        with pytest.raises(
            ObjectDamaged,
            match=f"{name} {'is not there' if fault == 'gone' else 'has other bytes'}.*put it back",
        ) as failure:
            await through_cold_reads(stored.read, INDEX, 4 * CHUNK, 10)
        assert failure.value.end == SEGMENT.base + 5 * CHUNK
        assert stored.damaged() == [(SEGMENT.base, name)]
        with pytest.raises(ObjectDamaged):
            stored.read_waiting(INDEX, 4 * CHUNK, 10)
        assert (
            await through_cold_reads(stored.read, INDEX, 5 * CHUNK, 10)
            == DATA[5 * CHUNK : 5 * CHUNK + 10]
        )


async def test_a_store_without_anything_of_the_group_is_away_and_not_damaged(
    tmp_path: Path,
) -> None:
    async with reads(in_memory(), tmp_path) as stored:
        with pytest.raises(Overloaded, match="is its folder mounted"):
            await through_cold_reads(stored.read, INDEX, 0, 10)
        assert stored.damaged() == []


async def test_a_damaged_object_is_asked_for_seldom_and_read_when_it_was_put_back(
    tmp_path: Path,
) -> None:
    objects, name = FaultyObjects(filled()), NAMES.chunk(SEGMENT, 9)
    time, right = loop_time_of(asyncio.get_running_loop()), objects.get(name)
    assert right is not None
    objects.delete(name)
    async with reads(objects, tmp_path) as stored:
        with pytest.raises(ObjectDamaged):
            await through_cold_reads(stored.read, INDEX, 9_000, 10)
        calls = objects.calls
        for _ in range(100):
            with pytest.raises(ObjectDamaged):
                stored.read(INDEX, 9_000, 10)
        assert objects.calls == calls
        objects.create(name, right)
        time.added_s += DAMAGED_S + 1
        assert await through_cold_reads(stored.read, INDEX, 9_000, 10) == DATA[9_000:9_010]
        assert stored.damaged() == []


async def test_a_damaged_object_without_readers_counts_until_it_is_back(tmp_path: Path) -> None:
    objects, name = filled(), NAMES.chunk(SEGMENT, 9)
    time, right = loop_time_of(asyncio.get_running_loop()), objects.get(name)
    assert right is not None
    objects.delete(name)
    async with reads(objects, tmp_path) as stored:
        with pytest.raises(ObjectDamaged):
            await through_cold_reads(stored.read, INDEX, 9_000, 10)
        objects.create(name, right)
        assert stored.damaged() == [(SEGMENT.base, name)]
        time.added_s += LOOK_AGAIN_S + 1
        await eventually(lambda: stored.damaged() == [])


async def test_a_slow_chunk_holds_up_no_other(tmp_path: Path) -> None:
    gate = threading.Event()

    class Slow(FaultyObjects):
        def get(self, name: str) -> bytes | None:
            if name == NAMES.chunk(SEGMENT, 9):
                gate.wait()
            return super().get(name)

    async with reads(Slow(filled()), tmp_path) as stored:
        slow = asyncio.ensure_future(through_cold_reads(stored.read, INDEX, 9_000, 10))
        assert await through_cold_reads(stored.read, INDEX, 3_000, 10) == DATA[3_000:3_010]
        assert not slow.done()
        gate.set()
        assert await slow == DATA[9_000:9_010]


async def test_a_full_disk_fails_the_read_and_not_the_process(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file where the folder should be")
    async with reads(filled(), tmp_path) as stored:
        with pytest.raises(Overloaded, match="cache"):
            await through_cold_reads(stored.read, INDEX, 0, 10)
        assert stored.read_waiting(INDEX, 990, 20) == DATA[990:1010]
