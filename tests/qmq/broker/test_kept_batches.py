"""A pull that ends inside a batch brings the whole batch; the next pull names it, and the broker
leaves it out.
"""

from __future__ import annotations

from pathlib import Path

from support import node_config, running

import qmq
from qmq.client.connection.connection import Connection, connect
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import Range

SUBJECT, GROUP = "s", "g"


async def pull(
    connection: Connection, session: int, messages_max: int, kept: int
) -> tuple[list[Range], int, int]:
    """(ranges, number of batches, bytes of the batches) of the answer."""
    payload = wire.pack_pull(wire.Pull(session, messages_max, 1 << 20, 0, kept))
    answer = await connection.call(FrameKind.PULL, payload, timeout_s=30)
    _, _, ranges, batches, at = wire.unpack_delivery(answer.payload)
    return ranges, batches, len(answer.payload) - at


async def test_a_batch_that_the_consumer_keeps_is_left_out(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        async with mq.producer(SUBJECT) as producer:
            await producer.send_many([bytes(1000)] * 4)
            await producer.send_many([bytes(1000)] * 2)
        connection = await connect(node.data_address, "test")
        request = wire.Attach(SUBJECT, 0, GROUP, "c", "life", -1, "earliest", 30_000, [], [])
        answer = await connection.call(FrameKind.ATTACH, request.pack(), timeout_s=30)
        attached = wire.Attached.unpack(answer.payload)
        assert attached.knows_kept
        ranges, batches, size = await pull(connection, attached.session, 1, -1)
        assert (ranges, batches) == ([Range(0, 1, 1, 0)], 1)
        assert size > 4000
        assert await pull(connection, attached.session, 1, 0) == ([Range(1, 1, 1, 0)], 0, 0)
        again = await pull(connection, attached.session, 1, -1)
        assert again == ([Range(2, 1, 1, 0)], 1, size)
        ranges, batches, size = await pull(connection, attached.session, 2, 0)
        assert (ranges, batches) == ([Range(3, 1, 1, 1), Range(4, 1, 1, 0)], 1)
        assert 2000 < size < 3000
        connection.close()
        await connection.wait_closed()


async def test_each_message_arrives_once_though_each_pull_ends_inside_a_batch(
    tmp_path: Path,
) -> None:
    sent = [b"%d" % number for number in range(1000)]
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        async with mq.producer(SUBJECT, batch_messages=90) as producer:
            await producer.send_many(sent)
        got: list[bytes] = []
        async with mq.consumer(SUBJECT, GROUP, prefetch=40) as consumer:
            while len(got) < len(sent):
                found = await consumer.pull(7)
                found.ack_later()
                got += found.bodies
                assert got == sent[: len(got)]
