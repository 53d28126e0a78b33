"""Bodies into values, and the reasons of those that do not fit."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime
from typing import Any

import fastavro
import msgspec
import pytest

from qmq.model import DeclaredSchema, SchemaFormat
from qmq.schemas.body_decoder import decoder_of


def json_decoder(properties: dict[str, Any], *required: str) -> Any:
    text = json.dumps({"type": "object", "properties": properties, "required": required})
    return decoder_of([DeclaredSchema(SchemaFormat.JSON_SCHEMA, text)])


def values(found: Any) -> tuple[Any, ...]:
    return msgspec.structs.astuple(found)


def test_a_body_becomes_its_fields_and_other_fields_are_left_out() -> None:
    decode = json_decoder(
        {
            "id": {"type": "integer"},
            "at": {"type": "string", "format": "date-time"},
            "class": {"type": "string"},
        },
        "id",
    )
    assert values(
        decode(b'{"id": 7, "at": "2026-11-27T00:00:00Z", "more": [1], "class": "x"}')
    ) == (7, datetime(2026, 11, 27, tzinfo=UTC), "x")
    assert values(decode(b'{"id": 7, "at": null}')) == (7, None, None)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "Input data was truncated"),
        (b"\xff", "malformed"),
        (b"{}", "missing required field `id`"),
        (b'{"id": "7"}', "Expected `int`, got `str` - at `..id`"),
        (b'{"id": 3000000000}', "Expected `int` <= 2147483647"),
        (b'{"id": 1, "big": 9223372036854775808}', "big"),
        (b'{"id": 1, "at": "2026-11-27T00:00:00"}', "timezone"),
        (b'{"id": 1}{"id": 2}', "trailing"),
        (b"[1]", "Expected `object`, got `array`"),
        (b'{"id": 1, "s": "\xff"}', "utf-8|UTF-8"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_with_the_reason(body: bytes, says: str) -> None:
    stamp = {"type": "string", "format": "date-time"}
    fields = {
        "id": {"type": "integer", "format": "int32"},
        "big": {"type": "integer"},
        "at": stamp,
        "s": {"type": "string"},
    }
    with pytest.raises(Exception, match=says):
        json_decoder(fields, "id")(body)


def avro(*fields: dict[str, Any]) -> DeclaredSchema:
    return DeclaredSchema(
        SchemaFormat.AVRO, json.dumps({"type": "record", "name": "Order", "fields": fields})
    )


def datum(schema: DeclaredSchema, value: Any, *, is_single: bool) -> bytes:
    parsed, stream = fastavro.parse_schema(json.loads(schema.text)), io.BytesIO()
    if is_single:
        print_ = fastavro.schema.fingerprint(
            fastavro.schema.to_parsing_canonical_form(parsed), "CRC-64-AVRO"
        )
        stream.write(b"\xc3\x01" + bytes.fromhex(print_))
    fastavro.schemaless_writer(stream, parsed, value)
    return stream.getvalue()


ID = {"name": "id", "type": "int"}
WIDE = {"name": "id", "type": "long"}
NOTE = {"name": "note", "type": ["null", "string"], "default": None}


def test_a_plain_datum_that_versions_read_differently_is_refused_and_not_swapped() -> None:
    amount, fee = {"name": "amount", "type": "int"}, {"name": "fee", "type": "int"}
    first, second = avro(amount, fee), avro(fee, amount)
    decode = decoder_of([first, second])
    for each in (first, second):
        assert values(decode(datum(each, {"amount": 100, "fee": 1}, is_single=True))) == (1, 100)
        with pytest.raises(ValueError, match="different values from this plain datum"):
            decode(datum(each, {"amount": 100, "fee": 1}, is_single=False))
        assert values(decode(datum(each, {"amount": 3, "fee": 3}, is_single=False))) == (3, 3)


def test_an_avro_body_is_read_by_the_version_that_wrote_it_and_shown_by_the_newest() -> None:
    first, second = avro(ID), avro(WIDE, NOTE)
    decode = decoder_of([first, second])
    assert values(decode(datum(first, {"id": 7}, is_single=True))) == (7, None)
    assert values(decode(datum(second, {"id": 1 << 40, "note": "x"}, is_single=True))) == (
        1 << 40,
        "x",
    )
    assert values(decode(datum(second, {"id": 8, "note": None}, is_single=False))) == (8, None)


def test_avro_values_of_logical_types_are_what_columns_hold() -> None:
    schema = avro(
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "on", "type": {"type": "int", "logicalType": "date"}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "raw", "type": "bytes"},
    )
    at, on = datetime(2026, 11, 27, 1, 2, 3, tzinfo=UTC), date(2026, 11, 27)
    body = datum(
        schema,
        {"at": at, "on": on, "id": "6ba7b810-9dad-11d1-80b4-00c04fd430c8", "raw": b"\x00"},
        is_single=True,
    )
    assert values(decoder_of([schema])(body)) == (
        at,
        on,
        "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
        b"\x00",
    )


@pytest.mark.parametrize("body", [b"", b"\x0e\x00\x00", b"\xff"])
def test_an_avro_body_that_does_not_fit_is_refused(body: bytes) -> None:
    with pytest.raises((EOFError, ValueError, IndexError)):
        decoder_of([avro(WIDE)])(body)
