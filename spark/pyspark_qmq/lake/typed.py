"""Typed tables: their columns follow the subjects' schemas, and each has a second table for its
rejected messages.

A column follows the subject's schema by Iceberg's rules. A new field is added, int becomes long,
float becomes double. A field that the schema no longer has stays, and is null in new rows. A field
that is narrower in the schema than in the table keeps the table's type. Every other change is
refused, because existing rows have the old type.

Rejected messages are added to their table exactly once, although two tables cannot change in one
commit. The files are written first. The commit that moves the subject's table past their messages
also sets the table's property `qmq.rejected`, which names the files. Then the files are added to
the table of rejected messages, whose property `qmq.round` names the last round that it has. A
writer does the second step before it commits the next round, so at most one round is missing there,
and any writer can add it.

A writer reads the rejected table first, then the subject's table. Its commit requires that the
rejected table has not changed since, so a round that another process added in between is not added
again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import schema_to_pyarrow

from pyspark_qmq.lake.catalog import VALUE
from pyspark_qmq.lake.lake_damage import require_within
from pyspark_qmq.lake.table import LakeTable, open_table
from pyspark_qmq.lake.task_runner import BodyTypes, TaskOutput
from pyspark_qmq.lake.typed_columns import arrow_type, field_type
from qmq.errors import IncompatibleSchema, InvalidArgument, LogDamaged, Overloaded
from qmq.model import DeclaredSchema
from qmq.schemas.declared_schema import struct_of
from qmq.schemas.field_types import WIDER, Field, ListOf, MapOf, Scalar, Struct, Type, type_name
from qmq.text import parse_json

_EVOLUTION_TRIES = 20


def evolve(table: LakeTable, versions: tuple[DeclaredSchema, ...]) -> BodyTypes:
    """Make the table's column hold bodies of the newest version. Returns how to decode bodies for
    it.

    Raises:
        IncompatibleSchema: the column cannot follow; the message says what to do.
        InvalidArgument: a field has a name that a column cannot have.
    """
    wanted = struct_of(versions[-1])
    _require_names(wanted, VALUE)
    for tries_left in reversed(range(_EVOLUTION_TRIES)):
        held = held_struct(table)
        merged = merge(held, wanted, table.subject)
        if merged == held:
            break
        try:
            with table.iceberg.transaction() as change:
                with change.update_schema() as columns:
                    columns.union_by_name(pa.schema([pa.field(VALUE, arrow_type(merged))]))
                change.set_properties(
                    {
                        f"write.metadata.metrics.column.{each}": "none"
                        for each in within_lists(merged, VALUE)
                    }
                )
        except CommitFailedException:  # another writer changed the table, perhaps in the same way
            if not tries_left:
                raise
        table.iceberg.refresh()
    return BodyTypes(versions, merged)


def held_struct(table: LakeTable) -> Struct:
    """The fields of the column; none if the table is not typed yet."""
    columns: Any = schema_to_pyarrow(table.iceberg.schema(), include_field_ids=False)
    if VALUE not in columns.names:
        return Struct(())
    found = field_type(columns.field(VALUE).type, VALUE)
    if not isinstance(found, Struct):
        raise InvalidArgument(
            f"column {VALUE!r} of the table of {table.subject!r} is not a struct: another "
            "tool made it"
        )
    return found


def merge(held: Struct, wanted: Struct, subject: str) -> Struct:
    """The column's fields after the change, existing fields first. Raises IncompatibleSchema."""
    found = _merged(held, wanted, VALUE, subject)
    assert isinstance(found, Struct)
    return found


def _merged(held: Type, wanted: Type, where: str, subject: str) -> Type:
    if isinstance(held, Struct) and isinstance(wanted, Struct):
        both = [_field(each, wanted.find(each.name), where, subject) for each in held.fields]
        new = [
            Field(each.name, optional(each.type), is_nullable=True)
            for each in wanted.fields
            if held.find(each.name) is None
        ]
        return Struct((*both, *new))
    if isinstance(held, ListOf) and isinstance(wanted, ListOf):
        return ListOf(_merged(held.item, wanted.item, f"{where}[]", subject), is_item_nullable=True)
    if isinstance(held, MapOf) and isinstance(wanted, MapOf):
        return MapOf(
            _merged(held.value, wanted.value, f"{where}{{}}", subject), is_value_nullable=True
        )
    if held == wanted or (isinstance(wanted, Scalar) and (wanted, held) in WIDER):
        return held
    if isinstance(wanted, Scalar) and (held, wanted) in WIDER:
        return wanted
    raise IncompatibleSchema(
        f"column {where!r} of the table of {subject!r} is {type_name(held)}, and "
        f"{type_name(wanted)} in the schema: Iceberg cannot change it. "
        "Give the field another name in the schema, or follow the subject into another --namespace"
    )


def _field(held: Field, wanted: Field | None, where: str, subject: str) -> Field:
    if wanted is None:
        return held
    return Field(
        held.name,
        _merged(held.type, wanted.type, f"{where}.{held.name}", subject),
        is_nullable=True,
    )


