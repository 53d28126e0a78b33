"""Finds and reads the sealed segments with which a new replica begins its log: those in the object store, up to the first gap.

The calls block, so run them in a thread. A failed request is repeated a few times; then the replica begins without the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Final, TypeVar

from qmq.errors import CorruptBatch
from qmq.log.envelopes import Entry, walk_bytes
from qmq.log.segment_index import SegmentIndex
from qmq.log.taken_segments import CannotTake
from qmq.tiering.object_store import Objects, StoreAway
from qmq.tiering.stored_segment import BadManifest, Manifest, ObjectNames, SealedSegment, decode_manifest

log = logging.getLogger("qmq.tiering")

PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0)
"""The pause before a failed request is retried."""
_CHUNKS_HELD: Final = 2
"""The window that walks a segment spans two chunks at most."""

_R = TypeVar("_R")


def follow_manifests(read: Callable[[int], Manifest | None], base: int) -> Iterator[Manifest]:
    """The segments from `base` on, each beginning where the one before ends, up to the first that the store does not have. Pure."""
    while (manifest := read(base)) is not None:
        yield manifest
        base = manifest.segment.end


def is_sound(manifest: Manifest, base: int) -> bool:
    """Whether a manifest describes a segment at `base` and has a checksum for each chunk. Pure."""
    segment, chunk_bytes = manifest.segment, manifest.chunk_bytes
    is_shape = segment.base == base and segment.size > 0 and chunk_bytes > 0
    return is_shape and len(manifest.checksums) == segment.chunk_count(chunk_bytes)


class StoredBeginnings:
    """Reads one broker group's segments. `stop` makes a running read in another thread end."""

    def __init__(self, objects: Objects, group: str, pauses_s: Sequence[float] = PAUSES_S) -> None:
        self._objects = objects
        self._names = ObjectNames(group)
        self._pauses_s = pauses_s
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Abandon running reads, because the process ends."""
        self._stopping.set()

    def find(self, base: int) -> list[SegmentIndex]:
        """The store's segments from `base` on. Their first envelopes are not read yet. Raises CannotTake."""
        return [
            SegmentIndex(each.segment.base, each.segment.size, each.chunk_bytes, each.checksums, b"")
            for each in follow_manifests(self._manifest, base)
        ]

    def _manifest(self, base: int) -> Manifest | None:
        """None also if what is there is damaged, or a later version's: everything from there on comes from the master."""
        name = self._names.manifest(SealedSegment(base, 0))
        data = self._patiently(lambda: self._objects.get(name))
        if data is None:
            return None
        try:
            manifest = decode_manifest(data)
        except BadManifest as cause:
            log.warning("the manifest of segment %d cannot be read: %s", base, cause)
            return None
        return manifest if is_sound(manifest, base) else None

    def entries(self, index: SegmentIndex) -> Iterator[Entry]:
        """The entries of a segment. Every checksum is checked. Raises CannotTake."""
        chunk = lru_cache(_CHUNKS_HELD)(partial(self._chunk, index))

        def read(position: int, size: int) -> bytes:
            return index.read(position - index.base, size, chunk)

        try:
            yield from walk_bytes(read, index.base, lambda: index.end)
        except CorruptBatch as cause:
            raise CannotTake(f"segment {index.base} in the object store is no log of entries ({cause.message})") from cause

    def _chunk(self, index: SegmentIndex, number: int) -> bytes:
        name = self._names.chunk(SealedSegment(index.base, index.size), number)
        data = self._patiently(lambda: self._objects.get(name))
        if data is None:
            raise CannotTake(f"the object store does not have {name}")
        if not index.is_chunk(number, data):
            raise CannotTake(f"the object store gives other bytes than were put for {name}")
        return data

    def _patiently(self, ask: Callable[[], _R]) -> _R:
        pauses = iter(self._pauses_s)
        while not self._stopping.is_set():
            try:
                return ask()
            except StoreAway as cause:
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise CannotTake(f"the object store does not answer ({cause})") from cause
                self._stopping.wait(pause_s)
        raise CannotTake("the broker stops")
