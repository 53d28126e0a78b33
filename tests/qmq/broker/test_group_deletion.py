"""A group can be deleted, and a later group with its name is new."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

import pytest
from support import eventually

import qmq
from qmq.broker.reading.history import MessageHistory
from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.errors import InvalidArgument, UnknownGroup
from qmq.model import Order, SubjectConfig
from qmq.testing import TestCluster


async def test_a_deleted_group_is_gone_also_behind_a_restart_and_starts_over() -> None:
    async with TestCluster() as cluster:
        mq = cluster.client()
        await mq.send("s", b"1")
        async with mq.consumer("s", "g") as consumer:
            await (await consumer.pull(1)).ack_sync()
            with pytest.raises(InvalidArgument, match="stop them first"):
                await mq.metadata.delete_group("s", "g")
        assert await mq.metadata.delete_group("s", "g") == 1
        name = cluster.master()
        await cluster.kill(name)
        await cluster.restart(name)
        await cluster.until_master()
        assert not await mq.metadata.describe_groups("s")
        with pytest.raises(UnknownGroup, match="never consumed"):
            await mq.metadata.delete_group("s", "g")
        async with mq.consumer("s", "g") as consumer:
            assert (await consumer.pull(1)).bodies == [b"1"]


@asynccontextmanager
async def reading(mq: qmq.Client, *fails: bytes) -> AsyncIterator[list[bytes]]:
    """A consumer of group g of the ordered subject o, and what it has seen; on some messages it
    fails, and their keys are parked.
    """
    seen: list[bytes] = []

    async def handle(message: OrderedMessage) -> None:
        seen.append(message.body)
        if message.body in fails:
            raise ValueError("it fails")

    consumer = mq.ordered_consumer(
        "o", "g", on_failure="park", attempts_max=1, retry_delays_s=(0.0,)
    )
    task = asyncio.create_task(consumer.run(handle))
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await consumer.close()


async def created(mq: qmq.Client) -> None:
    await mq.metadata.create_subject(
        SubjectConfig("o", order=Order.STRICT, logical_partitions=16), partitions=2
    )


async def test_a_deleted_group_of_an_ordered_subject_starts_over_after_a_restart_too() -> None:
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        await created(mq)
        for body, key in ((b"1", "k"), (b"2", "l")):
            await mq.send("o", body, key=key)
        async with reading(mq, b"2") as seen:
            await eventually(lambda: sorted(seen) == [b"1", b"2"])
            async with asyncio.timeout(5):
                while not await mq.metadata.parked("o", "g"):
                    await asyncio.sleep(0)
            with pytest.raises(InvalidArgument, match="stop them first"):
                await mq.metadata.delete_group("o", "g")
        assert await mq.metadata.delete_group("o", "g") >= 1
        name = cluster.master()
        await cluster.kill(name)
        await cluster.restart(name)
        await cluster.until_master()
        assert not await mq.metadata.parked("o", "g")
        with pytest.raises(UnknownGroup, match="never consumed"):
            await mq.metadata.delete_group("o", "g")
        async with reading(mq) as seen:
            await eventually(lambda: sorted(seen) == [b"1", b"2"])


async def test_the_trail_of_an_ordered_message_says_that_its_group_was_deleted() -> None:
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        await created(mq)
        sent = await mq.send("o", b"1", key="k")
        async with reading(mq) as seen:
            await eventually(lambda: seen == [b"1"])
        await mq.metadata.delete_group("o", "g")
        async with reading(mq) as seen:
            await eventually(lambda: seen == [b"1"])
        broker = cluster.machine(cluster.master()).node.broker
        queue = next(
            each
            for (_, number), each in broker.store.queues.items()
            if number and each.next_sequence > each.start_sequence
        )
        page = await MessageHistory(broker, "g1").follow(
            "o", queue.id.partition, queue.start_sequence, "g"
        )
        kinds = [event.kind for event in page.events]
        assert kinds[: kinds.index("forget") + 1][-2:] == ["done", "forget"], (sent, kinds)
        assert "grant" in kinds[kinds.index("forget") :]


async def test_a_trail_begins_after_the_deletion_of_an_earlier_subject_of_the_name() -> None:
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        for body in (b"old", b"new"):
            await mq.metadata.create_subject(SubjectConfig("s"))
            await mq.send("s", body)
            async with mq.consumer("s", "g", ack="explicit") as consumer:
                (message,) = await consumer.pull(1, timedelta(seconds=10))
                await message.ack_sync()
            if body == b"old":
                await mq.metadata.delete_subject("s")
        broker = cluster.machine(cluster.master()).node.broker
        for group in ("", "g"):
            page = await MessageHistory(broker, "g1").follow("s", 0, message.sequence, group)
            assert [event.kind for event in page.events if event.kind != "join"][:2] == [
                "pull",
                "ack",
            ]
