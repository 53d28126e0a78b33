"""Memory for incomplete frames is bounded over all connections."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support import eventually, node_config, running

import qmq
from qmq.broker.config import BrokerConfig
from qmq.limits import KIB, MIB
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind, PartialFrames, frame, header

HELLO = frame(FrameKind.HELLO, 1, wire.Hello(wire.PROTOCOL_VERSION, "stranger").pack())


async def begun(address: str, count: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent the first bytes of a PRODUCE of 4 MiB."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HELLO)
    length = int.from_bytes(await reader.readexactly(4), "little")
    await reader.readexactly(length - 4)  # WELCOME
    writer.write(header(FrameKind.PRODUCE, 2, 4 * MIB) + bytes(count))
    await writer.drain()
    return reader, writer


async def heard(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(30):
        return await reader.read()


async def test_of_many_that_send_frames_in_part_the_one_that_stands_still_goes(
    tmp_path: Path,
) -> None:
    config = node_config(tmp_path, broker=BrokerConfig(partial_frames_bytes_max=2 * MIB))
    async with running(config) as node, qmq.connect(node.address) as mq:
        await mq.send("s", b"before")
        partial = node.running.data.partial
        first, first_writer = await begun(node.data_address, 800 * KIB)
        await eventually(lambda: partial.bytes >= 800 * KIB)
        others = [await begun(node.data_address, 800 * KIB) for _ in range(2)]
        said = await heard(first)
        assert b"send this one again on a new connection" in said
        await eventually(lambda: partial.bytes <= 2 * MIB)
        body = bytes(3 * MIB // 2)  # fits the budget alone, not beside the others
        await mq.send("s", body)
        async with mq.consumer("s", "g") as consumer:
            found = list(await consumer.pull(2, timedelta(seconds=20)))
            found += [] if len(found) == 2 else list(await consumer.pull(1, timedelta(seconds=20)))
        assert [len(each.body) for each in found] == [6, len(body)]
        for writer in (first_writer, *(writer for _, writer in others)):
            writer.close()
        await eventually(lambda: partial.bytes == 0)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.booleans()), max_size=200),
    st.integers(1, 100),
)
def test_the_budget_holds_and_who_received_last_goes_last(
    steps: list[tuple[int, int, bool]], bytes_max: int
) -> None:
    held, order, ended = dict[int, int](), list[int](), list[object]()
    partial = PartialFrames(bytes_max, ended.append)
    for reader, size, is_end in steps:
        if reader in order:
            order.remove(reader)
        held.pop(reader, None)
        expected = list[int]()
        if is_end:
            partial.ended(reader)
        else:
            held[reader] = size
            order.append(reader)
            while sum(held.values()) > bytes_max:
                expected.append(order.pop(0))
                del held[expected[-1]]
            partial.received(reader, size)
        assert ended == expected
        ended.clear()
        assert partial.bytes == sum(held.values()) <= bytes_max
