"""Bodies into values, by a subject's schema. A value is a msgspec.Struct with one attribute for
each field, in the schema's order.

Null and a missing field are the same in a field that is not required. Fields that the schema does
not have are left out.

An Avro body is a single object as Avro's specification encodes it (its fingerprint names the
version that wrote it), or else a plain datum of the newest version. A plain datum does not say
which version wrote it: if an older version reads other values from it, as when two fields of one
type changed places, it is refused.
"""

from __future__ import annotations

import datetime
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import GenericAlias
from typing import Annotated, Any, Final

from qmq.errors import InvalidArgument
from qmq.model import DeclaredSchema, SchemaFormat
from qmq.schemas.declared_schema import struct_of
from qmq.schemas.field_types import ListOf, MapOf, Scalar, Struct, Type
from qmq.text import parse_json

Decode = Callable[[bytes], Any]
"""Raises any exception for a body that does not fit; its text says why."""

_SINGLE_OBJECT: Final = b"\xc3\x01"


def decoder_of(versions: Sequence[DeclaredSchema]) -> Decode:
    """The decoder by the newest version, the last one. Raises InvalidArgument if a library is
    missing, or a schema cannot be read.
    """
    newest = versions[-1]
    try:
        import msgspec
    except ImportError:
        raise InvalidArgument("schemas need msgspec: pip install 'qmq[typed]'") from None
    kind = _struct_type(struct_of(newest), "Body")
    if newest.format is SchemaFormat.JSON_SCHEMA:
        decode: Decode = msgspec.json.Decoder(kind).decode
        return decode
    return _avro(versions, kind)


def _struct_type(struct: Struct, name: str) -> Any:
    import msgspec

    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    renamed = {}
    for number, each in enumerate(struct.fields):
        attribute = f"field_{number}"
        renamed[attribute] = each.name
        kind = _python_type(each.type, f"{name}_{number}")
        if not each.is_required:
            fields.append((attribute, kind | None, None))
        else:
            fields.append((attribute, kind | None if each.is_nullable else kind))
    return msgspec.defstruct(name, fields, kw_only=True, rename=renamed, gc=False)


def _python_type(kind: Type, name: str) -> Any:
    import msgspec

    if isinstance(kind, Struct):
        return _struct_type(kind, name)
    if isinstance(kind, ListOf):
        item = _python_type(kind.item, name)
        return GenericAlias(list, (item | None if kind.is_item_nullable else item,))
    if isinstance(kind, MapOf):
        value = _python_type(kind.value, name)
        return GenericAlias(dict, (str, value | None if kind.is_value_nullable else value))
    plain: dict[Scalar, Any] = {
        Scalar.BOOLEAN: bool,
        Scalar.INT: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)],
        Scalar.LONG: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)],
        Scalar.FLOAT: float,
        Scalar.DOUBLE: float,
        Scalar.STRING: str,
        Scalar.BYTES: bytes,
        Scalar.DATE: datetime.date,
        Scalar.TIMESTAMP: Annotated[datetime.datetime, msgspec.Meta(tz=True)],
    }
    return plain[kind]


def _avro(versions: Sequence[DeclaredSchema], kind: Any) -> Decode:
    try:
        import fastavro
    except ImportError:
        raise InvalidArgument("Avro schemas need fastavro: pip install 'qmq[avro]'") from None
    import msgspec

    try:
        parsed = [
            fastavro.parse_schema(_without_uuid(parse_json(each.text)))
            for each in versions
            if each.format is SchemaFormat.AVRO
        ]
    except (
        Exception
    ) as cause:  # fastavro's parser raises anything for what Avro's specification does not have
        raise InvalidArgument(
            f"Avro's library cannot read the schema: {reason_of(cause)}"
        ) from None
    newest = parsed[-1]
    writers = {_fingerprint(each): each for each in parsed}
    older = [each for fingerprint, each in writers.items() if fingerprint != _fingerprint(newest)]

    def read(body: bytes, at: int, writer: Any) -> Any:
        stream = io.BytesIO(body)
        stream.seek(at)
        found = fastavro.schemaless_reader(stream, writer, newest)
        if stream.tell() != len(body):
            raise ValueError(f"{len(body) - stream.tell()} bytes follow the datum")
        return msgspec.convert(found, kind)

    def decode(body: bytes) -> Any:
        if body[:2] == _SINGLE_OBJECT and body[2:10] in writers:
            return read(body, 10, writers[body[2:10]])
        found = read(body, 0, newest)
        for writer in older:
            with suppress(Exception):
                if msgspec.msgpack.encode(read(body, 0, writer)) != msgspec.msgpack.encode(found):
                    break
        else:
            return found
        raise ValueError(
            "versions of the schema read different values from this plain datum: send Avro's "
            "single objects, which name theirs"
        )

    return decode


def _fingerprint(parsed: Any) -> bytes:
    """As the specification of Avro's single objects has it."""
    import fastavro.schema

    return bytes.fromhex(
        fastavro.schema.fingerprint(
            fastavro.schema.to_parsing_canonical_form(parsed), "CRC-64-AVRO"
        )
    )


def _without_uuid(node: Any) -> Any:
    """A schema by which a UUID is read as the string that it is."""
    if isinstance(node, list):
        return [_without_uuid(each) for each in node]
    if isinstance(node, dict):
        return {
            name: _without_uuid(each)
            for name, each in node.items()
            if not (name == "logicalType" and each == "uuid")
        }
    return node


def reason_of(failure: Exception) -> str:
    """Why a body does not fit, for people."""
    return f"{type(failure).__name__}: {failure}".removesuffix(": ")
