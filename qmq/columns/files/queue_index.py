"""The positions of one queue's batches, in columns: from its consume log up to a checkpoint, then from a walk of the log.

The consume log is read at the first use of the queue, because a folder may have ten thousand queues of which a job reads two. Its files
have no checksums, so they are validated (sequences without gaps, ascending positions within bounds) and not used if they are inconsistent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qmq.log.checkpoint import QueueState
from qmq.log.command_messages import COMMAND_PRODUCER
from qmq.log.consume_log import ENTRY_BYTES, ENTRY_TYPE, FILE_ENTRIES, SUFFIX, digest
from qmq.model import Partition, QueueId
from qmq.rpc.channel import LOOK_INSIDE

Entries = NDArray[np.void]

ENTRY: Final = np.dtype([("base", "<i8"), ("position", "<i8"), ("time", "<i8"), ("bloom", "<u8"), ("bytes", "<i4"), ("count", "<i4")])
_FROM: Final = {
    "base": "base_sequence",
    "position": "position",
    "time": "append_time_ms",
    "bloom": "tag_bloom",
    "bytes": "total_bytes",
    "count": "count",
}
"""The fields kept of a consume log's entry."""
_CAPACITY_MIN: Final = 64


class IndexLost(Exception):
    """The consume log's files are missing, short or inconsistent. If there is no newer checkpoint, the message log must be walked."""


@dataclass(frozen=True, slots=True)
class Persisted:
    """A queue's consume log as described by a checkpoint."""

    folder: Path
    name: str
    first: int
    persisted: int
    tail: bytes
    end: int
    """The sequence after its last message."""
    until: int
    """All its entries are before this position of the message log."""

    @classmethod
    def of(cls, folder: Path, state: QueueState, until: int) -> Persisted:
        """Made from a queue's state in a checkpoint."""
        queue = QueueId(state.snapshot[0], Partition(state.snapshot[1]))
        return cls(folder, digest(queue), state.first_entry, state.persisted, state.tail, state.snapshot[2], until)

    def load(self, start: int) -> tuple[Entries, int]:
        """The whole consume log, and the sequence of the mark of a purge right before `start`, or -1. Raises IndexLost."""
        bases = range(self.first - self.first % FILE_ENTRIES, self.persisted, FILE_ENTRIES)
        parts = [self._file(base) for base in bases if self.first < self.persisted]
        parts.append(self.tail)
        found = np.frombuffer(b"".join(parts), ENTRY_TYPE)
        kept = np.empty(len(found), ENTRY)
        for name, stored in _FROM.items():
            kept[name] = found[stored]
        self._check(kept)
        is_mark = (found["producer_id"] == COMMAND_PRODUCER) & (kept["base"] == start - 1)
        return kept, start - 1 if is_mark.any() else -1

    def _file(self, base: int) -> bytes:
        begin, end = max(self.first - base, 0), min(self.persisted - base, FILE_ENTRIES)
        path = self.folder / f"{self.name}-{base:012d}{SUFFIX}"
        try:
            with path.open("rb") as file:
                file.seek(begin * ENTRY_BYTES)
                data = file.read((end - begin) * ENTRY_BYTES)
        except FileNotFoundError:
            raise IndexLost(f"{path} is gone") from None
        if len(data) != (end - begin) * ENTRY_BYTES:
            raise IndexLost(f"{path} is cut short")
        return data

    def _check(self, found: Entries) -> None:
        """Validate the entries. Raises IndexLost."""
        if not len(found):
            return
        base, position = found["base"], found["position"]
        count, size = found["count"], found["bytes"]
        holds = [count > 0, size > 0, base[:-1] + count[:-1] == base[1:], position[:-1] + size[:-1] <= position[1:]]
        fits = base[0] >= 0 and base[-1] + count[-1] == self.end and position[0] >= 0 and position[-1] + size[-1] <= self.until
        if not (fits and all(bool(each.all()) for each in holds)):
            raise IndexLost(f"consume log {self.name} is inconsistent")


