"""Runs the tasks of a round, which read messages and write files: in this process, or in Spark's
executors (jobs/archive.py).

No snapshot names the files until the writer commits them, so a task may be repeated, and its
process may die.

For a typed table, a task splits each record batch of the log into rows with decoded bodies, and
rows whose bodies do not fit.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_qmq.lake.catalog import COLUMNS, REJECTED_SCHEMA, DataFolder, typed_schema
from pyspark_qmq.lake.day_files import DayFile, DayFiles
from pyspark_qmq.lake.typed_columns import column
from qmq.columns.model import ALL
from qmq.columns.planning import ReadTask
from qmq.columns.reading import LogAddress, read_task
from qmq.model import DeclaredSchema
from qmq.schemas.body_decoder import Decode, decoder_of, reason_of
from qmq.schemas.declared_schema import struct_of
from qmq.schemas.field_types import Struct

_REASON_CHARS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class BodyTypes:
    """How bodies are decoded: a value that can be pickled. `held`: the table's column."""

    versions: tuple[DeclaredSchema, ...]
    held: Struct


class TypedRows:
    def __init__(self, types: BodyTypes) -> None:
        self._types = types
        self._declared = struct_of(types.versions[-1])
        self._version = types.versions[-1].version
        self._decode = decoder_of(types.versions)
        self._schema = typed_schema(types.held)

    def split(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch | None, pa.RecordBatch | None]:
        """The rows with their values, and the rest with the reasons."""
        bodies = batch.column("body").to_pylist()
        values, reasons = decoded(self._decode, bodies)
        rejected = None
        if reasons:
            is_bad = pa.array([place in reasons for place in range(len(bodies))], pa.bool_())
            rejected = self._rejected(batch.filter(is_bad), reasons.values())
            batch = batch.filter(pc.invert(is_bad))
        if not values:
            return None, rejected
        return pa.RecordBatch.from_arrays(
            [*batch.columns, column(values, self._declared, self._types.held)], schema=self._schema
        ), rejected

    def _rejected(self, rows: pa.RecordBatch, reasons: Iterable[str]) -> pa.RecordBatch:
        told = pa.array(list(reasons), pa.string())
        versions = pa.array([self._version] * rows.num_rows, pa.int32())
        return pa.RecordBatch.from_arrays([*rows.columns, told, versions], schema=REJECTED_SCHEMA)


def decoded(decode: Decode, bodies: Sequence[bytes]) -> tuple[list[Any], dict[int, str]]:
    """The values of the bodies that fit, and the reasons by index for those that do not."""
    try:
        return list(map(decode, bodies)), {}
    except Exception:  # a body does not fit: decode one by one to find out which
        values: list[Any] = []
        reasons: dict[int, str] = {}
    for place, body in enumerate(bodies):
        try:
            values.append(decode(body))
        except Exception as failure:
            reasons[place] = reason_of(failure)[:_REASON_CHARS_MAX]
    return values, reasons


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The log that tasks read."""

    address: LogAddress
    skips_lost: bool


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """Where tasks write. With `types`, they write decoded bodies, and rows that do not fit go to
    files in `rejected`.
    """

    folder: DataFolder
    types: BodyTypes | None = None
    rejected: DataFolder | None = None


TaskRunner = Callable[[TaskSource, Sequence[ReadTask], TaskOutput], "list[DayFile]"]
"""Runs the tasks of a round: writes all their rows, flushed to disk, and returns the files. Raises
MessagesExpired, NotConnected, LogDamaged, OSError.
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


def _write_typed(
    source: TaskSource,
    work: Sequence[ReadTask],
    folder: DataFolder,
    rejected: DataFolder,
    types: BodyTypes,
) -> list[DayFile]:
    name, rows = uuid.uuid4().hex, TypedRows(types)
    files, others = (
        DayFiles(folder, name, typed_schema(types.held)),
        DayFiles(rejected, name, REJECTED_SCHEMA),
    )
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
