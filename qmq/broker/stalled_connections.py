"""Finds connections without progress: the peer has begun a frame and sends nothing more, or does not read its answers.

Checks are counted, not milliseconds: after a minute in which this process was suspended, all connections seem to have done nothing, but at
the next check their bytes are there. A single byte is progress, so that slow uploads continue.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Protocol

LOOKS: Final = 6
"""Consecutive checks without progress that end a connection."""


class Ending(Enum):
    """How a connection is ended."""

    CLOSE = 1
    """Close the connection with an error for the peer."""
    ABORT = 2
    """The peer does not read, so no error can be sent to it."""


class ConnectionProgress(Protocol):
    """The observed interface of a connection's stream."""

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
    """The part of a frame reader that is checked."""

    @property
    def awaits_rest(self) -> bool: ...


class StallWatch:
    """Remembers the previous check of one connection."""

    __slots__ = ("_received_bytes", "_taken_bytes", "_unread_looks", "_unsent_looks")

    def __init__(self) -> None:
        self._received_bytes = self._taken_bytes = -1
        self._unsent_looks = self._unread_looks = 0

    def look(self, found: ConnectionProgress) -> Ending | None:
        """Whether the connection must end now. While the broker does not read from the peer, the peer's silence does not count."""
        may_send = found.reader.awaits_rest and found.is_reading
        has_unread = found.unsent_bytes > 0
        self._unsent_looks = self._unsent_looks + 1 if may_send and found.received_bytes == self._received_bytes else 0
        self._unread_looks = self._unread_looks + 1 if has_unread and found.taken_bytes == self._taken_bytes else 0
        self._received_bytes, self._taken_bytes = found.received_bytes, found.taken_bytes
        if self._unread_looks >= LOOKS:
            return Ending.ABORT
        return Ending.CLOSE if self._unsent_looks >= LOOKS else None
