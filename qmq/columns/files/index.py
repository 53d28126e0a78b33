"""An index of the committed part of all queues in a folder, while a broker may be writing to it and
deleting from it.

    load        read the queues from the newest checkpoint; their consume logs are read on demand
    walk        read envelopes from the checkpoint (or the start of the log) to the committed
                position; the next walk continues there
    refresh     a newer checkpoint only moves the queues' starts. If the log is no longer the one
                that was walked (truncated after a power cut, started again, or unwalked segments
                deleted by retention), everything is loaded again

A broker may delete segments, checkpoints and consume logs at any time. If a file disappears during
a read, the read is repeated once with fresh information. If the file is still missing then, that is
damage.

A walk verifies the envelope of each batch and reads the first bytes of its region, which name the
queue. Readers verify the rest.

A queue's index has the positions of its batches, in columns: from its consume log up to a
checkpoint, then from the walk. The consume log is read at the first use of the queue, because a
folder may have ten thousand queues of which a job reads two. Its files have no checksums, so they
are validated (sequences without gaps, ascending positions within bounds) and not used if they are
inconsistent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import error
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from qmq.columns.files.folders import (
    Bound,
    LogFolder,
    bound_of_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    read_bound,
)
from qmq.columns.files.segments import Mapped, SegmentFiles
from qmq.errors import CorruptBatch, LogDamaged
from qmq.log import command_messages
from qmq.log.checkpoint import Checkpoint, QueueState
from qmq.log.command_messages import COMMAND_PRODUCER, QueueErasure
from qmq.log.consume_log import ENTRY_BYTES, ENTRY_TYPE, FILE_ENTRIES, SUFFIX, digest
from qmq.log.segment_index import UNREADABLE
from qmq.model import Partition, QueueId
from qmq.rpc.channel import LOOK_INSIDE
from qmq.wire.batch import ENVELOPE_BYTES, Envelope, Kind, unwrap
from qmq.wire.batch_columns import REGION, REGION_BYTES, RegionHeader

Entries = NDArray[np.void]

ENTRY: Final = np.dtype(
    [
        ("base", "<i8"),
        ("position", "<i8"),
        ("time", "<i8"),
        ("bloom", "<u8"),
        ("bytes", "<i4"),
        ("count", "<i4"),
    ]
)
_FROM: Final = {
    "base": "base_sequence",
    "position": "position",
    "time": "append_time_ms",
    "bloom": "tag_bloom",
    "bytes": "total_bytes",
    "count": "count",
}
"""The fields kept of a consume log's entry."""
_CAPACITY_MIN: Final = 64


class IndexLost(Exception):
    """The consume log's files are missing, short or inconsistent. If there is no newer checkpoint,
    the message log must be walked.
    """


@dataclass(frozen=True, slots=True)
class Persisted:
    """A queue's consume log as described by a checkpoint."""

    folder: Path
    name: str
    first: int
    persisted: int
    tail: bytes
    end: int
    """The sequence after its last message."""
    until: int
    """All its entries are before this position of the message log."""

    @classmethod
    def of(cls, folder: Path, state: QueueState, until: int) -> Persisted:
        """Made from a queue's state in a checkpoint."""
        queue = QueueId(state.snapshot[0], Partition(state.snapshot[1]))
        return cls(
            folder,
            digest(queue),
            state.first_entry,
            state.persisted,
            state.tail,
            state.snapshot[2],
            until,
        )

    def load(self, start: int) -> tuple[Entries, int]:
        """The whole consume log, and the sequence of the mark of a purge right before `start`, or
        -1. Raises IndexLost.
        """
        bases = range(self.first - self.first % FILE_ENTRIES, self.persisted, FILE_ENTRIES)
        parts = [self._file(base) for base in bases if self.first < self.persisted]
        parts.append(self.tail)
        found = np.frombuffer(b"".join(parts), ENTRY_TYPE)
        kept = np.empty(len(found), ENTRY)
        for name, stored in _FROM.items():
            kept[name] = found[stored]
        self._check(kept)
        is_mark = (found["producer_id"] == COMMAND_PRODUCER) & (kept["base"] == start - 1)
        return kept, start - 1 if is_mark.any() else -1

    def _file(self, base: int) -> bytes:
        begin, end = max(self.first - base, 0), min(self.persisted - base, FILE_ENTRIES)
        path = self.folder / f"{self.name}-{base:012d}{SUFFIX}"
        try:
            with path.open("rb") as file:
                file.seek(begin * ENTRY_BYTES)
                data = file.read((end - begin) * ENTRY_BYTES)
        except FileNotFoundError:
            raise IndexLost(f"{path} is gone") from None
        if len(data) != (end - begin) * ENTRY_BYTES:
            raise IndexLost(f"{path} is cut short")
        return data

    def _check(self, found: Entries) -> None:
        """Validate the entries. Raises IndexLost."""
        if not len(found):
            return
        base, position = found["base"], found["position"]
        count, size = found["count"], found["bytes"]
        holds = [
            count > 0,
            size > 0,
            base[:-1] + count[:-1] == base[1:],
            position[:-1] + size[:-1] <= position[1:],
        ]
        fits = (
            base[0] >= 0
            and base[-1] + count[-1] == self.end
            and position[0] >= 0
            and position[-1] + size[-1] <= self.until
        )
        if not (fits and all(bool(each.all()) for each in holds)):
            raise IndexLost(f"consume log {self.name} is inconsistent")


