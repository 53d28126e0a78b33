"""Retention: forgetting the oldest messages by age and by size, whether they were consumed or not.

A queue's messages are forgotten batch by batch, by its subject's limits; disk space comes back when a whole segment holds nothing that
counts any more. In this order, so that a crash between any two steps does no harm:

    begin_retention   move the queues' starts, drop the segments and index files from the books; give their files
    a checkpoint      writes the new starts down
    end_retention     deletes the files; a file that stays after a crash is deleted at the next start
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qmq.errors import CorruptBatch
from qmq.log.envelopes import head_at
from qmq.log.queue import Queue
from qmq.log.segments import Segments
from qmq.log.store import Store
from qmq.model import SubjectConfig


def begin_retention(store: Store, look_up: Callable[[str], SubjectConfig | None]) -> list[Path]:
    """Forget what is too old or too much; give the files to delete once a checkpoint knows."""
    now_ms = max(store.clock.time_ms(), store.last_time_ms)
    floor = _size_floor(store)
    for queue in store.queues.values():
        config = look_up(queue.id.subject) or SubjectConfig(queue.id.subject)
        age_ms = config.retention_ms or store.config.retention_ms
        _move_start(queue, now_ms - age_ms, config.retention_bytes, floor)
    files = store.messages.drop_before(_first_kept(store))
    for queue in store.queues.values():
        if queue.index.first < queue.index.count or files:
            files += queue.index.drop_before(queue.index.find_position(store.messages.start))
    files += _old_actions(store, now_ms - store.config.retention_ms)
    return files


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


def _move_start(queue: Queue, before_ms: int, bytes_max: int | None, floor: int) -> None:
    index = queue.index
    number = max(index.find_time(before_ms), index.find_position(floor))
    if bytes_max is not None:
        number = max(number, index.find_bytes(queue.cumulative_bytes - bytes_max))
    start = queue.visible_sequence if number >= index.count else index.entry(number).base_sequence
    queue.start_sequence = max(queue.start_sequence, min(start, queue.visible_sequence))


def _first_kept(store: Store) -> int:
    """Position of the first batch that any queue still keeps."""
    first = _oldest_needed(store.messages, store.applied_place()[0])
    for queue in store.queues.values():
        index = queue.index
        if index.count > index.first and queue.start_sequence < queue.next_sequence:
            number = index.find_sequence(queue.start_sequence)
            first = min(first, index.entry(number).position)
    return first


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
