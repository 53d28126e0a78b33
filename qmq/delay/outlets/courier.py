"""A courier carries a channel out: a connection to the master of its broker group, timers, and the tries that are on their way.

It decides nothing about parcels: `Channel` does. It follows the group's masters as a client's pipe does (`qmq/client/pipe.py`): sent away,
or told of another master, it goes there, and answers that the old one still gives are heard. It never gives up: while it is needed it tries
again, with the locator's pauses, and with rising ones where trying again alone will not help.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final, Protocol

from qmq import limits
from qmq.client.connection import Connection
from qmq.client.link import Links
from qmq.client.routes import Master
from qmq.delay.outlets.channel import Channel, pause_s
from qmq.delay.outlets.parcel import Parcel
from qmq.errors import ClientClosed, NotConnected, NotMaster, PeerError, QmqError, ReadOnly, Unavailable
from qmq.wire import messages as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.messages import Produced

ANSWER_S: Final = 15.0
"""A broker that has not answered a parcel by then is asked again."""
STALL_S: Final = 1.0
"""A broker group that has answered nothing for so long while parcels are with it is in trouble."""
INFLIGHT_BYTES_MAX: Final = 8 * limits.MIB


class Owner(Protocol):
    """Whose courier it is: the way of a subject."""

    subject: str

    def encode(self, parcel: Parcel) -> tuple[bytes, bytes]:
        """The batch as it travels. Raises QmqError."""
        ...

    def changed(self, courier: Courier) -> None:
        """Something was decided, became possible or impossible: look what is to be done, and `pump`."""
        ...

    def wants(self, courier: Courier) -> bool:
        """Whether something waits that could be planned for it."""
        ...


class Courier:
    """See the module."""

    def __init__(self, links: Links, channel: Channel, owner: Owner) -> None:
        self.channel = channel
        self._links = links
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._master: Master | None = None
        self._room_bytes = 0
        self._answers = 0
        self._wake: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._watch: asyncio.TimerHandle | None = None
        self._reaching: asyncio.Task[None] | None = None
        self.is_closed = False

    # --- the way out ---------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what may leave now, or look for a way if there is need."""
        if self.is_closed:
            return
        connection = self._connection
        if connection is None:
            self.reach()
        elif connection.is_open and connection.stream.is_writable:
            now = self._loop.time()
            while (parcel := self.channel.next(now, self._room_bytes - connection.produce_bytes)) is not None:
                self._transmit(connection, parcel)
        self._arm()

    def _transmit(self, connection: Connection, parcel: Parcel) -> None:
        attempt = parcel.attempts
        try:
            if parcel.encoded is None or parcel.is_uncertain > parcel.says_again:
                parcel.encoded, parcel.says_again = self._owner.encode(parcel), parcel.is_uncertain
        except QmqError as failure:
            self._loop.call_soon(self._answered, connection, parcel, attempt, failure)
            return
        connection.request(
            FrameKind.PRODUCE, lambda answer: self._answered(connection, parcel, attempt, answer), *parcel.encoded, timeout_s=ANSWER_S
        )
        if self._watch is None:
            self._watch = self._loop.call_later(STALL_S, self._look, self._answers)

    # --- the way back --------------------------------------------------------------------------------------------------

    def _answered(self, connection: Connection, parcel: Parcel, attempt: int, answer: Frame | QmqError) -> None:
        result = answer if isinstance(answer, QmqError) else wire.unpack_one_produced(answer.payload)
        if self.is_closed:
            return
        self.channel.answered(parcel, attempt, result, self._loop.time())
        if isinstance(result, Produced):
            self._answers += 1
            self._links.locator.confirm(self.channel.group)
        elif isinstance(result, NotMaster) and connection is self._connection and self._master is not None:
            self._links.locator.doubt(self.channel.group, self._master)
            self._leave(result)
        elif isinstance(result, ReadOnly):
            self._links.locator.refresh(self._owner.subject)
        self._owner.changed(self)

    def _look(self, answers_before: int) -> None:
        """Once a second while parcels are under way: does the group answer at all?"""
        self._watch = None
        if not self.channel.flight or self.is_closed:
            return
        if self._answers == answers_before and self._connection is not None:
            self.channel.stalled()
            self._links.locator.refresh(self._owner.subject)
            self._owner.changed(self)
        if self._watch is None and not self.is_closed:
            self._watch = self._loop.call_later(STALL_S, self._look, self._answers)

    # --- time ----------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        at = self.channel.wake_at(self._loop.time())
        if at < self._wakes_at and not self.is_closed:
            if self._wake is not None:
                self._wake.cancel()
            self._wakes_at, self._wake = at, self._loop.call_at(at, self._woken)

    def _woken(self) -> None:
        self._wakes_at, self._wake = math.inf, None
        self.channel.tick(self._loop.time())
        self._owner.changed(self)

    # --- masters come and go -------------------------------------------------------------------------------------------

    def moved(self) -> None:
        """Routes changed: if the group has another master now, go there."""
        known = self._links.locator.book.master(self.channel.group)
        if self._connection is not None and known is not None and known != self._master:
            self._leave(NotConnected(f"broker group {self.channel.group} has another master"))
            self.pump()

    def _leave(self, cause: QmqError) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.on_closed.pop(self._lost, None)
            connection.on_writable.pop(self.pump, None)
            self.channel.disconnected(cause)

    def _lost(self) -> None:
        self._leave(NotConnected(f"the connection to broker group {self.channel.group} ended"))
        self._loop.call_soon(self._changed)

    def _changed(self) -> None:
        if not self.is_closed:
            self._owner.changed(self)

    @property
    def _is_needed(self) -> bool:
        channel = self.channel
        return not self.is_closed and not channel.is_settled and (bool(channel.flight) or self._owner.wants(self))

    def reach(self) -> None:
        """Find the master and connect, again and again while there is something for it."""
        if self._reaching is None and self._connection is None and self._is_needed:
            self._reaching = self._loop.create_task(self._reach())

    async def _reach(self) -> None:
        failures = 0
        try:
            while self._is_needed and self._connection is None:
                try:
                    self._use(*await self._links.reach(self._owner.subject, self.channel.group))
                except (Unavailable, PeerError) as failure:
                    failures = 0
                    self._unreached(failure)
                except ClientClosed:
                    return
                except QmqError as failure:
                    failures += 1
                    self._unreached(failure)
                    await asyncio.sleep(pause_s(failures, failure))
        finally:
            self._reaching = None
        self._changed()

    def _unreached(self, failure: QmqError) -> None:
        self.channel.disconnected(failure)
        self._owner.changed(self)

    def _use(self, master: Master, connection: Connection) -> None:
        if not connection.is_open or self.is_closed:
            return
        self._master, self._connection = master, connection
        self._room_bytes = min(INFLIGHT_BYTES_MAX, connection.inflight_bytes_max)
        connection.on_closed[self._lost] = None
        connection.on_writable[self.pump] = None
        self.channel.connected()

    def close(self) -> None:
        """Nothing more is sent, at once; answers that come late mean nothing."""
        self.is_closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.on_closed.pop(self._lost, None)
            connection.on_writable.pop(self.pump, None)
        for timer in (self._wake, self._watch):
            if timer is not None:
                timer.cancel()
        if self._reaching is not None:
            self._reaching.cancel()
