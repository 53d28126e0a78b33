"""The types of a body's fields, whichever format declares them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Scalar(Enum):
    BOOLEAN = "boolean"
    INT = "int"
    """32 bits."""
    LONG = "long"
    """64 bits."""
    FLOAT = "float"
    DOUBLE = "double"
    STRING = "string"
    BYTES = "bytes"
    DATE = "date"
    TIMESTAMP = "timestamp"
    """A moment, in microseconds."""


@dataclass(frozen=True, slots=True)
class ListOf:
    item: Type
    is_item_nullable: bool = False


@dataclass(frozen=True, slots=True)
class MapOf:
    """From strings."""

    value: Type
    is_value_nullable: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """`is_required`: a body without the field does not fit. `is_nullable`: null fits."""

    name: str
    type: Type
    is_required: bool = False
    is_nullable: bool = False


@dataclass(frozen=True, slots=True)
class Struct:
    fields: tuple[Field, ...]

    def find(self, name: str) -> Field | None:
        return next((each for each in self.fields if each.name == name), None)


Type: TypeAlias = Scalar | ListOf | MapOf | Struct

WIDER = frozenset({(Scalar.INT, Scalar.LONG), (Scalar.FLOAT, Scalar.DOUBLE)})
"""Pairs (from, to) of types where `to` holds every value of `from`: the only changes of a column's type that Iceberg allows."""


def spoken(kind: Type) -> str:
    """The name of a type in an error."""
    if isinstance(kind, Scalar):
        return kind.value
    return {ListOf: "list", MapOf: "map", Struct: "struct"}[type(kind)]
