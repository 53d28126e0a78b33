"""The newest writes in memory: slaves and consumers that keep up cause no reads of files.

    Tail         the writes of both logs in the order of their index, for slaves
    TailCache    the batches of the message log by position, for consumers

A *run* is a stretch of one log: its bytes, their position, and where their segment begins. Replicas
have the same entries at the same positions in the same segments, so a run is copied unchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from qmq.limits import MIB

_PART_BYTES: Final = 16 * MIB
"""The bytes of a write beyond which a slave gets it in several messages,
which have at most `limits.REPLICA_FRAME_BYTES_MAX`.
"""

MESSAGES: Final = 0
ACTIONS: Final = 1

Place = tuple[int, int]
"""The place of an index: the ends of the message log and of the action log after it."""


class WriteRun(NamedTuple):
    """`size` bytes of log number `log` from `position` on, in the segment that begins at `base`."""

    log: int
    base: int
    position: int
    size: int
    buffers: tuple[bytes, ...]


class Write(NamedTuple):
    """One write: the entries from `first` to `last`."""

    first: int
    last: int
    run: WriteRun


class WriteStretch(NamedTuple):
    """Entries up to `last`, as runs, and the place after them."""

    last: int
    runs: tuple[WriteRun, ...]
    place: Place
    size: int


def behind(place: Place, run: WriteRun) -> Place:
    """The place after a run that begins at `place`."""
    end = run.position + run.size
    return (end, place[ACTIONS]) if run.log == MESSAGES else (place[MESSAGES], end)


def in_parts(write: Write) -> Iterator[Write]:
    """The write, in parts that messages between replicas take. Its buffers are each entry's
    envelope and region.
    """
    run = write.run
    begin, position, first, size = 0, run.position, write.first, 0
    for at in range(0, len(run.buffers), 2):
        entry_bytes = len(run.buffers[at]) + len(run.buffers[at + 1])
        if size and size + entry_bytes > _PART_BYTES:
            last = first + (at - begin) // 2 - 1
            yield Write(
                first,
                last,
                run._replace(position=position, size=size, buffers=run.buffers[begin:at]),
            )
            begin, position, first, size = at, position + size, last + 1, 0
        size += entry_bytes
    yield Write(
        first, write.last, run._replace(position=position, size=size, buffers=run.buffers[begin:])
    )


class Tail:
    """The newest writes, up to `bytes_max` bytes of them."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._writes: deque[Write] = deque()
        self._numbers: dict[int, int] = {}
        self._dropped = 0
        self._bytes = 0

    def add(self, write: Write) -> None:
        """Remember a write. Its indexes must follow each other."""
        if write.run.size > _PART_BYTES:
            for part in in_parts(write):
                self._add(part)
        else:
            self._add(write)

    def _add(self, write: Write) -> None:
        self._numbers[write.first] = self._dropped + len(self._writes)
        self._writes.append(write)
        self._bytes += write.run.size
        while self._bytes > self.bytes_max:
            old = self._writes.popleft()
            del self._numbers[old.first]
            self._dropped += 1
            self._bytes -= old.run.size

    def clear(self) -> None:
        """Forget all writes, because the log was cut or starts over."""
        self._writes.clear()
        self._numbers.clear()
        self._bytes = 0

    def read(self, place: Place, after: int, bytes_max: int) -> WriteStretch | None:
        """The writes after index `after`, whose place is `place`. None if they are not all in
        memory, or begin at another place because the reader has a part of the message log already.
        """
        number = self._numbers.get(after + 1)
        if number is None:
            return None
        runs: list[WriteRun] = []
        size, last = 0, after
        for at in range(number - self._dropped, len(self._writes)):
            write = self._writes[at]
            if (runs and size + write.run.size > bytes_max) or write.run.position != place[
                write.run.log
            ]:
                break
            runs.append(write.run)
            place = behind(place, write.run)
            size += write.run.size
            last = write.last
        return WriteStretch(last, tuple(runs), place, size) if runs else None


class TailCache:
    """The newest batches, as they were written: (envelope, region) by position, the oldest dropped
    first beyond `bytes_max`.
    """

    __slots__ = ("_batches", "_bytes", "_order", "bytes_max", "get")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._batches: dict[int, tuple[bytes, bytes]] = {}
        self._order: deque[int] = deque()
        self._bytes = 0
        self.get: Callable[[int], tuple[bytes, bytes] | None] = self._batches.get
        """Returns the batch at a position, if it is cached."""

    def put(self, position: int, envelope: bytes, region: bytes) -> None:
        """Remember a batch just written."""
        self._batches[position] = (envelope, region)
        self._order.append(position)
        self._bytes += len(region) + 256
        while self._bytes > self.bytes_max:
            _, old = self._batches.pop(self._order.popleft())
            self._bytes -= len(old) + 256
