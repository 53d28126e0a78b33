"""Garbage on the data port: the connection is closed, memory stays flat, other clients notice
nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
from contextlib import suppress
from pathlib import Path

import pytest
from support import eventually, node_config, running

import qmq
from qmq.broker.config import BrokerConfig
from qmq.node.dev_node import Node
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind, FrameReader, frame

HELLO = frame(FrameKind.HELLO, 1, wire.Hello(1, "test").pack())
ENVELOPE, REGION = encode(
    b"s", Columns([b"body"] * 3), producer_id=1, batch_sequence=0, create_time_ms=0
)
PRODUCE = frame(FrameKind.PRODUCE, 2, ENVELOPE + REGION)


async def talk(node: Node, data: bytes, *, close: bool = False) -> bytes:
    """Send bytes, then read until the broker closes (or after our own end of file); returns what
    was read.
    """
    host, port = node.data_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        with suppress(ConnectionError):
            if close:
                writer.write_eof()
            async with asyncio.timeout(10):
                return await reader.read(-1)
        return b""
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(500),
    "noise": os.urandom(4096),
    "zeros": bytes(64),
    "a frame of 2 GiB": (2**31).to_bytes(4, "little") * 8,
    "before hello": frame(FrameKind.PRODUCE, 1, b"before hello"),
    "no JSON": frame(FrameKind.HELLO, 1, b"no json"),
    "a newer version": frame(FrameKind.HELLO, 1, wire.Hello(99, "test").pack()),
    "a frame of 4 GiB": HELLO + (2**32 - 1).to_bytes(4, "little") + bytes(12),
    "an answer": HELLO + frame(FrameKind.WELCOME, 2, b""),
    "a short pull": HELLO + frame(FrameKind.PULL, 2, b"short"),
    "a settlement of all ones": HELLO + frame(FrameKind.SETTLE, 2, b"\xff" * 40),
    "a batch cut short": HELLO + frame(FrameKind.PRODUCE, 2, PRODUCE[16:][:-8]),
    "a bit flipped": HELLO
    + frame(FrameKind.PRODUCE, 2, ENVELOPE + bytes([REGION[0] ^ 1]) + REGION[1:]),
    "nested JSON": HELLO + frame(FrameKind.ATTACH, 2, b"[" * 3000),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_closes_only_its_own_connection(node: Node, kind: str) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("s", b"before")
        await talk(node, GARBAGE[kind])
        await mq.send("s", b"after")
        found = await mq.consumer("s", "g").pull(10)
        assert found.bodies[0] == b"before"


async def test_every_truncation_of_a_valid_conversation_stores_nothing_or_all(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("s", b"first")
    for end in range(0, len(HELLO + PRODUCE), 3):
        await talk(node, (HELLO + PRODUCE)[:end], close=True)
    assert node.store.queue("s", 0).next_sequence == 1
    await talk(node, HELLO + PRODUCE, close=True)
    await eventually(lambda: node.store.queue("s", 0).next_sequence == 4)


async def test_random_bytes_by_the_thousand_leave_memory_flat(node: Node) -> None:
    chosen = random.Random(7)
    async with qmq.connect(node.address) as mq:
        await mq.send("s", b"x")
        for _ in range(50):
            await talk(node, chosen.randbytes(2000))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(500):
            data = bytearray(HELLO + PRODUCE)
            for _ in range(chosen.randrange(1, 4)):
                data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
            await talk(node, bytes(data), close=True)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024
        await mq.send("s", b"x")


async def test_a_corrupt_batch_is_refused_with_its_error(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("s", b"x")
    answer = await talk(node, HELLO + frame(FrameKind.PRODUCE, 2, ENVELOPE + REGION[:-1] + b"!"))
    reader = FrameReader()
    reader.get_buffer()[: len(answer)] = answer
    kinds = [(each.kind, bytes(each.payload)) for each in reader.received(len(answer))]
    assert kinds[-1][0] == FrameKind.ERROR
    assert wire.unpack_error(kinds[-1][1]).code == 202
    assert node.store.queue("s", 0).next_sequence == 1


async def test_a_silent_connection_is_closed_when_it_does_not_say_hello(tmp_path: Path) -> None:
    config = node_config(tmp_path, broker=BrokerConfig(hello_timeout_ms=100, connections_max=5))
    async with running(config) as node:
        assert await talk(node, b"") == b""
        host, port = node.data_address.split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        for reader, writer in idle:
            async with asyncio.timeout(10):
                await reader.read(-1)
            writer.close()
        async with qmq.connect(node.address) as mq:
            await mq.send("s", b"x")
