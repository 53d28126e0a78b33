"""A recorded conversation is worthless when it is sent again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from access_support import Papers, relayed, secured
from support import eventually

import qmq
from qmq.client.connection.connection import connect
from qmq.rpc.tls_network import network_of
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import Find


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers(tmp_path / "papers")


async def replay(address: str, said: list[bytes]) -> None:
    """Say the same again, piece by piece, and listen until the server ends it."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with suppress(OSError):
        for piece in said:
            writer.write(piece)
            await writer.drain()
            await asyncio.wait_for(reader.read(65_536), 20)
        writer.write_eof()
        while await reader.read(65_536):
            pass
    writer.close()


async def test_a_replayed_handshake_is_refused(tmp_path: Path, papers: Papers) -> None:
    async with secured(tmp_path / "data", papers.server) as node:
        async with qmq.connect(node.address, tls=papers.client) as mq:
            await mq.send("s", b"x")
        server = node.running.data
        async with relayed(node.data_address) as (address, _, said):
            connection = await connect(address, "victim", network_of(papers.client))
            await connection.call(FrameKind.FIND, Find("s", 0, "0" * 16, 1, 1).pack(), timeout_s=20)
            assert sum(server.throttle.connections.values()) == 1
            connection.close()
            await connection.wait_closed()
        await eventually(lambda: not server.connections)
        accepted = node.broker.counters.accepted
        greeted = list[int]()
        admit = server.throttle.admit
        server.throttle.admit = lambda principal: greeted.append(1) or admit(principal)
        for pieces in (said, [b"".join(said)], said[:1], said[1:]):
            await replay(node.data_address, pieces)
        assert node.broker.counters.accepted == accepted + 4
        assert not greeted
