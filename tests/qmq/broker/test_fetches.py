"""FETCH and FIND over a real socket: which messages they return, which they skip, and that they
return only committed messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from lane_support import COUNT, SUBJECT, World, world
from qmq_coordination.subjects import encode_subject, subject_key
from qmq_ordering.hashing import logical_partition
from support import ManualClock, intake, node_config, running

from qmq.broker.control import LaneAdmin
from qmq.client.connection.connection import Connection, connect
from qmq.errors import InvalidArgument, NotMaster, UnknownSubject
from qmq.log.consume_log import ConsumeLog, IndexEntry
from qmq.log.log_config import LogConfig
from qmq.log.queue import Queue
from qmq.model import SubjectConfig
from qmq.node.dev_node import Node
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import BatchView, encode
from qmq.wire.batch_columns import BatchFlag, Columns, tag_bloom, tag_hash
from qmq.wire.frame import FrameKind

FOREVER = 1 << 60


class Reader:
    """A node with a subject "s", and a connection that fetches from it."""

    def __init__(self, node: Node, connection: Connection) -> None:
        self.node = node
        self.connection = connection
        self.queue: Queue = node.broker.store.open_queue("s", 0)

    def append(self, count: int = 10, *, tags: tuple[str, ...] = (), **options: Any) -> None:
        batch = intake(self.queue, [b"x"] * count, tags=[tags] * count if tags else None, **options)
        store = self.node.broker.store
        store.append([batch._replace(tag_bloom=tag_bloom(map(tag_hash, tags)))])
        if store.commits_at_once:
            self.node.broker.commit(store.index)

    async def fetch(
        self,
        sequence: int = 0,
        *,
        subject: str = "s",
        partition: int = 0,
        until: int = FOREVER,
        since_ms: int = 0,
        bytes_max: int = 1 << 20,
        **selection: Any,
    ) -> tuple[wire.Fetched, list[BatchView]]:
        wanted: dict[str, Any] = {
            "tags_any": [],
            "tags_all": [],
            "lps": [],
            "directed": 0,
            **selection,
        }
        request = wire.Fetch(subject, partition, sequence, until, since_ms, bytes_max, **wanted)
        answer = await self.connection.call(FrameKind.FETCH, request.pack(), timeout_s=10)
        fetched, at = wire.unpack_fetched(answer.payload)
        views: list[BatchView] = []
        while at < len(answer.payload):
            views.append(BatchView.parse(answer.payload, at))
            at += views[-1].envelope.total_bytes
        assert len(views) == fetched.batches
        return fetched, views

    async def find(
        self,
        producer: int = 7,
        before: int = FOREVER,
        most: int = 1000,
        *,
        subject: str = "s",
        partition: int = 0,
    ) -> list[list[int]]:
        request = wire.Find(subject, partition, f"{producer:016x}", before, most)
        return wire.FoundBatches.unpack(
            (await self.connection.call(FrameKind.FIND, request.pack(), timeout_s=10)).payload
        ).found


@asynccontextmanager
async def reader(folder: Path, log: LogConfig | None = None) -> AsyncIterator[Reader]:
    async with running(node_config(folder, log)) as node:
        connection = await connect(node.data_address, "test")
        yield Reader(node, connection)
        connection.close()
        await connection.wait_closed()


def bases(views: list[BatchView]) -> list[int]:
    return [view.base_sequence for view in views]


# --- FETCH ----------------------------------------------------------------------------------------


async def test_batches_of_a_range_are_sent_whole_with_the_place_to_continue(tmp_path: Path) -> None:
    async with reader(tmp_path) as it:
        for number in range(20):
            it.append(number=number)
        fetched, views = await it.fetch(25, until=41)
        assert bases(views) == [20, 30, 40]
        assert fetched[:3] == (0, 50, 200)
        assert not fetched.is_sealed
        whole, everything = await it.fetch()
        assert whole.last_append_ms == everything[-1].envelope.append_time_ms
        assert bases((await it.fetch(25, until=40))[1]) == [20, 30]
        fetched, views = await it.fetch(bytes_max=1)
        assert (bases(views), fetched.next_sequence) == ([0], 10), "larger than what was asked for"
        fetched, views = await it.fetch(3, bytes_max=0)
        assert (fetched[:3], views) == ((0, 3, 200), []), "only the numbers"
        stored_bytes = sum(each.envelope.total_bytes for each in everything)
        assert (await it.fetch(bytes_max=0))[0].stored_bytes == stored_bytes
        size = it.queue.cumulative_bytes // 20
        sequence, found = 0, []
        while sequence < 200:
            fetched, views = await it.fetch(sequence, bytes_max=3 * size)
            assert 1 <= len(views) <= 3
            found += bases(views)
            assert fetched.next_sequence == found[-1] + 10
            sequence = fetched.next_sequence
        assert found == list(range(0, 200, 10))


async def test_a_queue_without_messages_is_empty_and_an_unknown_subject_is_refused(
    tmp_path: Path,
) -> None:
    async with reader(tmp_path) as it:
        with pytest.raises(UnknownSubject):
            await it.fetch(subject="never")
        with pytest.raises(UnknownSubject):
            await it.find(subject="never")
    async with world(tmp_path / "other") as other:
        it = Reader(other.node, other.connection)
        assert await it.fetch(subject=SUBJECT, partition=1) == (
            wire.Fetched(0, 0, 0, 0, 0, False, 0),
            [],
        )
        assert await it.find(subject=SUBJECT, partition=1) == []


async def test_batches_without_a_wanted_tag_are_passed_over_by_bloom_and_hash(
    tmp_path: Path,
) -> None:
    async with reader(tmp_path) as it:
        bloom_twin = next(
            f"t{n}"
            for n in range(10**6)
            if not tag_bloom([tag_hash(f"t{n}")]) & ~tag_bloom([tag_hash("a"), tag_hash("b")])
        )
        for number, tags in enumerate([("a",), ("b",), ("a", "b"), (bloom_twin,), ()]):
            it.append(number=number, tags=tags)
        assert bases((await it.fetch(tags_any=["a"]))[1]) == [0, 20]
        assert bases((await it.fetch(tags_any=["a", "b"]))[1]) == [0, 10, 20]
        assert bases((await it.fetch(tags_all=["a", "b"]))[1]) == [20]
        assert bases((await it.fetch(tags_any=[bloom_twin]))[1]) == [30]
        fetched, views = await it.fetch(tags_any=["c"])
        assert views == []
        assert fetched.next_sequence == 50


async def test_batches_without_a_wanted_logical_partition_are_passed_over(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        it = Reader(w.node, w.connection)
        for number, lp in enumerate([0, 5, 9]):
            await w.produce([b"k"] * 3, number=number, lps=[lp] * 3)
        assert bases((await it.fetch(subject=SUBJECT, partition=1, lps=["0-5"]))[1]) == [0]
        assert bases((await it.fetch(subject=SUBJECT, partition=1, lps=["9-16", "5-6"]))[1]) == [
            3,
            6,
        ]
        assert bases((await it.fetch(subject=SUBJECT, partition=1))[1]) == [0, 3, 6]
        with pytest.raises(InvalidArgument):
            await it.fetch(subject=SUBJECT, partition=1, lps=["5"])


async def test_directed_batches_are_given_only_to_their_group(tmp_path: Path) -> None:
    async with reader(tmp_path) as it:
        it.append()
        headers: list[Any] = [{"qmq-group": b"g"}]
        envelope, region = encode(
            b"s",
            Columns([b"x"], headers=headers),
            producer_id=8,
            batch_sequence=0,
            create_time_ms=1,
            flags=BatchFlag.DIRECTED,
        )
        await it.node.coordination.put(subject_key("s"), encode_subject(SubjectConfig("s")))
        await it.node.view.refresh()
        await it.connection.call(FrameKind.PRODUCE, envelope + region, timeout_s=10)
        it.append(number=1)
        assert bases((await it.fetch())[1]) == [0, 11]
        assert bases((await it.fetch(directed=1))[1]) == [0, 10, 11]
        fetched, views = await it.fetch(directed=wire.ONLY_DIRECTED)
        assert (bases(views), fetched.next_sequence) == ([10], 21)


async def test_what_was_appended_since_a_time_begins_at_a_batch_or_at_the_end(
    tmp_path: Path,
) -> None:
    async with reader(tmp_path) as it:
        clock = it.node.broker.store.clock = ManualClock(1_000)
        for number in range(4):
            it.append(number=number)
            clock.now_ms += 100
        for time_ms, expected in ((1, 0), (1_000, 0), (1_001, 10), (1_300, 30), (1_301, 40)):
            assert (await it.fetch(since_ms=time_ms, bytes_max=0))[0].next_sequence == expected
        assert bases((await it.fetch(since_ms=1_150))[1]) == [20, 30]


async def test_a_sealed_partition_ends_at_a_command_message_that_no_consumer_gets(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        it = Reader(w.node, w.connection)
        await w.produce([b"k"] * 3)
        assert await LaneAdmin(w.node.broker, "g1").seal(SUBJECT, 1, "c", 2) == 3
        fetched, views = await it.fetch(subject=SUBJECT, partition=1)
        assert fetched[:3] == (0, 3, 3)
        assert fetched.is_sealed
        assert bases(views) == [0]


async def test_the_start_reports_expired_messages(tmp_path: Path) -> None:
    async with reader(tmp_path) as it:
        for number in range(4):
            it.append(number=number)
        it.queue.start_sequence = 20
        fetched, views = await it.fetch(5)
        assert fetched[:3] == (20, 40, 40)
        assert bases(views) == [20, 30]
        assert (await it.fetch(5, until=15))[0].next_sequence == 20


async def test_one_request_looks_at_no_more_than_so_many_batches_and_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.broker.reading.fetches.ENTRIES_MAX", 4)
    monkeypatch.setattr("qmq.broker.reading.fetches.BATCHES_MAX", 2)
    async with reader(tmp_path) as it:
        for number in range(10):
            it.append(number=number, tags=("b",) if number == 9 else ("a",))
        fetched, views = await it.fetch(tags_any=["b"])
        assert (fetched.next_sequence, views) == (40, [])
        fetched, views = await it.fetch(80, tags_any=["b"])
        assert (fetched.next_sequence, bases(views)) == (100, [90])
        fetched, views = await it.fetch()
        assert (fetched.next_sequence, bases(views)) == (20, [0, 10])


# --- what is not committed ------------------------------------------------------------------------


@asynccontextmanager
async def uncommitted(folder: Path) -> AsyncIterator[tuple[Reader, Callable[[], None]]]:
    """A broker that commits when the test says so."""
    async with reader(folder) as it:
        broker = it.node.broker
        it.append()
        broker.store.commits_at_once = False

        class Committer:
            def written(self, index: int) -> None:
                pass

            def stored(self, index: int) -> None:
                pass

        broker.committer = Committer()
        broker.store.committed_index = broker.store.index
        yield it, lambda: broker.commit(broker.store.index)


async def test_uncommitted_batches_are_neither_given_nor_counted(tmp_path: Path) -> None:
    async with uncommitted(tmp_path) as (it, commit):
        it.append(number=1)
        fetched, views = await it.fetch()
        assert (fetched.next_sequence, fetched.end_sequence, bases(views)) == (10, 10, [0])
        assert (await it.fetch(since_ms=FOREVER, bytes_max=0))[0].next_sequence == 10
        commit()
        assert bases((await it.fetch())[1]) == [0, 10]


async def test_a_lookup_is_answered_after_the_commit_of_all_appended_batches(
    tmp_path: Path,
) -> None:
    async with uncommitted(tmp_path) as (it, commit):
        it.append(number=1)
        asked = asyncio.create_task(it.find())
        await it.fetch(bytes_max=0)  # the broker has read the question by now
        assert not asked.done()
        it.append(number=2)
        it.node.broker.commit(it.node.broker.store.index - 1)
        assert await asked == [[1, 10, 10], [0, 0, 10]]
        commit()
        assert [each[0] for each in await it.find()] == [2, 1, 0]


async def test_a_request_that_waits_for_an_unknowable_commit_goes_to_the_next_master(
    tmp_path: Path,
) -> None:
    async with uncommitted(tmp_path) as (it, _):
        it.append(number=1)
        asked = asyncio.create_task(it.find())
        await it.fetch(bytes_max=0)
        it.node.broker.retire()
        it.node.broker.turn()
        with pytest.raises(NotMaster):
            await asked


async def test_a_selection_of_too_many_tags_or_ranges_is_refused(tmp_path: Path) -> None:
    async with reader(tmp_path) as it:
        it.append(1, tags=("a",))
        allowed = {"tags_any": ["a"] * 10, "tags_all": ["a"] * 10}
        assert bases((await it.fetch(**allowed))[1]) == [0]
        await it.fetch(lps=["0-1"] * 64)
        for refused in (
            {**allowed, "tags_any": ["a"] * 11},
            {"tags_any": [""]},
            {"tags_all": ["a" * 256]},
            {"lps": ["0-1"] * 65},
        ):
            with pytest.raises(InvalidArgument):
                await it.fetch(**refused)
        with pytest.raises(InvalidArgument) as told:
            await it.fetch(lps=["x" * 5_000])
        assert len(str(told.value)) < 400


# --- FIND -----------------------------------------------------------------------------------------


async def test_a_producers_newest_batches_are_found_by_number_below_a_bound(tmp_path: Path) -> None:
    async with reader(tmp_path) as it:
        for number in range(10):
            it.append(2, number=number)
            it.append(1, producer=9, number=number + 100)
        assert await it.find(most=3) == [[9, 27, 2], [8, 24, 2], [7, 21, 2]]
        assert await it.find(before=2) == [[1, 3, 2], [0, 0, 2]]
        assert await it.find(before=0) == []
        assert await it.find(9, most=1) == [[109, 29, 1]]
        assert await it.find(10) == []
        with pytest.raises(InvalidArgument):
            await it.find(most=1001)


async def test_what_fell_out_of_the_window_is_found_in_the_consume_log_over_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.log.consume_log.FILE_ENTRIES", 16)
    async with reader(tmp_path) as it:
        numbers = [*range(90), 95, 94, 93, *range(96, 200)]  # refused ones came late
        for at, number in enumerate(numbers):
            it.append(1, number=number)
            it.append(1, producer=9, number=at)
            if at in (50, 120):
                it.queue.index.spilled(spill_of(it.queue))
        expected = sorted(((number, 2 * at, 1) for at, number in enumerate(numbers)), reverse=True)
        assert [tuple(each) for each in await it.find()] == expected
        assert [each[0] for each in await it.find(before=96, most=5)] == [95, 94, 93, 89, 88]
        it.queue.producers.expire(FOREVER)
        assert [tuple(each) for each in await it.find()] == expected
        it.append(1, number=200)  # a new window, which knows of nothing before
        assert [each[0] for each in await it.find(most=3)] == [200, 199, 198]


def spill_of(queue: Queue) -> Any:
    spill = queue.index.spill()
    assert spill is not None
    queue.index.write_spill(spill)
    return spill


async def test_who_was_looked_for_in_vain_is_looked_for_only_in_what_came_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reader(tmp_path) as it:
        for number in range(5):
            it.append(producer=9, number=number)
        looked: list[int] = []
        whole = ConsumeLog.of_producer

        def of_producer(
            index: ConsumeLog, producer_id: int, before: int
        ) -> tuple[int, list[IndexEntry]]:
            looked.append(before)
            return whole(index, producer_id, before)

        monkeypatch.setattr(ConsumeLog, "of_producer", of_producer)
        assert [await it.find(), await it.find(before=0)] == [[], []]
        assert looked == [5]
        it.append(producer=9, number=5)
        assert await it.find() == []
        it.append(number=3)
        it.queue.producers.expire(FOREVER)
        assert await it.find() == [[3, 60, 10]]
        assert await it.find(before=3) == []
        assert await it.find(9, most=1) == [[5, 50, 10]]


async def test_a_batch_that_retention_deleted_is_found_empty_while_remembered(
    tmp_path: Path,
) -> None:
    async with reader(tmp_path) as it:
        it.append(number=0)
        it.append(number=1)
        it.queue.start_sequence = 10
        assert await it.find() == [[1, 10, 10], [0, 0, 0]]


async def test_a_silent_producer_of_an_ordered_subject_continues_with_the_flag_again(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        for number in range(3):
            await w.produce([b"k"], number=number)
        queue = w.node.broker.store.open_queue(SUBJECT, 1)
        queue.producers.expire(FOREVER)
        assert (await produce_again(w, 3)).base_sequence == 3
        assert (await produce_again(w, 1)).base_sequence == 1
        assert queue.next_sequence == 4


async def produce_again(w: World, number: int) -> wire.Produced:
    columns = Columns(
        [b"k/%d/0" % number], keys=[b"k"], logical_partitions=[logical_partition(b"k", COUNT)]
    )
    batch = encode(
        SUBJECT.encode(),
        columns,
        producer_id=7,
        batch_sequence=number,
        create_time_ms=1,
        partition=1,
        flags=BatchFlag.AGAIN,
    )
    return wire.unpack_produced(
        (await w.connection.call(FrameKind.PRODUCE, b"".join(batch), timeout_s=10)).payload
    )[0]
