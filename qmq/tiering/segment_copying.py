"""Copies one sealed segment to the object store, and deletes one there. Runs in a thread; opens its own files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from google_crc32c import value as crc32c

from qmq.errors import CorruptBatch
from qmq.log.disk import Disk
from qmq.log.envelopes import walk_bytes
from qmq.log.segment_index import SegmentIndex
from qmq.log.segments import segment_name
from qmq.tiering.object_store import ObjectConflict, Objects, StoreAway, put_checked
from qmq.tiering.stored_segment import (
    CHUNK_BYTES,
    BadManifest,
    ChunkChecksums,
    Manifest,
    ObjectNames,
    SealedSegment,
    decode_manifest,
)
from qmq.wire.batch import ENVELOPE_BYTES


class SegmentConflict(Exception):
    """The store has other bytes under this segment's names: another log uses the prefix, or the store damaged them."""


class SegmentDamaged(Exception):
    """The local file differs from what the log wrote, so it is not copied."""


class Interrupted(Exception):
    """The broker stops; the copy continues after its next start."""


class SegmentCopying:
    """Works on the segments of one log's folder."""

    def __init__(
        self, objects: Objects, names: ObjectNames, disk: Disk, folder: Path, goes_on: Callable[[], bool], chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._objects = objects
        self._names = names
        self._disk = disk
        self._folder = folder
        self._goes_on = goes_on
        self._chunk_bytes = chunk_bytes

    def copy(self, segment: SealedSegment, read_back: set[int]) -> int:
        """Copy the segment to the store, unless the store has it already. Returns the number of bytes that were put.

        `read_back` are the numbers of chunks that were read back in an earlier try; those of this one are added. So a store that fails now
        and then gets the segment in the end.

        Raises FileNotFoundError: retention has deleted it. StoreAway, SegmentConflict, SegmentDamaged, Interrupted.
        """
        fd = self._disk.open_read(self._folder / segment_name(segment.base))
        try:
            manifest = self._described(fd, segment)
            if self._has_manifest(manifest):
                return 0
            put = 0
            for number in range(len(manifest.checksums)):
                if number not in read_back:
                    put += self._copy_chunk(fd, manifest, number)
                    read_back.add(number)
        finally:
            self._disk.close(fd)
        self._objects.create(self._names.manifest(segment), manifest.encode())
        if not self._has_manifest(manifest):
            raise StoreAway(f"the manifest of segment {segment.base} was put, but the object store does not return it")
        return put

    def _described(self, fd: int, segment: SealedSegment) -> Manifest:
        """The segment's manifest, computed from its file. Checks every entry of the file."""

        def read(position: int, size: int) -> bytes:
            return self._disk.read_around(fd, min(size, segment.end - position), position - segment.base)

        checksums, position = ChunkChecksums(self._chunk_bytes), segment.base
        try:
            for entry in walk_bytes(read, segment.base, lambda: segment.end):
                checksums.add(entry.head)
                checksums.add(entry.region)
                position = entry.end
                self._require_going_on()
        except CorruptBatch as cause:
            raise SegmentDamaged(f"the entry at {position} is damaged ({cause.message})") from cause
        return Manifest(segment, self._chunk_bytes, checksums.end())

    def _has_manifest(self, manifest: Manifest) -> bool:
        """Whether the store has this manifest. Raises SegmentConflict if it has another one."""
        found = self.manifest(manifest.segment)
        if found is not None and found != manifest:
            raise SegmentConflict(f"the store has another segment at {manifest.segment.base}, of {found.segment.size} bytes")
        return found is not None

    def _copy_chunk(self, fd: int, manifest: Manifest, number: int) -> int:
        """Put a chunk if it does not exist, and read it back. Returns the bytes that were put."""
        self._require_going_on()
        name = self._names.chunk(manifest.segment, number)
        at = number * self._chunk_bytes
        data = self._disk.read_around(fd, min(self._chunk_bytes, manifest.segment.size - at), at)
        if crc32c(data) != manifest.checksums[number]:
            raise SegmentDamaged(f"chunk {number} changed while it was read")
        try:
            is_new = put_checked(self._objects, name, data)
        except ObjectConflict as cause:
            raise SegmentConflict(f"{name} has other bytes than the log") from cause
        return len(data) if is_new else 0

    def _require_going_on(self) -> None:
        if not self._goes_on():
            raise Interrupted

    def manifest(self, segment: SealedSegment) -> Manifest | None:
        """The manifest that the store has under the segment's name. Raises StoreAway, SegmentConflict."""
        data = self._objects.get(self._names.manifest(segment))
        try:
            return None if data is None else decode_manifest(data)
        except BadManifest as cause:
            raise SegmentConflict(f"the manifest of segment {segment.base} cannot be read: {cause}") from cause

    def index(self, segment: SealedSegment) -> SegmentIndex | None:
        """The index that replaces the segment's file, if the store has the file's bytes; None if the store has no manifest.

        Raises FileNotFoundError: retention has deleted it. StoreAway, SegmentConflict, SegmentDamaged, Interrupted.
        """
        manifest = self.manifest(segment)
        if manifest is None:
            return None
        if manifest.segment != segment:
            raise SegmentConflict(f"the store has another segment at {segment.base}, of {manifest.segment.size} bytes")
        fd = self._disk.open_read(self._folder / segment_name(segment.base))
        try:
            index = SegmentIndex(
                segment.base, segment.size, manifest.chunk_bytes, manifest.checksums, self._disk.read_around(fd, ENVELOPE_BYTES, 0)
            )
            for number in range(len(index.checksums)):
                self._require_going_on()
                if not index.is_chunk(number, self._disk.read_around(fd, index.chunk_size(number), number * index.chunk_bytes)):
                    raise SegmentDamaged(f"chunk {number} of the file is not what the store has")
        finally:
            self._disk.close(fd)
        return index

    def delete(self, segment: SealedSegment) -> None:
        """Delete the segment's objects, the first chunk last. Raises StoreAway, Interrupted."""
        self._objects.delete(self._names.manifest(segment))
        for number in reversed(range(segment.chunk_count(self._chunk_bytes))):
            self._require_going_on()
            self._objects.delete(self._names.chunk(segment, number))

    def is_gone(self, segment: SealedSegment) -> bool:
        """Whether the store has no object of the segment, or only objects that a running deletion deletes last. Raises StoreAway."""
        return all(self._objects.get(name) is None for name in (self._names.manifest(segment), self._names.chunk(segment, 0)))
