"""A listener that is closed."""

from __future__ import annotations

import asyncio

import pytest

from qmq.rpc.network import NETWORK


class Accepted(asyncio.Protocol):
    """Closes its connection as soon as it is open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def test_a_connection_accepted_while_the_listener_closes_is_closed() -> None:
    def accept() -> Accepted:
        listener.close()  # asyncio has accepted the connection, and made no transport for it
        return Accepted()

    listener = await NETWORK.listen("127.0.0.1", 0, accept)
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


async def test_a_closed_listener_refuses() -> None:
    listener = await NETWORK.listen("127.0.0.1", 0, Accepted)
    listener.close()
    await asyncio.sleep(0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", listener.port)