def optional(kind: Type) -> Type:
    """The type with all its fields optional, as columns have them."""
    if isinstance(kind, Struct):
        return Struct(
            tuple(Field(each.name, optional(each.type), is_nullable=True) for each in kind.fields)
        )
    if isinstance(kind, ListOf):
        return ListOf(optional(kind.item), is_item_nullable=True)
    if isinstance(kind, MapOf):
        return MapOf(optional(kind.value), is_value_nullable=True)
    return kind


def within_lists(kind: Type, where: str, *, is_within: bool = False) -> Iterator[str]:
    """Iceberg's names of the values within lists and maps, for which files have no bounds."""
    if isinstance(kind, Struct):
        for each in kind.fields:
            yield from within_lists(each.type, f"{where}.{each.name}", is_within=is_within)
    elif isinstance(kind, ListOf):
        yield from within_lists(kind.item, f"{where}.element", is_within=True)
    elif isinstance(kind, MapOf):
        yield f"{where}.key"
        yield from within_lists(kind.value, f"{where}.value", is_within=True)
    elif is_within:
        yield where


def _require_names(kind: Type, where: str) -> None:
    if isinstance(kind, Struct):
        for each in kind.fields:
            if "." in each.name or not each.name:
                raise InvalidArgument(
                    f"rename field {each.name!r} of {where}: a column needs a name without "
                    "dots (engines read levels)"
                )
            _require_names(each.type, f"{where}.{each.name}")
    elif isinstance(kind, ListOf):
        _require_names(kind.item, where)
    elif isinstance(kind, MapOf):
        _require_names(kind.value, where)


PENDING: Final = "qmq.rejected"
ROUND: Final = "qmq.round"
_TRIES: Final = 20


def pending_property(locations: Iterable[str]) -> Mapping[str, str]:
    """The property of the subject's table that names the files of a round's rejected messages."""
    return {PENDING: json.dumps({"round": uuid.uuid4().hex, "files": list(locations)})}


@dataclass(frozen=True, slots=True)
class PendingFiles:
    """The files of the last round's rejected messages."""

    round: str
    files: tuple[str, ...]


def pending_of(text: str) -> PendingFiles:
    """The inverse of `told`. Raises LogDamaged."""
    try:
        found = parse_json(text)
        files = found["files"]
        if not isinstance(files, list) or not all(
            isinstance(each, str) for each in (*files, found["round"])
        ):
            raise TypeError("a file's name or the round is no text")
    except (ValueError, KeyError, TypeError) as cause:
        raise LogDamaged(
            f"the table's property {PENDING} is unreadable, {text[:200]!r}: {cause}; another "
            "tool wrote it"
        ) from None
    return PendingFiles(found["round"], tuple(files))


def require_pending(pending: PendingFiles, tables: Iterable[LakeTable]) -> None:
    """Raises LogDamaged for files outside of the folders of the subject's tables."""
    folders = [each.iceberg.location() for each in tables]
    for location in pending.files:
        require_within(folders, location, f"property {PENDING}")


def complete(table: LakeTable, rejected: LakeTable) -> None:
    """Add the rejected messages of the last round that had any, unless their table has them. Raises
    Overloaded, LogDamaged.
    """
    if _is_done(table, rejected):
        return
    for _ in range(_TRIES):
        rejected.iceberg.refresh()
        table.iceberg.refresh()
        if _is_done(table, rejected):
            return
        pending = pending_of(table.iceberg.properties[PENDING])
        require_pending(pending, [table, rejected])
        rejected.add(pending.files, {ROUND: pending.round})
    raise Overloaded(
        f"other writers blocked the table of rejected messages of {table.subject!r}: start again"
    )


def _is_done(table: LakeTable, rejected: LakeTable) -> bool:
    pending = table.iceberg.properties.get(PENDING)
    return pending is None or pending_of(pending).round == rejected.iceberg.properties.get(ROUND)


class TypedTables:
    def __init__(
        self, catalog: Catalog, namespace: str, schemas: Callable[[str], Sequence[DeclaredSchema]]
    ) -> None:
        self._catalog = catalog
        self._namespace = namespace
        self._schemas = schemas
        self._rejected: dict[str, LakeTable] = {}
        self._types: dict[str, BodyTypes] = {}

    def output(self, table: LakeTable) -> TaskOutput:
        """Where a round writes, by the newest schema. Raises InvalidArgument if there is none,
        IncompatibleSchema, NotConnected.
        """
        versions = tuple(self._schemas(table.subject))
        known = self._types.get(table.subject)
        if known is None or known.versions != versions:
            self._types[table.subject] = known = evolve(table, versions)
        return TaskOutput(table.folder, known, self._of(table.subject).folder)

    def forget(self) -> None:
        """Open the tables again before they are used."""
        self._rejected.clear()
        self._types.clear()

    def complete(self, table: LakeTable) -> None:
        """Add the rejected messages of the last round to their table, as `complete`."""
        complete(table, self._of(table.subject))

    def _of(self, subject: str) -> LakeTable:
        found = self._rejected.get(subject)
        if found is None:
            found = self._rejected[subject] = open_table(
                self._catalog, self._namespace, subject, is_rejected=True
            )
        return found