class QueueIndex:
    """One queue on one broker group. Its sequences `start` to `end` - 1 are
    stored and committed.
    """

    __slots__ = (
        "_data",
        "_mark",
        "_persisted",
        "_size",
        "end",
        "last_append_ms",
        "sealed_at",
        "start",
    )

    def __init__(
        self,
        start: int,
        end: int,
        *,
        last_append_ms: int = 0,
        sealed_at: int | None = None,
        persisted: Persisted | None = None,
        mark: int = -1,
    ) -> None:
        self._persisted = persisted
        self._mark = mark
        """The sequence of the mark of a purge or a drop at which the queue starts; -1: none. A
        reader that had read everything before the purge continues there, and no message is missing.
        """
        self._data: Entries = np.empty(0, ENTRY)
        self._size = 0
        self.sealed_at = sealed_at
        """The sequence of its command message, if the queue is sealed."""
        self.end = end if sealed_at is None else sealed_at
        self.start = min(start, self.end)
        self.last_append_ms = last_append_ms

    def add(self, base: int, position: int, time_ms: int, size: int, count: int) -> None:
        """Add the queue's next batch, found by the walk; its tags are unknown."""
        if self._size == len(self._data):
            self._data = np.concatenate(
                [self._data, np.empty(max(self._size, _CAPACITY_MIN), ENTRY)]
            )
        self._data[self._size] = (base, position, time_ms, LOOK_INSIDE, size, count)
        self._size += 1
        self.end = base + count
        self.last_append_ms = time_ms

    def seal(self, sequence: int, time_ms: int) -> None:
        """End the queue at its command message, found by the walk."""
        self.sealed_at = self.end = sequence
        self.last_append_ms = time_ms

    def load(self) -> None:
        """Read the consume log, unless that is done. Raises IndexLost."""
        if self._persisted is None:
            return
        found, mark = self._persisted.load(self.start)
        if self.sealed_at is not None:
            found = found[found["base"] < self.sealed_at]  # The last entry is the command message.
        if len(found) and self._size and found["position"][-1] >= self._data["position"][0]:
            raise IndexLost("the walk began before the checkpoint")
        self._data = np.concatenate([found, self._data[: self._size]])
        self._size = len(self._data)
        self._persisted = None
        self._trim()
        if mark >= 0:
            self.start = self._mark = mark

    def move_start(self, start: int) -> None:
        """Retention deleted the messages before `start`."""
        if start == self._mark + 1:
            return
        self.start = min(max(self.start, start), self.end)
        if self._persisted is None:
            self._trim()

    def forget_before(self, position: int) -> None:
        """Drop batches before the first position of the log's files."""
        gone = int(np.searchsorted(self.entries["position"], position, "left"))
        if gone:
            self.move_start(int(self._data["base"][gone]) if gone < self._size else self.end)

    def _trim(self) -> None:
        first = self.find(self.start)
        if first:
            self._data = self._data[first : self._size].copy()
            self._size = len(self._data)

    @property
    def entries(self) -> Entries:
        """All stored batches, ascending. Callers must not modify the result."""
        assert self._persisted is None, "load() comes first"
        return self._data[: self._size]

    @property
    def stored_bytes(self) -> int:
        return int(self.entries["bytes"].sum(dtype=np.int64))

    def find(self, sequence: int) -> int:
        """The number of the first batch with a sequence at or after this one."""
        found = self._data[: self._size]
        number = int(np.searchsorted(found["base"], sequence, "right")) - 1
        if number < 0:
            return 0
        return number + int(found["base"][number] + found["count"][number] <= sequence)

    def between(self, first: int, end: int) -> Entries:
        """The batches with a sequence in `first` to `end` - 1."""
        return self.entries[
            self.find(first) : int(np.searchsorted(self.entries["base"], end, "left"))
        ]

    def find_time(self, time_ms: int) -> int:
        """The first sequence stored at or after a time; the end if there is none."""
        found = self.entries
        number = int(np.searchsorted(found["time"], time_ms, "left"))
        return self.end if number == len(found) else max(int(found["base"][number]), self.start)


