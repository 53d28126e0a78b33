"""The consume log: one queue's list of the positions of its messages. It is derived from the
message log, and rebuilt if it is lost.

One entry of 64 bytes for each *batch*, not for each message: a batch holds consecutive sequences,
so a sequence is found by binary search. One entry for each message would add a quarter to the log
at 100 bytes a message (docs/adr/0003). An entry has the fields for reading, tag filtering, time
lookup and lookup by id:

    base_sequence u64 | position u64 | append_time_ms u64 | producer_id u64 | batch_sequence u64 |
    tag_bloom u64 | cumulative_bytes u64 | total_bytes u32 | count u32

`cumulative_bytes` counts the queue's stored bytes before this batch, so that a backlog in bytes is
one subtraction.

The newest entries are in memory; `spill` returns those to be written to the queue's files,
`spilled` drops them from memory. Files are named by a digest of the queue's name (a name never
becomes a path) and the number of their first entry, 65,536 entries each.

A search first narrows the range by single reads of one open file, then reads a block of entries. A
file that the disk cannot read (EIO) is marked (`.bad`), so that the next start rebuilds the queue's
consume log; until then its readers get LogDamaged.
"""

from __future__ import annotations

import errno
import hashlib
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.errors import LogDamaged
from qmq.log.disk import Disk
from qmq.model import QueueId

ENTRY: Final = Struct("<7Q2I")
ENTRY_BYTES: Final = ENTRY.size
ENTRY_TYPE: Final = np.dtype(
    [
        ("base_sequence", "<u8"),
        ("position", "<u8"),
        ("append_time_ms", "<u8"),
        ("producer_id", "<u8"),
        ("batch_sequence", "<u8"),
        ("tag_bloom", "<u8"),
        ("cumulative_bytes", "<u8"),
        ("total_bytes", "<u4"),
        ("count", "<u4"),
    ]
)
"""`ENTRY` as a numpy type."""
FILE_ENTRIES: Final = 65_536
SUFFIX: Final = ".idx"
BAD_SUFFIX: Final = ".bad"
_BLOCK_ENTRIES: Final = 64


_BASE_SEQUENCE, _POSITION, _APPEND_TIME, _CUMULATIVE_BYTES = 0, 1, 2, 6
"""The fields of an entry that a search uses."""


class IndexEntry(NamedTuple):
    """The position and the properties of one batch of the queue."""

    base_sequence: int
    position: int
    append_time_ms: int
    producer_id: int
    batch_sequence: int
    tag_bloom: int
    cumulative_bytes: int
    total_bytes: int
    count: int  # type: ignore[assignment]

    @property
    def next_sequence(self) -> int:
        """The sequence after the batch's last message."""
        return self.base_sequence + self.count

    @property
    def end(self) -> int:
        """The position after the batch in the message log."""
        return self.position + self.total_bytes


