"""The committed part of a folder: torn, missing or early marks; replicas whose newest entries are
not committed yet.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from file_support import (
    GROUP,
    Traffic,
    batch,
    checkpoint,
    folder_in_memory,
    mark,
    opened,
    rows_of,
    small_log,
)
from support import ManualClock, eventually, node_config, running

import qmq
from qmq.columns.files import folders
from qmq.columns.files.folders import find_folders
from qmq.columns.files.index import FolderIndex
from qmq.columns.model import QueueKey
from qmq.errors import InvalidArgument, LogDamaged, NotConnected
from qmq.log import commit_mark, follower
from qmq.log.recovery import open_store
from qmq.log.segment_index import SegmentIndex
from qmq.log.segments import segment_name
from qmq.log.store import Store

A = QueueKey("a", 0, GROUP)


@pytest.fixture
def data() -> Iterator[Path]:
    with folder_in_memory() as found:
        yield found


@pytest.fixture
def traffic(data: Path) -> Iterator[Traffic]:
    found = Traffic(data, Random(3))
    for _ in range(20):
        found.send("a", count=2)
    yield found
    found.store.close()


def end_of(folder: Path, **options: str) -> int:
    return opened(folder, **options).topology(["a"]).queues[A].end


def test_a_folder_whose_old_messages_are_in_an_object_store_is_refused(traffic: Traffic) -> None:
    while len(traffic.store.messages.bases) < 3:
        traffic.send("a", count=5)
    mark(traffic.store)
    log, end = traffic.store.messages, traffic.end("a")
    base, following = log.bases[:2]
    index = SegmentIndex(base, following - base, following - base, (0,), b"")
    log.write_index(index)
    assert end_of(traffic.folder) == end, "its file is still there"
    (log.folder / segment_name(base)).unlink()
    with pytest.raises(InvalidArgument, match=r"qmq\.servers"):
        end_of(traffic.folder)


# --- marks ----------------------------------------------------------------------------------------


def test_torn_mark_is_read_again(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    mark(traffic.store)
    path = traffic.folder / commit_mark.FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:30] + bytes(34))
    monkeypatch.setattr(folders.time, "sleep", lambda _: path.write_bytes(whole))
    assert end_of(traffic.folder) == 40


def test_mark_that_stays_torn_counts_as_none(traffic: Traffic) -> None:
    checkpoint(traffic.store)
    traffic.send("a", count=2)
    mark(traffic.store)
    path = traffic.folder / commit_mark.FILE
    path.write_bytes(path.read_bytes()[:30] + bytes(34))
    assert end_of(traffic.folder) == 40


def test_without_a_mark_the_newest_checkpoint_counts(traffic: Traffic) -> None:
    checkpoint(traffic.store)
    traffic.send("a", count=2)
    assert end_of(traffic.folder) == 40


def test_checkpoint_that_knows_more_than_the_mark_counts(traffic: Traffic) -> None:
    mark(traffic.store)
    traffic.send("a", count=2)
    checkpoint(traffic.store)
    assert end_of(traffic.folder) == 42
    (folder,) = find_folders([str(traffic.folder)])
    assert FolderIndex(folder).peek().messages == traffic.store.messages.end


def test_folder_that_does_not_say_what_is_committed_is_refused(traffic: Traffic) -> None:
    with pytest.raises(
        InvalidArgument, match=r"neither committed.qmm nor a checkpoint.*qmq.committed to 'all'"
    ):
        end_of(traffic.folder)
    assert end_of(traffic.folder, committed="all") == 40


def test_store_that_never_got_anything_is_empty_without_a_mark(data: Path) -> None:
    store = open_store(data / GROUP, small_log(), ManualClock())
    assert opened(data / GROUP).subjects() == []
    store.close()


def test_option_that_says_something_else_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'all' or absent, not 'most'"):
        opened("/nowhere", committed="most")


@pytest.mark.parametrize("left", [1, 20, 64, 70, 120])
def test_torn_end_does_not_count_when_everything_whole_does(traffic: Traffic, left: int) -> None:
    shutil.copytree(traffic.folder / "message", traffic.data / "copy" / GROUP)
    copy = traffic.data / "copy" / GROUP
    newest = max(copy.iterdir())
    last = traffic.store.queues[b"a", 0].index.entry(traffic.store.queues[b"a", 0].index.count - 1)
    with newest.open("r+b") as file:
        file.truncate(last.position - int(newest.stem) + left)
    assert end_of(copy, committed="all") == 38
    with newest.open("r+b") as file:
        file.truncate(last.position - int(newest.stem))
        file.truncate(last.position - int(newest.stem) + 500)  # zeros, as a power cut leaves them
    assert end_of(copy, committed="all") == 38


def test_mark_that_names_more_than_there_is_is_refused(traffic: Traffic) -> None:
    """This happens after a power failure, before the broker is started again, or if segments were
    copied before the mark.
    """
    mark(traffic.store)
    newest = max((traffic.folder / "message").iterdir())
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size - 8)
    with pytest.raises(
        LogDamaged, match=f"{newest.name} has .* bytes, and the log is committed up to byte"
    ):
        end_of(traffic.folder)


def test_mark_that_ends_within_an_entry_is_refused(traffic: Traffic) -> None:
    found = commit_mark.note(traffic.store)
    commit_mark.write(
        traffic.store.disk,
        traffic.folder,
        found._replace(message_position=found.message_position - 8),
    )
    with pytest.raises(LogDamaged, match="the commit mark is another log's"):
        end_of(traffic.folder)


def test_opening_a_store_takes_back_a_mark_that_leads_and_what_comes_then_is_read(
    traffic: Traffic,
) -> None:
    """After a power failure that lost the log's end, but not the mark, the broker writes other
    bytes at the mark's position.
    """
    mark(traffic.store)
    log = opened(traffic.folder)
    log.topology(["a"])
    last = traffic.store.queues[b"a", 0].index.entry(traffic.store.queues[b"a", 0].index.count - 1)
    traffic.store.messages.truncate(last.position)
    traffic.reopen()
    assert not (traffic.folder / commit_mark.FILE).exists()
    queue = traffic.store.open_queue("a", 0)
    for number in range(100, 110):
        traffic.store.append([batch(queue, [b"another" * 20], number)])
    traffic.store.commit(traffic.store.index)
    mark(traffic.store)
    for each in (log, opened(traffic.folder)):
        end = each.topology(["a"]).queues[A].end
        assert end == 48
        assert rows_of(each.pieces(A, 36, end, 300))[2:] == [
            (at, b"another" * 20) for at in range(38, 48)
        ]


# --- replicas -------------------------------------------------------------------------------------


def replica(folder: Path) -> Store:
    store = open_store(folder, small_log(), ManualClock(), is_replicated=True)
    store.append_barrier(1)
    store.commit(store.index)
    return store


def test_uncommitted_entries_of_a_master_are_not_seen_until_they_are_committed(data: Path) -> None:
    store = replica(data / GROUP)
    marker = commit_mark.Marker(store)
    queue = store.open_queue("a", 0)
    log = opened(data / GROUP)
    now_ms, number = 0, 0
    for committed in (3, 7, 7, 20):
        while number < 20:
            number += 1
            store.append([batch(queue, [b"%d" % number], number)])
            marker.tick(now_ms := now_ms + 50)
        store.commit(committed + 1)
        for _ in range(3):
            marker.tick(now_ms := now_ms + 1_000)
        shown = log.topology(["a"]).queues[A].end
        assert shown <= committed  # it may lag: nobody noted where 3 and 7 end
        assert rows_of(log.pieces(A, 0, shown, 200)) == [
            (at, b"%d" % (at + 1)) for at in range(shown)
        ]
    assert log.topology(["a"]).queues[A].end == 20
    assert rows_of(log.pieces(A, 0, 20, 200)) == [(at, b"%d" % (at + 1)) for at in range(20)]
    store.close()


def test_entries_that_another_master_cut_are_never_seen(data: Path) -> None:
    store = replica(data / GROUP)
    marker = commit_mark.Marker(store)
    queue = store.open_queue("a", 0)
    store.append([batch(queue, [b"kept"], 1)])
    store.commit(store.index)
    marker.tick(0)
    store.append([batch(queue, [b"cut"], 2)])
    marker.tick(2_000)  # noted, not committed
    kept = store.index - 1
    store.close()
    store = open_store(data / GROUP, small_log(), ManualClock(), is_replicated=True, until=kept)
    marker = commit_mark.Marker(store)
    store.append_barrier(2)
    store.append([batch(store.open_queue("a", 0), [b"instead, and longer"], 3)])
    marker.tick(4_000)
    log = opened(data / GROUP)
    assert log.topology(["a"]).queues[A].end == 1
    store.commit(store.index)
    marker.tick(6_000)
    assert rows_of(log.pieces(A, 0, log.topology(["a"]).queues[A].end, 200)) == [
        (0, b"kept"),
        (1, b"instead, and longer"),
    ]
    store.close()


def test_of_two_replicas_the_one_that_is_committed_further_counts_once(data: Path) -> None:
    for name in ("one", "two"):
        (data / name).mkdir()
        (data / name / "replica.json").write_text(
            '{"content": "{\\"group\\": \\"g1\\"}", "crc": 0}'
        )
    stores = [replica(data / name / "broker") for name in ("one", "two")]
    log = opened(data / "*")
    for step in range(1, 7):
        store = stores[step % 2]
        while store.queue("a", 0) is None or store.queues[b"a", 0].next_sequence < step:
            number = store.open_queue("a", 0).next_sequence
            store.append([batch(store.open_queue("a", 0), [b"%d" % number], number)])
        store.commit(store.index)
        mark(store)
        topology = log.topology(["a"])
        assert list(topology.queues) == [A]
        assert rows_of(log.pieces(A, 0, topology.queues[A].end, 100)) == [
            (at, b"%d" % at) for at in range(step)
        ]
    for store in stores:
        store.close()


def test_broker_group_that_comes_later_is_found_and_one_that_goes_is_missed(data: Path) -> None:
    logs = opened(data / "g*")
    for number, name in enumerate(("g1", "g2"), 1):
        store = replica(data / name)
        store.append([batch(store.open_queue("a", 0), [b"1"], 1)])
        store.commit(store.index)
        mark(store)
        store.close()
        assert [key.broker_group for key in logs.topology(["a"]).queues] == ["g1", "g2"][:number]
    shutil.rmtree(data / "g1")
    with pytest.raises(NotConnected, match="g1/message does not exist"):
        logs.topology(["a"])


def test_a_log_that_started_over_in_its_middle_is_read_from_there(data: Path) -> None:
    """A replica that returns after retention deleted what it needs gets the log from a later
    segment on.
    """
    donor = replica(data / "donor" / GROUP)
    for number in range(80):
        donor.append([batch(donor.open_queue("a", 0), [b"%d" % number * 9], number)])
    donor.commit(donor.index)
    folder = data / GROUP
    store = replica(folder)
    mark(store)
    log = opened(folder)
    assert log.subjects() == []
    store.close()
    base = donor.messages.bases[2]
    follower.start_over(folder, (base, 0))
    assert not (folder / commit_mark.FILE).exists()
    for each in donor.messages.bases[2:]:
        shutil.copy(donor.folder / "message" / f"{each:020d}.log", folder / "message")
    commit_mark.write(donor.disk, folder, commit_mark.note(donor))
    found = log.topology(["a"]).queues[A]
    assert 0 < found.start < found.end == 80
    assert rows_of(log.pieces(A, found.start, 80, 300)) == [
        (at, b"%d" % at * 9) for at in range(found.start, 80)
    ]
    donor.close()


# --- a broker at work -----------------------------------------------------------------------------


async def test_files_show_acknowledged_messages_within_the_interval_and_all_after_a_stop(
    data: Path,
) -> None:
    config = node_config(data)
    async with running(config) as node, qmq.connect(node.address) as mq:
        for number in range(50):
            await mq.send("a", b"%d" % number)
        log = opened(data)
        await eventually(
            lambda: (
                "a" in _subjects(log) and next(iter(log.topology(["a"]).queues.values())).end == 50
            )
        )
        for number in range(50, 60):
            await mq.send("a", b"%d" % number)
    (key,) = log.topology(["a"]).queues
    assert key == QueueKey("a", 0, config.broker.name)
    for each in (log, opened(data), opened(data / "broker"), opened(data / "broker" / "message")):
        assert each.topology(["a"]).queues[key].end == 60
        assert rows_of(each.pieces(key, 0, 60, 1_000)) == [(at, b"%d" % at) for at in range(60)]


def _subjects(log: object) -> list[str]:
    try:
        return log.subjects()  # type: ignore[attr-defined,no-any-return]
    except InvalidArgument:  # before its first mark
        return []
