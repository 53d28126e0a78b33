"""A typed table's column follows the subject's schema, by Iceberg's rules.

A new field is added, int becomes long, float becomes double. A field that the schema no longer has stays, and is null in new rows. A field
that is narrower in the schema than in the table keeps the table's type. Every other change is refused, because existing rows have the old
type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import schema_to_pyarrow

from pyspark_qmq.lake.lake_schema import VALUE
from pyspark_qmq.lake.lake_table import LakeTable
from pyspark_qmq.lake.typed_columns import arrow_type, field_type
from pyspark_qmq.lake.typed_rows import BodyTypes
from qmq.errors import IncompatibleSchema, InvalidArgument
from qmq.schemas.declared_schema import DeclaredSchema
from qmq.schemas.field_types import WIDER, Field, ListOf, MapOf, Scalar, Struct, Type, spoken

_TRIES = 20


def evolve(table: LakeTable, versions: tuple[DeclaredSchema, ...]) -> BodyTypes:
    """Make the table's column hold bodies of the newest version. Returns how to decode bodies for it.

    Raises:
        IncompatibleSchema: the column cannot follow; the message says what to do.
        InvalidArgument: a field has a name that a column cannot have.
    """
    wanted = versions[-1].struct()
    _require_names(wanted, VALUE)
    for tries_left in reversed(range(_TRIES)):
        held = held_struct(table)
        merged = merge(held, wanted, table.subject)
        if merged == held:
            break
        try:
            with table.iceberg.transaction() as change:
                with change.update_schema() as columns:
                    columns.union_by_name(pa.schema([pa.field(VALUE, arrow_type(merged))]))
                change.set_properties({f"write.metadata.metrics.column.{each}": "none" for each in within_lists(merged, VALUE)})
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
        raise InvalidArgument(f"column {VALUE!r} of the table of {table.subject!r} is not a struct: another tool made it")
    return found


def merge(held: Struct, wanted: Struct, subject: str) -> Struct:
    """The column's fields after the change, existing fields first. Raises IncompatibleSchema."""
    found = _merged(held, wanted, VALUE, subject)
    assert isinstance(found, Struct)
    return found


def _merged(held: Type, wanted: Type, where: str, subject: str) -> Type:
    if isinstance(held, Struct) and isinstance(wanted, Struct):
        both = [_field(each, wanted.find(each.name), where, subject) for each in held.fields]
        new = [Field(each.name, optional(each.type), is_nullable=True) for each in wanted.fields if held.find(each.name) is None]
        return Struct((*both, *new))
    if isinstance(held, ListOf) and isinstance(wanted, ListOf):
        return ListOf(_merged(held.item, wanted.item, f"{where}[]", subject), is_item_nullable=True)
    if isinstance(held, MapOf) and isinstance(wanted, MapOf):
        return MapOf(_merged(held.value, wanted.value, f"{where}{{}}", subject), is_value_nullable=True)
    if held == wanted or (isinstance(wanted, Scalar) and (wanted, held) in WIDER):
        return held
    if isinstance(wanted, Scalar) and (held, wanted) in WIDER:
        return wanted
    raise IncompatibleSchema(
        f"column {where!r} of the table of {subject!r} is {spoken(held)}, and {spoken(wanted)} in the schema: Iceberg cannot change it. "
        "Give the field another name in the schema, or follow the subject into another --namespace"
    )


def _field(held: Field, wanted: Field | None, where: str, subject: str) -> Field:
    if wanted is None:
        return held
    return Field(held.name, _merged(held.type, wanted.type, f"{where}.{held.name}", subject), is_nullable=True)


def optional(kind: Type) -> Type:
    """The type with all its fields optional, as columns have them."""
    if isinstance(kind, Struct):
        return Struct(tuple(Field(each.name, optional(each.type), is_nullable=True) for each in kind.fields))
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
                raise InvalidArgument(f"rename field {each.name!r} of {where}: a column needs a name without dots (engines read levels)")
            _require_names(each.type, f"{where}.{each.name}")
    elif isinstance(kind, ListOf):
        _require_names(kind.item, where)
    elif isinstance(kind, MapOf):
        _require_names(kind.value, where)
