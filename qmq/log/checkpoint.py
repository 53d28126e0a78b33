"""Checkpoints: all derived state at one point of both logs, so that a restart replays only later
entries.

File: magic "QMC1" | CRC-32C u32 of the rest | MessagePack of `Checkpoint`. Written to a temporary
file, flushed, renamed, folder flushed; the newest two are kept. If the checksum of one does not
match, the older one is used, or everything is replayed: retention may have deleted segments that
the older one still refers to. A checkpoint is only written after both logs were flushed up to its
positions; so a log that ends before a checkpoint has lost acknowledged data, and the store refuses
to open it.

A checkpoint is taken while the broker works: captured in the broker's thread, written in another
one, finished in the broker's. The capture takes the state at one moment between two turns. The
write flushes both logs up to that moment *first*, then the consume-log entries, then the checkpoint
itself: so a checkpoint never contains more than the logs on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from qmq.errors import DiskFull
from qmq.log import commit_mark
from qmq.log.consume_log import ENTRY_BYTES, Spill
from qmq.log.disk import Disk
from qmq.log.queue import Queue
from qmq.log.segment_index import UNREADABLE, checked_payload, with_checksum
from qmq.log.segments import FlushPlan
from qmq.log.store import ProjectionPlan, Store
from qmq.process.files import make_private

_MAGIC: Final = b"QMC1"
_KEEP: Final = 2
VERSION: Final = 1


class QueueState(msgspec.Struct, array_like=True):
    """The state of one queue. `tail` has the consume-log entries after the `persisted` ones, which
    are too few for a file.
    """

    snapshot: list[Any]
    start_sequence: int
    first_entry: int
    persisted: int
    tail: bytes
    shares: dict[str, list[Any]]
    lanes: dict[str, list[Any]] = {}
    """The groups' lanes, on an ordered subject."""
    steps: list[Any] | None = None
    """The state of the queue of steps."""


class Checkpoint(msgspec.Struct, array_like=True):
    """All derived state. Positions are ends: the state contains everything before them."""

    version: int
    index: int
    epoch: int
    time_ms: int
    message_start: int
    message_position: int
    action_start: int
    action_position: int
    queues: list[QueueState]
    epochs: list[tuple[int, int]] = []
    """The history: pairs of an epoch and its first index, ascending."""
    projection: Any = None
    """The state of the projection (qmq/log/store.py)."""


_QUEUES: Final = Checkpoint.__struct_fields__.index("queues")


def encode_queue(state: QueueState) -> msgspec.Raw:
    """One queue's state, for `encode`. One encoded object for each queue is nothing to walk through
    for the garbage collector.
    """
    return msgspec.Raw(msgspec.msgpack.encode(state))


def encode(checkpoint: Checkpoint, queues: list[msgspec.Raw] | None = None) -> bytes:
    """The content of the file. `queues` are encoded states in place of the checkpoint's own."""
    fields = list(msgspec.structs.astuple(checkpoint))
    if queues is not None:
        fields[_QUEUES] = queues
    return with_checksum(_MAGIC, msgspec.msgpack.encode(fields))


def decode(data: bytes) -> Checkpoint | None:
    """Decode a checkpoint; None if the file is damaged, empty or of another version."""
    payload = checked_payload(_MAGIC, data)
    if payload is None:
        return None
    try:
        found = msgspec.msgpack.decode(payload, type=Checkpoint)
    except UNREADABLE:
        return None
    return found if found.version == VERSION else None


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.qmc"), reverse=True)


def read_all(folder: Path, disk: Disk) -> Iterator[Checkpoint | None]:
    """Read the checkpoints, the newest first; None in the place of an invalid one."""
    return (decode(disk.read_file(path)) for path in _files(folder))


def load(folder: Path, disk: Disk | None = None) -> Checkpoint | None:
    """Load the newest valid checkpoint; None if there is none."""
    return next((found for found in read_all(folder, disk or Disk()) if found is not None), None)


