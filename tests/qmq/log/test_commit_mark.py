"""The commit mark may lag behind the store but is never ahead of it, for every event between two
writes of the mark.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from struct import unpack

import pytest
from google_crc32c import value as crc32c
from replica_support import SMALL, Traffic, checkpoint, feed_all, master_at, opened
from support import ManualClock, SmallDisk, intake

from qmq.log import commit_mark, follower
from qmq.log.checkpoint import close_store
from qmq.log.commit_mark import FILE, INTERVAL_MS, CommitMark, Marker
from qmq.log.envelopes import walk
from qmq.log.recovery import open_store
from qmq.log.store import Store

SOME = CommitMark(7, 3, 4096, 512, 1_700_000_000_000)


def mark_of(store: Store) -> CommitMark:
    found = commit_mark.read(store.folder)
    assert found is not None
    return found


def place_behind(store: Store, index: int) -> tuple[int, int]:
    """The position after the entries up to an index, from the logs themselves."""
    ends = [
        max(
            [
                segments.start,
                *[
                    each.end
                    for each in walk(segments, segments.start)
                    if each.envelope.index <= index
                ],
            ]
        )
        for segments in store.logs
    ]
    return ends[0], ends[1]


def check_lags(store: Store, committed: int) -> None:
    """The mark names only committed entries, and the exact end of the last one."""
    found = mark_of(store)
    assert found.index <= committed
    assert (found.message_position, found.action_position) == place_behind(store, found.index)
    assert found.epoch == store.epoch_at(found.index)


# --- the file -------------------------------------------------------------------------------------


def test_mark_is_as_its_format_says_and_comes_back_as_it_was() -> None:
    data = commit_mark.encode(SOME)
    magic, crc, version, reserved, index, epoch, messages, actions, time_ms, more = unpack(
        "<4sIIIqqqqqq", data
    )
    assert (magic, crc, version, reserved, more) == (b"QMM1", crc32c(data[8:]), 1, 0, 0)
    assert (index, epoch, messages, actions, time_ms) == SOME
    assert commit_mark.decode(data) == SOME


def test_a_mark_with_a_flipped_bit_or_cut_short_is_refused() -> None:
    data = commit_mark.encode(SOME)
    for at in range(len(data)):
        assert commit_mark.decode(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]) is None
        assert commit_mark.decode(data[:at]) is None


def test_torn_mark_is_read_again_until_it_is_whole(tmp_path: Path) -> None:
    path, pauses = tmp_path / FILE, []
    path.write_bytes(commit_mark.encode(SOME)[:40] + bytes(24))

    def pause() -> None:
        pauses.append(1)
        if len(pauses) == 3:
            path.write_bytes(commit_mark.encode(SOME))

    assert commit_mark.read(tmp_path, pause) == SOME
    assert len(pauses) == 3
    path.write_bytes(b"torn for good")
    assert commit_mark.read(tmp_path) is None
    path.unlink()
    assert commit_mark.read(tmp_path) is None


# --- while the broker works -----------------------------------------------------------------------


def alone(folder: Path, **options: object) -> Store:
    return open_store(folder, SMALL, ManualClock(), **options)  # type: ignore[arg-type]


def send(store: Store, number: int) -> None:
    store.append([intake(store.open_queue("a", 0), [b"%d" % number * 20], number=number)])


def test_mark_follows_the_commits_at_most_once_an_interval(tmp_path: Path) -> None:
    store = alone(tmp_path)
    marker = Marker(store)
    marker.tick(5)
    assert mark_of(store) == CommitMark(0, 0, 0, 0, store.clock.time_ms())
    for number in range(10):
        send(store, number)
        store.commit(store.index)
        marker.tick(6 + number)
    assert mark_of(store).index == 0
    marker.tick(5 + INTERVAL_MS)
    assert mark_of(store).index == store.index
    assert mark_of(store).message_position == store.messages.end
    (tmp_path / FILE).unlink()
    marker.tick(5 + 3 * INTERVAL_MS)
    assert not (tmp_path / FILE).exists()  # nothing moved
    store.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_masters_mark_names_only_committed_entries(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    traffic = master_at(tmp_path, seed=seed, steps=5)
    store, now_ms, committed = traffic.store, 0, 0
    marker = Marker(store)
    for _ in range(150):
        traffic.run(random.randrange(3))
        if random.random() < 0.4:
            committed = random.randrange(committed, store.index + 1)
            store.commit(committed)
        marker.tick(now_ms := now_ms + random.choice((50, 700)))
        if (tmp_path / FILE).exists():
            check_lags(store, committed)
    store.write_actions()
    store.commit(store.index)
    for _ in range(2):
        marker.tick(now_ms := now_ms + INTERVAL_MS)
    assert mark_of(store).index == store.index
    store.close()


@pytest.mark.parametrize("seed", range(10))
def test_a_slaves_mark_names_only_committed_entries(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    traffic = master_at(tmp_path / "master", seed=seed, steps=10)
    slave = opened(tmp_path / "slave")
    marker, now_ms, committed = Marker(slave), 0, 0
    for _ in range(60):
        traffic.run(3)
        if random.random() < 0.7:
            feed_all(traffic.store, slave)
        if random.random() < 0.4:
            committed = random.randrange(committed, slave.index + 1)
            slave.commit(committed)
        if random.random() < 0.2 and slave.pending:  # another master has less
            follower.truncate(slave, random.randrange(committed, slave.index + 1))
        marker.tick(now_ms := now_ms + 600)
        check_lags(slave, committed)
    traffic.store.close()
    slave.close()


def test_place_that_was_noted_before_a_cut_is_never_named(tmp_path: Path) -> None:
    store = master_at(tmp_path, steps=0).store
    store.commit(store.index)
    marker = Marker(store)
    end = store.messages.end
    send(store, 1)
    marker.tick(0)  # noted, not committed
    store.messages.truncate(end)
    store.index -= 1
    store.append([intake(store.open_queue("a", 0), [b"something longer" * 9], number=2)])
    store.commit(store.index)
    marker.tick(INTERVAL_MS)
    assert mark_of(store).index == store.index
    check_lags(store, store.index)
    store.close()


def test_full_disk_makes_the_mark_lag_and_nothing_else(tmp_path: Path) -> None:
    disk = SmallDisk(1 << 20)
    store = open_store(tmp_path, SMALL, ManualClock(), disk=disk)
    marker = Marker(store)
    send(store, 1)
    store.commit(store.index)
    disk.left = 10
    marker.tick(0)
    assert commit_mark.read(tmp_path) is None
    disk.left = 1 << 20
    marker.tick(50)
    assert mark_of(store).index == store.index
    store.close()


# --- at the end -----------------------------------------------------------------------------------


def test_clean_stop_leaves_a_mark_of_everything(tmp_path: Path) -> None:
    store = alone(tmp_path)
    send(store, 1)
    close_store(store)
    assert (mark_of(store).index, mark_of(store).message_position) == (
        store.index,
        store.messages.end,
    )


def test_replica_that_stops_with_uncommitted_entries_does_not_name_them(tmp_path: Path) -> None:
    store = master_at(tmp_path, steps=20).store
    store.write_actions()
    store.commit(store.index - 3)
    close_store(store)
    assert not (tmp_path / FILE).exists()


# --- opened again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_replicated", [True, False])
@pytest.mark.parametrize("log", [0, 1])
def test_mark_of_what_a_power_cut_took_is_removed_before_anything_is_appended(
    tmp_path: Path, is_replicated: bool, log: int
) -> None:
    store = opened(tmp_path) if is_replicated else alone(tmp_path)
    Traffic(store, Random(4)).run(60)
    store.write_actions()
    store.commit(store.index)
    Marker(store).tick(0)
    last = list(walk(store.logs[log], store.logs[log].start))[-1]
    store.logs[log].truncate(last.position)
    store.close()
    again = opened(tmp_path) if is_replicated else alone(tmp_path)
    assert not (tmp_path / FILE).exists()
    assert again.lost_tail  # committed entries are gone: this replica must not judge elections
    again.close()


@pytest.mark.parametrize("is_replicated", [True, False])
def test_mark_that_does_not_lead_stays_when_the_store_is_opened_again(
    tmp_path: Path, is_replicated: bool
) -> None:
    store = opened(tmp_path) if is_replicated else alone(tmp_path)
    traffic = Traffic(store, Random(4))
    traffic.run(60)
    store.write_actions()
    store.commit(store.index)
    Marker(store).tick(0)
    before = mark_of(store)
    traffic.run(10)
    store.close()
    again = opened(tmp_path) if is_replicated else alone(tmp_path)
    assert mark_of(again) == before
    assert not again.lost_tail
    check_lags(again, before.index)
    again.close()


def test_killed_replica_knows_what_its_mark_says_is_committed(tmp_path: Path) -> None:
    """Its checkpoint is older, and it must not cut these entries at a master that lacks them."""
    store = opened(tmp_path)
    traffic = Traffic(store, Random(4))
    traffic.run(20)
    store.write_actions()
    store.commit(store.index)
    checkpoint(store)
    traffic.run(40)
    store.write_actions()
    store.commit(store.index)
    Marker(store).tick(0)
    committed = store.index
    traffic.run(10)
    store.close()
    again = opened(tmp_path)
    assert again.index > committed
    assert again.committed_index == committed
    again.close()


def test_mark_of_entries_that_another_master_wrote_is_removed(tmp_path: Path) -> None:
    """The log has the index, but in another epoch: these are not the entries that the mark
    names.
    """
    store = master_at(tmp_path, steps=40).store
    store.write_actions()
    store.commit(store.index)
    Marker(store).tick(0)
    found = mark_of(store)
    commit_mark.write(store.disk, store.folder, found._replace(epoch=found.epoch + 1))
    store.close()
    again = opened(tmp_path)
    assert not (tmp_path / FILE).exists()
    assert again.lost_tail
    again.close()


def test_torn_mark_is_taken_away_when_the_store_is_opened(tmp_path: Path) -> None:
    alone(tmp_path).close()
    (tmp_path / FILE).write_bytes(b"QMM1")
    alone(tmp_path).close()
    assert not (tmp_path / FILE).exists()


def test_mark_without_the_logs_that_it_was_written_for_is_removed(tmp_path: Path) -> None:
    """The log's files were removed, and the folder was kept."""
    commit_mark.write(SmallDisk(1 << 20), tmp_path, SOME)
    alone(tmp_path).close()
    assert not (tmp_path / FILE).exists()


def test_a_log_that_starts_over_has_no_commit_mark(tmp_path: Path) -> None:
    store = master_at(tmp_path, steps=20).store
    store.write_actions()
    store.commit(store.index)
    checkpoint(store)
    Marker(store).tick(0)
    store.close()
    follower.start_over(tmp_path, (1 << 20, 1 << 16))
    assert not (tmp_path / FILE).exists()
    again = opened(tmp_path)
    again.begin_at(5_000, 3)
    Marker(again).tick(0)
    assert mark_of(again)[:4] == (5_000, 3, 1 << 20, 1 << 16)
    again.close()
