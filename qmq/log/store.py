"""The store: both logs, and the state that follows from them, in one folder of one broker.

    message/       the message log
    action/        the action log
    consume/       the queues' consume logs
    checkpoint/    the newest two checkpoints
    lock

One thread drives it. It never blocks, except in methods with `write` or `run` in their names. A
turn of the broker is: `append` the producers' batches, `act` on the consumers' operations,
`write_actions`, and flush by policy. Entries that `append` and `write_actions` have written survive
a killed process. Flushed entries survive a power cut.

All entries of both logs share one index. `commit(index)` commits the entries up to an index and
makes them visible to consumers. A single node commits entries when they are written (`Flush.ASYNC`)
or flushed (`Flush.SYNC`), a replica when a majority of its group has them. On a slave
(`qmq.log.follower`) entries wait in `pending` until they are committed, and only then change the
derived state; so a slave's state never contains entries that a new master may cut.

A *projection* is state that follows from a store's logs, besides queues and shares, such as the
delay server's schedule. The store passes every entry of the projection's kinds to it once, in the
order of the index: on a master when the entry is written, on a slave when it is committed, at a
start when it is replayed. A projection may keep files, whose lengths are part of its state. A
checkpoint holds the state, and opening cuts the files back to these lengths before the replay. So a
projection is a function of the log, the same on every replica."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

from google_crc32c import value as crc32c

from qmq.errors import CorruptBatch, DiskFull, LogDamaged, check
from qmq.limits import BATCH_BYTES_MAX
from qmq.log import command_messages
from qmq.log.actions import (
    AnyAction,
    LaneGrant,
    LaneInherit,
    LaneUnpark,
    ScheduleAction,
    ScheduleStruct,
    SettleAction,
    UnwrittenActions,
    decode_actions,
)
from qmq.log.command_messages import QueueErasure
from qmq.log.consume_log import IndexEntry
from qmq.log.disk import Disk, FolderLock, FreeSpace, Unflushed
from qmq.log.envelopes import (
    SnapshotReader,
    begins_at,
    entry_at,
    epoch_of,
    first_index,
    to_payloads,
    with_epoch,
)
from qmq.log.group_state import Settled
from qmq.log.log_config import Flush, LogConfig
from qmq.log.queue import CHANGES, Queue, Sealed, apply
from qmq.log.reading import ObjectDamaged, StoredBytes
from qmq.log.recent_writes import ACTIONS, MESSAGES, Place, Tail, TailCache, Write, WriteRun
from qmq.log.segments import FlushPlan, Segments
from qmq.log.step_record import Effect, Settlement, record_of, step_batch
from qmq.log.step_state import Source, StepState
from qmq.model import STEPS, Partition, QueueId
from qmq.process.event_loop import Clock
from qmq.process.files import make_private
from qmq.wire.batch import (
    ENVELOPE_BYTES,
    BatchView,
    Envelope,
    Kind,
    parse_envelope,
    place,
    region_crc_of,
    sent_sizes,
    unwrap,
    wrap,
)
from qmq.wire.batch_columns import (
    REGION,
    BatchFlag,
    RegionHeader,
    check_region,
    parse_header,
    tag_bloom,
    tag_hash,
)
from qmq.wire.frame_payloads import Produced

log = logging.getLogger("qmq.log")


class ProjectionPlan(Protocol):
    """A captured state: `run` it in a thread, then give it to `Projection.end_checkpoint`."""

    @property
    def state(self) -> Any:
        """The state for the checkpoint; MessagePack can encode it.
        None if there is no usable state yet.
        """
        ...

    def run(self) -> None:
        """Write and sync the files that the state refers to. Raises FlushFailed, DiskFull."""
        ...


class Projection(Protocol):
    """All methods except `ProjectionPlan.run` are called in the store's thread."""

    def load(self, state: Any | None, replayed_from: int) -> None:
        """Load `state` from the checkpoint (None without one) while the store is being opened, and
        cut the files back.

        Every entry from `replayed_from` on follows, and perhaps some before it. If `replayed_from`
        is not 1 and there is no state, the beginning is missing. Raises LogDamaged.
        """
        ...

    def take(self, index: int, append_time_ms: int, region: bytes, region_crc: int) -> None:
        """Handle a batch in the message log at `index`."""
        ...

    def act(self, index: int, append_time_ms: int, action: ScheduleAction) -> None:
        """Handle an action in the action log at `index`. The actions of one entry come one after
        another with the same index.
        """
        ...

    def begin_checkpoint(self, index: int) -> ProjectionPlan:
        """Capture the state. The projection has got every entry up to `index`."""
        ...

    def end_checkpoint(self, plan: Any) -> None:
        """Handle the end of a checkpoint: the state of this plan is on disk."""
        ...

    def close(self) -> None:
        """Close files. State that is only in memory follows from the log."""
        ...


