"""Which schema may follow which."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qmq.errors import IncompatibleSchema
from qmq.schemas.declared_schema import Compatibility, DeclaredSchema, SchemaFormat, require

STRING = {"type": "string"}
NULLABLE = {"type": ["string", "null"]}
INT = {"type": "integer", "format": "int32"}
LONG = {"type": "integer"}
FLOAT = {"type": "number", "format": "float"}
DOUBLE = {"type": "number"}


def schema(
    properties: dict[str, Any],
    required: tuple[str, ...] = (),
    mode: Compatibility = Compatibility.BACKWARD,
) -> DeclaredSchema:
    text = json.dumps({"type": "object", "properties": properties, "required": required})
    return DeclaredSchema(SchemaFormat.JSON_SCHEMA, text, mode, version=1)


def refusals(old: tuple[Any, ...], new: tuple[Any, ...]) -> dict[Compatibility, str]:
    """For each mode, why `new` may not follow `old`; nothing if it may."""
    found = {}
    for mode in Compatibility:
        try:
            require("orders", schema(*old), schema(*new, mode=mode))
        except IncompatibleSchema as failure:
            found[mode] = str(failure)
    return found


B, F = Compatibility.BACKWARD, Compatibility.FORWARD


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        (({"a": STRING},), ({"a": STRING, "b": STRING},), ""),
        (({"a": STRING, "b": STRING},), ({"a": STRING},), ""),
        (({"a": STRING},), ({"a": STRING, "b": STRING}, ("b",)), "backward"),
        (({"a": STRING, "b": STRING}, ("b",)), ({"a": STRING},), "forward"),
        (({"a": STRING},), ({"a": STRING}, ("a",)), "backward"),
        (({"a": STRING}, ("a",)), ({"a": STRING},), "forward"),
        (({"a": NULLABLE}, ("a",)), ({"a": STRING}, ("a",)), "backward"),
        (({"a": INT},), ({"a": LONG},), "forward"),
        (({"a": LONG},), ({"a": INT},), "backward"),
        (({"a": FLOAT},), ({"a": DOUBLE},), "forward"),
        (({"a": LONG},), ({"a": DOUBLE},), "backward, forward"),
        (({"a": STRING},), ({"a": LONG},), "backward, forward"),
        (
            ({"a": {"type": "array", "items": INT}},),
            ({"a": {"type": "array", "items": LONG}},),
            "forward",
        ),
        (
            ({"a": {"type": "array", "items": NULLABLE}},),
            ({"a": {"type": "array", "items": STRING}},),
            "backward",
        ),
        (
            ({"a": {"properties": {"b": INT}}},),
            ({"a": {"properties": {"b": STRING}}},),
            "backward, forward",
        ),
    ],
)
def test_a_version_is_refused_where_its_bodies_or_its_readers_break(
    old: tuple[Any, ...], new: tuple[Any, ...], refused: str
) -> None:
    found = refusals(old, new)
    assert ", ".join(each.value for each in (B, F) if each in found) == refused
    assert (Compatibility.FULL in found) is bool(refused)
    assert Compatibility.NONE not in found


def test_the_error_names_the_field_and_says_what_to_do() -> None:
    inner = {"a": {"properties": {"b": INT}}}
    assert (
        "field 'a.b' changes from int to string: give the field another name"
        in refusals((inner,), ({"a": {"properties": {"b": STRING}}},))[B]
    )
    assert (
        "field 'b' is new and required: make it optional"
        in refusals(({"a": STRING},), ({"a": STRING, "b": STRING}, ("b",)))[B]
    )
    assert (
        "field 'a' becomes required: leave it optional"
        in refusals(({"a": STRING},), ({"a": STRING}, ("a",)))[B]
    )
    assert (
        "field 'b' is required before and gone: keep it"
        in refusals(({"a": STRING, "b": STRING}, ("b",)), ({"a": STRING},))[F]
    )


def test_the_format_stays_unless_compatibility_is_given_up() -> None:
    avro = json.dumps(
        {"type": "record", "name": "R", "fields": [{"name": "a", "type": "string", "default": ""}]}
    )
    with pytest.raises(IncompatibleSchema, match="cannot be replaced by avro"):
        require("orders", schema({"a": STRING}), DeclaredSchema(SchemaFormat.AVRO, avro))
    require(
        "orders", schema({"a": STRING}), DeclaredSchema(SchemaFormat.AVRO, avro, Compatibility.NONE)
    )
