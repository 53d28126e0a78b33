"""The committed log as brokers serve it: topology, routes and ends, pieces, and reading while
masters change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.serializers import CPickleSerializer
from qmq_ordering.routes import LpRange
from support.clusters import REPLICATED, ServerCluster, bodies, cluster, read_all

import qmq
from qmq import limits
from qmq.columns.model import QueueKey, QueuePiece, ReadSelection, Routes, SourceBatch, SourceQueue
from qmq.columns.options import Choice
from qmq.columns.reading import topology_of
from qmq.columns.servers import reading
from qmq.columns.servers.log import ServerAddress, ServerLog
from qmq.errors import InvalidArgument, LogDamaged, MessagesExpired, NotConnected, UnknownSubject
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire.batch import encode, parse_envelope, place
from qmq.wire.batch_columns import Columns

LPS = 16


def key(partition: int, group: str, subject: str = "s") -> QueueKey:
    return QueueKey(subject, partition, group)


def opened(it: ServerCluster, retry_ms: int = 20_000) -> ServerLog:
    return ServerAddress(it.servers, retry_ms).open()


def everything(
    log: ServerLog, selection: ReadSelection | None = None
) -> dict[QueueKey, list[SourceBatch]]:
    """All batches of the subject by queue, with the batches of each piece once."""
    found = {}
    for each in log.topology(["s"]).queues.values():
        found[each.key] = read_all(log, log.pieces(each.key, each.start, each.end, 4096), selection)
    return found


@pytest.fixture(autouse=True)
def small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a piece need many requests."""
    monkeypatch.setattr(reading, "FETCH_BYTES", 2048)


# --- topology -------------------------------------------------------------------------------------


