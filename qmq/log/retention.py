"""Retention: deletes the oldest messages by age and by size, whether they were consumed or not, and
logs which. Also drops the messages of one queue at once.

A queue's messages are dropped batch by batch, by its subject's limits; disk space is freed when a
whole segment has no valid entry any more. With local retention, the file of a segment that is in
the object store is deleted earlier (docs/TIERING.md). A crash between any two of these steps is
harmless:

    steps         move the queues' starts, drop segments and index files from memory; their files
                  are `dropped`
    a checkpoint  records the new starts; after `written` the files may be deleted
    delete        deletes the files; a file that stays after a crash is deleted at the next start

Dropped files stay listed here until they are deleted: after a failed checkpoint or a failed
deletion, the next retention tries again. A queue with an unreadable consume log is counted and
skipped, but segments that are certainly beyond its subject's age limit or the log's size limit are
dropped.

The steps run between turns, a slice at a time. The first kept batch of each queue is remembered, so
that queues without a loss need no second look-up.

`DeletionReport` logs the queue, the messages, when they were stored, and why. A queue gets a line
at once, and then at most one every hour, which covers everything since the line before. The logger
is `qmq.retention`, at the level INFO, which is on even if other messages of this level are not.

`drop` drops a queue, with its messages and groups, because its subject was deleted. A drop needs an
entry in each log, because segments of one log may be deleted while the other still has older ones.

    a drop command, in the message log     everything up to it no longer belongs to the queue;
                                           producers and seal are forgotten
    DROP_QUEUE, in the action log          every group's share and lanes are forgotten

Earlier actions of groups are written first, so that replay never finds one after the drop. A crash
between the two entries leaves groups on an empty queue: a second drop completes the work. Sequences
continue, so that a sequence never means two messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from qmq.errors import CorruptBatch, LogDamaged
from qmq.log import command_messages
from qmq.log.actions import DropQueue
from qmq.log.consume_log import IndexEntry
from qmq.log.envelopes import head_at, is_opened_whole
from qmq.log.queue import Queue
from qmq.log.segments import Segments
from qmq.log.store import Store
from qmq.model import QueueId, SubjectConfig

deletion_log = logging.getLogger("qmq.retention")
deletion_log.setLevel(logging.INFO)

EVERY_MS: Final = 3_600_000

AGE: Final = "older than its retention"
QUEUE_BYTES: Final = "more than its subject's size limit"
LOG_BYTES: Final = "more than the log's size limit"


class DeletedMessages(NamedTuple):
    """The messages `first` to `end` (exclusive) of a queue, and when the oldest and the newest of
    their batches were stored.
    """

    queue: QueueId
    first: int
    end: int
    oldest_ms: int
    newest_ms: int
    before_ms: int
    """Older messages were too old, by the time of retention."""
    why: str


class DeletionReport:
    """The deletions of one store."""

    def __init__(self) -> None:
        self._waiting: dict[QueueId, DeletedMessages] = {}
        self._logged_ms: dict[QueueId, int] = {}

    def note(self, deletion: DeletedMessages) -> None:
        earlier = self._waiting.get(deletion.queue)
        if earlier is not None:
            deletion = deletion._replace(first=earlier.first, oldest_ms=earlier.oldest_ms)
        self._waiting[deletion.queue] = deletion

    def log_due(self, monotonic_ms: int) -> None:
        """Log what is due."""
        self._logged_ms = {
            queue: at_ms
            for queue, at_ms in self._logged_ms.items()
            if monotonic_ms - at_ms < EVERY_MS
        }
        for queue in [queue for queue in self._waiting if queue not in self._logged_ms]:
            self._logged_ms[queue] = monotonic_ms
            _log(self._waiting.pop(queue))

    def log_all(self) -> None:
        """Log everything that is not logged yet."""
        for deletion in self._waiting.values():
            _log(deletion)
        self._waiting.clear()


def _log(deletion: DeletedMessages) -> None:
    stored = f"stored {_time(deletion.oldest_ms)} to {_time(deletion.newest_ms)}"
    why = (
        f"{deletion.why}, which ends {_time(deletion.before_ms)}"
        if deletion.why == AGE
        else deletion.why
    )
    deletion_log.info(
        "retention deleted messages %d to %d of %s, %s: %s",
        deletion.first,
        deletion.end - 1,
        deletion.queue,
        stored,
        why,
    )


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms since 1970"


log = logging.getLogger("qmq.log")

QUEUES_AT_ONCE: Final = 500
"""The queues in one slice, if no file had to be read."""

LookUp = Callable[[str], SubjectConfig | None]


Before = Callable[[int], int]
"""The append time before which every entry is older than an age in
milliseconds (qmq/log/retention_time.py).
"""


class _First(NamedTuple):
    """The first batch that a queue keeps, with its number, at a given start."""

    start_sequence: int
    number: int
    entry: IndexEntry


class Retention:
    """The retention of one store. A reopened store needs a new one."""

    def __init__(self, store: Store, before_ms: Before | None = None) -> None:
        """Without `before_ms` ages count by the store's clock, which must be right."""
        self.store = store
        self._before_ms = before_ms or (lambda age_ms: store.clock.time_ms() - age_ms)
        self.dropped: list[Path] = []
        """Dropped files that no checkpoint has recorded yet."""
        self.deletable: list[Path] = []
        self.failures = 0
        """The number of queues that could not be examined and files that could not be deleted. Each
        failure counts.
        """
        self._report = DeletionReport()
        self._firsts: dict[Queue, _First] = {}
        self._index_start = -1

    def steps(self, look_up: LookUp) -> Iterator[None]:
        """Drop messages that are too old or too many. The store may change between two steps, but
        must stay the same object.
        """
        store = self.store
        floor = _size_floor(store)
        kept_from = _oldest_needed(store.messages, store.applied_place()[0])
        for count, queue in enumerate(list(store.queues.values()), 1):
            config = _settings(queue, look_up)
            before_ms = self._before_ms(
                (config.retention_ms if config else None) or store.config.retention_ms
            )
            known = self._firsts.get(queue)
            try:
                most = config.retention_bytes if config else None
                position = self._forget(queue, before_ms, most, floor)
            except (LogDamaged, OSError) as damage:
                self._failed("reading the consume log of %s failed: %s", queue.id, damage)
                position = (
                    _surely_taken(store, before_ms, floor)
                    if queue.steps is None
                    else store.messages.start  # effects may wait there
                )
            kept_from = min(kept_from, position)
            must_read = self._firsts.get(queue) is not known and queue.index.has_files
            if must_read or count % QUEUES_AT_ONCE == 0:
                yield
        self._report.log_due(store.clock.monotonic_ms())
        self.dropped, store.droppable = self.dropped + store.droppable, []
        self._firsts = {
            queue: self._firsts[queue] for queue in store.queues.values() if queue in self._firsts
        }
        self.dropped += store.messages.drop_before(_may_begin(store.messages, kept_from))
        self.dropped += store.messages.release_before(_local_floor(store, self._before_ms))
        self.dropped += _old_actions(store, self._before_ms(store.config.retention_ms))
        yield from self._drop_entries()

    def release(self) -> None:
        """Drop the files of segments that are in the object store, before a checkpoint. A replica
        that begins its log again after a crash takes no checkpoint.
        """
        self.deletable += self.store.messages.release_before(
            _local_floor(self.store, self._before_ms)
        )

    def end(self) -> None:
        """Log what was deleted and is not logged yet,
        because this is the store's last retention.
        """
        self._report.log_all()

    def written(self) -> None:
        """Note that a checkpoint, which began later, has recorded the drop."""
        self.deletable += self.dropped
        self.dropped = []

    def delete(self) -> int:
        """Delete files that may be deleted, and return their number. Safe in a thread, alone."""
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
        """Move the queue's start. Returns the position of its first kept batch; a huge position if
        it keeps none.
        """
        first = self._first(queue)
        moved = (
            _move_start(queue, first, before_ms, bytes_max, floor) if first is not None else None
        )
        if moved is not None:
            if moved.end > moved.first:
                self._report.note(moved)
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
        """Drop consume-log entries of messages whose segments are deleted."""
        store = self.store
        start = store.messages.start
        if start == self._index_start:
            return
        is_complete = True
        for count, queue in enumerate(list(store.queues.values()), 1):
            index = queue.index
            must_read = index.has_files
            try:
                if index.first < index.count and index.entry(index.first).position < start:
                    self.dropped += index.drop_before(index.find_position(start))
            except (LogDamaged, OSError) as damage:
                is_complete = False
                self._failed("reading the consume log of %s failed: %s", queue.id, damage)
            if must_read or count % QUEUES_AT_ONCE == 0:
                yield
        if is_complete:
            self._index_start = start


