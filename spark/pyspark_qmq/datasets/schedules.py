"""Reads a delay group's folder in parts: delayed messages from a bucket's three files into columns,
without loops over messages.

    NAME.idx    16 bytes per message: due time, position of its batch, position in the batch, flags
    NAME.log    the batches, of which only envelope, region header, ids and create times are read
    NAME.done   the outcome of messages

Batches of a schedule may have one message each, so there is no loop over batches either, except for
their checksums: all envelopes are gathered into one table, then all headers. They determine the
positions of ids and create times (docs/FORMAT.md: the first two columns).

The group's newest checkpoint has the buckets, the lengths of their files, and the open plans. Files
only grow, and bytes after these lengths do not count (docs/FORMAT.md). So a folder can be read
while its server works, and two reads with one state give the same rows.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct, error
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google_crc32c import value as crc32c

from pyspark_qmq.datasets import tables
from qmq.errors import CorruptBatch, LogDamaged, MessagesExpired
from qmq.log import checkpoint
from qmq.log.actions import PlanAction, decode_actions
from qmq.log.segment_index import UNREADABLE
from qmq.wire.batch import ENVELOPE_BYTES, MAGIC, Kind
from qmq.wire.batch_columns import REGION_BYTES, BatchFlag, Column

ROWS_MAX: Final = 65_536
"""Messages per record batch."""
IDX_ROW: Final = np.dtype(
    [("due", "<i8"), ("position8", "<u4"), ("place", "<u2"), ("flags", "<u2")]
)
_ENVELOPE: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("kind", "<u2"),
        ("total", "<u4"),
        ("region_crc", "<u4"),
        ("base", "<i8"),
        ("epoch", "<i8"),
        ("index", "<i8"),
        ("append", "<i8"),
        ("flushed", "<i8"),
        ("reserved", "<u4"),
        ("crc", "<u4"),
    ]
)
_REGION: Final = np.dtype(
    [
        ("producer", "<u8"),
        ("number", "<u8"),
        ("flags", "<u4"),
        ("count", "<u4"),
        ("create", "<i8"),
        ("columns", "<u4"),
        ("partition", "<u4"),
        ("body_bytes", "<u4"),
        ("subject_bytes", "<u2"),
        ("compression", "u1"),
        ("reserved", "u1"),
    ]
)
_RECORD: Final = Struct("<IHHII")
_TARGET_BYTES: Final = 8
_HEX: Final = np.array([list(b"%02x" % each) for each in range(256)], np.uint8)
_Bytes = npt.NDArray[np.uint8]


class ScheduledState(IntEnum):
    """The state of a message; the numbers are the kinds of the dispatch log."""

    PENDING = 0
    DELIVERED = 1
    CANCELLED = 2
    MOVED = 3
    """Moved to another due time, where the message has another row."""
    PLANNED = 4
    """Its delivery has begun."""


STATES: Final = tuple(each.name.lower() for each in ScheduledState)


def states(messages: int, done: bytes, planned: tuple[bytes, ...]) -> npt.NDArray[np.uint8]:
    """The states by ordinal. `done`: the dispatch log; `planned`: the ordinals in open plans.
    Raises CorruptBatch.
    """
    found = np.zeros(messages, np.uint8)
    at = 0
    while at < len(done):
        if at + _RECORD.size > len(done):
            raise CorruptBatch(f"the record at byte {at} is cut short")
        crc, kind, _, count, _ = _RECORD.unpack_from(done, at)
        size = 4 * count + (_TARGET_BYTES * count if kind == ScheduledState.MOVED else 0)
        end = at + _RECORD.size + size + (-size & 7)
        if end > len(done) or crc32c(done[at + 4 : end]) != crc:
            raise CorruptBatch(f"the checksum of the record at byte {at} is wrong")
        _mark(found, np.frombuffer(done, "<u4", count, at + _RECORD.size), kind)
        at = end
    for ordinals in planned:
        _mark(found, np.frombuffer(ordinals, "<u4"), ScheduledState.PLANNED)
    return found


def _mark(found: npt.NDArray[np.uint8], ordinals: npt.NDArray[np.uint32], kind: int) -> None:
    if len(ordinals) and int(ordinals.max()) >= len(found):
        raise CorruptBatch(f"a record names message {int(ordinals.max())} of {len(found)}")
    if kind not in ScheduledState.__members__.values():
        raise CorruptBatch(f"the record has an unknown kind {kind}")
    found[ordinals] = kind


@dataclass(frozen=True, slots=True)
class ScheduleRows:
    """Messages of a bucket as columns. Times are milliseconds since 1970."""

    due_ms: npt.NDArray[np.int64]
    flags: npt.NDArray[np.uint16]
    ids: _Bytes
    """The ids, 16 bytes each."""
    create_ms: npt.NDArray[np.int64]
    append_ms: npt.NDArray[np.int64]
    subjects: pa.DictionaryArray

    def message_ids(self) -> pa.Array:
        """The ids as 32 hexadecimal digits."""
        count = len(self.ids)
        ends = np.arange(0, 32 * (count + 1), 32, dtype=np.int32)
        return pa.StringArray.from_buffers(
            count, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(_HEX[self.ids]))
        )

    def has_flag(self, flag: BatchFlag) -> npt.NDArray[np.bool_]:
        """For each message, whether its batch has this flag."""
        return (self.flags & int(flag)).astype(np.bool_)


def rows(log: _Bytes, idx: npt.NDArray[Any], first: int) -> ScheduleRows:
    """The messages of these index entries, the first of which has the ordinal `first`. `log`: the
    valid part of the schedule log.

    Raises CorruptBatch if a checksum is wrong, or if index and log disagree.
    """
    positions, which = np.unique(idx["position8"], return_inverse=True)
    at = positions.astype(np.int64) << 3
    envelopes = _gathered(log, at, _ENVELOPE)
    _check(log, at, envelopes)
    headers = _gathered(log, at + ENVELOPE_BYTES, _REGION)
    places = idx["place"].astype(np.int64)
    if (envelopes["base"][which] + places != np.arange(first, first + len(idx))).any() or (
        places >= headers["count"][which]
    ).any():
        raise CorruptBatch("the index does not agree with its batch")
    columns_at = (
        at + ENVELOPE_BYTES + REGION_BYTES + _padded(headers["subject_bytes"].astype(np.int64))
    )
    deltas = (headers["columns"] & Column.CREATE_DELTA) != 0
    ids_at = columns_at + np.where(deltas, _padded(4 * headers["count"].astype(np.int64)), 0)
    return ScheduleRows(
        idx["due"].astype(np.int64),
        idx["flags"].astype(np.uint16),
        _ids(log, ids_at, headers, which, places),
        _create_times(log, columns_at, deltas, headers, which, places),
        envelopes["append"][which],
        _subjects(log, at, headers, which),
    )


def _padded(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return sizes + 7 & ~7


def _gathered(log: _Bytes, at: npt.NDArray[np.int64], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """A table of the bytes at these positions.
    Raises CorruptBatch if a position is outside the log.
    """
    if len(at) and (int(at.max()) + kind.itemsize > len(log) or int(at.min()) < 0):
        raise CorruptBatch(f"the index points to byte {int(at.max())} of a log of {len(log)} bytes")
    found: npt.NDArray[Any] = log[at[:, None] + np.arange(kind.itemsize)].reshape(-1).view(kind)
    return found


def _check(log: _Bytes, at: npt.NDArray[np.int64], envelopes: npt.NDArray[Any]) -> None:
    is_odd = (
        (envelopes["magic"] != MAGIC)
        | (envelopes["kind"] != Kind.DATA)
        | (at + envelopes["total"] > len(log))
    )
    is_odd |= envelopes["total"] < ENVELOPE_BYTES + REGION_BYTES
    if is_odd.any():
        raise CorruptBatch(f"there is no whole batch at byte {int(at[is_odd][0])}")
    crcs = zip(
        at.tolist(),
        envelopes["total"].tolist(),
        envelopes["crc"].tolist(),
        envelopes["region_crc"].tolist(),
        strict=True,
    )
    for (
        begin,
        total,
        crc,
        region_crc,
    ) in crcs:  # A loop over batches, because checksums are computed one by one.
        if crc32c(log[begin : begin + ENVELOPE_BYTES - 4].tobytes()) != crc:
            raise CorruptBatch(f"the checksum of the envelope at byte {begin} is wrong")
        if crc32c(log[begin + ENVELOPE_BYTES : begin + total].tobytes()) != region_crc:
            raise CorruptBatch(f"the checksum of the batch at byte {begin} is wrong")


def _ids(
    log: _Bytes,
    ids_at: npt.NDArray[np.int64],
    headers: npt.NDArray[Any],
    which: npt.NDArray[np.intp],
    places: npt.NDArray[np.int64],
) -> _Bytes:
    """The stored ids; for a batch without ids, made of producer id, batch sequence and position."""
    is_stored = ((headers["columns"] & Column.MESSAGE_ID) != 0)[which]
    found = np.zeros((len(which), 16), np.uint8)
    at = ids_at[which][is_stored] + 16 * places[is_stored]
    found[is_stored] = log[at[:, None] + np.arange(16)]
    made, of = ~is_stored, which[~is_stored]
    found[made, 0:8] = headers["producer"][of].astype(">u8").view(np.uint8).reshape(-1, 8)
    found[made, 8:14] = headers["number"][of].astype(">u8").view(np.uint8).reshape(-1, 8)[:, 2:]
    found[made, 14:16] = places[made].astype(">u2").view(np.uint8).reshape(-1, 2)
    return found


def _create_times(
    log: _Bytes,
    columns_at: npt.NDArray[np.int64],
    deltas: npt.NDArray[np.bool_],
    headers: npt.NDArray[Any],
    which: npt.NDArray[np.intp],
    places: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = headers["create"][which]
    has = deltas[which]
    at = columns_at[which][has] + 4 * places[has]
    found[has] += log[at[:, None] + np.arange(4)].reshape(-1).view("<u4").astype(np.int64)
    return found


def _subjects(
    log: _Bytes, at: npt.NDArray[np.int64], headers: npt.NDArray[Any], which: npt.NDArray[np.intp]
) -> pa.DictionaryArray:
    """The subjects of the batches, and for each message the index of its subject."""
    sizes = headers["subject_bytes"].astype(np.int64)
    ends = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=ends[1:])
    begins = at + ENVELOPE_BYTES + REGION_BYTES
    data = log[np.repeat(begins - ends[:-1], sizes) + np.arange(ends[-1])]
    texts = pa.StringArray.from_buffers(
        len(sizes), pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(data))
    )
    return pa.DictionaryArray.from_arrays(pa.array(which.astype(np.int32)), texts)


VERSION: Final = 1
ROW_BYTES: Final = 16
"""Of a line of `.idx`."""
_BUCKET: Final = Struct("<iQIQI")
_MARK_MAGIC: Final = b"QMS1"


class BucketFiles(NamedTuple):
    """One bucket: `name` is that of its files, without suffix."""

    name: str
    number: int
    begin_ms: int
    log_bytes: int
    messages: int
    done_bytes: int
    planned: tuple[bytes, ...] = ()
    """Ordinals in open plans, u32 each."""


@dataclass(frozen=True, slots=True)
class ScheduleContents:
    """The files and open plans of one delay group."""

    index: int
    """Of the newest entry that it knows."""
    buckets: tuple[BucketFiles, ...]
    """Ascending."""


def of_checkpoint(projection: Any) -> ScheduleContents:
    """A checkpoint's projection, as MessagePack decodes it. Raises LogDamaged if this program does
    not know its version.
    """
    try:
        version, bucket_ms, index, _, _, plans, _, buckets, *_ = projection
        if version != VERSION:
            raise LogDamaged(
                f"the schedule has version {version}, this program supports {VERSION}: use a "
                "release as new as the delay group's"
            )
        planned: dict[int, list[bytes]] = {}
        for plan in decode_actions(plans):
            for number, ordinals in plan.items if isinstance(plan, PlanAction) else ():
                planned.setdefault(number, []).append(ordinals)
        rows = [
            BucketFiles(
                name_of(number, bucket_ms),
                number,
                number * bucket_ms,
                log,
                messages,
                done,
                tuple(planned.get(number, ())),
            )
            for number, log, messages, done, _ in _BUCKET.iter_unpack(buckets)
        ]
    except (TypeError, ValueError, OverflowError, OSError, error, CorruptBatch) as cause:
        raise LogDamaged(f"the checkpoint's schedule cannot be read ({cause})") from cause
    return ScheduleContents(index, tuple(rows))


def of_mark(data: bytes) -> ScheduleContents | None:
    """Parse the file `adopted.qms`, which describes schedule files that came from another replica.
    None if it is incomplete.
    """
    if data[:4] != _MARK_MAGIC or int(crc32c(data[8:])).to_bytes(4, "little") != data[4:8]:
        return None
    try:
        projection = msgspec.msgpack.decode(data[8:])
    except UNREADABLE as cause:
        raise LogDamaged(f"the mark of the schedule's files cannot be read ({cause})") from cause
    return of_checkpoint(projection)


def name_of(bucket: int, bucket_ms: int) -> str:
    """The name of a bucket's files: the bucket's beginning in UTC."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(bucket * bucket_ms // 1000))


