"""The types of a body's fields, whichever format declares them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from qmq.errors import InvalidArgument

TYPES_MAX: Final = 10_000
"""The most types within a schema. One that is referred to counts each time: a short schema may
refer to itself billions of times.
"""
LEVELS_MAX: Final = 100
"""The most types inside each other: every caller can walk through so many by recursion."""


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
"""Pairs (from, to) of types where `to` holds every value of `from`: the only changes of a column's
type that Iceberg allows.
"""


class TypeCount:
    """Counts the types of one schema while they are read."""

    def __init__(self) -> None:
        self._types = self._levels = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Around the reading of a type, and of those inside it. Raises InvalidArgument."""
        self._types += 1
        self._levels += 1
        if self._types > TYPES_MAX or self._levels > LEVELS_MAX:
            raise InvalidArgument(
                f"the schema has more than {TYPES_MAX} types, or more than {LEVELS_MAX} "
                "inside each other: make it simpler"
            )
        yield
        self._levels -= 1

    def again(self, kind: Type) -> None:
        """A type that was read before is used once more. Raises InvalidArgument."""
        with self.one_more():
            if isinstance(kind, Struct):
                for each in kind.fields:
                    self.again(each.type)
            elif isinstance(kind, ListOf):
                self.again(kind.item)
            elif isinstance(kind, MapOf):
                self.again(kind.value)


def field_name(name: str) -> str:
    """The name, if it can name a column and a field of JSON. Raises InvalidArgument."""
    if not name or not name.isprintable() or "\\" in name or '"' in name:
        raise InvalidArgument(
            f"{name[:100]!r} cannot be a field's name: give one without quotes, backslashes "
            "and control characters"
        )
    return name


def type_name(kind: Type) -> str:
    """The name of a type in an error."""
    if isinstance(kind, Scalar):
        return kind.value
    return {ListOf: "list", MapOf: "map", Struct: "struct"}[type(kind)]
