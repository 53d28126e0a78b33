"""A carrier: what brings a pure state machine's batches to one broker group. A connection to the group's master, timers, tries under way.

It decides nothing about batches: its *load* does (an ordered producer's `Stream`, a delay server's `Channel`), and its owner looks what is
to be done when something changed. It follows the group's masters as a pipe does (`qmq/client/pipe.py`): sent away, or told of another
master, it goes there, and answers that the old one still gives are heard. Subclasses say what is sent, and how a master is looked for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sized
from typing import Final, Protocol

from qmq import limits
from qmq.client.connection import Connection
from qmq.client.links import Links
from qmq.client.route_book import Master
from qmq.errors import NotConnected, NotMaster, QmqError
from qmq.wire.frame import Frame
from qmq.wire.frame_payloads import Produced

ANSWER_S: Final = 15.0
"""A broker that has not answered a batch by then is asked again."""
STALL_S: Final = 1.0
"""A broker group that has answered nothing for so long while batches are with it is in trouble."""
INFLIGHT_BYTES_MAX: Final = 8 * limits.MIB


class Load(Protocol):
    """The pure state machine that is carried out."""

    @property
    def flight(self) -> Sized: ...

    def connected(self) -> None:
        """A connection to the group's master stands."""
        ...

    def disconnected(self, cause: QmqError) -> None:
        """The connection is left or lost, or none could be had."""
        ...

    def stalled(self) -> None:
        """Nothing was answered for a while."""
        ...

    def wake_at(self, now: float) -> float:
        """When time alone may change something; infinity if it never does."""
        ...


class Carrier:
    """`changed` tells the owner."""

    def __init__(self, links: Links, subject: str, group: str, load: Load, changed: Callable[[], None]) -> None:
        self.group = group
        self.connection: Connection | None = None
        self.is_closed = False
        self._links = links
        self._subject = subject
        self._load = load
        self._tell = changed
        self._loop = asyncio.get_running_loop()
        self._master: Master | None = None
        self._room_bytes = 0
        self._answers = 0
        self._wake: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._watch: asyncio.TimerHandle | None = None
        self._reaching: asyncio.Task[None] | None = None

    # --- what subclasses say -------------------------------------------------------------------------------------------

    def _send(self, connection: Connection, now: float) -> None:
        """Send what may leave now."""
        raise NotImplementedError

    def _tick(self, now: float) -> None:
        """Let the load know what time it is."""
        raise NotImplementedError

    def reach(self) -> None:
        """Find the master and connect, again and again while there is something for it."""
        raise NotImplementedError

    # --- the way out ---------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what may leave now, or look for a way if there is need."""
        if self.is_closed:
            return
        connection = self.connection
        if connection is None:
            self.reach()
        elif connection.is_open and connection.stream.is_writable:
            self._send(connection, self._loop.time())
        self._arm()

    def _request(
        self,
        connection: Connection,
        kind: int,
        encoded: tuple[bytes, ...],
        timeout_s: float,
        answered: Callable[[Frame | QmqError], None],
    ) -> None:
        connection.request(kind, answered, *encoded, timeout_s=timeout_s)
        if self._watch is None:
            self._watch = self._loop.call_later(STALL_S, self._look, self._answers)

    # --- the way back --------------------------------------------------------------------------------------------------

    def _heard(self, connection: Connection, result: Produced | QmqError) -> None:
        """A broker answered: what that says of the group."""
        if isinstance(result, Produced):
            self._answers += 1
            self._links.locator.confirm(self.group)
        elif isinstance(result, NotMaster) and connection is self.connection and self._master is not None:
            self._links.locator.doubt(self.group, self._master)
            self._leave(result)

    def _look(self, answers_before: int) -> None:
        """Once a second while batches are under way: does the group answer at all?"""
        self._watch = None
        if not self._load.flight or self.is_closed:
            return
        if self._answers == answers_before and self.connection is not None:
            self._load.stalled()
            self._links.locator.refresh(self._subject)
            self._tell()
        if self._watch is None and not self.is_closed:
            self._watch = self._loop.call_later(STALL_S, self._look, self._answers)

    # --- time ----------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        at = self._load.wake_at(self._loop.time())
        if at < self._wakes_at and not self.is_closed:
            if self._wake is not None:
                self._wake.cancel()
            self._wakes_at, self._wake = at, self._loop.call_at(at, self._woken)

    def _woken(self) -> None:
        self._wakes_at, self._wake = math.inf, None
        self._tick(self._loop.time())
        self._tell()

    # --- masters come and go -------------------------------------------------------------------------------------------

    def moved(self) -> None:
        """Routes changed: if the group has another master now, go there."""
        known = self._links.locator.book.master(self.group)
        if self.connection is not None and known is not None and known != self._master:
            self._leave(NotConnected(f"broker group {self.group} has another master"))
            self.pump()

    def _leave(self, cause: QmqError) -> None:
        if self._detach():
            self._load.disconnected(cause)

    def _detach(self) -> bool:
        """Whether there was a connection."""
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

    def _use(self, master: Master, connection: Connection) -> None:
        if not connection.is_open or self.is_closed:
            return
        self._master, self.connection = master, connection
        self._room_bytes = min(INFLIGHT_BYTES_MAX, connection.inflight_bytes_max)
        connection.on_closed[self._lost] = None
        connection.on_writable[self.pump] = None
        self._load.connected()

    # --- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Nothing more is sent; answers that come late mean nothing."""
        self.is_closed = True
        self._detach()
        for timer in (self._wake, self._watch):
            if timer is not None:
                timer.cancel()
        if self._reaching is not None:
            self._reaching.cancel()
