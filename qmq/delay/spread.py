"""Messages of batches that fall into many buckets, until their buckets are needed.

Cutting such a batch at once costs an object and, sooner or later, a write for each bucket: a batch
of 1,000 messages over a year falls into almost 1,000 buckets. Instead, batches are *staged* in
memory, and many of them are written together as a *run*: one file with their messages sorted by
bucket. A bucket's messages are *filed*, moved into the bucket's own files, when anything needs the
bucket: because it is near, or one of its messages is moved, cancelled or looked for.

Filing appends what cutting would have appended, in the same order: by the entry's index. So the
files of a bucket begin with the same bytes on all replicas, however much of them is filed, and an
ordinal is the same before its message is filed.

    NAME.run     records | batch rows, their subjects | end of each bucket's records u64 * (n + 1)
                 | messages of each bucket u32 * n | CRC-32C u32 of each 4 KiB of the bytes before

NAME has the indexes of the first and the last entry. A record is RECORD and the bytes of a body. Of
a batch that has other columns than due times (`is_plain` is 0), a record is instead the whole
region of a piece; its place is 0, and its due time that of its first message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from qmq.delay.batches import Pieces, cut_by_bucket, plain_pieces
from qmq.delay.files import RUN, AppendFile, AppendFiles, damaged
from qmq.errors import LogDamaged
from qmq.limits import KIB, MIB
from qmq.wire.batch_columns import REGION_BYTES, Column, RegionHeader, pad, padded, parse_header

RECORD: Final = np.dtype([("due", "<i8"), ("size", "<u4"), ("batch", "<u2"), ("place", "<u2")])
_RECORD: Final = Struct("<qIHH")
_BATCH: Final = Struct("<qqQQqIIIIHBx")
"""index, append_ms, the region's producer_id, batch_sequence, create_time_ms, flags, columns and
partition, where its subject is in the subjects, subject_bytes, is_plain."""
_STATE: Final = Struct("<IqqiIIIQI")
_FAR: Final = Struct("<iI")
BLOCK: Final = 4 * KIB
CHUNK: Final = 512 * KIB
"""A run is made and written in pieces that fit a processor's cache."""
STAGED_BYTES_MAX: Final = 16 * MIB
STAGED_BATCHES_MAX: Final = 65_536
RUN_MESSAGES_MIN: Final = 2_000
"""Fewer staged messages are filed at a checkpoint: a run for them costs more."""
RUNS_MAX: Final = 2_048
"""With more runs, the oldest ones are filed piece by piece, so that a bucket is in few places."""
_PLACES: Final = np.arange(65_536, dtype="<u2")
_ROWS_MIN: Final = 4_096
REACH: Final = 65_536
"""Buckets of one run: their numbers are sorted as 16 bits."""
_DUE: Final = int(Column.DUE)

log = logging.getLogger("qmq.delay")


class SpreadBatch(NamedTuple):
    """A batch of which messages are staged or in a run."""

    log_index: int
    append_ms: int
    producer_id: int
    batch_sequence: int
    create_ms: int
    flags: int
    columns: int
    partition: int
    subject: bytes
    is_plain: bool


class SpreadPiece(NamedTuple):
    """Messages of one batch and one bucket, ready to be filed."""

    log_index: int
    append_ms: int
    flags: int
    region: bytes
    due_times_ms: tuple[int, ...]


LOST: Final = SpreadPiece(0, 0, 0, b"", (0,))
"""A message that cannot be read. The messages after it keep their ordinals."""


