"""A bucket: the messages that are due in one span of time, in three append files, and their states.

    NAME.log     the batches; an envelope's base_sequence is the ordinal of its first message, its epoch and flushed_position are 0
    NAME.idx     INDEX_ROW for each ordinal
    NAME.done    the dispatch log (dispatch_log.py)

NAME is the bucket's beginning in UTC. The state of each message (`DispatchMark`) is read from the dispatch log at first use: most buckets
are not used for months.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from struct import Struct, error
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.batch import ENVELOPE_BYTES, Kind, parse_envelope, place
from qmq.batch_columns import REGION, REGION_BYTES, RegionHeader
from qmq.delay.append_files import AppendFile, AppendFiles, damaged, read_written
from qmq.delay.dispatch_log import DispatchMark, decode_records, encode_record
from qmq.delay.interfaces import INDEX_ROW, DueMessage, SchedulePlace
from qmq.delay.stored_batch import BatchCache, StoredBatch
from qmq.errors import CorruptBatch, LogDamaged
from qmq.log.disk import Disk

LOG, IDX, DONE = SUFFIXES = (".log", ".idx", ".done")
_FILE: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z\.(log|idx|done)")
ROW_BYTES: Final = INDEX_ROW.itemsize
LOG_BYTES_MAX: Final = 8 << 32
"""A row of the index has 32 bits for a position, in units of 8 bytes."""
_ROW: Final = Struct("<qIHH")
_PLACES: Final = np.arange(65_536, dtype="<u2")
_READ_AHEAD: Final = 4096
_SUBJECT_BYTES: Final = RegionHeader._fields.index("subject_bytes")
_ROWS_AHEAD: Final = 256
"""Wanted index rows that are no farther apart are read together."""


def name_of(bucket: int, bucket_ms: int) -> str:
    """The name of its files, without suffix. Names sort as buckets do."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(bucket * bucket_ms // 1000))


def is_file_name(name: str) -> bool:
    """Whether a schedule may have a file of this name. Names come from other replicas and from backups, and become paths."""
    return _FILE.fullmatch(name) is not None


