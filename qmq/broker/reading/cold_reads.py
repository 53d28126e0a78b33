"""Reads what is not in memory without holding up the event loop: a thread brings batches into the
page cache (`ColdReads`), and a coroutine waits for bytes that are only in the object store
(`through_cold_reads`, qmq/log/reading.py).

The loop reads batches itself when it answers a pull. Near the end of the log they are in memory;
far behind they may be on the disk only, and a read there would delay producers and all other
consumers. Rules, for a group that is more than `BrokerConfig.recent_bytes` behind (the dispatcher
asks for no other):

* It is served only from its *window*: batches that a thread has read, or found in the page cache. A
  pull that finds the window used up waits until the next one is read.
* The next window is read while the second half of this one is served, so a consumer that keeps pace
  does not wait.
* `LOADS_MAX` windows are read at one time, in the order of need: more threads would make the disk
  seek, and flushes share the threads.
* A window counts the queue's own bytes, so other queues' batches between its batches are not read.

Only speed depends on this: if the kernel drops the pages again, or the thread fails, the loop reads
the batches itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, ParamSpec, TypeVar

from qmq import limits
from qmq.broker.dispatch.sessions import QueueGroup
from qmq.errors import QmqError
from qmq.log.consume_log import IndexEntry
from qmq.log.reading import ColdRead
from qmq.log.segments import Segments, segment_name
from qmq.log.store import Store

log = logging.getLogger("qmq.broker")

WINDOW_BYTES: Final = 16 * limits.MIB
LOADS_MAX: Final = 2
_ENTRIES: Final = 256
_GAP_BYTES: Final = 256 * limits.KIB
"""Batches that are closer together are read as one piece."""


class Piece(NamedTuple):
    """Bytes of one segment."""

    base: int
    begin: int
    end: int


class ColdReads:
    """`wake` serves the waiting pulls of a group."""

    def __init__(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[QueueGroup], None],
        *,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._store = store
        self._loop = loop
        self._wake = wake
        self._window_bytes = window_bytes
        self._waiting: deque[QueueGroup] = deque()
        self._loads = 0

    def allowance(self, state: QueueGroup, number: int, at: int) -> int:
        """How many bytes of the group's new messages the event loop may read now; 0 means wait
        until the group is woken. The messages begin in entry `number` of the consume log, at byte
        `at` of the queue.
        """
        window = state.window
        left = window.end - at if window.first <= at < window.end else 0
        if left <= self._window_bytes // 2 and not window.is_loading:
            window.is_loading = True
            if not left:
                window.first, window.end, window.next_number = at, at, number
            self._waiting.append(state)
            self._load()
        return left

    def _load(self) -> None:
        while self._waiting and self._loads < LOADS_MAX:
            state = self._waiting.popleft()
            pieces, end, number = self._plan(state)
            self._loads += 1
            reading = self._loop.run_in_executor(None, self._read, pieces)
            reading.add_done_callback(
                lambda done, state=state, end=end, number=number: self._loaded(  # type: ignore[misc]
                    done, state, end, number
                )
            )

    def _plan(self, state: QueueGroup) -> tuple[list[Piece], int, int]:
        """The next window: what to read, its end in the queue's bytes, and the entry after it."""
        pieces, segments = list[Piece](), self._store.messages
        size, end, number = 0, state.window.end, state.window.next_number
        for entry in _entries(state, number):
            if size >= self._window_bytes:
                break
            # earlier entries are not on the disk: see qmq.log.reading
            if entry.position >= segments.local_start:
                _add(pieces, segments, entry)
            size += entry.total_bytes
            end, number = entry.cumulative_bytes + entry.total_bytes, number + 1
        return pieces, end, number

    def _read(self, pieces: list[Piece]) -> None:
        """In a thread."""
        for each in pieces:
            path = self._store.messages.folder / segment_name(each.base)
            try:
                self._store.disk.read_ahead(path, each.end - each.begin, each.begin - each.base)
            except OSError as failure:
                # deleted by retention, or unreadable: the loop's own read says so to the consumer
                log.debug("reading ahead in %s failed: %s", path, failure)

    def _loaded(self, done: asyncio.Future[None], state: QueueGroup, end: int, number: int) -> None:
        self._loads -= 1
        state.window.is_loading = False
        if not done.cancelled():
            state.window.end, state.window.next_number = end, number
            self._wake(state)
            self._load()


def _entries(state: QueueGroup, number: int) -> Iterator[IndexEntry]:
    index = state.queue.index
    number = max(number, index.first)
    while number < index.count:
        found = index.entries(number, _ENTRIES)
        yield from found
        number += len(found)


def _add(pieces: list[Piece], segments: Segments, entry: IndexEntry) -> None:
    base, begin, end = (
        segments.base_of(entry.position),
        entry.position,
        entry.position + entry.total_bytes,
    )
    if pieces and pieces[-1].base == base and begin - pieces[-1].end <= _GAP_BYTES:
        pieces[-1] = Piece(base, pieces[-1].begin, end)
    else:
        pieces.append(Piece(base, begin, end))


_P = ParamSpec("_P")
_R = TypeVar("_R")


async def through_cold_reads(read: Callable[_P, _R], *args: _P.args, **options: _P.kwargs) -> _R:
    """The result of a repeatable read. Waits while the read needs bytes that must be fetched.
    Raises Overloaded if a fetch fails.
    """
    while True:
        try:
            return read(*args, **options)
        except ColdRead as cold:
            await _end_of(cold)


async def _end_of(cold: ColdRead) -> None:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(failure: QmqError | None) -> None:
        if ended.cancelled():
            return
        if failure is not None:
            ended.set_exception(failure)
        else:
            ended.set_result(None)

    cold.then(ended, tell)
    await ended
