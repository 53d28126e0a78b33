"""When a connection has made no progress for too long: it sends nothing of a frame that it began, or reads nothing of its answers.

Looks are counted, not milliseconds: if this process stood still for a minute, all its connections seem to have done nothing, and one
look later their bytes are there. A single byte is progress, so that a slow upload goes on.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Protocol

LOOKS: Final = 6
"""So many looks in a row without progress end a connection."""


class Ending(Enum):
    """How a connection is ended."""

    CLOSE = 1
    """The peer hears why."""
    ABORT = 2
    """The peer does not read, so nothing can be said to it."""


class ConnectionProgress(Protocol):
    """What is looked at: the stream of a connection."""

    @property
    def reader(self) -> Reader: ...
    @property
    def received_bytes(self) -> int: ...
    @property
    def is_reading(self) -> bool: ...
    @property
    def unsent_bytes(self) -> int: ...
    @property
    def taken_bytes(self) -> int: ...


class Reader(Protocol):
    """The part of a frame reader that is looked at."""

    @property
    def awaits_rest(self) -> bool: ...


class StallWatch:
    """Remembers what the last look at one connection found."""

    __slots__ = ("_received_bytes", "_taken_bytes", "_unread_looks", "_unsent_looks")

    def __init__(self) -> None:
        self._received_bytes = self._taken_bytes = -1
        self._unsent_looks = self._unread_looks = 0

    def look(self, found: ConnectionProgress) -> Ending | None:
        """Whether the connection must end now. While we do not read from the peer, it is not to blame for sending nothing."""
        may_send = found.reader.awaits_rest and found.is_reading
        has_unread = found.unsent_bytes > 0
        self._unsent_looks = self._unsent_looks + 1 if may_send and found.received_bytes == self._received_bytes else 0
        self._unread_looks = self._unread_looks + 1 if has_unread and found.taken_bytes == self._taken_bytes else 0
        self._received_bytes, self._taken_bytes = found.received_bytes, found.taken_bytes
        if self._unread_looks >= LOOKS:
            return Ending.ABORT
        return Ending.CLOSE if self._unsent_looks >= LOOKS else None
