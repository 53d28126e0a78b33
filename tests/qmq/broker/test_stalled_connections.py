"""A connection in which nothing moves does not stay open forever."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import ManualClock, eventually

from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.connection.server import CHECKS, DataConnection, DataServer, Ending, StallWatch
from qmq.limits import KIB, MIB
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.model import SubjectConfig
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind

HELLO = frames.frame(FrameKind.HELLO, 1, wire.Hello(wire.PROTOCOL_VERSION, "slow").pack())
LARGE = frames.header(FrameKind.PRODUCE, 2, 8 * MIB)
SMALL = frames.header(FrameKind.PRODUCE, 2, 1000)


@dataclass
class Part:
    awaits_rest: bool = False


@dataclass
class Stream:
    reader: Part = field(default_factory=Part)
    received_bytes: int = 0
    is_reading: bool = True
    unsent_bytes: int = 0
    taken_bytes: int = 0
    acknowledged_bytes: int = 0


def test_an_idle_connection_is_never_ended() -> None:
    watch, stream = StallWatch(), Stream()
    assert [watch.check(stream) for _ in range(10 * CHECKS)] == [None] * 10 * CHECKS


def test_a_byte_between_two_checks_is_progress() -> None:
    watch = StallWatch()
    for at in range(10 * CHECKS):
        stream = Stream(
            Part(awaits_rest=True), received_bytes=at, unsent_bytes=5000, taken_bytes=at
        )
        assert watch.check(stream) is None


def test_a_connection_that_we_do_not_read_from_is_not_to_blame() -> None:
    watch, stream = StallWatch(), Stream(Part(awaits_rest=True), is_reading=False)
    assert {watch.check(stream) for _ in range(10 * CHECKS)} == {None}
    stream.is_reading = True
    assert [watch.check(stream) for _ in range(CHECKS)] == [None] * (CHECKS - 1) + [Ending.CLOSE]


def test_who_reads_no_answers_is_ended_though_answers_are_added() -> None:
    watch, stream = StallWatch(), Stream(taken_bytes=7)
    for more in range(CHECKS):
        stream.unsent_bytes = 1000 + more
        assert watch.check(stream) is None
    assert watch.check(stream) is Ending.ABORT


def test_bytes_that_the_peer_acknowledges_are_progress() -> None:
    watch = StallWatch()
    for at in range(10 * CHECKS):
        stream = Stream(unsent_bytes=5000, taken_bytes=7, acknowledged_bytes=at)
        assert watch.check(stream) is None


@asynccontextmanager
async def served(folder: Path, stall_ms: int = 60_000) -> AsyncIterator[DataServer]:
    store = open_store(folder, LogConfig(), ManualClock())
    config = BrokerConfig(stall_ms=stall_ms)
    broker = Broker(store, SubjectConfig, ManualClock(), config, asyncio.get_running_loop())
    server = DataServer(broker)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.stop()
        store.close()


async def said_hello(server: DataServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HELLO)
    await reader.readexactly(frames.HEADER_BYTES)
    return reader, writer


def only(server: DataServer) -> DataConnection:
    (connection,) = server.open_connections
    return connection


@pytest.mark.parametrize(
    "begun", [LARGE + bytes(2 * MIB), SMALL + b"x", SMALL[:3]], ids=["large", "small", "header"]
)
async def test_a_frame_whose_rest_does_not_come_ends_its_connection_with_an_error(
    tmp_path: Path, begun: bytes
) -> None:
    async with served(tmp_path) as server:
        reader, writer = await said_hello(server)
        writer.write(begun)
        stream = only(server).stream
        await eventually(lambda: stream.received_bytes == len(HELLO + begun))
        for _ in range(CHECKS):
            server.end_stalled()
        assert stream.is_open
        server.end_stalled()
        heard = await reader.read(-1)
        assert b"the rest of a frame did not arrive" in heard
        await eventually(lambda: server.connections == 0)
        writer.close()


async def test_a_slow_upload_that_moves_is_not_ended(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        _, writer = await said_hello(server)
        writer.write(LARGE)
        stream = only(server).stream
        for sent in range(1, 3 * CHECKS):
            writer.write(b"x")
            await eventually(lambda sent=sent: stream.received_bytes == len(HELLO + LARGE) + sent)
            server.end_stalled()
        assert stream.is_open
        writer.close()


async def test_who_does_not_read_its_answers_is_aborted(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        loop = asyncio.get_running_loop()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            await loop.run_in_executor(None, client.sendall, HELLO)
            await eventually(lambda: server.connections == 1 and only(server).has_said_hello)
            connection = only(server)
            while connection.stream.is_writable:
                connection.send(frames.frame(FrameKind.OK, 3, bytes(MIB)))
                connection.flush()
            await eventually(lambda: server.end_stalled() or server.connections == 0)


async def test_who_reads_its_answers_slowly_is_not_ended(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 * KIB)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, HELLO)
            await eventually(lambda: server.connections == 1 and only(server).has_said_hello)
            connection = only(server)
            while connection.stream.is_writable:
                connection.send(frames.frame(FrameKind.OK, 3, bytes(MIB)))
                connection.flush()
            for _ in range(2 * CHECKS):
                server.end_stalled()
                assert await loop.sock_recv(client, 100_000)
            assert connection.stream.is_open
            connection.stream.abort()


async def test_a_server_checks_by_itself(tmp_path: Path) -> None:
    async with served(tmp_path, stall_ms=12) as server:
        reader, writer = await said_hello(server)
        writer.write(LARGE)
        heard = await reader.read(-1)
        assert b"the rest of a frame did not arrive" in heard
        writer.close()