def save(disk: Disk, folder: Path, index: int, data: bytes) -> None:
    """Write a checkpoint and delete all but the newest two. Safe in a thread.
    Raises DiskFull, FlushFailed.
    """
    make_private(folder)
    disk.replace(folder / f"checkpoint-{index:020d}.qmc", data)
    for path in _files(folder)[_KEEP:]:
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete all checkpoints: the next start replays everything."""
    for path in _files(folder):
        path.unlink()


SPILL_BYTES_MIN: Final = 16 * ENTRY_BYTES
"""A queue with fewer bytes of entries in memory stores them in the checkpoint, since thousands of
tiny writes cost more.
"""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """A captured checkpoint: call `run` in a thread, then `end_checkpoint`."""

    disk: Disk
    folder: Path
    flush: FlushPlan
    spills: tuple[Spill, ...]
    checkpoint: Checkpoint
    """Without the queues."""
    queues: list[msgspec.Raw]
    """The queues' states, encoded."""
    projection: ProjectionPlan | None = None

    def run(self) -> None:
        """Write the checkpoint. Raises FlushFailed,
        and DiskFull if there is no room for a new checkpoint.
        """
        self.flush.run()
        written = [path for spill in self.spills for path in spill.log.write_spill(spill)]
        self.disk.sync_files(written)
        if self.projection is not None:
            self.projection.run()
        data = encode(self.checkpoint, self.queues)
        save(self.disk, self.folder / "checkpoint", self.checkpoint.index, data)


def begin_checkpoint(store: Store) -> CheckpointPlan:
    """Capture all derived state. Actions that are not in the log yet are written first, because a
    replay would apply them a second time.

    Raises DiskFull. On a replica, run the plan when everything up to its index is committed: the
    content of a checkpoint cannot be undone.
    """
    store.write_actions()
    states: list[msgspec.Raw] = []
    spills: list[Spill] = []
    for queue in store.queues.values():
        state, spill = _capture(queue, store.last_time_ms - store.config.producer_expiry_ms)
        states.append(encode_queue(state))
        if spill is not None:
            spills.append(spill)
    messages, actions = store.applied_place()
    found = Checkpoint(
        VERSION,
        store.applied_index,
        store.epoch,
        store.last_time_ms,
        store.messages.start,
        messages,
        store.actions.start,
        actions,
        [],
        [each for each in store.epochs if each[1] <= store.applied_index],
    )
    projected = (
        store.projection.begin_checkpoint(found.index) if store.projection is not None else None
    )
    if projected is not None:
        found.projection = projected.state
    return CheckpointPlan(
        store.disk, store.folder, store.begin_flush(), tuple(spills), found, states, projected
    )


def _capture(queue: Queue, expire_before_ms: int) -> tuple[QueueState, Spill | None]:
    """Runs for all queues between two turns: 10,000 queues take as long as some hundred batches."""
    queue.producers.expire(expire_before_ms)
    index = queue.index
    persisted, tail, spill = index.persisted, b"", None
    if index.tail_bytes >= SPILL_BYTES_MIN:
        spill = index.spill()
        persisted += index.tail_bytes // ENTRY_BYTES
    else:
        tail = index.tail
    shares = (
        {group: share.to_state() for group, share in queue.shares.items()} if queue.shares else {}
    )
    lanes = {group: share.to_state() for group, share in queue.lanes.items()} if queue.lanes else {}
    steps = queue.steps.to_state() if queue.steps is not None else None
    return QueueState(
        *(queue.to_snapshot(), queue.start_sequence, index.first, persisted, tail, shares, lanes),
        steps,
    ), spill


def end_checkpoint(store: Store, plan: CheckpointPlan) -> int:
    """Finish a plan that was run. Returns the index up to which everything survives a power cut."""
    for spill in plan.spills:
        spill.log.spilled(spill)
    if plan.projection is not None and store.projection is not None:
        store.projection.end_checkpoint(plan.projection)
    return store.end_flush(plan.flush)


def close_store(store: Store) -> None:
    """Flush, write a checkpoint, close. The next opening replays nothing. Raises FlushFailed,
    DiskFull, and the store stays open then.
    """
    plan = begin_checkpoint(store)
    plan.run()
    end_checkpoint(store, plan)
    if not store.is_replicated or store.committed_index >= store.applied_index:
        with suppress(DiskFull):  # the mark then lags
            commit_mark.write(store.disk, store.folder, commit_mark.note(store))
    store.close()
