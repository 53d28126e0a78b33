"""Retention: forgetting the oldest messages by age and by size, whether they were consumed or not.

A queue's messages are forgotten batch by batch, by its subject's limits; disk space comes back when a whole segment holds nothing that
counts any more. In this order, so that a crash between any two steps does no harm:

    steps         move the queues' starts, drop the segments and index files from the books; their files are `dropped`
    a checkpoint  writes the new starts down; `written` says so, and the files may go
    delete        deletes the files; a file that stays after a crash is deleted at the next start

What is dropped or may be deleted is kept here until it is deleted: a checkpoint that met a full disk, and a file that could not be deleted,
are tried again with the next retention. A queue whose consume log cannot be read is counted and passed over; what its subject's age limit
and the whole log's size limit surely take of it does not keep segments from being dropped.

The steps run between turns, a slice at a time. What a queue keeps first is remembered, so that a queue that lost nothing is not looked up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from qmq.errors import CorruptBatch, LogDamaged
from qmq.log.consume_log import IndexEntry
from qmq.log.envelopes import head_at
from qmq.log.queue import Queue
from qmq.log.segments import Segments
from qmq.log.store import Store
from qmq.model import SubjectConfig

log = logging.getLogger("qmq.log")

QUEUES_AT_ONCE: Final = 500
"""Queues of one slice, if no file had to be read."""

LookUp = Callable[[str], SubjectConfig | None]


class _First(NamedTuple):
    """The first batch that a queue keeps, with its number, as it was at a start."""

    start_sequence: int
    number: int
    entry: IndexEntry


class Retention:
    """Of one store; make another one when the store was opened anew."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.dropped: list[Path] = []
        """Out of the books, but no checkpoint knows yet."""
        self.deletable: list[Path] = []
        self.failures = 0
        """Queues that could not be looked at, and files that could not be deleted; each time counts."""
        self._firsts: dict[Queue, _First] = {}
        self._index_start = -1

    def steps(self, look_up: LookUp) -> Iterator[None]:
        """Forget what is too old or too much; the store may change between two steps, but must be the same."""
        store = self.store
        now_ms = max(store.clock.time_ms(), store.last_time_ms)
        floor = _size_floor(store)
        kept_from = _oldest_needed(store.messages, store.applied_place()[0])
        for count, queue in enumerate(list(store.queues.values()), 1):
            config = look_up(queue.id.subject) or SubjectConfig(queue.id.subject)
            before_ms = now_ms - (config.retention_ms or store.config.retention_ms)
            known = self._firsts.get(queue)
            try:
                position = self._forget(queue, before_ms, config.retention_bytes, floor)
            except (LogDamaged, OSError) as damage:
                self._failed("reading the consume log of %s failed: %s", queue.id, damage)
                position = _surely_taken(store, before_ms, floor)
            kept_from = min(kept_from, position)
            if self._firsts.get(queue) is not known or count % QUEUES_AT_ONCE == 0:
                yield
        self.dropped, store.droppable = self.dropped + store.droppable, []
        self._firsts = {queue: self._firsts[queue] for queue in store.queues.values() if queue in self._firsts}
        self.dropped += store.messages.drop_before(kept_from)
        self.dropped += _old_actions(store, now_ms - store.config.retention_ms)
        yield from self._drop_entries()

    def written(self) -> None:
        """A checkpoint that was begun since knows what was dropped."""
        self.deletable += self.dropped
        self.dropped = []

    def delete(self) -> int:
        """Delete what may be; give how many files. Safe in a thread, while nothing else is done with it."""
        left: list[Path] = []
        for path in self.deletable:
            try:
                self.store.disk.delete(path)
            except OSError as cause:
                self._failed("deleting %s failed, it will be tried again: %s", path, cause)
                left.append(path)
        count = len(self.deletable) - len(left)
        self.deletable = left
        return count

    def _failed(self, what: str, *about: object) -> None:
        self.failures += 1
        log.error(f"retention: {what}", *about)

    def _forget(self, queue: Queue, before_ms: int, bytes_max: int | None, floor: int) -> int:
        """Move the queue's start; give the position of the first batch that it keeps, far behind everything if it keeps none."""
        first = self._first(queue)
        if first is not None and _move_start(queue, first, before_ms, bytes_max, floor):
            first = self._first(queue)
        return 1 << 62 if first is None else first.entry.position

    def _first(self, queue: Queue) -> _First | None:
        index, start = queue.index, queue.start_sequence
        if index.count <= index.first or start >= queue.next_sequence:
            return None
        found = self._firsts.get(queue)
        if found is None or found.start_sequence != start:
            number = index.find_sequence(start)
            found = self._firsts[queue] = _First(start, number, index.entry(number))
        return found

    def _drop_entries(self) -> Iterator[None]:
        """Drop consume-log entries of messages whose segments are gone."""
        store = self.store
        start = store.messages.start
        if start == self._index_start:
            return
        is_complete = True
        for queue in list(store.queues.values()):
            index = queue.index
            try:
                if index.first < index.count and index.entry(index.first).position < start:
                    self.dropped += index.drop_before(index.find_position(start))
            except (LogDamaged, OSError) as damage:
                is_complete = False
                self._failed("reading the consume log of %s failed: %s", queue.id, damage)
            yield
        if is_complete:
            self._index_start = start


