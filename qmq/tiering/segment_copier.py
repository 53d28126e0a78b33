"""Copies a broker's sealed segments to the object store in the background, and deletes objects of segments that retention deleted.

One step at a time (qmq/tiering/segment_catalog.py), each in its own daemon thread: neither the event loop nor the end of the process
waits for the store.
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

from qmq.errors import CorruptBatch, DiskFull
from qmq.log.envelopes import head_at
from qmq.log.segment_index import index_name
from qmq.log.store import Store
from qmq.tiering.object_store import Objects, StoreAway
from qmq.tiering.segment_catalog import CatalogStep, LogBounds, SegmentCatalog, Task, decode_catalog
from qmq.tiering.segment_copying import Interrupted, SegmentConflict, SegmentCopying, SegmentDamaged
from qmq.tiering.stored_segment import CHUNK_BYTES, ObjectNames, SealedSegment

log = logging.getLogger("qmq.tiering")

CATALOG_FILE: Final = "stored_segments.qmt"

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class CopierPace:
    """Pauses, in seconds."""

    idle_s: float = 1.0
    """The pause between two checks of the log."""
    away_s: float = 1.0
    """The pause after a failure of the store. It doubles each time, up to `away_s_max`."""
    away_s_max: float = 60.0
    later_s: float = 60.0
    """The pause before another try for a segment that could not be copied because of its content, or that the master has not copied or
    deleted yet.
    """


@dataclass(slots=True)
class CopierCounters:
    """What the copier has done since the process began."""

    copied_bytes: int = 0
    deleted_segments: int = 0
    failures: dict[str, int] = field(default_factory=lambda: {"away": 0, "conflict": 0, "damaged": 0})

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
        chunk_bytes: int = CHUNK_BYTES,
        indexes: bool = False,
    ) -> None:
        """`store` returns the replica's store, or None while it is reopened. `owner` returns what tells this group from others of its name,
        as a restored one. `indexes`: write indexes for local retention.
        """
        self._store = store
        self._is_master = is_master
        self._objects = objects
        self._names = ObjectNames(group)
        self._fatal = fatal
        self._owner = owner
        self._is_owner = False
        self._pace = pace or CopierPace()
        self._chunk_bytes = chunk_bytes
        self._indexes = indexes
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._waiting: dict[int, float] = {}
        """Bases of segments that are left alone until a time of the loop, or until this replica's role changes."""
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
        """Begin no further step. A running request is not stopped: the store keeps its bytes, and the next start continues."""
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
                log.warning("copying segments to the object store failed, trying again: %s", failure)
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
        self._waiting = {base: until for base, until in self._waiting.items() if until > now and is_master == self._was_master}
        self._was_master = is_master
        step = self.catalog.next_step(self._bounds(store), is_master=is_master, waiting=self._waiting)
        if step is None:
            self._settled = None if self.catalog.noted or self._waiting else (start, last)
            return False
        await self._take(store, step)
        return True

    def _bounds(self, store: Store) -> LogBounds:
        log = store.messages
        local = [base for base in log.bases if base >= log.local_start] if self._indexes else []
        return LogBounds(log.start, committed_position(store), log.local_start, {base for base in local if not log.has_index(base)})

    async def _take(self, store: Store, step: CatalogStep) -> None:
        segment = step.segment
        copying = SegmentCopying(
            self._objects, self._names, store.disk, store.messages.folder, lambda: not self._is_stopping, self._chunk_bytes
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
        """Check, in a thread, that the objects are this group's: a restored group has the same bytes under the same names, and its
        retention would delete the original's objects. Raises StoreAway, SegmentConflict.
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
            raise SegmentConflict(f"{name} names another cluster's group: give this one another prefix (--object-store)")
        self._is_owner = found is not None  # a master of release 0.2.0 writes none

    async def _index(self, store: Store, copying: SegmentCopying, segment: SealedSegment) -> bool:
        """Write the segment's index. False if the store does not have the segment."""
        index = await self._in_thread(lambda: copying.index(segment))
        if index is None:
            log.warning("segment %d is not in the object store any more: its file stays", segment.base)
            return False
        await self._in_thread(lambda: store.messages.write_index(index))
        if not store.messages.note_index(index):
            await self._in_thread(lambda: store.disk.delete(store.messages.folder / index_name(index.base)))
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
    return [SealedSegment(base, following - base) for base, following in pairwise(store.messages.bases)]


def committed_position(store: Store) -> int:
    """The beginning of the newest segment whose first entry is committed: all entries before it are committed, too."""
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
