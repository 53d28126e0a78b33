"""An index of the committed part of all queues in a folder, while a broker may be writing to it and deleting from it.

    load        read the queues from the newest checkpoint; their consume logs are read on demand
    walk        read envelopes from the checkpoint (or the start of the log) to the committed position; the next walk continues there
    refresh     a newer checkpoint only moves the queues' starts. If the log is no longer the one that was walked (truncated after a power
                cut, started again, or unwalked segments deleted by retention), everything is loaded again

A broker may delete segments, checkpoints and consume logs at any time. If a file disappears during a read, the read is repeated once with
fresh information. If the file is still missing then, that is damage.

A walk verifies the envelope of each batch and reads the first bytes of its region, which name the queue. Readers verify the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import error
from typing import Final, NamedTuple

import msgspec

from qmq.columns.files.folders import Bound, LogFolder, bound_of_checkpoint, load_checkpoint, newest_checkpoint, read_bound
from qmq.columns.files.queue_index import IndexLost, Persisted, QueueIndex, sealed_at_of
from qmq.columns.files.segments import Mapped, SegmentFiles
from qmq.errors import CorruptBatch, LogDamaged
from qmq.log import command_messages
from qmq.log.checkpoint import Checkpoint
from qmq.log.command_messages import QueueErasure
from qmq.log.envelopes import unwrap
from qmq.log.segment_index import UNREADABLE
from qmq.wire.batch import ENVELOPE_BYTES, Envelope, Kind
from qmq.wire.batch_columns import REGION, REGION_BYTES, RegionHeader


class WalkedBatch(NamedTuple):
    """An entry of the message log. `header` and `subject` are set for batches and command messages."""

    position: int
    envelope: Envelope
    subject: bytes
    header: RegionHeader | None
    mapped: Mapped

    @property
    def end(self) -> int:
        """The position after the entry."""
        return self.position + self.envelope.total_bytes


class WalkedPast(NamedTuple):
    """The state of a queue in a snapshot."""

    subject: str
    partition: int
    next_sequence: int
    last_append_ms: int
    sealed_at: int | None


def walk(files: SegmentFiles, position: int, committed: int) -> Iterator[WalkedBatch]:
    """Yields the entries from `position` up to `committed`; -1: all whole entries.

    Raises:
        LogDamaged: an envelope is damaged, or a file is too short.
        FileNotFoundError: a segment has been deleted.
    """
    if not files.bases:
        return
    for base in [each for each in files.bases if each >= files.base_of(position)]:
        if 0 <= committed <= base:
            return
        mapped = files.map(base, committed)
        end = whole_end(mapped, position) if committed < 0 and base == files.bases[-1] else mapped.end
        while position < end:
            found = entry_at(mapped, position)
            yield found
            position = found.end


def entry_at(mapped: Mapped, position: int) -> WalkedBatch:
    """The entry at a position, without verifying the region's checksum. Raises LogDamaged."""
    envelope = mapped.entry(position)
    if envelope.kind not in (Kind.DATA, Kind.COMMAND):
        return WalkedBatch(position, envelope, b"", None, mapped)
    region = mapped.head(position, envelope)
    try:
        header = RegionHeader._make(REGION.unpack_from(region)[:10])
    except error:
        raise mapped.damaged(position, "the region is incomplete") from None
    return WalkedBatch(position, envelope, bytes(region[REGION_BYTES : REGION_BYTES + header.subject_bytes]), header, mapped)


def whole_end(mapped: Mapped, position: int = -1) -> int:
    """The end of the last whole entry in a log's last segment; a partial entry may follow. Raises LogDamaged if it is not the last."""
    position = max(position, mapped.base)
    while position + ENVELOPE_BYTES <= mapped.end:
        if mapped.is_blank(position):
            return position
        envelope = mapped.envelope(position)
        if position + envelope.total_bytes > mapped.end:
            return position
        position += envelope.total_bytes
    return position


def pasts(found: WalkedBatch) -> list[WalkedPast]:
    """The states of the queues in a snapshot. Raises LogDamaged."""
    region = bytes(found.mapped.region(found.position, found.envelope))
    try:
        states = msgspec.msgpack.decode(unwrap(region), strict=False)
        return [WalkedPast(each[0], each[1], each[2], each[4], sealed_at_of(each)) for each in states]
    except (CorruptBatch, *UNREADABLE, LookupError, TypeError) as cause:
        raise found.mapped.damaged(found.position, f"its snapshot cannot be read: {cause}") from cause


_TRIES: Final = 3
_NOWHERE: Final = Bound(0, 0, 0)

Key = tuple[bytes, int]
"""Subject and partition."""


