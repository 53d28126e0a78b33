"""Writes record batches into Parquet files, one for each day of `append_time` (UTC).

`close` flushes the files to disk, because a commit must not name a file that a power failure can
lose. An object store has a file once it is closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlparse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import OutputStream

from pyspark_qmq.lake.catalog import SCHEMA, WITHOUT_BOUNDS, DataFolder

ROW_GROUP_BYTES: Final = 32 << 20
_DAY_US: Final = 86_400_000_000
_DICTIONARY: Final = [
    "partition",
    "broker_group",
    "route_version",
    "logical_partition",
    "key",
    "tags.list.element",
    "epoch",
]
_WITHOUT_STATISTICS: Final = frozenset(name.split(".")[0] for name in WITHOUT_BOUNDS)


class DayFile(NamedTuple):
    location: str
    rows: int
    is_rejected: bool = False
    """Whether the file belongs to the table of rejected messages."""


@dataclass(slots=True)
class _OpenFile:
    location: str
    stream: OutputStream
    writer: pq.ParquetWriter
    schema: pa.Schema
    rows: int = 0
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_bytes: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.waiting.append(batch)
        self.waiting_bytes += batch.nbytes
        if self.waiting_bytes >= ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the waiting batches as one row group."""
        if self.waiting:
            table = pa.Table.from_batches(self.waiting, self.schema)
            self.rows += table.num_rows
            self.writer.write_table(table, row_group_size=table.num_rows)
            self.waiting, self.waiting_bytes = [], 0


class DayFiles:
    """Files of one commit.

    `name`: unique; files of different days lie in different folders.
    """

    def __init__(self, folder: DataFolder, name: str, schema: pa.Schema = SCHEMA) -> None:
        self._folder = folder
        self._name = name
        self._schema = schema
        self._statistics = [
            path
            for each in schema
            if each.name not in _WITHOUT_STATISTICS
            for path in _leaves(each)
        ]
        self._open: dict[int, _OpenFile] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows with the columns of the schema. Raises OSError."""
        batch = pa.RecordBatch.from_arrays(
            batch.columns, schema=self._schema
        )  # readers of the log declare every column nullable
        days = np.asarray(batch.column("append_time").cast(pa.int64())) // _DAY_US
        first, last = int(days.min()), int(days.max())
        if first == last:
            self._of(first).add(batch)
            return
        for day in np.unique(days):
            self._of(int(day)).add(batch.filter(pa.array(days == day)))

    def _of(self, day: int) -> _OpenFile:
        found = self._open.get(day)
        if found is None:
            date = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).date()
            location = self._folder.location(f"day={date.isoformat()}/{self._name}.parquet")
            stream = self._folder.create(location)
            writer = pq.ParquetWriter(
                stream,
                self._schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=_DICTIONARY,
                write_statistics=self._statistics,
            )
            found = self._open[day] = _OpenFile(location, stream, writer, self._schema)
        return found

    def close(self, sync: Callable[[str], None] | None = None) -> list[DayFile]:
        """Finish all files, and flush them to disk. Raises OSError."""
        made = []
        for _, each in sorted(self._open.items()):
            each.flush()
            each.writer.close()
            each.stream.close()
            (sync or sync_local)(each.location)
            made.append(DayFile(each.location, each.rows))
        self._open = {}
        return made

    def abandon(self) -> None:
        """Close the files without finishing them: no commit will name them."""
        for each in self._open.values():
            with suppress(OSError, pa.ArrowException):
                each.writer.close()  # otherwise its destructor writes to the closed stream
            with suppress(OSError):
                each.stream.close()
        self._open = {}


def _leaves(field: pa.Field) -> Iterator[str]:
    """The paths of a column's values in a Parquet file, except those in lists and maps."""
    if pa.types.is_struct(field.type):
        for each in field.type:
            yield from (f"{field.name}.{path}" for path in _leaves(each))
    elif not pa.types.is_list(field.type) and not pa.types.is_map(field.type):
        yield field.name


def local_path(location: str) -> Path | None:
    """The path of a location on this machine's disk; None for an object store."""
    parsed = urlparse(location)
    if parsed.scheme not in ("", "file"):
        return None
    return Path(unquote(parsed.path) if parsed.scheme else location)


def sync_local(location: str) -> None:
    """Flush a local file and its folder to disk. Raises OSError."""
    path = local_path(location)
    if path is None:
        return
    for each in (path, path.parent):
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
