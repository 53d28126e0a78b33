"""Reading a log of enveloped entries: the walk at a restart, and the verdict on what does not hold.

Both logs are made of envelopes (qmq/batch.py), each followed by its region. A restart walks them from the last checkpoint on and checks
every checksum. Where one does not hold, there are two cases, and they must not be confused:

* *A torn tail.* What was written after the last flush may be gone or in pieces after a power cut, in any order. Nobody was promised it,
  so it is cut off.
* *Damage.* What was flushed must be there. Every envelope carries `flushed_position`, how far the log was flushed when it was written;
  so if any whole entry after the bad one, or the checkpoint, says that the bad place was flushed, then it was acknowledged once.
  That is never cut off: LogDamaged, and an operator (or, in a cluster, another replica) has to mend it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Final

from google_crc32c import value as crc32c

from qmq import limits
from qmq.batch import ENVELOPE_BYTES, MAGIC, Envelope, Kind, parse_envelope, place
from qmq.batch_columns import ALIGN
from qmq.errors import CorruptBatch, LogDamaged
from qmq.log.segments import Segments, segment_name

_READ_BYTES: Final = 8 * limits.MIB
_MAGIC_BYTES: Final = MAGIC.to_bytes(4, "little")
_PAYLOAD: Final = Struct("<I")


@dataclass(frozen=True, slots=True)
class Entry:
    """One enveloped entry and where it lies."""

    position: int
    envelope: Envelope
    region: bytes

    @property
    def end(self) -> int:
        """Position behind it."""
        return self.position + self.envelope.total_bytes


def wrap(kind: Kind, payload: bytes, *, count: int, epoch: int, index: int, time_ms: int, flushed: int) -> list[bytes]:
    """An entry that is no batch of messages (actions, snapshots): its payload behind its length. `count` stands in base_sequence."""
    size = _PAYLOAD.size + len(payload)
    region = b"".join((_PAYLOAD.pack(len(payload)), payload, bytes(-size & (ALIGN - 1))))
    if len(region) < 56:
        region += bytes(56 - len(region))
    total = ENVELOPE_BYTES + len(region)
    return [place(kind, total, crc32c(region), count, epoch, index, time_ms, flushed), region]


def unwrap(region: bytes) -> bytes:
    """The payload that `wrap` put in. Raises CorruptBatch."""
    size: int = _PAYLOAD.unpack_from(region)[0]
    if size > len(region) - _PAYLOAD.size:
        raise CorruptBatch("the payload does not fit into its entry")
    return region[_PAYLOAD.size : _PAYLOAD.size + size]


class ReadWindow:
    """A part of the log held in memory while walking. `read(position, size)` reads it, in pieces of `ahead` bytes at least."""

    def __init__(self, read: Callable[[int, int], bytes], ahead: int) -> None:
        self._read = read
        self._ahead = ahead
        self._data = b""
        self._start = 0

    def read(self, position: int, size: int) -> bytes:
        """Bytes from `position` on; fewer where the log, or the segment, ends."""
        at = position - self._start
        if at < 0 or at + size > len(self._data):
            self._data = self._read(position, max(size, self._ahead))
            self._start, at = position, 0
        return self._data[at : at + size]

    def clear(self) -> None:
        """Look at the log itself next time."""
        self._data = b""


def head_at(segments: Segments, position: int) -> Envelope | None:
    """The envelope at `position` alone; None if the log ends before it does. Raises CorruptBatch."""
    head = segments.read(position, ENVELOPE_BYTES)
    return parse_envelope(head) if len(head) == ENVELOPE_BYTES else None


def walk(segments: Segments, position: int) -> Iterator[Entry]:
    """Every entry from `position` on, checked. Raises CorruptBatch at the first that does not hold (see `entry_at`)."""
    window = ReadWindow(segments.read, _READ_BYTES)
    while position < segments.end:
        entry = _entry(window, position)
        yield entry
        position = entry.end


def entry_at(segments: Segments, position: int) -> Entry:
    """The entry at `position`, checked. Raises CorruptBatch."""
    return _entry(ReadWindow(segments.read, 0), position)


def _entry(window: ReadWindow, position: int) -> Entry:
    envelope = parse_envelope(window.read(position, ENVELOPE_BYTES))
    region = window.read(position + ENVELOPE_BYTES, envelope.total_bytes - ENVELOPE_BYTES)
    if len(region) != envelope.total_bytes - ENVELOPE_BYTES:
        raise CorruptBatch("the entry is incomplete")
    if crc32c(region) != envelope.region_crc:
        raise CorruptBatch("the checksum of the region is wrong")
    return Entry(position, envelope, region)


def judge(segments: Segments, bad: int, flushed: int, cause: CorruptBatch, *, log: int = -1, trusts_envelopes: bool = True) -> None:
    """Return if what begins at `bad` is a torn tail; raise LogDamaged if it was flushed once.

    `flushed` is what the checkpoint knows to be flushed; every segment but the last was flushed before the next began. A slave's envelopes
    tell how far its *master* had flushed, so there they do not count.
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
    """Whether what begins at `position` was cut short while it was written, as a killed process leaves it: the entry is not all there.

    Anything else is not: an envelope that is all there and does not hold was written whole once, and perhaps acknowledged. Zeros up to
    the end are what a power cut leaves of bytes that were never flushed.
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
    """The error that says which place of a flushed part does not hold."""
    base = segments.base_of(bad)
    return LogDamaged(
        f"{segments.folder.name}: {segment_name(base)} is damaged at byte {bad - base} ({cause.message}), in a part that "
        f"was flushed, so acknowledged entries are damaged. Nothing was cut. Restore the segment from a copy; "
        f"`qmq log dump` shows the intact entries",
        log=log,
        position=bad,
    )


def _unreadable(segments: Segments, bad: int, log: int) -> LogDamaged:
    """The error for a tail that the disk cannot read: no torn write leaves that."""
    base = segments.base_of(bad)
    return LogDamaged(
        f"{segments.folder.name}: {segment_name(base)} cannot be read from byte {bad - base} on (EIO: the disk fails), so it is unknown "
        f"whether acknowledged entries are damaged. Nothing was cut. Copy the folder to a sound disk, and the segment from a backup; "
        f"`qmq log dump` shows the intact entries",
        log=log,
        position=bad,
    )


def _whole_entries_after(segments: Segments, bad: int) -> Iterator[Entry]:
    """Entries found by their magic, at any aligned place after the bad one."""
    position = bad + ALIGN
    while position < segments.end:
        segment_end = segments.segment_end(segments.base_of(position))
        data = segments.read(position, min(_READ_BYTES, segment_end - position))
        yield from _found_in(segments, position, data)
        position += max(len(data) - ENVELOPE_BYTES, ALIGN) if position + len(data) < segment_end else len(data)


def _found_in(segments: Segments, position: int, data: bytes) -> Iterator[Entry]:
    at = data.find(_MAGIC_BYTES)
    while at >= 0:
        with suppress(CorruptBatch):
            yield entry_at(segments, position + at)
        at = data.find(_MAGIC_BYTES, at + 1)


def epoch_of(epochs: Sequence[tuple[int, int]], index: int) -> int:
    """Which of the (epoch, first index) an index lies in; -1 if they do not go back so far."""
    return next((epoch for epoch, first in reversed(epochs) if first <= index), -1)


def first_index(log: int, segments: Segments, last_index: int) -> int:
    """Index of the oldest entry of a log; behind the last one if the log is empty and was begun anew, 1 if it never lost anything."""
    if segments.start == 0:
        return 1
    try:
        head = head_at(segments, segments.start)
    except CorruptBatch as cause:
        raise damaged(segments, segments.start, cause, log) from cause
    return last_index + 1 if head is None else head.index
