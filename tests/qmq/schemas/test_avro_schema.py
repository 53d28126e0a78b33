"""How Avro schemas are translated, and which of them are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qmq.errors import InvalidArgument
from qmq.schemas.avro_schema import parse
from qmq.schemas.field_types import Field, ListOf, MapOf, Scalar, Struct


def of(kind: Any, **more: Any) -> Struct:
    return parse(
        json.dumps({"type": "record", "name": "R", "fields": [{"name": "a", "type": kind, **more}]})
    )


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        ("int", Scalar.INT),
        ("long", Scalar.LONG),
        ("float", Scalar.FLOAT),
        ("double", Scalar.DOUBLE),
        ("string", Scalar.STRING),
        ("bytes", Scalar.BYTES),
        ({"type": "int", "logicalType": "date"}, Scalar.DATE),
        ({"type": "long", "logicalType": "timestamp-micros"}, Scalar.TIMESTAMP),
        ({"type": "string", "logicalType": "uuid"}, Scalar.STRING),
        ({"type": "enum", "name": "E", "symbols": ["X"]}, Scalar.STRING),
        ({"type": "fixed", "name": "F", "size": 4}, Scalar.BYTES),
        ({"type": "array", "items": "string"}, ListOf(Scalar.STRING)),
        ({"type": "map", "values": ["null", "int"]}, MapOf(Scalar.INT, is_value_nullable=True)),
    ],
)
def test_each_type_has_its_column(node: Any, kind: object) -> None:
    assert of(node) == Struct((Field("a", kind, is_required=True),))  # type: ignore[arg-type]


def test_a_field_with_a_default_is_not_required() -> None:
    assert of(["null", "string"], default=None) == Struct(
        (Field("a", Scalar.STRING, is_nullable=True),)
    )


def test_a_named_type_is_used_again_by_its_name() -> None:
    money = {
        "type": "record",
        "name": "Money",
        "namespace": "shop",
        "fields": [{"name": "cents", "type": "long"}],
    }
    fields = [
        {"name": "a", "type": money},
        {"name": "b", "type": "Money"},
        {"name": "c", "type": "shop.Money"},
    ]
    found = parse(json.dumps({"type": "record", "name": "R", "fields": fields}))
    assert {each.type for each in found.fields} == {
        Struct((Field("cents", Scalar.LONG, is_required=True),))
    }


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (["string", "int"], "field 'a': the union has 2 types"),
        ("R", "record R contains itself"),
        ("No", "there is no type 'No'"),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 4},
            "the logical type decimal has no column type here",
        ),
        ({"type": "record", "name": "S", "fields": []}, "a record needs fields"),
    ],
)
def test_what_has_no_column_is_refused_with_the_fields_name(node: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        of(node)


@pytest.mark.parametrize("text", ["{", '"string"', "[]", '{"type": "map", "values": "int"}'])
def test_an_invalid_record_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(text)
