"""Whether a new version of a schema may follow an old one. Pure.

A reader's schema reads bodies of a writer's schema if each field that it requires is always written, nothing that it does not take as null
is written as null, and types are equal or wider: int to long, float to double. These are the changes that Iceberg makes to a column, so
tables follow a subject's schema. Fields that only one side has, and that are not required, do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.errors import IncompatibleSchema
from qmq.schemas.declared_schema import Compatibility, DeclaredSchema
from qmq.schemas.field_types import WIDER, Field, ListOf, MapOf, Scalar, Struct, Type, spoken

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
                f"the schema of {subject!r} is {old.format.value} (version {old.version}), and cannot be replaced by {new.format.value}: "
                "choose another subject, or set the new schema with --compatibility none"
            )
        reader, writer = (new, old) if is_backward else (old, new)
        wrong = list(_unreadable(reader.struct(), writer.struct(), "", is_backward))
        if wrong:
            who = f"bodies of version {old.version} cannot be read by" if is_backward else f"readers of version {old.version} cannot read"
            raise IncompatibleSchema(
                f"{who} the new schema of {subject!r} ({direction} compatibility): {'; '.join(wrong)}; "
                "or set it with --compatibility none; then such bodies cannot be read"
            )


def _unreadable(reader: Struct, writer: Struct, where: str, is_backward: bool) -> Iterator[str]:
    for field in reader.fields:
        path = f"{where}{field.name}"
        written = writer.find(field.name)
        if written is None:
            if field.is_required:
                is_now = "new and required: make it optional" if is_backward else "required before and gone: keep it"
                yield f"field {path!r} is {is_now}"
            continue
        yield from _unfit(field, written, path, is_backward)


def _unfit(field: Field, written: Field, path: str, is_backward: bool) -> Iterator[str]:
    if field.is_required and not written.is_required:
        yield f"field {path!r} {'becomes required: leave it optional' if is_backward else 'becomes optional: leave it required'}"
    elif written.is_nullable and not field.is_nullable and field.is_required:
        yield f"field {path!r} {'is no longer nullable: leave it nullable' if is_backward else 'becomes nullable: leave it without null'}"
    yield from _unfit_type(field.type, written.type, path, is_backward)


def _unfit_type(reader: Type, writer: Type, path: str, is_backward: bool) -> Iterator[str]:
    if isinstance(reader, Struct) and isinstance(writer, Struct):
        yield from _unreadable(reader, writer, f"{path}.", is_backward)
    elif isinstance(reader, ListOf) and isinstance(writer, ListOf):
        yield from _unfit_items(reader.item, writer.item, reader.is_item_nullable, writer.is_item_nullable, f"{path}[]", is_backward)
    elif isinstance(reader, MapOf) and isinstance(writer, MapOf):
        yield from _unfit_items(reader.value, writer.value, reader.is_value_nullable, writer.is_value_nullable, f"{path}{{}}", is_backward)
    elif reader != writer and not (isinstance(reader, Scalar) and (writer, reader) in WIDER):
        old, new = (writer, reader) if is_backward else (reader, writer)
        yield f"field {path!r} changes from {spoken(old)} to {spoken(new)}: give the field another name"


def _unfit_items(reader: Type, writer: Type, takes_null: bool, has_null: bool, path: str, is_backward: bool) -> Iterator[str]:
    if has_null and not takes_null:
        yield f"items of {path!r} {'are no longer nullable' if is_backward else 'become nullable'}: leave that as it was"
    yield from _unfit_type(reader, writer, path, is_backward)
