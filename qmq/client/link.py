"""Finding the broker of a subject, and keeping one connection to each broker for all who use it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from qmq.client.connection import Connection, connect
from qmq.errors import ClientClosed

Locate = Callable[[str], Awaitable[str]]
"""Subject -> data address of the broker that has it."""


class Links:
    """The client's connections, by subject. Concurrent callers share one attempt."""

    def __init__(self, locate: Locate, client: str) -> None:
        self._locate = locate
        self._client = client
        self._connections: dict[str, Connection] = {}
        self._attempts: dict[str, asyncio.Task[Connection]] = {}
        self._addresses: dict[str, str] = {}
        self.is_closed = False

    async def connection(self, subject: str) -> Connection:
        """An open connection to the subject's broker. Raises NotConnected, UnknownSubject, ClientClosed."""
        if self.is_closed:
            raise ClientClosed("the client is closed: make a new one with qmq.connect()")
        address = self._addresses.get(subject)
        if address is None:
            address = self._addresses[subject] = await self._locate(subject)
        try:
            return await self._open(address)
        except Exception:
            self._addresses.pop(subject, None)
            raise

    async def _open(self, address: str) -> Connection:
        found = self._connections.get(address)
        if found is not None and found.is_open:
            return found
        attempt = self._attempts.get(address)
        if attempt is None:
            attempt = self._attempts[address] = asyncio.create_task(connect(address, self._client))
            attempt.add_done_callback(lambda done: self._attempted(address, done))
        return await asyncio.shield(attempt)

    def _attempted(self, address: str, done: asyncio.Task[Connection]) -> None:
        self._attempts.pop(address, None)
        if not done.cancelled() and done.exception() is None:
            self._connections[address] = done.result()
            if self.is_closed:
                done.result().close()

    async def close(self) -> None:
        """End all connections."""
        self.is_closed = True
        for attempt in list(self._attempts.values()):
            attempt.cancel()
        for connection in self._connections.values():
            connection.close()
        for connection in self._connections.values():
            await connection.wait_closed()
