"""Walks the envelopes of a message log: the part after a checkpoint, or everything.

The walk verifies the envelope of each batch and reads the first bytes of its region, which name the queue. Readers verify the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import error
from typing import NamedTuple

import msgspec

from pyspark_qmq.files.mapped_segments import Mapped, SegmentFiles
from pyspark_qmq.files.queue_index import sealed_at_of
from qmq.batch import ENVELOPE_BYTES, Envelope, Kind
from qmq.batch_columns import REGION, REGION_BYTES, RegionHeader
from qmq.errors import CorruptBatch
from qmq.log.checked_payload import UNREADABLE
from qmq.log.envelopes import unwrap


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