async def test_an_unordered_subject_is_read_from_every_broker_group_that_ever_had_it(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1", "g2")))
        await mq.send_many("s", [b"a%d" % n for n in range(3000)])
        await mq.metadata.place_subject("s", ["g3"])
        await mq.close()
        async with qmq.connect(it.servers) as later:
            await later.send_many("s", [b"b%d" % n for n in range(500)])
        with closing(opened(it)) as log:
            topology = await asyncio.to_thread(log.topology, ["s"])
            assert sorted(topology.queues) == [key(0, "g1"), key(0, "g2"), key(0, "g3")]
            assert topology.routes == {}
            assert sum(queue.end for queue in topology.queues.values()) == 3500
            assert topology.queues[key(0, "g3")].end == 500
            assert topology.queues[key(0, "g3")].stored_bytes > 0
            assert topology.queues[key(0, "g3")].last_append_ms > 0
            found = await asyncio.to_thread(everything, log)
            assert sorted(
                bodies([batch for each in found.values() for batch in set_of(each)])
            ) == sorted([b"a%d" % n for n in range(3000)] + [b"b%d" % n for n in range(500)])
            assert await asyncio.to_thread(log.subjects) == ["s"]


async def test_a_pattern_leaves_out_a_subject_that_was_deleted_since_it_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        for subject in ("a", "gone", "s"):
            await mq.metadata.create_subject(SubjectConfig(subject, groups=("g1",)))
        with closing(opened(it)) as log:
            listed = await asyncio.to_thread(log.subjects)
            await mq.metadata.delete_subject("gone")
            monkeypatch.setattr(log, "subjects", lambda: listed)
            found = await asyncio.to_thread(topology_of, log, Choice(pattern=".*"))
            assert sorted(found.queues) == [key(0, "g1", "a"), key(0, "g1", "s")]
            with pytest.raises(UnknownSubject, match="gone"):
                await asyncio.to_thread(topology_of, log, Choice(subjects=("a", "gone")))


def set_of(batches: list[SourceBatch]) -> list[SourceBatch]:
    """The set of batches: pieces may end within a batch, which then belongs to both."""
    return list({batch.envelope.base_sequence: batch for batch in batches}.values())


async def ordered(mq: Any, partitions: int = 2) -> None:
    config = SubjectConfig("s", order=Order.STRICT, logical_partitions=LPS, groups=("g1", "g2"))
    await mq.metadata.create_subject(config, partitions=partitions)


async def send(mq: Any, count: int, name: str) -> None:
    producer = mq.ordered_producer("s")
    producer.send_many(
        [b"%s-%d" % (name.encode(), n) for n in range(count)], [f"k{n % 50}" for n in range(count)]
    )
    await producer.flush()


async def test_route_changes_give_partitions_with_their_sources_and_ends(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await ordered(mq)
        await send(mq, 400, "v1")
        with closing(opened(it)) as log:
            before = await asyncio.to_thread(log.topology, ["s"])
            assert {
                number: (each.lps, each.version, each.sources)
                for number, each in before.routes["s"].partitions.items()
            } == {
                1: (LpRange(0, 8), 1, ()),
                2: (LpRange(8, 16), 1, ()),
            }
            assert before.routes["s"].sealed_at == {}
            await mq.metadata.change_route(
                "s", split=pb.SplitOperation(partition=1, at=[4], broker_groups=["g1", "g3"])
            )
            await send(mq, 400, "v2")
            await mq.metadata.change_route(
                "s", merge=pb.MergeOperation(partitions=[4, 2], broker_group="g2")
            )
            await send(mq, 400, "v3")
            await mq.metadata.change_route(
                "s", move=pb.MoveOperation(partition=5, broker_group="g1")
            )
            after = await asyncio.to_thread(log.topology, ["s"])
            routes = after.routes["s"]
            assert (routes.version, routes.logical_partitions) == (4, LPS)
            assert {
                number: (each.lps, each.broker_group, each.version, each.sources)
                for number, each in routes.partitions.items()
            } == {
                1: (LpRange(0, 8), before.routes["s"].partitions[1].broker_group, 1, ()),
                2: (LpRange(8, 16), before.routes["s"].partitions[2].broker_group, 1, ()),
                3: (LpRange(0, 4), "g1", 2, (1,)),
                4: (LpRange(4, 8), "g3", 2, (1,)),
                5: (LpRange(4, 16), "g2", 3, (2, 4)),
                6: (LpRange(4, 16), "g1", 4, (5,)),
            }
            queues = {each.key.partition: each for each in after.queues.values()}
            assert sorted(queues) == [1, 2, 3, 4, 5, 6]
            assert {number for number, queue in queues.items() if queue.is_sealed} == {1, 2, 4, 5}
            assert dict(routes.sealed_at) == {number: queues[number].end for number in (1, 2, 4, 5)}
            assert sum(queue.end for queue in queues.values()) == 1200
            assert queues[6] == SourceQueue(key(6, "g1"), 0, 0)
            found = await asyncio.to_thread(everything, log)
            assert len(bodies([batch for each in found.values() for batch in set_of(each)])) == 1200
        with closing(opened(it)) as fresh:
            assert await asyncio.to_thread(fresh.topology, ["s"]) == after


async def test_a_partition_sealed_after_the_question_ends_at_its_command_message(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await ordered(mq, partitions=1)
        await send(mq, 100, "v1")
        with closing(opened(it)) as log:
            await asyncio.to_thread(log.topology, ["s"])
            loop, ask = asyncio.get_running_loop(), log.metadata.routes

            def change_first(*args: Any) -> Routes:
                """Between the ends and the history, the partition is split, and the target gets
                messages.
                """

                async def change() -> None:
                    await send(mq, 50, "v1b")
                    await mq.metadata.change_route(
                        "s", split=pb.SplitOperation(partition=1, at=[8])
                    )
                    await send(mq, 100, "v2")

                asyncio.run_coroutine_threadsafe(change(), loop).result()
                return ask(*args)

            log.metadata.routes = change_first  # type: ignore[method-assign]
            found = await asyncio.to_thread(log.topology, ["s"])
            queues = {each.key.partition: each for each in found.queues.values()}
            assert (queues[1].end, queues[1].is_sealed) == (150, True)
            assert queues[2].end + queues[3].end == 100
            assert found.routes["s"].sealed_at == {1: 150}


async def has_moved(mq: qmq.Client, within_s: float) -> bool:
    """Whether the subject's route has changed within a time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while (await mq.metadata.describe_route("s")).latest_version == 1:
                await asyncio.sleep(0.05)
            return True
    return False


async def test_a_partition_that_a_fence_closed_has_an_end_once_its_broker_group_is_back(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await ordered(mq, partitions=1)
        await send(mq, 100, "v1")
        with closing(opened(it, 500)) as log:
            first = (
                (await asyncio.to_thread(log.topology, ["s"]))
                .routes["s"]
                .partitions[1]
                .broker_group
            )
            await it.stop(f"{first}-a")
            while not await has_moved(mq, within_s=15):
                # the metaserver has not seen it alive since it began, and keeps its partitions
                await it.start(f"{first}-a")
                await asyncio.to_thread(log.topology, ["s"])
                await it.stop(f"{first}-a")
            with pytest.raises(NotConnected, match=first):
                await asyncio.to_thread(log.topology, ["s"])
            await it.start(f"{first}-a")
        with closing(opened(it)) as log:
            async with asyncio.timeout(60):
                while (
                    not (found := await asyncio.to_thread(log.topology, ["s"]))
                    .routes["s"]
                    .sealed_at
                ):
                    await asyncio.sleep(0.05)
            routes = found.routes["s"]
            assert (routes.version, dict(routes.sealed_at), routes.partitions[2].sources) == (
                2,
                {1: 100},
                (1,),
            )
            assert found.queues[key(1, first)].is_sealed


async def test_an_unknown_subject_is_named_with_those_like_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.send("flights", b"x")
        with closing(opened(it)) as log:
            with pytest.raises(UnknownSubject, match="did you mean 'flights'"):
                await asyncio.to_thread(log.topology, ["flihgts"])
            with pytest.raises(UnknownSubject, match="subjects: flights"):
                await asyncio.to_thread(log.topology, ["zzz"])


# --- times and pieces -----------------------------------------------------------------------------


async def test_a_time_is_found_in_each_queue_or_gives_its_end(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await ordered(mq, partitions=1)
        await send(mq, 10, "a")
        group = next(iter(it.view.ordered("s").broker_groups))  # type: ignore[union-attr]
        store = (await it.master(group)).broker.store
        later = store.last_time_ms = store.last_time_ms + 5_000
        await send(mq, 10, "b")
        with closing(opened(it)) as log:
            for time_ms, expected in ((0, 0), (later - 1, 10), (later, 10), (later + 60_000, 20)):
                assert await asyncio.to_thread(log.find_time, key(1, group), time_ms) == expected
            await mq.metadata.change_route("s", split=pb.SplitOperation(partition=1, at=[8]))
            assert await asyncio.to_thread(log.find_time, key(1, group), later + 60_000) == 20


async def test_pieces_cover_each_sequence_of_a_range_once_in_about_the_wanted_size(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1",)))
        await mq.send_many("s", [bytes(100)] * 1000)
        with closing(opened(it)) as log:
            stored = (
                (await asyncio.to_thread(log.topology, ["s"])).queues[key(0, "g1")].stored_bytes
            )
            found = await asyncio.to_thread(log.pieces, key(0, "g1"), 100, 900, stored // 10)
            assert [each.first for each in found] == [100, *[each.end for each in found[:-1]]]
            assert found[-1].end == 900
            assert 8 <= len(found) <= 9
            assert log.pieces(key(0, "g1"), 5, 5, 1) == []
            assert len(log.pieces(key(0, "g1"), 5, 8, 1)) == 3
        with closing(opened(it)) as fresh:
            assert (
                await asyncio.to_thread(fresh.pieces, key(0, "g1"), 100, 900, stored // 10) == found
            )


# --- reading --------------------------------------------------------------------------------------


async def test_a_piece_gets_the_batches_that_hold_any_of_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1",)))
        for each in range(5):
            await mq.send_many("s", [b"%d" % each] * 10)
        with closing(opened(it)) as log:
            found = await asyncio.to_thread(read_all, log, [QueuePiece(key(0, "g1"), 15, 31)])
            assert [batch.envelope.base_sequence for batch in found] == [10, 20, 30]
            with pytest.raises(LogDamaged, match="ends at 50"):  # committed messages are missing
                await asyncio.to_thread(read_all, log, [QueuePiece(key(0, "g1"), 0, 60)])


async def test_what_cannot_match_a_selection_is_not_even_sent(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1",)))
        for each in range(40):
            await mq.send_many(
                "s", [b"%d" % each] * 3, tags=[("even" if each % 2 == 0 else "odd",)] * 3
            )
        with closing(opened(it)) as log:
            found = await asyncio.to_thread(
                everything, log, selection=ReadSelection(tags_any=("odd",))
            )
            assert bodies(set_of(found[key(0, "g1")]))[::3] == [
                b"%d" % each for each in range(1, 40, 2)
            ]


async def test_only_wanted_logical_partitions_are_sent(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await ordered(mq, partitions=1)
        for n in range(20):
            producer = mq.ordered_producer("s")
            producer.send_many([b"%d" % n], [f"k{n}"])
            await producer.flush()
        with closing(opened(it)) as log:
            (queue,) = (await asyncio.to_thread(log.topology, ["s"])).queues.values()
            whole = await asyncio.to_thread(read_all, log, [QueuePiece(queue.key, 0, 20)])
            low = await asyncio.to_thread(
                read_all, log, [QueuePiece(queue.key, 0, 20, lps=(LpRange(0, 8),))]
            )
            high = await asyncio.to_thread(
                read_all, log, [QueuePiece(queue.key, 0, 20, lps=(LpRange(8, 16),))]
            )
            assert 0 < len(low) < len(whole)
            assert sorted(bodies(low) + bodies(high)) == sorted(bodies(whole))


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "handed over"])
async def test_after_a_change_of_masters_in_mid_read_the_successor_continues_exactly(
    tmp_path: Path, is_killed: bool
) -> None:
    async with cluster(tmp_path, REPLICATED) as it, qmq.connect(it.servers) as mq:
        for each in range(60):
            await mq.send_many("s", [b"%d-%d" % (each, n) for n in range(20)])
        with closing(opened(it)) as log:
            reader = log.read(QueuePiece(key(0, "g1"), 0, 1200), ReadSelection(), skips_lost=False)
            found = [await asyncio.to_thread(next, reader) for _ in range(5)]
            if is_killed:
                await it.crash((await it.master("g1")).config.replica)
            else:
                await mq.metadata.transfer("g1")
            found += await asyncio.to_thread(list, reader)
            assert [batch.envelope.base_sequence for batch in found] == list(range(0, 1200, 20))
            assert bodies(found) == [b"%d-%d" % (each, n) for each in range(60) for n in range(20)]


async def test_a_broker_group_that_stays_away_is_named_when_patience_is_over(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1", "g2")))
        for _ in range(40):
            await mq.send_many("s", [bytes(500)] * 10)
        with closing(opened(it, 300)) as log:
            ends = {
                each.key.broker_group: each.end
                for each in (await asyncio.to_thread(log.topology, ["s"])).queues.values()
            }
            group = max(ends, key=lambda name: ends[name])
            reader = log.read(
                QueuePiece(key(0, group), 0, ends[group]), ReadSelection(), skips_lost=False
            )
            await asyncio.to_thread(next, reader)
            await it.stop(f"{group}-a")
            with pytest.raises(NotConnected, match=group):
                await asyncio.to_thread(list, reader)
            with pytest.raises(NotConnected, match=group):
                await asyncio.to_thread(log.topology, ["s"])
        with closing(opened(it, 300)) as fresh, pytest.raises(NotConnected, match=group):
            await asyncio.to_thread(fresh.topology, ["s"])


async def test_without_any_metaserver_the_error_names_the_silent_ones() -> None:
    with (
        closing(ServerAddress("127.0.0.1:1,127.0.0.1:2", 100).open()) as log,
        pytest.raises(NotConnected, match="broker answers"),
    ):
        await asyncio.to_thread(log.subjects)
    for servers in ("", "localhost", "a:b"):
        with pytest.raises(InvalidArgument):
            ServerAddress(servers).open()


async def test_reading_expired_messages_fails_with_the_remaining_range_or_skips(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1",)))
        for each in range(5):
            await mq.send_many("s", [b"%d" % each] * 10)
        queue = (await it.master("g1")).broker.store.open_queue("s", 0)
        queue.start_sequence = 30
        with closing(opened(it)) as log:
            piece = QueuePiece(key(0, "g1"), 5, 45)
            with pytest.raises(MessagesExpired, match=r"5 to 29 .*remaining one is 30"):
                await asyncio.to_thread(read_all, log, [piece])
            found = await asyncio.to_thread(
                lambda: list(log.read(piece, ReadSelection(), skips_lost=True))
            )
            assert [batch.envelope.base_sequence for batch in found] == [30, 40]
            gone = await asyncio.to_thread(
                lambda: list(
                    log.read(QueuePiece(key(0, "g1"), 5, 20), ReadSelection(), skips_lost=True)
                )
            )
            assert gone == []
            assert (await asyncio.to_thread(log.topology, ["s"])).queues[key(0, "g1")].start == 30


async def test_retention_in_mid_read_is_noticed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1",)))
        for _ in range(20):
            await mq.send_many("s", [bytes(500)] * 10)
        queue = (await it.master("g1")).broker.store.open_queue("s", 0)
        with closing(opened(it)) as log:
            reader = log.read(QueuePiece(key(0, "g1"), 0, 200), ReadSelection(), skips_lost=False)
            await asyncio.to_thread(next, reader)
            queue.start_sequence = 150
            with pytest.raises(MessagesExpired):
                await asyncio.to_thread(list, reader)


async def test_a_reader_that_is_left_in_the_middle_disturbs_no_other(tmp_path: Path) -> None:
    async with cluster(tmp_path) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(SubjectConfig("s", groups=("g1",)))
        for _ in range(20):
            await mq.send_many("s", [bytes(500)] * 10)
        with closing(opened(it)) as log:
            piece = QueuePiece(key(0, "g1"), 0, 200)

            def read() -> tuple[int, int, int]:
                one, other = (log.read(piece, ReadSelection(), skips_lost=False) for _ in range(2))
                next(one)
                assert isinstance(other, Iterator)
                next(other)
                rest = len(list(one))
                other.close()  # type: ignore[attr-defined]
                return (
                    rest,
                    len(read_all(log, [piece])),
                    log.topology(["s"]).queues[key(0, "g1")].end,
                )

            assert await asyncio.to_thread(read) == (19, 20, 200)


def test_a_batch_that_came_damaged_is_named() -> None:
    sent, region = encode(
        b"s", Columns([b"body"]), producer_id=1, batch_sequence=0, create_time_ms=0
    )
    crc = int.from_bytes(sent[12:16], "little")
    envelope = place(0, 64 + len(region), crc, 40, 1, 1, 1, 0)
    whole = bytearray(envelope + region)
    (batch,) = reading.batches_in(memoryview(whole), 1, key(0, "g1"))
    assert batch == (parse_envelope(envelope), region)
    for at in (20, 70, len(whole) - 1):
        hurt = bytearray(whole)
        hurt[at] ^= 1
        with pytest.raises(LogDamaged, match="s/0@g1"):
            list(reading.batches_in(memoryview(hurt), 1, key(0, "g1")))
    with pytest.raises(LogDamaged):
        list(reading.batches_in(memoryview(whole)[:-8], 1, key(0, "g1")))


def test_an_address_travels() -> None:
    address = ServerAddress("a:1,b:2", 5)
    serializer = CPickleSerializer()
    assert serializer.loads(serializer.dumps(address)) == address
    assert hash(address) == hash(ServerAddress("a:1,b:2", 5))


def test_what_a_broker_has_no_room_for_in_a_selection_is_left_to_the_reader() -> None:
    few = ReadSelection(tags_any=("a",), tags_all=("b",))
    many = ReadSelection(tags_any=tuple(map(str, range(limits.FETCH_TAGS_MAX))), tags_all=("b",))
    lps = tuple(LpRange(each, each + 1) for each in range(limits.FETCH_RANGES_MAX + 1))
    told = reading.fetch_of(QueuePiece(key(1, "g"), 0, 10, None, lps[1:]), few, 0)
    assert (told.tags_any, told.tags_all, len(told.lps)) == (["a"], ["b"], limits.FETCH_RANGES_MAX)
    told = reading.fetch_of(QueuePiece(key(1, "g"), 0, 10, None, lps), many, 0)
    assert (told.tags_any, told.tags_all, told.lps) == ([], [], [])
