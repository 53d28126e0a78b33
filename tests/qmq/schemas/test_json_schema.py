"""How JSON Schemas are translated, and which of them are refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from qmq.errors import InvalidArgument
from qmq.schemas.field_types import Field, ListOf, MapOf, Scalar, Struct
from qmq.schemas.json_schema import parse


class Item(msgspec.Struct):
    name: str
    count: int = 1


class Order(msgspec.Struct):
    id: int
    items: list[Item]
    note: str | None = None


class Body(msgspec.Struct):
    order: Order


def of(properties: dict[str, Any], **more: Any) -> Struct:
    return parse(json.dumps({"type": "object", "properties": properties, **more}))


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        ({"type": "boolean"}, Scalar.BOOLEAN),
        ({"type": "integer"}, Scalar.LONG),
        ({"type": "integer", "format": "int32"}, Scalar.INT),
        ({"type": "number"}, Scalar.DOUBLE),
        ({"type": "number", "format": "float"}, Scalar.FLOAT),
        ({"type": "string"}, Scalar.STRING),
        ({"type": "string", "format": "email"}, Scalar.STRING),
        ({"type": "string", "format": "date-time"}, Scalar.TIMESTAMP),
        ({"type": "string", "format": "date"}, Scalar.DATE),
        ({"type": "string", "contentEncoding": "base64"}, Scalar.BYTES),
        ({"enum": ["a", "b"]}, Scalar.STRING),
        ({"const": 7}, Scalar.LONG),
        ({"type": "array", "items": {"type": "string"}}, ListOf(Scalar.STRING)),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, MapOf(Scalar.LONG)),
        ({"properties": {"x": {"type": "number"}}}, Struct((Field("x", Scalar.DOUBLE),))),
    ],
)
def test_each_type_has_its_column(node: dict[str, Any], kind: object) -> None:
    assert of({"a": node}) == Struct((Field("a", kind),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "node",
    [
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"oneOf": [{"type": "null"}, {"type": "string"}]},
        {"enum": ["a", None]},
    ],
)
def test_null_beside_a_type_makes_the_field_nullable(node: dict[str, Any]) -> None:
    assert of({"a": node}, required=["a"]) == Struct(
        (Field("a", Scalar.STRING, is_required=True, is_nullable=True),)
    )


def test_references_within_the_schema_are_followed() -> None:
    found = of(
        {"a": {"$ref": "#/$defs/Money"}},
        **{"$defs": {"Money": {"properties": {"cents": {"type": "integer"}}}}},
    )
    assert found == Struct((Field("a", Struct((Field("cents", Scalar.LONG),))),))


def test_the_schema_of_a_python_type_can_be_declared() -> None:
    found = parse(json.dumps(msgspec.json.schema(Order)))
    item = Struct((Field("name", Scalar.STRING, is_required=True), Field("count", Scalar.LONG)))
    expected = (
        Field("id", Scalar.LONG, is_required=True),
        Field("items", ListOf(item), is_required=True),
    )
    assert found == Struct((*expected, Field("note", Scalar.STRING, is_nullable=True)))
    assert parse(json.dumps(msgspec.json.schema(Body))) == Struct(
        (Field("order", found, is_required=True),)
    )


@pytest.mark.parametrize(
    ("properties", "says"),
    [
        (
            {"a": {"type": ["string", "integer"]}},
            "field 'a': it has the types integer, string: a column has one",
        ),
        (
            {"a": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
            "field 'a': anyOf has 2 types",
        ),
        ({"a": {"properties": {"b": {}}}}, "field 'a.b': it must say its type"),
        ({"a": {"type": "array"}}, r"field 'a\[\]': it must say its type"),
        (
            {"a": {"type": "object"}},
            "field 'a': an object needs properties, or additionalProperties",
        ),
        ({"a": {"$ref": "#/$defs/No"}}, "leads nowhere"),
        ({"a": {"$ref": "https://example.com/x"}}, "is not within the schema: copy it"),
        ({"a": {"$ref": "#"}}, "contains itself"),
        ({"a": {"type": "null"}}, "has the types null"),
    ],
)
def test_what_has_no_column_is_refused_with_the_fields_name(
    properties: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        of(properties)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"type": "array", "items": {"type": "string"}}', "7", '{"type": "string"}']
)
def test_a_schema_that_describes_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(text)
