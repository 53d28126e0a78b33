"""One Iceberg table: open or create it, read its positions, commit files together with positions.

A commit requires that the current snapshot is the one that `positions` were read from. PyIceberg
must not repeat a refused commit on another snapshot: two writers would both add the same messages.
So each table has `commit.retry.num-retries` 0, and opening a table sets it.

A position is the sequence after the last message of a queue that the table has. The positions of
all queues are a property of the snapshot that added the files, so both change in one commit. Other
tools (such as compaction by Spark) make snapshots without the property: then the property of the
nearest ancestor that has one counts. If no such ancestor is left, the table's own property counts,
which each commit also writes.

The ancestors come before the table, because a table that was rolled back to an older snapshot has
only that snapshot's messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyiceberg.expressions
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import FileScanTask, Table
from pyiceberg.transforms import DayTransform

from pyspark_qmq.lake.catalog import REJECTED_SCHEMA, SCHEMA, WITHOUT_BOUNDS, DataFolder, table_name
from pyspark_qmq.lake.lake_damage import reading_metadata, reading_table, require_within
from qmq.columns.model import QueueKey
from qmq.columns.offsets import Offsets, sequence_of
from qmq.errors import InvalidArgument, LogDamaged, UnknownSubject
from qmq.text import parse_json

PROPERTY: Final = "qmq.positions"
COMPLETE_FROM: Final = "qmq.complete-from"
"""Property of a table: of each queue, the sequence from which on the table has every message up to
its position; 0 for a missing queue. It only rises: when a new table begins later, and when messages
that retention deleted are skipped."""


class Snapshot(NamedTuple):
    """The parts of a snapshot that positions need."""

    parent: int | None
    properties: Mapping[str, str]


def encode_positions(subject: str, positions: Offsets) -> str:
    """The positions as JSON, `{"0@g1":120}`, sorted, so that equal positions are equal text."""
    return json.dumps(
        {key.within: positions[key] for key in sorted(positions) if key.subject == subject},
        separators=(",", ":"),
    )


def decode_positions(subject: str, text: str) -> dict[QueueKey, int]:
    """The inverse of `encode_positions`. Raises LogDamaged."""
    try:
        found: Any = parse_json(text)
        return {
            QueueKey.parse(subject, within): sequence_of(sequence)
            for within, sequence in found.items()
        }
    except (ValueError, AttributeError, TypeError, InvalidArgument) as cause:
        raise LogDamaged(
            f"the table of {subject!r} has unreadable positions, {text[:200]!r}: {cause}"
        ) from None


def complete_from(
    known: Offsets, begin: Offsets, end: Offsets, read_from: Offsets
) -> dict[QueueKey, int]:
    """From where a table is complete after a round from `begin` to `end` that found only the
    messages from `read_from` on.
    """
    found = dict(known)
    for key, last in end.items():
        first = begin.get(key, 0)
        if first < last and read_from.get(key, last) > first:
            found[key] = read_from.get(key, last)
    return found


def newest(
    subject: str,
    current: int | None,
    snapshot: Callable[[int], Snapshot | None],
    table: Mapping[str, str],
) -> dict[QueueKey, int]:
    """The positions of a table.

    Args:
        current: the id of its current snapshot; None for a new table.
        snapshot: a snapshot by its id; None for one that has expired.
        table: the table's properties.

    Raises:
        LogDamaged: the table has messages but no positions.
    """
    at = current
    while at is not None and (found := snapshot(at)) is not None:
        if PROPERTY in found.properties:
            return decode_positions(subject, found.properties[PROPERTY])
        at = found.parent
    if PROPERTY in table:
        return decode_positions(subject, table[PROPERTY])
    if current is None:
        return {}
    raise LogDamaged(
        f"the table of {subject!r} has a snapshot, and no property {PROPERTY}: it was not "
        "written by qmq lake"
    )


SUBJECT: Final = "qmq.subject"
CONTENT: Final = "qmq.content"
"""Property of a table: `rejected`, if it has messages that do not fit their subject's schema."""
REJECTED: Final = "rejected"
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
EVERYTHING: Final = pyiceberg.expressions.AlwaysTrue()
_DATA_FOLDER: Final = "write.data.path"
_METADATA_FOLDER: Final = "write.metadata.path"
_RETRIES: Final = "commit.retry.num-retries"
_OLD_METADATA: Final = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
"""Without these, a commit every ten seconds leaves 8,640 metadata files a day."""


