"""Encodes values to the bodies of messages, decodes bodies, and chooses the codec of a type. Pure.

    type of the handler's first parameter              body
    bytes                                              untouched
    str                                                UTF-8
    a pydantic model or pydantic dataclass             JSON, by the model's own rules
    dataclass, msgspec.Struct, TypedDict, NamedTuple,
    dict, list, int, float, Decimal, datetime, UUID,   JSON, checked against the type
    Enum, a union of these, Any ...

    qmq.payload.encode(Order(7, "EUR"))                b'{"id":7,"currency":"EUR"}'
    qmq.payload.decode(body, Order)                    Order(id=7, currency='EUR')

Rules:
* The codec of a type is chosen once (`codec_of`), not for each message; a type without a codec is
  an error at that time.
* Bytes stay bytes on both sides, at no cost.
* JSON needs msgspec (the extra `typed`), a pydantic model only pydantic; neither is imported before
  it is needed.
* Any exception of a decoder becomes Undecodable, with its text: a body that cannot be decoded today
  cannot be decoded tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_origin

from qmq.errors import InvalidArgument

Decode = Callable[[bytes], Any]

_T = TypeVar("_T")


class Undecodable(Exception):
    """A body cannot be decoded to its handler's type. The message has the decoder's text."""


class UndecodableBody(Undecodable):
    """The body cannot be decoded, so the handler was not called."""


def encode(value: object) -> bytes:
    """A message's body: bytes unchanged, a str as UTF-8, every other value as JSON.
    Raises InvalidArgument.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _utf8(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if value is None:
        raise InvalidArgument(
            "a body cannot be None: give bytes (b'' for an empty body), or a value that can "
            "be written as JSON"
        )
    if _is_pydantic(type(value)):
        return _encode_pydantic(value)
    try:
        return bytes(_msgspec().json.encode(value, enc_hook=_model_within))
    except (TypeError, ValueError, OverflowError, RecursionError) as failure:
        raise InvalidArgument(
            "a body is bytes, a str, or a value that can be written as JSON; this "
            f"{type(value).__name__} cannot: {failure}"
        ) from failure


def decode(body: bytes, kind: type[_T]) -> _T:
    """Decode a body to a type. Raises Undecodable; InvalidArgument if the type has no codec."""
    found: _T = checked(codec_of(kind), body)
    return found


def checked(decoder: Decode, body: bytes) -> Any:
    """The decoder's result. Raises Undecodable."""
    try:
        return decoder(body)
    except Exception as failure:
        raise Undecodable(f"{type(failure).__name__}: {failure}") from failure


def codec_of(kind: Any) -> Decode:
    """The decoder for a type. Raises InvalidArgument if the type has no codec,
    or its library is missing.
    """
    if kind is bytes:
        return same
    if kind is str:
        return bytes.decode
    if isinstance(kind, type) and hasattr(kind, "model_validate_json"):
        found: Decode = kind.model_validate_json
        return found
    if _is_pydantic(kind):
        return _pydantic_decoder(kind)
    msgspec = _msgspec()
    try:
        strangers = set(_strangers(msgspec, msgspec.inspect.type_info(kind), set()))
        if any(map(_is_pydantic, strangers)):
            return _pydantic_decoder(kind)
        if not strangers:
            decoder: Decode = msgspec.json.Decoder(kind).decode
            return decoder
    except (TypeError, NameError) as failure:
        raise InvalidArgument(
            f"{_type_name(kind)} cannot be read from JSON: {failure}"
        ) from failure
    words = ", ".join(sorted(map(_type_name, strangers)))
    raise InvalidArgument(
        f"{words} is not a payload type: use bytes, str, qmq.Message, a dataclass, a "
        "pydantic model, a msgspec.Struct or a type of JSON"
    )


def same(body: bytes) -> bytes:
    """The decoder for bytes."""
    return body


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as failure:
        raise InvalidArgument(f"this str cannot be sent as UTF-8: {failure}") from failure


def _is_pydantic(kind: Any) -> bool:
    return hasattr(get_origin(kind) or kind, "__pydantic_validator__")


def _encode_pydantic(value: Any) -> bytes:
    if hasattr(value, "model_dump_json"):
        return str(value.model_dump_json(by_alias=True)).encode()
    import pydantic

    return pydantic.TypeAdapter(type(value)).dump_json(value, by_alias=True)


def _model_within(value: Any) -> Any:
    """A pydantic model inside another type, such as a list; None if there is none."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"no JSON for objects of type {type(value).__name__}")


def _pydantic_decoder(kind: Any) -> Decode:
    import pydantic

    return pydantic.TypeAdapter(kind).validate_json


def _msgspec() -> Any:
    try:
        import msgspec
        import msgspec.inspect
    except ImportError:
        raise InvalidArgument(
            "JSON payloads need msgspec: pip install 'qmq[typed]', or use bytes"
        ) from None
    return msgspec


def _strangers(msgspec: Any, kind: Any, seen: set[int]) -> Iterator[Any]:
    """The classes within a type that msgspec does not know. Types may be recursive, so each is
    checked once.
    """
    if id(kind) in seen:
        return
    seen.add(id(kind))
    if isinstance(kind, msgspec.inspect.CustomType) and kind.cls is not object:
        yield kind.cls
    for part in _parts(kind):
        yield from _strangers(msgspec, part, seen)


def _parts(kind: Any) -> Iterator[Any]:
    """The component types of a type, as msgspec describes it."""
    for field in getattr(kind, "fields", ()):
        yield field.type
    for name in ("item_type", "key_type", "value_type"):
        if (part := getattr(kind, name, None)) is not None:
            yield part
    yield from getattr(kind, "item_types", ())
    yield from getattr(kind, "types", ())


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
