"""Reads sealed segments from the object store, chunk by chunk, through a cache on the disk.

    event loop   read: the bytes, if their chunks are here; else it starts fetching, and raises
                 ColdRead
    threads      fetch a chunk, compare its checksum with the index's, write it to a file of the
                 cache
    event loop   the chunk is here: those who waited for it are called

A slow or unavailable store delays only requests that need its chunks. The reader has its own daemon
threads, so the end of the process does not wait for them. A file of the cache has no name, so a
process that dies leaves none behind.

A chunk that the store has lost or changed is damaged: reads of it fail at once with ObjectDamaged,
and after `DAMAGED_S` the chunk is fetched again, because an operator may have put the object back.

`ChunkLru` decides which chunks stay in the cache.

A new replica begins its log with the sealed segments of the object store, up to the first gap
(`StoredBeginning`). These calls block, so run them in a thread. A failed request is repeated a few
times; then the replica begins without the store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from qmq.errors import CorruptBatch, Overloaded, QmqError
from qmq.log.envelopes import Entry, walk_bytes
from qmq.log.reading import ColdRead, Ended, ObjectDamaged, StoredBytes
from qmq.log.recovery import CannotTake
from qmq.log.segment_index import SegmentIndex
from qmq.process.files import make_private
from qmq.tiering.object_store import Objects, StoreAway
from qmq.tiering.stored_segment import (
    BadManifest,
    Manifest,
    ObjectNames,
    SealedSegment,
    decode_manifest,
)

AHEAD: Final = 2
"""Chunks that are fetched ahead of a reader in order, so that it seldom waits for a store that
answers in tens of milliseconds.
"""

V = TypeVar("V")


class ChunkKey(NamedTuple):
    """A chunk of a segment."""

    base: int
    number: int


class ChunkLru(Generic[V]):
    """Values by chunk, up to a sum of sizes in bytes.
    It evicts the least recently used values first.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._values: OrderedDict[ChunkKey, tuple[V, int]] = OrderedDict()
        self.bytes = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._values

    def get(self, key: ChunkKey) -> V | None:
        """The value, which counts as used now."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: ChunkKey, value: V, size: int) -> list[V]:
        """Add a value. Returns the evicted values. The new value is never evicted here, even if it
        alone exceeds the limit.
        """
        left = [self.remove(key)] if key in self._values else []
        self._values[key] = (value, size)
        self.bytes += size
        while self.bytes > self._bytes_max and len(self._values) > 1:
            left.append(self.remove(next(iter(self._values))))
        return left

    def remove(self, key: ChunkKey) -> V:
        """Take a value out."""
        value, size = self._values.pop(key)
        self.bytes -= size
        return value

    def clear(self) -> list[V]:
        """Take all values out."""
        return [self.remove(key) for key in list(self._values)]


def to_fetch(
    index: SegmentIndex, at: int, size: int, is_here: Callable[[ChunkKey], bool], ahead: int = AHEAD
) -> list[ChunkKey]:
    """The chunks to fetch for a read, in order: those that it needs, and the following ones if the
    segment is read in order.

    A read counts as in order if it is at the segment's beginning, or if the previous chunk is in
    the cache.
    """
    numbers = index.chunks_of(at, size)
    needed = [ChunkKey(index.base, number) for number in numbers]
    in_order = numbers.start == 0 or is_here(ChunkKey(index.base, numbers.start - 1))
    following = (
        range(numbers.stop, min(numbers.stop + ahead, len(index.checksums))) if in_order else ()
    )
    return [
        key
        for key in [*needed, *[ChunkKey(index.base, number) for number in following]]
        if not is_here(key)
    ]


log = logging.getLogger("qmq.tiering")

THREADS: Final = 4
AWAY_RETRY_MS: Final = 1000
WARN_EVERY_S: Final = 10.0
DAMAGED_S: Final = 10.0
"""How long reads of a damaged chunk fail without asking the store again."""
LOOK_AGAIN_S: Final = 60.0
"""A damaged chunk that nobody reads is fetched again this often while somebody
asks for the damage.
"""
DAMAGED_MAX: Final = 1000


@dataclass(slots=True)
class ReadCounters:
    """What the reader has done since the process began."""

    fetched_bytes: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Fetch:
    """A chunk that is being fetched."""

    index: SegmentIndex
    key: ChunkKey
    loop: asyncio.AbstractEventLoop
    waiting: dict[int, tuple[object, Ended]] = field(default_factory=dict)
    """Keyed by the owner's identity, because owners need not be hashable."""


