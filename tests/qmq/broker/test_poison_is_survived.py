"""Batches with invalid columns that an older version accepted: readers get an error, and the broker
keeps serving.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import LpRange
from support.hostile import LIES, crc, region_of

import qmq
from qmq.broker.dispatch.lanes import LaneResultReader
from qmq.broker.dispatch.pull import BatchReader, failures_in
from qmq.client.connection.connection import connect
from qmq.errors import CorruptBatch, LogDamaged, MessageNotFound
from qmq.log.actions import LaneBegin
from qmq.log.store import Intake
from qmq.model import MessageId
from qmq.node.dev_node import Node
from qmq.rpc.channel import LOOK_INSIDE
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode
from qmq.wire.batch_columns import BatchFlag, Columns, Layout, parse_header
from qmq.wire.frame import FrameKind


def store(
    node: Node, region: bytes, subject: str = "s", partition: int = 0, *, bloom: int = 0
) -> int:
    """Store a batch past the intake checks. Returns its sequence."""
    queue = node.broker.store.open_queue(subject, partition)
    sequence = queue.next_sequence
    node.broker.append_own([Intake(queue, region, crc(region), parse_header(region), bloom)])
    return sequence


def astray(
    column: str, value: int, flags: int = 0, partition: int = 0, subject: bytes = b"s"
) -> bytes:
    """A batch of one message, of which the first number of one column is another one."""
    columns = Columns([b"astray"], keys=[b"k"], tags=[("t",)], headers=[{"qmq-group": b"g"}])
    columns.logical_partitions = [logical_partition(b"k", 64)] if partition else None
    _, region = encode(
        subject,
        columns,
        producer_id=7,
        batch_sequence=4,
        create_time_ms=1,
        flags=flags,
        partition=partition,
    )
    at = getattr(Layout.walk(region, parse_header(region)), column)
    return region[: at + 4] + value.to_bytes(4, "little", signed=True) + region[at + 8 :]


@pytest.mark.parametrize("lie", LIES)
async def test_a_request_for_a_damaged_message_fails_and_others_are_served(
    node: Node, lie: str
) -> None:
    async with qmq.connect(node.address) as mq:
        good = await mq.send("s", b"good", tags=["t"])
        sequence = store(node, region_of(lie), bloom=LOOK_INSIDE)
        with suppress(MessageNotFound, CorruptBatch):
            await mq.metadata.find_every(str(MessageId(7, 3, 0)))
        place = await mq.metadata.find_message("s", str(good.id))
        assert place.body == b"good"
        place.sequence = sequence
        assert (await mq.metadata.trace_message(place)).known_since_ms == 0
        connection = await connect(node.data_address, "a reader")
        for tags in ([], ["t"], ["nobody's"]):
            fetch = wire.Fetch("s", 0, 0, 1 << 60, 0, 1 << 20, tags, [], [], 1)
            assert (
                await connection.call(FrameKind.FETCH, fetch.pack(), timeout_s=10)
            ).kind == FrameKind.FETCHED
        connection.close()
        await mq.send("s", b"behind", tags=["t"])
        async with mq.consumer("s", "g", tags_any=["t"]) as consumer:
            assert [(await anext(consumer)).body for _ in range(2)] == [b"good", b"behind"]


@pytest.mark.parametrize(
    ("column", "value"), [("header_list", 1 << 30), ("header_list", -1), ("tag_list", -5)]
)
async def test_a_batch_with_unreadable_columns_is_skipped(
    node: Node, column: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig("s"))
        consumer = mq.consumer("s", "g", tags_any=["t"])
        waiting = consumer.pull(1, timedelta(seconds=10))
        store(node, astray(column, value, BatchFlag.DIRECTED), bloom=LOOK_INSIDE)
        connection = await connect(node.data_address, "a reader")
        fetch = wire.Fetch("s", 0, 0, 1 << 60, 0, 1 << 20, ["t"], [], [], 1)
        assert (
            await connection.call(FrameKind.FETCH, fetch.pack(), timeout_s=10)
        ).kind == FrameKind.FETCHED
        connection.close()
        await mq.send("s", b"behind", tags=["t"])
        assert [message.body for message in await waiting] == [b"behind"]
        assert "is skipped" in caplog.text
        await consumer.close()


async def test_a_message_with_an_unreadable_attempt_counts_as_new(node: Node) -> None:
    """The count is looked up by a timer when a lease ends, where no caller would get an error."""
    sequence = store(node, astray("header_list", -1, BatchFlag.DIRECTED), bloom=LOOK_INSIDE)
    queue = node.broker.store.open_queue("s", 0)
    assert failures_in(node.broker.store, queue, BatchReader(queue))(sequence, 1) == [(1, 0)]


async def test_an_unreadable_batch_of_a_lane_is_an_error_that_names_the_next_sequence(
    node: Node,
) -> None:
    # it has no keys and no logical partitions
    store(node, region_of("a create time before 1970", subject=b"o"), "o", 1)
    queue = node.broker.store.open_queue("o", 1)
    node.broker.store.act(LaneBegin("o", 1, "g", "", 0, 64, 0, 0))
    reader = LaneResultReader(
        node.broker.store, queue, queue.lanes["g"], LpRange(0, 32), LpRange(0, 64)
    )
    with pytest.raises(LogDamaged, match="qmq group reset --to 1"):
        reader.read(0, 10, 1 << 20)
