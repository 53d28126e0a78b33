"""Compacts days, expires snapshots, and deletes leftovers of crashes. None of these changes a row.

Compaction replaces the small files of a past day with sorted ones, in one snapshot that requires
that the table still has the small files. Expiry removes old snapshots, and then deletes files that
no snapshot names. A file that a writer has not committed yet is not named either, so only files
older than `grace` are deleted.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final, NamedTuple
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import PyArrowFileIO, parquet_files_to_data_files
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from pyspark_qmq.lake.catalog import ORDER, REJECTED_SCHEMA, typed_schema
from pyspark_qmq.lake.day_files import DayFiles
from pyspark_qmq.lake.lake_damage import reading_file, reading_table, require_size
from pyspark_qmq.lake.rows import conformed
from pyspark_qmq.lake.table import CONTENT, PROPERTY, REJECTED, LakeTable, encode_positions
from pyspark_qmq.lake.typed import held_struct
from qmq.errors import InvalidArgument, LogDamaged, Overloaded
from qmq.process.event_loop import time_of

SMALL_BYTES: Final = 128 << 20
STEP_BYTES: Final = 256 << 20
"""The most compressed bytes of a day that one step sorts in memory."""
GRACE: Final = timedelta(days=1)
_TRIES: Final = 20


class FileGroup(NamedTuple):
    """Files of one day that become one file."""

    day: date
    files: list[DataFile]


class CompactedDay(NamedTuple):
    day: date
    files_before: int
    rows: int


def compact(table: LakeTable, today: date) -> Iterator[CompactedDay]:
    """Compact days before `today` (UTC); each step is a separate commit.

    Raises:
        LogDamaged: a file does not hold what its table says.
        Overloaded: other writers committed first, many times in a row.
    """
    for step in _groups(_files_of_days(table), today):
        yield CompactedDay(step.day, len(step.files), _rewrite(table, step))


def _files_of_days(table: LakeTable) -> dict[date, list[DataFile]]:
    found: dict[date, list[DataFile]] = {}
    files = table.files()
    with reading_table(table.iceberg):
        for task in files:
            day = date(1970, 1, 1) + timedelta(days=int(task.file.partition[0]))
            found.setdefault(day, []).append(task.file)
    return found


def _groups(days: dict[date, list[DataFile]], today: date) -> list[FileGroup]:
    """Small files of a day, together up to `STEP_BYTES`; a single small file is not rewritten."""
    found: list[FileGroup] = []
    for day in sorted(days):
        if day >= today:
            continue
        group: list[DataFile] = []
        small = sorted(
            (each for each in days[day] if each.file_size_in_bytes < SMALL_BYTES),
            key=lambda each: each.file_path,
        )
        for file in small:
            if (
                group
                and sum(each.file_size_in_bytes for each in group) + file.file_size_in_bytes
                > STEP_BYTES
            ):
                found.append(FileGroup(day, group))
                group = []
            group.append(file)
        found.append(FileGroup(day, group))
    return [each for each in found if len(each.files) > 1]


def _rewrite(table: LakeTable, step: FileGroup) -> int:
    schema = file_schema(table)
    rows = _read(table.iceberg, step.files, schema)
    if rows.num_rows != sum(each.record_count for each in step.files):
        raise LogDamaged(
            f"files of {step.day} hold {rows.num_rows} rows, and the table says "
            f"{sum(f.record_count for f in step.files)}"
        )
    files = DayFiles(table.folder, f"compacted-{uuid.uuid4().hex}", schema)
    for batch in rows.sort_by([(name, "ascending") for name in ORDER]).to_batches():
        files.write(batch)
    made = files.close()
    if sum(each.rows for each in made) != rows.num_rows or len(made) != 1:
        raise LogDamaged(
            f"{step.day}: {rows.num_rows} rows became {made}: the files hold another day's rows"
        )
    for _ in range(_TRIES):
        if _replace(table, step.files, [each.location for each in made]):
            return sum(each.rows for each in made)
        table.iceberg.refresh()
        held = {each.file.file_path for each in table.files()}
        if not held.issuperset(each.file_path for each in step.files):
            break
    table.delete(each.location for each in made)
    raise Overloaded(
        f"files of {step.day} were replaced by another process, or concurrent writers "
        "blocked the compaction: start it again"
    )


def file_schema(table: LakeTable) -> pa.Schema:
    """The schema of new files of the table."""
    if table.iceberg.properties.get(CONTENT) == REJECTED:
        return REJECTED_SCHEMA
    return typed_schema(held_struct(table))


def _read(table: Table, files: Sequence[DataFile], schema: pa.Schema) -> pa.Table:
    """The rows of the files, with the current columns even if a file was written before columns
    were added or widened.
    """
    found = []
    for each in files:
        with (
            reading_file(table.io, each.file_path),
            table.io.new_input(each.file_path).open() as stream,
        ):
            require_size(stream, each.file_path, each.file_size_in_bytes)
            found.append(conformed(pq.read_table(stream), schema))
    return pa.concat_tables(found)


def _replace(table: LakeTable, old: Iterable[DataFile], new: list[str]) -> bool:
    """Replace the files in one commit. Returns False if another writer committed first."""
    told = {PROPERTY: encode_positions(table.subject, table.positions())}
    try:
        with (
            reading_table(table.iceberg),
            table.iceberg.transaction() as change,
            change.update_snapshot(told).overwrite() as files,
        ):
            for each in old:
                files.delete_data_file(each)
            for made in parquet_files_to_data_files(
                table.iceberg.io, table.iceberg.metadata, iter(new)
            ):
                files.append_data_file(made)
    except CommitFailedException:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Expired:
    snapshots: int
    files: int


def expire(table: LakeTable, now: datetime, keep: timedelta, grace: timedelta = GRACE) -> Expired:
    """Remove snapshots older than `keep`, except the current one. Delete files older than `grace`
    that no snapshot names.

    Ages count up to the newest snapshot and the newest file, and up to `now` if that is earlier: a
    clock that is ahead would delete files that a writer is about to commit.
    """
    before, current = len(table.iceberg.metadata.snapshots), table.iceberg.current_snapshot()
    newest = now if current is None else time_of(current.timestamp_ms)
    table.files()  # no snapshot is removed of a table that cannot be read
    table.iceberg.maintenance.expire_snapshots().older_than(min(now, newest) - keep).commit()
    table.iceberg.refresh()
    with reading_table(table.iceberg):
        left = list(_leftovers(table.iceberg, now, grace))
    table.delete(left)
    return Expired(before - len(table.iceberg.metadata.snapshots), len(left))


def _leftovers(table: Table, now: datetime, grace: timedelta) -> Iterator[str]:
    """Data files and manifests of the table's folder that no snapshot names."""
    listed = [each for folder in ("data", "metadata") for each in _listed(table, folder)]
    until = min([now, max([changed for _, changed in listed], default=now)]) - grace
    named = set(_named(table))
    for location, changed in listed:
        is_metadata = location.endswith(".metadata.json")  # PyIceberg deletes old ones itself
        if not is_metadata and _path(location) not in named and changed < until:
            yield location