@dataclass(slots=True)
class Run:
    """A run's file. `left` of its messages are not filed."""

    file: AppendFile
    number: int
    first_index: int
    last_index: int
    first_bucket: int
    buckets: int
    messages: int
    left: int
    data_bytes: int
    batch_bytes: int

    @property
    def size(self) -> int:
        """The length of its file."""
        return self._table_end + 4 * (-(-self._table_end // BLOCK))

    @property
    def _table_at(self) -> int:
        return self.data_bytes + self.batch_bytes

    @property
    def _table_end(self) -> int:
        return self._counts_at + 4 * self.buckets

    @property
    def _counts_at(self) -> int:
        return self._table_at + 8 * (self.buckets + 1)

    def _read(self, files: AppendFiles, begin: int, end: int) -> bytes:
        """Checked bytes. Raises LogDamaged."""
        first, last = begin // BLOCK, -(-end // BLOCK)
        size = min(last * BLOCK, self._table_end) - first * BLOCK
        data = files.read(self.file, first * BLOCK, size)
        sums = files.read(self.file, self._table_end + 4 * first, 4 * (last - first))
        for at in range(last - first):
            if crc32c(data[at * BLOCK : (at + 1) * BLOCK]) != int.from_bytes(
                sums[4 * at : 4 * at + 4], "little"
            ):
                raise damaged(self.file.name, (first + at) * BLOCK, "its checksum is wrong")
        return data[begin - first * BLOCK : end - first * BLOCK]

    def count(self, files: AppendFiles, bucket: int) -> int:
        """How many messages of the bucket were written. Raises LogDamaged."""
        at = self._counts_at + 4 * (bucket - self.first_bucket)
        return int.from_bytes(self._read(files, at, at + 4), "little")

    def pieces(self, files: AppendFiles, bucket: int) -> Iterator[SpreadPiece]:
        """A bucket's messages in the order of the entries. Raises LogDamaged."""
        at = bucket - self.first_bucket
        if not 0 <= at < self.buckets:
            return
        table = self._table_at + 8 * at
        ends = self._read(files, table, table + 16)
        begin, end = (int.from_bytes(ends[each : each + 8], "little") for each in (0, 8))
        if begin == end:
            return
        batches = self._read(files, self.data_bytes, self._table_at)
        records = _records(self._read(files, begin, end))
        yield from _pieces(records, lambda number: _batch_at(batches, number))


def _batch_at(data: bytes, number: int) -> SpreadBatch:
    *fields, at, size, is_plain = _BATCH.unpack_from(data, number * _BATCH.size)
    return SpreadBatch._make((*fields, data[at : at + size], bool(is_plain)))


def _records(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(due time, number of its batch, place there, body or piece)."""
    at = 0
    while at < len(data):
        due_ms, size, batch, place = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        yield due_ms, batch, place, data[at : at + size]
        at += size


def _pieces(
    records: Iterable[tuple[int, int, int, bytes]], batch_of: Callable[[int], SpreadBatch]
) -> Iterator[SpreadPiece]:
    """Adjacent records of one batch make one piece, as when a batch is cut."""
    batch: SpreadBatch | None = None
    number, some = -1, list[tuple[int, int, bytes]]()
    for due_ms, its, place, data in records:
        if its != number:
            if batch is not None and some:
                yield from _plain(batch, some)
            number, some, batch = its, [], batch_of(its)
        if batch is not None and not batch.is_plain:
            yield SpreadPiece(batch.log_index, batch.append_ms, batch.flags, data, _dues_of(data))
        else:
            some.append((due_ms, place, data))
    if batch is not None and some:
        yield from _plain(batch, some)


def _plain(batch: SpreadBatch, some: Sequence[tuple[int, int, bytes]]) -> Iterator[SpreadPiece]:
    header = RegionHeader(
        batch.producer_id,
        batch.batch_sequence,
        batch.flags,
        len(some),
        batch.create_ms,
        batch.columns,
        batch.partition,
        0,
        len(batch.subject),
        0,
    )
    for dues, region in plain_pieces(header, batch.subject, some):
        yield SpreadPiece(batch.log_index, batch.append_ms, batch.flags, region, dues)


def _dues_of(region: bytes) -> tuple[int, ...]:
    header = parse_header(region)
    at = due_column(region, header.count, header.body_bytes)
    return tuple(np.frombuffer(region, "<i8", header.count, at).tolist())


def due_column(region: bytes, count: int, body_bytes: int) -> int:
    """Where the due times are: the last column before the bodies."""
    return len(region) - pad(body_bytes) - pad(4 * count + 4) - 8 * count


class Stage:
    """The staged messages, in columns; `records` and `numbers` have a row for each record."""

    def __init__(self) -> None:
        self.records = np.empty(_ROWS_MIN, RECORD)
        self.numbers = np.empty(_ROWS_MIN, np.int32)
        self.messages = np.empty(_ROWS_MIN, np.int32)
        """The messages of each record; 0 when they are filed."""
        self._table = np.empty(0, np.uint8)
        self._has = np.zeros(REACH, np.bool_)
        """Whether a bucket may be here, by the low bits of its number."""
        self.batches: list[SpreadBatch] = []
        self.bodies: list[tuple[int, npt.NDArray[np.uint8] | list[bytes]]] = []
        """(first row, data of each row) of each batch."""
        self.clear()

    def clear(self) -> None:
        """Forget everything. The arrays stay, because the kernel clears new memory slowly."""
        self.rows = self.bytes = 0
        self.batches.clear()
        self.bodies.clear()
        self.first, self.last = 1 << 31, -(1 << 31)
        """The lowest and the highest bucket."""
        self._has[:] = False

    def has(self, bucket: int) -> bool:
        """Whether there are messages of this bucket."""
        return bool(self._has[bucket & REACH - 1]) and self.first <= bucket <= self.last

    def fits(self, first: int, last: int) -> bool:
        """Whether messages of these buckets can be added."""
        reach = max(last, self.last) - min(first, self.first)
        return len(self.batches) < STAGED_BATCHES_MAX and reach < REACH

    def add(
        self,
        batch: SpreadBatch,
        data: npt.NDArray[np.uint8] | list[bytes],
        numbers: npt.NDArray[np.int32],
        due_times_ms: npt.NDArray[np.int64],
        places: npt.NDArray[np.integer[Any]],
        messages: npt.NDArray[np.int32] | int,
        first: int,
        last: int,
        size: int,
    ) -> None:
        """Add records of a batch of `size` bytes; its buckets are `first` to `last`."""
        begin, end = self.rows, self.rows + len(numbers)
        if end > len(self.numbers):
            self._grow(2 * end)
        records = self.records[begin:end]
        records["due"] = due_times_ms
        records["size"] = data.shape[1] if isinstance(data, np.ndarray) else list(map(len, data))
        records["batch"] = len(self.batches)
        records["place"] = places
        self.numbers[begin:end] = numbers
        self._has[numbers & REACH - 1] = True
        self.messages[begin:end] = messages
        self.first, self.last = min(self.first, first), max(self.last, last)
        self.batches.append(batch)
        self.bodies.append((begin, data))
        self.rows = end
        self.bytes += size

    def _grow(self, rows: int) -> None:
        records, numbers, messages = self.records, self.numbers, self.messages
        self.records = np.empty(rows, RECORD)
        self.numbers = np.empty(rows, np.int32)
        self.messages = np.empty(rows, np.int32)
        self.records[: self.rows] = records[: self.rows]
        self.numbers[: self.rows] = numbers[: self.rows]
        self.messages[: self.rows] = messages[: self.rows]

    def counts(self) -> dict[int, int]:
        """The staged messages of each bucket."""
        if not self.rows:
            return {}
        numbers, messages = self.numbers[: self.rows], self.messages[: self.rows]
        found = np.bincount(numbers - self.first, messages).astype(np.int64)
        where = np.flatnonzero(found)
        return dict(zip((where + self.first).tolist(), found[where].tolist(), strict=True))

    def count(self, bucket: int) -> int:
        """The bucket's staged messages."""
        rows = self._rows_of(bucket)
        return int(self.messages[rows].sum()) if len(rows) else 0

    def _rows_of(self, bucket: int) -> npt.NDArray[np.intp]:
        if not self.has(bucket):
            return np.zeros(0, np.intp)
        mask = self.numbers[: self.rows] == bucket
        mask &= self.messages[: self.rows] > 0
        return np.flatnonzero(mask)

    def take(self, bucket: int) -> list[SpreadPiece]:
        """Take the bucket's messages out."""
        rows = self._rows_of(bucket)
        if not len(rows):
            return []
        records = [
            (due_ms, batch, place, self._data(batch, row))
            for row, (due_ms, _, batch, place) in zip(
                rows.tolist(), self.records[rows].tolist(), strict=True
            )
        ]
        found = list(_pieces(records, self.batches.__getitem__))
        self.messages[rows] = 0
        self._has[bucket & REACH - 1] = False
        return found

    def _data(self, batch: int, row: int) -> bytes:
        first, data = self.bodies[batch]
        return bytes(data[row - first])

    def sorted(
        self,
    ) -> tuple[Iterator[bytes | memoryview], npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """(the records by bucket, in blocks, the end of each bucket's, how many messages it has). A
        block is valid until the next one is made.
        """
        mask = self.messages[: self.rows] > 0
        rows = None if mask.all() else np.flatnonzero(mask)
        numbers = self.numbers[: self.rows] if rows is None else self.numbers[rows]
        offsets = (numbers - self.first).astype(np.uint16)
        order = np.argsort(offsets, kind="stable")
        if rows is not None:
            order = rows[order]
        buckets = self.last - self.first + 1
        sizes = self.records["size"][: self.rows]
        one = int(sizes[0])
        is_table = all(isinstance(each, np.ndarray) for _, each in self.bodies) and bool(
            (sizes == one).all()
        )
        if is_table:
            per_bucket = np.bincount(offsets, minlength=buckets) * (one + _RECORD.size)
        else:
            weights = (sizes if rows is None else sizes[rows]).astype(np.float64) + _RECORD.size
            per_bucket = np.bincount(offsets, weights, buckets).astype(np.int64)
        ends = np.zeros(buckets + 1, np.int64)
        np.cumsum(per_bucket, out=ends[1:])
        messages = self.messages[: self.rows] if rows is None else self.messages[rows]
        counts = np.bincount(offsets, messages, buckets).astype(np.uint32)
        return self._rows_by(order, one) if is_table else self._items_by(order), ends, counts

    def _rows_by(self, order: npt.NDArray[np.intp], size: int) -> Iterator[memoryview]:
        """Records that all have the same size, as rows of a table."""
        width = _RECORD.size + size
        if len(self._table) < self.rows * width:
            self._table = np.empty(self.rows * width, np.uint8)
        table = self._table[: self.rows * width].reshape(self.rows, width)
        table[:, : _RECORD.size] = (
            self.records[: self.rows].view(np.uint8).reshape(self.rows, _RECORD.size)
        )
        for first, data in self.bodies:
            table[first : first + len(data), _RECORD.size :] = data
        step = BLOCK // gcd(BLOCK, width)
        step *= max(CHUNK // (step * width), 1)
        chunk = np.empty((step, width), np.uint8)
        for at in range(0, len(order), step):
            some = order[at : at + step]
            part = chunk[: len(some)]
            table.take(some, axis=0, out=part, mode="clip")  # "raise" would copy once more
            yield part.data.cast("B")

    def _items_by(self, order: npt.NDArray[np.intp]) -> Iterator[bytes]:
        heads = self.records[order].tobytes()
        flat: list[bytes] = []
        for _, data in self.bodies:
            flat += map(bytes, data) if isinstance(data, np.ndarray) else data
        parts, size = list[bytes](), 0
        for at, row in enumerate(order.tolist()):
            parts += (heads[at * _RECORD.size : (at + 1) * _RECORD.size], flat[row])
            size += _RECORD.size + len(flat[row])
            if size >= CHUNK:
                whole, size = b"".join(parts), size % BLOCK
                yield whole[: len(whole) - size]
                parts = [whole[len(whole) - size :]]
        yield b"".join(parts)


class Spread:
    """What is staged, and the runs."""

    def __init__(self, files: AppendFiles, run_messages_min: int, runs_max: int) -> None:
        self._files = files
        self._run_messages_min, self._runs_max = run_messages_min, runs_max
        self.runs: list[Run] = []
        self._stage = Stage()
        self._in_runs: dict[int, int] = {}
        """How many messages of each bucket are in runs and not filed."""
        self._filed: dict[int, int] = {}
        """Of a bucket that was filed: the first run that may have more of it."""
        self._next_run = 1
        self.over: list[str] = []
        """Names of files that are needed no more."""
        self.new: list[str] = []
        """Names of files that were written."""

    # --- which there are --------------------------------------------------------------------------

    def counts(self) -> dict[int, int]:
        """The messages that are not filed, by bucket."""
        found = dict(self._in_runs)
        for bucket, count in self._stage.counts().items():
            found[bucket] = found.get(bucket, 0) + count
        return found

    def count(self, bucket: int) -> int:
        """The bucket's messages that are not filed."""
        return self._in_runs.get(bucket, 0) + self._stage.count(bucket)

    def has(self, bucket: int) -> bool:
        """Whether messages of this bucket are not filed."""
        return bucket in self._in_runs or self._stage.has(bucket)

    @property
    def filed_bytes(self) -> int:
        """About the bytes that a message of a run takes when it is filed."""
        messages = sum([each.messages for each in self.runs])
        return sum([each.data_bytes for each in self.runs]) // messages + 176 if messages else 0

    @property
    def first(self) -> int | None:
        """The first bucket with messages that are not filed."""
        return min(self.counts(), default=None)

    def first_in_runs(self, last: int) -> int | None:
        """The first bucket up to `last` of which runs have messages."""
        found = min(self._in_runs, default=last + 1)
        return found if found <= last else None

    def first_staged(self, last: int) -> int | None:
        """The first bucket up to `last` of which messages are staged."""
        if not self._stage.rows or self._stage.first > last:
            return None
        found = min(self._stage.counts(), default=last + 1)
        return found if found <= last else None

    # --- staging ----------------------------------------------------------------------------------

    def stage(
        self,
        index: int,
        append_ms: int,
        region: bytes,
        due_times_ms: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int32],
        first: int,
        last: int,
        which: npt.NDArray[np.intp] | None,
    ) -> bool:
        """Stage a batch, or those of its messages (places, ascending); their buckets are `first`
        to `last`. False if they cannot be staged. Raises what reading the batch raises, and then
        nothing is staged.
        """
        header = parse_header(region)
        some = numbers if which is None else numbers[which]
        if last - first >= REACH:
            return False
        subject = region[REGION_BYTES : REGION_BYTES + header.subject_bytes]
        is_whole = first == last and which is None
        data = None if is_whole else plain_bodies(region, header)
        places: npt.NDArray[np.integer[Any]] = _PLACES[: header.count] if which is None else which
        batch = SpreadBatch(
            index,
            append_ms,
            header.producer_id,
            header.batch_sequence,
            header.create_time_ms,
            header.flags,
            header.columns,
            header.partition,
            subject,
            data is not None,
        )
        messages: npt.NDArray[np.int32] | int = 1
        dues = due_times_ms if which is None else due_times_ms[which]
        if is_whole:  # a batch of one bucket keeps its region
            data, messages = [region], header.count
            some, dues, places = some[:1], dues[:1], _PLACES[:1]
        elif data is None:
            found = cut_by_bucket(Pieces(region), numbers, places.tolist())
            data = [piece for _, _, piece in found]
            some = np.array([number for number, _, _ in found], np.int32)
            messages = np.array([len(each) for _, each, _ in found], np.int32)
            dues = due_times_ms[[each[0] for _, each, _ in found]]
            places = np.zeros(len(found), np.uint16)
        elif which is not None:
            data = (
                data[which] if isinstance(data, np.ndarray) else [data[at] for at in which.tolist()]
            )
        if not self._stage.fits(first, last):
            self.seal()
        self._stage.add(batch, data, some, dues, places, messages, first, last, len(region))
        if self._stage.bytes >= STAGED_BYTES_MAX:
            self.seal()
        return True

    def seal(self) -> None:
        """Write what is staged as a run."""
        stage = self._stage
        if not stage.rows:
            return
        for bucket, count in stage.counts().items():
            self._in_runs[bucket] = self._in_runs.get(bucket, 0) + count
        blocks, ends, counts = stage.sorted()
        if counts.any():
            self._write_run(blocks, ends, counts)
        stage.clear()

    def _write_run(
        self,
        blocks: Iterator[bytes | memoryview],
        ends: npt.NDArray[np.int64],
        counts: npt.NDArray[np.uint32],
    ) -> None:
        messages = int(counts.sum())
        stage, sums, rest = self._stage, list[int](), b""
        batches = _batch_table(stage.batches)
        first, last = stage.batches[0].log_index, stage.batches[-1].log_index
        file = AppendFile(_name_of(first, last))
        for block in blocks:
            whole = len(block) // BLOCK * BLOCK
            sums += [crc32c(bytes(block[at : at + BLOCK])) for at in range(0, whole, BLOCK)]
            self._files.append_all(file, [block[:whole]])
            rest = bytes(block[whole:])
        rest = b"".join(
            (rest, batches, ends.astype("<u8").tobytes(), counts.astype("<u4").tobytes())
        )
        sums += [crc32c(rest[at : at + BLOCK]) for at in range(0, len(rest), BLOCK)]
        self._files.append_all(file, [rest, np.array(sums, "<u4").tobytes()])
        run = Run(
            file,
            self._next_run,
            first,
            last,
            stage.first,
            len(ends) - 1,
            messages,
            messages,
            int(ends[-1]),
            len(batches),
        )
        self.runs.append(run)
        self.new.append(file.name)
        self._next_run += 1

    # --- filing -----------------------------------------------------------------------------------

    def file(self, bucket: int) -> Iterator[SpreadPiece]:
        """The bucket's messages that are not filed: the caller files all. Damaged ones are LOST."""
        if bucket in self._in_runs:
            yield from self._file_from_runs(bucket, self.runs)
        yield from self._stage.take(bucket)

    def file_oldest(self, bucket: int) -> Iterator[SpreadPiece]:
        """As `file`, but only of the first run that has some."""
        start = self._filed.get(bucket, 0)
        yield from self._file_from_runs(
            bucket, [next(each for each in self.runs if each.number >= start)]
        )

    def _file_from_runs(self, bucket: int, runs: Iterable[Run]) -> Iterator[SpreadPiece]:
        start, left = self._filed.get(bucket, 0), self._in_runs[bucket]
        for run in list(runs):
            if run.number < start:
                continue
            try:
                found = list(run.pieces(self._files, bucket))
            except LogDamaged as failure:
                log.error("%s", failure)
                found = [LOST] * run.count(self._files, bucket)
            count = sum([len(piece.due_times_ms) for piece in found])
            run.left -= count
            left -= count
            self._in_runs[bucket] = left
            self._filed[bucket] = run.number + 1
            if not run.left:
                self._drop(run)
            yield from found
        if not left:
            del self._in_runs[bucket]
            if not self._in_runs:
                self._filed.clear()

    def _drop(self, run: Run) -> None:
        self.runs.remove(run)
        self._files.forget(run.file.name)
        self.over.append(run.file.name)

    def surplus(self) -> int | None:
        """A bucket of the oldest run, if there are too many runs."""
        if len(self.runs) <= self._runs_max:
            return None
        run = self.runs[0]
        return next(
            bucket
            for bucket in range(run.first_bucket, run.first_bucket + run.buckets)
            if bucket in self._in_runs and self._filed.get(bucket, 0) <= run.number
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def few(self) -> list[int]:
        """The buckets of staged messages, if these are too few for a run."""
        found = self._stage.counts()
        return sorted(found) if sum(found.values()) < self._run_messages_min else []

    def state(self) -> tuple[bytes, bytes, bytes]:
        """The runs, how many messages of each bucket are in them, and what of it is filed. Nothing
        is staged.
        """
        runs = [
            _STATE.pack(
                each.number,
                each.first_index,
                each.last_index,
                each.first_bucket,
                each.buckets,
                each.messages,
                each.left,
                each.data_bytes,
                each.batch_bytes,
            )
            for each in self.runs
        ]
        return (
            b"".join(runs),
            b"".join([_FAR.pack(*each) for each in sorted(self._in_runs.items())]),
            b"".join([_FAR.pack(*each) for each in sorted(self._filed.items())]),
        )

    def restore(self, runs: bytes, in_runs: bytes, filed: bytes) -> None:
        """Load a state."""
        self.runs = runs_of(runs)
        for run in self.runs:
            run.file.written = run.size
        self._in_runs = dict(_FAR.iter_unpack(in_runs))
        self._filed = dict(_FAR.iter_unpack(filed))
        self._next_run = self.runs[-1].number + 1 if self.runs else 1


def runs_of(runs: bytes) -> list[Run]:
    """The runs of a state."""
    return [
        Run(AppendFile(_name_of(fields[1], fields[2])), *fields)
        for fields in _STATE.iter_unpack(runs)
    ]


def _name_of(first_index: int, last_index: int) -> str:
    return f"{first_index:016x}-{last_index:016x}{RUN}"


def _batch_table(batches: Sequence[SpreadBatch]) -> bytes:
    at, rows, subjects = _BATCH.size * len(batches), list[bytes](), dict[bytes, int]()
    for each in batches:
        if each.subject not in subjects:
            subjects[each.subject] = at
            at += len(each.subject)
        rows.append(
            _BATCH.pack(*each[:8], subjects[each.subject], len(each.subject), each.is_plain)
        )
    return b"".join((*rows, *subjects))


def plain_bodies(region: bytes, header: RegionHeader) -> npt.NDArray[np.uint8] | list[bytes] | None:
    """The bodies of a batch that has no other column than due times: as rows of a table if all have
    the same size. None for other batches, and for those whose columns do not fit.
    """
    count, total = header.count, header.body_bytes
    at = REGION_BYTES + pad(header.subject_bytes)
    if (
        header.columns != _DUE
        or header.compression
        or at != due_column(region, count, total)
        or not total
    ):
        return None
    ends_at = at + 8 * count
    data_at = ends_at + pad(4 * count + 4)
    size = total // count
    if size * count == total and region[ends_at:data_at] == _even_ends(count, size):
        return np.frombuffer(region, np.uint8, total, data_at).reshape(count, size)
    ends = np.frombuffer(region, "<i4", count + 1, ends_at)
    if ends[0] or ends[-1] != total or (np.diff(ends) < 0).any():
        return None
    marks = (ends + data_at).tolist()
    return [region[marks[each] : marks[each + 1]] for each in range(count)]


@lru_cache(maxsize=16)
def _even_ends(count: int, size: int) -> bytes:
    return padded(np.arange(0, (count + 1) * size, size, dtype="<i4").tobytes())
