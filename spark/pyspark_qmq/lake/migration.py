"""Copies archives of older versions into tables, once: `qmq lake migrate`.

Such a folder has `_qmq/archive.json` (what was selected), `_qmq/manifests/0000000001.json` and so
on (each one change: added files, removed files, and how far the queues were archived with them),
and Parquet files below `_qmq/files`. A subject's positions are committed with its files, so an
interrupted migration can be started again, and `qmq lake follow` continues where the archive ended.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog

from pyspark_qmq.lake.catalog import SCHEMA
from pyspark_qmq.lake.day_files import DayFile, DayFiles
from pyspark_qmq.lake.table import LakeTable, open_table
from qmq.columns import offsets
from qmq.columns.model import QueueKey
from qmq.errors import InvalidArgument, LogDamaged, Overloaded
from qmq.text import parse_json, whole_number

MIGRATED: Final = "qmq.migrated-from"
"""Property of a table: the folder whose content it has."""


class OldFile(NamedTuple):
    path: str
    """`attempt=A/subject=S/day=YYYY-MM-DD/NAME`, below `_qmq/files`."""
    rows: int

    @property
    def subject(self) -> str:
        return self.path.split("/")[1].removeprefix("subject=")

    @property
    def day(self) -> str:
        return self.path.split("/")[2].removeprefix("day=")


@dataclass(slots=True)
class OldArchive:
    """The content of an archive: the result of all its manifests."""

    files: dict[str, OldFile] = field(default_factory=dict)
    reached: dict[QueueKey, int] = field(default_factory=dict)


class MigratedSubject(NamedTuple):
    subject: str
    files: int
    rows: int


def read_manifests(folder: Path) -> OldArchive:
    """Raises InvalidArgument if there is no archive, or one of selected messages; LogDamaged."""
    own = folder / "_qmq"
    if not (own / "manifests").is_dir():
        raise InvalidArgument(
            f"there is no archive at {folder}: give the folder that has _qmq/manifests"
        )
    found = OldArchive()
    paths = sorted((own / "manifests").glob("[0-9]*.json"))
    for number, path in enumerate(paths, 1):
        if whole_number(path.stem) != number:
            raise LogDamaged(
                f"the archive's manifest {number} is missing, but {path.name} exists: "
                "restore it from a copy"
            )
        _apply(found, path)
    marker = own / "archive.json"
    selection = _selection(marker) if marker.exists() else {}
    if selection:
        raise InvalidArgument(
            f"{folder} has only messages selected by {selection}, and a table has all: "
            "archive the subjects again into a new table"
        )
    return found


def _selection(marker: Path) -> Any:
    try:
        return parse_json(marker.read_bytes())["selection"]
    except (ValueError, KeyError, TypeError) as cause:
        raise LogDamaged(
            f"{marker.name} of the archive cannot be read ({cause!r}): restore it from a copy"
        ) from cause


def _apply(archive: OldArchive, path: Path) -> None:
    try:
        change: Any = parse_json(path.read_bytes())
        # a sweep deletes files that an earlier compaction removed from the archive
        if change["kind"] != "sweep":
            for each in change["gone"]:
                del archive.files[each]
        archive.files.update(
            {each["path"]: OldFile(each["path"], each["rows"]) for each in change["files"]}
        )
        for key, at in offsets.of_json(change["to"]).items():
            archive.reached[key] = max(at, archive.reached.get(key, 0))
    except (ValueError, KeyError, TypeError, AttributeError, InvalidArgument) as cause:
        raise LogDamaged(
            f"the archive's manifest {path.name} cannot be read ({cause!r}): restore it from a copy"
        ) from cause


def migrate(folder: Path, catalog: Catalog, namespace: str) -> Iterator[MigratedSubject]:
    """Copy each subject that this folder's migration has not copied yet, with one commit.

    Raises:
        InvalidArgument: there is no archive; it has selected messages; a subject's table has
        messages from another source. LogDamaged: a file does not hold what its manifest says.
        Overloaded: another process wrote the table at the same time.
    """
    archive, origin = read_manifests(folder), str(folder.resolve())
    for subject in sorted({key.subject for key in archive.reached}):
        table = open_table(catalog, namespace, subject)
        if table.iceberg.properties.get(MIGRATED) == origin:
            continue
        if table.positions():
            raise InvalidArgument(
                f"subject {subject!r} has messages in {namespace} already: migrate before "
                "`follow`, or give another --namespace"
            )
        files = sorted(
            (each for each in archive.files.values() if each.subject == subject),
            key=lambda each: (each.day, each.path),
        )
        made = [
            new
            for _, day in groupby(files, lambda each: each.day)
            for new in _copied(folder, list(day), table)
        ]
        reached = {key: at for key, at in archive.reached.items() if key.subject == subject}
        if not table.commit([each.location for each in made], reached, {MIGRATED: origin}):
            raise Overloaded(
                f"another process wrote the table of {subject!r} meanwhile: start the "
                "migration again"
            )
        yield MigratedSubject(subject, len(made), sum(each.rows for each in made))


def _copied(folder: Path, day: list[OldFile], table: LakeTable) -> list[DayFile]:
    files = DayFiles(table.folder, f"migrated-{uuid.uuid4().hex}")
    try:
        for each in day:
            rows = 0
            for batch in _opened(folder / "_qmq" / "files" / each.path).iter_batches():
                rows += batch.num_rows
                files.write(_converted(batch))
            if rows != each.rows:
                raise LogDamaged(
                    f"{each.path} has {rows} rows, and its manifest says {each.rows}: "
                    "restore it from a copy"
                )
        return files.close()
    finally:
        files.abandon()


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as cause:
        raise LogDamaged(
            f"{path} cannot be read ({cause}), but the archive's manifests name it: restore "
            "it from a copy"
        ) from cause


def _converted(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert the old columns to the table's order and types. An archive had no logical partitions,
    so the column is null.
    """
    held = {name: batch.column(name) for name in batch.schema.names}
    held["logical_partition"] = pa.nulls(batch.num_rows)
    return pa.RecordBatch.from_arrays(
        [held[each.name].cast(each.type) for each in SCHEMA], schema=SCHEMA
    )
