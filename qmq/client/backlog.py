"""The undecided messages of a producer: back-pressure, flushing, closing. Both kinds of producer derive from it."""

from __future__ import annotations

import asyncio
from collections import deque
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
_WOKEN_AT_ONCE: Final = 64
"""Senders that are woken when there is room: enough for a batch, and few of them find that the others took the room."""


def _wake(waiting: deque[asyncio.Future[None]], count: int) -> None:
    """Wake the first ones that still wait."""
    while waiting and count:
        place = waiting.popleft()
        if not place.done():
            place.set_result(None)
            count -= 1


def ignored(_closed: object) -> None:
    """The default of `on_closed`: does nothing."""


FAILED_MAX: Final = 1_000
"""Failures that `flush` looks through for one that nobody has seen: an application that never flushes keeps no more of them."""


class Backlog:
    """A producer calls `_taken` and `_decided`; applications use the public methods. `on_closed` is called when it has ended."""

    def __init__(self, links: Links, on_closed: Callable[[Self], object] = ignored) -> None:
        self._links = links
        self._loop = links.round.own_loop()
        self._closed_bytes = 0
        self._undecided = 0
        self.tickets = 0
        """Batches that were closed so far."""
        self._for_room: deque[asyncio.Future[None]] = deque()
        self._for_flush: deque[asyncio.Future[None]] = deque()
        self._is_waking = False
        self._failed: list[tuple[Ticket, QmqError]] = []
        self._is_closed = False
        self._tell_closed = partial(on_closed, self)

    def _check_open(self) -> None:
        """Raise ClientClosed or BufferFull if no message can be accepted."""
        if self._is_closed or self._links.is_closed:
            raise ClientClosed("the producer is closed: make a new one")
        self._links.round.own_loop()
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
            if len(self._failed) >= FAILED_MAX:
                self._failed = [each for each in self._failed if not each[0].seen][: FAILED_MAX // 2]
            self._failed.append((ticket, failure))

    @property
    def full(self) -> bool:
        """Whether the application should `await drain()`."""
        return self._closed_bytes > DRAIN_BYTES

    @property
    def is_idle(self) -> bool:
        """True if every batch is decided, and no sender waits for room."""
        return not (self._undecided or self._for_room or self._has_open)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of undecided messages."""
        return self._closed_bytes

    async def drain(self) -> None:
        """Wait until `full` is false."""
        if self._has_room:
            return
        self._links.round.own_loop()
        place = self._loop.create_future()
        self._for_room.append(place)
        await place
        while not self._has_room:  # other senders took it: this one is the next to be woken
            place = self._loop.create_future()
            self._for_room.appendleft(place)
            await place

    @property
    def _has_room(self) -> bool:
        return self._closed_bytes <= DRAIN_BYTES // 2

    async def flush(self) -> None:
        """Wait until all messages sent so far are decided. Raises the first failure that no caller has seen through a ticket."""
        if not self.is_idle:
            self._links.round.own_loop()
        self._close_all()
        while self._undecided:
            place = self._loop.create_future()
            self._for_flush.append(place)
            await place
        failed, self._failed = self._failed, []
        for ticket, failure in failed:
            if not ticket.seen:
                raise failure

    def _wake_waiting(self) -> None:
        """Batches were decided: wake those who wait for all of them, and the next senders who wait for room."""
        if not self._undecided:
            _wake(self._for_flush, len(self._for_flush))
        if not self._is_waking:
            self._wake_senders()

    def _wake_senders(self) -> None:
        self._is_waking = False
        if self._for_room and self._has_room:
            _wake(self._for_room, _WOKEN_AT_ONCE)
            if self._for_room:  # look again after these have sent
                self._is_waking = True
                self._loop.call_soon(self._wake_senders)

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
        self._wake_waiting()
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
