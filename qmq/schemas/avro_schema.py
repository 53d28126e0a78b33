"""An Avro schema as fields. Pure.

A field without a default is required, as Avro's resolution of schemas has it. Logical types date,
timestamp-millis and timestamp-micros are kept, uuid is a string; others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from qmq.errors import InvalidArgument
from qmq.schemas.field_types import (
    Field,
    ListOf,
    MapOf,
    Scalar,
    Struct,
    Type,
    TypeCount,
    field_name,
)
from qmq.text import parse_json

_PLAIN: Final[Mapping[str, Scalar]] = {
    "boolean": Scalar.BOOLEAN,
    "int": Scalar.INT,
    "long": Scalar.LONG,
    "float": Scalar.FLOAT,
    "double": Scalar.DOUBLE,
    "string": Scalar.STRING,
    "bytes": Scalar.BYTES,
}
_LOGICAL: Final[Mapping[tuple[str, str], Scalar]] = {
    ("int", "date"): Scalar.DATE,
    ("long", "timestamp-millis"): Scalar.TIMESTAMP,
    ("long", "timestamp-micros"): Scalar.TIMESTAMP,
    ("string", "uuid"): Scalar.STRING,
}


def parse(text: str) -> Struct:
    """The fields of a body. Raises InvalidArgument, which names the field."""
    try:
        document: Any = parse_json(text)
    except ValueError as cause:
        raise InvalidArgument(f"the schema is not JSON: {cause}") from None
    kind, is_nullable = _AvroNodes().type_of(document, "", ())
    if not isinstance(kind, Struct) or is_nullable:
        raise InvalidArgument("a subject's schema describes a record: its fields become columns")
    return kind


@dataclass(slots=True)
class _AvroNodes:
    named: dict[str, Type] = field(default_factory=dict)
    count: TypeCount = field(default_factory=TypeCount)

    def type_of(self, node: Any, where: str, within: tuple[str, ...]) -> tuple[Type, bool]:
        """A type, and whether null fits. `within`: the records around it."""
        with self.count.one_more():
            return self._type_of(node, where, within)

    def _type_of(self, node: Any, where: str, within: tuple[str, ...]) -> tuple[Type, bool]:
        if isinstance(node, list):
            return self._union(node, where, within)
        if isinstance(node, str):
            return self._by_name(node, where, within), False
        if not isinstance(node, dict) or "type" not in node:
            raise _refusal(where, "it must say its type")
        kind = node["type"]
        if isinstance(kind, list | dict):
            return self.type_of(kind, where, within)
        if not isinstance(kind, str):
            raise _refusal(where, "its type is no name")
        if "logicalType" in node:
            found = _LOGICAL.get((kind, str(node["logicalType"])))
            if found is None:
                raise _refusal(
                    where,
                    (
                        f"the logical type {node['logicalType']} has no column type here: use "
                        f"its plain type {kind}"
                    ),
                )
            return found, False
        if kind == "record":
            return self._record(node, where, within), False
        if kind == "array":
            item, is_item_nullable = self.type_of(node.get("items"), f"{where}[]", within)
            return ListOf(item, is_item_nullable), False
        if kind == "map":
            value, is_value_nullable = self.type_of(node.get("values"), f"{where}{{}}", within)
            return MapOf(value, is_value_nullable), False
        if kind in ("enum", "fixed"):
            return self._remember(
                node, where, Scalar.STRING if kind == "enum" else Scalar.BYTES
            ), False
        return self._by_name(kind, where, within), False

    def _record(self, node: Mapping[str, Any], where: str, within: tuple[str, ...]) -> Type:
        parts = node.get("fields")
        if not isinstance(parts, list) or not parts:
            raise _refusal(where, "a record needs fields")
        fields: list[Field] = []
        for each in parts:
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                raise _refusal(where, "each field needs a name and a type")
            name = field_name(each["name"])
            if any(name == other.name for other in fields):
                raise _refusal(where, f"two fields have the name {name!r}")
            kind, is_nullable = self.type_of(
                each.get("type"),
                f"{where}.{name}" if where else name,
                (*within, str(node.get("name"))),
            )
            fields.append(Field(name, kind, "default" not in each, is_nullable))
        return self._remember(node, where, Struct(tuple(fields)))

    def _remember(self, node: Mapping[str, Any], where: str, kind: Type) -> Type:
        if not isinstance(node.get("name"), str):
            raise _refusal(where, f"the {node['type']} needs a name")
        self.named[node["name"]] = kind
        if "namespace" in node:
            self.named[f"{node['namespace']}.{node['name']}"] = kind
        return kind

    def _by_name(self, name: str, where: str, within: tuple[str, ...]) -> Type:
        found = _PLAIN.get(name) or self.named.get(name)
        if found is not None:
            self.count.again(found)
            return found
        if name.split(".")[-1] in within:
            raise _refusal(where, f"record {name} contains itself: a column cannot")
        raise _refusal(where, f"there is no type {name!r}")

    def _union(self, parts: list[Any], where: str, within: tuple[str, ...]) -> tuple[Type, bool]:
        real = [each for each in parts if each != "null"]
        if len(real) != 1:
            raise _refusal(
                where, f"the union has {len(real)} types: a column has one, and null besides"
            )
        kind, is_nullable = self.type_of(real[0], where, within)
        return kind, is_nullable or len(real) < len(parts)


def _refusal(where: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"Avro schema, {f'field {where!r}' if where else 'at the top'}: {why}")