def begin_retention(store: Store, look_up: LookUp) -> list[Path]:
    """All steps at once; give the files to delete once a checkpoint knows."""
    retention = Retention(store)
    for _ in retention.steps(look_up):
        pass
    return retention.dropped


def end_retention(files: list[Path]) -> None:
    """Delete. Safe in a thread."""
    for path in files:
        path.unlink(missing_ok=True)


def _size_floor(store: Store) -> int:
    """Position before which the whole log's size limit takes everything: always a segment's begin."""
    most = store.config.retention_bytes
    if most is None:
        return 0
    bases = store.messages.bases
    kept = [base for base in bases if store.messages.end - base <= most]
    return kept[0] if kept else bases[-1]


def _move_start(queue: Queue, first: _First, before_ms: int, bytes_max: int | None, floor: int) -> bool:
    """False if the first batch stays."""
    index, number, least = queue.index, first.number, queue.cumulative_bytes - (bytes_max or 0)
    if first.entry.append_time_ms < before_ms:
        number = max(number, index.find_time(before_ms))
    if first.entry.position < floor:
        number = max(number, index.find_position(floor))
    if bytes_max is not None and first.entry.cumulative_bytes < least:
        number = max(number, index.find_bytes(least))
    if number == first.number:
        return False
    start = queue.visible_sequence if number >= index.count else index.entry(number).base_sequence
    queue.start_sequence = max(queue.start_sequence, min(start, queue.visible_sequence))
    return True


def _surely_taken(store: Store, before_ms: int, floor: int) -> int:
    """Position of a segment before which nothing of a queue counts, whose consume log cannot say what it keeps."""
    taken = store.messages.start
    for base in store.messages.bases[1:]:
        if base > floor and _begin_ms(store.messages, base) >= before_ms:
            break
        taken = base
    return taken


def _oldest_needed(segments: Segments, applied: int) -> int:
    """Begin of the newest segment whose opening snapshot is here and was applied: it cannot be cut, so the log may begin there."""
    return next((base for base in reversed(segments.bases) if base < applied), segments.start)


def _old_actions(store: Store, before_ms: int) -> list[Path]:
    """Action segments that ended before `before_ms`: the one after it opens with a snapshot, so replay needs them no more."""
    kept = store.actions.start
    newest = _oldest_needed(store.actions, store.applied_place()[1])
    for base in store.actions.bases[1:]:
        if base > newest or _begin_ms(store.actions, base) >= before_ms:
            break
        kept = base
    return store.actions.drop_before(kept)


def _begin_ms(segments: Segments, base: int) -> int:
    try:
        head = head_at(segments, base)
    except CorruptBatch:
        head = None
    return 1 << 62 if head is None else head.append_time_ms  # no snapshot there that a replay could begin with
