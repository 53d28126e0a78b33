"""Reads both logs in the order of their common index, to serve slaves that fell behind.

Every checksum is checked, since a slave would refuse a damaged entry again and again. Damage raises
LogDamaged, so that it can be repaired; valid entries before it are served first. The same holds for
bytes that are fetched from the object store first (ColdRead).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from qmq import limits
from qmq.errors import CorruptBatch, LogDamaged
from qmq.log.envelopes import ReadWindow
from qmq.log.reading import ColdRead
from qmq.log.recent_writes import Place, WriteRun, WriteStretch, behind
from qmq.log.segments import Segments
from qmq.wire.batch import ENVELOPE_BYTES, Envelope, parse_envelope
from qmq.wire.batch_columns import check_region

_WINDOW_BYTES: Final = 512 * limits.KIB


class _LogCursor:
    """Reads one log forward."""

    def __init__(self, number: int, segments: Segments, position: int) -> None:
        self.number = number
        self.position = position
        self._segments = segments
        self._window = ReadWindow(segments.read, _WINDOW_BYTES)
        self._head: Envelope | None = None

    def peek(self) -> Envelope | None:
        """The next entry's envelope; None at the end. Raises LogDamaged."""
        if self._head is None and self.position < self._segments.end:
            try:
                self._head = parse_envelope(self._window.read(self.position, ENVELOPE_BYTES))
            except CorruptBatch as cause:
                raise self._damaged(cause) from cause
        return self._head

    def take(self, envelope: Envelope) -> _Piece:
        """The entry whose envelope `peek` returned. Raises LogDamaged."""
        data = self._window.read(self.position, envelope.total_bytes)
        try:
            check_region(data[ENVELOPE_BYTES:], envelope.region_crc)
        except CorruptBatch as cause:
            raise self._damaged(cause) from cause
        piece = _Piece(self.number, self._segments.base_of(self.position), self.position, data)
        self.position += len(data)
        self._head = None
        return piece

    def _damaged(self, cause: CorruptBatch) -> LogDamaged:
        return LogDamaged(
            (
                f"{self._segments.folder.name}: the entry at {self.position} is damaged "
                f"({cause.message})"
            ),
            log=self.number,
            position=self.position,
        )


class _Piece(NamedTuple):
    """One entry and its place."""

    log: int
    base: int
    position: int
    data: bytes


def read_merged(
    logs: tuple[Segments, Segments], place: Place, after: int, bytes_max: int
) -> WriteStretch | None:
    """Entries after index `after`, whose place is `place`; at least one if there is one; None if
    some are deleted.

    Raises LogDamaged, ColdRead.
    """
    if any(position < segments.start for position, segments in zip(place, logs, strict=True)):
        return None
    cursors = [_LogCursor(number, segments, place[number]) for number, segments in enumerate(logs)]
    pieces: list[_Piece] = []
    size, last = 0, after
    try:
        while size < bytes_max:
            heads = [
                (head.index, cursor, head)
                for cursor in cursors
                if (head := cursor.peek()) is not None
            ]
            if not heads:
                break
            index, cursor, head = min(heads, key=itemgetter(0))
            if pieces and size + head.total_bytes > bytes_max:
                break
            pieces.append(cursor.take(head))
            size += head.total_bytes
            last = index
    except (LogDamaged, ColdRead):
        if not pieces:
            raise
    runs = tuple(_runs(pieces))
    for run in runs:
        place = behind(place, run)
    return WriteStretch(last, runs, place, size)


def _runs(pieces: list[_Piece]) -> Iterator[WriteRun]:
    """Adjacent entries of one segment, joined."""
    for (log, base), each in groupby(pieces, key=itemgetter(0, 1)):
        found = list(each)
        buffers = tuple([piece.data for piece in found])
        yield WriteRun(log, base, found[0].position, sum(map(len, buffers)), buffers)
