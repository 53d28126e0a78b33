"""The format of small files and objects that are written whole: magic bytes, u32 CRC-32C of the payload, the payload."""

from __future__ import annotations

from struct import Struct
from typing import Any, Final, TypeVar

import msgspec
from google_crc32c import value as crc32c

_T = TypeVar("_T")

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for bytes that are not the expected MessagePack; RecursionError for arrays in arrays in arrays."""
_CHECKSUM: Final = Struct("<I")


def with_checksum(magic: bytes, payload: bytes) -> bytes:
    """Put magic bytes and a checksum in front of the payload."""
    return magic + _CHECKSUM.pack(crc32c(payload)) + payload


def checked_payload(magic: bytes, data: bytes) -> bytes | None:
    """The payload; None if the magic bytes or the checksum are wrong, or there is no payload."""
    head_bytes = len(magic) + _CHECKSUM.size
    if not data.startswith(magic) or len(data) <= head_bytes:
        return None
    payload = data[head_bytes:]
    return payload if _CHECKSUM.unpack_from(data, len(magic))[0] == crc32c(payload) else None


def versioned_content(payload: bytes, version: int, kind: type[_T]) -> _T | None:
    """The content after a version number; None for another version. Raises ValueError if the content is not of `kind`."""
    try:
        found, *content = msgspec.msgpack.decode(payload, type=list[Any])
        return msgspec.convert(content, kind) if found == version else None
    except UNREADABLE as cause:
        raise ValueError(str(cause)) from cause
