"""Support for the etcd tests: namespaces, a proxy that loses answers, a reader of a watch, a store with a fault before its
transactions.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from qmq_coordination.coordination_store import CoordinationStore, WatchedChanges
from qmq_coordination.etcd.process import free_ports

from qmq.errors import CoordinationUnavailable, CoordinationUnknown


def unique_namespace() -> str:
    """A unique key prefix, so that tests on one server are independent."""
    return f"/test/{uuid.uuid4().hex}/"


class Proxy:
    """Forwards TCP to one member, and can lose requests, lose answers, or refuse connections."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = free_ports(1)[0]
        self.loses_requests = False
        self.loses_answers = False
        self.refuses = False
        self.lost_bytes = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """The number of clients' open connections."""
        return len(self._tasks)

    def lead_to(self, port: int) -> None:
        """Let new connections lead to another member, as after a change of an address in DNS."""
        self._target = port

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if not self.refuses:
                await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            there = asyncio.create_task(self._pump(reader, back_writer, lambda: self.loses_requests))
            back = asyncio.create_task(self._pump(back_reader, writer, lambda: self.loses_answers))
            try:
                await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        finally:
            back_writer.close()
            with contextlib.suppress(OSError):
                await back_writer.wait_closed()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, loses: Callable[[], bool]) -> None:
        while data := await source.read(1 << 16):
            if loses():
                self.lost_bytes += len(data)
                continue
            target.write(data)
            await target.drain()

    async def cut(self) -> None:
        """Break all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def heal(self) -> None:
        """Forward everything again, over new connections."""
        self.loses_requests = self.loses_answers = self.refuses = False
        await self.cut()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()
        await self._server.wait_closed()


@asynccontextmanager
async def proxied(port: int) -> AsyncIterator[Proxy]:
    """A proxy in front of a member."""
    proxy = Proxy(port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


class Follower:
    """Reads a watch in a task."""

    def __init__(self, store: CoordinationStore, prefix: str, start: int) -> None:
        self.found: list[WatchedChanges] = []
        self._task = asyncio.create_task(self._follow(store, prefix, start))

    async def _follow(self, store: CoordinationStore, prefix: str, start: int) -> None:
        async for changes in store.watch(prefix, start):
            self.found.append(changes)

    async def reaches(self, revision: int, within_s: float = 60.0) -> None:
        """Wait until it has seen a revision. Raises what the watch raised."""
        async with asyncio.timeout(within_s):
            while not self.found or self.found[-1].revision < revision:
                if self._task.done():
                    await self._task
                    raise AssertionError("the watch ended")
                await asyncio.sleep(0.01)

    async def result(self) -> None:
        """Wait for the watch to end."""
        async with asyncio.timeout(60):
            await self._task

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def history(store: CoordinationStore, prefix: str, start: int, end: int) -> list[WatchedChanges]:
    """The events of an undisturbed watch."""
    follower = Follower(store, prefix, start)
    try:
        await follower.reaches(end)
    finally:
        await follower.stop()
    return [changes for changes in follower.found if changes.revision <= end]


async def put_surely(store: CoordinationStore, key: str, value: bytes) -> int:
    """Put until the value is stored, through any outage; returns its revision."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(CoordinationUnknown, CoordinationUnavailable):
                return await store.put(key, value)
            with contextlib.suppress(CoordinationUnavailable):
                found = await store.get(key)
                if found is not None and found.value == value:
                    return found.mod_revision
