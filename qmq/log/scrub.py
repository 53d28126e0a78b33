"""Scrubbing: reads everything that was flushed, again and again, so that damage is found while
another replica can still repair it.

A flipped bit in an old segment is not noticed until it is read, perhaps when the other copies are
damaged, too. So the scrubber walks both logs from their oldest entry to the last flushed one,
checks every checksum, and begins again:

    slice(bytes_max, entries_max)    continues where the last slice ended, reads about so much,
                                     returns the damage
    the caller                       chooses the rate, and has the damage repaired

It runs in a separate thread and does not disturb the store: it opens the files itself (retention
closes the store's), never waits for the store, and reports damage only if the log was not cut in
between and a second read finds it again. Deleted segments are skipped, and so are those that are
only in the object store: each read of them checks their chunks. Except in the newest segment, the
pages of a slice are dropped from the page cache: scrubbing does not displace what consumers read,
and the next round reads the disk, not memory. The segment's other pages stay: a consumer may be
reading them.
"""

from __future__ import annotations

import sys
from typing import Final

from qmq.errors import CorruptBatch, LogDamaged
from qmq.limits import MIB
from qmq.log.envelopes import ReadWindow, damaged
from qmq.log.segments import Segments, segment_name
from qmq.log.store import Store
from qmq.wire.batch import ENVELOPE_BYTES, parse_envelope
from qmq.wire.batch_columns import check_region

_READ_BYTES: Final = MIB
_PAGES_BYTES: Final = 2 * MIB
"""The kernel drops a block of pages as a whole; blocks begin at multiples of their size, which is
at most this.
"""


class _Gone(Exception):
    """The segment was dropped or cut while it was read.
    The scrubber continues with the current files.
    """


class Scrubber:
    """The scrubber of one store. A reopened store needs a new one.
    Call `slice` in one thread at a time.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._logs = store.logs
        self.log = 0
        self.position = store.messages.local_start
        """The position where the next slice begins, in log number `log`."""
        self.rounds = 0
        """The number of complete rounds."""
        self.bytes_read = self.entries_read = 0
        self._cuts = [segments.cuts for segments in self._logs]

    @property
    def cuts_seen(self) -> int:
        """The number of cuts of the current log that the position reflects."""
        return self._cuts[self.log]

    def slice(self, bytes_max: int, entries_max: int = sys.maxsize) -> LogDamaged | None:
        """Check about `bytes_max` bytes, at least one entry and at most `entries_max`. Returns the
        first damage; the next slice continues behind it.

        After a damaged envelope the next entry cannot be found, so the rest of that segment waits
        for the next round.
        """
        until, last = self.bytes_read + bytes_max, self.entries_read + entries_max
        while self.bytes_read < until and self.entries_read < last:
            segments = self._logs[self.log]
            if self.position >= segments.flushed:
                if not self._next_log():
                    return None
                continue
            try:
                found = self._scrub_segment(segments, until, last)
            except _Gone:
                self.find_place(segments)
                return None
            if found is not None:
                return found
        return None

    def _next_log(self) -> bool:
        """Go to the beginning of the other log; False at the end of a round."""
        self.log = 1 - self.log
        self.position = self._logs[self.log].local_start
        self.rounds += self.log == 0
        return self.log != 0

    def find_place(self, segments: Segments) -> None:
        """After a cut the scrubber's position may be inside an entry: go back to the beginning of
        the segment.
        """
        self._cuts[self.log] = segments.cuts
        self.position = segments.base_of(max(self.position, segments.local_start))

    def _scrub_segment(self, segments: Segments, until: int, last: int) -> LogDamaged | None:
        """Continue in one segment until so many bytes or entries are read. Raises _Gone."""
        if segments.cuts != self._cuts[self.log]:
            raise _Gone
        bases = list(segments.bases)
        base = max((each for each in bases if each <= self.position), default=-1)
        if base < 0:
            raise _Gone
        end = min([each for each in bases if each > base], default=segments.flushed)
        try:
            fd = segments.disk.open_read(segments.folder / segment_name(base))
        except FileNotFoundError:
            raise _Gone from None
        begin = self.position - base
        begin -= begin % _PAGES_BYTES
        try:
            walk = _Walk(self, segments, fd, base, min(end, segments.flushed))
            return walk.run(until, last)
        finally:
            if base != bases[-1]:
                segments.disk.drop_cached(fd, self.position - base - begin, begin)
            segments.disk.close(fd)


class _Walk:
    """Checks entries of one segment's file, from the scrubber's position on."""

    def __init__(
        self, scrubber: Scrubber, segments: Segments, fd: int, base: int, end: int
    ) -> None:
        self._scrubber = scrubber
        self._segments = segments
        self._end = end

        def read(position: int, size: int) -> bytes:
            return segments.disk.read_around(fd, min(size, end - position), position - base)

        self._window = ReadWindow(read, _READ_BYTES)

    def run(self, until: int, last: int) -> LogDamaged | None:
        """Check entries until the scrubber has read so many bytes or entries. Raises _Gone."""
        scrubber = self._scrubber
        while (
            scrubber.position < self._end
            and scrubber.bytes_read < until
            and scrubber.entries_read < last
        ):
            try:
                size = self._check()
            except CorruptBatch:
                damage = self._reread()
                if damage is not None:
                    return damage
                continue
            scrubber.position += size
            scrubber.bytes_read += size
            scrubber.entries_read += 1
        return None

    def _check(self) -> int:
        """The size of the entry at the scrubber's position. Raises CorruptBatch."""
        envelope = parse_envelope(self._bytes(ENVELOPE_BYTES))
        data = self._bytes(envelope.total_bytes)
        if len(data) < envelope.total_bytes:
            raise CorruptBatch("the entry is incomplete")
        check_region(data[ENVELOPE_BYTES:], envelope.region_crc)
        return envelope.total_bytes

    def _bytes(self, size: int) -> bytes:
        return self._window.read(self._scrubber.position, size)

    def _reread(self) -> LogDamaged | None:
        """Read a failed entry again. The entry is damaged unless the log was cut, or a repair has
        fixed it already. Raises _Gone.
        """
        scrubber, position = self._scrubber, self._scrubber.position
        self._window.clear()
        cause = self._flaw()
        if self._segments.cuts != scrubber.cuts_seen or position < self._segments.local_start:
            raise _Gone
        if cause is None:
            return None
        scrubber.position = self._behind(position)
        scrubber.bytes_read += scrubber.position - position
        return damaged(self._segments, position, cause, scrubber.log)

    def _flaw(self) -> CorruptBatch | None:
        try:
            self._check()
        except CorruptBatch as cause:
            return cause
        return None

    def _behind(self, position: int) -> int:
        """The position to continue at: after the entry if its envelope is valid, otherwise the
        segment's end.
        """
        try:
            return min(
                position + parse_envelope(self._bytes(ENVELOPE_BYTES)).total_bytes, self._end
            )
        except CorruptBatch:
            return self._end
