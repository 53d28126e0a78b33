"""Messages of gRPC that are not whole are counted as their bytes pass, and bounded for each port:
places, bytes and time.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from support import eventually

from qmq.gateway import server as gateway_server
from qmq.gateway.config import GatewayConfig
from qmq.rpc.network import Network, RpcPort
from qmq.rpc.relay import RpcRelay, UnfinishedMessages, relay
from qmq.rpc.server import RpcBounds, RpcListener, rpc_server
from qmq.rpc.strangers import StrangerBounds, Strangers
from qmq.testing import TestCluster

HOST, OTHER_HOST = "127.0.0.1", "127.0.0.2"
LONG_S = 3600.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING = 0, 1, 3, 4, 6
END, END_HEADERS, PADDED = 1, 4, 8
MESSAGE_BYTES = 1_000_000


def frame(kind: int, call: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + call.to_bytes(4, "big") + payload
    )


def message(size: int, sent: int | None = None) -> bytes:
    """A message of gRPC, or its first bytes."""
    return (b"\x00" + struct.pack("!I", size) + bytes(size))[:sent]


def head(path: str, call: int) -> bytes:
    """The frame that begins a call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "h",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(HEADERS, call, block, END_HEADERS)


# --- counting -------------------------------------------------------------------------------------


class Counted:
    """A connection whose bytes are counted."""

    def __init__(self, bounds: StrangerBounds | None = None) -> None:
        self.strangers = Strangers(bounds or StrangerBounds(100, time_s=LONG_S), lambda: 0.0)
        self.ends = 0
        self.messages = UnfinishedMessages(self.strangers, HOST, self._end)
        self.messages.sent(PREFACE)

    def _end(self) -> None:
        self.ends += 1

    def sent(self, data: bytes) -> tuple[int, int]:
        """The unfinished messages and their bytes, after these."""
        self.messages.sent(data)
        return len(self.strangers), self.strangers.bytes


def test_the_bytes_of_a_message_count_until_it_is_whole() -> None:
    found = Counted()
    whole = message(100)
    assert found.sent(frame(HEADERS, 1, b"name") + frame(HEADERS, 3, b"name")) == (0, 0)
    assert found.sent(frame(DATA, 1, whole[:40])) == (1, 40)
    assert found.sent(frame(DATA, 3, whole[:3])) == (2, 43)
    assert found.sent(
        frame(PING, 0, bytes(8)) + frame(DATA, 1, whole[40:] + whole + whole[:7])
    ) == (2, 10)
    assert found.sent(frame(DATA, 3, b"\xff" + whole[3:] + bytes(255), PADDED)) == (1, 7)
    assert found.sent(frame(DATA, 1, b"", END)) == (0, 0)


@pytest.mark.parametrize("end", [frame(RESET, 1, bytes(4)), frame(HEADERS, 1, b"trailers", END)])
@pytest.mark.parametrize("is_answer", [False, True])
def test_the_end_of_a_call_from_either_side_ends_its_message(end: bytes, is_answer: bool) -> None:
    found = Counted()
    assert found.sent(frame(HEADERS, 1) + frame(DATA, 1, message(100, 40))) == (1, 40)
    (found.messages.answered if is_answer else found.messages.sent)(end)
    assert found.sent(b"") == (0, 0)
    assert found.sent(frame(DATA, 1, bytes(50))) == (0, 0)


