"""A courier carries a channel out: see `Carrier`. It decides nothing about parcels: `Channel` does.

It never gives up: while it is needed it tries again, with the locator's pauses, and with rising ones where that alone will not help.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from qmq.client.carrier import ANSWER_S, Carrier
from qmq.client.connection import Connection
from qmq.client.links import Links
from qmq.delay.outlets.channel import Channel
from qmq.delay.outlets.parcel import Parcel
from qmq.delivery.retries import pause_s
from qmq.errors import ClientClosed, InvalidArgument, Overloaded, PeerError, QmqError, ReadOnly, Unavailable
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind


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


class Courier(Carrier):
    def __init__(self, links: Links, channel: Channel, owner: Owner) -> None:
        super().__init__(links, owner.subject, channel.group, channel, lambda: owner.changed(self))
        self.channel = channel
        self._owner = owner

    # --- out and back --------------------------------------------------------------------------------------------------

    def _send(self, connection: Connection, now: float) -> None:
        while (parcel := self.channel.next(now, self._room_bytes - connection.produce_bytes)) is not None:
            self._transmit(connection, parcel)

    def _transmit(self, connection: Connection, parcel: Parcel) -> None:
        attempt = parcel.attempts
        try:
            if parcel.encoded is None or parcel.is_uncertain > parcel.says_again:
                parcel.encoded, parcel.says_again = self._owner.encode(parcel), parcel.is_uncertain
        except Exception as cause:
            self._loop.call_soon(self._answered, connection, parcel, attempt, _unencodable(cause))
            return
        self._request(
            connection, FrameKind.PRODUCE, parcel.encoded, ANSWER_S, lambda answer: self._answered(connection, parcel, attempt, answer)
        )

    def _answered(self, connection: Connection, parcel: Parcel, attempt: int, answer: Frame | QmqError) -> None:
        result = answer if isinstance(answer, QmqError) else wire.unpack_one_produced(answer.payload)
        if self.is_closed:
            return
        self.channel.answered(parcel, attempt, result, self._loop.time())
        self._heard(connection, result)
        if isinstance(result, ReadOnly):
            self._links.locator.refresh(self._owner.subject)
        self._owner.changed(self)

    def _tick(self, now: float) -> None:
        self.channel.tick(now)

    # --- finding the master --------------------------------------------------------------------------------------------

    @property
    def _is_needed(self) -> bool:
        channel = self.channel
        return not self.is_closed and not channel.is_settled and (bool(channel.flight) or self._owner.wants(self))

    def reach(self) -> None:
        """Find the master and connect, again and again while there is something for it."""
        if self._reaching is None and self.connection is None and self._is_needed:
            self._reaching = self._loop.create_task(self._reach())

    async def _reach(self) -> None:
        failures = 0
        try:
            while self._is_needed and self.connection is None:
                try:
                    self._use(*await self._links.reach(self._owner.subject, self.group))
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


def _unencodable(cause: Exception) -> QmqError:
    """What a batch that cannot be made is answered with: the messages in it are at fault, whatever the library calls it."""
    if isinstance(cause, QmqError):
        return cause
    if isinstance(cause, MemoryError):
        return Overloaded("no memory to make the batch")
    return InvalidArgument(f"no batch can be made of what is stored: {type(cause).__name__}: {cause}")