@dataclass(frozen=True, slots=True)
class _Damage:
    """A damaged chunk, and when it was fetched."""

    index: SegmentIndex
    name: str
    failure: ObjectDamaged
    fetched_s: float


class StoredReads(StoredBytes):
    """Reads stored bytes through a cache of files. Call `close` in the end."""

    def __init__(
        self, objects: Objects, group: str, folder: Path, cache_bytes: int, threads: int = THREADS
    ) -> None:
        """The cache's files are in `folder`, which is created at the first write."""
        self._objects = objects
        self._names = ObjectNames(group)
        self._folder = folder
        self._threads = threads
        self._cache: ChunkLru[int] = ChunkLru(cache_bytes)
        """Open files, by chunk."""
        self._fetches: dict[ChunkKey, _Fetch] = {}
        self._damaged: dict[ChunkKey, _Damage] = {}
        self._orders: queue.SimpleQueue[_Fetch | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._is_closed = False
        self._warn_from_s = 0.0
        self.counters = ReadCounters()

    @property
    def cached_bytes(self) -> int:
        """The size of the cached chunks, in bytes."""
        return self._cache.bytes

    # --- in the event loop ------------------------------------------------------------------------

    def read(self, index: SegmentIndex, at: int, size: int) -> bytes:
        for key in to_fetch(index, at, size, self._is_here):
            self._begin(index, key)
        pieces: list[bytes] = []
        for number in index.chunks_of(at, size):
            key = ChunkKey(index.base, number)
            file = self._cache.get(key)
            if file is None:
                raise self._failure(key) or self._cold(key)
            first = number * index.chunk_bytes
            begin, end = max(at - first, 0), min(at + size - first, index.chunk_size(number))
            pieces.append(os.pread(file, end - begin, begin))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _is_here(self, key: ChunkKey) -> bool:
        return key in self._cache or key in self._fetches or self._failure(key) is not None

    def _failure(self, key: ChunkKey) -> ObjectDamaged | None:
        """The error of a chunk that was found damaged a short time ago."""
        found = self._damaged.get(key)
        if found is None or self._now_s() - found.fetched_s > DAMAGED_S:
            return None
        return ObjectDamaged(found.failure.message, found.failure.end)

    def damaged(self) -> list[tuple[int, str]]:
        """(base of the segment, name) of each damaged object."""
        for key, each in self._damaged.items():
            if key not in self._fetches and self._now_s() - each.fetched_s > LOOK_AGAIN_S:
                self._begin(each.index, key)
        return [(key.base, each.name) for key, each in self._damaged.items()]

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    def _begin(self, index: SegmentIndex, key: ChunkKey) -> None:
        self._fetches[key] = fetch = _Fetch(index, key, asyncio.get_running_loop())
        self._is_closed = False
        if len(self._workers) < self._threads:
            worker = threading.Thread(target=self._work, name="qmq-stored-reads", daemon=True)
            self._workers.append(worker)
            worker.start()
        self._orders.put(fetch)

    def _cold(self, key: ChunkKey) -> ColdRead:
        def wait(owner: object, ended: Ended) -> None:
            fetch = self._fetches.get(key)
            if fetch is None:
                asyncio.get_running_loop().call_soon(ended, None)
            else:
                fetch.waiting[id(owner)] = owner, ended

        return ColdRead(
            (
                f"chunk {key.number} of the segment at {key.base} is being read from the object "
                "store: try again"
            ),
            wait,
        )

    def _fetched(self, fetch: _Fetch, file: int | None, failure: QmqError | None) -> None:
        self._fetches.pop(fetch.key, None)
        if isinstance(failure, ObjectDamaged):
            self._found_damaged(fetch, failure)
            failure = None  # the reader asks again, and finds what it can read before the damage
        elif file is not None:
            self._damaged.pop(fetch.key, None)
            if self._is_closed:
                os.close(file)
                return
            size = fetch.index.chunk_size(fetch.key.number)
            self.counters.fetched_bytes += size
            for left in self._cache.put(fetch.key, file, size):
                os.close(left)
        else:
            self.counters.failures += 1
            self._warn(failure)
        for _, ended in fetch.waiting.values():
            fetch.loop.call_soon(ended, failure)

    def _found_damaged(self, fetch: _Fetch, failure: ObjectDamaged) -> None:
        if fetch.key not in self._damaged:
            log.warning("%s", failure)
        self.counters.failures += 1
        name = self._names.chunk(
            SealedSegment(fetch.index.base, fetch.index.size), fetch.key.number
        )
        self._damaged.pop(fetch.key, None)
        self._damaged[fetch.key] = _Damage(fetch.index, name, failure, self._now_s())
        if len(self._damaged) > DAMAGED_MAX:
            del self._damaged[next(iter(self._damaged))]

    def _warn(self, failure: QmqError | None) -> None:
        """Log a warning, at most once in a while:
        readers repeat their requests while the store is unavailable.
        """
        now_s = self._now_s()
        if now_s >= self._warn_from_s:
            self._warn_from_s = now_s + WARN_EVERY_S
            log.warning(
                (
                    "reading from the object store failed; the next request for these bytes "
                    "reads again: %s"
                ),
                failure,
            )

    def close(self) -> None:
        """Begin no further fetch, and close the cache's files. A running fetch ends by itself."""
        self._is_closed = True
        for _ in self._workers:
            self._orders.put(None)
        self._workers.clear()
        for file in self._cache.clear():
            os.close(file)

    # --- in threads -------------------------------------------------------------------------------

    def read_waiting(self, index: SegmentIndex, at: int, size: int) -> bytes:
        return index.read(at, size, lambda number: self._chunk(index, number))

    def _work(self) -> None:
        while (fetch := self._orders.get()) is not None:
            file, failure = None, None
            try:
                file = self._keep(self._chunk(fetch.index, fetch.key.number))
            except (Overloaded, ObjectDamaged) as cause:
                failure = cause
            except OSError as cause:
                failure = Overloaded(
                    f"the object store's cache cannot be written ({cause}): free some space"
                )
            except Exception as cause:  # a thread that ends would leave its reader waiting
                log.exception("reading from the object store failed")
                failure = Overloaded(f"reading from the object store failed: {cause!r}")
            with suppress(RuntimeError):  # the loop has ended in the meantime
                fetch.loop.call_soon_threadsafe(self._fetched, fetch, file, failure)

    def _chunk(self, index: SegmentIndex, number: int) -> bytes:
        """A chunk's bytes, checked. Raises Overloaded; ObjectDamaged if the store gives no or other
        bytes twice.
        """
        name = self._names.chunk(SealedSegment(index.base, index.size), number)
        flaw = ""
        for _ in range(2):
            data = self._get(name)
            if data is not None and index.is_chunk(number, data):
                return data
            flaw = "is not there" if data is None else "has other bytes than were put"
        if data is None and self._get(self._names.owner) is None:
            raise _away(
                f"the object store has neither {name} nor {self._names.owner}: is it the "
                "group's store, and is its folder mounted?"
            )
        end = index.base + number * index.chunk_bytes + index.chunk_size(number)
        raise ObjectDamaged(
            (
                f"object {name} {flaw}: put it back from a copy, its CRC-32C is "
                f"{index.checksums[number]:08x}"
            ),
            end,
        )

    def _get(self, name: str) -> bytes | None:
        """Raises Overloaded."""
        try:
            return self._objects.get(name)
        except StoreAway as cause:
            raise _away(
                f"messages are in the object store, which does not give them ({cause}): try again"
            ) from cause

    def _keep(self, data: bytes) -> int:
        """Write a chunk to a file of the cache. Raises OSError."""
        make_private(self._folder)
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            return os.dup(file.fileno())


def _away(message: str) -> Overloaded:
    failure = Overloaded(message)
    failure.retry_after_ms = AWAY_RETRY_MS
    return failure


PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0)
"""The pause before a failed request is retried."""
_CHUNKS_HELD: Final = 2
"""The window that walks a segment spans two chunks at most."""

_R = TypeVar("_R")


def follow_manifests(read: Callable[[int], Manifest | None], base: int) -> Iterator[Manifest]:
    """The segments from `base` on, each beginning where the one before ends, up to the first that
    the store does not have. Pure.
    """
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
        """The store's segments from `base` on. Their first envelopes are not read yet.
        Raises CannotTake.
        """
        return [
            SegmentIndex(
                each.segment.base, each.segment.size, each.chunk_bytes, each.checksums, b""
            )
            for each in follow_manifests(self._manifest, base)
        ]

    def _manifest(self, base: int) -> Manifest | None:
        """None also if what is there is damaged, or a later version's: everything from there on
        comes from the master.
        """
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
            raise CannotTake(
                f"segment {index.base} in the object store is no log of entries ({cause.message})"
            ) from cause

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