class LakeTable:
    """The table of one subject."""

    def __init__(self, subject: str, table: Table) -> None:
        self.subject = subject
        self.iceberg = table

    @property
    def name(self) -> str:
        """The table's name with its namespace."""
        return ".".join(self.iceberg.name()[-2:])

    # --- files ------------------------------------------------------------------------------------

    @property
    def folder(self) -> DataFolder:
        """Where data files go."""
        return DataFolder(
            f"{self.iceberg.location().rstrip('/')}/data", dict(self.iceberg.io.properties)
        )

    def files(
        self, condition: pyiceberg.expressions.BooleanExpression = EVERYTHING
    ) -> list[FileScanTask]:
        """The files of the current snapshot that may have rows that fit. Raises LogDamaged."""
        with reading_table(self.iceberg):
            found = list(self.iceberg.scan(condition).plan_files())
        more = self.iceberg.properties.get(_DATA_FOLDER)
        for each in found:
            require_within(
                [self.iceberg.location(), *([more] if more else [])],
                each.file.file_path,
                f"table {self.name}",
            )
        return found

    def delete(self, locations: Iterable[str]) -> None:
        """Delete files that no snapshot names. A file that does not exist is not an error."""
        for each in locations:
            with suppress(FileNotFoundError):
                self.iceberg.io.delete(each)

    # --- positions --------------------------------------------------------------------------------

    def positions(self) -> dict[QueueKey, int]:
        """The table's position in each queue. Raises LogDamaged."""
        metadata = self.iceberg.metadata

        def snapshot(number: int) -> Snapshot | None:
            found = metadata.snapshot_by_id(number)
            if found is None:
                return None
            return Snapshot(
                found.parent_snapshot_id,
                found.summary.additional_properties if found.summary is not None else {},
            )

        return newest(self.subject, metadata.current_snapshot_id, snapshot, metadata.properties)

    def complete_from(self) -> dict[QueueKey, int] | None:
        """For each queue, the sequence from which on the table is complete; None if no writer
        recorded that yet. Raises LogDamaged.
        """
        text = self.iceberg.properties.get(COMPLETE_FROM)
        return None if text is None else decode_positions(self.subject, text)

    def first_sequences(self) -> dict[QueueKey, int]:
        """The lowest sequence of each queue that the table has. Reads all rows, three columns."""
        found: dict[QueueKey, int] = {}
        with reading_table(self.iceberg):
            for batch in self.iceberg.scan(
                selected_fields=("partition", "broker_group", "sequence")
            ).to_arrow_batch_reader():
                lowest = (
                    pa.Table.from_batches([batch])
                    .group_by(["partition", "broker_group"])
                    .aggregate([("sequence", "min")])
                )
                for row in lowest.to_pylist():
                    key = QueueKey(self.subject, row["partition"], row["broker_group"])
                    found[key] = min(row["sequence_min"], found.get(key, row["sequence_min"]))
        return found

    def commit(
        self, locations: Sequence[str], reached: Offsets, properties: Mapping[str, str] = NOTHING
    ) -> bool:
        """Add files, and record the positions that the table then has. `properties` are set on the
        table in the same commit.

        Returns False if another writer committed first: the files are deleted, and the table is
        read again. Also returns False if the answer was lost: the files stay, and `positions` tell
        whether the commit was made.
        """
        told = encode_positions(self.subject, reached)
        try:
            with reading_table(self.iceberg), self.iceberg.transaction() as change:
                change.set_properties({**properties, PROPERTY: told})
                if locations:
                    change.add_files(list(locations), {PROPERTY: told}, check_duplicate_files=False)
                elif self.iceberg.metadata.current_snapshot_id is not None:
                    with change.update_snapshot({PROPERTY: told}).fast_append():
                        pass  # a snapshot's positions override the table's
        except CommitFailedException:
            self.delete(locations)
            self.iceberg.refresh()
            return False
        except CommitStateUnknownException:
            self.iceberg.refresh()
            return False
        return True

    def add(self, locations: Sequence[str], properties: Mapping[str, str]) -> None:
        """Add files and set properties in one commit. Changes nothing if another writer committed
        first. The answer may be lost.
        """
        refused = suppress(CommitFailedException, CommitStateUnknownException)
        with refused, reading_table(self.iceberg), self.iceberg.transaction() as change:
            change.set_properties(dict(properties))
            change.add_files(list(locations), check_duplicate_files=False)


