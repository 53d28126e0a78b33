"""The newest batches in memory as they were written, so that consumers that keep up cause no reads."""

from __future__ import annotations

from collections import deque


class TailCache:
    """(envelope, region) by position, the oldest dropped first beyond `bytes_max`."""

    __slots__ = ("_batches", "_bytes", "_order", "bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._batches: dict[int, tuple[bytes, bytes]] = {}
        self._order: deque[int] = deque()
        self._bytes = 0

    def put(self, position: int, envelope: bytes, region: bytes) -> None:
        """Remember a batch just written."""
        self._batches[position] = (envelope, region)
        self._order.append(position)
        self._bytes += len(region) + 256
        while self._bytes > self.bytes_max:
            _, old = self._batches.pop(self._order.popleft())
            self._bytes -= len(old) + 256

    def get(self, position: int) -> tuple[bytes, bytes] | None:
        """The batch at `position`, if it is cached."""
        return self._batches.get(position)
