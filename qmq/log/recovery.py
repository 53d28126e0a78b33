"""Opens a store after a stop, a crash or damage.

Opening: take the newest whole checkpoint, walk both logs from it on in the order of their index,
cut a torn tail, refuse damage (qmq/log/envelopes.py says which is which), rebuild missing consume
logs from the message log. Without a checkpoint everything is replayed; each segment opens with a
snapshot, so retention never takes what a replay needs.

    found on disk                                 outcome
    torn tail                                     cut off; it was never acknowledged
    damage in a flushed part, a missing segment   LogDamaged: refuses to open, cuts nothing
    a log that ends before its checkpoint         LogDamaged: acknowledged data is missing
    checkpoint damaged, empty or absent           the older one; a full replay if retention deleted
                                                  segments since, or there is none
    the same, and a replay makes no schedule      LogDamaged: a delay group's schedule is the only
                                                  copy of what retention deleted
    consume log missing, short or unreadable      rebuilt from the message log
    once
    a sector that cannot be read (EIO)            like a checksum that does not hold, but never
                                                  taken for a torn tail
    empty log files                               an empty log
    a commit mark that names what is not here     taken back, before anything is appended; committed
                                                  entries are lost
    a commit mark that names what is here         its index is the committed index, if the
                                                  checkpoint's is lower

A replica's logs are one sequence: if an index is missing, everything after it is cut from both
logs, since this replica cannot have confirmed it. `Store.lost_tail` says whether cut entries may
have been acknowledged.

The log of an empty store may begin with sealed segments whose bytes are in the object store only
(docs/TIERING.md; `take_segments`). Their entries are applied to the derived state, as if they had
been replicated one by one. The segments are checked against the log of another replica: the state
that follows from them must be the one with which that log continues.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from qmq.errors import CorruptBatch, LogDamaged
from qmq.log import checkpoint, commit_mark
from qmq.log.checkpoint import Checkpoint, QueueState
from qmq.log.consume_log import ENTRY, ConsumeLog, IndexEntry
from qmq.log.disk import Disk
from qmq.log.envelopes import (
    Entry,
    SnapshotReader,
    damaged,
    head_at,
    is_torn,
    require_torn_tail,
    walk_waiting,
)
from qmq.log.group_state import GroupState
from qmq.log.lane_state import GroupLaneState
from qmq.log.log_config import Flush, LogConfig
from qmq.log.queue import Queue
from qmq.log.reading import StoredBytes
from qmq.log.recent_writes import MESSAGES
from qmq.log.segment_index import SegmentIndex
from qmq.log.segments import Segments
from qmq.log.step_state import StepState
from qmq.log.store import PendingEntry, Projection, Store
from qmq.process.event_loop import Clock
from qmq.wire.batch import Envelope, Kind, unwrap


def rebuild(
    store: Store,
    lost: list[tuple[Queue, int]],
    until: int,
    progress: Callable[[str, int, int], None],
) -> None:
    """Index the lost queues again, from the oldest message to `until`: the replay has indexed all
    later entries. Raises LogDamaged.
    """
    stored = _stored_bytes(store, until)
    tails: dict[int, list[IndexEntry]] = {}
    cumulative: dict[int, int] = {}
    for queue, bytes_ever in lost:
        tails[id(queue)] = [
            entry for entry in queue.index.entries_in_memory() if entry.position >= until
        ]
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


NOTHING_YET: Final = 1 << 62
"""An index greater than all others,
for a log that started over in its middle and has no entry yet.
"""

Progress = Callable[[str, int, int], None]
"""Called with the name of the replayed log, the bytes done and the total of bytes."""


def _no_progress(_what: str, _done: int, _total: int) -> None:
    return


def open_store(
    folder: Path,
    config: LogConfig,
    clock: Clock,
    *,
    disk: Disk | None = None,
    progress: Progress = _no_progress,
    is_replicated: bool = False,
    until: int | None = None,
    projection: Projection | None = None,
    stored: StoredBytes | None = None,
) -> Store:
    """Open the folder's store, or make an empty one. A replica may cut everything after index
    `until`.

    `projection` gets every entry after its checkpoint. `stored` reads segments that are only in the
    object store.

    Raises: FolderInUse: another process has it. LogDamaged: acknowledged data is damaged; nothing
    was changed. Overloaded: the object store does not answer, and without a checkpoint or a consume
    log everything must be read.
    """
    store = Store(folder, config, clock, disk or Disk(), is_replicated=is_replicated, stored=stored)
    store.projection = projection
    try:
        _recover(store, progress, until)
    except BaseException:
        store.close()
        raise
    return store


def _recover(store: Store, progress: Progress, until: int | None) -> None:
    found = _find_checkpoint(store)
    lost: list[tuple[Queue, int]] = []
    place = [store.messages.start, store.actions.start]
    if found is not None:
        lost = _restore(store, found)
        place = [found.message_position, found.action_position]
    else:
        for path in store.consume_folder.iterdir():
            path.unlink()
    if store.projection is not None:
        if found is not None:
            store.projection.load(found.projection, found.index + 1)
        else:
            store.projection.load(None, whole_from(store) or NOTHING_YET)
    _Replay(store, place, found is not None, progress, until).run()
    if lost:
        rebuild(store, lost, place[0], progress)
    _settle_ends(store)
    store.lost_tail |= commit_mark.settle(store) and until is None
    if store.is_replicated:
        store.start()  # replicas will read from there: find damage now, while it can be repaired


def _find_checkpoint(store: Store) -> Checkpoint | None:
    """The checkpoint to begin with; None if everything must be replayed. Raises LogDamaged."""
    damaged = 0
    for found in checkpoint.read_all(store.folder / "checkpoint", store.disk):
        if found is None:
            damaged += 1
            continue
        if damaged and (
            found.message_start < store.messages.start or found.action_start < store.actions.start
        ):
            break
        _require_consistent(store, found)
        return found
    if damaged:
        _require_replay(store)
    return None


def _require_replay(store: Store) -> None:
    """A projection follows from the whole log only: the files that it keeps would be deleted.
    Raises LogDamaged.
    """
    if store.projection is not None and whole_from(store) != 1:
        raise LogDamaged(
            f"the newest checkpoint of {store.folder} is damaged, "
            "and retention has deleted entries without which the schedule cannot be read: "
            "restore the checkpoint folder from a copy. Or, in a group with other replicas, move "
            "the whole data folder away and start this replica again: it copies its data from them"
        )


def _require_consistent(store: Store, found: Checkpoint) -> None:
    logs = (
        (store.messages, found.message_start, found.message_position),
        (store.actions, found.action_start, found.action_position),
    )
    for segments, start, position in logs:
        segments.drop_files_before(start)
        if segments.start > start:
            raise LogDamaged(
                f"{segments.folder.name}: the segment that begins at {start} is missing (the "
                f"oldest is {segments.start}): restore it from a copy"
            )
        if segments.end < position:
            # without a checkpoint, a schedule whose entries retention has deleted would be deleted,
            # too
            last = (
                "delete the checkpoint folder"
                if store.projection is None
                else "in a group with other replicas, move the data folder away"
            )
            raise LogDamaged(
                f"{segments.folder.name}: the log ends at {segments.end}, but was flushed "
                f"up to {position} when the last checkpoint was written: its end is missing. "
                f"Restore the segment from a copy; or, to continue without the lost entries, {last}"
            )


# --- the checkpoint -------------------------------------------------------------------------------


def _restore(store: Store, found: Checkpoint) -> list[tuple[Queue, int]]:
    """Load all state. Returns the queues whose consume-log files are incomplete, each with its
    stored bytes.
    """
    store.index, store.epoch, store.last_time_ms = found.index, found.epoch, found.time_ms
    store.epochs = [(epoch, first) for epoch, first in found.epochs]
    store.committed_index = found.index
    store.base_positions = [-1, -1]
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
    queue.index = ConsumeLog(
        store.disk, store.consume_folder, queue.id, state.first_entry, state.persisted
    )
    for fields in ENTRY.iter_unpack(state.tail):
        queue.index.append(IndexEntry._make(fields))
    queue.shares = {group: GroupState.from_state(share) for group, share in state.shares.items()}
    queue.lanes = {group: GroupLaneState.from_state(share) for group, share in state.lanes.items()}
    if state.steps is not None:
        queue.steps = StepState.from_state(state.steps)


# --- replay ---------------------------------------------------------------------------------------


class _Replay:
    """Applies every entry of both logs from a place on, in the order of the index, and cuts entries
    that do not belong.
    """

    def __init__(
        self,
        store: Store,
        place: list[int],
        is_from_checkpoint: bool,
        progress: Progress,
        until: int | None,
    ) -> None:
        self._store = store
        self._logs = store.logs
        self._begin = place
        self._done = list(place)
        self._is_from_checkpoint = is_from_checkpoint
        self._progress = progress
        self._until = until

    def run(self) -> None:
        """Recover the store. Raises LogDamaged."""
        store = self._store
        gaps_until = (
            0
            if self._is_from_checkpoint
            else max(_first_index(segments) for segments in self._logs)
        )
        for _, log, entry in heapq.merge(*[self._entries(number) for number in (0, 1)]):
            index = entry.envelope.index
            if store.is_replicated and self._ends_before(index, gaps_until):
                break
            store.apply_entry(log, entry.position, entry.envelope, entry.region)
            self._note(log, entry)
        for log, segments in enumerate(self._logs):
            if store.is_replicated and self._done[log] < segments.end:
                store.lost_tail |= self._until is None and not is_torn(segments, self._done[log])
                segments.truncate(self._done[log])
            if store.is_replicated:
                segments.drop_empty()

    def _ends_before(self, index: int, gaps_until: int) -> bool:
        is_gap = index != self._store.index + 1 and index > gaps_until
        return is_gap or (self._until is not None and index > self._until)

    def _note(self, log: int, entry: Entry) -> None:
        store, envelope = self._store, entry.envelope
        self._done[log] = entry.end
        store.index = max(store.index, envelope.index)
        store.note_epoch(envelope.epoch, envelope.index)
        store.epoch = max(store.epoch, envelope.epoch)
        store.last_time_ms = max(store.last_time_ms, envelope.append_time_ms)
        total = sum(segments.end for segments in self._logs) - sum(self._begin)
        self._progress("log", sum(self._done) - sum(self._begin), total)

    def _entries(self, log: int) -> Iterator[tuple[int, int, Entry]]:
        """(index, log, entry) of one log, up to its torn tail."""
        segments, position = self._logs[log], self._begin[log]
        try:
            for entry in walk_waiting(segments, position):
                yield entry.envelope.index, log, entry
                position = entry.end
        except CorruptBatch as cause:
            flushed = self._begin[log] if self._is_from_checkpoint else 0
            require_torn_tail(
                segments,
                position,
                flushed,
                cause,
                log=log,
                trusts_envelopes=not self._store.is_replicated,
            )
            if not self._store.is_replicated:
                segments.truncate(position)


def whole_from(store: Store) -> int | None:
    """The lowest index from which on both logs have every entry; None for a log that started over
    and is empty. Raises LogDamaged.
    """
    firsts = [1 if segments.start == 0 else _first_index(segments) for segments in store.logs]
    return max(firsts) if all(firsts) else None


def _first_index(segments: Segments) -> int:
    """Index of the oldest entry here, if older ones are deleted."""
    try:
        head = head_at(segments, segments.start) if segments.start else None
    except CorruptBatch:
        return 0
    return 0 if head is None else head.index


def _settle_ends(store: Store) -> None:
    """Flush the logs as they are now. From here on they count, so a sequence that a consumer saw
    never goes to another message.
    """
    plan = store.begin_flush()
    plan.run()
    store.end_flush(plan)
    if not store.is_replicated or store.config.flush is Flush.SYNC:
        store.flushed_index = store.index
    if not store.is_replicated:
        store.committed_index = store.index
    for queue in store.queues.values():
        seen = [share.next_sequence for share in queue.shares.values()]
        queue.next_sequence = max([queue.next_sequence, *seen])
        queue.visible_sequence = queue.next_sequence


class CannotTake(Exception):
    """The log cannot begin with these segments. The store must start over without them."""


def take_segments(
    store: Store,
    indexes: Iterable[SegmentIndex],
    entries_of: Callable[[SegmentIndex], Iterable[Entry]],
    opening: PendingEntry,
) -> None:
    """Put the segments before the beginning of an empty store's message log. Blocks: runs in a
    thread.

    `indexes` have no first envelopes yet. `opening` is the entry after the segments, in another
    replica's log.

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
        raise CannotTake(
            f"{(found.epoch, found.index)} follows {(last.epoch, last.index)} in the object store"
        )
    return found


def _require_continues(store: Store, last: Envelope, opening: PendingEntry) -> None:
    """Raise CannotTake unless the other replica's log continues with this state."""
    envelope = opening.envelope
    if (
        envelope.kind != Kind.SNAPSHOT
        or envelope.index <= last.index
        or envelope.epoch < last.epoch
    ):
        raise CannotTake(
            f"the group's log does not continue behind {(last.epoch, last.index)} at "
            f"{opening.position}"
        )
    for state in SnapshotReader().states(unwrap(opening.region)):
        if _counts(store, state) != tuple(state[3:5]):
            raise CannotTake(
                f"the object store has other messages of {state[0]}/{state[1]} than the "
                "group: another log uses the prefix"
            )


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