def digest(queue: QueueId) -> str:
    """The queue's name in file names: 32 hexadecimal digits."""
    return hashlib.blake2b(str(queue).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Spill:
    """Entries to write; `data` begins with entry number `first`."""

    log: ConsumeLog
    first: int
    data: bytes


class ConsumeLog:
    """The entries of one queue, numbered from 0; `first` is the oldest valid one."""

    __slots__ = ("_disk", "_folder", "_name", "_tail", "first", "persisted")

    def __init__(
        self, disk: Disk, folder: Path, queue: QueueId, first: int = 0, persisted: int = 0
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._name = digest(queue)
        self._tail = bytearray()
        self.first = first
        self.persisted = persisted

    @property
    def count(self) -> int:
        """Entry numbers run from `first` to `count - 1`."""
        return self.persisted + len(self._tail) // ENTRY_BYTES

    @property
    def has_files(self) -> bool:
        """Whether the oldest valid entry is in a file, and not in memory."""
        return self.first < self.persisted

    @property
    def tail_bytes(self) -> int:
        """Bytes in memory only."""
        return len(self._tail)

    @property
    def tail(self) -> bytes:
        """The entries in memory only, as they are stored."""
        return bytes(self._tail)

    def append(self, entry: IndexEntry) -> None:
        """Add the queue's next batch."""
        self._tail += ENTRY.pack(*entry)

    def entry(self, number: int) -> IndexEntry:
        """One entry. Raises LogDamaged if its file is gone."""
        at = number - self.persisted
        if at >= 0:
            return IndexEntry._make(ENTRY.unpack_from(self._tail, at * ENTRY_BYTES))
        return self.entries(number, 1)[0]

    def entries(self, number: int, most: int) -> list[IndexEntry]:
        """Up to `most` entries from `number` on; at least one if there is one. Raises LogDamaged if
        a file is gone.
        """
        return [IndexEntry._make(each) for each in ENTRY.iter_unpack(self._stored(number, most))]

    def table(self, number: int, most: int) -> npt.NDArray[Any]:
        """`entries` as one array of `ENTRY_TYPE`."""
        return np.frombuffer(self._stored(number, most), ENTRY_TYPE)

    def _stored(self, number: int, most: int) -> bytes:
        at = number - self.persisted
        if at >= 0:
            return bytes(self._tail[at * ENTRY_BYTES : (at + most) * ENTRY_BYTES])
        return self._read(number, min(most, -at, FILE_ENTRIES - number % FILE_ENTRIES))

    def _file(self, number: int) -> Path:
        base = number - number % FILE_ENTRIES
        return self._folder / f"{self._name}-{base:012d}{SUFFIX}"

    @contextmanager
    def _opened(self, number: int) -> Iterator[int]:
        path = self._file(number)
        try:
            fd = self._disk.open_read(path)
        except FileNotFoundError:
            raise self._damaged(number, "is gone") from None
        try:
            yield fd
        finally:
            self._disk.close(fd)

    def _read(self, number: int, most: int) -> bytes:
        with self._opened(number) as fd:
            return self._read_from(fd, number, most)

    def _read_from(self, fd: int, number: int, most: int) -> bytes:
        try:
            data = self._disk.read(fd, most * ENTRY_BYTES, number % FILE_ENTRIES * ENTRY_BYTES)
        except OSError as cause:
            if cause.errno != errno.EIO:
                raise
            self._mark_bad()
            raise self._damaged(number, f"cannot be read ({cause})") from cause
        if len(data) != most * ENTRY_BYTES:
            raise self._damaged(number, "is cut short")
        return data

    def distrust(self, sequence: int, how: str) -> LogDamaged:
        """Mark the files to be rebuilt at the next start, because the entry of `sequence`
        contradicts the log. Returns the error for readers.
        """
        self._mark_bad()
        return self._damaged(self.find_sequence(sequence), how)

    def _damaged(self, number: int, how: str) -> LogDamaged:
        return LogDamaged(
            f"consume log {self._file(number).name} {how}: restart the broker to rebuild it"
        )

    @property
    def _bad_mark(self) -> Path:
        return self._folder / f"{self._name}{BAD_SUFFIX}"

    def _mark_bad(self) -> None:
        with suppress(OSError):  # the next read then tries again
            self._bad_mark.touch()

    def discard(self) -> None:
        """Delete the queue's index files, so that the queue is indexed again."""
        for path in (*self._folder.glob(f"{self._name}-*{SUFFIX}"), self._bad_mark):
            path.unlink(missing_ok=True)

    def find_sequence(self, sequence: int) -> int:
        """Number of the last entry that begins at or before `sequence`, at least `first`."""
        return max(self._first_where(_BASE_SEQUENCE, sequence + 1) - 1, self.first)

    def find_position(self, position: int) -> int:
        """Number of the first entry that lies at or behind `position` in the message log; `count`
        if none does.
        """
        return self._first_where(_POSITION, position)

    def find_time(self, time_ms: int) -> int:
        """Number of the first entry appended at or after `time_ms`; `count` if none was."""
        return self._first_where(_APPEND_TIME, time_ms)

    def find_bytes(self, cumulative_bytes: int) -> int:
        """Number of the first entry with at least that many of the queue's bytes before it; `count`
        if there is none.
        """
        return self._first_where(_CUMULATIVE_BYTES, cumulative_bytes)

    def _first_where(self, column: int, value: int) -> int:
        """Number of the first entry with at least `value` in a column that never decreases; `count`
        if there is none.
        """
        in_memory = max(self.first, self.persisted)
        if self.first < self.persisted and (
            not self._tail or self.entry(in_memory)[column] >= value
        ):
            return self._first_in_files(column, value)
        numbers = range(in_memory, self.count)
        return in_memory + bisect_left(
            numbers, value, key=lambda number: self.entry(number)[column]
        )

    def _first_in_files(self, column: int, value: int) -> int:
        """Number of the first entry with at least `value` in the files;
        `persisted` if there is none.
        """
        low, high = self.first, self.persisted
        later = range(low - low % FILE_ENTRIES + FILE_ENTRIES, high, FILE_ENTRIES)
        file = bisect_left(later, value, key=lambda number: self.entry(number)[column])
        low, high = later[file - 1] if file else low, later[file] if file < len(later) else high
        with self._opened(low) as fd:
            while high - low > _BLOCK_ENTRIES:
                middle = (low + high) // 2
                if ENTRY.unpack(self._read_from(fd, middle, 1))[column] < value:
                    low = middle + 1
                else:
                    high = middle
            block = list(ENTRY.iter_unpack(self._read_from(fd, low, high - low)))
        return low + bisect_left(block, value, key=itemgetter(column))

    def scan(self, number: int) -> Iterator[tuple[int, IndexEntry]]:
        """Every entry from `number` on, with its number."""
        while number < self.count:
            for entry in self.entries(number, 4096):
                yield number, entry
                number += 1

    def of_producer(self, producer_id: int, before: int) -> tuple[int, list[IndexEntry]]:
        """The entries of a producer among one file's worth of entries before number `before`:
        (first number of these, entries, newest first).

        Call it again with the returned number, until that is `first`, to get all. Raises LogDamaged
        if a file is gone.
        """
        begin = (before - 1) - (before - 1) % FILE_ENTRIES
        if begin < self.persisted < before:
            begin = self.persisted
        begin = max(begin, self.first)
        if begin >= before:
            return self.first, []
        table = self.table(begin, before - begin)
        found = np.flatnonzero(table["producer_id"] == np.uint64(producer_id))[::-1]
        return begin, [IndexEntry._make(each) for each in table[found].tolist()]

    def find_batch(self, producer_id: int, batch_sequence: int, first: int) -> IndexEntry | None:
        """Find a producer's batch by its number, from entry `first` on. Searches from the newest
        entry, a file at a time. Raises LogDamaged.
        """
        before = self.count
        while before > max(first, self.first):
            before, sent = self.of_producer(producer_id, before)
            for entry in sent:
                if entry.batch_sequence == batch_sequence:
                    return entry
        return None

    def newest_of(self, producer_id: int) -> int:
        """The highest number of a producer's batches here; -1 if there are none.
        Raises LogDamaged.
        """
        before, newest = self.count, -1
        while before > self.first:
            before, sent = self.of_producer(producer_id, before)
            newest = max([newest, *[entry.batch_sequence for entry in sent]])
        return newest

    def entries_in_memory(self) -> list[IndexEntry]:
        """The newest entries, which are not in a file yet."""
        return [IndexEntry._make(each) for each in ENTRY.iter_unpack(bytes(self._tail))]

    def spill(self) -> Spill | None:
        """The entries that are only in memory, for `write_spill`; None if there are none."""
        return Spill(self, self.persisted, bytes(self._tail)) if self._tail else None

    def write_spill(self, spill: Spill) -> list[Path]:
        """Write entries to their files, and return the files. Safe in a thread. Raises DiskFull."""
        written: list[Path] = []
        number, data = spill.first, spill.data
        while data:
            room = (FILE_ENTRIES - number % FILE_ENTRIES) * ENTRY_BYTES
            path = self._file(number)
            fd = self._disk.open_append(path)
            try:
                self._disk.write(fd, [data[:room]], number % FILE_ENTRIES * ENTRY_BYTES)
            finally:
                self._disk.close(fd)
            written.append(path)
            number, data = number + room // ENTRY_BYTES, data[room:]
        return written

    def spilled(self, spill: Spill) -> None:
        """Drop the entries from memory, because they were written."""
        del self._tail[: len(spill.data)]
        self.persisted = spill.first + len(spill.data) // ENTRY_BYTES

    def drop_before(self, number: int) -> list[Path]:
        """Drop the entries before `number`. Returns the files that contain only such entries, for
        the caller to delete.
        """
        old = range(self.first // FILE_ENTRIES, min(number, self.persisted) // FILE_ENTRIES)
        self.first = max(self.first, number)
        return [self._file(each * FILE_ENTRIES) for each in old]

    def is_whole(self) -> bool:
        """True if the files have every persisted entry, and none was unreadable."""
        if self._bad_mark.exists():
            return False
        for base in range(self.first - self.first % FILE_ENTRIES, self.persisted, FILE_ENTRIES):
            path = self._file(base)
            need = min(self.persisted - base, FILE_ENTRIES) * ENTRY_BYTES
            if not path.exists() or path.stat().st_size < need:
                return False
        return True
