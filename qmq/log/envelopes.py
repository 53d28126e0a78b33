"""Reads a log of enveloped entries: the walk at a restart, and the decision about entries that fail
their checksum.

Both logs consist of envelopes (qmq/wire/batch.py), each followed by its region. A restart walks
them from the last checkpoint on and checks every checksum. If one fails, there are two cases:

* *A torn tail.* Entries written after the last flush may be missing or incomplete after a power
  cut, in any order. They were not acknowledged as flushed, so they are cut off.
* *Damage.* Flushed entries must be there. Every envelope has `flushed_position`, how far the log
  was flushed when it was written; so if a valid entry after the bad one, or the checkpoint, says
  that the bad place was flushed, it may have been acknowledged. It is never cut off: opening raises
  LogDamaged, and an operator (or, in a cluster, another replica) has to repair it.

The first entries of a segment are a snapshot of the state before it, cut by bytes into entries that
every reader accepts:

    state      a MessagePack array: of a queue in the message log, of a group on a queue in the
               action log (docs/FORMAT.md)
    entry      a MessagePack array of states, `SNAPSHOT_BYTES` of them, or of one longer state
    pieces     a group's state that is too long for an entry, cut: [subject, partition, group,
               bytes, is_last], one for each entry

Each entry says how many items all entries of the snapshot have together. If a crash has left only
some of them, the segment is not *opened whole*: it can be read after older segments, but a log must
not begin with it, because queues of the missing part would lose their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from google_crc32c import value as crc32c

from qmq import limits
from qmq.errors import CorruptBatch, LogDamaged
from qmq.limits import BATCH_BYTES_MAX, KIB, MIB
from qmq.log.segments import Segments, segment_name
from qmq.wire.batch import ENVELOPE_BYTES, MAGIC, PAYLOAD_AT, Envelope, Kind, parse_envelope
from qmq.wire.batch_columns import ALIGN

_WALKED_MAX: Final = 20_000
"""The most entries to walk in order to decide whether an entry begins at a position."""
_READ_BYTES: Final = 8 * limits.MIB
_MAGIC_BYTES: Final = MAGIC.to_bytes(4, "little")


@dataclass(frozen=True, slots=True)
class Entry:
    """One enveloped entry and its place."""

    position: int
    envelope: Envelope
    head: bytes
    """The envelope's bytes."""
    region: bytes

    @property
    def end(self) -> int:
        """The position after the entry."""
        return self.position + self.envelope.total_bytes


class ReadWindow:
    """A part of the log in memory while walking. `read(position, size)` reads it, at least `ahead`
    bytes at a time.
    """

    def __init__(self, read: Callable[[int, int], bytes], ahead: int) -> None:
        self._read = read
        self._ahead = ahead
        self._data = b""
        self._start = 0

    def read(self, position: int, size: int) -> bytes:
        """Read bytes from `position` on; fewer where the log, or the segment, ends."""
        at = position - self._start
        if at < 0 or at + size > len(self._data):
            self._data = self._read(position, max(size, self._ahead))
            self._start, at = position, 0
        return self._data[at : at + size]

    def clear(self) -> None:
        """Drop the bytes in memory: the next read reads the log."""
        self._data = b""


def head_at(segments: Segments, position: int) -> Envelope | None:
    """The envelope at `position`; None if the log ends before its end. Raises CorruptBatch."""
    head = segments.read(position, ENVELOPE_BYTES)
    return parse_envelope(head) if len(head) == ENVELOPE_BYTES else None


def walk(segments: Segments, position: int) -> Iterator[Entry]:
    """Every entry from `position` on, checked. Raises CorruptBatch at the first bad one (see
    `entry_at`); ColdRead.
    """
    return walk_bytes(segments.read, position, lambda: segments.end)


def walk_waiting(segments: Segments, position: int) -> Iterator[Entry]:
    """As `walk`, but wait for the object store, to open a store.
    Raises CorruptBatch, Overloaded.
    """
    return walk_bytes(segments.read_waiting, position, lambda: segments.end)


def walk_bytes(
    read: Callable[[int, int], bytes], position: int, end: Callable[[], int]
) -> Iterator[Entry]:
    """Every entry from `position` to the end of what `read(position, size)` gives, checked. Raises
    CorruptBatch at the first bad one.
    """
    window = ReadWindow(read, _READ_BYTES)
    while position < end():
        entry = _entry(window, position)
        yield entry
        position = entry.end