SCHEDULE: Final = "schedule"
TASK_MESSAGES_MAX: Final = 1 << 20
"""Messages per task."""


class FolderStretch(NamedTuple):
    """Ordinals `first` to `end` - 1 of one bucket, for one task."""

    folder: str
    """The folder of the store."""
    group: str
    bucket: BucketFiles
    first: int
    end: int


def read_state(store: Path) -> ScheduleContents:
    """The state at the newest checkpoint, or at the copy from another replica; empty if there is
    neither. Raises LogDamaged.
    """
    found = checkpoint.load(store / "checkpoint")
    if found is not None and found.projection is not None:
        return of_checkpoint(found.projection)
    try:
        adopted = of_mark((store / SCHEDULE / "adopted.qms").read_bytes())
    except FileNotFoundError:
        adopted = None
    return adopted or ScheduleContents(0, ())


def furthest(stores: Iterable[tuple[str, Path]]) -> dict[str, tuple[Path, ScheduleContents]]:
    """For each delay group, the store with the newest checkpoint. Raises LogDamaged."""
    found: dict[str, tuple[Path, ScheduleContents]] = {}
    for group, store in stores:
        state = read_state(store)
        if group not in found or state.index > found[group][1].index:
            found[group] = store, state
    return found


def stretches(store: Path, group: str, state: ScheduleContents) -> list[FolderStretch]:
    """The tasks for one delay group."""
    return [
        FolderStretch(
            str(store), group, bucket, first, min(first + TASK_MESSAGES_MAX, bucket.messages)
        )
        for bucket in state.buckets
        for first in range(0, bucket.messages, TASK_MESSAGES_MAX)
    ]


