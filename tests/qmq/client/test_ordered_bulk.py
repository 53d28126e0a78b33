"""An ordered consumer that reads in bulk: many messages of one lane at a time, in its order, with
one word for all of them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from fake_lanes import LaneCluster, N, key_in, lane, lane_cluster, one_lane
from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import LpRange
from support import eventually, node_config, running

import qmq
from qmq.client.consuming.ordered.consumer import OrderedConsumer
from qmq.client.consuming.ordered.lane_reader import LaneInbox, LaneReader
from qmq.client.consuming.ordered.message import MessageRun, OrderedMessages
from qmq.errors import InvalidArgument
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire.frame_payloads import LaneVerdict

LEFT, RIGHT = LpRange(0, N // 2), LpRange(N // 2, N)
KEYS = [f"k{each}".encode() for each in range(20)]
SHORT = timedelta(seconds=0.05)


def numbered(keys: Sequence[bytes], count: int, begin: int = 0) -> list[tuple[bytes, bytes]]:
    """`count` messages of each key, mixed; the body is the message's number among its key's."""
    return [(key, str(number).encode()) for number in range(begin, begin + count) for key in keys]


def ordered(c: LaneCluster, name: str = "a", **options: object) -> OrderedConsumer:
    """A consumer with a short lease: closing waits half a lease for messages that a test leaves
    unfinished.
    """
    return c.mq.ordered_consumer("s", "g", name=name, **{"lease_ms": 1_000} | options)  # type: ignore[arg-type]


class Record:
    """What was seen of each key, in order."""

    def __init__(self) -> None:
        self.seen: dict[bytes, list[int]] = defaultdict(list)

    @property
    def count(self) -> int:
        return sum(map(len, self.seen.values()))

    def add(self, messages: OrderedMessages) -> None:
        for key, body in zip(messages.keys_bytes, messages.bodies, strict=True):
            self.seen[key].append(int(body))

    async def consume(self, consumer: OrderedConsumer, messages_max: int) -> None:
        async for messages in consumer.batches(messages_max):
            self.add(messages)
            await asyncio.sleep(0)


async def stopped(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- order, and what comes together ---------------------------------------------------------------


@pytest.mark.parametrize("messages_max", [1, 7, 30, 1000])
async def test_slices_follow_each_other_in_the_order_of_their_lane(messages_max: int) -> None:
    async with lane_cluster() as c:
        for begin in range(0, 30, 10):
            c.broker.append(1, numbered(KEYS, 10, begin))
        c.assignments.assign(a=[lane()])
        consumer, sequences = ordered(c), list[int]()
        async for messages in consumer.batches(messages_max):
            assert 0 < len(messages) <= messages_max
            sequences += [each.sequence for each in messages]
            if len(sequences) == 600:
                break
        assert sequences == list(range(600))


async def test_bodies_keys_and_messages_say_the_same() -> None:
    async with lane_cluster() as c:
        c.broker.partition(1).version = 7
        c.broker.append(1, [(b"a", b"0"), (b"b", b"1")])
        c.broker.append(1, [(b"a", b"2"), (b"c", b"3")])
        c.assignments.assign(a=[lane(version=7)])
        consumer = ordered(c)
        found = await consumer.pull(3)
        while len(found) < 3:  # the batches may come one by one
            found.fail(timedelta(0))
            found = await consumer.pull(3)
        assert found.bodies == [b"0", b"1", b"2"]
        assert found.keys == ["a", "b", "a"]
        assert found.keys_bytes == [b"a", b"b", b"a"]
        assert [each.body for each in found] == found.bodies
        assert (found[1].key, found[-1].body, found[-1].sequence) == ("b", b"2", 2)
        assert (found.partition, found.broker_group, found.token) == (
            1,
            "g0",
            c.broker.grants[0].token,
        )
        message = found[0]
        assert (message.partition, message.subject, message.route_version, message.token) == (
            1,
            "s",
            7,
            found.token,
        )
        assert message.logical_partition == logical_partition(b"a", N)
        assert "LaneMessage s/1/0" in repr(message)
        assert "3 of partition 1" in repr(found)
        with pytest.raises(IndexError):
            _ = found[3]


async def test_a_lane_that_is_part_of_its_partition_brings_its_own_messages_only() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, numbered(KEYS, 30))
        c.assignments.assign(a=[lane(lps=LEFT)], b=[lane(lps=RIGHT)])
        records = [Record(), Record()]
        tasks = [
            asyncio.create_task(record.consume(ordered(c, name), 50))
            for name, record in zip(("a", "b"), records, strict=True)
        ]
        await eventually(c.broker.partition(1).is_all_done)
        for record, lps in zip(records, (LEFT, RIGHT), strict=True):
            own = [key for key in KEYS if lps.first <= logical_partition(key, N) < lps.end]
            assert record.seen == {key: list(range(30)) for key in own}
        await stopped(tasks)


async def test_nothing_comes_when_the_wait_is_over() -> None:
    async with lane_cluster() as c:
        c.broker.partition(1)
        c.assignments.assign(a=[lane()])
        found = await ordered(c).pull(wait=SHORT)
        assert (len(found), found.bodies, found.partition, found.broker_group, found.token) == (
            0,
            [],
            0,
            "",
            0,
        )
        found.ack_later()
        await found.ack_sync()
        found.fail()


# --- one slice of a lane --------------------------------------------------------------------------


async def test_while_a_slice_is_in_hand_its_lane_hands_out_nothing_and_others_do() -> None:
    async with lane_cluster() as c:
        left, right = key_in(LEFT), key_in(RIGHT)
        c.broker.append(1, numbered([left], 4))
        c.broker.append(2, numbered([right], 4))
        c.assignments.assign(a=[lane(1, LEFT), lane(2, RIGHT)])
        consumer = ordered(c, ack="explicit")
        first, second = await consumer.pull(2), await consumer.pull(2)
        assert {first.partition, second.partition} == {1, 2}
        waiting = asyncio.create_task(consumer.pull(2))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        await second.ack_sync()
        third = await waiting
        assert (third.partition, third.bodies) == (second.partition, [b"2", b"3"])


async def test_lanes_take_turns() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, numbered([key_in(LEFT)], 50))
        c.broker.append(2, numbered([key_in(RIGHT)], 50))
        c.assignments.assign(a=[lane(1, LEFT), lane(2, RIGHT)])
        consumer, turns = ordered(c), list[int]()
        async for messages in consumer.batches(5):
            turns.append(messages.partition)
            if len(turns) == 20:
                break
        assert turns[10:] in ([1, 2] * 5, [2, 1] * 5)


async def test_an_acknowledgement_covers_just_the_slice_and_waits_for_its_commit() -> None:
    async with one_lane(*numbered(KEYS[:1], 6)) as c:
        consumer = ordered(c, ack="explicit")
        found = await consumer.pull(2)
        c.broker.holds_settled = True
        acknowledging = asyncio.create_task(found.ack_sync())
        await eventually(lambda: len(c.broker.held) == 1)
        assert not acknowledging.done()
        c.broker.answer_held()
        await acknowledging
        assert [(each.first, each.last) for each in c.broker.verdicts(LaneVerdict.DONE)] == [(0, 1)]
        (await consumer.pull(3)).ack_later()
        await eventually(lambda: c.broker.partition(1).done == set(range(5)))


async def test_a_slice_is_acknowledged_when_the_loop_comes_back_and_not_before() -> None:
    async with one_lane(*numbered(KEYS[:1], 4)) as c:
        consumer = ordered(c)
        async for messages in consumer.batches(2):
            assert not c.broker.partition(1).done & {each.sequence for each in messages}
            if messages[0].sequence == 2:
                break
        await eventually(lambda: c.broker.partition(1).done == {0, 1})
        await consumer.close()
        assert c.broker.partition(1).done == {0, 1}, (
            "nobody finished the slice that the loop was left with"
        )
        assert consumer.stale == 0


# --- sessions, tokens, assignments ----------------------------------------------------------------


async def test_a_returning_lane_waits_until_the_lost_slice_is_settled() -> None:
    async with one_lane(*numbered(KEYS[:2], 4)) as c:
        consumer = ordered(c, ack="explicit")
        lost = await consumer.pull(5)
        c.broker.take_away()
        c.broker.cut()
        await eventually(lambda: c.broker.next_token == 3 and consumer.lanes == (lane(),))
        again = asyncio.create_task(consumer.pull(5))
        await asyncio.wait([again], timeout=0.05)
        assert not again.done(), "another task may be at work with the same keys"
        lost.ack_later()
        found = await again
        assert (found.bodies, found.token) == (lost.bodies, 2)
        assert c.broker.partition(1).done == set()
        assert consumer.stale == 5


# --- failures -------------------------------------------------------------------------------------


async def test_a_slice_that_failed_is_tried_again_in_place_and_its_lane_waits() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, numbered([key_in(LEFT)], 6))
        c.broker.append(2, numbered([key_in(RIGHT)], 2))
        c.assignments.assign(a=[lane(1, LEFT)])
        consumer = ordered(c, ack="explicit", retry_delays_s=(0.01, 1_000.0))
        first = await consumer.pull(3)
        first.fail()
        again = await consumer.pull(2)
        assert (first.attempt, first.bodies) == (1, [b"0", b"1", b"2"])
        assert (again.bodies, again.attempt, [each.attempt for each in again]) == (
            [b"0", b"1"],
            2,
            [2, 2],
        )
        first.ack_later()
        assert c.broker.partition(1).done == set(), (
            "an acknowledgement of an earlier try no longer counts"
        )
        again.fail()
        await eventually(lambda: c.broker.partition(1).failures == {0: 2})
        c.assignments.assign(a=[lane(1, LEFT), lane(2, RIGHT)])
        assert (await consumer.pull()).partition == 2
        assert len(await consumer.pull(wait=SHORT)) == 0, (
            "the failed slice waits, and its lane behind it"
        )
        with pytest.raises(InvalidArgument):
            again.fail(timedelta(seconds=-1))


async def test_the_attempt_of_the_first_message_survives_a_takeover() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, numbered(KEYS[:1], 4))
        c.assignments.assign(a=[lane()], b=[])
        (await ordered(c, retry_delays_s=(1_000.0,)).pull()).fail()
        await eventually(lambda: c.broker.partition(1).failures == {0: 1})
        c.broker.take_away()
        c.assignments.assign(a=[], b=[lane()])
        found = await ordered(c, "b").pull()
        assert [each.attempt for each in found] == [2, 1, 1, 1]
        assert found.bodies == [b"0", b"1", b"2", b"3"]


async def test_parked_keys_are_set_aside_and_the_others_come() -> None:
    async with lane_cluster() as c:
        partition = c.broker.partition(1)
        partition.append(
            [
                (b"bad", b"0"),
                (b"ok", b"0"),
                (b"bad", b"1"),
                (b"bad", b"2"),
                (b"ok", b"1"),
                (b"ok", b"2"),
            ]
        )
        partition.done, partition.parked = {0}, {b"bad": [0]}
        c.assignments.assign(a=[lane()])
        record = Record()
        task = asyncio.create_task(record.consume(ordered(c), 1000))
        await eventually(partition.is_all_done)
        assert record.seen == {b"ok": [0, 1, 2]}
        assert partition.parked == {b"bad": [0, 2, 3]}
        await stopped([task])


async def test_who_parks_keys_cannot_read_in_bulk() -> None:
    async with qmq.connect("localhost:1") as mq:
        consumer = mq.ordered_consumer("s", "g", on_failure="park")
        with pytest.raises(InvalidArgument, match="park"):
            await consumer.pull()


# --- one way of reading, and the end --------------------------------------------------------------


async def test_a_consumer_reads_in_one_way_all_its_life() -> None:
    async with lane_cluster() as c:
        c.broker.append(1, numbered(KEYS[:1], 4))
        c.assignments.assign(a=[lane()], b=[lane(2)])
        c.broker.append(2, numbered(KEYS[:1], 4))
        in_bulk, one_by_one = ordered(c), ordered(c, "b")
        await in_bulk.pull()
        with pytest.raises(InvalidArgument, match="another consumer"):
            await anext(in_bulk)
        await anext(one_by_one)
        with pytest.raises(InvalidArgument, match="another consumer"):
            await one_by_one.pull()


@pytest.mark.parametrize("messages_max", [0, -1, 10_000_000])
async def test_a_number_that_makes_no_sense_is_refused(messages_max: int) -> None:
    async with qmq.connect("localhost:1") as mq:
        with pytest.raises(InvalidArgument):
            await mq.ordered_consumer("s", "g").pull(messages_max)


async def test_news_for_a_cancelled_reader_go_to_another_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with lane_cluster() as c:
        c.broker.partition(1)
        c.assignments.assign(a=[lane()])
        consumer = ordered(c)
        first, second = asyncio.create_task(consumer.pull()), asyncio.create_task(consumer.pull())
        await eventually(lambda: consumer.lanes == (lane(),))
        usual = LaneInbox.arrived_in_bulk

        def arrived_and_cut_off(
            inbox: LaneInbox, reader: LaneReader, runs: list[MessageRun]
        ) -> None:
            usual(inbox, reader, runs)
            first.cancel()

        monkeypatch.setattr(LaneInbox, "arrived_in_bulk", arrived_and_cut_off)
        c.broker.append(1, [(b"a", b"0")])
        assert (await second).bodies == [b"0"]
        assert first.cancelled()


# --- over a real node -----------------------------------------------------------------------------


async def test_on_a_node_all_messages_come_in_order_through_a_split(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("s", order=Order.STRICT, logical_partitions=64), partitions=2
        )
        record, sent = Record(), 0
        consumers = [
            mq.ordered_consumer("s", "g", name=name, prefetch=5_000) for name in ("a", "b")
        ]
        tasks = [asyncio.create_task(record.consume(each, 700)) for each in consumers]
        async with mq.ordered_producer("s") as producer:
            for part in range(6):
                pairs = numbered(KEYS, 100, part * 100)
                producer.send_many([body for _, body in pairs], [key for key, _ in pairs])
                sent += len(pairs)
                await producer.flush()
                if part == 2:
                    await mq.metadata.change_route("s", split=pb.SplitOperation(partition=1))
        await eventually(lambda: record.count >= sent)
        assert record.seen == {key: list(range(600)) for key in KEYS}
        assert [each.stale for each in consumers] == [0, 0]
        for each in consumers:
            await each.close()
        await stopped(tasks)
        late = mq.ordered_consumer("s", "g", name="late")
        assert len(await late.pull(wait=timedelta(seconds=1))) == 0, "everything was acknowledged"
