"""Begins the log of an empty store with sealed segments whose bytes are in the object store only (docs/TIERING.md).

Their entries are applied to the derived state, as if they had been replicated one by one. The segments are checked against the log of
another replica: the state that follows from them must be the one with which that log continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from qmq.log.envelopes import Entry, unwrap
from qmq.log.opening_snapshots import SnapshotReader
from qmq.log.recent_writes import MESSAGES
from qmq.log.segment_index import SegmentIndex
from qmq.log.store import PendingEntry, Store
from qmq.wire.batch import Envelope, Kind


class CannotTake(Exception):
    """The log cannot begin with these segments. The store must start over without them."""


def take_segments(
    store: Store, indexes: Iterable[SegmentIndex], entries_of: Callable[[SegmentIndex], Iterable[Entry]], opening: PendingEntry
) -> None:
    """Put the segments before the beginning of an empty store's message log. Blocks: runs in a thread.

    `indexes` have no first envelopes yet. `opening` is the entry after the segments, in another replica's log.

    Raises CannotTake, DiskFull, and the errors of `entries_of`.
    """
    taken: list[SegmentIndex] = []
    written: set[Path] = set()
    last: Envelope | None = None
    for index in indexes:
        if not taken:
            store.base_positions[MESSAGES] = index.base
        head = b""
        for entry in entries_of(index):
            head = head or entry.head
            last = _after(last, entry.envelope)
            store.apply_entry(MESSAGES, entry.position, entry.envelope, entry.region)
            store.note_epoch(entry.envelope.epoch, entry.envelope.index)
            store.last_time_ms = max(store.last_time_ms, entry.envelope.append_time_ms)
        taken.append(replace(index, head=head))
        written |= _spill(store)
    if last is None:
        raise CannotTake("the segments have no entries")
    _require_continues(store, last, opening)
    store.disk.sync_files(written)
    for index in taken:
        store.messages.write_index(index)
    store.messages.begin_with(taken)
    store.gaps_until = opening.envelope.index - 1


def _after(last: Envelope | None, found: Envelope) -> Envelope:
    if last is not None and (found.index <= last.index or found.epoch < last.epoch):
        raise CannotTake(f"{(found.epoch, found.index)} follows {(last.epoch, last.index)} in the object store")
    return found


def _require_continues(store: Store, last: Envelope, opening: PendingEntry) -> None:
    """Raise CannotTake unless the other replica's log continues with this state."""
    envelope = opening.envelope
    if envelope.kind != Kind.SNAPSHOT or envelope.index <= last.index or envelope.epoch < last.epoch:
        raise CannotTake(f"the group's log does not continue behind {(last.epoch, last.index)} at {opening.position}")
    for state in SnapshotReader().states(unwrap(opening.region)):
        if _counts(store, state) != tuple(state[3:5]):
            raise CannotTake(f"the object store has other messages of {state[0]}/{state[1]} than the group: another log uses the prefix")


def _counts(store: Store, state: list[Any]) -> tuple[int, int]:
    queue = store.queue(state[0], state[1])
    return (queue.cumulative_bytes, queue.last_append_ms) if queue is not None else (0, 0)


def _spill(store: Store) -> set[Path]:
    """Write the consume logs to their files: memory must not grow with the log."""
    written: set[Path] = set()
    for queue in store.queues.values():
        spill = queue.index.spill()
        if spill is not None:
            written |= set(queue.index.write_spill(spill))
            queue.index.spilled(spill)
    return written
