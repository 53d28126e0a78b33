"""Reading ahead: the schedule logs of near buckets are read once, in order, before their messages become due.

Each large batch is checked and gets an outline (batch_outline.py), so that its messages can be read singly; and the bytes are in the page
cache. A *piece* of a log is read at a time, in a thread, with pauses in between: nothing waits for it, since a batch without an outline is
read whole, and checked then.

Damage is logged, and reading the message later raises the error. After a damaged envelope no batch can be found, so reading ahead ends
there for that log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from qmq.batch import BATCH_BYTES_MIN, ENVELOPE_BYTES, parse_envelope
from qmq.delay.append_files import damaged
from qmq.delay.batch_outline import OUTLINED_BYTES_MIN, BatchOutline, is_outlined
from qmq.delay.buckets import Buckets
from qmq.delay.stored_batch import BatchCache, StoredBatch
from qmq.errors import CorruptBatch
from qmq.limits import BATCH_BYTES_MAX, KIB, MIB
from qmq.log.disk import Disk

log = logging.getLogger("qmq.delay")

PIECE_BYTES: Final = 2 * MIB
PAUSE_S: Final = 0.01
"""Pause between two pieces: at most 200 MiB a second."""
READ_BYTES: Final = 256 * KIB
"""Bytes of one read, or a whole batch."""
_TOTAL: Final = Struct("<I")
_TOTAL_AT: Final = 8
_LOST: Final = 1 << 62


class ReadAheadResult(NamedTuple):
    """The result of reading one piece."""

    bucket: int
    end: int
    """Where the next piece begins."""
    outlines: list[tuple[int, BatchOutline]]
    """(position, outline)."""
    damage: list[tuple[int, str]]
    """(position, why)."""


class ReadAhead:
    """How far each near bucket's log was read. Call `next_piece` and `note` on the event loop, the piece itself in a thread."""

    def __init__(self, disk: Disk, buckets: Buckets, cache: BatchCache) -> None:
        self._disk = disk
        self._buckets = buckets
        self._cache = cache
        self._ends: dict[int, int] = {}

    def next_piece(self, near: Sequence[int]) -> ReadAheadPiece | None:
        """A piece of the first of these buckets that has messages left and enough unread bytes on disk; None if there is none."""
        self._ends = {number: end for number, end in self._ends.items() if number in near}
        for number in near:
            bucket, begin = self._buckets.get(number), self._ends.get(number, 0)
            if bucket is not None and begin + OUTLINED_BYTES_MIN <= bucket.log.written and bucket.settled < bucket.count:
                return ReadAheadPiece(self._disk, self._buckets.files.folder / bucket.log.name, number, begin, bucket.log.written)
        return None

    def note(self, found: ReadAheadResult) -> None:
        """A piece was run."""
        if found.bucket not in self._buckets:
            return
        self._ends[found.bucket] = found.end
        for position, outline in found.outlines:
            self._cache.put_outline(found.bucket, position, outline)
        for position, why in found.damage:
            log.error("%s", damaged(self._buckets.require(found.bucket).log.name, position, why))


class ReadAheadPiece:
    """A piece of a schedule log, to be called in a thread."""

    def __init__(self, disk: Disk, path: Path, bucket: int, begin: int, end: int) -> None:
        self.bucket = bucket
        self.path = path
        self._disk = disk
        self._begin = begin
        self._end = end

    def __call__(self) -> ReadAheadResult:
        """Read the piece. Does not raise: unreadable bytes are reported as damage, unless the bucket was deleted."""
        found = ReadAheadResult(self.bucket, self._end, [], [])
        try:
            fd = self._disk.open_read(self.path)
            try:
                return found._replace(end=self._walk(fd, found))
            finally:
                self._disk.close(fd)
        except FileNotFoundError:
            return found._replace(end=_LOST)
        except (OSError, CorruptBatch) as cause:
            found.damage.append((self._begin, cause.message if isinstance(cause, CorruptBatch) else str(cause)))
            return found._replace(end=_LOST)

    def _walk(self, fd: int, found: ReadAheadResult) -> int:
        """Find the start of the first batch after this piece. Raises CorruptBatch, OSError."""
        position, stop, wanted = self._begin, min(self._end, self._begin + PIECE_BYTES), READ_BYTES
        while position < stop:
            size = min(wanted, self._end - position)
            data = self._disk.read(fd, size, position)
            used, wanted = self._batches(data, position, found)
            if len(data) < size or (not used and wanted > self._end - position):
                raise CorruptBatch(f"it ends at byte {position + len(data)}, within a batch")
            position += used
        return position

    def _batches(self, data: bytes, position: int, found: ReadAheadResult) -> tuple[int, int]:
        """(how many bytes of `data` are whole batches, how many must be read together for the next one)."""
        at = 0
        while at + ENVELOPE_BYTES <= len(data):
            total = _TOTAL.unpack_from(data, at + _TOTAL_AT)[0]
            if not BATCH_BYTES_MIN <= total <= BATCH_BYTES_MAX or total & 7:
                raise CorruptBatch(f"a batch cannot have {total} bytes")
            if at + total > len(data):
                return at, max(total, READ_BYTES)
            if total > OUTLINED_BYTES_MIN:
                self._look(data[at : at + total], position + at, found)
            at += total
        return at, READ_BYTES

    def _look(self, data: bytes, position: int, found: ReadAheadResult) -> None:
        try:
            batch = StoredBatch(parse_envelope(data), data[ENVELOPE_BYTES:])
            if is_outlined(batch.view):
                found.outlines.append((position, BatchOutline(batch.view)))
        except CorruptBatch as cause:
            found.damage.append((position, cause.message))
