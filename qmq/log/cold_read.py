"""Reads sealed segments without a local file: their bytes are in an object store (docs/TIERING.md).

The event loop never waits for the store. A read of bytes that are not in the local cache raises `ColdRead`, and the bytes are fetched. The
caller repeats its whole operation when they have arrived; so the read must come before any change of state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from qmq.errors import LogDamaged, Overloaded, QmqError
from qmq.log.segment_index import SegmentIndex

Ended = Callable[[QmqError | None], None]
"""Called at the end of a fetch with None, or with the reason of its failure."""


class ColdRead(Overloaded):
    """The bytes are being fetched from the object store. A caller that cannot wait passes this error on, and the request is repeated."""

    retry_after_ms = 100

    def __init__(self, message: str, wait: Callable[[object, Ended], None]) -> None:
        super().__init__(message)
        self._wait = wait

    def then(self, owner: object, ended: Ended) -> None:
        """Call `ended` in the event loop when the fetch has ended; once for each owner, with its last `ended`."""
        self._wait(owner, ended)


class ObjectDamaged(LogDamaged):
    """The object store has lost bytes of the log, or has other ones. The log's next bytes may be readable from position `end` on.

    `position` stays -1: another replica cannot repair an object.
    """

    def __init__(self, message: str, end: int) -> None:
        super().__init__(message)
        self.end = end


class StoredBytes(Protocol):
    """Reads segments that are in the object store."""

    def read(self, index: SegmentIndex, at: int, size: int) -> bytes:
        """Cached bytes of a segment. Raises ColdRead while they are being fetched, ObjectDamaged. Only in the event loop."""
        ...

    def read_waiting(self, index: SegmentIndex, at: int, size: int) -> bytes:
        """Read bytes of a segment, and wait for the store. Raises Overloaded, ObjectDamaged."""
        ...

    def damaged(self) -> list[tuple[int, str]]:
        """(base of the segment, name) of each object that is known to be damaged."""
        ...


class NoStoredBytes:
    """The StoredBytes of a log without an object store."""

    def read(self, index: SegmentIndex, at: int, size: int) -> bytes:
        raise LogDamaged(
            f"the segment at {index.base} is only in the object store, byte {at} and {size} bytes from there: start with --object-store, "
            "and the URL that the group used"
        )

    def read_waiting(self, index: SegmentIndex, at: int, size: int) -> bytes:
        return self.read(index, at, size)

    def damaged(self) -> list[tuple[int, str]]:
        return []
