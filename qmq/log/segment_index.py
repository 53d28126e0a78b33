"""A replica's index of a sealed segment in the object store: enough to read any byte of the
segment, and to verify the byte.

    message/BASE.stored    written, and synced, before the segment's file may be deleted; deleted
                           when retention ends the segment

Also the form of this and of other small files and objects that are written whole: magic bytes, u32
CRC-32C of the payload, the payload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, Final, TypeVar

import msgspec
from google_crc32c import value as crc32c

from qmq.log.disk import Disk

_T = TypeVar("_T")

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for bytes that are not the expected MessagePack; RecursionError
for arrays in arrays in arrays.
"""
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
    """The content after a version number; None for another version. Raises ValueError if the
    content is not of `kind`.
    """
    try:
        found, *content = msgspec.msgpack.decode(payload, type=list[Any])
        return msgspec.convert(content, kind) if found == version else None
    except UNREADABLE as cause:
        raise ValueError(str(cause)) from cause


SUFFIX: Final = ".stored"
_MAGIC: Final = b"QMX1"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """A segment in the object store."""

    base: int
    size: int
    chunk_bytes: int
    checksums: tuple[int, ...]
    """The CRC-32C of each chunk, as its bytes were in the local file."""
    head: bytes
    """The segment's first envelope, with the index, epoch and time of its beginning, which are thus
    known without the store.
    """

    @property
    def end(self) -> int:
        """The position after the last byte."""
        return self.base + self.size

    def chunk_size(self, number: int) -> int:
        """The size of every chunk but the last."""
        return min(self.chunk_bytes, self.size - number * self.chunk_bytes)

    def chunks_of(self, at: int, size: int) -> range:
        """The numbers of the chunks that have `size` bytes from byte `at` on."""
        return range(at // self.chunk_bytes, -(-min(at + size, self.size) // self.chunk_bytes))

    def is_chunk(self, number: int, data: bytes) -> bool:
        """True if the checksum of the bytes is the chunk's."""
        return len(data) == self.chunk_size(number) and crc32c(data) == self.checksums[number]

    def read(self, at: int, size: int, chunk: Callable[[int], bytes]) -> bytes:
        """Read `size` bytes from byte `at` on; fewer where the segment ends. `chunk` returns a
        chunk's bytes by its number.
        """
        pieces: list[bytes] = []
        for number in self.chunks_of(at, size):
            first = number * self.chunk_bytes
            pieces.append(chunk(number)[max(at - first, 0) : at + size - first])
        return b"".join(pieces)

    def encode(self) -> bytes:
        """The content of the index's file."""
        payload = msgspec.msgpack.encode(
            [_VERSION, self.base, self.size, self.chunk_bytes, self.checksums, self.head]
        )
        return with_checksum(_MAGIC, payload)


def index_name(base: int) -> str:
    """The name of the index's file, beside the segment's file."""
    return f"{base:020d}{SUFFIX}"


def decode_index(data: bytes) -> SegmentIndex | None:
    """Parse an index; None if the bytes are damaged or have another version."""
    payload = checked_payload(_MAGIC, data)
    if payload is None:
        return None
    try:
        content = versioned_content(payload, _VERSION, tuple[int, int, int, tuple[int, ...], bytes])
    except ValueError:
        return None
    return SegmentIndex(*content) if content is not None else None


def read_indexes(folder: Path, disk: Disk) -> dict[int, SegmentIndex]:
    """Read the indexes in a log's folder, by base. A damaged index is left out: it is made again if
    the segment's file exists.
    """
    found = [decode_index(disk.read_file(path)) for path in folder.glob(f"*{SUFFIX}")]
    return {each.base: each for each in found if each is not None}
