"""Rebuilds a lost consume log from the message log."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qmq.batch import Kind
from qmq.errors import CorruptBatch
from qmq.log.consume_log import ConsumeLog, IndexEntry
from qmq.log.envelopes import Entry, damaged, walk_waiting
from qmq.log.queue import Queue
from qmq.log.recent_writes import MESSAGES
from qmq.log.store import Store


def rebuild(store: Store, lost: list[tuple[Queue, int]], until: int, progress: Callable[[str, int, int], None]) -> None:
    """Index the lost queues again, from the oldest message to `until`: the replay has indexed all later entries. Raises LogDamaged."""
    stored = _stored_bytes(store, until)
    tails: dict[int, list[IndexEntry]] = {}
    cumulative: dict[int, int] = {}
    for queue, bytes_ever in lost:
        tails[id(queue)] = [entry for entry in queue.index.entries_in_memory() if entry.position >= until]
        cumulative[id(queue)] = bytes_ever - stored.get(id(queue), 0)
        queue.index.discard()
        queue.index = ConsumeLog(store.disk, store.consume_folder, queue.id)
    for entry in _data_before(store, until):
        queue, indexed = store.index_entry(entry.position, entry.envelope, entry.region)
        if id(queue) in cumulative:
            queue.index.append(indexed._replace(cumulative_bytes=cumulative[id(queue)]))
            cumulative[id(queue)] += indexed.total_bytes
        progress("consume", entry.end - store.messages.start, until - store.messages.start)
    for queue, _ in lost:
        for indexed in tails[id(queue)]:
            queue.index.append(indexed)


def _data_before(store: Store, until: int) -> Iterator[Entry]:
    position = store.messages.start
    try:
        for entry in walk_waiting(store.messages, position):
            if entry.position >= until:
                return
            position = entry.end
            if entry.envelope.kind in (Kind.DATA, Kind.COMMAND):
                yield entry
    except CorruptBatch as cause:  # everything before a checkpoint was flushed
        raise damaged(store.messages, position, cause, MESSAGES) from cause


def _stored_bytes(store: Store, until: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for entry in _data_before(store, until):
        queue, indexed = store.index_entry(entry.position, entry.envelope, entry.region)
        found[id(queue)] = found.get(id(queue), 0) + indexed.total_bytes
    return found