def _named(table: Table) -> Iterator[str]:
    for snapshot in table.metadata.snapshots:
        yield _path(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            yield _path(manifest.manifest_path)
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                yield _path(entry.data_file.file_path)


def _listed(table: Table, folder: str) -> Iterator[tuple[str, datetime]]:
    root = f"{table.location().rstrip('/')}/{folder}"
    scheme, netloc, path = PyArrowFileIO.parse_location(root)
    if not isinstance(table.io, PyArrowFileIO):
        raise InvalidArgument(
            f"expiry lists files by pyarrow, not by {type(table.io).__name__}: leave out the "
            "property py-io-impl"
        )

    selector = pafs.FileSelector(path, recursive=True, allow_not_found=True)
    for info in table.io.fs_by_scheme(scheme, netloc).get_file_info(selector):
        if info.is_file:
            yield root + info.path[len(path) :], info.mtime.astimezone(UTC)


def _path(location: str) -> str:
    parsed = urlparse(location)
    return f"{parsed.netloc}{parsed.path}"


def totals(table: LakeTable) -> list[tuple[str, int, int, int]]:
    """Day, files, rows and bytes of the current snapshot."""
    found = _files_of_days(table)
    return [
        (
            day.isoformat(),
            len(files),
            sum(each.record_count for each in files),
            sum(each.file_size_in_bytes for each in files),
        )
        for day, files in sorted(found.items())
    ]
