"""Bodies that claim to be compressed and are not: a producer of another kind sent them, and the
broker cannot tell.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from qmq_ordering.hashing import logical_partition
from support import eventually
from support.hostile import crc, region_of

import qmq
from qmq.client.connection.connection import connect
from qmq.node.dev_node import Node
from qmq.wire.batch import encode, sent_envelope
from qmq.wire.batch_columns import REGION, REGION_BYTES, Columns
from qmq.wire.frame import FrameKind

GARBAGE = "garbage that claims zstd"


async def store(node: Node, region: bytes) -> None:
    """Send a batch unchanged."""
    connection = await connect(node.data_address, "another kind of producer")
    await connection.call(FrameKind.PRODUCE, sent_envelope(region) + region, timeout_s=10)
    connection.close()


def ordered_garbage(key: bytes) -> bytes:
    """One message to partition 1 of an ordered subject."""
    columns = Columns([b"poison"], keys=[key], logical_partitions=[logical_partition(key, 1024)])
    _, region = encode(
        b"o", columns, producer_id=7, batch_sequence=0, create_time_ms=1, partition=1
    )
    fields = list(REGION.unpack_from(region))
    fields[9] = 1
    return REGION.pack(*fields) + region[REGION_BYTES:]


async def test_garbage_ends_no_consumer_and_counts_as_failed(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("s", b"before")
        await store(node, region_of(GARBAGE))
        await mq.send("s", b"behind")
        await mq.metadata.set_group_settings("s", "g", attempts_max=2, retry_delays_ms=[0])
        consumer = mq.consumer("s", "g")
        assert [(await anext(consumer)).body for _ in range(2)] == [b"before", b"behind"]
        await mq.send("s", b"later")
        assert (await anext(consumer)).body == b"later"

        def is_dead() -> bool:
            share = node.broker.store.open_queue("s", 0).shares["g"]
            return share.deaths == 1 and not share.dying

        pulling = asyncio.create_task(consumer.pull(1, timedelta(seconds=30)))
        await eventually(is_dead)
        pulling.cancel()


async def test_a_listener_is_never_handed_garbage(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        seen: list[bytes] = []

        @mq.listener("s", group="g")
        async def handle(message: qmq.Message) -> None:
            seen.append(message.body)

        await mq.metadata.create_subject(qmq.SubjectConfig("s"))
        await store(node, region_of(GARBAGE))
        await mq.send("s", b"good")
        async with mq.listening():
            await eventually(lambda: seen == [b"good"])


@pytest.mark.parametrize("on_failure", ["park", "block"])
async def test_garbage_parks_its_key_or_blocks_its_lane_and_is_never_handed_out(
    node: Node, on_failure: str
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            qmq.SubjectConfig("o", order=qmq.Order.STRICT, logical_partitions=1024), partitions=1
        )
        await mq.send("o", b"a1", key="a")
        await store(node, ordered_garbage(b"p"))
        await mq.send("o", b"p2", key="p")
        await mq.send("o", b"a2", key="a")
        seen: list[bytes] = []

        async def handle(message: qmq.OrderedMessage) -> None:
            seen.append(message.body)

        consumer = mq.ordered_consumer(
            "o", "g", on_failure=on_failure, attempts_max=1, retry_delays_s=(0.01,)
        )
        running = asyncio.create_task(consumer.run(handle))
        if on_failure == "park":
            await eventually(lambda: seen == [b"a1", b"a2"])
            (parked,) = await mq.metadata.parked("o", "g")
            assert (parked.key, parked.messages) == (b"p", 2)
        else:
            lanes = node.broker.store.open_queue("o", 1).lanes
            await eventually(lambda: "g" in lanes and bool(lanes["g"].failures))
            assert b"p2" not in seen
        await consumer.close()
        await asyncio.gather(running, return_exceptions=True)


def test_the_checksum_of_garbage_holds() -> None:
    region = region_of(GARBAGE)
    assert sent_envelope(region)[12:16] == crc(region).to_bytes(4, "little")
