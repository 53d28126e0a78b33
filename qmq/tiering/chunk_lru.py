"""Decides which chunks of stored segments stay in the cache, and which chunks are fetched ahead. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

from qmq.log.segment_index import SegmentIndex

AHEAD: Final = 2
"""Chunks that are fetched ahead of a reader in order, so that it seldom waits for a store that answers in tens of milliseconds."""

V = TypeVar("V")


class ChunkKey(NamedTuple):
    """A chunk of a segment."""

    base: int
    number: int


class ChunkLru(Generic[V]):
    """Values by chunk, up to a sum of sizes in bytes. It evicts the least recently used values first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._values: OrderedDict[ChunkKey, tuple[V, int]] = OrderedDict()
        self.bytes = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._values

    def get(self, key: ChunkKey) -> V | None:
        """The value, which counts as used now."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: ChunkKey, value: V, size: int) -> list[V]:
        """Add a value. Returns the evicted values. The new value is never evicted here, even if it alone exceeds the limit."""
        left = [self.remove(key)] if key in self._values else []
        self._values[key] = (value, size)
        self.bytes += size
        while self.bytes > self._bytes_max and len(self._values) > 1:
            left.append(self.remove(next(iter(self._values))))
        return left

    def remove(self, key: ChunkKey) -> V:
        """Take a value out."""
        value, size = self._values.pop(key)
        self.bytes -= size
        return value

    def clear(self) -> list[V]:
        """Take all values out."""
        return [self.remove(key) for key in list(self._values)]


def to_fetch(index: SegmentIndex, at: int, size: int, is_here: Callable[[ChunkKey], bool], ahead: int = AHEAD) -> list[ChunkKey]:
    """The chunks to fetch for a read, in order: those that it needs, and the following ones if the segment is read in order.

    A read counts as in order if it is at the segment's beginning, or if the previous chunk is in the cache.
    """
    numbers = index.chunks_of(at, size)
    needed = [ChunkKey(index.base, number) for number in numbers]
    in_order = numbers.start == 0 or is_here(ChunkKey(index.base, numbers.start - 1))
    following = range(numbers.stop, min(numbers.stop + ahead, len(index.checksums))) if in_order else ()
    return [key for key in [*needed, *[ChunkKey(index.base, number) for number in following]] if not is_here(key)]
