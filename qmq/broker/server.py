"""The broker's data port."""

from __future__ import annotations

import asyncio

from qmq.broker.broker import Broker
from qmq.broker.connection import Connection
from qmq.errors import Overloaded


class DataServer:
    """Takes connections for a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self._all_closed = asyncio.Event()

    async def start(self, host: str, port: int) -> None:
        """Listen; `port` 0 takes a free one, see `self.port`. Raises OSError if the port is taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    def _accept(self) -> asyncio.BaseProtocol:
        connection = Connection(self._broker, self._closed)
        loop = asyncio.get_running_loop()
        if len(self._connections) >= self._broker.config.connections_max:
            loop.call_soon(connection.refuse, Overloaded(f"the broker has {len(self._connections)} connections, its most"))
        self._connections.add(connection)
        loop.call_later(self._broker.config.hello_timeout_ms / 1000, self._expect_hello, connection)
        return connection.stream

    def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()

    def _expect_hello(self, connection: Connection) -> None:
        if not connection.has_said_hello and connection in self._connections:
            connection.stream.close()

    @property
    def connections(self) -> int:
        """Connections that stand."""
        return len(self._connections)

    async def stop(self) -> None:
        """Take no more connections and close those there are, after their answers."""
        if self._server is not None:
            self._server.close()
        self._all_closed.clear()
        for connection in list(self._connections):
            connection.stream.close()
        if self._connections:
            await self._all_closed.wait()