def open_table(
    catalog: Catalog, namespace: str, subject: str, *, is_rejected: bool = False
) -> LakeTable:
    """The table of a subject, or of its rejected messages. Creates a missing table.

    Raises:
        InvalidArgument: another table has the name.
        LogDamaged: as `find_table`.
    """
    with suppress(UnknownSubject):
        return find_table(catalog, namespace, subject, is_rejected=is_rejected)
    with suppress(NamespaceAlreadyExistsError):  # another writer may create it at the same time
        catalog.create_namespace_if_not_exists(namespace)
    with suppress(TableAlreadyExistsError):
        _create(
            catalog,
            (namespace, table_name(subject, is_rejected=is_rejected)),
            subject,
            is_rejected=is_rejected,
        )
    return find_table(catalog, namespace, subject, is_rejected=is_rejected)


def find_table(
    catalog: Catalog, namespace: str, subject: str, *, is_rejected: bool = False
) -> LakeTable:
    """The table of a subject, or of its rejected messages.

    Raises:
        UnknownSubject: there is no such table.
        InvalidArgument: another table has the name.
        LogDamaged: its metadata cannot be read, or names files outside of its folder.
    """
    found = read_table(catalog, namespace, subject, is_rejected=is_rejected)
    _require_own_metadata(found)
    if found.iceberg.properties.get(_RETRIES) != "0":
        with found.iceberg.transaction() as change:
            change.set_properties({_RETRIES: "0"})
    return found


def read_table(
    catalog: Catalog, namespace: str, subject: str, *, is_rejected: bool = False
) -> LakeTable:
    """As `find_table`, for reading only: the catalog need not allow writes."""
    name = table_name(subject, is_rejected=is_rejected)
    try:
        with reading_metadata(f"{namespace}.{name}", _metadata_location(catalog, namespace, name)):
            found = catalog.load_table((namespace, name))
    except NoSuchTableError:
        makes = (
            "`qmq lake follow --typed` makes it" if is_rejected else "`qmq lake follow` makes it"
        )
        raise UnknownSubject(
            f"subject {subject!r} has no table {namespace}.{name}: {makes}"
        ) from None
    owner, content = found.properties.get(SUBJECT), found.properties.get(CONTENT, "")
    if owner != subject or content != (REJECTED if is_rejected else ""):
        of = "the rejected messages of " if content == REJECTED else ""
        what = f"belongs to {of}subject {owner!r}" if owner else "was not made by qmq lake"
        raise InvalidArgument(
            f"table {namespace}.{name} {what}: choose another --namespace for subject {subject!r}"
        )
    return LakeTable(subject, found)


def _require_own_metadata(table: LakeTable) -> None:
    """Before a change: a commit deletes old metadata files, and expiry all unnamed files in the
    table's folder. Raises LogDamaged.
    """
    iceberg = table.iceberg
    more = iceberg.properties.get(_METADATA_FOLDER)
    folders = [iceberg.location(), *([more] if more else [])]
    for each in (
        iceberg.metadata_location,
        *(entry.metadata_file for entry in iceberg.metadata.metadata_log),
    ):
        require_within(folders, each, f"table {table.name}")


def _metadata_location(catalog: Catalog, namespace: str, name: str) -> str:
    """The table's metadata file, as far as the catalog tells it without reading the file."""
    engine = getattr(catalog, "engine", None)
    if engine is None:  # only SQL catalogs have a database
        return ""
    from sqlalchemy import text

    asked = (
        "SELECT metadata_location FROM iceberg_tables WHERE catalog_name = :c AND "
        "table_namespace = :n AND table_name = :t"
    )
    with engine.connect() as database:
        return database.scalar(text(asked), {"c": catalog.name, "n": namespace, "t": name}) or ""


def _create(catalog: Catalog, name: tuple[str, str], subject: str, *, is_rejected: bool) -> None:
    """One transaction, so that no reader sees the table without its partitions."""
    bounds = {f"write.metadata.metrics.column.{each}": "none" for each in WITHOUT_BOUNDS}
    properties = {
        SUBJECT: subject,
        _RETRIES: "0",
        **_OLD_METADATA,
        **bounds,
        **({CONTENT: REJECTED} if is_rejected else {}),
    }
    columns = REJECTED_SCHEMA if is_rejected else SCHEMA
    with (
        catalog.create_table_transaction(name, columns, properties=properties) as table,
        table.update_spec() as spec,
    ):
        spec.add_field("append_time", DayTransform(), "append_day")
