"""Limits in messages and bytes: a slow or idle consumer delays only itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import pytest
from fake_cluster import Cluster, DelayCluster, FakeQueue, cluster, delay_cluster
from support import eventually

import qmq
from qmq.broker.dispatch.pull import UnackedBytes
from qmq.client.connection.connection import connect
from qmq.client.consuming.session import PREFETCH, PREFETCH_MAX
from qmq.errors import InvalidArgument
from qmq.limits import CONSUMER_UNACKED_BYTES_MAX, CONSUMER_UNACKED_MAX, MIB
from qmq.node.dev_node import Node
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import ENVELOPE_BYTES
from qmq.wire.frame import FrameKind

KIB = 1024


@pytest.fixture
async def it() -> AsyncIterator[Cluster]:
    async with cluster(1) as found:
        yield found


async def test_a_consumer_pulls_no_more_bytes_than_it_may_hold(it: Cluster) -> None:
    queue = FakeQueue(it.groups[0])
    consumer = it.mq.consumer("s", "g", ack="explicit", prefetch_bytes=100 * KIB)
    pulling = asyncio.create_task(consumer.pull(10))
    assert (await queue.pull()).bytes_max == 100 * KIB
    await queue.deliver([bytes(30 * KIB)] * 2)
    found = list(await pulling)
    left = (await queue.pull()).bytes_max
    assert 39 * KIB < left < 40 * KIB, "two messages are held, and what their batch adds"
    await queue.deliver([bytes(90 * KIB)])
    found += await consumer.pull(10)
    (attachment,) = consumer.attachments
    assert 150 * KIB < attachment.held_bytes < 151 * KIB, (
        "a batch is never cut: it may exceed what was asked for"
    )
    assert not attachment.asked
    await found[0].ack_sync()
    assert not attachment.asked
    await found[2].ack_sync()
    assert 69 * KIB < (await queue.pull()).bytes_max < 70 * KIB


async def feed(queue: FakeQueue, times: int) -> None:
    """Answer each pull with as many messages as it asks for."""
    for _ in range(times):
        await queue.deliver([b"x"] * (await queue.pull()).messages_max)


@pytest.mark.parametrize(("chosen", "reached"), [(None, PREFETCH_MAX), (2000, 2000)])
async def test_a_loop_that_handles_all_at_once_is_given_more_unless_it_chose(
    it: Cluster, monkeypatch: pytest.MonkeyPatch, chosen: int | None, reached: int
) -> None:
    monkeypatch.setattr("qmq.client.consuming.session.QUICK_S", math.inf)
    queue = FakeQueue(it.groups[0])
    consumer = it.mq.consumer("s", "g", prefetch=chosen)

    async def loop() -> None:
        async for _ in consumer:
            pass

    looping = asyncio.create_task(loop())
    await feed(queue, 8)
    await queue.pull()
    assert consumer.prefetch == reached
    looping.cancel()
    await asyncio.gather(looping, return_exceptions=True)


async def test_an_application_that_settles_nothing_is_given_no_more(
    it: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.client.consuming.session.QUICK_S", math.inf)
    queue = FakeQueue(it.groups[0])
    consumer = it.mq.consumer("s", "g", ack="explicit")
    held = 0
    feeding = asyncio.create_task(feed(queue, 2))
    while held < PREFETCH:
        held += len(await consumer.pull(300))
    await feeding
    assert (held, consumer.held, consumer.prefetch) == (PREFETCH, PREFETCH, PREFETCH)


async def test_a_pull_leaves_while_a_loop_that_never_waits_is_still_busy(it: Cluster) -> None:
    queue = FakeQueue(it.groups[0])
    consumer = it.mq.consumer("s", "g", prefetch=400)
    first = asyncio.create_task(anext(consumer))
    await queue.deliver([b"x"] * 400)
    await first
    (attachment,) = consumer.attachments
    assert attachment.session is not None
    stream = attachment.session.connection.stream
    before, rounds = stream.taken_bytes, list[int]()
    asyncio.get_running_loop().call_soon(rounds.append, 1)
    for _ in range(300):
        message = consumer.ready.take()  # a loop would let the event loop run after a while
        assert message is not None
        message.ack_later()
    assert not rounds, "the event loop went round: the test shows nothing"
    assert attachment.asked
    assert stream.taken_bytes > before


async def test_one_message_larger_than_all_it_may_hold_comes_all_the_same(it: Cluster) -> None:
    queue = FakeQueue(it.groups[0])
    consumer = it.mq.consumer("s", "g", prefetch_bytes=1)
    following = asyncio.create_task(anext(consumer))
    for number in range(3):
        assert (await queue.pull()).bytes_max == 1
        await queue.deliver([b"%d" % number * 5000])
        assert (await following).body[:1] == b"%d" % number
        following = asyncio.create_task(anext(consumer))
    following.cancel()


async def test_a_message_counts_for_its_part_of_the_batch_and_other_tags_count_nothing(
    it: Cluster,
) -> None:
    queue = FakeQueue(it.groups[0])
    consumer = it.mq.consumer("s", "g", ack="explicit")
    pulling = asyncio.create_task(consumer.pull(10))
    await queue.deliver([bytes(KIB)] * 100)
    found = await pulling
    (attachment,) = consumer.attachments
    before = attachment.held_bytes
    assert 100 * KIB + ENVELOPE_BYTES < before < 110 * KIB
    found[3].ack_later()
    found[5].nack()
    assert attachment.held_bytes * 100 == before * 98
    tagged = it.mq.consumer("s", "g", tags_any=["t"])
    following = asyncio.create_task(anext(tagged))
    await eventually(lambda: len(queue.attaches) == 2)
    await queue.deliver([bytes(KIB)])
    await eventually(lambda: len(queue.settled) == 3)
    assert tagged.attachments[0].held_bytes == 0
    following.cancel()


async def test_what_waits_for_a_delay_group_counts_until_it_has_its_verdict() -> None:
    async with delay_cluster() as it:
        await _postponed(it)


async def _postponed(it: DelayCluster) -> None:
    queue = FakeQueue(it.groups[0])
    consumer = it.mq.consumer("s", "g", ack="explicit")
    pulling = asyncio.create_task(consumer.pull(10))
    await queue.deliver([b"x"] * 3)
    found = await pulling
    (attachment,) = consumer.attachments
    before = attachment.held_bytes
    found[1].nack(timedelta(days=1))
    found[2].nack(timedelta(days=1))
    assert attachment.held_bytes == before
    await eventually(lambda: len(queue.settled) == 1)
    assert attachment.held_bytes == before // 3
    found[0].ack_later()
    await eventually(lambda: (attachment.held, attachment.held_bytes) == (0, 0))


@pytest.mark.parametrize(
    ("option", "most"),
    [("prefetch", CONSUMER_UNACKED_MAX), ("prefetch_bytes", CONSUMER_UNACKED_BYTES_MAX)],
)
async def test_limits_that_no_broker_allows_are_refused(
    it: Cluster, option: str, most: int
) -> None:
    for wrong in (0, -1, most + 1):
        with pytest.raises(InvalidArgument, match="prefetch"):
            it.mq.consumer("s", "g", **{option: wrong})  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="prefetch"):
            it.mq.ordered_consumer("s", "g", **{option: wrong})  # type: ignore[arg-type]


async def test_who_cannot_pull_in_one_queue_pulls_in_the_others() -> None:
    async with cluster(2) as it:
        queues = [FakeQueue(group) for group in it.groups]
        consumer = it.mq.consumer("s", "g", ack="explicit", prefetch_bytes=4 * KIB)
        pulling = asyncio.create_task(consumer.pull(10))
        await queues[0].deliver([bytes(5 * KIB)])
        held = await pulling
        await queues[1].deliver([b"other"])
        assert (await consumer.pull(10)).bodies == [b"other"]
        await held.ack_sync()
        await queues[0].deliver([b"again"])
        assert (await consumer.pull(10)).bodies == [b"again"]


async def test_who_sends_waits_while_what_it_sent_before_is_not_stored(it: Cluster) -> None:
    (group,) = it.groups
    waiting: list[Callable[[], None]] = []
    group.on_produce = lambda *each: waiting.append(lambda: group.serve(*each))
    sending = [asyncio.create_task(it.mq.send("s", bytes(MIB))) for _ in range(20)]
    await eventually(lambda: bool(waiting))
    (producer,) = it.mq.producers
    assert 0 < producer.waiting_bytes < 8 * MIB, "the other messages are with those who send them"
    group.on_produce = group.serve
    for answer in waiting:
        answer()
    assert len({receipt.sequence for receipt in await asyncio.gather(*sending)}) == 20


# --- over real brokers ----------------------------------------------------------------------------


async def test_an_idle_consumer_delays_neither_other_consumers_nor_its_group(node: Node) -> None:
    """The consumers share one connection. The idle consumer holds few messages and then stops
    pulling.
    """
    async with qmq.connect(node.address) as mq:
        await mq.send_many("flow", [b"%03d" % number + bytes(20 * KIB) for number in range(300)])
        idle = mq.consumer(
            "flow", "g", ack="explicit", prefetch_bytes=200 * KIB, pull_bytes=100 * KIB
        )
        held = await idle.pull(1)
        same_group, other_group = mq.consumer("flow", "g"), mq.consumer("flow", "other")
        (attachment,) = idle.attachments
        await eventually(lambda: not attachment.asked)
        assert 150 * KIB < attachment.held_bytes < 700 * KIB
        mine = [(await anext(same_group)).body[:3] for _ in range(300 - attachment.held)]
        everything = [(await anext(other_group)).body[:3] for _ in range(300)]
        assert everything == [b"%03d" % number for number in range(300)]
        assert not attachment.asked
        rest = held.bodies + [body for part in attachment.slices for body in part.bodies]
        assert sorted([*mine, *[body[:3] for body in rest]]) == everything
        assert (
            len(
                {
                    id(each.attachments[0].session.connection)
                    for each in (idle, same_group, other_group)
                }
            )
            == 1
        )  # type: ignore[union-attr]


async def test_the_broker_keeps_its_limit_of_bytes_and_the_rest_goes_to_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UnackedBytes.__init__, "__defaults__", (300 * KIB,))
    async with qmq.connect(node.address) as mq:
        producer = mq.producer("flow", batch_messages=1)
        await producer.send_many([b"%02d" % number + bytes(20 * KIB) for number in range(60)])
        greedy, other = (
            mq.consumer("flow", "g", ack="explicit", pull_bytes=100 * KIB) for _ in range(2)
        )
        held = await greedy.pull(1)
        (attachment,) = greedy.attachments
        await eventually(lambda: attachment.held_bytes > 300 * KIB)
        assert attachment.asked, "it waits at the broker"
        assert attachment.held_bytes < 300 * KIB + 100 * KIB
        taken = attachment.held
        for _ in range(60 - taken):
            await (await other.pull(1)).ack_sync()
        assert attachment.held == taken
        await other.close()
        await producer.send_many([bytes(20 * KIB)] * 10)
        for _ in range(taken - 1 + 10):
            await held.ack_sync()
            held = await greedy.pull(1)
            assert len(held) == 1, "it continues as it settles"


async def test_an_ordered_consumer_holds_no_more_bytes_than_it_may(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            qmq.SubjectConfig("lined", order=qmq.Order.STRICT, logical_partitions=8)
        )
        producer = mq.ordered_producer("lined", batch_messages=1)
        await producer.send_many([bytes(20 * KIB)] * 60, [b"k%d" % number for number in range(60)])
        consumer = mq.ordered_consumer(
            "lined", "g", ack="explicit", prefetch_bytes=200 * KIB, pull_bytes=50 * KIB
        )
        held = [await anext(consumer) for _ in range(5)]
        cores = [each.core for each in consumer.readers]
        lane_bytes = consumer.prefetch_bytes // len(cores)
        await eventually(
            lambda: all(
                each.core.open_bytes * 2 > lane_bytes or not each.is_pulling
                for each in consumer.readers
            )
        )
        assert 5 * 20 * KIB < sum(core.open_bytes for core in cores) < 300 * KIB
        for number in range(60):
            held.pop(0).ack_later()
            if len(held) + number + 1 < 60:
                held.append(await anext(consumer))
        assert sum(core.open_bytes for core in cores) == 0


async def test_a_consumer_that_never_reads_its_socket_delays_no_other_consumer(node: Node) -> None:
    """The broker bounds the unread bytes, and serves the other connections."""
    count = 500
    async with qmq.connect(node.address) as mq:
        await mq.send_many("flow", [bytes(50 * KIB)] * count)
        connection = await connect(node.data_address, "deaf")
        request = wire.Attach("flow", 0, "g", "deaf", "1", -1, "earliest", 30_000, [], [])
        session = wire.Attached.unpack(
            (await connection.call(FrameKind.ATTACH, request.pack(), timeout_s=10)).payload
        ).session
        connection.stream.pause_reading()
        for _ in range(50):
            pull = wire.pack_pull(wire.Pull(session, 1000, 8 * MIB, 60_000))
            connection.request(FrameKind.PULL, lambda _: None, pull, timeout_s=60)
        mine, others = (
            mq.consumer("flow", "g", ack="explicit"),
            mq.consumer("flow", "other", ack="explicit"),
        )
        taken = 0
        while taken < count:
            taken += len(found := await others.pull())
            found.ack_later()
        taken = 0
        while taken + await _unacked(mq, "deaf") < count:
            taken += len(found := await mine.pull(wait=timedelta(seconds=0.2)))
            await found.ack_sync()
        assert taken > 0
        connection.abort("enough")


async def _unacked(mq: qmq.Client, consumer: str) -> int:
    (group,) = await mq.metadata.describe_groups("flow", "g")
    return sum(each.unacked for each in group.consumers if each.name == consumer)
