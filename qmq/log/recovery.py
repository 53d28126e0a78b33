"""Opening a store after whatever happened, and closing it so that the next opening is short.

Opening: take the newest whole checkpoint, walk both logs from it on, cut a torn tail, refuse damage (qmq/log/envelopes.py says which is
which), rebuild what is missing of the derived files. Without a checkpoint everything is replayed; each segment opens with a snapshot, so
retention never takes what a replay needs.

    found on disk                                 outcome
    torn tail                                     cut off; nobody was promised it
    damage in a flushed part, a missing segment   LogDamaged: refuses to open, cuts nothing
    a log that ends before its checkpoint         LogDamaged: acknowledged data is gone
    checkpoint damaged, empty or absent           the older one, or a full replay
    consume log gone or short                     rebuilt from the message log
    empty log files                               an empty log
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from qmq.batch import BatchView, Kind, tag_bloom
from qmq.clock import Clock
from qmq.errors import CorruptBatch, LogDamaged
from qmq.log import checkpoint as checkpoints
from qmq.log.actions import decode_actions
from qmq.log.checkpoint import Checkpoint, QueueState
from qmq.log.config import LogConfig
from qmq.log.consume_log import ENTRY, ConsumeLog, IndexEntry
from qmq.log.consumption import Share
from qmq.log.disk import Disk
from qmq.log.envelopes import Entry, judge, unwrap, walk
from qmq.log.queue import Queue
from qmq.log.segments import Segments
from qmq.log.store import Store

Progress = Callable[[str, int, int], None]
"""Told what is being replayed, the bytes done and the bytes in all."""


def _no_progress(_what: str, _done: int, _total: int) -> None:
    return


def open_store(
    folder: Path, config: LogConfig, clock: Clock, *, disk: Disk | None = None, progress: Progress = _no_progress
) -> Store:
    """Open the folder's store, or make an empty one.

    Raises:
        FolderInUse: another process has it.
        LogDamaged: acknowledged data is hurt; nothing was changed.
    """
    store = Store(folder, config, clock, disk or Disk())
    try:
        _recover(store, progress)
    except BaseException:
        store.close()
        raise
    return store


def _recover(store: Store, progress: Progress) -> None:
    found = checkpoints.load(store.folder / "checkpoint")
    lost: list[tuple[Queue, int]] = []
    message_from, action_from = store.messages.start, store.actions.start
    if found is not None:
        _require_consistent(store, found)
        lost = _restore(store, found)
        message_from, action_from = found.message_position, found.action_position
    else:
        for path in store.consume_folder.iterdir():
            path.unlink()
    _replay(store, store.messages, message_from, found is None, _message_entry, progress)
    _replay(store, store.actions, action_from, found is None, _action_entry, progress)
    if lost:
        _rebuild(store, lost, message_from, progress)
    _settle_ends(store)


def _require_consistent(store: Store, found: Checkpoint) -> None:
    logs = (
        (store.messages, found.message_start, found.message_position),
        (store.actions, found.action_start, found.action_position),
    )
    for segments, start, position in logs:
        segments.drop_files_before(start)
        if segments.start > start:
            raise LogDamaged(
                f"{segments.folder.name}: the segment that begins at {start} is missing (the oldest is {segments.start}): "
                "restore it from a copy"
            )
        if segments.end < position:
            raise LogDamaged(
                f"{segments.folder.name}: the log ends at {segments.end}, but was flushed up to {position} when the last "
                "checkpoint was written: its end is missing. Restore the segment from a copy; or, to go on without what "
                "is lost, delete the checkpoint folder"
            )


# --- the checkpoint ----------------------------------------------------------------------------------------------------


def _restore(store: Store, found: Checkpoint) -> list[tuple[Queue, int]]:
    """Load all state; give the queues whose consume-log files are not whole, each with its stored bytes ever."""
    store.index, store.epoch, store.last_time_ms = found.index, found.epoch, found.time_ms
    lost: list[tuple[Queue, int]] = []
    for state in found.queues:
        queue = store.open_queue(state.snapshot[0], state.snapshot[1])
        _restore_queue(store, queue, state)
        if not queue.index.is_whole():
            lost.append((queue, queue.cumulative_bytes))
    return lost


def _restore_queue(store: Store, queue: Queue, state: QueueState) -> None:
    queue.load_snapshot(state.snapshot)
    queue.start_sequence = state.start_sequence
    queue.index = ConsumeLog(store.disk, store.consume_folder, queue.id, state.first_entry, state.persisted)
    for fields in ENTRY.iter_unpack(state.tail):
        queue.index.append(IndexEntry._make(fields))
    queue.shares = {group: Share.from_state(share) for group, share in state.shares.items()}


# --- replay ------------------------------------------------------------------------------------------------------------


def _replay(
    store: Store, segments: Segments, position: int, is_full: bool, apply: Callable[[Store, Entry, bool], None],
    progress: Progress,
) -> None:  # fmt: skip
    """Apply every entry from `position` on; cut a torn tail."""
    begin, total = position, segments.end - position
    first = segments.start if is_full else -1
    try:
        for entry in walk(segments, position):
            if entry.position == first and entry.envelope.kind == Kind.SNAPSHOT:
                apply(store, entry, True)
                first = entry.end
            else:
                apply(store, entry, False)
            position = entry.end
            store.index = max(store.index, entry.envelope.index)
            store.last_time_ms = max(store.last_time_ms, entry.envelope.append_time_ms)
            progress(segments.folder.name, position - begin, total)
    except CorruptBatch as cause:
        judge(segments, position, 0 if is_full else begin, cause)
        segments.truncate(position)


def _message_entry(store: Store, entry: Entry, is_base: bool) -> None:
    if entry.envelope.kind == Kind.SNAPSHOT:
        if is_base:
            for state in msgspec.msgpack.decode(unwrap(entry.region)):
                store.open_queue(state[0], state[1]).load_snapshot(state)
        return
    queue, indexed = _index_entry(store, entry)
    queue.add(indexed)


def _index_entry(store: Store, entry: Entry) -> tuple[Queue, IndexEntry]:
    view = BatchView(entry.envelope, entry.region)
    queue = store.open_queue(view.subject, view.header.partition)
    return queue, IndexEntry(
        entry.envelope.base_sequence, entry.position, entry.envelope.append_time_ms, view.header.producer_id,
        view.header.batch_sequence, tag_bloom(view.tag_hashes()), queue.cumulative_bytes, entry.envelope.total_bytes,
        view.count,
    )  # fmt: skip


def _action_entry(store: Store, entry: Entry, is_base: bool) -> None:
    if entry.envelope.kind == Kind.SNAPSHOT:
        if is_base:
            for subject, partition, group, state in msgspec.msgpack.decode(unwrap(entry.region), strict=False):
                store.open_queue(subject, partition).shares[group] = Share.from_state(state)
        return
    for action in decode_actions(unwrap(entry.region)):
        store.apply(action)


def _rebuild(store: Store, lost: list[tuple[Queue, int]], until: int, progress: Progress) -> None:
    """Index the lost queues anew from the oldest message on; what lies behind `until` was indexed by the replay."""
    stored = _stored_bytes(store, until)
    tails: dict[int, list[IndexEntry]] = {}
    cumulative: dict[int, int] = {}
    for queue, bytes_ever in lost:
        tails[id(queue)] = [entry for entry in queue.index.entries_in_memory() if entry.position >= until]
        cumulative[id(queue)] = bytes_ever - stored.get(id(queue), 0)
        queue.index = ConsumeLog(store.disk, store.consume_folder, queue.id)
    for entry in _data_before(store, until):
        queue, indexed = _index_entry(store, entry)
        if id(queue) in cumulative:
            queue.index.append(indexed._replace(cumulative_bytes=cumulative[id(queue)]))
            cumulative[id(queue)] += indexed.total_bytes
        progress("consume", entry.end - store.messages.start, until - store.messages.start)
    for queue, _ in lost:
        for indexed in tails[id(queue)]:
            queue.index.append(indexed)


def _data_before(store: Store, until: int) -> Iterator[Entry]:
    for entry in walk(store.messages, store.messages.start):
        if entry.position >= until:
            return
        if entry.envelope.kind == Kind.DATA:
            yield entry


def _stored_bytes(store: Store, until: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for entry in _data_before(store, until):
        queue, indexed = _index_entry(store, entry)
        found[id(queue)] = found.get(id(queue), 0) + indexed.total_bytes
    return found


def _settle_ends(store: Store) -> None:
    """What is on disk now is flushed, then it is the truth; a sequence that a consumer ever saw is not given to another message."""
    plan = store.begin_flush()
    plan.run()
    store.end_flush(plan)
    store.committed = store.messages.end
    for queue in store.queues.values():
        seen = [share.next_sequence for share in queue.shares.values()]
        queue.next_sequence = max([queue.next_sequence, *seen])
        queue.visible_sequence = queue.next_sequence
