"""A sealed segment as objects: its chunks, their names, and the manifest, which is put after all chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
from google_crc32c import extend

from qmq.limits import MIB
from qmq.log.segment_index import checked_payload, versioned_content, with_checksum

CHUNK_BYTES: Final = 8 * MIB
_MAGIC: Final = b"QMG1"
_VERSION: Final = 1


class BadManifest(Exception):
    """An object with a manifest's name is not a manifest that this version can read."""


@dataclass(frozen=True, slots=True, order=True)
class SealedSegment:
    """A segment of the message log that has a successor."""

    base: int
    size: int

    @property
    def end(self) -> int:
        """The position after the segment's last byte."""
        return self.base + self.size

    def chunk_count(self, chunk_bytes: int = CHUNK_BYTES) -> int:
        """The number of chunks."""
        return -(-self.size // chunk_bytes)


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """Names of one broker group's objects."""

    group: str

    @property
    def owner(self) -> str:
        """The name of the object that says whose objects these are."""
        return f"{self.group}/owner"

    def chunk(self, segment: SealedSegment, number: int) -> str:
        """The name of a chunk; numbers begin at 0."""
        return f"{self.group}/message/{segment.base:020d}/{number:06d}"

    def manifest(self, segment: SealedSegment) -> str:
        """The name of the manifest."""
        return f"{self.group}/message/{segment.base:020d}/manifest"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a stored segment: its base, size in bytes and the checksums of its chunks."""

    segment: SealedSegment
    chunk_bytes: int
    checksums: tuple[int, ...]
    """CRC-32C of each chunk."""

    def encode(self) -> bytes:
        """The manifest as the bytes of its object."""
        segment = self.segment
        payload = msgspec.msgpack.encode([_VERSION, segment.base, segment.size, self.chunk_bytes, self.checksums])
        return with_checksum(_MAGIC, payload)


def decode_manifest(data: bytes) -> Manifest:
    """Raises BadManifest."""
    payload = checked_payload(_MAGIC, data)
    if payload is None:
        raise BadManifest("it is damaged, or something else")
    try:
        content = versioned_content(payload, _VERSION, tuple[int, int, int, tuple[int, ...]])
    except ValueError as cause:
        raise BadManifest(f"it cannot be read ({cause})") from cause
    if content is None:
        raise BadManifest("it has another version: upgrade this replica")
    base, size, chunk_bytes, checksums = content
    return Manifest(SealedSegment(base, size), chunk_bytes, checksums)


class ChunkChecksums:
    """Computes the checksums of a segment's chunks from its bytes, which come in order and in pieces of any size."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._done: list[int] = []
        self._current = 0
        self._filled = 0

    def add(self, data: bytes) -> None:
        """Add the next bytes of the segment."""
        at = 0
        while at < len(data):
            piece = data[at : at + self._chunk_bytes - self._filled]
            self._current = extend(self._current, piece)
            self._filled += len(piece)
            at += len(piece)
            if self._filled == self._chunk_bytes:
                self._next_chunk()

    def _next_chunk(self) -> None:
        self._done.append(self._current)
        self._current = self._filled = 0

    def end(self) -> tuple[int, ...]:
        """The checksums of all chunks. Call this after the last bytes."""
        if self._filled:
            self._next_chunk()
        return tuple(self._done)
