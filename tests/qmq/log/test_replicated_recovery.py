"""Opening a replica's store after damage: the rest is a prefix by index, and the store reports
whether acknowledged entries may be missing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest
from replica_support import (
    SMALL,
    Traffic,
    checkpoint,
    entries_of_index,
    feed_all,
    files,
    flush,
    master_at,
    opened,
    replay,
    small,
    state_of,
)
from support import ManualClock
from support.retention import begin_retention, end_retention

from qmq.errors import LogDamaged
from qmq.log.checkpoint import close_store
from qmq.log.envelopes import walk
from qmq.log.follower import start_over
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.model import SubjectConfig
from qmq.wire.batch import parse_envelope

LARGE = LogConfig(producer_expiry_ms=1 << 40)
"""One segment each, so that any of the last bytes may be torn."""


def ends(folder: Path, config: LogConfig = SMALL) -> dict[int, tuple[int, int]]:
    """For each index of a closed store, where its entry ends: (log, end)."""
    store = open_store(folder, config, ManualClock(), is_replicated=True)
    found = {
        entry.envelope.index: (log, entry.end)
        for log, segments in enumerate((store.messages, store.actions))
        for entry in walk(segments, segments.start)
    }
    store.close()
    return found


def last_segment(folder: Path, log: int) -> Path:
    return max((folder / ("message", "action")[log]).glob("*.log"))


def test_reopened_at_every_index_it_has_exactly_that_indexs_state(tmp_path: Path) -> None:
    traffic = master_at(tmp_path / "m", steps=50)
    traffic.store.close()
    whole = files(tmp_path / "m")
    for until in range(traffic.store.index + 1):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "m", copy)
        store = opened(copy, until=until)
        assert store.index == until
        assert state_of(store) == traffic.history.at(until)
        assert not store.lost_tail
        store.close()
        left = files(copy)
        assert all(whole[name].startswith(data) for name, data in left.items())
        assert not any(
            data == b"" for name, data in left.items() if not name.endswith(f"{0:020d}.log")
        )
        store = opened(copy)
        assert (store.index, store.lost_tail) == (until, False)
        assert entries_of_index(store).keys() == state_of(store).keys()
        store.close()
        shutil.rmtree(copy)


@pytest.mark.parametrize("log", [0, 1])
def test_a_crash_at_any_byte_leaves_a_prefix_by_index_and_reports_the_loss(
    tmp_path: Path, log: int
) -> None:
    """One log is cut at every byte; the other kept everything, as after a power cut, or ends where
    the cut one does, as after a kill.
    """
    traffic = master_at(tmp_path / "m", steps=14, config=LARGE)
    traffic.store.close()
    places = ends(tmp_path / "m", LARGE)
    size = last_segment(tmp_path / "m", log).stat().st_size
    for end in range(size):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "m", copy)
        with last_segment(copy, log).open("r+b") as file:
            file.truncate(end)
        missing = min(
            (index for index, place in places.items() if place[0] == log and place[1] > end),
            default=len(places) + 1,
        )
        store = opened(copy, LARGE)
        assert store.index == missing - 1
        assert state_of(store) == traffic.history.at(missing - 1)
        assert store.lost_tail == any(
            index > missing and place[0] != log for index, place in places.items()
        )
        store.close()
        shutil.rmtree(copy)


def test_a_killed_process_lost_nothing_wherever_it_was_killed(tmp_path: Path) -> None:
    """Both logs are written in the order of the index, so they hold a prefix, and a part of the
    next entry.
    """
    traffic = master_at(tmp_path / "m", steps=14, config=LARGE)
    traffic.store.close()
    places = ends(tmp_path / "m", LARGE)
    done = [0, 0]
    for index in sorted(places):
        log, end = places[index]
        for size in sorted(
            {
                done[log],
                done[log] + 1,
                done[log] + 63,
                done[log] + 64,
                (done[log] + end) // 2,
                end - 1,
            }
        ):
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "m", copy)
            for each in (0, 1):
                with last_segment(copy, each).open("r+b") as file:
                    file.truncate(size if each == log else done[each])
            store = opened(copy, LARGE)
            assert (store.index, store.lost_tail) == (index - 1, False)
            assert state_of(store) == traffic.history.at(index - 1)
            store.close()
            shutil.rmtree(copy)
        done[log] = end


@pytest.mark.parametrize("part", ["envelope", "region"])
def test_a_flipped_bit_in_the_last_entry_is_damage_and_not_a_torn_tail(
    tmp_path: Path, part: str
) -> None:
    """The entry was complete once and may have been acknowledged, so this replica must not vote
    before it has caught up.
    """
    traffic = master_at(tmp_path / "m", steps=14, config=LARGE)
    traffic.store.close()
    log, end = ends(tmp_path / "m", LARGE)[traffic.store.index]
    path = last_segment(tmp_path / "m", log)
    data = bytearray(path.read_bytes())
    begin = max(
        [
            each
            for _, (number, each) in ends(tmp_path / "m", LARGE).items()
            if number == log and each < end
        ],
        default=0,
    )
    data[begin + 20 if part == "envelope" else end - 1] ^= 4
    path.write_bytes(data)
    store = opened(tmp_path / "m", LARGE)
    assert (store.index, store.lost_tail) == (traffic.store.index - 1, True)
    store.close()


def test_zeros_that_a_power_cut_left_of_what_was_never_flushed_are_a_torn_tail(
    tmp_path: Path,
) -> None:
    traffic = master_at(tmp_path / "m", steps=14, config=LARGE)
    traffic.store.close()
    with last_segment(tmp_path / "m", 0).open("ab") as file:
        file.write(bytes(5000))
    store = opened(tmp_path / "m", LARGE)
    assert (store.index, store.lost_tail) == (traffic.store.index, False)
    assert state_of(store) == state_of(traffic.store)
    store.close()


# --- what was flushed -----------------------------------------------------------------------------


@pytest.mark.parametrize("log", [0, 1])
def test_damage_before_the_last_segment_is_refused_with_its_place_and_nothing_is_cut(
    tmp_path: Path, log: int
) -> None:
    traffic = master_at(tmp_path / "m", steps=60)
    traffic.store.close()
    path = sorted((tmp_path / "m" / ("message", "action")[log]).glob("*.log"))[1]
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    path.write_bytes(flipped)
    before = files(tmp_path / "m")
    with pytest.raises(LogDamaged, match="Nothing was cut") as found:
        opened(tmp_path / "m")
    assert found.value.log == log
    assert found.value.position in begins_of(data, int(path.stem))
    assert files(tmp_path / "m") == before


def begins_of(data: bytes, base: int) -> list[int]:
    """The start of each entry of a segment."""
    found, at = [], 0
    while at < len(data):
        found.append(base + at)
        at += parse_envelope(data, at).total_bytes
    return found


def test_a_lost_consume_log_over_a_damaged_log_says_where_the_damage_is(tmp_path: Path) -> None:
    """The checkpoint spares the replay, but the consume log is created again from everything:
    damage there can be mended.
    """
    traffic = master_at(tmp_path / "m", steps=400)
    store = traffic.store
    store.commit(store.index)
    close_store(store)
    assert any((tmp_path / "m" / "consume").iterdir())
    shutil.rmtree(tmp_path / "m" / "consume")
    path = sorted((tmp_path / "m" / "message").glob("*.log"))[2]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogDamaged) as found:
        opened(tmp_path / "m")
    assert (found.value.log, found.value.position) == (0, int(path.stem))


@pytest.mark.parametrize("log", [0, 1])
def test_damage_at_the_logs_very_begin_is_found_when_it_is_opened(tmp_path: Path, log: int) -> None:
    """Other replicas would be served from there, so the damage must be known."""
    config, clock = small(retention_ms=1000), ManualClock()
    traffic = master_at(tmp_path / "m", steps=80, config=config, clock=clock)
    store = traffic.store
    clock.now_ms += 2000
    traffic.run(80)
    store.commit(store.index)
    gone = begin_retention(store, SubjectConfig)
    checkpoint(store)
    end_retention(gone)
    start = (store.messages.start, store.actions.start)[log]
    assert start > 0
    store.close()
    path = min((tmp_path / "m" / ("message", "action")[log]).glob("*.log"))
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogDamaged) as found:
        opened(tmp_path / "m", config)
    assert (found.value.log, found.value.position) == (log, start)


# --- several openings -----------------------------------------------------------------------------


def test_crash_after_crash_the_slave_stays_a_prefix_and_catches_up(tmp_path: Path) -> None:
    random = Random(4)
    traffic = master_at(tmp_path / "m", steps=10)
    slave = opened(tmp_path / "s")
    for _ in range(25):
        traffic.run(6)
        feed_all(
            traffic.store, slave, random.choice((1, 300, 5000)), from_files=random.random() < 0.5
        )
        slave.commit(random.randrange(slave.committed_index, slave.index + 1))
        if random.random() < 0.3:
            checkpoint(slave)
        if random.random() < 0.3:
            flush(slave)
        slave.close()
        path = last_segment(tmp_path / "s", random.randrange(2))
        least = 0 if not list((tmp_path / "s").glob("checkpoint/*")) else path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(max(path.stat().st_size - random.randrange(400), least, 0))
        slave = opened(tmp_path / "s")
        assert state_of(slave) == traffic.history.at(slave.index)
    feed_all(traffic.store, slave)
    assert files(tmp_path / "s") == files(tmp_path / "m")
    slave.close()
    assert replay(slave) == state_of(traffic.store)


def test_a_folder_that_starts_over_is_empty_and_begins_at_its_position(tmp_path: Path) -> None:
    traffic = master_at(tmp_path / "m", steps=50)
    traffic.store.commit(traffic.store.index)
    close_store(traffic.store)
    start_over(tmp_path / "m", (800, 160))
    store = opened(tmp_path / "m")
    assert (store.index, store.messages.start, store.actions.end, store.queues) == (0, 800, 160, {})
    assert store.start() == (0, 0)
    store.begin_at(77, 3)
    assert store.start() == (77, 3)
    assert (store.index, store.committed_index, store.epoch) == (77, 77, 3)
    again = Traffic(store, Random(1))
    store.append_barrier(4)
    again.run(3)
    assert store.epochs == [(3, 77), (4, 78)]
    store.close()