def walk_rising(
    read: Callable[[int, int], bytes], position: int, end: int, after: int
) -> Iterator[Entry]:
    """As `walk_bytes`, for entries whose indexes rise and are above `after`. Raises CorruptBatch
    also if they do not rise.
    """
    for entry in walk_bytes(read, position, lambda: end):
        if entry.envelope.index <= after:
            raise CorruptBatch(
                f"the entry at {entry.position} has index {entry.envelope.index}, and one "
                f"before it has {after}"
            )
        after = entry.envelope.index
        yield entry


def entry_at(segments: Segments, position: int) -> Entry:
    """The entry at `position`, checked. Raises CorruptBatch."""
    return _entry(ReadWindow(segments.read, 0), position)


def _entry(window: ReadWindow, position: int) -> Entry:
    head = window.read(position, ENVELOPE_BYTES)
    envelope = parse_envelope(head)
    region = window.read(position + ENVELOPE_BYTES, envelope.total_bytes - ENVELOPE_BYTES)
    if len(region) != envelope.total_bytes - ENVELOPE_BYTES:
        raise CorruptBatch("the entry is incomplete")
    if crc32c(region) != envelope.region_crc:
        raise CorruptBatch("the checksum of the region is wrong")
    return Entry(position, envelope, head, region)


def begins_at(segments: Segments, begin: int, position: int) -> bool | None:
    """True if an entry begins at `position`, by a walk from the entry at `begin` on; None if the
    walk does not decide.
    """
    for _ in range(_WALKED_MAX):
        if begin >= position:
            return begin == position
        try:
            head = head_at(segments, begin)
        except (CorruptBatch, LogDamaged):
            return None
        if head is None:
            return False
        begin += head.total_bytes
    return None


def require_torn_tail(
    segments: Segments,
    bad: int,
    flushed: int,
    cause: CorruptBatch,
    *,
    log: int = -1,
    trusts_envelopes: bool = True,
) -> None:
    """Return if the entry at `bad` begins a torn tail. Raises LogDamaged if the entry was flushed.

    `flushed` is the flushed position of the checkpoint; every segment but the last was flushed
    before the next began. A slave's envelopes have the flushed position of its *master*, so they do
    not count.
    """
    if bad < max(flushed, segments.bases[-1]):
        raise damaged(segments, bad, cause, log)
    if not trusts_envelopes:
        return
    if segments.is_unreadable_behind(bad):
        raise _unreadable(segments, bad, log)
    for entry in _whole_entries_after(segments, bad):
        if entry.envelope.flushed_position > bad:
            raise damaged(segments, bad, cause, log)


def is_torn(segments: Segments, position: int) -> bool:
    """True if the entry at `position` is incomplete, as after a process was killed while writing
    it.

    A complete envelope with a wrong checksum is not torn: it was written completely, and perhaps
    acknowledged. Zeros up to the end are unflushed bytes after a power cut.
    """
    try:
        head = head_at(segments, position)
        return head is None or position + head.total_bytes > segments.end
    except CorruptBatch:
        return _is_blank(segments, position)


def _is_blank(segments: Segments, position: int) -> bool:
    while data := segments.read(position, _READ_BYTES):
        if data.count(0) != len(data):
            return False
        position += len(data)
    return True


def damaged(segments: Segments, bad: int, cause: CorruptBatch, log: int) -> LogDamaged:
    """The error for a damaged place in a flushed part."""
    base = segments.base_of(bad)
    return LogDamaged(
        f"{segments.folder.name}: {segment_name(base)} is damaged at byte {bad - base} "
        f"({cause.message}), in a part that was flushed, so acknowledged entries are damaged. "
        "Nothing was cut. Restore the segment from a copy; `qmq log dump` shows the intact entries",
        log=log,
        position=bad,
    )


def _unreadable(segments: Segments, bad: int, log: int) -> LogDamaged:
    """The error for a tail that the disk cannot read. A torn write does not cause that."""
    base = segments.base_of(bad)
    return LogDamaged(
        f"{segments.folder.name}: {segment_name(base)} cannot be read from byte {bad - base} "
        "on (EIO: the disk fails), so it is unknown whether acknowledged entries are damaged. "
        "Nothing was cut. Copy the folder to a sound disk, and the segment from a backup; "
        "`qmq log dump` shows the intact entries",
        log=log,
        position=bad,
    )


def _whole_entries_after(segments: Segments, bad: int) -> Iterator[Entry]:
    """Find valid entries after the bad one, by their magic bytes at any aligned place."""
    position = bad + ALIGN
    while position < segments.end:
        segment_end = segments.segment_end(segments.base_of(position))
        data = segments.read(position, min(_READ_BYTES, segment_end - position))
        yield from _found_in(segments, position, data)
        position += (
            max(len(data) - ENVELOPE_BYTES, ALIGN)
            if position + len(data) < segment_end
            else len(data)
        )


