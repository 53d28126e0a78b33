"""The form of small files and objects that are written whole: magic bytes, u32 CRC-32C of the payload, the payload."""

from __future__ import annotations

from struct import Struct
from typing import Final

from google_crc32c import value as crc32c

_CHECKSUM: Final = Struct("<I")


def with_checksum(magic: bytes, payload: bytes) -> bytes:
    """The payload behind its magic bytes and its checksum."""
    return magic + _CHECKSUM.pack(crc32c(payload)) + payload


def checked_payload(magic: bytes, data: bytes) -> bytes | None:
    """The payload; None if the magic bytes or the checksum are wrong, or there is no payload."""
    head_bytes = len(magic) + _CHECKSUM.size
    if not data.startswith(magic) or len(data) <= head_bytes:
        return None
    payload = data[head_bytes:]
    return payload if _CHECKSUM.unpack_from(data, len(magic))[0] == crc32c(payload) else None
