"""A slave's store: the master's bytes at the master's places, and the master's state up to what is
committed.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from replica_support import (
    SMALL,
    Traffic,
    checkpoint,
    entries_of_index,
    feed,
    feed_all,
    files,
    master_at,
    opened,
    read_from,
    replay,
    small,
    state_of,
)
from support import ManualClock, intake
from support.retention import begin_retention, end_retention

from qmq.errors import CorruptBatch, DiskFull
from qmq.log import follower
from qmq.log.actions import Begin, Join, PullAction, Pulled
from qmq.log.disk import Disk
from qmq.log.envelopes import walk
from qmq.log.log_config import Flush
from qmq.log.merged_log import read_merged
from qmq.log.recent_writes import WriteRun
from qmq.log.store import Store
from qmq.model import SubjectConfig
from qmq.wire.batch import ENVELOPE_BYTES


def fed_slave(
    master: Store, folder: Path, *, bytes_max: int = 4096, from_files: bool = False
) -> Store:
    slave = opened(folder)
    feed_all(master, slave, bytes_max, from_files=from_files)
    return slave


@pytest.mark.parametrize("from_files", [False, True])
@pytest.mark.parametrize("bytes_max", [1, 5_000])
def test_a_slave_has_the_masters_files_and_after_the_commit_its_state(
    tmp_path: Path, bytes_max: int, from_files: bool
) -> None:
    traffic = master_at(tmp_path / "m", steps=150)
    master = traffic.store
    slave = fed_slave(master, tmp_path / "s", bytes_max=bytes_max, from_files=from_files)
    assert files(tmp_path / "s") == files(tmp_path / "m")
    assert len(master.messages.bases) > 4
    assert len(master.actions.bases) > 4
    assert state_of(slave) == {}
    slave.commit(slave.index)
    assert state_of(slave) == state_of(master)
    assert entries_of_index(slave) == entries_of_index(master)
    assert slave.epochs == master.epochs
    for store in (master, slave):
        store.close()
        assert replay(store) == state_of(master)


def places(store: Store, step: int) -> list[int]:
    """Some indexes, and among them all after which a segment begins."""
    logs = (store.messages, store.actions)
    begins = [
        next(walk(segments, base)).envelope.index - 1
        for segments in logs
        for base in segments.bases[1:]
    ]
    return sorted({*begins, *range(1, store.index + 1, step)})


def another(tmp_path: Path, index: int, *, was_cut: bool) -> Store:
    """A replica that has what the master had up to an index."""
    folder = tmp_path / f"n{index}"
    if was_cut:
        shutil.copytree(tmp_path / "m", folder)
        return opened(folder, until=index)
    shutil.copytree(tmp_path / "m", tmp_path / "source")
    source, other = opened(tmp_path / "source"), opened(folder)
    while other.index < index:
        feed(source, other, 1, from_files=True)
    source.close()
    shutil.rmtree(tmp_path / "source")
    other.apply_pending()
    return other


@pytest.mark.parametrize("was_cut", [False, True], ids=["never had it", "was cut too"])
def test_cutting_back_keeps_earlier_entries_and_another_history_can_follow(
    tmp_path: Path, was_cut: bool
) -> None:
    """The other history begins after any index, also where a segment began that the new master
    never had or has deleted.
    """
    traffic = master_at(tmp_path / "m", seed=was_cut, steps=40)
    random = Random(was_cut)
    indexes = places(traffic.store, 5)
    traffic.store.close()
    for index in indexes:
        copy = tmp_path / f"m{index}"
        shutil.copytree(tmp_path / "m", copy)
        old = opened(copy)
        slave = fed_slave(old, tmp_path / f"s{index}", from_files=True)
        old.close()
        slave.commit(random.randrange(index + 1))
        other = another(tmp_path, index, was_cut=was_cut)
        assert state_of(other) == traffic.history.at(index)
        other.append_barrier(2)
        second = Traffic(other, random)
        second.number = 1000
        second.run(12)
        assert follower.truncate(slave, index)
        assert slave.index == index
        feed_all(other, slave, from_files=random.random() < 0.5)
        assert files(slave.folder) == files(other.folder)
        slave.commit(slave.index)
        assert state_of(slave) == state_of(other)
        assert slave.epochs == other.epochs
        for store in (slave, other):
            store.close()
        assert replay(slave) == state_of(other)
        for name in ("m", "s", "n"):
            shutil.rmtree(tmp_path / f"{name}{index}")


def test_applied_entries_are_not_cut_in_place(tmp_path: Path) -> None:
    traffic = master_at(tmp_path / "m")
    slave = fed_slave(traffic.store, tmp_path / "s")
    slave.commit(20)
    before = files(slave.folder)
    assert not follower.truncate(slave, 19)
    assert files(slave.folder) == before
    assert follower.truncate(slave, 20)
    assert slave.index == 20
    slave.close()


def test_a_flush_under_way_during_a_cut_covers_no_later_entry(tmp_path: Path) -> None:
    traffic = master_at(tmp_path / "m", steps=60, config=small(flush=Flush.SYNC))
    slave = opened(tmp_path / "s", small(flush=Flush.SYNC))
    feed_all(traffic.store, slave)
    plan = slave.begin_flush()
    end = slave.index
    follower.truncate(slave, 3)
    feed_all(traffic.store, slave)
    plan.run()
    assert slave.end_flush(plan) <= 3 < end
    assert slave.messages.flushed < slave.messages.end
    assert not slave.is_flushed
    plan = slave.begin_flush()
    plan.run()
    assert slave.end_flush(plan) == end
    slave.close()


# --- a segment that was begun and got nothing -----------------------------------------------------


class NoRoomToBegin(Disk):
    """A disk without room for a new file's header while `is_full`."""

    is_full = False

    def write(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
        if self.is_full and at == 0:
            raise DiskFull("no space left (in this test)")
        super().write(fd, buffers, at)


def until_roll_fails(disk: NoRoomToBegin, traffic: Traffic, log: str) -> None:
    """A segment begins, and its snapshot does not fit."""
    segments = traffic.store.messages if log == "message" else traffic.store.actions
    disk.is_full = True
    while segments.end > segments.bases[-1]:
        if log == "message":
            with suppress(DiskFull):
                traffic.produce()
        else:
            traffic.consume()
            traffic.write()
    disk.is_full = False


def master_on(disk: Disk, folder: Path) -> Traffic:
    store = opened(folder, disk=disk)
    store.append_barrier(1)
    traffic = Traffic(store, Random(3))
    traffic.run(40)
    return traffic


@pytest.mark.parametrize("log", ["message", "action"])
def test_a_new_epoch_after_a_failed_segment_leaves_no_segment_without_snapshot(
    tmp_path: Path, log: str
) -> None:
    disk = NoRoomToBegin()
    traffic = master_on(disk, tmp_path / "m")
    until_roll_fails(disk, traffic, log)
    master = traffic.store
    master.write_actions()
    master.append_barrier(2)
    traffic.run(60)
    for segments in (master.messages, master.actions):
        kinds = [next(walk(segments, base)).envelope.kind for base in segments.bases[1:]]
        assert set(kinds) == {1}
    slave = fed_slave(master, tmp_path / "s")
    assert files(slave.folder) == files(master.folder)
    master.close()
    assert replay(master) == state_of(master)


def test_a_slave_with_an_empty_segment_follows_a_master_without_that_segment(
    tmp_path: Path,
) -> None:
    """The slave was once a master with a full disk."""
    disk = NoRoomToBegin()
    traffic = master_on(disk, tmp_path / "m")
    other = fed_slave(traffic.store, tmp_path / "s")
    until_roll_fails(disk, traffic, "message")
    feed_all(traffic.store, other)
    other.apply_pending()
    other.append_barrier(2)
    Traffic(other, Random(9)).run(20)
    feed_all(other, traffic.store)
    assert files(other.folder) == files(traffic.store.folder)


# --- snapshots ------------------------------------------------------------------------------------


def test_a_snapshot_does_not_hold_what_a_replay_does_again(tmp_path: Path) -> None:
    """The shares change when consumers act, before that is written: a snapshot in between would
    have it twice.
    """
    store = opened(tmp_path)
    store.append_barrier(1)
    queue = store.open_queue("a", 0)
    store.append([intake(queue, [b"x"] * 200)])
    where = ("a", 0, "g")
    store.act(Begin(*where, "", 0))
    store.act(Join(*where, "c", "i", 1000, -1))
    for number in range(100):
        store.act(PullAction(*where, "c", (Pulled(number, 1, 1),)))
        store.write_actions()
    assert len(store.actions.bases) > 3
    store.actions.drop_files_before(store.actions.bases[2])
    store.close()
    assert replay(store) == state_of(store)


# --- starting over --------------------------------------------------------------------------------


def started_over(master: Store, folder: Path) -> Store:
    index, epoch = master.start()
    follower.start_over(folder, (master.messages.start, master.actions.start))
    slave = opened(folder)
    slave.begin_at(index, epoch)
    return slave


@pytest.mark.parametrize("seed", range(6))
def test_a_replica_that_starts_over_gets_the_state_of_a_master_with_a_short_log(
    tmp_path: Path, seed: int
) -> None:
    config, clock = small(retention_ms=1000), ManualClock()
    traffic = master_at(tmp_path / "m", seed=seed, steps=60 + 10 * seed, config=config, clock=clock)
    master = traffic.store
    master.commit(master.index)
    clock.now_ms += 2000
    traffic.run(10 * seed)
    master.commit(master.index)
    gone = begin_retention(master, SubjectConfig)
    assert gone.dropped
    checkpoint(master)
    end_retention(gone)
    old = opened(tmp_path / "old")
    assert read_from(master, old, 4096, from_files=True) is None
    old.close()
    slave = started_over(master, tmp_path / "s")
    feed_all(master, slave, bytes_max=1 + 500 * seed, from_files=True)
    slave.commit(slave.index)
    assert files(slave.folder) == files(master.folder)
    assert state_of(slave) == state_of(master)
    kept = entries_of_index(slave)
    for key, entries in entries_of_index(master).items():
        assert kept[key][len(kept[key]) - len(entries) :] == entries
    traffic.run(30)
    feed_all(master, slave)
    slave.commit(slave.index)
    assert state_of(slave) == state_of(master)
    slave.close()
    assert replay(slave) == state_of(master)


@pytest.mark.parametrize("seed", range(3))
def test_retention_never_takes_the_segment_that_a_slave_may_be_cut_back_into(
    tmp_path: Path, seed: int
) -> None:
    """After any applied entry the log can be cut there, and continues as on a master that has not
    begun the next segment.
    """
    config, clock = small(retention_ms=1000), ManualClock()
    traffic = master_at(tmp_path / "m", seed=seed, steps=50, config=config, clock=clock)
    clock.now_ms += 1 << 40
    for index in places(traffic.store, 5)[:-1]:
        slave = opened(tmp_path / f"s{index}", config, clock=clock)
        feed_all(traffic.store, slave)
        slave.commit(index)
        begin_retention(slave, SubjectConfig)
        follower.truncate(slave, index)
        other = another(tmp_path, index, was_cut=False)
        other.append_barrier(2)
        Traffic(other, Random(seed)).run(12)
        feed_all(other, slave, from_files=True)
        slave.commit(slave.index)
        assert state_of(slave) == state_of(other)
        slave.close()
        other.close()


# --- what is refused ------------------------------------------------------------------------------


def stretch_bytes(tmp_path: Path) -> tuple[Store, Store, bytes, int]:
    traffic = master_at(tmp_path / "m", steps=12)
    slave = opened(tmp_path / "s")
    stretch = read_merged((traffic.store.messages, traffic.store.actions), (0, 0), 0, 1 << 20)
    assert stretch is not None
    return traffic.store, slave, b"".join(follower.pack_runs(stretch.runs)), stretch.last


def test_a_stretch_with_a_flipped_bit_anywhere_is_refused_whole(tmp_path: Path) -> None:
    _, slave, data, last = stretch_bytes(tmp_path)
    random = Random(1)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << random.randrange(8)
        with pytest.raises(CorruptBatch):
            follower.check_stretch(follower.unpack_runs(memoryview(flipped)), 0, last)
    runs = follower.unpack_runs(memoryview(data))
    follower.take(slave, runs, follower.check_stretch(runs, 0, last))
    assert slave.index == last


def test_a_stretch_that_was_cut_anywhere_is_refused_whole(tmp_path: Path) -> None:
    _, _, data, last = stretch_bytes(tmp_path)
    for end in range(len(data)):
        with pytest.raises(CorruptBatch):
            follower.check_stretch(follower.unpack_runs(memoryview(data)[:end]), 0, last)


def test_an_entry_of_one_log_is_not_taken_into_the_other(tmp_path: Path) -> None:
    _, _, data, last = stretch_bytes(tmp_path)
    runs = follower.unpack_runs(data)
    with pytest.raises(CorruptBatch, match="does not belong"):
        follower.check_stretch([WriteRun(1 - run.log, *run[1:]) for run in runs], 0, last)


def test_a_run_that_does_not_lie_where_the_log_ends_leaves_the_slave_untouched(
    tmp_path: Path,
) -> None:
    master, slave, data, last = stretch_bytes(tmp_path)
    runs = follower.unpack_runs(data)
    found = follower.check_stretch(runs, 0, last)
    before = files(slave.folder)
    bad = runs[-1]
    for wrong in (bad._replace(position=bad.position + 8), bad._replace(base=bad.base + 8)):
        with pytest.raises(follower.Diverged):
            follower.take(slave, [*runs[:-1], wrong], found)
        assert files(slave.folder) == before
        assert slave.index == 0
    follower.take(slave, runs, found)
    assert files(slave.folder) == files(master.folder)


def test_a_stretch_says_which_indexes_it_holds(tmp_path: Path) -> None:
    _, _, data, last = stretch_bytes(tmp_path)
    runs = follower.unpack_runs(data)
    for after, end in ((1, last), (0, last + 1), (0, last - 1), (last, last)):
        with pytest.raises(CorruptBatch):
            follower.check_stretch(runs, after, end)


def test_an_empty_run_is_refused() -> None:
    with pytest.raises(CorruptBatch):
        follower.unpack_runs(b"".join(follower.pack_runs([WriteRun(0, 0, 0, 0, ())])))


# --- checkpoints ----------------------------------------------------------------------------------


def test_segments_hold_whole_entries_only(tmp_path: Path) -> None:
    traffic = master_at(tmp_path / "m", steps=100)
    for segments in (traffic.store.messages, traffic.store.actions):
        ends = {entry.end for entry in walk(segments, 0)}
        assert set(segments.bases[1:]) <= ends
        assert segments.end in ends
    assert ENVELOPE_BYTES == 64
    assert traffic.store.config.segment_bytes == SMALL.segment_bytes
