"""Scrubbing: everything that was flushed is read, and nothing else is taken for damage."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from replica_support import Traffic, checkpoint, feed_all, flush, master_at, opened, small
from support import ManualClock
from support.retention import begin_retention, end_retention

from qmq.errors import LogDamaged
from qmq.log import follower
from qmq.log.disk import Disk
from qmq.log.envelopes import walk
from qmq.log.scrub import Scrubber
from qmq.log.segments import Segments, segment_name
from qmq.model import SubjectConfig
from qmq.wire.batch import ENVELOPE_BYTES


@pytest.fixture
def traffic(tmp_path: Path) -> Traffic:
    found = master_at(tmp_path / "m", steps=100)
    flush(found.store)
    return found


def a_round(scrubber: Scrubber, bytes_max: int = 1 << 20) -> list[LogDamaged]:
    """One round, to its end."""
    begin, found = scrubber.rounds, []
    while scrubber.rounds == begin:
        damage = scrubber.slice(bytes_max)
        if damage is not None:
            found.append(damage)
    return found


def flip(segments: Segments, position: int) -> None:
    segments.mend(position, bytes([segments.read(position, 1)[0] ^ 1]))


def test_a_round_reads_every_flushed_byte_of_both_logs_in_slices(traffic: Traffic) -> None:
    store = traffic.store
    scrubber = Scrubber(store)
    assert a_round(scrubber, 1) == []
    first = scrubber.bytes_read
    assert first == store.messages.end + store.actions.end
    traffic.run(20)
    assert a_round(scrubber) == []
    assert scrubber.bytes_read == first + store.messages.flushed + store.actions.flushed
    assert not store.is_flushed


def test_a_slice_reads_about_what_it_may(traffic: Traffic) -> None:
    scrubber = Scrubber(traffic.store)
    for _ in range(20):
        before = scrubber.bytes_read
        assert scrubber.slice(500) is None
        assert 0 < scrubber.bytes_read - before < 500 + 3000


def test_a_slice_reads_no_more_entries_than_it_may(traffic: Traffic) -> None:
    scrubber = Scrubber(traffic.store)
    entries = [entry for segments in traffic.store.logs for entry in walk(segments, 0)]
    slices = 0
    while not scrubber.rounds:
        assert scrubber.slice(1 << 20, 3) is None
        slices += 1
    assert slices >= len(entries) // 3


@pytest.mark.parametrize("part", ["envelope", "region"])
def test_damage_anywhere_is_found_with_its_place(traffic: Traffic, part: str) -> None:
    store = traffic.store
    scrubber = Scrubber(store)
    for log, segments in enumerate((store.messages, store.actions)):
        for entry in list(walk(segments, 0))[::5]:
            at = entry.position + (9 if part == "envelope" else entry.envelope.total_bytes - 1)
            flip(segments, at)
            found = a_round(scrubber, 700)
            assert [(each.log, each.position) for each in found] == [(log, entry.position)]
            flip(segments, at)
    assert a_round(scrubber) == []


def test_the_next_slice_continues_behind_the_damage(traffic: Traffic) -> None:
    store = traffic.store
    places = [entry.position for entry in walk(store.messages, 0)][1:8]
    for position in places:
        flip(store.messages, position + ENVELOPE_BYTES + 5)
    assert [each.position for each in a_round(Scrubber(store))] == places


def test_a_running_retention_is_not_reported_as_damage(tmp_path: Path) -> None:
    config, clock = small(retention_ms=1000), ManualClock()
    traffic = master_at(tmp_path / "m", steps=60, config=config, clock=clock)
    store = traffic.store
    flush(store)
    scrubber = Scrubber(store)
    for _ in range(30):
        scrubber.slice(400)
        clock.now_ms += 400
        traffic.run(5)
        store.commit(store.index)
        gone = begin_retention(store, SubjectConfig)
        checkpoint(store)
        assert scrubber.slice(400) is None
        end_retention(gone)
        assert scrubber.slice(400) is None
    assert store.messages.start > 0
    assert a_round(scrubber) == []
    assert a_round(scrubber) == []


def test_a_slave_that_is_cut_and_grows_on_otherwise_is_not_damaged(tmp_path: Path) -> None:
    """At the scrubber's position there may be no start of an entry any more."""
    random = Random(2)
    slave = opened(tmp_path / "s")
    scrubber = Scrubber(slave)
    for number in range(12):
        traffic = master_at(tmp_path / f"m{number}", seed=number, steps=40)
        follower.truncate(slave, 0)
        feed_all(traffic.store, slave)
        flush(slave)
        for _ in range(random.randrange(40)):
            assert scrubber.slice(300) is None
        traffic.store.close()
    slave.close()


