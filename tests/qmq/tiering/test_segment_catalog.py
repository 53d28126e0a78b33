"""The catalog: segments that are in the store or may be, and the next one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq.tiering.stored_segment import (
    CatalogStep,
    LogBounds,
    SealedSegment,
    SegmentCatalog,
    Task,
    decode_catalog,
)

SEGMENTS = [SealedSegment(base, 10) for base in range(0, 100, 10)]


def step(
    catalog: SegmentCatalog,
    start: int = 0,
    committed: int = 100,
    *,
    is_master: bool = True,
    waiting: tuple[int, ...] = (),
) -> CatalogStep | None:
    return catalog.next_step(LogBounds(start, committed), is_master=is_master, waiting=waiting)


def test_a_master_copies_oldest_first_and_only_what_is_committed() -> None:
    catalog = SegmentCatalog()
    assert catalog.note(SEGMENTS[:3])
    assert not catalog.note(SEGMENTS[:3])
    assert step(catalog, committed=9) is None
    assert step(catalog, committed=29) == CatalogStep(Task.COPY, SEGMENTS[0])
    catalog.now_stored(SEGMENTS[0])
    assert step(catalog, committed=29) == CatalogStep(Task.COPY, SEGMENTS[1])
    assert step(catalog, committed=29, waiting=(10,)) is None
    assert step(catalog, waiting=(10,)) == CatalogStep(Task.COPY, SEGMENTS[2])


def test_a_slave_only_looks() -> None:
    catalog = SegmentCatalog(stored=SEGMENTS[:1], noted=SEGMENTS[1:2])
    assert step(catalog, is_master=False) == CatalogStep(Task.LOOK, SEGMENTS[1])
    assert step(catalog, start=10, is_master=False) == CatalogStep(Task.FORGET, SEGMENTS[0])


def test_what_retention_ended_is_deleted_whole_copy_or_half() -> None:
    catalog = SegmentCatalog(stored=SEGMENTS[:1], noted=SEGMENTS[1:3])
    assert step(catalog, start=9) == CatalogStep(Task.COPY, SEGMENTS[1]), (
        "the segment still has a message"
    )
    assert step(catalog, start=20) == CatalogStep(Task.DELETE, SEGMENTS[0])
    catalog.now_gone(SEGMENTS[0])
    assert step(catalog, start=20) == CatalogStep(Task.DELETE, SEGMENTS[1])
    catalog.now_gone(SEGMENTS[1])
    assert step(catalog, start=20) == CatalogStep(Task.COPY, SEGMENTS[2])


def test_a_stored_segment_gets_its_index_and_one_without_a_file_is_not_copied_again() -> None:
    catalog = SegmentCatalog(stored=SEGMENTS[:2], noted=SEGMENTS[2:4])
    log = LogBounds(0, 100, unindexed={10, 20, 30})
    assert catalog.next_step(log, is_master=False) == CatalogStep(Task.INDEX, SEGMENTS[1])
    assert catalog.next_step(log, is_master=True, waiting=(10,)) == CatalogStep(
        Task.COPY, SEGMENTS[2]
    )
    assert catalog.next_step(
        LogBounds(20, 100, unindexed={10}), is_master=True, waiting=(0, 10)
    ) == CatalogStep(Task.COPY, SEGMENTS[2])
    lost = SegmentCatalog(noted=SEGMENTS[:3])
    assert lost.next_step(LogBounds(0, 100, local_start=20), is_master=True) == CatalogStep(
        Task.LOOK, SEGMENTS[0]
    )
    assert lost.next_step(
        LogBounds(0, 100, local_start=20), is_master=True, waiting=(0, 10)
    ) == CatalogStep(Task.COPY, SEGMENTS[2])


@given(st.sets(st.sampled_from(SEGMENTS)), st.sets(st.sampled_from(SEGMENTS)))
def test_a_catalog_is_read_as_it_was_saved_and_a_changed_byte_is_noticed(
    stored: set[SealedSegment], noted: set[SealedSegment]
) -> None:
    data = SegmentCatalog(stored, noted - stored).encode()
    again = decode_catalog(data)
    assert again is not None
    assert (again.stored, again.noted) == (sorted(stored), sorted(noted - stored))
    for at in range(len(data)):
        assert decode_catalog(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None
        assert decode_catalog(data[:at]) is None


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 10), st.booleans()), max_size=60))
def test_nothing_is_in_the_store_that_no_catalog_has(history: list[tuple[int, int, bool]]) -> None:
    """Two replicas take turns as master, die in the middle of steps, and forget what ended, each at
    its own time.
    """
    catalogs, in_store, starts = [SegmentCatalog(), SegmentCatalog()], set[SealedSegment](), [0, 0]
    for master, start, dies in history:
        for number in (master, 1 - master):
            catalog = catalogs[number]
            starts[number] = max(starts[number], 10 * start if number == master else 0)
            catalog.note(each for each in SEGMENTS if each.base >= starts[number])
            found = step(catalog, starts[number], is_master=number == master)
            if found is None:
                continue
            segment, is_there = found.segment, found.segment in in_store
            if found.task is Task.COPY:
                in_store.add(segment)
            if found.task is Task.DELETE and not dies:
                in_store.discard(segment)
            if dies:
                continue
            if found.task in (Task.COPY, Task.LOOK) and segment in in_store:
                catalog.now_stored(segment)
            if found.task is Task.DELETE or (found.task is Task.FORGET and not is_there):
                catalog.now_gone(segment)
        known = {each for catalog in catalogs for each in (*catalog.stored, *catalog.noted)}
        assert in_store <= known
