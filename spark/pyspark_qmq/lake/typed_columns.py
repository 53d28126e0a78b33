"""Decoded bodies as Arrow columns. Pure.

qmq/schemas/body_decoder.py makes the values: a msgspec.Struct with an attribute for each field. The
table's column may have wider types than the schema, and fields that the schema no longer has; these
are null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Final

import msgspec
import pyarrow as pa

from qmq.errors import InvalidArgument
from qmq.schemas.field_types import Field, ListOf, MapOf, Scalar, Struct, Type

_SCALARS: Final[dict[Scalar, pa.DataType]] = {
    Scalar.BOOLEAN: pa.bool_(),
    Scalar.INT: pa.int32(),
    Scalar.LONG: pa.int64(),
    Scalar.FLOAT: pa.float32(),
    Scalar.DOUBLE: pa.float64(),
    Scalar.STRING: pa.string(),
    Scalar.BYTES: pa.binary(),
    Scalar.DATE: pa.date32(),
    Scalar.TIMESTAMP: pa.timestamp("us", tz="UTC"),
}


def arrow_type(kind: Type) -> pa.DataType:
    """The type of a column. All fields are optional, because a later schema may drop them."""
    if isinstance(kind, Struct):
        return pa.struct([pa.field(each.name, arrow_type(each.type)) for each in kind.fields])
    if isinstance(kind, ListOf):
        return pa.list_(pa.field("element", arrow_type(kind.item)))
    if isinstance(kind, MapOf):
        return pa.map_(
            pa.field("key", pa.string(), nullable=False), pa.field("value", arrow_type(kind.value))
        )
    return _SCALARS[kind]


def field_type(kind: pa.DataType, where: str) -> Type:
    """The inverse of `arrow_type`, for columns that PyIceberg read. Raises InvalidArgument for a
    type that bodies do not have.
    """
    if pa.types.is_struct(kind):
        return Struct(
            tuple(
                Field(each.name, field_type(each.type, f"{where}.{each.name}"), is_nullable=True)
                for each in kind
            )
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return ListOf(field_type(kind.value_type, f"{where}[]"), is_item_nullable=True)
    if pa.types.is_map(kind):
        return MapOf(field_type(kind.item_type, f"{where}{{}}"), is_value_nullable=True)
    plain = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(kind, kind)
    found = next((scalar for scalar, each in _SCALARS.items() if each == plain), None)
    if found is None:
        raise InvalidArgument(
            f"column {where!r} of the table has the type {kind}, which no schema has: it was "
            "changed by another tool"
        )
    return found


def column(values: Sequence[Any], declared: Type, held: Type) -> pa.Array:
    """Values of the type `declared` as a column of the type `held`."""
    if isinstance(declared, Struct) and isinstance(held, Struct):
        return _structs(values, declared, held)
    if isinstance(declared, ListOf) and isinstance(held, ListOf):
        items = column(
            list(chain.from_iterable(each or () for each in values)), declared.item, held.item
        )
        return pa.ListArray.from_arrays(_offsets(values), items, type=arrow_type(held))
    if isinstance(declared, MapOf) and isinstance(held, MapOf):
        keys = pa.array(list(chain.from_iterable(each or () for each in values)), pa.string())
        items = column(
            list(chain.from_iterable(each.values() for each in values if each)),
            declared.value,
            held.value,
        )
        return pa.MapArray.from_arrays(_offsets(values), keys, items, type=arrow_type(held))
    return pa.array(values, arrow_type(held))


def _structs(values: Sequence[Any], declared: Struct, held: Struct) -> pa.Array:
    columns = dict(
        zip(
            (each.name for each in declared.fields),
            _attributes(values, len(declared.fields)),
            strict=True,
        )
    )
    arrays = []
    for each in held.fields:
        known = declared.find(each.name)
        if known is None:
            arrays.append(pa.nulls(len(values), arrow_type(each.type)))
        else:
            arrays.append(column(columns[each.name], known.type, each.type))
    mask = pa.array([each is None for each in values], pa.bool_()) if None in values else None
    return pa.StructArray.from_arrays(arrays, fields=list(arrow_type(held)), mask=mask)


def _attributes(values: Sequence[Any], count: int) -> Iterable[tuple[Any, ...]]:
    """For each attribute, a tuple with the attribute of every value."""
    if not values:
        return [()] * count
    blank = (None,) * count
    rows: Iterator[tuple[Any, ...]]
    rows = (
        map(_ASTUPLE, values)
        if all(values)
        else (blank if each is None else _ASTUPLE(each) for each in values)
    )
    return zip(*rows, strict=True)


_ASTUPLE: Final = msgspec.structs.astuple


def _offsets(values: Sequence[Any]) -> pa.Array:
    """Where each list begins; null for no list."""
    ends = list(accumulate((len(each) if each else 0 for each in values), initial=0))
    begins = [None if each is None else begin for each, begin in zip(values, ends, strict=False)]
    return pa.array([*begins, ends[-1]], pa.int32())
