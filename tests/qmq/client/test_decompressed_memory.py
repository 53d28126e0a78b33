"""Bodies that are small on disk and large when they are decompressed: who reads them holds a
bounded part of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from support import memory_at_most

import qmq
from qmq.client.group_reading import reading_of
from qmq.limits import KIB, MIB
from qmq.node.dev_node import Node

COUNT = 80
"""Messages of 1 MiB in the subject `zeros`: a few KiB on disk."""


@pytest.fixture
async def mq(node: Node) -> AsyncIterator[qmq.Client]:
    async with qmq.connect(node.address) as found:
        async with found.producer("zeros", compression="zstd") as producer:
            for _ in range(COUNT):
                await producer.send(bytes(MIB))
        yield found


async def fill_ordered(mq: qmq.Client) -> None:
    """Send as many messages of 1 MiB, each with another key, to the subject `ordered`."""
    await mq.metadata.create_subject(
        qmq.SubjectConfig("ordered", order=qmq.Order.STRICT, logical_partitions=1)
    )
    async with mq.ordered_producer("ordered", compression="zstd") as producer:
        for number in range(COUNT):
            await producer.send(bytes(MIB), key=str(number))


async def test_a_browse_decompresses_batch_by_batch(mq: qmq.Client) -> None:
    with memory_at_most(16 * MIB):
        sizes = [len(message.body) async for message in mq.browse("zeros")]
    assert sizes == [MIB] * COUNT


async def test_a_search_for_content_decompresses_batch_by_batch(mq: qmq.Client) -> None:
    with memory_at_most(16 * MIB):
        assert [message async for message in mq.browse("zeros", content=b"zzz")] == []


@pytest.mark.parametrize("subject", ["zeros", "ordered"])
async def test_a_reading_hands_out_a_bounded_part_and_loses_nothing(
    mq: qmq.Client, subject: str
) -> None:
    await fill_ordered(mq)
    reading = await reading_of(mq, subject, "g")
    attempts: list[int] = []
    with memory_at_most(24 * MIB):
        while len(attempts) < COUNT:
            for each in await reading.receive(1000, 20):
                assert len(each.body) == MIB
                each.body = b""
                attempts.append(each.attempt)
    assert (attempts, reading.unsettled) == ([1] * COUNT, COUNT)
    await reading.close()


async def test_a_bulk_pull_of_an_ordered_subject_is_bounded_when_it_is_decompressed(
    mq: qmq.Client,
) -> None:
    await fill_ordered(mq)
    sizes: list[int] = []
    async with mq.ordered_consumer("ordered", "g", ack="explicit") as consumer:
        with memory_at_most(24 * MIB):
            while len(sizes) < COUNT:
                pulled = await consumer.pull(1000)
                sizes += map(len, pulled.bodies)
                await pulled.ack()
                del pulled
    assert sizes == [MIB] * COUNT


async def test_messages_that_wait_for_their_key_do_not_keep_their_batches_decompressed(
    mq: qmq.Client,
) -> None:
    await mq.metadata.create_subject(
        qmq.SubjectConfig("ordered", order=qmq.Order.STRICT, logical_partitions=1)
    )
    keys = [key for number in range(6 * COUNT) for key in (str(number), "slow")]
    async with mq.ordered_producer("ordered", compression="zstd") as producer:
        await asyncio.gather(*(producer.send(bytes(64 * KIB), key=key) for key in keys))
    done: set[str] = set()
    async with mq.ordered_consumer(
        "ordered", "g", ack="explicit", prefetch_bytes=8 * MIB
    ) as consumer:
        with memory_at_most(24 * MIB):
            async for message in consumer:
                if message.key != "slow":
                    done.add(message.key)
                    await message.ack()
                if len(done) == 6 * COUNT:
                    break


async def test_a_listeners_batch_is_bounded_when_it_is_decompressed(mq: qmq.Client) -> None:
    sizes: list[int] = []

    @mq.listener("zeros", group="g", batch=(1000, timedelta(seconds=2)), concurrency=1)
    async def handler(bodies: list[bytes]) -> None:
        sizes.extend(map(len, bodies))
        if len(sizes) == COUNT:
            mq.stop()

    with memory_at_most(40 * MIB):
        await mq.run()
    assert sizes == [MIB] * COUNT