class Bucket:
    """`files` is the schedule's folder."""

    __slots__ = ("_files", "_marks", "_moves", "count", "done", "idx", "log", "number", "settled")

    def __init__(self, files: AppendFiles, number: int, name: str) -> None:
        self._files = files
        self.number = number
        self.log = AppendFile(name + LOG)
        self.idx = AppendFile(name + IDX)
        self.done = AppendFile(name + DONE)
        self.count = 0
        """Number of messages so far: the next ordinal."""
        self.settled = 0
        """Messages that are delivered, cancelled or moved."""
        self._marks: bytearray | None = None
        self._moves: dict[int, SchedulePlace] = {}

    @property
    def growing(self) -> tuple[AppendFile, AppendFile, AppendFile]:
        return self.log, self.idx, self.done

    @property
    def tail_bytes(self) -> int:
        """Bytes that are only in memory."""
        return len(self.log.tail) + len(self.idx.tail) + len(self.done.tail)

    # --- storing -------------------------------------------------------------------------------------------------------

    def add(self, index: int, append_ms: int, region: bytes, crc: int, flags: int, due_times_ms: npt.NDArray[np.int64] | int) -> int:
        """Store a batch for this bucket, and return the ordinal of its first message. `due_times_ms`: its column, or the only time."""
        first, log = self.count, self.log
        total, position = ENVELOPE_BYTES + len(region), log.end
        assert position < LOG_BYTES_MAX, f"{log.name} is full: shorter buckets, or more delay groups, are needed"
        self._files.append(log, place(Kind.DATA, total, crc, first, 0, index, append_ms, 0), region)
        if isinstance(due_times_ms, int):
            self.idx.tail += _ROW.pack(due_times_ms, position >> 3, 0, flags)
            count = 1
        else:
            count = len(due_times_ms)
            rows = np.empty(count, INDEX_ROW)
            rows["due"] = due_times_ms
            rows["position8"] = position >> 3
            rows["place"] = _PLACES[:count]
            rows["flags"] = flags
            self.idx.tail += rows.tobytes()
        self.count = first + count
        if self._marks is not None:
            self._marks += bytes(count)
        return first

    def settle(self, mark: DispatchMark, ordinals: bytes, targets: Iterable[SchedulePlace] = ()) -> None:
        """Record the outcome of these messages (ordinals as little-endian u32), in this order."""
        numbers = np.frombuffer(ordinals, "<u4")
        self._apply(mark, numbers, tuple(targets))
        self.settled += len(numbers)
        self.done.tail += encode_record(mark, ordinals, tuple(targets))

    # --- what became of them -------------------------------------------------------------------------------------------

    @property
    def has_marks(self) -> bool:
        """Whether the states are in memory; if not, call `load_marks`."""
        return self._marks is not None

    def load_marks(self, planned: Iterable[bytes]) -> None:
        """Read the dispatch log; `planned` are the ordinals in open plans. Raises LogDamaged."""
        marks = self._marks = bytearray(self.count)
        end = 0
        try:
            for behind, record in decode_records(self._files.read(self.done, 0, self.done.end)):
                if len(record.ordinals) and int(record.ordinals.max()) >= self.count:
                    raise CorruptBatch("it names a message that is not in the bucket")
                self._apply(record.mark, record.ordinals, record.targets)
                end = behind
            if np.count_nonzero(np.frombuffer(marks, np.uint8)) != self.settled:
                raise CorruptBatch(f"it does not have the {self.settled} messages that it had before")
        except CorruptBatch as cause:
            self._marks = None
            self._moves.clear()
            raise damaged(self.done.name, end, cause.message) from cause
        for ordinals in planned:
            self.mark(DispatchMark.PLANNED, ordinals)

    def _apply(self, mark: DispatchMark, ordinals: npt.NDArray[np.uint32], targets: tuple[SchedulePlace, ...]) -> None:
        self.marks()[ordinals] = mark
        self._moves.update(zip(ordinals.tolist(), targets, strict=False))

    def marks(self) -> npt.NDArray[np.uint8]:
        """The states by ordinal, as a view: release it before anything is stored."""
        assert self._marks is not None, "load_marks comes first"
        return np.frombuffer(self._marks, np.uint8)

    def mark(self, mark: DispatchMark, ordinals: bytes) -> None:
        """Mark ordinals (little-endian u32) as planned, or pending again."""
        self.marks()[np.frombuffer(ordinals, "<u4")] = mark

    def mark_of(self, ordinal: int) -> DispatchMark:
        assert self._marks is not None, "load_marks comes first"
        return DispatchMark(self._marks[ordinal])

    def moved_to(self, ordinal: int) -> SchedulePlace:
        """The new bucket and ordinal of a moved message."""
        return self._moves[ordinal]

    # --- reading -------------------------------------------------------------------------------------------------------

    def rows(self, first: int, end: int) -> npt.NDArray[np.void]:
        """Rows of the index. Raises LogDamaged."""
        data = self._files.read(self.idx, first * ROW_BYTES, (end - first) * ROW_BYTES)
        return np.frombuffer(data, INDEX_ROW)

    def row(self, ordinal: int) -> tuple[int, int, int]:
        """(due_ms, position, place) of one message. Raises LogDamaged."""
        due_ms, position8, at, _ = _ROW.unpack(self._files.read(self.idx, ordinal * ROW_BYTES, ROW_BYTES))
        return due_ms, position8 << 3, at

    def rows_of(self, ordinals: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(due_ms, position, place) of messages, which are given ascending. Neighbours cost one read. Raises LogDamaged."""
        at, count = 0, len(ordinals)
        while at < count:
            first, begin = ordinals[at], at
            while at < count and ordinals[at] - first < _ROWS_AHEAD:
                at += 1
            data = self._files.read(self.idx, first * ROW_BYTES, (ordinals[at - 1] - first + 1) * ROW_BYTES)
            for each in ordinals[begin:at]:
                due_ms, position8, place, _ = _ROW.unpack_from(data, (each - first) * ROW_BYTES)
                yield due_ms, position8 << 3, place

    def picked(self, ordinal: int, due_ms: int, position: int, at: int, cache: BatchCache) -> DueMessage | None:
        """The message by a few small reads, if its batch has an outline and that is cheaper; else None. Raises LogDamaged."""
        outline = cache.outline(self.number, position)
        if outline is None:
            return None
        read = self._files.stretch(self.log, position + ENVELOPE_BYTES, outline.region_bytes)
        try:
            return outline.message(read, at, due_ms, SchedulePlace(self.number, ordinal))
        except CorruptBatch as cause:
            raise damaged(self.log.name, position, cause.message) from cause

    def batch(self, position: int, cache: BatchCache) -> StoredBatch:
        """The batch at a position. Raises LogDamaged."""
        found = cache.get(self.number, position)
        if found is None:
            try:
                found = self._read_batch(position)
            except CorruptBatch as cause:
                raise damaged(self.log.name, position, cause.message) from cause
            cache.put(self.number, position, found)
        return found

    def _read_batch(self, position: int) -> StoredBatch:
        data = self._files.read(self.log, position, _READ_AHEAD)
        envelope = parse_envelope(data)
        total = envelope.total_bytes
        if total <= len(data):
            region = data[ENVELOPE_BYTES:total]
        else:
            region = self._files.read(self.log, position + ENVELOPE_BYTES, total - ENVELOPE_BYTES)
        if len(region) != total - ENVELOPE_BYTES:
            raise CorruptBatch("the batch is incomplete")
        return StoredBatch(envelope, region)

    def append_ms_of(self, ordinal: int) -> int:
        """When the message's batch was stored. Raises LogDamaged."""
        position = self.row(ordinal)[1]
        try:
            return parse_envelope(self._files.read(self.log, position, ENVELOPE_BYTES)).append_time_ms
        except CorruptBatch as cause:
            raise damaged(self.log.name, position, cause.message) from cause

    def subject_of(self, ordinal: int) -> str:
        """The subject of one message; empty if its batch is damaged."""
        with suppress(LogDamaged, error):
            position = self.row(ordinal)[1] + ENVELOPE_BYTES
            size = REGION.unpack(self._files.read(self.log, position, REGION_BYTES))[_SUBJECT_BYTES]
            return self._files.read(self.log, position + REGION_BYTES, size).decode(errors="replace")
        return ""

    def batch_of(self, ordinal: int, cache: BatchCache, row: tuple[int, int, int] | None = None) -> tuple[StoredBatch, int]:
        """(the message's batch, its place there); `row` is its row of the index, if known. Raises LogDamaged."""
        due_ms, position, at = row or self.row(ordinal)
        if position >= self.log.end:
            raise damaged(self.idx.name, ordinal * ROW_BYTES, f"it points to byte {position} of a log of {self.log.end}")
        batch = self.batch(position, cache)
        if batch.view.base_sequence + at != ordinal or at >= batch.view.count or batch.due_ms(at) != due_ms:
            raise damaged(self.idx.name, ordinal * ROW_BYTES, "it says another thing than the batch it points to")
        return batch, at


class BucketReader:
    """A bucket's index at one moment. Safe in a thread; see `qmq.delay.interfaces.RowReader`."""

    def __init__(self, disk: Disk, files: AppendFiles, bucket: Bucket) -> None:
        self.count = bucket.count
        self._disk = disk
        self._path = files.folder / bucket.idx.name
        self._written = bucket.idx.written
        self._tail = bytes(bucket.idx.tail)

    def read(self, first: int, end: int) -> npt.NDArray[np.void]:
        """The rows of the index. Raises LogDamaged, OSError."""
        at, size = first * ROW_BYTES, (end - first) * ROW_BYTES
        if at >= self._written:
            data = self._tail[at - self._written : at - self._written + size]
        else:
            data = self._from_file(at, min(size, self._written - at))
            data += self._tail[: size - len(data)]
        return np.frombuffer(data, INDEX_ROW)

    def _from_file(self, at: int, size: int) -> bytes:
        fd = self._disk.open_read(self._path)
        try:
            data = read_written(self._disk, fd, self._path.name, size, at)
        finally:
            self._disk.close(fd)
        if len(data) < size:
            raise damaged(self._path.name, at + len(data), f"it has had {self._written} bytes")
        return data