class QueueIndex:
    """One queue on one broker group. Its sequences `start` to `end` - 1 are stored and committed."""

    __slots__ = ("_data", "_mark", "_persisted", "_size", "end", "last_append_ms", "sealed_at", "start")

    def __init__(
        self,
        start: int,
        end: int,
        *,
        last_append_ms: int = 0,
        sealed_at: int | None = None,
        persisted: Persisted | None = None,
        mark: int = -1,
    ) -> None:
        self._persisted = persisted
        self._mark = mark
        """The sequence of the mark of a purge or a drop at which the queue starts; -1: none. A reader that had read everything before the
        purge continues there, and no message is missing."""
        self._data: Entries = np.empty(0, ENTRY)
        self._size = 0
        self.sealed_at = sealed_at
        """The sequence of its command message, if the queue is sealed."""
        self.end = end if sealed_at is None else sealed_at
        self.start = min(start, self.end)
        self.last_append_ms = last_append_ms

    def add(self, base: int, position: int, time_ms: int, size: int, count: int) -> None:
        """Add the queue's next batch, found by the walk; its tags are unknown."""
        if self._size == len(self._data):
            self._data = np.concatenate([self._data, np.empty(max(self._size, _CAPACITY_MIN), ENTRY)])
        self._data[self._size] = (base, position, time_ms, LOOK_INSIDE, size, count)
        self._size += 1
        self.end = base + count
        self.last_append_ms = time_ms

    def seal(self, sequence: int, time_ms: int) -> None:
        """End the queue at its command message, found by the walk."""
        self.sealed_at = self.end = sequence
        self.last_append_ms = time_ms

    def load(self) -> None:
        """Read the consume log, unless that is done. Raises IndexLost."""
        if self._persisted is None:
            return
        found, mark = self._persisted.load(self.start)
        if self.sealed_at is not None:
            found = found[found["base"] < self.sealed_at]  # The last entry is the command message.
        if len(found) and self._size and found["position"][-1] >= self._data["position"][0]:
            raise IndexLost("the walk began before the checkpoint")
        self._data = np.concatenate([found, self._data[: self._size]])
        self._size = len(self._data)
        self._persisted = None
        self._trim()
        if mark >= 0:
            self.start = self._mark = mark

    def move_start(self, start: int) -> None:
        """Retention deleted the messages before `start`."""
        if start == self._mark + 1:
            return
        self.start = min(max(self.start, start), self.end)
        if self._persisted is None:
            self._trim()

    def forget_before(self, position: int) -> None:
        """Drop batches before the first position of the log's files."""
        gone = int(np.searchsorted(self.entries["position"], position, "left"))
        if gone:
            self.move_start(int(self._data["base"][gone]) if gone < self._size else self.end)

    def _trim(self) -> None:
        first = self.find(self.start)
        if first:
            self._data = self._data[first : self._size].copy()
            self._size = len(self._data)

    @property
    def entries(self) -> Entries:
        """All stored batches, ascending. Callers must not modify the result."""
        assert self._persisted is None, "load() comes first"
        return self._data[: self._size]

    @property
    def stored_bytes(self) -> int:
        return int(self.entries["bytes"].sum(dtype=np.int64))

    def find(self, sequence: int) -> int:
        """The number of the first batch with a sequence at or after this one."""
        found = self._data[: self._size]
        number = int(np.searchsorted(found["base"], sequence, "right")) - 1
        if number < 0:
            return 0
        return number + int(found["base"][number] + found["count"][number] <= sequence)

    def between(self, first: int, end: int) -> Entries:
        """The batches with a sequence in `first` to `end` - 1."""
        return self.entries[self.find(first) : int(np.searchsorted(self.entries["base"], end, "left"))]

    def find_time(self, time_ms: int) -> int:
        """The first sequence stored at or after a time; the end if there is none."""
        found = self.entries
        number = int(np.searchsorted(found["time"], time_ms, "left"))
        return self.end if number == len(found) else max(int(found["base"][number]), self.start)


def sealed_at_of(snapshot: list[Any]) -> int | None:
    """The sequence of a queue's command message, from a snapshot."""
    found = snapshot[6] if len(snapshot) > 6 else None
    return int(found[0]) if found else None
