"""The committed log in files: the reader gets all sent messages although the broker changes the
files meanwhile.
"""

from __future__ import annotations

import json
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
    forget_old,
    mark,
    opened,
    read_all,
    rows_of,
)
from pyspark.serializers import CloudPickleSerializer
from qmq_ordering.routes import LpRange

from qmq.columns.files import reading
from qmq.columns.files.log import FileLog
from qmq.columns.model import ALL, QueueKey, ReadSelection
from qmq.errors import InvalidArgument, LogDamaged, MessagesExpired, NotConnected, UnknownSubject
from qmq.wire.batch_columns import BatchFlag, check_region


@pytest.fixture
def data() -> Iterator[Path]:
    with folder_in_memory() as found:
        yield found


def check_equal(traffic: Traffic, log: FileLog, random: Random) -> None:
    """Check that all kept messages are read once and in order, in pieces of any size."""
    subjects = sorted({subject for subject, _ in traffic.sent})
    topology = log.topology(subjects)
    size = random.choice((1, 200, 2_000, 1 << 30))
    for key, rows in read_all(log, topology, size).items():
        sent = traffic.sent[key.subject, key.partition]
        queue = topology.queues[key]
        stored = traffic.store.queues[key.subject.encode(), key.partition]
        assert (queue.start, queue.end, queue.last_append_ms) == (
            stored.start_sequence,
            sent[-1][0] + 1,
            stored.last_append_ms,
        )
        assert rows == [row for row in sent if row[0] >= queue.start]
        assert queue.stored_bytes >= sum(len(body) for _, body in rows)
    assert {(key.subject, key.partition) for key in topology.queues} == set(traffic.sent)


