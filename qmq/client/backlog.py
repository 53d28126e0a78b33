"""The undecided messages of a producer: back-pressure, flushing, closing. Both kinds of producer derive from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Final, Self

from qmq import limits
from qmq.client.links import Links
from qmq.client.receipts import Ticket
from qmq.errors import BufferFull, ClientClosed, QmqError

DRAIN_BYTES: Final = 4 * limits.MIB
BUFFER_BYTES_MAX: Final = 64 * limits.MIB


def ignored(_closed: object) -> None:
    """The default of `on_closed`: does nothing."""


class Backlog:
    """A producer calls `_taken` and `_decided`; applications use the public methods. `on_closed` is called when it has ended."""

    def __init__(self, links: Links, on_closed: Callable[[Self], object] = ignored) -> None:
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._closed_bytes = 0
        self._undecided = 0
        self.tickets = 0
        """Batches that were closed so far."""
        self._drained: list[asyncio.Future[None]] = []
        self._failed: list[tuple[Ticket, QmqError]] = []
        self._is_closed = False
        self._tell_closed = partial(on_closed, self)

    def _check_open(self) -> None:
        """Raise ClientClosed or BufferFull if no message can be accepted."""
        if self._is_closed or self._links.is_closed:
            raise ClientClosed("the producer is closed: make a new one")
        if self._closed_bytes > BUFFER_BYTES_MAX:
            raise BufferFull(f"{self._closed_bytes} bytes wait to be stored: `await producer.drain()` before sending more")

    def _taken(self, size: int) -> None:
        """Count a new undecided ticket and its bytes."""
        self._closed_bytes += size
        self._undecided += 1
        self.tickets += 1

    def _decided(self, ticket: Ticket, size: int, failure: QmqError | None) -> None:
        self._closed_bytes -= size
        self._undecided -= 1
        if failure is not None and not ticket.seen:
            self._failed.append((ticket, failure))

    @property
    def full(self) -> bool:
        """Whether the application should `await drain()`."""
        return self._closed_bytes > DRAIN_BYTES

    @property
    def is_idle(self) -> bool:
        """True if every batch is decided, and no sender waits for room."""
        return not (self._undecided or self._drained or self._has_open)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of undecided messages."""
        return self._closed_bytes

    async def drain(self) -> None:
        """Wait until `full` is false."""
        while self._closed_bytes > DRAIN_BYTES // 2:
            await self._wait_for_answer()

    async def flush(self) -> None:
        """Wait until all messages sent so far are decided. Raises the first failure that no caller has seen through a ticket."""
        self._close_all()
        while self._undecided:
            await self._wait_for_answer()
        failed, self._failed = self._failed, []
        for ticket, failure in failed:
            if not ticket.seen:
                raise failure

    async def _wait_for_answer(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._drained.append(future)
        await future

    def _wake_drained(self) -> None:
        drained, self._drained = self._drained, []
        for future in drained:
            if not future.done():
                future.set_result(None)

    async def close(self) -> None:
        """Flush, then end. Tickets of messages that cannot be stored in time fail."""
        if self._is_closed:
            return
        try:
            await self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """End now; undecided tickets fail with ClientClosed."""
        self._is_closed = True
        self._abandon_all()
        self._closed_bytes = self._undecided = 0
        self._wake_drained()
        self._tell_closed()

    @property
    def _has_open(self) -> bool:
        """Whether an open batch has messages."""
        raise NotImplementedError

    def _close_all(self) -> None:
        """Close all open batches."""
        raise NotImplementedError

    def _abandon_all(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
