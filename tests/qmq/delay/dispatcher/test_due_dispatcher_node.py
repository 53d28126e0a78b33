"""DueDispatcher against a real node, over real sockets, with a plan log in memory: stored once, in
order, through a split and a crash.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fake_brokers import MemoryLedger, due, places
from support import eventually, node_config, running

import qmq
from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import MetadataCache
from qmq.client.producing.producer import ProducerIds
from qmq.delay.batches import DueMessage
from qmq.delay.dispatcher import DueDispatcher
from qmq.log.queue import Queue
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire.batch import BatchView

KEYS = [b"key-%d" % number for number in range(50)]


def keyed(subject: str, count: int, *, begin: int = 0) -> list[DueMessage]:
    return [
        due(number, subject, key=KEYS[number % len(KEYS)], headers={"h": b"%d" % number})
        for number in range(begin, begin + count)
    ]


@asynccontextmanager
async def delivering(mq: qmq.Client, plan_log: MemoryLedger) -> AsyncIterator[DueDispatcher]:
    """A life of a master, whose links find brokers by this client's metaservers."""
    links = ConnectionPool(
        MetadataCache(lambda subject: mq.metadata.routes(subject, create=True), mq.metadata.watch),
        "dispatcher",
    )
    dispatcher = DueDispatcher(links, plan_log, batch_messages=20, new_producer_id=ProducerIds())
    try:
        yield dispatcher
    finally:
        await dispatcher.stop()
        await links.close()
        plan_log.is_closed = True


def batches(node: Node, subject: str) -> list[BatchView]:
    """All that is stored of a subject, partition by partition in the order of their numbers."""
    queues = [
        (number, queue)
        for (name, number), queue in node.store.queues.items()
        if name == subject.encode()
    ]
    return [
        view for _, queue in sorted(queues, key=lambda each: each[0]) for view in views(node, queue)
    ]


def views(node: Node, queue: Queue) -> list[BatchView]:
    """A queue's batches, without the command message."""
    entries = queue.index.entries(queue.index.first, queue.index.count)
    end = queue.sealed.sequence if queue.sealed is not None else queue.next_sequence
    return [
        BatchView.parse(b"".join(node.store.read(queue, entry)))
        for entry in entries
        if entry.base_sequence < end
    ]


def all_done(plan_log: MemoryLedger, count: int) -> bool:
    return Counter(plan_log.states.values()) == {"done": count}


async def test_due_messages_of_many_subjects_are_stored_once_with_their_ids(tmp_path: Path) -> None:
    plan_log = MemoryLedger()
    async with (
        running(node_config(tmp_path)) as node,
        qmq.connect(node.address) as mq,
        delivering(mq, plan_log) as dispatcher,
    ):
        messages = [
            message
            for number in range(100)
            for message in [due(number * 10 + at, f"s{number}") for at in range(10)]
        ]
        dispatcher.put(messages)
        await eventually(lambda: all_done(plan_log, 1_000))
        stored = [view for number in range(100) for view in batches(node, f"s{number}")]
        ids = [each for view in stored for each in view.message_ids() or []]
        assert ids == [message.message_id for message in messages]
        assert [body for view in stored for body in view.bodies()] == [
            message.body for message in messages
        ]
        assert (
            dispatcher.waiting,
            dispatcher.planned,
            dispatcher.troubles(),
            dispatcher.resent,
        ) == (0, 0, [], 0)


async def test_an_ordered_subject_is_split_under_way_and_each_key_stays_in_order(
    tmp_path: Path,
) -> None:
    plan_log = MemoryLedger()
    async with (
        running(node_config(tmp_path)) as node,
        qmq.connect(node.address) as mq,
        delivering(mq, plan_log) as dispatcher,
    ):
        await mq.metadata.create_subject(
            SubjectConfig("s", order=Order.STRICT, logical_partitions=64), partitions=2
        )
        splitting: asyncio.Task[object] | None = None
        for part in range(20):
            dispatcher.put(keyed("s", 500, begin=part * 500))
            if part == 5:
                splitting = asyncio.create_task(
                    mq.metadata.change_route("s", split=pb.SplitOperation(partition=1))
                )
            await asyncio.sleep(0)
            if part in (5, 9):
                await eventually(lambda: dispatcher.waiting < 1_000)
        assert splitting is not None
        await splitting
        await eventually(lambda: all_done(plan_log, 10_000))
        await check_order(node, keyed("s", 10_000))


async def check_order(node: Node, messages: list[DueMessage]) -> None:
    """Each key's messages are stored once, in order."""
    found: dict[bytes, list[int]] = {}
    for view in batches(node, "s"):
        for key, body in zip(view.keys() or [], view.bodies(), strict=True):
            found.setdefault(key, []).append(int(body))
    expected: dict[bytes, list[int]] = {}
    for message in messages:
        expected.setdefault(message.key, []).append(int(message.body))
    assert found == expected


async def test_open_plans_are_stored_once_after_a_crash_also_across_a_split(tmp_path: Path) -> None:
    messages, plan_log = keyed("s", 3_000), MemoryLedger()
    async with running(node_config(tmp_path)) as node:
        async with qmq.connect(node.address) as mq:
            await mq.metadata.create_subject(
                SubjectConfig("s", order=Order.STRICT, logical_partitions=64), partitions=2
            )
            async with delivering(mq, plan_log) as dispatcher:
                dispatcher.put(messages)
                await eventually(lambda: len(plan_log.log) > 60 and len(plan_log.open()) > 3)
            await mq.metadata.change_route("s", split=pb.SplitOperation(partition=1))
        again = MemoryLedger(plan_log.log)
        by_place = {message.place: message for message in messages}
        async with qmq.connect(node.address) as mq, delivering(mq, again) as dispatcher:
            assert again.open()
            for plan in again.open():
                dispatcher.resume(plan, [by_place[place] for place in places(plan)])
            dispatcher.put(
                [
                    message
                    for message in messages
                    if again.states.get(message.place, "pending") == "pending"
                ]
            )
            await eventually(lambda: all_done(again, 3_000))
            assert (dispatcher.planned, dispatcher.resent) == (0, 0)
        await check_order(node, messages)