def sealed_at_of(snapshot: list[Any]) -> int | None:
    """The sequence of a queue's command message, from a snapshot."""
    found = snapshot[6] if len(snapshot) > 6 else None
    return int(found[0]) if found else None


class WalkedBatch(NamedTuple):
    """An entry of the message log. `header` and `subject` are set for batches
    and command messages.
    """

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
        end = (
            whole_end(mapped, position) if committed < 0 and base == files.bases[-1] else mapped.end
        )
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
    return WalkedBatch(
        position,
        envelope,
        bytes(region[REGION_BYTES : REGION_BYTES + header.subject_bytes]),
        header,
        mapped,
    )


def whole_end(mapped: Mapped, position: int = -1) -> int:
    """The end of the last whole entry in a log's last segment; a partial entry may follow. Raises
    LogDamaged if it is not the last.
    """
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
        return [
            WalkedPast(each[0], each[1], each[2], each[4], sealed_at_of(each)) for each in states
        ]
    except (CorruptBatch, *UNREADABLE, LookupError, TypeError) as cause:
        raise found.mapped.damaged(
            found.position, f"its snapshot cannot be read: {cause}"
        ) from cause


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
                    raise LogDamaged(
                        f"{cause.filename} is missing: restore it from a copy"
                    ) from cause

    def require(self, key: Key) -> QueueIndex | None:
        """The queue, with its consume log loaded; None if the folder does not have the queue.
        Raises what `refresh` raises.
        """
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
        raise LogDamaged(
            f"{self.folder.path}: retention deletes the consume logs faster than they can be "
            "read: try again"
        )

    # --- loading ----------------------------------------------------------------------------------

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

    # --- walking ----------------------------------------------------------------------------------

    def _walk(self) -> None:
        if 0 <= self.bound.messages <= self._position:
            return
        if not self.files.bases and self.bound.messages > 0:
            raise LogDamaged(
                f"{self.folder.messages} has no segments, but the log is committed up to "
                f"{self.bound.messages}: restore them"
            )
        for found in walk(self.files, self._position, self.bound.messages):
            self._take(found)
            self._position, self._last = found.end, (found.position, found.envelope)

    def _take(self, found: WalkedBatch) -> None:
        envelope, header = found.envelope, found.header
        if header is not None:
            base = envelope.base_sequence
            queue = self.queues.get((found.subject, header.partition))
            # Unusual, but possible; or the region names another queue by mistake.
            if queue is None or queue.end != base:
                found.mapped.region(found.position, envelope)
            if queue is None:
                queue = self.queues[found.subject, header.partition] = QueueIndex(base, base)
            if envelope.kind == Kind.COMMAND:
                said = command_messages.read(
                    bytes(found.mapped.region(found.position, envelope)), base
                )
                if isinstance(said, QueueErasure):
                    sealed_at = queue.sealed_at if said is QueueErasure.PURGE else None
                    erased = QueueIndex(
                        base,
                        base + 1,
                        last_append_ms=envelope.append_time_ms,
                        sealed_at=sealed_at,
                        mark=base,
                    )
                    self.queues[found.subject, header.partition] = erased
                else:
                    queue.seal(base, envelope.append_time_ms)
            else:
                queue.add(
                    base,
                    found.position,
                    envelope.append_time_ms,
                    envelope.total_bytes,
                    header.count,
                )
        elif envelope.kind == Kind.SNAPSHOT and found.position == self._snapshot_at:
            self._snapshot_at = found.end
            for past in pasts(found):
                self.queues[past.subject.encode(), past.partition] = QueueIndex(
                    past.next_sequence,
                    past.next_sequence,
                    last_append_ms=past.last_append_ms,
                    sealed_at=past.sealed_at,
                )
