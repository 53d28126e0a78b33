"""A JSON Schema as fields. Pure.

    type boolean, integer, number, string         boolean, long, double, string
    integer with format int32                     int
    number with format float                      float
    string with format date-time, date            timestamp, date
    string with contentEncoding base64            bytes
    an enum or const of strings, integers ...     the type of its values
    array with items                              list
    object with properties                        struct
    object with additionalProperties only         map
    a type and null, by `type`, `anyOf`, `oneOf`  the type, nullable

What limits values (`minimum`, `pattern` ...) has no part in a type, and is not checked.
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

_PLAIN: Final[Mapping[tuple[str, str], Scalar]] = {
    ("boolean", ""): Scalar.BOOLEAN,
    ("integer", "int32"): Scalar.INT,
    ("integer", ""): Scalar.LONG,
    ("number", "float"): Scalar.FLOAT,
    ("number", ""): Scalar.DOUBLE,
    ("string", "date-time"): Scalar.TIMESTAMP,
    ("string", "date"): Scalar.DATE,
    ("string", ""): Scalar.STRING,
}
_JSON_TYPES: Final = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
}
_NOTES: Final = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})


def parse(text: str) -> Struct:
    """The fields of a body. Raises InvalidArgument, which names the field."""
    try:
        document: Any = parse_json(text)
    except ValueError as cause:
        raise InvalidArgument(f"the schema is not JSON: {cause}") from None
    if not isinstance(document, dict):
        raise InvalidArgument("a JSON Schema is an object with type object and properties")
    kind, is_nullable = _SchemaNodes(document).type_of(document, "", ())
    if not isinstance(kind, Struct) or is_nullable:
        raise InvalidArgument(
            "a subject's schema describes an object with properties: its fields become columns"
        )
    return kind


@dataclass(frozen=True, slots=True)
class _SchemaNodes:
    document: Mapping[str, Any]
    count: TypeCount = field(default_factory=TypeCount)

    def type_of(self, node: Any, where: str, within: tuple[str, ...]) -> tuple[Type, bool]:
        """A type, and whether null fits. `within`: the references that led here."""
        with self.count.one_more():
            return self._type_of(node, where, within)

    def _type_of(self, node: Any, where: str, within: tuple[str, ...]) -> tuple[Type, bool]:
        if not isinstance(node, dict):
            raise _refusal(where, "it must say its type")
        if "$ref" in node:
            return self._referred(node["$ref"], where, within)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in node:
                return self._one_of(node[word], word, where, within)
        kinds, is_nullable = _types(node, where)
        if len(kinds) != 1:
            raise _refusal(
                where, f"it has the types {', '.join(sorted(kinds)) or 'null'}: a column has one"
            )
        (kind,) = kinds
        if kind == "array":
            item, is_item_nullable = self.type_of(node.get("items"), f"{where}[]", within)
            return ListOf(item, is_item_nullable), is_nullable
        if kind == "object":
            return self._object(node, where, within), is_nullable
        if kind == "string" and node.get("contentEncoding") == "base64":
            return Scalar.BYTES, is_nullable
        return _PLAIN.get((kind, str(node.get("format", "")))) or _PLAIN[kind, ""], is_nullable

    def _object(self, node: Mapping[str, Any], where: str, within: tuple[str, ...]) -> Type:
        properties = node.get("properties")
        if properties:
            if not isinstance(properties, dict):
                raise _refusal(where, "its properties are not an object")
            required = node.get("required", [])
            if not isinstance(required, list):
                raise _refusal(where, "required is not a list")
            fields = []
            for name, each in properties.items():
                kind, is_nullable = self.type_of(each, f"{where}.{name}" if where else name, within)
                fields.append(Field(field_name(name), kind, name in required, is_nullable))
            return Struct(tuple(fields))
        if isinstance(node.get("additionalProperties"), dict):
            value, is_value_nullable = self.type_of(
                node["additionalProperties"], f"{where}{{}}", within
            )
            return MapOf(value, is_value_nullable)
        raise _refusal(where, "an object needs properties, or additionalProperties with a type")

    def _referred(self, reference: Any, where: str, within: tuple[str, ...]) -> tuple[Type, bool]:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise _refusal(
                where, f"$ref {reference!r} is not within the schema: copy it into $defs"
            )
        if reference in within:
            raise _refusal(where, f"it contains itself by $ref {reference}: a column cannot")
        found: Any = self.document
        for part in reference.removeprefix("#").split("/")[1:]:
            found = (
                found.get(part.replace("~1", "/").replace("~0", "~"))
                if isinstance(found, dict)
                else None
            )
        if found is None:
            raise _refusal(where, f"$ref {reference} leads nowhere")
        return self.type_of(found, where, (*within, reference))

    def _one_of(
        self, parts: Any, word: str, where: str, within: tuple[str, ...]
    ) -> tuple[Type, bool]:
        if not isinstance(parts, list):
            raise _refusal(where, f"{word} is not a list")
        real = [
            each for each in parts if not (isinstance(each, dict) and each.get("type") == "null")
        ]
        if len(real) != 1:
            raise _refusal(
                where, f"{word} has {len(real)} types: a column has one, and null besides"
            )
        kind, is_nullable = self.type_of(real[0], where, within)
        return kind, is_nullable or len(real) < len(parts)


def _types(node: Mapping[str, Any], where: str) -> tuple[set[str], bool]:
    """The JSON types that a node allows, without null; whether null is among them."""
    told = node.get("type")
    if told is None and ("enum" in node or "const" in node):
        values = node["enum"] if isinstance(node.get("enum"), list) else [node.get("const")]
        kinds = {_JSON_TYPES.get(type(each), "object") for each in values}
    elif told is None and "properties" in node:
        kinds = {"object"}
    else:
        kinds = {str(each) for each in (told if isinstance(told, list) else [told])}
    if not kinds <= {"boolean", "integer", "number", "string", "array", "object", "null"}:
        extra = ", ".join(sorted(set(node) - _NOTES)) or "nothing"
        raise _refusal(where, f"it must say its type, and says {extra}")
    return kinds - {"null"}, "null" in kinds


def _refusal(where: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"JSON Schema, {f'field {where!r}' if where else 'at the top'}: {why}")
