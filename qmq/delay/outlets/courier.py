"""The connection of a channel to its broker group.

It never gives up: while it is needed it tries again, with the locator's pauses, and with rising ones where that alone will not help.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from qmq.client.connection import Connection
from qmq.client.links import Links
from qmq.delay.outlets.channel import Channel
from qmq.delay.outlets.parcel import Parcel
from qmq.delivery.master_connection import MasterConnection
from qmq.delivery.retries import pause_s
from qmq.errors import ClientClosed, InvalidArgument, Overloaded, QmqError
from qmq.wire.frame_payloads import Produced


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


class Courier(MasterConnection[Parcel]):
    def __init__(self, links: Links, channel: Channel, owner: Owner) -> None:
        super().__init__(links, owner.subject, channel.group, channel, lambda: owner.changed(self))
        self.channel = channel
        self._owner = owner

    def _transmit(self, connection: Connection, parcel: Parcel) -> None:
        if parcel.is_uncertain > parcel.says_again:
            parcel.encoded = None
        super()._transmit(connection, parcel)

    def _encode(self, parcel: Parcel) -> tuple[bytes, ...]:
        parcel.says_again = parcel.is_uncertain
        try:
            return self._owner.encode(parcel)
        except QmqError:
            raise
        except Exception as cause:
            raise _unencodable(cause) from cause

    def _stored(self, parcel: Parcel, produced: Produced, now: float) -> None:
        self.channel.stored(parcel, produced, now)

    @property
    def _is_needed(self) -> bool:
        channel = self.channel
        return not self.is_closed and not channel.is_settled and (bool(channel.flight) or self._owner.wants(self))

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        if isinstance(failure, ClientClosed):
            return True
        self._unreached(failure)
        await asyncio.sleep(pause_s(failures, failure))
        return False


def _unencodable(cause: Exception) -> QmqError:
    """What a batch that cannot be made is answered with: the messages in it are at fault, whatever the library calls it."""
    if isinstance(cause, MemoryError):
        return Overloaded("no memory to make the batch")
    return InvalidArgument(f"no batch can be made of what is stored: {type(cause).__name__}: {cause}")