class Intake(NamedTuple):
    """A producer's batch, checked and parsed."""

    queue: Queue
    region: bytes
    region_crc: int
    header: RegionHeader
    tag_bloom: int
    awaits_flush: bool = False


class StepIntake(NamedTuple):
    """A step as its consumer sent it. Its effects have no numbers yet."""

    producer_id: int
    number: int
    """With the producer id, by this number a repeated step is known."""
    settlements: tuple[Settlement, ...]
    effects: tuple[Effect, ...]
    is_again: bool = False
    """It may be stored already."""


class PendingEntry(NamedTuple):
    """An entry that a slave has written and that is not known to be committed."""

    log: int
    position: int
    envelope: Envelope
    region: bytes


class Store:
    """The storage of one broker. `qmq.log.recovery.open_store` makes it."""

    def __init__(
        self,
        folder: Path,
        config: LogConfig,
        clock: Clock,
        disk: Disk,
        *,
        is_replicated: bool = False,
        stored: StoredBytes | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.clock = clock
        self.disk = disk
        make_private(folder)
        self.lock = FolderLock(folder)
        try:
            self.messages = Segments(disk, folder / "message", config.segment_bytes, stored)
            self.actions = Segments(disk, folder / "action", config.action_segment_bytes)
        except BaseException:
            self.lock.release()
            raise
        self.logs = (self.messages, self.actions)
        """Both logs, by log number (`qmq.log.recent_writes`)."""
        self.consume_folder = folder / "consume"
        make_private(self.consume_folder)
        self.queues: dict[tuple[bytes, int], Queue] = {}
        self.cache = TailCache(config.cache_bytes)
        self.is_replicated = is_replicated
        self.tail = Tail(config.tail_bytes if is_replicated else 0)
        self.index = 0
        self.epoch = 1
        self.epochs: list[tuple[int, int]] = []
        """(epoch, its first index), ascending: the history by which replicas compare their logs."""
        self.last_time_ms = 0
        self.flushed_index = 0
        self.committed_index = 0
        self.pending: deque[PendingEntry] = deque()
        self.gaps_until = 0
        """Up to this index the message log came from the object store as a whole. Later entries
        follow one by one.
        """
        self.base_positions = [self.messages.start, self.actions.start]
        """For each log, the position of the snapshot on which the state is based; -1 after other
        entries, or if a checkpoint was loaded.
        """
        self._snapshots = (SnapshotReader(), SnapshotReader())
        self.lost_tail = False
        """True if opening cut entries that may have been acknowledged."""
        self.unflushed = Unflushed()
        self.flush_wanted = 0
        """The highest index that a request waits for to be flushed, with every flush policy."""
        self.unwritten = UnwrittenActions()
        self.droppable: list[Path] = []  # files of dropped queues, for retention to delete
        self.projection: Projection | None = None
        """Other state that follows from the logs; set before anything is replayed."""
        self.commits_at_once = not is_replicated and config.flush is Flush.ASYNC
        self._invisible: deque[tuple[int, Queue, int]] = deque()
        self.space = FreeSpace(disk, folder, config.disk_free_bytes_min)
        self._is_held = True

    # --- queues -----------------------------------------------------------------------------------

    def queue(self, subject: str, partition: int) -> Queue | None:
        """The queue; None if it never had messages and was not opened."""
        return self.queues.get((subject.encode(), partition))

    def open_queue(self, subject: str, partition: int) -> Queue:
        """The queue. An empty one is created if it is new."""
        key = (subject.encode(), partition)
        queue = self.queues.get(key)
        if queue is None:
            queue_id = QueueId(subject, Partition(partition))
            queue = self.queues[key] = Queue(self.disk, self.consume_folder, queue_id)
        return queue

    # --- appending --------------------------------------------------------------------------------

    def append(self, batches: list[Intake], *, are_new: bool = False) -> list[Produced]:
        """Write the batches, in order, with one write, and return where each is stored. A batch
        that is stored already is not written again; with `are_new` the caller has found out that
        there is none, and no two equal ones.

        Raises DiskFull, and none of them is stored then.
        """
        size = ENVELOPE_BYTES * len(batches)
        for batch in batches:
            size += len(batch.region)
        self.space.require(size, self.messages.end)
        if self.messages.begins(size):
            self._open_segment(MESSAGES, (queue.to_snapshot() for queue in self.queues.values()))
        results: list[Produced] = []
        entries: list[tuple[Queue, IndexEntry, Produced]] = []
        buffers: list[bytes] = []
        seen: dict[tuple[Queue, int, int], Produced] = {}
        time_ms = self.last_time_ms = max(self.clock.time_ms(), self.last_time_ms)
        position, index, flushed = self.messages.end, self.index, self.messages.flushed
        following: dict[Queue, tuple[int, int]] = {}
        for batch in batches:
            queue, header = batch.queue, batch.header
            produced = None
            if not are_new:
                key = (queue, header.producer_id, header.batch_sequence)
                produced = seen.get(key) or queue.find_duplicate(header)
            if produced is None:
                sequence, cumulative = following.get(queue) or (
                    queue.next_sequence,
                    queue.cumulative_bytes,
                )
                index += 1
                total = ENVELOPE_BYTES + len(batch.region)
                buffers.append(
                    place(
                        Kind.DATA,
                        total,
                        batch.region_crc,
                        sequence,
                        self.epoch,
                        index,
                        time_ms,
                        flushed,
                    )
                )
                buffers.append(batch.region)
                # Tuples are made by `tuple.__new__`: a named tuple's own is one more call for each
                # of them, together a microsecond for a batch.
                entry = tuple.__new__(
                    IndexEntry,
                    (
                        sequence,
                        position,
                        time_ms,
                        header.producer_id,
                        header.batch_sequence,
                        batch.tag_bloom,
                        cumulative,
                        total,
                        header.count,
                    ),
                )
                position += total
                following[queue] = (sequence + header.count, cumulative + total)
                produced = tuple.__new__(Produced, (sequence, time_ms))
                entries.append((queue, entry, produced))
                if not are_new:
                    seen[key] = produced
            results.append(produced)
        if buffers:
            first = self.index + 1
            self._write(MESSAGES, buffers, position - self.messages.end, len(entries))
            self._stored(entries, buffers, first)
        return results

    def _write(self, log: int, buffers: list[bytes], size: int, count: int) -> None:
        """Write `count` entries, then increase the index. Raises DiskFull."""
        segments = self.logs[log]
        position = segments.append(buffers, size)
        first = self.index + 1
        self.index += count
        newest = self.epochs[-1] if self.epochs else None
        if newest is None or newest[0] != self.epoch or first < newest[1]:
            self.note_epoch(self.epoch, first)
        if not self.unflushed.is_open:
            self.unflushed.wrote(first, self.clock.monotonic_ms())
        if self.is_replicated:
            self.tail.add(
                Write(
                    first,
                    self.index,
                    WriteRun(log, segments.bases[-1], position, size, tuple(buffers)),
                )
            )

    def note_epoch(self, epoch: int, index: int) -> None:
        """Note that an entry of `epoch` was written at `index`."""
        if not self.epochs or self.epochs[-1][0] < epoch:
            self.epochs.append((epoch, index))
        elif index < self.epochs[-1][1]:  # the store had the message log before
            self.epochs = with_epoch(self.epochs, epoch, index)

    def _stored(
        self, entries: list[tuple[Queue, IndexEntry, Produced]], buffers: list[bytes], first: int
    ) -> None:
        put = self.cache.put
        for at, (queue, entry, produced) in enumerate(entries):
            queue.index.append(entry)
            queue.note(entry, produced)
            if queue.steps is not None:
                self._decide(queue.steps, entry.base_sequence, buffers[2 * at + 1])
            if self.projection is not None:
                self.projection.take(
                    first + at,
                    entry.append_time_ms,
                    buffers[2 * at + 1],
                    region_crc_of(buffers[2 * at]),
                )
            put(entry.position, buffers[2 * at], buffers[2 * at + 1])
            if self.commits_at_once:
                queue.visible_sequence = queue.next_sequence
            else:
                self._invisible.append((first + at, queue, queue.next_sequence))

    def commit(self, index: int) -> list[Queue]:
        """Commit everything up to `index`. Returns the queues that have more visible messages."""
        self.committed_index = max(self.committed_index, index)
        if not self.pending and not self._invisible:
            return []
        while self.pending and self.pending[0].envelope.index <= index:
            self.apply_entry(*self.pending.popleft())
        grown: dict[int, Queue] = {}
        while self._invisible and self._invisible[0][0] <= index:
            _, queue, sequence = self._invisible.popleft()
            queue.visible_sequence = max(queue.visible_sequence, sequence)
            grown[id(queue)] = queue
        return list(grown.values())

    def apply_pending(self) -> None:
        """Apply all written entries to the derived state, for a new master,
        which continues from them.
        """
        while self.pending:
            self.apply_entry(*self.pending.popleft())

    def start(self) -> tuple[int, int]:
        """(index, epoch) after which this store can serve others; the epoch is -1 if it is not
        known. Raises LogDamaged.
        """
        firsts = [first_index(log, segments, self.index) for log, segments in enumerate(self.logs)]
        index = min(firsts) - 1
        return index, self.epoch_at(index)

    def epoch_at(self, index: int) -> int:
        """The epoch of an entry; 0 before the first, -1 if the history does not go back so far."""
        return epoch_of(self.epochs, index) if index > 0 else 0

    def begin_at(self, index: int, epoch: int) -> None:
        """Let the log begin after `index`, which was written in `epoch`. Of later entries the store
        has at most segments in the object store.
        """
        check(self.index == 0, "the log is not empty")
        self.index = self.flushed_index = self.committed_index = index
        self.epoch = epoch
        if epoch > 0:
            self.epochs = with_epoch(self.epochs, epoch, index)

    @property
    def applied_index(self) -> int:
        """The index of the last entry that is applied to the derived state."""
        return self.pending[0].envelope.index - 1 if self.pending else self.index

    def applied_place(self) -> Place:
        """The place after the entry at `applied_index`, in both logs."""
        place = [self.messages.end, self.actions.end]
        for entry in reversed(self.pending):
            place[entry.log] = entry.position
        return place[MESSAGES], place[ACTIONS]

    def require_space_to_follow(self, runs: Iterable[Iterable[PendingEntry]], size: int) -> None:
        """Raise DiskFull unless the disk has room for the master's entries, which take `size`
        bytes. The reserve is theirs, except that messages leave half of it: what the master
        admitted with its reserve untouched fits on disks of the same size, and so do the
        acknowledgements after it.
        """
        if any(entry.envelope.kind in (Kind.DATA, Kind.COMMAND) for run in runs for entry in run):
            self.space.require(size, self.messages.end, leave=0.5)

    def _open_segment(self, log: int, states: Iterable[Sequence[object]]) -> None:
        """Begin a segment with a snapshot, completely or not at all.
        `states` are the queues or the shares.
        """
        segments = self.logs[log]
        if segments.end > segments.bases[-1]:
            segments.roll()
        payloads, count = to_payloads(states)
        self._append_wrapped(log, Kind.SNAPSHOT, [(count, payload) for payload in payloads])

    def _append_wrapped(self, log: int, kind: Kind, entries: Sequence[tuple[int, bytes]]) -> None:
        """Write entries, each from its count and its payload,
        completely or not at all. Raises DiskFull.
        """
        time_ms = self.last_time_ms = max(self.clock.time_ms(), self.last_time_ms)
        flushed = self.logs[log].flushed
        buffers: list[bytes] = []
        for index, (count, payload) in enumerate(entries, self.index + 1):
            buffers += wrap(
                kind,
                payload,
                count=count,
                epoch=self.epoch,
                index=index,
                time_ms=time_ms,
                flushed=flushed,
            )
        self._write(log, buffers, sum(map(len, buffers)), len(entries))

    def append_command(self, queue: Queue, change_id: str, to_version: int) -> None:
        """Close a partition, which must be open:
        write its last entry, the command message. Raises DiskFull.
        """
        check(queue.is_ordered and queue.sealed is None, f"{queue.id} cannot be closed")
        self.append_region(queue, command_messages.build(queue.id, change_id, to_version))

    def append_region(self, queue: Queue, region: bytes) -> None:
        """Write a command message, and obey it as a replay does. Raises DiskFull."""
        total = ENVELOPE_BYTES + len(region)
        self.space.require(total, self.messages.end)
        if self.messages.begins(total):
            self._open_segment(MESSAGES, (each.to_snapshot() for each in self.queues.values()))
        time_ms = self.last_time_ms = max(self.clock.time_ms(), self.last_time_ms)
        index, flushed = self.index + 1, self.messages.flushed
        envelope = place(
            Kind.COMMAND,
            total,
            crc32c(region),
            queue.next_sequence,
            self.epoch,
            index,
            time_ms,
            flushed,
        )
        entry = IndexEntry(
            queue.next_sequence,
            self.messages.end,
            time_ms,
            0,
            0,
            0,
            queue.cumulative_bytes,
            total,
            1,
        )
        self._write(MESSAGES, [envelope, region], total, 1)
        produced = Produced(entry.base_sequence, time_ms)
        self._stored([(queue, entry, produced)], [envelope, region], self.index)
        self._obey(queue, command_messages.read(region, entry.base_sequence))

    def append_barrier(self, epoch: int) -> None:
        """Begin `epoch` with an entry that holds nothing else. Raises DiskFull."""
        check(
            epoch > self.epoch or not self.epochs or epoch > self.epochs[-1][0],
            f"epoch {epoch} is behind {self.epochs}",
        )
        self.epoch = epoch
        self.messages.drop_empty()
        self._append_wrapped(MESSAGES, Kind.BARRIER, [(0, b"")])

    # --- actions ----------------------------------------------------------------------------------

    @overload
    def act(self, action: SettleAction) -> Settled: ...
    @overload
    def act(self, action: LaneGrant | LaneInherit | LaneUnpark) -> int: ...
    @overload
    def act(self, action: AnyAction) -> object: ...
    def act(self, action: AnyAction) -> Any:
        """Apply an action immediately; the next `write_actions` writes it. Actions of a schedule
        are applied when they are written.

        Returns what was settled, the token of a grant, or the number of affected messages or keys.
        """
        if isinstance(action, ScheduleStruct):
            self.unwritten.add(action, is_scheduled=True)
            return None
        self.unwritten.add(action, is_scheduled=False)
        queue = self.queues.get((action.subject.encode(), action.partition)) or self.open_queue(
            action.subject, action.partition
        )
        part, change = CHANGES[type(action)]
        return change(part(queue, action.group), action)

    def write_actions(self) -> None:
        """Write the actions since the last call.

        Raises DiskFull. The actions that are not written are then kept and written later: send no
        answer that depends on them yet. Deliveries before that may be repeated if the process dies.
        """
        if not self.unwritten.waits:
            return
        self.actions.drop_empty()
        while entries := self.unwritten.entries():
            first = self.index + 1
            self._append_wrapped(
                ACTIONS, Kind.ACTIONS, [(each.actions, each.payload) for each in entries]
            )
            self.unwritten.written(len(entries))
            if self.projection is not None:
                for index, entry in enumerate(entries, first):
                    for action in entry.scheduled:
                        self.projection.act(index, self.last_time_ms, action)
        if self.actions.must_roll(0):
            # The shares have these actions already, so the snapshot comes after them. A snapshot
            # that does not fit is retried next time.
            with suppress(DiskFull):
                self._open_segment(ACTIONS, self._share_states())

    def append_step(self, step: StepIntake) -> Produced:
        """Write a step, its settlements and its effects, as one entry, and apply it; but not one
        that is stored already. The caller has looked whether the messages are held (`Queue.holds`).
        Raises InvalidArgument, CorruptBatch, DiskFull, and nothing is written then.

        The actions before it are written first, so that a replay applies the settlements to what
        was handed out. They are repeated in the action log, where they change nothing, for those
        who read that log alone: trails of messages, and Spark.
        """
        stored = self.find_step(step.producer_id, step.number, is_again=step.is_again)
        if stored is not None:
            return stored
        queue = self.open_queue(STEPS, 0)
        check(queue.steps is not None, "the queue of steps keeps no steps")
        envelope, region = step_batch(
            (queue.steps or StepState()).numbered(step.effects),
            step.settlements,
            step.producer_id,
            step.number,
            self.clock.time_ms(),
            is_again=step.is_again,
        )
        self.write_actions()
        bloom = tag_bloom([tag_hash(effect.subject) for effect in step.effects])
        intake = Intake(queue, region, sent_sizes(envelope)[1], parse_header(region), bloom)
        produced = self.append([intake], are_new=True)[0]
        for settlement in step.settlements:
            self.act(settlement)
        return produced

    def find_step(self, producer_id: int, number: int, *, is_again: bool) -> Produced | None:
        """Where the step of this number is; None if it is not stored."""
        queue = self.queue(STEPS, 0)
        flags = int(BatchFlag.AGAIN) if is_again else 0
        header = RegionHeader(producer_id, number, flags, 1, 0, 0, 0, 0, 0, 0)
        return queue.find_duplicate(header) if queue is not None else None

    def _decide(self, steps: StepState, sequence: int, region: bytes) -> None:
        """Apply a step: on the master when it is written, on a slave when it is committed, and in
        every replay.
        """
        try:
            record = record_of(region)
        except CorruptBatch as cause:  # on every replica
            log.error("step %d changes nothing: %s", sequence, cause.message)
            return
        for settlement in record.settlements:
            source = self.queue(settlement.subject, settlement.partition)
            if source is not None:
                source.settle_step(settlement)
        steps.decide(sequence, record)

    def has_waiting_effects(self, queue: Queue, group: str) -> bool:
        """True if something waits that the group's steps on this partition sent to ordered
        subjects: the group must not leave the partition yet.
        """
        steps = self.queue(STEPS, 0)
        source = Source(queue.id.subject, queue.id.partition, group)
        return steps is not None and steps.steps is not None and steps.steps.waits_for(source)

    def apply_entry(self, log: int, position: int, envelope: Envelope, region: bytes) -> None:
        """Apply an entry to the derived state: on a slave, and at a restart."""
        if envelope.kind == Kind.SNAPSHOT:
            self._apply_snapshot(log, position, envelope, region)
        elif envelope.kind == Kind.ACTIONS:
            for action in decode_actions(unwrap(region)):
                if not isinstance(action, ScheduleStruct):
                    apply(self.open_queue(action.subject, action.partition), action)
                elif self.projection is not None:
                    self.projection.act(envelope.index, envelope.append_time_ms, action)
        elif envelope.kind in (Kind.DATA, Kind.COMMAND):
            queue, entry = self.index_entry(position, envelope, region)
            queue.add(entry)
            queue.visible_sequence = queue.next_sequence
            if queue.steps is not None:
                self._decide(queue.steps, entry.base_sequence, region)
            if self.projection is not None:
                self.projection.take(
                    envelope.index, envelope.append_time_ms, region, envelope.region_crc
                )
            if envelope.kind == Kind.COMMAND:
                self._obey(queue, command_messages.read(region, entry.base_sequence))

    def _obey(self, queue: Queue, command: Sealed | QueueErasure) -> None:
        if isinstance(command, Sealed):
            queue.sealed = command
        elif command is QueueErasure.PURGE:
            queue.purge()
        else:
            self.droppable += queue.drop()

    def _apply_snapshot(self, log: int, position: int, envelope: Envelope, region: bytes) -> None:
        """Apply a segment's opening snapshot at the beginning of the log. Elsewhere its content is
        known already.
        """
        if position != self.base_positions[log]:
            return
        self.base_positions[log] = position + envelope.total_bytes
        for state in self._snapshots[log].states(unwrap(region)):
            if log == MESSAGES:
                self.open_queue(state[0], state[1]).load_snapshot(state)
            else:
                self.open_queue(state[0], state[1]).load_share(state)

    def index_entry(
        self, position: int, envelope: Envelope, region: bytes
    ) -> tuple[Queue, IndexEntry]:
        """A batch's queue, and its entry in the consume log."""
        view = BatchView(envelope, region)
        queue = self.open_queue(view.subject, view.header.partition)
        return queue, queue.entry_of(view, position)

    def _share_states(self) -> list[list[object]]:
        queues = self.queues.values()
        return [
            *[state for queue in queues for state in queue.share_states()],
            *[state for queue in queues for state in queue.lane_states()],
            *[state for queue in queues for state in queue.step_states()],
        ]

    # --- reading ----------------------------------------------------------------------------------

    def read(self, queue: Queue, entry: IndexEntry) -> tuple[bytes, bytes]:
        """Read (envelope, region) of one batch. Raises LogDamaged if the stored bytes or the
        consume log are damaged; ColdRead if the bytes must be fetched first.
        """
        cached = self.cache.get(entry.position)
        if cached is not None:
            return cached
        if entry.total_bytes > BATCH_BYTES_MAX or entry.position > self.messages.end:
            raise queue.index.distrust(entry.base_sequence, f"has {entry}")
        try:
            data = self.messages.read(entry.position, entry.total_bytes)
        except ObjectDamaged as cause:
            raise self._object_damaged(queue, entry, cause) from cause
        envelope, region = data[:ENVELOPE_BYTES], data[ENVELOPE_BYTES:]
        try:
            found = parse_envelope(envelope)
            if found.base_sequence != entry.base_sequence or found.total_bytes != entry.total_bytes:
                raise CorruptBatch(
                    f"the consume log says sequence {entry.base_sequence}, the log "
                    f"{found.base_sequence}"
                )
            check_region(region, found.region_crc)
            count = RegionHeader._make(REGION.unpack_from(region)[:10]).count
            if count != entry.count:
                raise CorruptBatch(f"the consume log says {entry.count} messages, the log {count}")
        except CorruptBatch as cause:
            if self._is_misindexed(queue, entry):
                raise queue.index.distrust(
                    entry.base_sequence, f"says another thing than the log ({cause.message})"
                ) from cause
            where = (
                f"messages {entry.base_sequence} to {entry.next_sequence - 1} of {queue.id} are "
                f"damaged on disk ({cause.message})"
            )
            text = f"{where}; to continue after them: qmq group reset --to {entry.next_sequence}"
            raise LogDamaged(text, log=MESSAGES, position=entry.position) from cause
        return envelope, region

    @staticmethod
    def _object_damaged(queue: Queue, entry: IndexEntry, cause: ObjectDamaged) -> LogDamaged:
        """The error that also says which messages of the queue the object has."""
        number = queue.index.find_position(cause.end)
        following = (
            queue.index.entry(number).base_sequence
            if number < queue.index.count
            else queue.next_sequence
        )
        return LogDamaged(
            f"messages {entry.base_sequence} to {following - 1} of {queue.id} are "
            f"in the object store only, and {cause.message}; to continue after them: "
            f"qmq group reset --to {following}"
        )

    def _is_misindexed(self, queue: Queue, entry: IndexEntry) -> bool:
        """True if the log is undamaged at the place of a consume-log entry that does not agree with
        it, or if the log has no entry there.
        """
        index = queue.index
        number = index.find_sequence(entry.base_sequence)
        begin = (
            index.entry(number - 1).position
            if number > index.first
            else self.messages.base_of(entry.position)
        )
        is_entry = begins_at(self.messages, begin, entry.position)
        if not is_entry:
            return is_entry is False
        try:
            entry_at(self.messages, entry.position)
        except CorruptBatch:
            return False
        return True

    # --- flushing ---------------------------------------------------------------------------------

    def begin_flush(self) -> FlushPlan:
        """Make the plan for flushing everything now."""
        self.unflushed.begun()
        return FlushPlan(self.messages.begin_sync(), self.actions.begin_sync(), self.index)

    def end_flush(self, plan: FlushPlan) -> int:
        """Finish a plan that was run. Returns the index up to which everything
        survives a power cut.
        """
        self.messages.end_sync(plan.messages)
        self.actions.end_sync(plan.actions)
        if plan.messages.cuts == self.messages.cuts and plan.actions.cuts == self.actions.cuts:
            self.flushed_index = max(self.flushed_index, plan.index)
            self.unflushed.flushed(self.flushed_index)
        return self.flushed_index

    @property
    def is_flushed(self) -> bool:
        """True if everything written survives a power cut."""
        return (
            self.messages.flushed == self.messages.end and self.actions.flushed == self.actions.end
        )

    def release_folder(self) -> None:
        """Release the folder for the store that is opened next.
        Memory and open files can still be read.
        """
        if self._is_held and self.projection is not None:
            self.projection.close()
        self._is_held = False
        self.lock.release()

    def close(self) -> None:
        """Close files and release the folder. Does not flush: `recovery.close_store` does."""
        self.release_folder()
        self.messages.close()
        self.actions.close()