@pytest.mark.parametrize("seed", range(25))
def test_the_messages_read_equal_those_sent(
    data: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    monkeypatch.setattr(reading, "_POSITIONS_MAX", random.choice((0, 2, 1 << 20)))
    monkeypatch.setattr(reading, "_FILL_MIN", random.choice((0.0, 0.5)))
    traffic = Traffic(data, random)
    mark(traffic.store)
    log = opened(traffic.folder)
    for _ in range(60):
        for _ in range(random.randrange(12)):
            traffic.send()
        chance = random.random()
        if chance < 0.15:
            checkpoint(traffic.store)
        elif chance < 0.3:
            forget_old(traffic.store, random.choice((50, 500, 1_000)))
        elif chance < 0.4:
            traffic.reopen()
        mark(traffic.store)
        if traffic.sent and random.random() < 0.5:
            check_equal(traffic, log, random)
    mark(traffic.store)
    check_equal(traffic, log, random)
    check_equal(traffic, opened(traffic.folder), random)
    traffic.store.close()


def key(subject: str, partition: int = 0) -> QueueKey:
    return QueueKey(subject, partition, GROUP)


@pytest.fixture
def traffic(data: Path) -> Iterator[Traffic]:
    found = Traffic(data, Random(7))
    mark(found.store)
    yield found
    found.store.close()


def test_pieces_cover_everything_once_and_are_about_as_large_as_asked_for(traffic: Traffic) -> None:
    for _ in range(200):
        traffic.send("a", count=3)
        traffic.send("b", count=1)
    mark(traffic.store)
    log, end = opened(traffic.folder), traffic.end("a")
    pieces = log.pieces(key("a"), 1, end, 2_000)
    assert [pieces[0].first, pieces[-1].end] == [1, end]
    assert [each.end for each in pieces[:-1]] == [each.first for each in pieces[1:]]
    stored = log.topology(["a"]).queues[key("a")].stored_bytes
    assert stored / 2_000 <= len(pieces) <= stored / 1_500
    assert all(each.first % 3 == 0 for each in pieces[1:])  # with a batch
    assert log.pieces(key("a"), 5, 5, 100) == []
    assert [(each.first, each.end) for each in log.pieces(key("a"), 5, 6, 1)] == [(5, 6)]


def test_task_reads_a_piece_that_travelled_without_looking_at_anything_else(
    traffic: Traffic,
) -> None:
    for _ in range(40):
        traffic.send()
    checkpoint(traffic.store)
    mark(traffic.store)
    pieces = opened(traffic.folder).pieces(key("a"), 0, traffic.end("a"), 1_000)
    for name in ("checkpoint", "consume"):
        for path in (traffic.folder / name).iterdir():
            path.unlink()
    (traffic.folder / "committed.qmm").unlink()
    serializer = CloudPickleSerializer()
    sent = serializer.loads(serializer.dumps(pieces))
    assert rows_of(sent) == traffic.sent["a", 0]


def test_regions_stay_as_they_are_behind_the_next_batch_and_the_log_itself(
    traffic: Traffic,
) -> None:
    for _ in range(20):
        traffic.send("a", count=2)
    mark(traffic.store)
    log = opened(traffic.folder)
    found = [
        each
        for piece in log.pieces(key("a"), 0, 40, 500)
        for each in log.read(piece, ALL, skips_lost=False)
    ]
    log.close()
    for path in (traffic.folder / "message").iterdir():
        path.unlink()
    assert len(found) == 20
    for each in found:
        assert isinstance(each.region, memoryview)
        assert each.region.readonly
        check_region(bytes(each.region), each.envelope.region_crc)


def test_time_finds_the_first_message_stored_then_or_later(traffic: Traffic) -> None:
    times = []
    for _ in range(30):
        traffic.send("a", count=2)
        times.append(traffic.clock.now_ms)
        traffic.send("b")
    mark(traffic.store)
    log = opened(traffic.folder)
    for number, time_ms in enumerate(times):
        assert log.find_time(key("a"), time_ms) == 2 * number
        assert log.find_time(key("a"), time_ms - 1) == 2 * number
        assert log.find_time(key("a"), time_ms + 1) == 2 * number + 2
    assert log.find_time(key("a"), 0) == 0


# --- retention ------------------------------------------------------------------------------------


def test_expired_messages_are_reported_with_the_remaining_range_or_skipped(
    traffic: Traffic,
) -> None:
    for _ in range(60):
        traffic.send("a", count=2)
    mark(traffic.store)
    log, end = opened(traffic.folder), traffic.end("a")
    planned = log.pieces(key("a"), 0, end, 500)
    forget_old(traffic.store, 200)
    mark(traffic.store)
    left = traffic.store.queues[b"a", 0].start_sequence
    assert 0 < left < end
    with pytest.raises(MessagesExpired, match=r"a/0@g1: messages 0 to .*000.log is deleted"):
        rows_of(planned)
    skipped = rows_of(planned, skips_lost=True)
    assert 0 < len(skipped) < end
    assert skipped == traffic.sent["a", 0][-len(skipped) :]
    log.topology(["a"])
    again = log.pieces(key("a"), 0, end, 500)
    assert again[0].first == 0
    assert again[-1].end == end
    with pytest.raises(MessagesExpired, match=f"the oldest kept message is {left}"):
        rows_of(again)
    assert rows_of(again, skips_lost=True)[-1][0] == end - 1
    assert rows_of(log.pieces(key("a"), left, end, 500)) == traffic.sent["a", 0][left:]


def test_a_queue_with_only_expired_messages_begins_at_its_end(traffic: Traffic) -> None:
    for _ in range(50):
        traffic.send("a", count=2)
        traffic.send("b", count=2)
    for _ in range(2):
        traffic.clock.now_ms += 10_000
        for _ in range(60):
            traffic.send("b", count=2)
    forget_old(traffic.store, 5_000)
    mark(traffic.store)
    by_checkpoint = opened(traffic.folder).topology(["a", "b"])
    assert by_checkpoint.queues[key("a")].start == by_checkpoint.queues[key("a")].end == 100
    assert by_checkpoint.queues[key("a")].last_append_ms > 0
    for path in (traffic.folder / "checkpoint").iterdir():
        path.unlink()
    by_snapshot = opened(traffic.folder).topology(["a", "b"])
    assert by_snapshot.queues[key("a")].start == by_snapshot.queues[key("a")].end == 100
    assert by_snapshot.queues[key("b")].end == traffic.end("b")


def test_a_folder_that_an_executor_does_not_see_is_not_retention(traffic: Traffic) -> None:
    traffic.send("a")
    mark(traffic.store)
    (piece,) = opened(traffic.folder).pieces(key("a"), 0, 1, 100)
    traffic.folder.joinpath("message").rename(traffic.folder / "elsewhere")
    with pytest.raises(NotConnected, match="under the same names"):
        rows_of([piece], skips_lost=True)


# --- what is left out -----------------------------------------------------------------------------


def append(
    traffic: Traffic, subject: str, bodies: list[bytes], *, partition: int = 0, **columns: object
) -> None:
    traffic.number += 1
    queue = traffic.store.open_queue(subject, partition)
    traffic.store.append([batch(queue, bodies, traffic.number, **columns)])  # type: ignore[arg-type]
    traffic.store.commit(traffic.store.index)


@pytest.mark.parametrize("is_walked", [True, False])
def test_only_batches_without_the_wanted_tags_are_left_out(
    traffic: Traffic, is_walked: bool
) -> None:
    append(traffic, "a", [b"none"])
    append(traffic, "a", [b"red"], tags=[("red",)])
    append(traffic, "a", [b"green", b"blue"], tags=[("green",), ("blue",)])
    append(traffic, "a", [b"both"], tags=[("red", "blue")])
    if not is_walked:
        checkpoint(traffic.store)
    mark(traffic.store)
    pieces = opened(traffic.folder).pieces(key("a"), 0, 5, 1 << 20)

    def bodies(**selection: tuple[str, ...]) -> list[bytes]:
        return [body for _, body in rows_of(pieces, ReadSelection(**selection))]

    assert bodies(tags_any=("red",)) == [b"red", b"both"]
    assert bodies(tags_any=("green", "nobody")) == [b"green", b"blue"]
    assert bodies(tags_all=("red", "blue")) == [b"both"]
    assert bodies(tags_all=("blue",), tags_any=("green",)) == [b"green", b"blue"]
    assert bodies(tags_any=("nobody",)) == []


def test_batches_of_other_logical_partitions_and_without_keys_are_left_out(
    traffic: Traffic,
) -> None:
    append(traffic, "o", [b"low", b"mid"], partition=1, keys=[b"k", b"l"], lps=[3, 500])
    append(traffic, "o", [b"high"], partition=1, keys=[b"m"], lps=[1023])
    append(traffic, "o", [b"keyless"], partition=1)
    mark(traffic.store)
    (piece,) = opened(traffic.folder).pieces(key("o", 1), 0, 4, 1 << 20)
    object.__setattr__(piece, "lps", (LpRange(4, 10), LpRange(500, 501)))
    assert [body for _, body in rows_of([piece])] == [b"low", b"mid", b"keyless"]
    object.__setattr__(piece, "lps", ())
    assert [body for _, body in rows_of([piece], ReadSelection(key_from=b"a"))] == [
        b"low",
        b"mid",
        b"high",
    ]


def test_directed_batches_are_left_out_unless_they_are_wanted(traffic: Traffic) -> None:
    append(traffic, "a", [b"for all"])
    append(
        traffic,
        "a",
        [b"for billing"],
        flags=BatchFlag.DIRECTED,
        headers=[{"qmq-group": b"billing"}],
    )
    append(traffic, "a", [b"for all too"])
    mark(traffic.store)
    pieces = opened(traffic.folder).pieces(key("a"), 0, 3, 1)
    assert [body for _, body in rows_of(pieces)] == [b"for all", b"for all too"]
    assert [body for _, body in rows_of(pieces, ReadSelection(with_directed=True))] == [
        b"for all",
        b"for billing",
        b"for all too",
    ]


@pytest.mark.parametrize("is_walked", [True, False])
def test_sealed_partition_ends_at_its_command_message_which_is_not_given(
    traffic: Traffic, is_walked: bool
) -> None:
    append(traffic, "o", [b"one", b"two"], partition=1)
    mark(traffic.store)
    log = opened(traffic.folder)
    assert not log.topology(["o"]).queues[key("o", 1)].is_sealed
    traffic.store.append_command(traffic.store.queues[b"o", 1], "change", 2)
    append(traffic, "o", [b"three"], partition=2)
    traffic.store.commit(traffic.store.index)
    if not is_walked:
        checkpoint(traffic.store)
    mark(traffic.store)
    for each in (log, opened(traffic.folder)):
        found = each.topology(["o"]).queues
        assert (found[key("o", 1)].end, found[key("o", 1)].is_sealed) == (2, True)
        assert (found[key("o", 2)].end, found[key("o", 2)].is_sealed) == (1, False)
        assert rows_of(each.pieces(key("o", 1), 0, 2, 100)) == [(0, b"one"), (1, b"two")]
        assert each.find_time(key("o", 1), 1 << 60) == 2
        # the same bytes, too: the command message does not count
        assert found == log.topology(["o"]).queues
    with pytest.raises(LogDamaged, match="messages up to 2 are needed"):
        log.pieces(key("o", 1), 0, 3, 100)


def test_unknown_subject_and_queue_say_what_there_is(traffic: Traffic) -> None:
    traffic.send("a")
    mark(traffic.store)
    log = opened(traffic.folder)
    with pytest.raises(UnknownSubject, match="subject 'orders': subjects there: a"):
        log.topology(["a", "orders"])
    with pytest.raises(UnknownSubject, match="orders/1@g1"):
        log.pieces(key("orders", 1), 0, 10, 100)
    with pytest.raises(UnknownSubject, match="a/0@elsewhere"):
        log.find_time(QueueKey("a", 0, "elsewhere"), 0)


def test_routes_come_from_the_exported_file_as_it_is_now(traffic: Traffic, data: Path) -> None:
    append(traffic, "o", [b"one"], partition=1)
    append(traffic, "a", [b"two"])
    mark(traffic.store)
    assert opened(traffic.folder).topology(["a", "o"]).routes == {}
    path = data / "routes.json"
    log = opened(traffic.folder, routes=str(path))
    for version in (1, 2):
        path.write_text(exported("o", version))
        routes = log.topology(["a", "o"]).routes
        assert list(routes) == ["o"]
        assert routes["o"].version == version
    with pytest.raises(InvalidArgument, match="route export"):
        opened(traffic.folder, routes=str(data / "nowhere")).topology(["o"])


def exported(subject: str, version: int) -> str:
    partition = {
        "number": 1,
        "first_lp": 0,
        "end_lp": 8,
        "broker_group": GROUP,
        "version": 1,
        "sources": [],
    }
    found = {
        "subject": subject,
        "order": "strict",
        "logical_partitions": 8,
        "version": version,
        "partitions": [partition],
        "sealed_at": {},
    }
    return json.dumps({"format": "qmq-routes", "version": 1, "time_ms": 0, "subjects": [found]})