class FolderIndex:
    """The index of one folder. Call `refresh` first. Not thread-safe."""

    def __init__(self, folder: LogFolder, committed: str = "") -> None:
        self.folder = folder
        self.bound = _NOWHERE
        self.files = SegmentFiles(folder.messages, ())
        self.queues: dict[Key, QueueIndex] = {}
        self._committed = committed
        self._checkpoint_name = ""
        self._of_checkpoint: Bound | None = None
        self._peeked: tuple[str, Bound | None] = "", None
        self._walks_all = False
        """Whether the consume logs are inconsistent and not used."""
        self._position = -1
        """The position up to which the log was walked; -1: not loaded."""
        self._snapshot_at = -1
        """The position at the start of the log where a snapshot would describe the deleted part."""
        self._last: tuple[int, Envelope] | None = None
        """The newest walked entry, and its position."""

    def peek(self) -> Bound:
        """The current committed position; reads no other data. Raises InvalidArgument."""
        name = newest_checkpoint(self.folder)
        if name != self._peeked[0]:
            self._peeked = name, bound_of_checkpoint(load_checkpoint(self.folder))
        return read_bound(self.folder, self._peeked[1], self._committed)

    def refresh(self) -> None:
        """Update the index to the current committed position.

        Raises:
            InvalidArgument: the committed position is unknown.
            LogDamaged: an envelope or a snapshot is damaged, or a file is short or missing.
        """
        for left in reversed(range(_TRIES)):
            try:
                self._refresh()
                return
            except FileNotFoundError as cause:
                self._position = -1
                if not left:
                    raise LogDamaged(f"{cause.filename} is missing: restore it from a copy") from cause

    def require(self, key: Key) -> QueueIndex | None:
        """The queue, with its consume log loaded; None if the folder does not have the queue. Raises what `refresh` raises."""
        for _ in range(_TRIES):
            queue = self.queues.get(key)
            if queue is None:
                return None
            try:
                queue.load()
                queue.forget_before(self.files.start)
                return queue
            except IndexLost:
                self._walks_all = newest_checkpoint(self.folder) == self._checkpoint_name
                self._position = -1
                self.refresh()
        raise LogDamaged(f"{self.folder.path}: retention deletes the consume logs faster than they can be read: try again")

    # --- loading -------------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        name = newest_checkpoint(self.folder)
        is_new = name != self._checkpoint_name or self._position < 0
        found = load_checkpoint(self.folder) if is_new else None
        if is_new:
            self._of_checkpoint = bound_of_checkpoint(found)
        self.bound = read_bound(self.folder, self._of_checkpoint, self._committed)
        self.files = SegmentFiles.list(self.folder.messages)
        if self._position < 0 or not self._is_same_log():
            found = found if is_new else load_checkpoint(self.folder)
            self._load(found)
        self._checkpoint_name = name
        self._walk()
        if found is not None:
            self._move_starts(found)

    def _is_same_log(self) -> bool:
        """Whether the walked part is still there and is continued."""
        if self._position < self.files.start or 0 <= self.bound.messages < self._position:
            return False
        if self._last is None:
            return True
        position, envelope = self._last
        if position < self.files.start:
            return True
        try:
            mapped = self.files.map(self.files.base_of(position), position + envelope.total_bytes)
            return mapped.entry(position) == envelope
        except LogDamaged:
            return False

    def _load(self, found: Checkpoint | None) -> None:
        self.queues, self._last = {}, None
        if found is None or self._walks_all or found.message_position < self.files.start:
            self._position = self._snapshot_at = self.files.start
            return
        self._position, self._snapshot_at = found.message_position, -1
        consume = self.folder.path / "consume"
        for state in found.queues:
            subject, partition, end, _, last_ms = state.snapshot[:5]
            self.queues[subject.encode(), partition] = QueueIndex(
                state.start_sequence,
                end,
                last_append_ms=last_ms,
                sealed_at=sealed_at_of(state.snapshot),
                persisted=Persisted.of(consume, state, found.message_position),
            )

    def _move_starts(self, found: Checkpoint) -> None:
        for state in found.queues:
            queue = self.queues.get((state.snapshot[0].encode(), state.snapshot[1]))
            if queue is not None:
                queue.move_start(state.start_sequence)

    # --- walking -------------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        if 0 <= self.bound.messages <= self._position:
            return
        if not self.files.bases and self.bound.messages > 0:
            raise LogDamaged(f"{self.folder.messages} has no segments, but the log is committed up to {self.bound.messages}: restore them")
        for found in walk(self.files, self._position, self.bound.messages):
            self._take(found)
            self._position, self._last = found.end, (found.position, found.envelope)

    def _take(self, found: WalkedBatch) -> None:
        envelope, header = found.envelope, found.header
        if header is not None:
            base = envelope.base_sequence
            queue = self.queues.get((found.subject, header.partition))
            if queue is None or queue.end != base:  # Unusual, but possible; or the region names another queue by mistake.
                found.mapped.region(found.position, envelope)
            if queue is None:
                queue = self.queues[found.subject, header.partition] = QueueIndex(base, base)
            if envelope.kind == Kind.COMMAND:
                said = command_messages.read(bytes(found.mapped.region(found.position, envelope)), base)
                if isinstance(said, QueueErasure):
                    sealed_at = queue.sealed_at if said is QueueErasure.PURGE else None
                    erased = QueueIndex(base, base + 1, last_append_ms=envelope.append_time_ms, sealed_at=sealed_at, mark=base)
                    self.queues[found.subject, header.partition] = erased
                else:
                    queue.seal(base, envelope.append_time_ms)
            else:
                queue.add(base, found.position, envelope.append_time_ms, envelope.total_bytes, header.count)
        elif envelope.kind == Kind.SNAPSHOT and found.position == self._snapshot_at:
            self._snapshot_at = found.end
            for past in pasts(found):
                self.queues[past.subject.encode(), past.partition] = QueueIndex(
                    past.next_sequence, past.next_sequence, last_append_ms=past.last_append_ms, sealed_at=past.sealed_at
                )