def test_a_log_whose_segment_was_cut_short_on_disk_is_damaged(traffic: Traffic) -> None:
    store = traffic.store
    base = store.messages.bases[1]
    path = sorted(store.messages.folder.iterdir())[1]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)
    found = a_round(Scrubber(store))
    assert len(found) == 1
    assert base <= found[0].position < store.messages.bases[2]


def test_it_runs_beside_a_store_that_works(tmp_path: Path) -> None:
    """Retention, cuts and growth in one thread, scrubbing in another: the scrubber finds nothing,
    and nothing fails.
    """
    config, clock = small(retention_ms=1000), ManualClock()
    traffic = master_at(tmp_path / "m", steps=20, config=config, clock=clock)
    slave = opened(tmp_path / "s", config, clock=clock)
    scrubber, found, is_over = Scrubber(slave), list[object](), threading.Event()

    def scrub() -> None:
        try:
            while not is_over.is_set():
                damage = scrubber.slice(2_000)
                if damage is not None:
                    found.append(damage)
        except BaseException as cause:
            found.append(cause)

    thread = threading.Thread(target=scrub)
    thread.start()
    for number in range(60):
        traffic.run(8)
        feed_all(traffic.store, slave)
        flush(slave)
        follower.truncate(slave, max(slave.index - 9, slave.applied_index))
        feed_all(traffic.store, slave, from_files=True)
        flush(slave)
        slave.commit(slave.index - 5)
        clock.now_ms += 150
        if number % 5 == 0:
            gone = begin_retention(slave, SubjectConfig)
            checkpoint(slave)
            end_retention(gone)
    is_over.set()
    thread.join()
    assert found == []
    assert scrubber.rounds > 0


class RecordingDisk(Disk):
    """Records which parts of files are dropped from the page cache."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[tuple[str, int, int]] = []
        """(file, begin, end)"""

    def drop_cached(self, fd: int, size: int, at: int) -> None:
        self.dropped.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, at, at + size))
        super().drop_cached(fd, size, at)


@pytest.mark.skipif(sys.platform != "linux", reason="the names of open files are in /proc")
def test_pages_that_a_slice_has_not_read_stay_in_the_page_cache(tmp_path: Path) -> None:
    """A consumer reads a complete segment while the scrubber goes through it, 4 MiB a second."""
    disk = RecordingDisk()
    slave = opened(tmp_path / "s", disk=disk)
    with closing(master_at(tmp_path / "m", steps=100).store) as master:
        feed_all(master, slave)
    flush(slave)
    scrubber, log = Scrubber(slave), slave.messages
    while scrubber.position < log.bases[1]:
        assert scrubber.slice(300) is None
        file, begin, end = disk.dropped[-1]
        assert (file, begin) == (segment_name(0), 0)
        assert end == scrubber.position
    a_round(scrubber)
    ends = {
        name: max(end for file, _, end in disk.dropped if file == name)
        for name, _, _ in disk.dropped
    }
    complete = {segment_name(base): log.segment_end(base) - base for base in log.bases[:-1]}
    assert complete.items() <= ends.items()
    slave.close()


class SlowCut(Disk):
    """A disk on which something happens in the middle of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.in_the_middle: list[Callable[[], None]] = []

    def truncate(self, fd: int, size: int) -> None:
        if self.in_the_middle:
            self.in_the_middle.pop()()
        super().truncate(fd, size)


def test_a_place_that_was_found_in_the_middle_of_a_cut_is_ignored(tmp_path: Path) -> None:
    """The other thread has counted the cut, and the segments that it drops are still there."""
    disk = SlowCut()
    slave = opened(tmp_path / "s", disk=disk)
    first, second = (master_at(tmp_path / f"m{seed}", seed=seed, steps=100) for seed in (1, 2))
    feed_all(first.store, slave)
    flush(slave)
    scrubber, log = Scrubber(slave), slave.messages
    last = log.bases[-1]
    while scrubber.position < last:
        assert scrubber.slice(300) is None
    disk.in_the_middle.append(lambda: scrubber.find_place(log))
    follower.truncate(slave, 0)
    feed_all(second.store, slave)
    flush(slave)
    assert last < log.flushed
    assert last not in log.bases
    assert a_round(scrubber, 300) == []
    for store in (first.store, second.store, slave):
        store.close()
