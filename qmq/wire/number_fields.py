"""Checks numbers against the ranges of the protobuf fields that they go into. protobuf's own error
says neither which field nor which range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from qmq.errors import InvalidArgument

_M = TypeVar("_M", bound=Message)

_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def request_of(kind: type[_M], /, **fields: Any) -> _M:
    """A message with these fields. Raises InvalidArgument for a number that its field cannot
    hold.
    """
    check_numbers(kind, fields)
    return kind(**fields)


def check_numbers(kind: type[Message], fields: Mapping[str, Any]) -> None:
    """Check the numbers among the values of a message's fields, also those in lists and maps, and
    in mappings that stand for messages. Raises InvalidArgument, which names the field, or the key
    in a map.
    """
    _check_fields(kind.DESCRIPTOR, fields)


def _check_fields(kind: Any, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        field = kind.fields_by_name[name]
        inner = field.message_type
        if inner is None:
            if field.cpp_type in _RANGES and value is not None:
                for each in value if isinstance(value, Iterable) else (value,):
                    _check(name, each, field.cpp_type)
        elif inner.GetOptions().map_entry:
            values = inner.fields_by_name["value"].cpp_type
            if values in _RANGES:
                for key, each in value.items():
                    _check(key, each, values)
        else:
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, Mapping):
                    _check_fields(inner, each)


def _check(name: object, value: Any, cpp_type: int) -> None:
    least, most = _RANGES[cpp_type]
    try:
        fits = least <= index(value) <= most
    except TypeError:
        fits = False
    if not fits:
        raise InvalidArgument(f"{name} is a whole number from {least} to {most}, not {value!r}")
