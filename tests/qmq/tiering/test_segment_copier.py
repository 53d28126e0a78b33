"""The copier beside a log: it copies sealed segments, follows retention, waits while the store is
unreachable, and continues after a restart.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from support import eventually
from support.tiered_log import CHUNK_BYTES, FaultyObjects, grow, in_memory, log_at

from qmq.log.segment_index import decode_index, index_name
from qmq.log.segments import segment_name
from qmq.log.store import Store
from qmq.tiering.object_store import Objects
from qmq.tiering.segment_copier import CATALOG_FILE, CopierPace, SegmentCopier, sealed_segments
from qmq.tiering.stored_reads import StoredReads
from qmq.tiering.stored_segment import ObjectNames

PACE = CopierPace(
    idle_s=0.005, away_s=0.005, away_s_max=0.01, later_s=0.02, chunk_bytes=CHUNK_BYTES
)
NAMES = ObjectNames("g")


def fail(cause: BaseException) -> None:
    raise cause


@asynccontextmanager
async def running(
    store: Store,
    objects: Objects,
    *,
    is_master: bool = True,
    indexes: bool = False,
    owner: str = "original",
) -> AsyncIterator[SegmentCopier]:
    found = SegmentCopier(
        lambda: store,
        lambda: is_master,
        objects,
        "g",
        fail,
        lambda: owner,
        pace=PACE,
        indexes=indexes,
    )
    found.start()
    try:
        yield found
    finally:
        await found.stop()


async def test_sealed_segments_are_stored_and_the_one_being_written_is_not(tmp_path: Path) -> None:
    objects = in_memory()
    with log_at(tmp_path) as store:
        async with running(store, objects) as copier:
            await eventually(lambda: copier.catalog.stored == sealed_segments(store))
            grow(store, 4)
            await eventually(lambda: copier.catalog.stored == sealed_segments(store))
            assert copier.counters.copied_bytes == store.messages.bases[-1]
        for catalog in (None, b"nonsense"):
            if catalog is not None:
                (store.folder / CATALOG_FILE).write_bytes(catalog)
            async with running(store, objects) as copier:
                await eventually(lambda: copier.catalog.stored == sealed_segments(store))
            assert copier.counters.copied_bytes == 0


@pytest.mark.parametrize("has_catalog", [False, True])
async def test_a_restored_group_with_the_same_prefix_deletes_no_object_of_the_original(
    tmp_path: Path, has_catalog: bool
) -> None:
    """Its log has the same bytes at the same positions, and its retention ends them earlier.
    `has_catalog`: the folder was copied.
    """
    objects = in_memory()
    with log_at(tmp_path / "1") as original, log_at(tmp_path / "2") as restored:
        stored = sealed_segments(original)
        async with running(original, objects) as copier:
            await eventually(lambda: copier.catalog.stored == stored)
        if has_catalog:
            shutil.copy(original.folder / CATALOG_FILE, restored.folder / CATALOG_FILE)
        async with (
            running(restored, objects, owner="restored") as other,
            running(restored, objects, owner="restored", is_master=False),
        ):
            restored.messages.drop_files_before(restored.messages.bases[-1])
            grow(restored, 4)
            await eventually(lambda: other.counters.failures["conflict"] > 3)
            assert other.counters.deleted_segments == other.counters.copied_bytes == 0
        assert all(objects.get(NAMES.manifest(each)) is not None for each in stored)
        async with running(original, objects) as copier:
            original.messages.drop_files_before(original.messages.bases[2])
            await eventually(lambda: copier.catalog.stored == sealed_segments(original))
            assert copier.counters.failures["conflict"] == 0


async def test_a_store_that_returns_gets_everything_it_missed(tmp_path: Path) -> None:
    random = Random(1)
    objects = FaultyObjects(in_memory(), lambda call: call < 20 or random.random() < 0.4)
    with log_at(tmp_path) as store:
        async with running(store, objects) as copier:
            await eventually(lambda: copier.catalog.stored == sealed_segments(store))
            assert copier.counters.failures["away"] >= 19
            assert copier.counters.failures["conflict"] == copier.counters.failures["damaged"] == 0


async def test_what_retention_ends_leaves_the_store_with_half_copies(tmp_path: Path) -> None:
    inner = in_memory()
    with log_at(tmp_path) as store:
        segments = sealed_segments(store)
        half = FaultyObjects(inner, lambda call: call > 6)
        async with running(store, half) as copier:
            await eventually(lambda: copier.counters.failures["away"] > 0)
        assert inner.get(NAMES.chunk(segments[0], 0)) is not None
        store.messages.drop_files_before(store.messages.bases[-1])
        random = Random(1)
        objects = FaultyObjects(inner, lambda _: random.random() < 0.2)
        async with running(store, objects) as copier:
            await eventually(lambda: not copier.catalog.stored and not copier.catalog.noted)
        names = [
            NAMES.chunk(each, number)
            for each in segments
            for number in range(each.chunk_count(CHUNK_BYTES))
        ]
        assert [name for name in names if inner.get(name) is not None] == []


async def test_a_slave_writes_nothing_and_knows_what_its_master_stored_and_deleted(
    tmp_path: Path,
) -> None:
    inner = in_memory()
    seen = FaultyObjects(inner)
    with log_at(tmp_path / "1") as store, log_at(tmp_path / "2") as other:
        async with running(other, seen, is_master=False) as slave, running(store, inner) as master:
            await eventually(lambda: slave.catalog.stored == sealed_segments(store))
            for each in (other, store):
                each.messages.drop_files_before(each.messages.bases[2])
            await eventually(
                lambda: slave.catalog.stored == master.catalog.stored == sealed_segments(store)
            )
    assert {method for method, _ in seen.names} == {"get"}


@pytest.mark.parametrize("is_master", [True, False])
async def test_a_file_that_is_not_needed_is_deleted_and_its_objects_when_retention_ends_it(
    tmp_path: Path, is_master: bool
) -> None:
    objects = in_memory()
    with log_at(tmp_path / "1") as first, log_at(tmp_path / "2") as second:
        store = first if is_master else second
        log, segments = store.messages, sealed_segments(store)
        bytes_of = {
            each.base: (log.folder / segment_name(each.base)).read_bytes() for each in segments
        }
        async with (
            running(first, objects, indexes=is_master) as master,
            running(second, objects, is_master=False, indexes=not is_master),
        ):
            await eventually(lambda: all(log.has_index(each.base) for each in segments))
            for path in log.release_before(log.end):
                path.unlink()
            assert log.local_start == log.bases[-1]
            reads = StoredReads(objects, "g", tmp_path / "cache", 1 << 20)
            for each in segments:
                index = decode_index((log.folder / index_name(each.base)).read_bytes())
                assert index is not None
                assert reads.read_waiting(index, 0, each.size) == bytes_of[each.base]
            for each in (first, second):
                each.messages.drop_files_before(each.messages.bases[-1])
            await eventually(lambda: not master.catalog.stored and not master.catalog.noted)
        assert objects.get(NAMES.manifest(segments[0])) is None
        assert not list(log.folder.glob("*.stored"))


async def test_a_file_that_changed_after_it_was_copied_gets_no_index(tmp_path: Path) -> None:
    objects = in_memory()
    with log_at(tmp_path) as store:
        first, *others = sealed_segments(store)
        async with running(store, objects) as copier:
            await eventually(lambda: copier.catalog.stored == [first, *others])
        path = store.messages.folder / segment_name(first.base)
        whole = path.read_bytes()
        path.write_bytes(whole[:5000] + b"?" + whole[5001:])
        async with running(store, objects, indexes=True) as copier:
            await eventually(
                lambda: (
                    all(store.messages.has_index(each.base) for each in others)
                    and copier.counters.failures["damaged"] > 0
                )
            )
            assert not store.messages.has_index(first.base)
            path.write_bytes(whole)
            await eventually(lambda: store.messages.has_index(first.base))


async def test_a_damaged_segment_waits_for_its_repair_and_holds_up_no_other(tmp_path: Path) -> None:
    objects = in_memory()
    with log_at(tmp_path) as store:
        first, *others = sealed_segments(store)
        path = store.messages.folder / segment_name(first.base)
        whole = path.read_bytes()
        path.write_bytes(whole[:5000] + b"?" + whole[5001:])
        async with running(store, objects) as copier:
            await eventually(
                lambda: copier.catalog.stored == others and copier.counters.failures["damaged"] > 0
            )
            path.write_bytes(whole)
            await eventually(lambda: copier.catalog.stored == sealed_segments(store))
