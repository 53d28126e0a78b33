"""Support for the etcd tests: namespaces, a proxy that loses answers, a reader of a watch, a store
with a fault before its transactions.

A coordination store with a faulty connection, and a store that several nodes of a test share.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import inf
from typing import Any

from qmq_coordination.coordination_store import (
    Compare,
    CoordinationStore,
    Operation,
    TxnResult,
    WatchedChanges,
)
from qmq_coordination.embedded import EmbeddedStore

from qmq.errors import CoordinationUnavailable, CoordinationUnknown
from qmq.rpc.request_changes import note_change
from support.etcd_process import free_ports


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
            there = asyncio.create_task(
                self._pump(reader, back_writer, lambda: self.loses_requests)
            )
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

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, loses: Callable[[], bool]
    ) -> None:
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


async def history(
    store: CoordinationStore, prefix: str, start: int, end: int
) -> list[WatchedChanges]:
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


class Fault(Enum):
    """The outcome of a transaction whose answer is lost."""

    LOST = "lost"
    """The request is lost."""
    UNANSWERED = "unanswered"
    """The transaction is done, and the answer is lost."""
    DELAYED = "delayed"
    """The request arrives when `deliver_delayed` is called."""


@dataclass(slots=True)
class _Cut:
    """Calls that do not reach the store."""

    times: float
    key: str | None
    failure: Exception | None


async def _nothing() -> None: ...


class FaultyStore:
    """A store with faults in front of `inner`. Transactions are counted from 1; `faults` maps a
    transaction's number to its fault.

    `cut` keeps calls of other kinds away from it too. `before` and `after` are awaited around each
    transaction.
    """

    def __init__(
        self,
        inner: Any,
        faults: Mapping[int, Fault] | None = None,
        *,
        before: Callable[[], Awaitable[Any]] = _nothing,
        after: Callable[[], Awaitable[Any]] = _nothing,
    ) -> None:
        self.inner = inner
        self.faults = dict(faults or {})
        self.before, self.after = before, after
        self.delayed: list[tuple[Any, ...]] = []
        self.count = 0
        self._cuts: dict[str, _Cut] = {}

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name) if name in self._cuts else getattr(self.inner, name)

    async def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        self._raise_if_cut(name, *arguments)
        return await getattr(self.inner, name)(*arguments, **named)

    def _raise_if_cut(self, name: str, *arguments: Any) -> None:
        cut = self._cuts.get(name)
        if cut is None or not cut.times or (cut.key is not None and cut.key != arguments[0]):
            return
        cut.times -= 1
        raise cut.failure or CoordinationUnavailable("nobody answers (in this test)")

    def cut(
        self,
        *names: str,
        times: float = inf,
        key: str | None = None,
        failure: Exception | None = None,
    ) -> None:
        """Make calls of these names fail, a number of times, or only those about a key (or a
        prefix).
        """
        self._cuts.update({name: _Cut(times, key, failure) for name in names})

    def heal(self) -> None:
        """Let all calls reach the store again."""
        self._cuts.clear()

    def fail_next(self, *faults: Fault | None) -> None:
        """The faults of the next transactions; None: done and answered."""
        self.faults.update(
            {self.count + number: fault for number, fault in enumerate(faults, 1) if fault}
        )

    def do_before_next(self, what: Awaitable[Any]) -> None:
        """Let this happen when the next transaction is about to be sent."""

        async def do() -> None:
            self.before = _nothing
            await what

        self.before = do

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        """See CoordinationStore."""
        number = self.count = self.count + 1
        await self.before()
        try:
            self._raise_if_cut("txn")
            return await self._txn(self.faults.pop(number, None), compares, success, failure)
        finally:
            await self.after()

    async def _txn(self, fault: Fault | None, *request: Any) -> TxnResult:
        if fault is Fault.DELAYED:
            self.delayed.append(request)
        if fault in (None, Fault.UNANSWERED):
            done: TxnResult = await self.inner.txn(*request)
        if fault is not None:
            note_change()
            raise CoordinationUnknown("the answer was lost (in this test)")
        return done

    async def deliver_delayed(self) -> list[TxnResult]:
        """Let the transactions arrive that were held up."""
        return [await self.inner.txn(*each) for each in self.delayed]


class SharedStore(EmbeddedStore):
    """One store for several nodes. `close` by a node does nothing; the test closes the store by
    `end`.
    """

    async def close(self) -> None:
        """Does nothing: nodes call this; the test calls `end`."""

    async def end(self) -> None:
        """Close it."""
        await super().close()