def test_any_cuts_of_the_bytes_give_the_same_count() -> None:
    chosen = random.Random(7)
    for _ in range(200):
        whole = bytearray()
        for _ in range(30):
            call, size = chosen.randrange(1, 7, 2), chosen.randrange(300)
            payload = chosen.choice(
                [message(size), message(size, size // 2), bytes(size), b"\x05" + bytes(size)]
            )
            whole += frame(
                chosen.choice([DATA, DATA, HEADERS, RESET, PING]),
                call,
                payload,
                chosen.choice([0, 0, END, PADDED]),
            )
        whole += chosen.randbytes(chosen.choice([0, 500]))
        at_once, in_pieces = Counted(), Counted()
        expected = at_once.sent(bytes(whole))
        while whole:
            size = chosen.choice([1, 2, 9, 100])
            found = in_pieces.sent(bytes(whole[:size]))
            del whole[:size]
        assert found == expected


def test_beyond_the_bytes_the_connection_ends_and_holds_nothing() -> None:
    found = Counted(StrangerBounds(100, bytes_max=100, time_s=LONG_S))
    assert found.sent(frame(HEADERS, 1) + frame(HEADERS, 3)) == (0, 0)
    assert found.sent(
        frame(DATA, 1, message(500, 60))
        + frame(DATA, 3, message(500, 60))
        + frame(DATA, 1, bytes(60))
    ) == (0, 0)
    assert (found.ends, found.messages.is_over) == (1, True)


# --- at a port ------------------------------------------------------------------------------------


class Client:
    """A connection that speaks HTTP/2 by hand, within the window that each call has from its
    beginning.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, port: int, host: str = HOST) -> Client:
        found = cls(*await asyncio.open_connection(HOST, port, local_addr=(host, 0)))
        found.writer.write(PREFACE + frame(SETTINGS, 0))
        return found

    def begin(self, path: str, sent: int, call: int = 1) -> None:
        """Send the first bytes of a large message."""
        data = message(MESSAGE_BYTES, sent)
        self.writer.write(
            head(path, call)
            + b"".join(
                frame(DATA, call, data[place : place + 16_384]) for place in range(0, sent, 16_384)
            )
        )

    async def ended(self) -> bool:
        """Wait for the end."""
        try:
            while await self.reader.read(65_536):
                pass
        except ConnectionError:
            pass
        return True


async def _follow(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for each in requests:
        yield each


async def _ask(request: bytes, _: Any) -> bytes:
    return request


@asynccontextmanager
async def served(bounds: StrangerBounds) -> AsyncIterator[RpcRelay]:
    door = RpcListener(replace(RpcBounds(100, 100), unfinished=bounds))
    server = rpc_server(door)
    handlers = {
        "Follow": grpc.stream_stream_rpc_method_handler(_follow),
        "Ask": grpc.unary_unary_rpc_method_handler(_ask),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
    found = await relay(server, HOST, 0, door)
    try:
        yield found
    finally:
        await found.stop(None)


@pytest.mark.parametrize("path", ["/t/Follow", "/t/Ask"])
async def test_unfinished_messages_of_an_address_are_bounded_and_others_stay(path: str) -> None:
    async with served(StrangerBounds(100, bytes_max=200_000, time_s=LONG_S)) as port:
        other = await Client.of(port.port, OTHER_HOST)
        other.begin(path, 40_000)
        await eventually(lambda: port.unfinished.bytes == 40_000)
        clients = [await Client.of(port.port) for _ in range(8)]
        for place, each in enumerate(clients):
            each.begin(path, 50_000)
            if place >= 3:
                assert await clients[place - 3].ended()
            held = 40_000 + 50_000 * min(place + 1, 3)
            await eventually(lambda held=held: port.unfinished.bytes == held)  # type: ignore[misc]
        assert not other.reader.at_eof()
        for each in (other, *clients):
            each.writer.close()
        await eventually(lambda: not len(port.unfinished) and not port.unfinished.bytes)


async def test_a_message_that_stops_half_way_ends_its_connection_when_its_time_is_over() -> None:
    async with served(StrangerBounds(100, time_s=0)) as port:
        client = await Client.of(port.port)
        client.begin("/t/Follow", 100)
        assert await client.ended()
        client.writer.close()


async def test_calls_that_the_server_refuses_half_way_leave_nothing_unfinished() -> None:
    async with served(StrangerBounds(100, time_s=LONG_S)) as port:
        client = await Client.of(port.port)
        for call in (1, 3, 5):
            client.begin("/t/Unknown", 10_000, call)
        async with grpc.aio.insecure_channel(f"{HOST}:{port.port}") as channel:
            body = bytes(MESSAGE_BYTES)
            assert (
                await asyncio.gather(*(channel.unary_unary("/t/Ask")(body) for _ in range(5)))
                == [body] * 5
            )
        await eventually(lambda: not len(port.unfinished))
        client.writer.close()


class Relayed(Network):
    """A network whose gRPC ports are relayed, as those that other machines reach."""

    async def serve(
        self, server: grpc.aio.Server, host: str, port: int, door: RpcListener
    ) -> RpcPort:
        return await relay(server, host, port, door)


async def test_unfinished_commands_at_a_gateway_without_credentials_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = StrangerBounds(100, bytes_max=200_000, time_s=LONG_S)
    monkeypatch.setattr(gateway_server, "BOUNDS", replace(gateway_server.BOUNDS, unfinished=bounds))
    async with TestCluster() as cluster:
        gateway = gateway_server.GatewayServer(
            cluster.client(), GatewayConfig(port=0), network=Relayed()
        )
        await gateway.start()
        clients = [await Client.of(gateway.port) for _ in range(5)]
        for each in clients:
            each.begin("/apache.rocketmq.v2.MessagingService/Telemetry", 50_000)
        ends = [asyncio.ensure_future(each.ended()) for each in clients]
        assert await next(asyncio.as_completed(ends))
        await gateway.stop()
        for each in clients:
            each.writer.close()
        await asyncio.gather(*ends)
