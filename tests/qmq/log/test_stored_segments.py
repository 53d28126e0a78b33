"""A log whose oldest segments have no file: their index is here, and their bytes are read from
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from google_crc32c import value as crc32c
from hypothesis import given
from hypothesis import strategies as st
from support import ManualClock
from support.tiered_log import CONFIG, grow

from qmq.errors import InvalidArgument, LogDamaged
from qmq.log.checkpoint import close_store
from qmq.log.envelopes import head_at
from qmq.log.recovery import open_store
from qmq.log.retention import Retention, local_floor
from qmq.log.scrub import Scrubber
from qmq.log.segment_index import SegmentIndex, decode_index, index_name
from qmq.log.segments import segment_name
from qmq.log.store import Store
from qmq.wire.batch import ENVELOPE_BYTES

LOG = replace(CONFIG, cache_bytes=0)


class Elsewhere:
    """Keeps whole segments in memory."""

    def __init__(self) -> None:
        self.data: dict[int, bytes] = {}
        self.reads = 0

    def read(self, index: SegmentIndex, at: int, size: int) -> bytes:
        self.reads += 1
        return self.data[index.base][at : at + size]

    read_waiting = read

    def damaged(self) -> list[tuple[int, str]]:
        return []


@contextmanager
def opened(folder: Path, elsewhere: Elsewhere | None) -> Iterator[Store]:
    store = open_store(folder, LOG, ManualClock(), stored=elsewhere)
    yield store
    close_store(store)


@contextmanager
def grown(folder: Path, elsewhere: Elsewhere | None = None) -> Iterator[Store]:
    """A log with sealed segments, closed with a checkpoint."""
    store = open_store(folder, LOG, ManualClock(), stored=elsewhere)
    grow(store, 13)
    yield store
    close_store(store)


def move(store: Store, elsewhere: Elsewhere, count: int) -> None:
    """Move the oldest segments there, as the copier and retention do."""
    log = store.messages
    for base in log.bases[:count]:
        data = (log.folder / segment_name(base)).read_bytes()
        elsewhere.data[base] = data
        index = SegmentIndex(base, len(data), len(data), (crc32c(data),), data[:ENVELOPE_BYTES])
        log.write_index(index)
        assert log.note_index(index)
    for path in log.release_before(log.bases[count]):
        path.unlink()


def everything(store: Store) -> list[bytes]:
    queue = store.open_queue("s", 0)
    return [store.read(queue, queue.index.entry(number))[1] for number in range(queue.index.count)]


def test_an_index_is_read_as_it_was_written_and_a_changed_byte_is_noticed() -> None:
    data = SegmentIndex(7, 30, 10, (1, 2, 3), b"head").encode()
    assert decode_index(data) == SegmentIndex(7, 30, 10, (1, 2, 3), b"head")
    for at in range(len(data)):
        assert decode_index(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_messages_without_a_file_are_read_before_and_after_a_restart(
    tmp_path: Path, has_checkpoint: bool
) -> None:
    elsewhere = Elsewhere()
    store = open_store(tmp_path, LOG, ManualClock(), stored=elsewhere)
    grow(store, 13)
    before = everything(store)
    move(store, elsewhere, 2)
    log = store.messages
    assert (log.start, log.local_start, log.local_bytes) == (
        0,
        log.bases[2],
        log.end - log.bases[2],
    )
    assert everything(store) == before
    if has_checkpoint:
        close_store(store)
    else:
        store.close()
    elsewhere.reads = 0
    with opened(tmp_path, elsewhere) as again:
        assert (elsewhere.reads == 0) == has_checkpoint
        assert (again.messages.start, again.messages.local_start) == (0, again.messages.bases[2])
        assert everything(again) == before


def test_a_lost_consume_log_is_rebuilt_from_segments_without_a_file(tmp_path: Path) -> None:
    elsewhere = Elsewhere()
    store = open_store(tmp_path, LOG, ManualClock(), stored=elsewhere)
    grow(store, 13)
    before = everything(store)
    move(store, elsewhere, 2)
    close_store(store)
    for path in (tmp_path / "consume").iterdir():
        path.unlink()
    with opened(tmp_path, elsewhere) as again:
        assert everything(again) == before


def test_the_beginning_of_each_segment_is_known_without_reading_elsewhere(tmp_path: Path) -> None:
    elsewhere = Elsewhere()
    with grown(tmp_path) as store:
        heads = [head_at(store.messages, base) for base in store.messages.bases]
        move(store, elsewhere, 2)
        assert [head_at(store.messages, base) for base in store.messages.bases] == heads
    assert elsewhere.reads == 0


def test_without_the_object_store_the_error_names_the_missing_segment(tmp_path: Path) -> None:
    elsewhere = Elsewhere()
    with grown(tmp_path) as store:
        move(store, elsewhere, 1)
    with opened(tmp_path, None) as again:
        queue = again.open_queue("s", 0)
        with pytest.raises(LogDamaged, match="--object-store"):
            again.read(queue, queue.index.entry(0))


def test_a_file_that_outlived_a_crash_is_used_again_and_remains_of_others_are_not(
    tmp_path: Path,
) -> None:
    """The index is written and the file is not deleted yet; and an index is left of a segment that
    retention took.
    """
    elsewhere = Elsewhere()
    with grown(tmp_path) as store:
        log = store.messages
        data = (log.folder / segment_name(0)).read_bytes()
        log.write_index(
            SegmentIndex(0, len(data), len(data), (crc32c(data),), data[:ENVELOPE_BYTES])
        )
        move(store, elsewhere, 2)
        (log.folder / segment_name(0)).write_bytes(data)
    with opened(tmp_path, elsewhere) as again:
        assert again.messages.local_start == again.messages.bases[2], (
            "a file before one that is missing is not used"
        )
        again.messages.drop_files_before(again.messages.bases[2])
        assert not (again.messages.folder / segment_name(0)).exists()
        assert not (again.messages.folder / index_name(0)).exists()
        (again.messages.folder / index_name(0)).write_bytes(
            SegmentIndex(0, 10, 10, (0,), b"").encode()
        )
    with opened(tmp_path, elsewhere) as again:
        assert again.messages.start == again.messages.local_start > 0


def test_only_segments_with_an_index_are_released_and_in_order(tmp_path: Path) -> None:
    elsewhere = Elsewhere()
    with grown(tmp_path) as store:
        log = store.messages
        assert log.release_before(log.end) == []
        data = (log.folder / segment_name(log.bases[1])).read_bytes()
        assert log.note_index(
            SegmentIndex(log.bases[1], len(data), len(data), (crc32c(data),), data[:ENVELOPE_BYTES])
        )
        assert log.release_before(log.end) == [], "the first has none"
        move(store, elsewhere, 1)
        assert log.local_start == log.bases[1]
        assert log.release_before(log.bases[2] - 1) == []
        assert log.release_before(log.end) == [log.folder / segment_name(log.bases[1])]
        assert not log.note_index(SegmentIndex(log.bases[-1], 1, 1, (0,), b"")), (
            "the last segment is not sealed"
        )


def test_the_scrubber_checks_what_is_on_the_disk_to_the_end(tmp_path: Path) -> None:
    elsewhere = Elsewhere()
    with grown(tmp_path) as store:
        plan = store.begin_flush()
        plan.run()
        store.end_flush(plan)
        scrubber = Scrubber(store)
        move(store, elsewhere, 2)
        for _ in range(10):
            assert scrubber.slice(1 << 30) is None
        assert scrubber.rounds > 1
        assert elsewhere.reads == 0


def test_local_retention_releases_only_files_of_stored_segments(tmp_path: Path) -> None:
    elsewhere = Elsewhere()
    config = replace(LOG, object_store_url="file:///nowhere", local_retention_bytes=0)
    store = open_store(tmp_path, config, ManualClock(), stored=elsewhere)
    grow(store, 13)
    retention = Retention(store)
    for _ in retention.steps(lambda _: None):
        pass
    assert retention.dropped == [], "nothing is stored yet"
    log = store.messages
    for base in log.bases[:2]:
        data = (log.folder / segment_name(base)).read_bytes()
        elsewhere.data[base] = data
        assert log.note_index(
            SegmentIndex(base, len(data), len(data), (crc32c(data),), data[:ENVELOPE_BYTES])
        )
    for _ in retention.steps(lambda _: None):
        pass
    assert retention.dropped == [log.folder / segment_name(base) for base in log.bases[:2]]
    assert log.start == 0
    store.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"local_retention_bytes": 0}, "object store"),
        ({"local_retention_ms": 1}, "object store"),
        ({"local_retention_ms": 0, "object_store_url": "file:///x"}, "local_retention_ms"),
        ({"local_retention_bytes": -1, "object_store_url": "file:///x"}, "local_retention_bytes"),
        ({"object_store_cache_bytes": 1 << 20}, "cache"),
    ],
)
def test_a_local_retention_that_cannot_work_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        replace(LOG, **options)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
    st.integers(0, 10),
    st.integers(0, 120),
    st.integers(0, 8),
)
def test_the_local_floor_is_the_first_segment_that_is_young_and_within_the_size(
    sizes: list[int], last: int, most: int, before: int
) -> None:
    bases = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    end = bases[-1] + last
    begins = {base: at for at, base in enumerate(bases)}
    floor = local_floor(bases, end, begins.__getitem__, before, most)
    assert floor in bases
    assert all(
        end - base > most or begins[following] < before
        for base, following in pairwise(bases)
        if base < floor
    )
    assert floor == bases[-1] or (
        end - floor <= most and begins[bases[bases.index(floor) + 1]] >= before
    )
