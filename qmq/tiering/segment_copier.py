"""Copies a broker's sealed segments to the object store in the background, and deletes objects of
segments that retention deleted.

One step at a time (qmq/tiering/stored_segment.py), each in its own daemon thread: neither the event
loop nor the end of the process waits for the store.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeVar

from google_crc32c import value as crc32c

from qmq.errors import CorruptBatch, DiskFull
from qmq.log.disk import Disk
from qmq.log.envelopes import head_at, walk_bytes
from qmq.log.segment_index import SegmentIndex, index_name
from qmq.log.segments import segment_name
from qmq.log.store import Store
from qmq.tiering.object_store import ObjectConflict, Objects, StoreAway, put_checked
from qmq.tiering.stored_segment import (
    CHUNK_BYTES,
    BadManifest,
    CatalogStep,
    ChunkChecksums,
    LogBounds,
    Manifest,
    ObjectNames,
    SealedSegment,
    SegmentCatalog,
    Task,
    decode_catalog,
    decode_manifest,
)
from qmq.wire.batch import ENVELOPE_BYTES


class SegmentConflict(Exception):
    """The store has other bytes under this segment's names: another log uses the prefix, or the
    store damaged them.
    """


class SegmentDamaged(Exception):
    """The local file differs from what the log wrote, so it is not copied."""


class Interrupted(Exception):
    """The broker stops; the copy continues after its next start."""


class SegmentCopying:
    """Works on the segments of one log's folder."""

    def __init__(
        self,
        objects: Objects,
        names: ObjectNames,
        disk: Disk,
        folder: Path,
        goes_on: Callable[[], bool],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._objects = objects
        self._names = names
        self._disk = disk
        self._folder = folder
        self._goes_on = goes_on
        self._chunk_bytes = chunk_bytes

    def copy(self, segment: SealedSegment, read_back: set[int]) -> int:
        """Copy the segment to the store, unless the store has it already. Returns the number of
        bytes that were put.

        `read_back` are the numbers of chunks that were read back in an earlier try; those of this
        one are added. So a store that fails now and then gets the segment in the end.

        Raises FileNotFoundError: retention has deleted it. StoreAway, SegmentConflict,
        SegmentDamaged, Interrupted.
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
            raise StoreAway(
                f"the manifest of segment {segment.base} was put, but the object store does "
                "not return it"
            )
        return put

    def _described(self, fd: int, segment: SealedSegment) -> Manifest:
        """The segment's manifest, computed from its file. Checks every entry of the file."""

        def read(position: int, size: int) -> bytes:
            return self._disk.read_around(
                fd, min(size, segment.end - position), position - segment.base
            )

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
            raise SegmentConflict(
                f"the store has another segment at {manifest.segment.base}, of "
                f"{found.segment.size} bytes"
            )
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
        """The manifest that the store has under the segment's name.
        Raises StoreAway, SegmentConflict.
        """
        data = self._objects.get(self._names.manifest(segment))
        try:
            return None if data is None else decode_manifest(data)
        except BadManifest as cause:
            raise SegmentConflict(
                f"the manifest of segment {segment.base} cannot be read: {cause}"
            ) from cause

    def index(self, segment: SealedSegment) -> SegmentIndex | None:
        """The index that replaces the segment's file, if the store has the file's bytes; None if
        the store has no manifest.

        Raises FileNotFoundError: retention has deleted it. StoreAway, SegmentConflict,
        SegmentDamaged, Interrupted.
        """
        manifest = self.manifest(segment)
        if manifest is None:
            return None
        if manifest.segment != segment:
            raise SegmentConflict(
                f"the store has another segment at {segment.base}, of {manifest.segment.size} bytes"
            )
        fd = self._disk.open_read(self._folder / segment_name(segment.base))
        try:
            index = SegmentIndex(
                segment.base,
                segment.size,
                manifest.chunk_bytes,
                manifest.checksums,
                self._disk.read_around(fd, ENVELOPE_BYTES, 0),
            )
            for number in range(len(index.checksums)):
                self._require_going_on()
                if not index.is_chunk(
                    number,
                    self._disk.read_around(
                        fd, index.chunk_size(number), number * index.chunk_bytes
                    ),
                ):
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
        """Whether the store has no object of the segment, or only objects that a running deletion
        deletes last. Raises StoreAway.
        """
        return all(
            self._objects.get(name) is None
            for name in (self._names.manifest(segment), self._names.chunk(segment, 0))
        )


log = logging.getLogger("qmq.tiering")

CATALOG_FILE: Final = "stored_segments.qmt"

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class CopierPace:
    """Pauses, in seconds, and the size of what is put at once."""

    idle_s: float = 1.0
    """The pause between two checks of the log."""
    away_s: float = 1.0
    """The pause after a failure of the store. It doubles each time, up to `away_s_max`."""
    away_s_max: float = 60.0
    later_s: float = 60.0
    """The pause before another try for a segment that could not be copied because of its content,
    or that the master has not copied or deleted yet.
    """
    chunk_bytes: int = CHUNK_BYTES


@dataclass(slots=True)
class CopierCounters:
    """What the copier has done since the process began."""

    copied_bytes: int = 0
    deleted_segments: int = 0
    failures: dict[str, int] = field(
        default_factory=lambda: {"away": 0, "conflict": 0, "damaged": 0}
    )

    def failed(self, why: str) -> None:
        self.failures[why] += 1


class SegmentCopier:
    """The copier of one replica. Call `start`, and `stop` in the end."""

    def __init__(
        self,
        store: Callable[[], Store | None],
        is_master: Callable[[], bool],
        objects: Objects,
        group: str,
        fatal: Callable[[BaseException], None],
        owner: Callable[[], str],
        *,
        pace: CopierPace | None = None,
        indexes: bool = False,
    ) -> None:
        """`store` returns the replica's store, or None while it is reopened. `owner` returns what
        tells this group from others of its name, as a restored one. `indexes`: write indexes for
        local retention.
        """
        self._store = store
        self._is_master = is_master
        self._objects = objects
        self._names = ObjectNames(group)
        self._fatal = fatal
        self._owner = owner
        self._is_owner = False
        self._pace = pace or CopierPace()
        self._indexes = indexes
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._waiting: dict[int, float] = {}
        """Bases of segments that are left alone until a time of the loop, or until this replica's
        role changes.
        """
        self._was_master = False
        self._settled: tuple[int, int] | None = None
        """The log's first and last base when there was nothing left to do."""
        self._away_s = self._pace.away_s
        self._read_back: tuple[int, set[int]] = (-1, set())
        """The base of the segment that is copied, and its chunks that were read back."""
        self.catalog = SegmentCatalog()
        self.counters = CopierCounters()

    def start(self) -> None:
        """Read the catalog's file, and begin to copy."""
        store = self._store()
        if store is not None:
            self.catalog = _loaded(store)
        self._task = self._loop.create_task(self._run())

    async def stop(self) -> None:
        """Begin no further step. A running request is not stopped: the store keeps its bytes, and
        the next start continues.
        """
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            pause_s = self._pace.idle_s
            try:
                if await self._advance():
                    pause_s = 0.0
                self._away_s = self._pace.away_s
            except StoreAway as failure:
                self.counters.failed("away")
                pause_s, self._away_s = self._away_s, min(2 * self._away_s, self._pace.away_s_max)
                log.warning("the object store failed, trying again in %.0f s: %s", pause_s, failure)
            except (OSError, DiskFull) as failure:
                log.warning(
                    "copying segments to the object store failed, trying again: %s", failure
                )
            except Exception as cause:
                self._fatal(cause)
                return
            await asyncio.sleep(pause_s)

    async def _advance(self) -> bool:
        """Do the next step. Returns False if there is none now."""
        store = self._store()
        if store is None:
            return False
        start, last = store.messages.start, store.messages.bases[-1]
        if self._settled == (start, last):
            return False
        if self.catalog.note(sealed_segments(store)):
            await self._save(store)
        now, is_master = self._loop.time(), self._is_master()
        self._waiting = {
            base: until
            for base, until in self._waiting.items()
            if until > now and is_master == self._was_master
        }
        self._was_master = is_master
        step = self.catalog.next_step(
            self._bounds(store), is_master=is_master, waiting=self._waiting
        )
        if step is None:
            self._settled = None if self.catalog.noted or self._waiting else (start, last)
            return False
        await self._take(store, step)
        return True

    def _bounds(self, store: Store) -> LogBounds:
        log = store.messages
        local = [base for base in log.bases if base >= log.local_start] if self._indexes else []
        return LogBounds(
            log.start,
            committed_position(store),
            log.local_start,
            {base for base in local if not log.has_index(base)},
        )

    async def _take(self, store: Store, step: CatalogStep) -> None:
        segment = step.segment
        copying = SegmentCopying(
            self._objects,
            self._names,
            store.disk,
            store.messages.folder,
            lambda: not self._is_stopping,
            self._pace.chunk_bytes,
        )
        try:
            await self._in_thread(self._require_owner)
            if step.task is Task.INDEX:
                is_done = await self._index(store, copying, segment)
            else:
                is_done = await self._in_thread(lambda: self._carry_out(copying, step))
        except (SegmentConflict, SegmentDamaged) as failure:
            self.counters.failed("conflict" if isinstance(failure, SegmentConflict) else "damaged")
            log.error("segment %d is not copied to the object store: %s", segment.base, failure)
            is_done = False
        except (FileNotFoundError, Interrupted):  # retention has deleted it, or the broker stops
            is_done = False
        if not is_done:
            self._waiting[segment.base] = self._loop.time() + self._pace.later_s
        if not is_done or step.task is Task.INDEX:
            return
        if step.task in (Task.COPY, Task.LOOK):
            self.catalog.now_stored(segment)
        else:
            self.catalog.now_gone(segment)
        await self._save(store)

    def _require_owner(self) -> None:
        """Check, in a thread, that the objects are this group's: a restored group has the same
        bytes under the same names, and its retention would delete the original's objects. Raises
        StoreAway, SegmentConflict.
        """
        if self._is_owner:
            return
        name, own = self._names.owner, self._owner().encode()
        if not own:
            raise StoreAway("the coordination store has not told whose objects these are")
        if self._is_master():
            self._objects.create(name, own)
        found = self._objects.get(name)
        if found is None and self._is_master():
            raise StoreAway(f"{name} was put, but the object store does not return it")
        if found is not None and found != own:
            raise SegmentConflict(
                f"{name} names another cluster's group: give this one another prefix "
                "(--object-store)"
            )
        self._is_owner = found is not None  # a master of release 0.2.0 writes none

    async def _index(self, store: Store, copying: SegmentCopying, segment: SealedSegment) -> bool:
        """Write the segment's index. False if the store does not have the segment."""
        index = await self._in_thread(lambda: copying.index(segment))
        if index is None:
            log.warning(
                "segment %d is not in the object store any more: its file stays", segment.base
            )
            return False
        await self._in_thread(lambda: store.messages.write_index(index))
        if not store.messages.note_index(index):
            await self._in_thread(
                lambda: store.disk.delete(store.messages.folder / index_name(index.base))
            )
        return True

    def _carry_out(self, copying: SegmentCopying, step: CatalogStep) -> bool:
        """Do a step, in a thread. Returns whether the step is done."""
        match step.task:
            case Task.COPY:
                if self._read_back[0] != step.segment.base:
                    self._read_back = (step.segment.base, set())
                self.counters.copied_bytes += copying.copy(step.segment, self._read_back[1])
            case Task.LOOK:
                return copying.manifest(step.segment) is not None
            case Task.DELETE:
                copying.delete(step.segment)
                self.counters.deleted_segments += 1
            case Task.FORGET:
                return copying.is_gone(step.segment)
        return True

    async def _save(self, store: Store) -> None:
        data = self.catalog.encode()
        await self._in_thread(lambda: store.disk.replace(store.folder / CATALOG_FILE, data))

    def _in_thread(self, run: Callable[[], _R]) -> asyncio.Future[_R]:
        result: asyncio.Future[_R] = self._loop.create_future()

        def tell(value: _R | None, failure: BaseException | None) -> None:
            if result.cancelled():
                return
            if failure is not None:
                result.set_exception(failure)
            else:
                result.set_result(value)  # type: ignore[arg-type]

        def body() -> None:
            value, failure = None, None
            try:
                value = run()
            except BaseException as cause:
                failure = cause
            with suppress(RuntimeError):  # the loop has ended in the meantime
                self._loop.call_soon_threadsafe(tell, value, failure)

        threading.Thread(target=body, name="qmq-segment-copier", daemon=True).start()
        return result


def sealed_segments(store: Store) -> list[SealedSegment]:
    """The sealed segments of the message log that are on the disk, oldest first."""
    return [
        SealedSegment(base, following - base) for base, following in pairwise(store.messages.bases)
    ]


def committed_position(store: Store) -> int:
    """The beginning of the newest segment whose first entry is committed: all entries before it are
    committed, too.
    """
    segments = store.messages
    for base in reversed(segments.bases[1:]):
        with suppress(CorruptBatch):
            head = head_at(segments, base)
            if head is not None and head.index <= store.committed_index:
                return base
    return segments.start


def _loaded(store: Store) -> SegmentCatalog:
    path: Path = store.folder / CATALOG_FILE
    if not path.exists():
        return SegmentCatalog()
    found = decode_catalog(store.disk.read_file(path))
    if found is None:
        log.warning("%s is damaged: rebuilding it from the segments on the disk", path)
    return found or SegmentCatalog()
