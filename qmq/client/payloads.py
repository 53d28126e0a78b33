"""What an application works with, and the bytes that a message carries: encoding, decoding, and which codec a type has. Pure.

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
* What a type's codec is, is decided once (`codec_of`), not for each message: a type that has none is an error then.
* Bytes stay bytes on both sides: who encodes for himself pays nothing here.
* JSON needs msgspec (the extra `typed`), a pydantic model only pydantic; neither is imported before it is needed.
* Whatever a decoder raises becomes Undecodable, with its words: a body that does not decode today does not decode tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_origin

from qmq.errors import InvalidArgument

Decode = Callable[[bytes], Any]

_T = TypeVar("_T")


class Undecodable(Exception):
    """A body is not what its handler takes. Says what the decoder found."""


class UndecodableBody(Undecodable):
    """That of the message itself: its handler never began."""


def encode(value: object) -> bytes:
    """A message's body for a value: bytes as they are, a str as UTF-8, everything else as JSON. Raises InvalidArgument."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _utf8(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if value is None:
        raise InvalidArgument("None is nothing: a body is bytes, b'' for an empty one, or what can be written as JSON")
    if _is_pydantic(type(value)):
        return _encode_pydantic(value)
    try:
        return bytes(_msgspec().json.encode(value, enc_hook=_model_within))
    except (TypeError, ValueError, OverflowError, RecursionError) as failure:
        raise InvalidArgument(
            f"a body is bytes, a str, or what can be written as JSON; this {type(value).__name__} cannot: {failure}"
        ) from failure


def decode(body: bytes, kind: type[_T]) -> _T:
    """A body as a value of the type. Raises Undecodable; InvalidArgument if the type is none of a payload."""
    found: _T = checked(codec_of(kind), body)
    return found


def checked(decoder: Decode, body: bytes) -> Any:
    """What the decoder makes of the body. Raises Undecodable."""
    try:
        return decoder(body)
    except Exception as failure:
        raise Undecodable(f"{type(failure).__name__}: {failure}") from failure


def codec_of(kind: Any) -> Decode:
    """What decodes bodies to this type. Raises InvalidArgument if it is no type of a payload, or if its library is not there."""
    if kind is bytes:
        return _same
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
        raise InvalidArgument(f"{_spoken(kind)} cannot be read from JSON: {failure}") from failure
    words = ", ".join(sorted(map(_spoken, strangers)))
    raise InvalidArgument(
        f"{words} is no type of a payload: take bytes, str, qmq.Message, a dataclass, a pydantic model, a msgspec.Struct or a type of JSON"
    )


def _same(body: bytes) -> bytes:
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
    """A model inside a list, say."""
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
        raise InvalidArgument("JSON payloads need msgspec: install qmq[typed], or send and take bytes") from None
    return msgspec


def _strangers(msgspec: Any, kind: Any, seen: set[int]) -> Iterator[Any]:
    """The classes within a type that JSON knows nothing of. Types may contain each other, so each is looked at once."""
    if id(kind) in seen:
        return
    seen.add(id(kind))
    if isinstance(kind, msgspec.inspect.CustomType) and kind.cls is not object:
        yield kind.cls
    for part in _parts(kind):
        yield from _strangers(msgspec, part, seen)


def _parts(kind: Any) -> Iterator[Any]:
    """The types that a type is made of, as msgspec describes them."""
    for field in getattr(kind, "fields", ()):
        yield field.type
    for name in ("item_type", "key_type", "value_type"):
        if (part := getattr(kind, name, None)) is not None:
            yield part
    yield from getattr(kind, "item_types", ())
    yield from getattr(kind, "types", ())


def _spoken(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