def _settings(queue: Queue, look_up: LookUp) -> SubjectConfig | None:
    """The settings of the queue's subject; None: the log's own."""
    return look_up(queue.id.subject) if queue.steps is None else None


def _size_floor(store: Store) -> int:
    """The position before which the log's size limit drops everything. It is always the beginning
    of a segment.
    """
    most = store.config.retention_bytes
    if most is None:
        return 0
    bases = store.messages.bases
    kept = [base for base in bases if store.messages.end - base <= most]
    return kept[0] if kept else bases[-1]


def local_floor(
    bases: Sequence[int],
    end: int,
    begins_ms: Callable[[int], int],
    before_ms: int | None,
    bytes_max: int | None,
) -> int:
    """The position before which local retention needs no file. Pure.

    A segment is too old if the next one began before `before_ms`, and too much if more than
    `bytes_max` follow its beginning.
    """
    floor = bases[0]
    for base, following in pairwise(bases):
        is_old = before_ms is not None and begins_ms(following) < before_ms
        is_too_much = bytes_max is not None and end - base > bytes_max
        if not is_old and not is_too_much:
            break
        floor = following
    return floor


def _local_floor(store: Store, before: Before) -> int:
    config, segments = store.config, store.messages
    if not config.is_local_retention_set:
        return segments.start
    before_ms = None if config.local_retention_ms is None else before(config.local_retention_ms)
    bases = [base for base in segments.bases if base >= segments.local_start]
    floor = local_floor(
        bases,
        segments.end,
        lambda base: _begin_ms(segments, base),
        before_ms,
        config.local_retention_bytes,
    )
    return min(floor, _oldest_needed(segments, store.applied_place()[0]))


