"""A sealed segment as objects: its chunks, their names, and the manifest, which is put after all
chunks.

The catalog tracks the segments that are in the object store or are being copied there, and decides
the next step. A segment enters the catalog before its first object is written and leaves it after
the last one is deleted, so everything in the store is in a catalog.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
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
        payload = msgspec.msgpack.encode(
            [_VERSION, segment.base, segment.size, self.chunk_bytes, self.checksums]
        )
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
    """Computes the checksums of a segment's chunks from its bytes, which come in order and in
    pieces of any size.
    """

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


_CATALOG_MAGIC: Final = b"QMT1"
_CATALOG_VERSION: Final = 1


class Task(Enum):
    """The next step for a segment."""

    COPY = "copy"
    """Copy it to the store, or find that it is there."""
    LOOK = "look"
    """Find out whether the master has copied it."""
    INDEX = "index"
    """Compare the file with what the store has, and write the index with which the segment is read
    without its file.
    """
    DELETE = "delete"
    """Delete its objects: retention has ended it."""
    FORGET = "forget"
    """Find out whether the master has deleted its objects."""


@dataclass(frozen=True, slots=True)
class CatalogStep:
    """The next thing to do."""

    task: Task
    segment: SealedSegment


@dataclass(frozen=True, slots=True)
class LogBounds:
    """The bounds of the log that the catalog needs."""

    start: int
    committed: int
    """Bytes before it will never be taken back."""
    local_start: int = 0
    """Segments before it have no file."""
    unindexed: Collection[int] = ()
    """Bases of segments that may be read without their file, once they have an index."""


class SegmentCatalog:
    """One replica's catalog."""

    def __init__(
        self, stored: Iterable[SealedSegment] = (), noted: Iterable[SealedSegment] = ()
    ) -> None:
        self._stored = {each.base: each for each in stored}
        """Read back from the store, or in a manifest there."""
        self._noted = {each.base: each for each in noted}
        """Perhaps in the store, whole or in part."""

    @property
    def stored(self) -> list[SealedSegment]:
        """The segments that are in the store, oldest first."""
        return sorted(self._stored.values())

    @property
    def noted(self) -> list[SealedSegment]:
        """The segments that may have some objects in the store, but are not known to be complete,
        oldest first.
        """
        return sorted(self._noted.values())

    def note(self, segments: Iterable[SealedSegment]) -> bool:
        """Add sealed segments. Returns True if some are new:
        save the catalog before one of them is copied.
        """
        new = {
            each.base: each
            for each in segments
            if each.base not in self._stored and each.base not in self._noted
        }
        self._noted.update(new)
        return bool(new)

    def is_stored(self, segment: SealedSegment) -> bool:
        return segment.base in self._stored

    def now_stored(self, segment: SealedSegment) -> None:
        """Record that the store has the segment:
        all of its bytes, or its manifest, were read back.
        """
        self._noted.pop(segment.base, None)
        self._stored[segment.base] = segment

    def now_gone(self, segment: SealedSegment) -> None:
        """Record that the store has no object of the segment any more."""
        self._noted.pop(segment.base, None)
        self._stored.pop(segment.base, None)

    def next_step(
        self, log: LogBounds, *, is_master: bool, waiting: Collection[int] = ()
    ) -> CatalogStep | None:
        """The next thing to do; deletions first, then the oldest segment. Segments whose bases are
        in `waiting` are skipped.
        """
        known = sorted([*self._stored.values(), *self._noted.values()])
        known = [each for each in known if each.base not in waiting]
        ended = next((each for each in known if each.end <= log.start), None)
        if ended is not None:
            return CatalogStep(Task.DELETE if is_master else Task.FORGET, ended)
        for segment in known:
            if segment.base in self._stored:
                if log.start <= segment.base and segment.base in log.unindexed:
                    return CatalogStep(Task.INDEX, segment)
            elif log.start < segment.end <= log.committed:
                return CatalogStep(
                    Task.COPY if is_master and segment.base >= log.local_start else Task.LOOK,
                    segment,
                )
        return None

    def encode(self) -> bytes:
        """The catalog as the bytes of its file."""
        lists = [[(each.base, each.size) for each in some] for some in (self.stored, self.noted)]
        payload = msgspec.msgpack.encode([_CATALOG_VERSION, *lists])
        return with_checksum(_CATALOG_MAGIC, payload)


def decode_catalog(data: bytes) -> SegmentCatalog | None:
    """Parse a catalog; None if the bytes are damaged or have another version. The catalog is then
    rebuilt from the segments on the disk and in the store.
    """
    payload = checked_payload(_CATALOG_MAGIC, data)
    if payload is None:
        return None
    try:
        lists = versioned_content(
            payload, _CATALOG_VERSION, tuple[list[tuple[int, int]], list[tuple[int, int]]]
        )
    except ValueError:
        return None
    if lists is None:
        return None
    stored, noted = ([SealedSegment(base, size) for base, size in each] for each in lists)
    return SegmentCatalog(stored, noted)
