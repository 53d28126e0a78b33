"""All buckets of a schedule, the bytes of them that are only in memory, and look-ups of messages:
by place, by message id, and pending ones in the order of due times.

A bucket has the messages that are due in one span of time, in three append files, and their states.

    NAME.log     the batches; an envelope's base_sequence is the ordinal of its first message, its
                 epoch and flushed_position are 0
    NAME.idx     INDEX_ROW for each ordinal
    NAME.done    the dispatch log: the messages' final states

NAME is the bucket's beginning in UTC. The state of each message (`DispatchMark`) is read from the
dispatch log at first use: most buckets are not used for months.

    a record     crc u32 | kind u16 | 0 u16 | count u32 | 0 u32 | ordinals u32 * count | of MOVED:
                 (bucket i32, ordinal u32) * count | pad8

The dispatch log has a message at most once. It does not have planned messages: plans are in the
action log and in checkpoints.

Reading ahead: the schedule logs of near buckets are read once, in order, before their messages
become due. Each large batch is checked and gets an outline (batches.py), so that its messages can
be read singly; and the bytes are in the page cache. A *piece* of a log is read at a time, in a
thread, with pauses in between: nothing waits for it, since a batch without an outline is read
whole, and checked then.

Damage is logged, and reading the message later raises the error. After a damaged envelope no batch
can be found, so reading ahead ends there for that log.
"""

from __future__ import annotations

import logging
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from operator import itemgetter
from pathlib import Path
from struct import Struct, error
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from qmq.delay.batches import (
    OUTLINED_BYTES_MIN,
    BatchCache,
    BatchOutline,
    DueMessage,
    Places,
    SchedulePlace,
    StoredBatch,
    is_outlined,
)
from qmq.delay.files import (
    DONE,
    IDX,
    LOG,
    TAIL_BYTES_MAX,
    AppendFile,
    AppendFiles,
    UnwrittenTail,
    damaged,
    read_written,
)
from qmq.delay.spread import Spread, SpreadPiece
from qmq.errors import CorruptBatch, DiskFull, LogDamaged, MessageNotFound
from qmq.limits import BATCH_BYTES_MAX, KIB, MIB
from qmq.log.disk import Disk
from qmq.wire.batch import BATCH_BYTES_MIN, ENVELOPE_BYTES, Kind, parse_envelope, place
from qmq.wire.batch_columns import REGION, REGION_BYTES, UNREADABLE, RegionHeader

_FILE: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z\.(log|idx|done)|[0-9a-f]{16}-[0-9a-f]{16}\.run")
INDEX_ROW: Final = np.dtype(
    [("due", "<i8"), ("position8", "<u4"), ("place", "<u2"), ("flags", "<u2")]
)
"""A line of a bucket's index file, the `ordinal`-th: due time in ms, position of its batch in the
schedule log divided by 8, its place in the batch, and the `BatchFlag`s of the batch."""
ROW_BYTES: Final = INDEX_ROW.itemsize
LOG_BYTES_MAX: Final = 8 << 32
"""A row of the index has 32 bits for a position, in units of 8 bytes."""
_ROW: Final = Struct("<qIHH")
_PLACES: Final = np.arange(65_536, dtype="<u2")
_READ_AHEAD: Final = 4096
_RECORD_HEAD: Final = Struct("<IHHII")
_TARGET: Final = Struct("<iI")
_SUBJECT_BYTES: Final = RegionHeader._fields.index("subject_bytes")
_ROWS_AHEAD: Final = 256
"""Wanted index rows that are no farther apart are read together."""