def _move_start(
    queue: Queue, first: _First, before_ms: int, bytes_max: int | None, floor: int
) -> DeletedMessages | None:
    """Move a queue's start, and say what that deleted; None if its first batch stays."""
    index, least = queue.index, queue.cumulative_bytes - (bytes_max or 0)
    kept_from = queue.steps.kept_from if queue.steps is not None else None
    starts = [(first.number, "")]
    if first.entry.append_time_ms < before_ms:
        starts.append((index.find_time(before_ms), AGE))
    if first.entry.position < floor:
        starts.append((index.find_position(floor), LOG_BYTES))
    if bytes_max is not None and first.entry.cumulative_bytes < least:
        starts.append((index.find_bytes(least), QUEUE_BYTES))
    number, why = max(starts, key=lambda each: each[0])
    if kept_from is not None:
        number = min(number, index.find_sequence(kept_from))
    if number <= first.number:
        return None
    start = queue.visible_sequence if number >= index.count else index.entry(number).base_sequence
    before, queue.start_sequence = (
        queue.start_sequence,
        max(queue.start_sequence, min(start, queue.visible_sequence)),
    )
    newest_ms = index.entry(min(number, index.count) - 1).append_time_ms
    return DeletedMessages(
        queue.id,
        before,
        queue.start_sequence,
        first.entry.append_time_ms,
        newest_ms,
        before_ms,
        why,
    )


def _surely_taken(store: Store, before_ms: int, floor: int) -> int:
    """The position of a segment before which a queue with an unreadable consume log
    certainly keeps nothing.
    """
    taken = store.messages.start
    for base in store.messages.bases[1:]:
        if base > floor and _begin_ms(store.messages, base) >= before_ms:
            break
        taken = base
    return taken


def _oldest_needed(segments: Segments, applied: int) -> int:
    """The beginning of the newest segment with an applied opening snapshot:
    the log may begin there.
    """
    return next((base for base in reversed(segments.bases) if base < applied), segments.start)


def _may_begin(segments: Segments, kept_from: int) -> int:
    """The beginning of the newest segment up to `kept_from` with which the log may begin: one that
    was opened whole.
    """
    for base in reversed(segments.bases):
        if base <= kept_from and (base < segments.local_start or is_opened_whole(segments, base)):
            return base
    return segments.start


def _old_actions(store: Store, before_ms: int) -> list[Path]:
    """Action segments that ended before `before_ms`: replay does not need them, because the next
    one opens with a snapshot.
    """
    kept = store.actions.start
    newest = _oldest_needed(store.actions, store.applied_place()[1])
    for base in store.actions.bases[1:]:
        if base > newest or _begin_ms(store.actions, base) >= before_ms:
            break
        kept = base
    return store.actions.drop_before(_may_begin(store.actions, kept))


def _begin_ms(segments: Segments, base: int) -> int:
    try:
        head = head_at(segments, base)
    except CorruptBatch:
        head = None
    return (
        1 << 62 if head is None else head.append_time_ms
    )  # a replay could not begin without a snapshot there


def purge(store: Store, queue: Queue) -> None:
    """Drop the messages of a queue; effective when the purge is committed. Producers, seal and
    groups stay. Raises DiskFull.

    The caller must then move the groups behind the purge: otherwise, as after a crash, they are
    before the queue's start and count the purged messages as expired.
    """
    store.write_actions()
    store.append_region(queue, command_messages.build_purge(queue.id))


def drop(store: Store, queue: Queue) -> None:
    """Drop a queue; the drop is effective when it is committed. Raises DiskFull: call it again."""
    store.write_actions()
    store.append_region(queue, command_messages.build_drop(queue.id))
    store.act(DropQueue(queue.id.subject, queue.id.partition, "", ""))
