"""The store: both logs, and all that follows from them, on one folder of one broker.

    message/        the message log                    action/         the action log
    consume/        the queues' consume logs           checkpoint/     the newest two checkpoints           lock

It is driven by one thread and never waits, except where a method's name says `write` or `run`. A turn of the broker is: `append` what
producers sent, `act` on what consumers did, `write_actions`, and flush by policy. What `append` returns and what `write_actions` wrote has
been handed to the operating system: it survives a killed process. What a flush has passed survives a power cut.

`committed` is the position up to which consumers may see the message log: what was written with `Flush.ASYNC`, what was flushed with
`Flush.SYNC`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from qmq.batch import ENVELOPE_BYTES, Kind, RegionHeader, check_region, parse_envelope, place
from qmq.clock import Clock
from qmq.errors import CorruptBatch, DiskFull, LogDamaged
from qmq.limits import MIB
from qmq.log.actions import AnyAction, encode_actions
from qmq.log.cache import TailCache
from qmq.log.config import Flush, LogConfig
from qmq.log.consume_log import IndexEntry
from qmq.log.consumption import Settled, Share
from qmq.log.disk import Disk
from qmq.log.envelopes import wrap
from qmq.log.lock import FolderLock
from qmq.log.queue import Queue
from qmq.log.segments import Segments, SyncPlan
from qmq.model import Partition, QueueId
from qmq.wire.messages import Produced

_SNAPSHOT_STATES: Final = 200
_FREE_CHECK_BYTES: Final = 4 * MIB


class Intake(NamedTuple):
    """A batch that a producer sent, checked and parsed."""

    queue: Queue
    region: bytes
    region_crc: int
    header: RegionHeader
    tag_bloom: int


@dataclass(frozen=True, slots=True)
class FlushPlan:
    """One flush of both logs: `run` it in a thread, then give it to `Store.end_flush`."""

    messages: SyncPlan
    actions: SyncPlan

    def run(self) -> None:
        """Raises FlushFailed."""
        self.messages.run()
        self.actions.run()


class Store:
    """All storage of one broker. Make it with `qmq.log.recovery.open_store`."""

    def __init__(self, folder: Path, config: LogConfig, clock: Clock, disk: Disk) -> None:
        self.folder = folder
        self.config = config
        self.clock = clock
        self.disk = disk
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = FolderLock(folder)
        self.messages = Segments(disk, folder / "message", config.segment_bytes)
        self.actions = Segments(disk, folder / "action", config.action_segment_bytes)
        self.consume_folder = folder / "consume"
        self.consume_folder.mkdir(exist_ok=True)
        self.queues: dict[tuple[bytes, int], Queue] = {}
        self.cache = TailCache(config.cache_bytes)
        self.index = 0
        self.epoch = 1
        self.last_time_ms = 0
        self.committed = self.messages.end
        self.unflushed_messages = 0
        self.unwritten: list[AnyAction] = []
        self._invisible: deque[tuple[int, Queue, int]] = deque()
        self._free_checked_at = 0
        self._free_bytes = 0

    # --- queues --------------------------------------------------------------------------------------------------------

    def queue(self, subject: str, partition: int) -> Queue | None:
        """The queue, if anything was ever stored in it or it was opened."""
        return self.queues.get((subject.encode(), partition))

    def open_queue(self, subject: str, partition: int) -> Queue:
        """The queue; made empty if it is new."""
        key = (subject.encode(), partition)
        queue = self.queues.get(key)
        if queue is None:
            queue_id = QueueId(subject, Partition(partition))
            queue = self.queues[key] = Queue(self.disk, self.consume_folder, queue_id)
        return queue

    # --- appending -----------------------------------------------------------------------------------------------------

    def append(self, batches: list[Intake]) -> list[Produced]:
        """Write the batches, in order, with one write; give where each went. A batch that is there already is not written again.

        Raises DiskFull: none of them was stored.
        """
        size = sum([ENVELOPE_BYTES + len(batch.region) for batch in batches])
        self._require_space(size)
        if self._begins_segment(self.messages, size):
            self._open_segment(self.messages, [queue.to_snapshot() for queue in self.queues.values()])
        return self._append_new(batches)

    def _append_new(self, batches: list[Intake]) -> list[Produced]:
        results: list[Produced] = []
        entries: list[tuple[Queue, IndexEntry]] = []
        buffers: list[bytes] = []
        seen: dict[tuple[int, int, int], Produced] = {}
        time_ms = self.last_time_ms = max(self.clock.time_ms(), self.last_time_ms)
        position, index, flushed = self.messages.end, self.index, self.messages.flushed
        following: dict[int, tuple[int, int]] = {}
        for batch in batches:
            queue, header = batch.queue, batch.header
            key = (id(queue), header.producer_id, header.batch_sequence)
            produced = seen.get(key) or self.find_duplicate(queue, header.producer_id, header.batch_sequence)
            if produced is None:
                sequence, cumulative = following.get(id(queue)) or (queue.next_sequence, queue.cumulative_bytes)
                index += 1
                total = ENVELOPE_BYTES + len(batch.region)
                buffers.append(
                    place(Kind.DATA, total, batch.region_crc, sequence, self.epoch, index, time_ms, flushed)
                )
                buffers.append(batch.region)
                entries.append((queue, IndexEntry(
                    sequence, position, time_ms, header.producer_id, header.batch_sequence, batch.tag_bloom,
                    cumulative, total, header.count,
                )))  # fmt: skip
                position += total
                following[id(queue)] = (sequence + header.count, cumulative + total)
                produced = seen[key] = Produced(sequence, time_ms)
            results.append(produced)
        if buffers:
            self.messages.append(buffers, position - self.messages.end)
            self.index = index
            self._stored(entries, buffers)
        return results

    def _stored(self, entries: list[tuple[Queue, IndexEntry]], buffers: list[bytes]) -> None:
        put = self.cache.put
        visible_now = self.config.flush is Flush.ASYNC
        for at, (queue, entry) in enumerate(entries):
            queue.add(entry)
            put(entry.position, buffers[2 * at], buffers[2 * at + 1])
            self.unflushed_messages += entry.count
            if visible_now:
                queue.visible_sequence = queue.next_sequence
            else:
                self._invisible.append((entry.end, queue, queue.next_sequence))
        if visible_now:
            self.committed = self.messages.end

    def find_duplicate(self, queue: Queue, producer_id: int, batch_sequence: int) -> Produced | None:
        """Where the batch went, if the queue has it already."""
        window = queue.producers.window(producer_id)
        if window is None:
            return None
        found = window.find(batch_sequence)
        if found is None and window.may_have_forgotten(batch_sequence):
            for _, entry in queue.index.scan(queue.index.first):
                if entry.producer_id == producer_id and entry.batch_sequence == batch_sequence:
                    return Produced(entry.base_sequence, entry.append_time_ms)
        return found

    def _require_space(self, size: int) -> None:
        step = min(_FREE_CHECK_BYTES, self.config.disk_free_bytes_min // 2)
        if self._free_bytes < size or self.messages.end - self._free_checked_at > step:
            self._free_bytes = self.disk.free_bytes(self.folder) - self.config.disk_free_bytes_min
            self._free_checked_at = self.messages.end
        if self._free_bytes < size:
            raise DiskFull(
                f"the broker's disk has less than {self.config.disk_free_bytes_min} bytes to spare, kept for "
                "acknowledgements: free some space, or shorten retention"
            )

    def _begins_segment(self, segments: Segments, size: int) -> bool:
        is_empty = segments.end == segments.bases[-1] and segments.end > 0
        return is_empty or segments.must_roll(size)

    def _open_segment(self, segments: Segments, states: list[list[object]]) -> None:
        """Begin a segment with a snapshot, all of it or none. `states` are the queues or the shares."""
        if segments.end > segments.bases[-1]:
            segments.roll()
        chunks = range(0, max(len(states), 1), _SNAPSHOT_STATES)
        payloads = [msgspec.msgpack.encode(states[at : at + _SNAPSHOT_STATES]) for at in chunks]
        self._append_wrapped(segments, Kind.SNAPSHOT, payloads, len(states))

    def _append_wrapped(self, segments: Segments, kind: Kind, payloads: list[bytes], count: int) -> None:
        time_ms = self.last_time_ms = max(self.clock.time_ms(), self.last_time_ms)
        buffers: list[bytes] = []
        for number, payload in enumerate(payloads, self.index + 1):
            buffers += wrap(
                kind, payload, count=count, epoch=self.epoch, index=number, time_ms=time_ms, flushed=segments.flushed
            )
        segments.append(buffers, sum(map(len, buffers)))
        self.index += len(payloads)

    # --- actions -------------------------------------------------------------------------------------------------------

    def act(self, action: AnyAction) -> Settled:
        """Apply the action at once, and have it written by the next `write_actions`."""
        self.unwritten.append(action)
        return self.apply(action)

    def write_actions(self) -> None:
        """Write what was done since the last time, with one write.

        Raises DiskFull: it is kept and written later; answer nothing that depends on it yet. What was handed out meanwhile may be
        handed out again if the process dies.
        """
        if not self.unwritten:
            return
        payload = encode_actions(self.unwritten)
        if self._begins_segment(self.actions, len(payload)):
            self._open_segment(self.actions, self._share_states())
        self._append_wrapped(self.actions, Kind.ACTIONS, [payload], len(self.unwritten))
        self.unwritten.clear()

    def apply(self, action: AnyAction) -> Settled:
        """Change the share that the action names. Used alike when acting and when replaying."""
        return self.share_of(action).apply(action)

    def share_of(self, action: AnyAction) -> Share:
        """The share that the action is about; made if absent."""
        return self.open_queue(action.subject, action.partition).share(action.group)

    def _share_states(self) -> list[list[object]]:
        return [
            [queue.id.subject, queue.id.partition, group, share.to_state()]
            for queue in self.queues.values()
            for group, share in queue.shares.items()
        ]

    # --- reading -------------------------------------------------------------------------------------------------------

    def read(self, queue: Queue, entry: IndexEntry) -> tuple[bytes, bytes]:
        """(envelope, region) of one batch. Raises LogDamaged if what is stored there is not what was."""
        cached = self.cache.get(entry.position)
        if cached is not None:
            return cached
        data = self.messages.read(entry.position, entry.total_bytes)
        envelope, region = data[:ENVELOPE_BYTES], data[ENVELOPE_BYTES:]
        try:
            found = parse_envelope(envelope)
            if found.base_sequence != entry.base_sequence or found.total_bytes != entry.total_bytes:
                raise CorruptBatch(f"the consume log says sequence {entry.base_sequence}, the log {found.base_sequence}")
            check_region(region, found.region_crc)
        except CorruptBatch as cause:
            raise LogDamaged(
                f"messages {entry.base_sequence} to {entry.next_sequence - 1} of {queue.id} are damaged on disk "
                f"({cause.message}); to go on behind them: qmq group reset --to {entry.next_sequence}"
            ) from cause
        return envelope, region

    # --- flushing ------------------------------------------------------------------------------------------------------

    def begin_flush(self) -> FlushPlan:
        """What is to be flushed now."""
        self.unflushed_messages = 0
        return FlushPlan(self.messages.begin_sync(), self.actions.begin_sync())

    def end_flush(self, plan: FlushPlan) -> list[Queue]:
        """The plan was run; give the queues of which consumers may see more now."""
        self.messages.end_sync(plan.messages)
        self.actions.end_sync(plan.actions)
        if self.config.flush is Flush.ASYNC:
            return []
        self.committed = max(self.committed, plan.messages.position)
        grown: dict[int, Queue] = {}
        while self._invisible and self._invisible[0][0] <= self.committed:
            _, queue, sequence = self._invisible.popleft()
            queue.visible_sequence = sequence
            grown[id(queue)] = queue
        return list(grown.values())

    @property
    def is_flushed(self) -> bool:
        """Whether everything written survives a power cut."""
        return self.messages.flushed == self.messages.end and self.actions.flushed == self.actions.end

    def close(self) -> None:
        """Close files and give the folder free. Does not flush: `recovery.close_store` does."""
        self.messages.close()
        self.actions.close()
        self.lock.release()
