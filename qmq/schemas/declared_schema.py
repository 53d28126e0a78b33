"""A declared schema as fields, and whether a new version of one may follow an old one. Pure.

A reader's schema reads bodies of a writer's schema if each field that it requires is always
written, nothing that it does not take as null is written as null, and types are equal or wider: int
to long, float to double. These are the changes that Iceberg makes to a column, so tables follow a
subject's schema. Fields that only one side has, and that are not required, do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.errors import IncompatibleSchema, InvalidArgument
from qmq.model import Compatibility, DeclaredSchema, SchemaFormat, utf8
from qmq.schemas import avro_schema, json_schema
from qmq.schemas.field_types import WIDER, Field, ListOf, MapOf, Scalar, Struct, Type, type_name

__all__ = ["Compatibility", "DeclaredSchema", "SchemaFormat", "require", "struct_of"]

TEXT_BYTES_MAX: Final = 256 << 10


def struct_of(schema: DeclaredSchema) -> Struct:
    """The fields. Raises InvalidArgument, which names the field that cannot be."""
    size = len(utf8("a schema", schema.text))
    if size > TEXT_BYTES_MAX:
        raise InvalidArgument(f"a schema has at most {TEXT_BYTES_MAX >> 10} KiB, not {size} bytes")
    if schema.format is SchemaFormat.JSON_SCHEMA:
        return json_schema.parse(schema.text)
    return avro_schema.parse(schema.text)


_DIRECTIONS: Final = {
    Compatibility.BACKWARD: ("backward",),
    Compatibility.FORWARD: ("forward",),
    Compatibility.FULL: ("backward", "forward"),
    Compatibility.NONE: (),
}


def require(subject: str, old: DeclaredSchema, new: DeclaredSchema) -> None:
    """Raises IncompatibleSchema, which names the fields; InvalidArgument."""
    for direction in _DIRECTIONS[new.compatibility]:
        is_backward = direction == "backward"
        if old.format is not new.format:
            raise IncompatibleSchema(
                f"the schema of {subject!r} is {old.format.value} (version {old.version}), "
                f"and cannot be replaced by {new.format.value}: choose another subject, "
                "or set the new schema with --compatibility none"
            )
        reader, writer = (new, old) if is_backward else (old, new)
        wrong = list(_unreadable(struct_of(reader), struct_of(writer), "", is_backward))
        if wrong:
            who = (
                f"bodies of version {old.version} cannot be read by"
                if is_backward
                else f"readers of version {old.version} cannot read"
            )
            raise IncompatibleSchema(
                f"{who} the new schema of {subject!r} ({direction} compatibility): "
                f"{'; '.join(wrong)}; or set it with --compatibility none; "
                "then such bodies cannot be read"
            )


def _unreadable(reader: Struct, writer: Struct, where: str, is_backward: bool) -> Iterator[str]:
    for field in reader.fields:
        path = f"{where}{field.name}"
        written = writer.find(field.name)
        if written is None:
            if field.is_required:
                is_now = (
                    "new and required: make it optional"
                    if is_backward
                    else "required before and gone: keep it"
                )
                yield f"field {path!r} is {is_now}"
            continue
        yield from _unfit(field, written, path, is_backward)


def _unfit(field: Field, written: Field, path: str, is_backward: bool) -> Iterator[str]:
    if field.is_required and not written.is_required:
        change = (
            "becomes required: leave it optional"
            if is_backward
            else "becomes optional: leave it required"
        )
        yield f"field {path!r} {change}"
    elif written.is_nullable and not field.is_nullable and field.is_required:
        change = (
            "is no longer nullable: leave it nullable"
            if is_backward
            else "becomes nullable: leave it without null"
        )
        yield f"field {path!r} {change}"
    yield from _unfit_type(field.type, written.type, path, is_backward)


def _unfit_type(reader: Type, writer: Type, path: str, is_backward: bool) -> Iterator[str]:
    if isinstance(reader, Struct) and isinstance(writer, Struct):
        yield from _unreadable(reader, writer, f"{path}.", is_backward)
    elif isinstance(reader, ListOf) and isinstance(writer, ListOf):
        yield from _unfit_items(
            reader.item,
            writer.item,
            reader.is_item_nullable,
            writer.is_item_nullable,
            f"{path}[]",
            is_backward,
        )
    elif isinstance(reader, MapOf) and isinstance(writer, MapOf):
        yield from _unfit_items(
            reader.value,
            writer.value,
            reader.is_value_nullable,
            writer.is_value_nullable,
            f"{path}{{}}",
            is_backward,
        )
    elif reader != writer and not (isinstance(reader, Scalar) and (writer, reader) in WIDER):
        old, new = (writer, reader) if is_backward else (reader, writer)
        yield (
            f"field {path!r} changes from {type_name(old)} to {type_name(new)}: give the field "
            "another name"
        )


def _unfit_items(
    reader: Type, writer: Type, takes_null: bool, has_null: bool, path: str, is_backward: bool
) -> Iterator[str]:
    if has_null and not takes_null:
        yield (
            f"items of {path!r} {'are no longer nullable' if is_backward else 'become nullable'}: "
            "leave that as it was"
        )
    yield from _unfit_type(reader, writer, path, is_backward)
