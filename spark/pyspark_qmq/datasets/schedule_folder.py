"""Reads a delay group's folder in parts. Its newest checkpoint determines which files are valid, and up to which length."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pyspark_qmq.datasets import delay_schedule, tables
from pyspark_qmq.datasets.delay_schedule import ROW_BYTES, BucketFiles, ScheduleContents
from pyspark_qmq.datasets.schedules import IDX_ROW, ROWS_MAX, STATES, ScheduleRows, rows, states
from qmq.batch_columns import BatchFlag
from qmq.errors import CorruptBatch, LogDamaged, MessagesExpired
from qmq.log import checkpoint

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
    """The state at the newest checkpoint, or at the copy from another replica; empty if there is neither. Raises LogDamaged."""
    found = checkpoint.load(store / "checkpoint")
    if found is not None and found.projection is not None:
        return delay_schedule.of_checkpoint(found.projection)
    try:
        adopted = delay_schedule.of_mark((store / SCHEDULE / "adopted.qms").read_bytes())
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
        FolderStretch(str(store), group, bucket, first, min(first + TASK_MESSAGES_MAX, bucket.messages))
        for bucket in state.buckets
        for first in range(0, bucket.messages, TASK_MESSAGES_MAX)
    ]


def read(stretch: FolderStretch, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields a task's rows. Raises LogDamaged, and MessagesExpired if the bucket has been closed and deleted since."""
    name = Path(stretch.folder, SCHEDULE, stretch.bucket.name)
    try:
        yield from _read(stretch, name, columns)
    except FileNotFoundError as cause:
        raise MessagesExpired(f"{cause.filename} was delivered completely and deleted after the read began: read again") from None
    except CorruptBatch as cause:
        raise LogDamaged(
            f"{name}.*: {cause.message}: restore the files from a copy, or move the replica's data folder away and start it again"
        ) from cause


def _read(stretch: FolderStretch, name: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    bucket = stretch.bucket
    done = _part(name.with_suffix(".done"), 0, bucket.done_bytes) if bucket.done_bytes else b""
    marks = states(bucket.messages, done, bucket.planned)
    log = _mapped(name.with_suffix(".log"), bucket.log_bytes)
    for first in range(stretch.first, stretch.end, ROWS_MAX):
        end = min(first + ROWS_MAX, stretch.end)
        lines = np.frombuffer(_part(name.with_suffix(".idx"), first * ROW_BYTES, (end - first) * ROW_BYTES), IDX_ROW)
        yield _batch(stretch, rows(log, lines, first), marks[first:end], first, columns)


def _batch(stretch: FolderStretch, found: ScheduleRows, marks: npt.NDArray[np.uint8], first: int, columns: Sequence[str]) -> pa.RecordBatch:
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
        raise CorruptBatch(f"{path.name} ends at byte {at + len(data)}, and had more when the checkpoint was written")
    return data


def _mapped(path: Path, size: int) -> npt.NDArray[np.uint8]:
    """A memory map of a file's first bytes."""
    with path.open("rb") as file:
        if path.stat().st_size < size:
            raise CorruptBatch(f"{path.name} ends at byte {path.stat().st_size}, and had {size} when the checkpoint was written")
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8) if size else np.zeros(0, np.uint8)