def read(stretch: FolderStretch, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields a task's rows. Raises LogDamaged, and MessagesExpired if the bucket has been closed
    and deleted since.
    """
    name = Path(stretch.folder, SCHEDULE, stretch.bucket.name)
    try:
        yield from _read(stretch, name, columns)
    except FileNotFoundError as cause:
        raise MessagesExpired(
            f"{cause.filename} was delivered completely and deleted after the read began: "
            "read again"
        ) from None
    except CorruptBatch as cause:
        raise LogDamaged(
            f"{name}.*: {cause.message}: restore the files from a copy, or move the "
            "replica's data folder away and start it again"
        ) from cause


def _read(stretch: FolderStretch, name: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    bucket = stretch.bucket
    done = _part(name.with_suffix(".done"), 0, bucket.done_bytes) if bucket.done_bytes else b""
    marks = states(bucket.messages, done, bucket.planned)
    log = _mapped(name.with_suffix(".log"), bucket.log_bytes)
    for first in range(stretch.first, stretch.end, ROWS_MAX):
        end = min(first + ROWS_MAX, stretch.end)
        lines = np.frombuffer(
            _part(name.with_suffix(".idx"), first * ROW_BYTES, (end - first) * ROW_BYTES), IDX_ROW
        )
        yield _batch(stretch, rows(log, lines, first), marks[first:end], first, columns)


def _batch(
    stretch: FolderStretch,
    found: ScheduleRows,
    marks: npt.NDArray[np.uint8],
    first: int,
    columns: Sequence[str],
) -> pa.RecordBatch:
    count = len(marks)
    return tables.record_batch(
        "schedules",
        columns,
        {
            "subject": found.subjects,
            "message_id": found.message_ids(),
            "delay_group": pa.repeat(stretch.group, count),
            "due_time": found.due_ms,
            "append_time": found.append_ms,
            "create_time": found.create_ms,
            "state": pa.array(STATES).take(pa.array(marks)),
            "bucket": np.full(count, stretch.bucket.begin_ms, np.int64),
            "ordinal": np.arange(first, first + count),
            "is_recurring": found.has_flag(BatchFlag.RECURRING),
            "is_directed": found.has_flag(BatchFlag.DIRECTED),
        },
    )


def _part(path: Path, at: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        data = file.read(size)
    if len(data) < size:
        raise CorruptBatch(
            f"{path.name} ends at byte {at + len(data)}, and had more when the checkpoint "
            "was written"
        )
    return data


def _mapped(path: Path, size: int) -> npt.NDArray[np.uint8]:
    """A memory map of a file's first bytes."""
    with path.open("rb") as file:
        if path.stat().st_size < size:
            raise CorruptBatch(
                f"{path.name} ends at byte {path.stat().st_size}, and had {size} when the "
                "checkpoint was written"
            )
        return (
            np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
            if size
            else np.zeros(0, np.uint8)
        )