def _found_in(segments: Segments, position: int, data: bytes) -> Iterator[Entry]:
    at = data.find(_MAGIC_BYTES)
    while at >= 0:
        with suppress(CorruptBatch):
            yield entry_at(segments, position + at)
        at = data.find(_MAGIC_BYTES, at + 1)


def epoch_of(epochs: Sequence[tuple[int, int]], index: int) -> int:
    """The epoch of an index, by (epoch, first index); -1 if the history does not go back so far."""
    return next((epoch for epoch, first in reversed(epochs) if first <= index), -1)


def with_epoch(epochs: Sequence[tuple[int, int]], epoch: int, index: int) -> list[tuple[int, int]]:
    """Add the entry of `epoch` at `index` to the pairs (epoch, first index). The entry may lie
    before others that are known.
    """
    firsts = dict(epochs)
    firsts[epoch] = min(firsts.get(epoch, index), index)
    return sorted(firsts.items())


def first_index(log: int, segments: Segments, last_index: int) -> int:
    """Index of the oldest entry of a log; the next index if the log is empty and started over, 1 if
    nothing was ever deleted.
    """
    if segments.start == 0:
        return 1
    try:
        head = head_at(segments, segments.start)
    except CorruptBatch as cause:
        raise damaged(segments, segments.start, cause, log) from cause
    return last_index + 1 if head is None else head.index


SNAPSHOT_BYTES: Final = MIB
"""The states in one entry: as much as one message between replicas carries."""
STATE_BYTES_MAX: Final = BATCH_BYTES_MAX - 64 * KIB
"""A longer state is cut into pieces.
A server of release 0.2 cannot read pieces, and stops at them.
"""
_ARRAY_16: Final = 0xDC
_ARRAY_32: Final = 0xDD


def to_payloads(states: Iterable[Sequence[object]]) -> tuple[list[bytes], int]:
    """The payloads of a snapshot's entries, at least one,
    and the number of items in all of them.
    """
    payloads: list[bytes] = []
    items: list[msgspec.Raw] = []
    size = count = 0
    for state in states:
        for item in items_of(state):
            if items and size + len(item) > SNAPSHOT_BYTES:
                payloads.append(msgspec.msgpack.encode(items))
                items, size = [], 0
            items.append(msgspec.Raw(item))
            size += len(item)
            count += 1
    return [*payloads, msgspec.msgpack.encode(items)], count


def items_of(state: Sequence[object]) -> Iterator[bytes]:
    """A state as the items of a snapshot: one, or the pieces of a long one."""
    data = msgspec.msgpack.encode(state)
    if len(data) <= STATE_BYTES_MAX:
        yield data
        return
    for at in range(0, len(data), SNAPSHOT_BYTES):
        is_last = at + SNAPSHOT_BYTES >= len(data)
        yield msgspec.msgpack.encode([*state[:3], data[at : at + SNAPSHOT_BYTES], is_last])


class SnapshotReader:
    """Reads the entries of one snapshot, in their order."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def states(self, payload: bytes) -> Iterator[list[Any]]:
        """The states that end in an entry. Raises msgspec.DecodeError."""
        for item in msgspec.msgpack.decode(payload, strict=False):
            if not isinstance(item[3], bytes):
                yield item
                continue
            self._pieces.append(item[3])
            if item[4]:
                whole, self._pieces = b"".join(self._pieces), []
                yield msgspec.msgpack.decode(whole, strict=False)


def is_opened_whole(segments: Segments, base: int) -> bool:
    """True if the segment that begins at `base` has all of its opening
    snapshot. Raises ColdRead.
    """
    position, found, wanted = base, 0, -1
    try:
        while position < segments.segment_end(base):
            head = head_at(segments, position)
            if head is None or head.kind != Kind.SNAPSHOT:
                break
            found += _array_length(segments.read(position + ENVELOPE_BYTES + PAYLOAD_AT, 5))
            wanted = head.base_sequence
            position += head.total_bytes
    except CorruptBatch:
        return False
    return found >= wanted >= 0


def _array_length(head: bytes) -> int:
    """The length of the MessagePack array that begins so."""
    if head[0] in (_ARRAY_16, _ARRAY_32):
        return int.from_bytes(head[1 : 3 if head[0] == _ARRAY_16 else 5], "big")
    return head[0] & 0x0F
