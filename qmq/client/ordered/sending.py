"""What carries a stream out: a connection to the master of its broker group, timers, and the tries that are on their way.

It decides nothing about batches: `Stream` does. It follows the group's masters as a pipe does (`qmq/client/pipe.py`): sent away, or told of
another master, it goes there, and answers that the old one still gives are heard.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final, Protocol

from qmq import limits
from qmq.client.connection import Connection
from qmq.client.link import Links
from qmq.client.ordered.batch import OrderedBatch
from qmq.client.ordered.stream import Stream
from qmq.client.routes import Master
from qmq.errors import NotConnected, NotMaster, PeerError, QmqError, Unavailable
from qmq.wire import messages as wire
from qmq.wire.frame import Frame
from qmq.wire.messages import Produced

ANSWER_S: Final = 15.0
"""A broker that has not answered a batch by then is asked again."""
STALL_S: Final = 1.0
"""A broker group that has answered nothing for so long while batches are with it is in trouble."""
INFLIGHT_BYTES_MAX: Final = 8 * limits.MIB


class Owner(Protocol):
    """Whose streams these are: the producer."""

    subject: str
    kind: int
    """PRODUCE, or PRODUCE_FAST, which is answered when the master alone has it."""

    def encode(self, stream: Stream, batch: OrderedBatch) -> tuple[bytes, bytes]:
        """The batch as it travels. Raises QmqError."""
        ...

    def changed(self, sending: Sending) -> None:
        """Something was decided, became possible or impossible: look what is to be done, and `pump`."""
        ...

    def gather(self, sending: Sending) -> None:
        """Some batch is out of time: put what is to fail with it behind it."""
        ...

    def give_up(self, failure: QmqError) -> None:
        """Nothing can be sent anywhere: the subject is gone, or the client is closed."""
        ...


class Sending:
    """See the module."""

    def __init__(self, links: Links, stream: Stream, owner: Owner) -> None:
        self.stream = stream
        self.group = stream.partition.group
        self.connection: Connection | None = None
        self._links = links
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._master: Master | None = None
        self._room_bytes = 0
        self._answers = 0
        self._wake: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._watch: asyncio.TimerHandle | None = None
        self._reaching: asyncio.Task[None] | None = None
        self._is_closed = False

    # --- the way out ---------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what may leave now, or look for a way if there is need."""
        if self._is_closed:
            return
        connection = self.connection
        if connection is None:
            self.reach()
        elif connection.is_open and connection.stream.is_writable:
            now = self._loop.time()
            while (batch := self.stream.next(now, self._room_bytes - connection.produce_bytes)) is not None:
                self._transmit(connection, batch)
        self._arm()

    def _transmit(self, connection: Connection, batch: OrderedBatch) -> None:
        attempt = batch.attempts
        try:
            if batch.encoded is None:
                batch.encoded = self._owner.encode(self.stream, batch)
        except QmqError as failure:
            self._loop.call_soon(self._answered, connection, batch, attempt, failure)
            return
        left_s = min(max(batch.until - self._loop.time(), 0.1), ANSWER_S)
        connection.request(
            self._owner.kind, lambda answer: self._answered(connection, batch, attempt, answer), *batch.encoded, timeout_s=left_s
        )
        if self._watch is None:
            self._watch = self._loop.call_later(STALL_S, self._look, self._answers)

    def flush(self) -> None:
        """Write now, not at the end of the next round of the event loop."""
        if self.connection is not None:
            self.connection.stream.flush()

    # --- the way back --------------------------------------------------------------------------------------------------

    def _answered(self, connection: Connection, batch: OrderedBatch, attempt: int, answer: Frame | QmqError) -> None:
        result = answer if isinstance(answer, QmqError) else wire.unpack_one_produced(answer.payload)
        self.stream.answered(batch, attempt, result, self._loop.time())
        if self._is_closed:
            return
        if isinstance(result, Produced):
            self._answers += 1
            self._links.locator.confirm(self.group)
        elif isinstance(result, NotMaster) and connection is self.connection and self._master is not None:
            self._links.locator.doubt(self.group, self._master)
            self._leave(result)
        self._owner.changed(self)

    def _look(self, answers_before: int) -> None:
        """Once a second while batches are in flight: does the group answer at all?"""
        self._watch = None
        if not self.stream.flight or self._is_closed:
            return
        if self._answers == answers_before and self.connection is not None:
            self.stream.stalled()
            self._links.locator.refresh(self._owner.subject)
            self._owner.changed(self)
        if self._watch is None and not self._is_closed:
            self._watch = self._loop.call_later(STALL_S, self._look, self._answers)

    # --- time ----------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        at = self.stream.wake_at(self._loop.time())
        if at < self._wakes_at and not self._is_closed:
            if self._wake is not None:
                self._wake.cancel()
            self._wakes_at, self._wake = at, self._loop.call_at(at, self._woken)

    def _woken(self) -> None:
        self._wakes_at, self._wake = math.inf, None
        now = self._loop.time()
        if self.stream.is_late(now):
            self._owner.gather(self)
        self.stream.tick(now)
        self._owner.changed(self)

    # --- masters come and go -------------------------------------------------------------------------------------------

    def moved(self) -> None:
        """Routes changed: if the group has another master now, go there."""
        known = self._links.locator.book.master(self.group)
        if self.connection is not None and known is not None and known != self._master:
            self._leave(NotConnected(f"broker group {self.group} has another master"))
            self.pump()

    def _leave(self, cause: QmqError) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.on_closed.pop(self._lost, None)
            connection.on_writable.pop(self.pump, None)
            self.stream.disconnected(cause)

    def _lost(self) -> None:
        self._leave(NotConnected(f"the connection to broker group {self.group} ended"))
        self._loop.call_soon(self._changed)

    def _changed(self) -> None:
        if not self._is_closed:
            self._owner.changed(self)

    @property
    def _is_needed(self) -> bool:
        stream = self.stream
        return not self._is_closed and not stream.is_settled and bool(stream.flight or (stream.waiting and not stream.is_left))

    def reach(self, *, ahead: bool = False) -> None:
        """Find the master and connect, again and again while there is something for it; `ahead`: once, to be ready soon."""
        if self._reaching is None and self.connection is None and not self._is_closed and (ahead or self._is_needed):
            self._reaching = self._loop.create_task(self._reach(ahead))

    async def _reach(self, ahead: bool) -> None:
        try:
            while (ahead or self._is_needed) and self.connection is None:
                ahead = False
                try:
                    self._use(*await self._links.reach(self._owner.subject, self.group))
                except (Unavailable, PeerError) as failure:
                    self.stream.disconnected(failure)
                    self._owner.changed(self)
        except QmqError as failure:
            self._owner.give_up(failure)
        finally:
            self._reaching = None
        self._changed()

    def _use(self, master: Master, connection: Connection) -> None:
        if not connection.is_open or self._is_closed:
            return
        self._master, self.connection = master, connection
        self._room_bytes = min(INFLIGHT_BYTES_MAX, connection.inflight_bytes_max)
        connection.on_closed[self._lost] = None
        connection.on_writable[self.pump] = None
        self.stream.connected()

    def close(self) -> None:
        """Nothing more is sent; answers that come late mean nothing."""
        self._is_closed = True
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.on_closed.pop(self._lost, None)
            connection.on_writable.pop(self.pump, None)
        for timer in (self._wake, self._watch):
            if timer is not None:
                timer.cancel()
        if self._reaching is not None:
            self._reaching.cancel()