def name_of(bucket: int, bucket_ms: int) -> str:
    """The name of its files, without suffix. Names sort as buckets do."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(bucket * bucket_ms // 1000))


def is_file_name(name: str) -> bool:
    """Whether a schedule may have a file of this name. Names come from other replicas and from
    backups, and become paths.
    """
    return _FILE.fullmatch(name) is not None


class DispatchMark(IntEnum):
    """The state of a message: one byte of memory for each message of a loaded bucket."""

    PENDING = 0
    DELIVERED = 1
    CANCELLED = 2
    MOVED = 3
    PLANNED = 4


_MARKS: Final = frozenset(DispatchMark)


class DispatchRecord(NamedTuple):
    """Messages that got the same final state together."""

    mark: DispatchMark
    ordinals: npt.NDArray[np.uint32]
    targets: tuple[SchedulePlace, ...] = ()
    """For MOVED: the new place of each."""


def encode_record(
    mark: DispatchMark, ordinals: bytes, targets: Sequence[SchedulePlace] = ()
) -> bytes:
    """`ordinals` are little-endian u32."""
    data = ordinals + b"".join(_TARGET.pack(*each) for each in targets)
    rest = _RECORD_HEAD.pack(0, mark, 0, len(ordinals) // 4, 0)[4:] + data + bytes(-len(data) & 7)
    return int(crc32c(rest)).to_bytes(4, "little") + rest


def decode_records(data: bytes) -> Iterator[tuple[int, DispatchRecord]]:
    """(position after it, record). Raises CorruptBatch at the first bad one."""
    at = 0
    while at < len(data):
        if at + _RECORD_HEAD.size > len(data):
            raise CorruptBatch("the head of a record is incomplete")
        crc, kind, _, count, _ = _RECORD_HEAD.unpack_from(data, at)
        size = 4 * count + (_TARGET.size * count if kind == DispatchMark.MOVED else 0)
        end = at + _RECORD_HEAD.size + size + (-size & 7)
        if end > len(data) or crc32c(data[at + 4 : end]) != crc:
            raise CorruptBatch("the checksum of a record is wrong")
        if kind not in _MARKS:
            raise CorruptBatch(f"this version of QMQ knows no record of kind {kind}")
        yield end, _record(data, at + _RECORD_HEAD.size, kind, count)
        at = end


def _record(data: bytes, at: int, kind: int, count: int) -> DispatchRecord:
    ordinals = np.frombuffer(data, "<u4", count, at)
    if kind != DispatchMark.MOVED:
        return DispatchRecord(DispatchMark(kind), ordinals)
    targets = data[at + 4 * count : at + (4 + _TARGET.size) * count]
    return DispatchRecord(
        DispatchMark.MOVED,
        ordinals,
        tuple(SchedulePlace(*each) for each in _TARGET.iter_unpack(targets)),
    )


class ScheduledBatch(NamedTuple):
    """A batch of delayed messages as the log's entry brought it, or a piece of one."""

    log_index: int
    append_ms: int
    region: bytes
    crc: int
    flags: int
    """The region's flags, as the index keeps them: 16 bits."""


