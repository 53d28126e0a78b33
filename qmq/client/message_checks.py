"""Checks of what an application sends, made before anything else, so that the error is raised at the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized

from qmq import headers as system
from qmq import limits
from qmq.batch_columns import Columns
from qmq.errors import InvalidArgument, MessageTooLarge


def body_bytes(body: object, body_bytes_max: int) -> bytes:
    """The body as bytes. Raises InvalidArgument, MessageTooLarge."""
    if isinstance(body, bytearray | memoryview):
        body = bytes(body)
    if not isinstance(body, bytes):
        raise InvalidArgument(f"a body is bytes, not {type(body).__name__}: encode it first")
    if len(body) > body_bytes_max:
        raise too_large(len(body), body_bytes_max)
    return body


def too_large(size: int, most: int) -> MessageTooLarge:
    """The error for a body over the limit."""
    return MessageTooLarge(f"a body of {size} bytes exceeds the limit of {most}: send a reference to the content instead")


def key_bytes(key: object) -> bytes:
    """The key as bytes; "" and None mean no key. Raises InvalidArgument, MessageTooLarge."""
    if key is None:
        return b""
    if isinstance(key, str):
        key = utf8("a key", key)
    if not isinstance(key, bytes):
        raise InvalidArgument(f"a key is str or bytes, not {type(key).__name__}")
    if len(key) > limits.KEY_BYTES_MAX:
        raise MessageTooLarge(f"a key of {len(key)} bytes; the limit is {limits.KEY_BYTES_MAX}")
    return key


def utf8(what: str, text: str) -> bytes:
    """The text as UTF-8. Raises InvalidArgument."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} holds half of a surrogate pair, which is no character: {text!r}") from None


def texts(name: str, values: object) -> tuple[str, ...]:
    """The values of an argument that takes several texts; None means none. One text instead of a list would be taken for the list of its
    letters. Raises InvalidArgument.
    """
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        hint = f": write [{values!r}]" if isinstance(values, str) else ""
        raise InvalidArgument(f"{name} are a list of str, not {type(values).__name__}{hint}")
    found = tuple(values)
    for each in found:
        if not isinstance(each, str):
            raise InvalidArgument(f"{name} are a list of str, and {each!r} is none")
        utf8(name, each)
    return found


def tag_tuple(tags: object) -> tuple[str, ...]:
    """The tags of one message. Raises InvalidArgument."""
    if tags is None:
        return ()
    found = texts("tags", tags)
    if len(found) > limits.TAGS_MAX:
        raise InvalidArgument(f"a message has at most {limits.TAGS_MAX} tags, not {len(found)}")
    for tag in found:
        if not 0 < len(tag.encode()) <= limits.TAG_BYTES_MAX:
            raise InvalidArgument(f"a tag is a str of 1 to {limits.TAG_BYTES_MAX} bytes, not of {len(tag.encode())}")
    return found


def header_map(headers: object) -> dict[str, bytes]:
    """The headers of one message. Raises InvalidArgument, MessageTooLarge."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise InvalidArgument(f"headers are a mapping of str to bytes or str, not {type(headers).__name__}")
    found: dict[str, bytes] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not name or not isinstance(value, str | bytes):
            raise InvalidArgument(f"a header is a str with bytes or str, not {name!r}: {value!r}")
        if name.startswith(system.PREFIX):
            raise InvalidArgument(f"the header {name!r}: names that begin with {system.PREFIX!r} are the system's own; choose another")
        found[name] = utf8("a header", value) if isinstance(value, str) else value
    size = sum(len(utf8("a header's name", name)) + len(value) for name, value in found.items())
    if size > limits.HEADER_BYTES_MAX:
        raise MessageTooLarge(f"headers of {size} bytes; the limit is {limits.HEADER_BYTES_MAX}")
    return found


def check_length(name: str, column: Sized | None, count: int) -> None:
    """Raises InvalidArgument if a column has not exactly one item for each of `count` messages."""
    if isinstance(column, str | bytes):
        raise InvalidArgument(f"{name} are a list with one item for each message, not {type(column).__name__}")
    if column is not None and len(column) != count:
        raise InvalidArgument(f"{count} bodies, but {len(column)} {name}: give one for each message")


def columns_of(bodies: Sequence[object], tags: Sequence[object] | None, headers: Sequence[object] | None, body_bytes_max: int) -> Columns:
    """The columns of many messages, without keys. Raises InvalidArgument, MessageTooLarge."""
    found = list(bodies)
    check_length("tags", tags, len(found))
    check_length("headers", headers, len(found))
    if found and (set(map(type, found)) != {bytes} or max(map(len, found)) > body_bytes_max):  # type: ignore[arg-type]
        found = [body_bytes(body, body_bytes_max) for body in found]
    return Columns(
        found,  # type: ignore[arg-type]
        None,
        [tag_tuple(each) for each in tags] if tags else None,
        [header_map(each) for each in headers] if headers else None,
    )
