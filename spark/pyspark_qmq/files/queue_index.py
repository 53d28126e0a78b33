"""Where one queue's batches lie, in columns: what its consume log says up to a checkpoint, and what a walk found behind it.

The files of the consume log are read when the queue is first asked for: a folder may have ten thousand queues, and a job reads two. They
have no checksums; so what they say is looked over (sequences without gaps, rising positions, nothing where it cannot lie), and not used if
anything is strange about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qmq.log.checkpoint import QueueState
from qmq.log.consume_log import ENTRY_BYTES, ENTRY_TYPE, FILE_ENTRIES, SUFFIX, digest
from qmq.model import Partition, QueueId
from qmq.targeted import LOOK_INSIDE

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
"""What of a consume log's entry is kept."""
_CAPACITY_MIN: Final = 64


class IndexLost(Exception):
    """The consume log's files are gone, short or wrong: there may be a newer checkpoint; if not, the log itself has to be walked."""


@dataclass(frozen=True, slots=True)
class Persisted:
    """What a checkpoint says of a queue's consume log."""

    folder: Path
    name: str
    first: int
    persisted: int
    tail: bytes
    end: int
    """The sequence behind its last message."""
    until: int
    """Everything in it lies before this position of the message log."""

    @classmethod
    def of(cls, folder: Path, state: QueueState, until: int) -> Persisted:
        """Of a queue's state in a checkpoint."""
        queue = QueueId(state.snapshot[0], Partition(state.snapshot[1]))
        return cls(folder, digest(queue), state.first_entry, state.persisted, state.tail, state.snapshot[2], until)

    def load(self) -> Entries:
        """All of it. Raises IndexLost."""
        bases = range(self.first - self.first % FILE_ENTRIES, self.persisted, FILE_ENTRIES)
        parts = [self._file(base) for base in bases if self.first < self.persisted]
        parts.append(self.tail)
        found = np.frombuffer(b"".join(parts), ENTRY_TYPE)
        kept = np.empty(len(found), ENTRY)
        for name, stored in _FROM.items():
            kept[name] = found[stored]
        self._check(kept)
        return kept

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
        """Raises IndexLost."""
        if not len(found):
            return
        base, position = found["base"], found["position"]
        count, size = found["count"], found["bytes"]
        holds = [count > 0, size > 0, base[:-1] + count[:-1] == base[1:], position[:-1] + size[:-1] <= position[1:]]
        fits = base[0] >= 0 and base[-1] + count[-1] == self.end and position[0] >= 0 and position[-1] + size[-1] <= self.until
        if not (fits and all(bool(each.all()) for each in holds)):
            raise IndexLost(f"consume log {self.name} is inconsistent")


class QueueIndex:
    """One queue on one broker group. `start` to `end` - 1 are its sequences that are kept and committed."""

    __slots__ = ("_data", "_persisted", "_size", "end", "last_append_ms", "sealed_at", "start")

    def __init__(
        self, start: int, end: int, *, last_append_ms: int = 0, sealed_at: int | None = None, persisted: Persisted | None = None
    ) -> None:
        self._persisted = persisted
        self._data: Entries = np.empty(0, ENTRY)
        self._size = 0
        self.sealed_at = sealed_at
        """The sequence of its command message."""
        self.end = end if sealed_at is None else sealed_at
        self.start = min(start, self.end)
        self.last_append_ms = last_append_ms

    def add(self, base: int, position: int, time_ms: int, size: int, count: int) -> None:
        """The queue's next batch, found by the walk: which tags it has nobody looked at."""
        if self._size == len(self._data):
            self._data = np.concatenate([self._data, np.empty(max(self._size, _CAPACITY_MIN), ENTRY)])
        self._data[self._size] = (base, position, time_ms, LOOK_INSIDE, size, count)
        self._size += 1
        self.end = base + count
        self.last_append_ms = time_ms

    def seal(self, sequence: int, time_ms: int) -> None:
        """Its command message was found: the queue ends there."""
        self.sealed_at = self.end = sequence
        self.last_append_ms = time_ms

    def load(self) -> None:
        """Read what is in the consume log, if that was not done yet. Raises IndexLost."""
        if self._persisted is None:
            return
        found = self._persisted.load()
        if self.sealed_at is not None:
            found = found[found["base"] < self.sealed_at]  # the last one is the command message
        if len(found) and self._size and found["position"][-1] >= self._data["position"][0]:
            raise IndexLost("the walk began before the checkpoint")
        self._data = np.concatenate([found, self._data[: self._size]])
        self._size = len(self._data)
        self._persisted = None
        self._trim()

    def move_start(self, start: int) -> None:
        """Retention took what is before `start`."""
        self.start = min(max(self.start, start), self.end)
        if self._persisted is None:
            self._trim()

    def forget_before(self, position: int) -> None:
        """The log's files begin there: what lies before is not here, whoever took it."""
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
        """All batches that are kept, ascending. Not yours to change."""
        assert self._persisted is None, "load() comes first"
        return self._data[: self._size]

    @property
    def stored_bytes(self) -> int:
        return int(self.entries["bytes"].sum(dtype=np.int64))

    def find(self, sequence: int) -> int:
        """Number of the first batch that has a sequence at or behind this one."""
        found = self._data[: self._size]
        number = int(np.searchsorted(found["base"], sequence, "right")) - 1
        if number < 0:
            return 0
        return number + int(found["base"][number] + found["count"][number] <= sequence)

    def between(self, first: int, end: int) -> Entries:
        """The batches that have a sequence of `first` to `end` - 1."""
        return self.entries[self.find(first) : int(np.searchsorted(self.entries["base"], end, "left"))]

    def find_time(self, time_ms: int) -> int:
        """The first kept sequence that was stored at or after a time; the end if there is none."""
        found = self.entries
        number = int(np.searchsorted(found["time"], time_ms, "left"))
        return self.end if number == len(found) else max(int(found["base"][number]), self.start)


def sealed_at_of(snapshot: list[Any]) -> int | None:
    """The sequence of a queue's command message, by a snapshot of it."""
    found = snapshot[6] if len(snapshot) > 6 else None
    return int(found[0]) if found else None
