"""The connection to a broker group's master: it sends the batches of a window, and reports answers, lost connections and time to the
window.

The window decides about batches, and the owner reacts to changes. The connection follows the group's masters: after NotMaster, or news of
another master, it connects there, and late answers of the old master still count. Subclasses say how a batch is encoded, whether a
connection is needed, and what to do with the batches when no master can be found.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from qmq import limits
from qmq.client.connection.connection import Connection
from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import Master
from qmq.delivery.in_flight_batch import InFlightBatch
from qmq.delivery.window import InFlightWindow
from qmq.errors import NotConnected, NotMaster, PeerError, QmqError, ReadOnly, Unavailable
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import Produced

INFLIGHT_BYTES_MAX: Final = 8 * limits.MIB

B = TypeVar("B", bound=InFlightBatch)


class MasterConnection(Generic[B]):
    """`target` is the locator's name for the destination; `changed` tells the owner of changes."""

    kind: int = FrameKind.PRODUCE
    """PRODUCE, or one of the frames of other `acks`."""

    def __init__(self, links: ConnectionPool, target: str, group: str, window: InFlightWindow[B], changed: Callable[[], None]) -> None:
        self.group = group
        self.connection: Connection | None = None
        self.is_closed = False
        self._links = links
        self._answer_s = links.timing.answer_s
        self._target = target
        self._window = window
        self._tell = changed
        self._loop = asyncio.get_running_loop()
        self._master: Master | None = None
        self._is_confirmed = False
        self._room_bytes = 0
        self._answers = 0
        self._wake: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._is_watched = False
        self._reaching: asyncio.Task[None] | None = None

    # --- what subclasses say -------------------------------------------------------------------------------------------

    def _encode(self, batch: B) -> tuple[bytes, ...]:
        """The encoded batch. Raises QmqError."""
        raise NotImplementedError

    def _stored(self, batch: B, produced: Produced, now: float) -> None:
        """Tell the window that the batch is stored."""
        raise NotImplementedError

    @property
    def _is_needed(self) -> bool:
        """Whether batches wait to be sent, now or soon."""
        raise NotImplementedError

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        """Whether to give up, because waiting for a master will not help: the subject is gone, or the client is closed."""
        raise NotImplementedError

    def _tick(self, now: float) -> None:
        """Pass the time to the window."""
        self._window.tick(now)

    def _after_answer(self) -> None:
        """The window has processed an answer."""
        self._tell()

    # --- the way out ---------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what may be sent now, or connect if batches wait."""
        if self.is_closed:
            return
        connection = self.connection
        if connection is None:
            self.reach()
        elif connection.is_open and connection.stream.is_writable:
            now = self._loop.time()
            while (batch := self._window.next(now, self._room_bytes - connection.produce_bytes)) is not None:
                self._transmit(connection, batch)
        self._arm()

    def _transmit(self, connection: Connection, batch: B) -> None:
        attempt = batch.attempts
        try:
            if batch.encoded is None:
                batch.encoded = self._encode(batch)
        except QmqError as failure:
            self._loop.call_soon(self._answered, connection, batch, attempt, failure)
            return
        left_s = min(max(batch.until - self._loop.time(), 0.1), self._answer_s)
        connection.request(self.kind, lambda answer: self._answered(connection, batch, attempt, answer), *batch.encoded, timeout_s=left_s)
        if not self._is_watched:
            self._watch()

    def _watch(self) -> None:
        self._is_watched = True
        self._links.answer_watch.expect(self._look, self._answers, self._loop)

    # --- the way back --------------------------------------------------------------------------------------------------

    def _answered(self, connection: Connection, batch: B, attempt: int, answer: Frame | QmqError) -> None:
        if isinstance(answer, QmqError):
            self._is_confirmed = False
            self._window.refused(batch, attempt, answer, self._loop.time())
            self._refused(connection, answer)
        else:
            self._stored(batch, wire.unpack_one_produced(answer.payload), self._loop.time())
            self._answers += 1
            if not self._is_confirmed:
                self._is_confirmed = True
                self._links.locator.confirm(self.group)
            if not self._window.flight:
                self._is_watched = False
                self._links.answer_watch.answered(self._look)
        if not self.is_closed:
            self._after_answer()

    def _refused(self, connection: Connection, failure: QmqError) -> None:
        """Handle what a refusal says about the group."""
        if self.is_closed:
            return
        if isinstance(failure, ReadOnly):
            self._links.locator.refresh(self._target)
        if isinstance(failure, NotMaster) and connection is self.connection and self._master is not None:
            self._links.locator.doubt(self.group, self._master)
            self._leave(failure)
        self._arm()

    def _look(self, answers_before: int) -> None:
        """Check once a second, while batches are unanswered, whether the group answers at all."""
        self._is_watched = False
        if not self._window.flight or self.is_closed:
            return
        if self._answers == answers_before and self.connection is not None:
            self._window.stalled()
            self._links.locator.refresh(self._target)
            self._tell()
        if not self._is_watched and not self.is_closed:
            self._watch()

    # --- time ----------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        at = self._window.wake_at(self._loop.time())
        if at < self._wakes_at and not self.is_closed:
            if self._wake is not None:
                self._wake.cancel()
            self._wakes_at, self._wake = at, self._loop.call_at(at, self._woken)

    def _woken(self) -> None:
        self._wakes_at, self._wake = math.inf, None
        self._tick(self._loop.time())
        self._tell()

    # --- masters come and go -------------------------------------------------------------------------------------------

    def reach(self, *, ahead: bool = False) -> None:
        """Find the master and connect, repeatedly while batches wait; with `ahead` once, to be ready soon."""
        if self._reaching is None and self.connection is None and not self.is_closed and (ahead or self._is_needed):
            self._reaching = self._loop.create_task(self._reach(ahead))

    async def _reach(self, ahead: bool) -> None:
        failures = 0
        try:
            while (ahead or self._is_needed) and self.connection is None and not self.is_closed:
                ahead = False
                try:
                    self._use(*await self._links.reach(self._target, self.group))
                except (Unavailable, PeerError) as failure:
                    failures = 0
                    self._unreached(failure)
                except QmqError as failure:
                    failures += 1
                    if await self._gives_up(failure, failures):
                        return
        finally:
            self._reaching = None
        self._changed()

    def _unreached(self, failure: QmqError) -> None:
        self._window.disconnected(failure)
        self._tell()

    def _use(self, master: Master, connection: Connection) -> None:
        if not connection.is_open or self.is_closed:
            return
        self._master, self.connection = master, connection
        self._is_confirmed = False
        self._room_bytes = min(INFLIGHT_BYTES_MAX, connection.inflight_bytes_max)
        connection.on_closed[self._lost] = None
        connection.on_writable[self.pump] = None
        self._window.connected()

    def moved(self) -> None:
        """Routes changed: if the group has another master now, connect to that one."""
        known = self._links.locator.book.master(self.group)
        if self.connection is not None and known is not None and known != self._master:
            self._leave(NotConnected(f"broker group {self.group} has another master"))
            self.pump()

    def _leave(self, cause: QmqError) -> None:
        if self._detach():
            self._window.disconnected(cause)

    def _detach(self) -> bool:
        """Drop the connection. Returns whether there was one."""
        connection, self.connection = self.connection, None
        if connection is None:
            return False
        connection.on_closed.pop(self._lost, None)
        connection.on_writable.pop(self.pump, None)
        return True

    def _lost(self) -> None:
        self._leave(NotConnected(f"the connection to broker group {self.group} ended"))
        self._loop.call_soon(self._changed)

    def _changed(self) -> None:
        if not self.is_closed:
            self._tell()

    # --- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send no more batches; late answers are ignored."""
        self.is_closed = True
        self._detach()
        if self._wake is not None:
            self._wake.cancel()
        if self._reaching is not None:
            self._reaching.cancel()