class BucketInfo(NamedTuple):
    """A bucket, as far as the schedule knows it without reading."""

    bucket: int
    messages: int
    pending: int
    """Messages that are not delivered, cancelled or moved; planned ones count."""
    stored_bytes: int


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

    # --- storing ----------------------------------------------------------------------------------

    def add(self, batch: ScheduledBatch, due_times_ms: npt.NDArray[np.int64] | int) -> int:
        """Store a batch for this bucket, and return the ordinal of its first message.
        `due_times_ms`: its column, or the only time.
        """
        index, append_ms, region, crc, flags = batch
        first, log = self.count, self.log
        total, position = ENVELOPE_BYTES + len(region), log.end
        assert position < LOG_BYTES_MAX, (
            f"{log.name} is full: shorter buckets, or more delay groups, are needed"
        )
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

    def add_lost(self, due_ms: int) -> None:
        """Store a message that cannot be read: reading it raises LogDamaged."""
        append_ms = self.append_ms_of(self.count - 1) if self.count else 0
        self.add(
            ScheduledBatch(0, append_ms, bytes(BATCH_BYTES_MIN - ENVELOPE_BYTES), 1, 0), due_ms
        )

    def settle(
        self, mark: DispatchMark, ordinals: bytes, targets: Iterable[SchedulePlace] = ()
    ) -> None:
        """Record the outcome of these messages (ordinals as little-endian u32), in this order."""
        numbers = np.frombuffer(ordinals, "<u4")
        self._apply(mark, numbers, tuple(targets))
        self.settled += len(numbers)
        self.done.tail += encode_record(mark, ordinals, tuple(targets))

    # --- what became of them ----------------------------------------------------------------------

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
                raise CorruptBatch(
                    f"it does not have the {self.settled} messages that it had before"
                )
        except CorruptBatch as cause:
            self._marks = None
            self._moves.clear()
            raise damaged(self.done.name, end, cause.message) from cause
        for ordinals in planned:
            self.mark(DispatchMark.PLANNED, ordinals)

    def _apply(
        self,
        mark: DispatchMark,
        ordinals: npt.NDArray[np.uint32],
        targets: tuple[SchedulePlace, ...],
    ) -> None:
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

    # --- reading ----------------------------------------------------------------------------------

    def rows(self, first: int, end: int) -> npt.NDArray[np.void]:
        """Rows of the index. Raises LogDamaged."""
        data = self._files.read(self.idx, first * ROW_BYTES, (end - first) * ROW_BYTES)
        return np.frombuffer(data, INDEX_ROW)

    def row(self, ordinal: int) -> tuple[int, int, int]:
        """(due_ms, position, place) of one message. Raises LogDamaged."""
        due_ms, position8, at, _ = _ROW.unpack(
            self._files.read(self.idx, ordinal * ROW_BYTES, ROW_BYTES)
        )
        return due_ms, position8 << 3, at

    def rows_of(self, ordinals: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(due_ms, position, place) of messages, which are given ascending. Neighbours cost one
        read. Raises LogDamaged.
        """
        at, count = 0, len(ordinals)
        while at < count:
            first, begin = ordinals[at], at
            while at < count and ordinals[at] - first < _ROWS_AHEAD:
                at += 1
            data = self._files.read(
                self.idx, first * ROW_BYTES, (ordinals[at - 1] - first + 1) * ROW_BYTES
            )
            for each in ordinals[begin:at]:
                due_ms, position8, place, _ = _ROW.unpack_from(data, (each - first) * ROW_BYTES)
                yield due_ms, position8 << 3, place

    def picked(
        self, ordinal: int, due_ms: int, position: int, at: int, cache: BatchCache
    ) -> DueMessage | None:
        """The message by a few small reads, if its batch has an outline and that is cheaper; else
        None. Raises LogDamaged.
        """
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
            return parse_envelope(
                self._files.read(self.log, position, ENVELOPE_BYTES)
            ).append_time_ms
        except CorruptBatch as cause:
            raise damaged(self.log.name, position, cause.message) from cause

    def subject_of(self, ordinal: int) -> str:
        """The subject of one message; empty if its batch is damaged."""
        with suppress(LogDamaged, error):
            position = self.row(ordinal)[1] + ENVELOPE_BYTES
            size = REGION.unpack(self._files.read(self.log, position, REGION_BYTES))[_SUBJECT_BYTES]
            return self._files.read(self.log, position + REGION_BYTES, size).decode(
                errors="replace"
            )
        return ""

    def batch_of(
        self, ordinal: int, cache: BatchCache, row: tuple[int, int, int] | None = None
    ) -> tuple[StoredBatch, int]:
        """(the message's batch, its place there); `row` is its row of the index, if known.
        Raises LogDamaged.
        """
        due_ms, position, at = row or self.row(ordinal)
        if position >= self.log.end:
            raise damaged(
                self.idx.name,
                ordinal * ROW_BYTES,
                f"it points to byte {position} of a log of {self.log.end}",
            )
        batch = self.batch(position, cache)
        if (
            batch.view.base_sequence + at != ordinal
            or at >= batch.view.count
            or batch.due_ms(at) != due_ms
        ):
            raise damaged(
                self.idx.name,
                ordinal * ROW_BYTES,
                "it says another thing than the batch it points to",
            )
        return batch, at


class BucketReader:
    """A bucket's index at one moment. Safe in a thread."""

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


log = logging.getLogger("qmq.delay")


class Buckets:
    """The buckets of a schedule. Their unwritten tails take at most `bytes_max`."""

    def __init__(self, files: AppendFiles, bucket_ms: int, bytes_max: int, spread: Spread) -> None:
        self.files = files
        self.bucket_ms = bucket_ms
        self._bytes_max = bytes_max
        self._buckets: dict[int, Bucket] = {}
        self._is_sorted = True
        self._dirty: dict[int, int] = {}
        """Buckets with tails and their bytes; the one with the oldest tail comes first."""
        self._tail_bytes = 0
        self.spread = spread

    # --- which there are --------------------------------------------------------------------------

    def __contains__(self, number: int) -> bool:
        return number in self._buckets or self.spread.has(number)

    def __iter__(self) -> Iterator[Bucket]:
        """The buckets that have files, in ascending order."""
        if not self._is_sorted:
            self._buckets = dict(sorted(self._buckets.items()))
            self._is_sorted = True
        return iter(self._buckets.values())

    def get(self, number: int) -> Bucket | None:
        """The bucket, if it is here, with all its messages filed. Raises LogDamaged."""
        if self.spread.has(number):
            self._file(number, self.spread.file(number))
        return self._buckets.get(number)

    def as_filed(self, number: int) -> Bucket | None:
        """The bucket with the messages that are filed so far, if it has some."""
        return self._buckets.get(number)

    def _file(self, number: int, pieces: Iterable[SpreadPiece]) -> int:
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._new(number)
        before = bucket.count
        for index, append_ms, flags, region, due_times_ms in pieces:
            if not region:
                bucket.add_lost(number * self.bucket_ms)
                continue
            bucket.add(
                ScheduledBatch(index, append_ms, region, crc32c(region), flags & 0xFFFF),
                due_times_ms[0] if len(due_times_ms) == 1 else np.array(due_times_ms, np.int64),
            )
        self.grew(bucket)
        return bucket.count - before

    def file_near(self, last: int) -> bool:
        """File some messages of the buckets up to this one. Returns whether there may be more.
        Raises LogDamaged.
        """
        number = self.spread.first_in_runs(last)
        if number is not None:
            self._file(number, self.spread.file_oldest(number))
        elif (number := self.spread.first_staged(last)) is not None:
            self.get(number)
        return number is not None

    def file_surplus(self, messages: int) -> None:
        """While there are too many runs, file about as many messages of the oldest ones.
        Raises LogDamaged.
        """
        while messages > 0 and (number := self.spread.surplus()) is not None:
            messages -= self._file(number, self.spread.file_oldest(number)) + 1

    def settle_stage(self) -> None:
        """Before a checkpoint: nothing stays staged. Raises LogDamaged."""
        for number in self.spread.few():
            self.get(number)
        self.spread.seal()

    def require(self, number: int) -> Bucket:
        """The bucket. Raises MessageNotFound."""
        bucket = self.get(number)
        if bucket is None:
            raise MessageNotFound(
                f"there is no bucket {name_of(number, self.bucket_ms)}, or it was deleted"
            )
        return bucket

    def _new(self, number: int) -> Bucket:
        bucket = self._buckets[number] = Bucket(self.files, number, name_of(number, self.bucket_ms))
        self._is_sorted = False
        return bucket

    def restore(self, rows: Iterable[tuple[int, int, int, int, int]]) -> None:
        """Load a state: (bucket, log_bytes, count, done_bytes, settled), ascending."""
        for number, log_bytes, count, done_bytes, settled in rows:
            bucket = self._new(number)
            bucket.count, bucket.settled = count, settled
            bucket.log.written, bucket.idx.written, bucket.done.written = (
                log_bytes,
                count * ROW_BYTES,
                done_bytes,
            )

    def drop_before(self, before: int) -> list[str]:
        """Remove buckets, and return the names of their files."""
        names: list[str] = []
        for number in [each for each in self._buckets if each < before]:
            bucket = self._buckets.pop(number)
            self._tail_bytes -= self._dirty.pop(number, 0)
            for file in bucket.growing:
                self.files.forget(file.name)
                names.append(file.name)
        return names

    # --- storing, and what waits in memory --------------------------------------------------------

    def add(
        self, number: int, batch: ScheduledBatch, due_times_ms: npt.NDArray[np.int64] | int
    ) -> int:
        """Store a batch that is all of one bucket; see `Bucket.add`."""
        bucket = self.get(number) or self._new(number)
        ordinal = bucket.add(batch, due_times_ms)
        self.grew(bucket)
        return ordinal

    def grew(self, bucket: Bucket) -> None:
        """A bucket's tails have grown: write them if they, or all together, are too large."""
        self._count(bucket)
        try:
            if bucket.tail_bytes > TAIL_BYTES_MAX:
                self._write(bucket)
            while self._tail_bytes > self._bytes_max:
                self._write(self._buckets[next(iter(self._dirty))])
        except (
            DiskFull
        ) as cause:  # the entry is in the log already, and the log itself refuses more
            log.warning(
                "writing the newest part of the schedule failed, it stays in memory: %s", cause
            )

    def _write(self, bucket: Bucket) -> None:
        try:
            for file in bucket.growing:
                self.files.write(file)
        finally:  # the disk may fill between two files
            self._count(bucket)

    def _count(self, bucket: Bucket) -> None:
        size = bucket.tail_bytes
        self._tail_bytes += size - self._dirty.get(bucket.number, 0)
        if size:
            self._dirty[bucket.number] = size
        else:
            self._dirty.pop(bucket.number, None)

    def tails(self) -> list[UnwrittenTail]:
        """All tails."""
        return [
            UnwrittenTail(file, file.written, bytes(file.tail))
            for number in self._dirty
            for file in self._buckets[number].growing
            if file.tail
        ] + [
            UnwrittenTail(run.file, run.file.written, bytes(run.file.tail))
            for run in self.spread.runs
            if run.file.tail
        ]

    def wrote(self, tails: Iterable[UnwrittenTail]) -> None:
        """The bytes that are only in memory, of all buckets."""
        for tail in tails:
            tail.file.wrote(tail.at + len(tail.data))
        self._dirty = {
            number: size for number in self._dirty if (size := self._buckets[number].tail_bytes)
        }
        self._tail_bytes = sum(self._dirty.values())

    def check(self) -> None:
        """Raises AssertionError unless the counts agree with the buckets. For tests."""
        assert self._tail_bytes == sum(self._dirty.values())
        assert {each.number: each.tail_bytes for each in self if each.tail_bytes} == {
            key: size for key, size in self._dirty.items() if size
        }
        assert [each.number for each in self] == sorted(self._buckets)


_SLICE_ROWS: Final = 65_536
SORTED_MAX: Final = 200_000
"""Messages of one bucket that are sorted at once; a bucket with more is scanned several times."""
_CHUNK: Final = 256
PICKED_MAX: Final = 8
"""If more messages of a batch are wanted together, the whole batch is read."""
_POSITION: Final = itemgetter(1)


def readable(reading: Callable[[Places], list[DueMessage]], places: Places) -> list[DueMessage]:
    """The readable messages. The others are logged."""
    try:
        return reading(places)
    except (LogDamaged, *UNREADABLE) as failure:
        if len(places) == 1:
            log.error("a delayed message cannot be read: %s", failure)
            return []
    middle = len(places) // 2
    return readable(reading, places[:middle]) + readable(reading, places[middle:])


def messages_of(bucket: Bucket, cache: BatchCache, ordinals: list[int]) -> Iterator[DueMessage]:
    """Messages of one bucket, in ascending order of ordinals. One or a few messages of a large
    checked batch are read singly; otherwise the whole batch is read.
    """
    rows = list(bucket.rows_of(ordinals))
    wanted = Counter(map(_POSITION, rows))
    for ordinal, row in zip(ordinals, rows, strict=True):
        message = None
        if wanted[row[1]] <= PICKED_MAX and cache.get(bucket.number, row[1]) is None:
            message = bucket.picked(ordinal, *row, cache)
        yield message or _message(bucket, cache, ordinal, row)


def _message(
    bucket: Bucket, cache: BatchCache, ordinal: int, row: tuple[int, int, int]
) -> DueMessage:
    batch, at = bucket.batch_of(ordinal, cache, row)
    try:
        return batch.message(at, SchedulePlace(bucket.number, ordinal))
    except CorruptBatch as cause:
        raise damaged(bucket.log.name, row[1], cause.message) from cause


def find(
    bucket: Bucket, cache: BatchCache, append_ms: int, message_id: bytes
) -> SchedulePlace | None:
    """The first message with that id among the batches of that append time. Raises LogDamaged."""
    ordinal = bisect_left(range(bucket.count), append_ms, key=bucket.append_ms_of)
    while ordinal < bucket.count:
        batch, _ = bucket.batch_of(ordinal, cache)
        if batch.view.envelope.append_time_ms != append_ms:
            return None
        at = batch.find(message_id)
        if at >= 0:
            return SchedulePlace(bucket.number, batch.view.base_sequence + at)
        ordinal = batch.view.base_sequence + batch.view.count
    return None


def pending(bucket: Bucket, from_ms: int, end_ms: int, flags: int = 0) -> Iterator[Places]:
    """Pending messages with from <= due < end and all of `flags`, ordered by (due, ordinal), a few
    hundred at a time. Raises LogDamaged.
    """
    behind, is_more = (from_ms - 1, bucket.count), True
    while is_more:
        due_times_ms, ordinals, is_more = _first_pending(bucket, behind, end_ms, flags)
        for at in range(0, len(due_times_ms), _CHUNK):
            part = slice(at, at + _CHUNK)
            yield Places(
                due_times_ms[part],
                np.full(len(due_times_ms[part]), bucket.number, np.int32),
                ordinals[part],
            )
        if is_more:
            behind = (int(due_times_ms[-1]), int(ordinals[-1]))


def _first_pending(
    bucket: Bucket, behind: tuple[int, int], end_ms: int, flags: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32], bool]:
    due_times_ms, ordinals, is_more = np.zeros(0, np.int64), np.zeros(0, np.uint32), False
    for first in range(0, bucket.count, _SLICE_ROWS):
        rows = bucket.rows(first, min(first + _SLICE_ROWS, bucket.count))
        due, numbers = rows["due"], np.arange(first, first + len(rows), dtype=np.uint32)
        mask = bucket.marks()[first : first + len(rows)] == DispatchMark.PENDING
        if flags:
            mask &= rows["flags"] & flags == flags
        mask &= (due < end_ms) & ((due > behind[0]) | ((due == behind[0]) & (numbers > behind[1])))
        due_times_ms, ordinals = (
            np.concatenate((due_times_ms, due[mask])),
            np.concatenate((ordinals, numbers[mask])),
        )
        if len(due_times_ms) > 2 * SORTED_MAX or first + _SLICE_ROWS >= bucket.count:
            order = np.lexsort((ordinals, due_times_ms))
            is_more |= len(order) > SORTED_MAX
            due_times_ms, ordinals = due_times_ms[order[:SORTED_MAX]], ordinals[order[:SORTED_MAX]]
    return due_times_ms, ordinals, is_more


def check(
    bucket: Bucket, cache: BatchCache, planned: Iterable[bytes], bucket_ms: int, closed_before: int
) -> None:
    """The invariant of a bucket: its index agrees with its log, its states with its dispatch log
    and the open plans.
    """
    position, append_ms = 0, 0
    rows = bucket.rows(0, bucket.count)
    ordinal = 0
    while position < bucket.log.end:
        view = bucket.batch(position, cache).view
        assert view.base_sequence == ordinal
        assert view.envelope.append_time_ms >= append_ms
        these = rows[ordinal : ordinal + view.count]
        assert tuple(these["due"].tolist()) == view.due_times_ms()
        assert these["position8"].tolist() == [position // 8] * view.count
        assert these["place"].tolist() == list(range(view.count))
        assert these["flags"].tolist() == [view.header.flags & 0xFFFF] * view.count
        append_ms, ordinal = view.envelope.append_time_ms, ordinal + view.count
        position += view.envelope.total_bytes
    assert ordinal == bucket.count == len(rows)
    assert bucket.idx.end == bucket.count * ROW_BYTES
    natural = rows["due"] // bucket_ms
    assert np.all(
        (natural == bucket.number) | ((natural < bucket.number) & (bucket.number == closed_before))
    )
    if bucket.has_marks:
        known = bucket.marks().tolist()
        bucket.load_marks(planned)
        assert known == bucket.marks().tolist()
        assert bucket.settled == sum(
            mark not in (DispatchMark.PENDING, DispatchMark.PLANNED) for mark in known
        )


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
    """How far each near bucket's log was read. Call `next_piece` and `note` on the event loop, the
    piece itself in a thread.
    """

    def __init__(self, disk: Disk, buckets: Buckets, cache: BatchCache) -> None:
        self._disk = disk
        self._buckets = buckets
        self._cache = cache
        self._ends: dict[int, int] = {}

    def next_piece(self, near: Sequence[int]) -> ReadAheadPiece | None:
        """A piece of the first of these buckets that has messages left and enough unread bytes on
        disk; None if there is none.
        """
        self._ends = {number: end for number, end in self._ends.items() if number in near}
        for number in near:
            bucket, begin = self._buckets.as_filed(number), self._ends.get(number, 0)
            if (
                bucket is not None
                and begin + OUTLINED_BYTES_MIN <= bucket.log.written
                and bucket.settled < bucket.count
            ):
                return ReadAheadPiece(
                    self._disk,
                    self._buckets.files.folder / bucket.log.name,
                    number,
                    begin,
                    bucket.log.written,
                )
        return None

    def note(self, found: ReadAheadResult) -> None:
        """A piece was run."""
        if found.bucket not in self._buckets:
            return
        self._ends[found.bucket] = found.end
        for position, outline in found.outlines:
            self._cache.put_outline(found.bucket, position, outline)
        for position, why in found.damage:
            name = name_of(found.bucket, self._buckets.bucket_ms) + LOG
            log.error("%s", damaged(name, position, why))


class ReadAheadPiece:
    """A piece of a schedule log, to be called in a thread."""

    def __init__(self, disk: Disk, path: Path, bucket: int, begin: int, end: int) -> None:
        self.bucket = bucket
        self.path = path
        self._disk = disk
        self._begin = begin
        self._end = end

    def __call__(self) -> ReadAheadResult:
        """Read the piece. Does not raise: unreadable bytes are reported as damage, unless the
        bucket was deleted.
        """
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
            found.damage.append(
                (self._begin, cause.message if isinstance(cause, CorruptBatch) else str(cause))
            )
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
        """(how many bytes of `data` are whole batches,
        how many must be read together for the next one).
        """
        at = 0
        while at + ENVELOPE_BYTES <= len(data):
            total = _TOTAL.unpack_from(data, at + _TOTAL_AT)[0]
            if not BATCH_BYTES_MIN <= total <= BATCH_BYTES_MAX or total & 7:
                raise CorruptBatch(f"a batch cannot have {total} bytes")
            if at + total > len(data):
                return at, max(total, READ_BYTES)
            if total > OUTLINED_BYTES_MIN:
                self._outline(data[at : at + total], position + at, found)
            at += total
        return at, READ_BYTES

    def _outline(self, data: bytes, position: int, found: ReadAheadResult) -> None:
        try:
            batch = StoredBatch(parse_envelope(data), data[ENVELOPE_BYTES:])
            if is_outlined(batch.view):
                found.outlines.append((position, BatchOutline(batch.view)))
        except CorruptBatch as cause:
            found.damage.append((position, cause.message))
