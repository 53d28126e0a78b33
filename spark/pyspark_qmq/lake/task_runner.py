"""Runs the tasks of a round, which read messages and write files: in this process, or in Spark's executors (jobs/archive.py).

No snapshot names the files until the writer commits them, so a task may be repeated, and its process may die.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark_qmq.lake.catalog import COLUMNS, REJECTED_SCHEMA, DataFolder, typed_schema
from pyspark_qmq.lake.day_files import DayFile, DayFiles
from pyspark_qmq.lake.typed_rows import BodyTypes, TypedRows
from qmq.columns.model import ALL, LogAddress
from qmq.columns.planning import ReadTask
from qmq.columns.reading import read_task

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The log that tasks read."""

    address: LogAddress
    skips_lost: bool


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """Where tasks write. With `types`, they write decoded bodies, and rows that do not fit go to files in `rejected`."""

    folder: DataFolder
    types: BodyTypes | None = None
    rejected: DataFolder | None = None


TaskRunner = Callable[[TaskSource, Sequence[ReadTask], TaskOutput], "list[DayFile]"]
"""Runs the tasks of a round: writes all their rows, flushed to disk, and returns the files. Raises MessagesExpired, NotConnected,
LogDamaged, OSError.
"""


def write_tasks(source: TaskSource, work: Sequence[ReadTask], output: TaskOutput) -> list[DayFile]:
    """A `TaskRunner` that writes the rows in this process, one file for each day."""
    if output.types is not None and output.rejected is not None:
        return _write_typed(source, work, output.folder, output.rejected, output.types)
    files = DayFiles(output.folder, uuid.uuid4().hex)
    try:
        for batch in _rows(source, work):
            files.write(batch)
        return files.close()
    finally:
        files.abandon()


def _write_typed(source: TaskSource, work: Sequence[ReadTask], folder: DataFolder, rejected: DataFolder, types: BodyTypes) -> list[DayFile]:
    name, rows = uuid.uuid4().hex, TypedRows(types)
    files, others = DayFiles(folder, name, typed_schema(types.held)), DayFiles(rejected, name, REJECTED_SCHEMA)
    try:
        for batch in _rows(source, work):
            for target, part in zip((files, others), rows.split(batch), strict=True):
                if part is not None:
                    target.write(part)
        return [*files.close(), *(each._replace(is_rejected=True) for each in others.close())]
    finally:
        files.abandon()
        others.abandon()


def _rows(source: TaskSource, work: Sequence[ReadTask]) -> Iterator[pa.RecordBatch]:
    for task in work:
        yield from read_task(source.address, task, COLUMNS, ALL, skips_lost=source.skips_lost)
