"""Scrubbing: reading everything that was flushed, again and again, so that damage is found while another replica can still mend it.

A bit that flips in an old segment hurts nobody until somebody reads it, perhaps when the other copies have gone the same way. So the
scrubber walks both logs from their oldest entry to the last flushed one and checks every checksum, and begins again:

    slice(bytes_max)    goes on where the last one ended, reads about so many bytes, gives what it found
    the caller          says how often (that is the rate), and has what was found mended

It runs in a thread of its own beside the one that drives the store, and takes nothing from it: it opens its own files (retention closes
the store's), never waits for it, and believes a flaw only if the log was not cut meanwhile and the flaw is still there at a second look.
Segments that retention took are passed over. Except in the newest segment, what was read leaves the page cache again: scrubbing does not
push out what consumers read, and the next round looks at the disk, not at memory.
"""

from __future__ import annotations

import os
from typing import Final

from qmq.batch import ENVELOPE_BYTES, parse_envelope
from qmq.batch_columns import check_region
from qmq.errors import CorruptBatch, LogDamaged
from qmq.limits import MIB
from qmq.log.envelopes import ReadWindow, damaged
from qmq.log.segments import Segments, segment_name
from qmq.log.store import Store

_READ_BYTES: Final = MIB


class _Gone(Exception):
    """The segment was dropped, or cut, while it was being read: begin again at what is there now."""


class Scrubber:
    """Of one store; make another one when the store was opened anew. `slice` is for one thread at a time."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._logs = store.logs
        self.log = 0
        self.position = store.messages.start
        """Where the next slice begins, in log number `log`."""
        self.rounds = 0
        """How often everything was read."""
        self.bytes_read = 0
        self._cuts = [segments.cuts for segments in self._logs]

    @property
    def cuts_seen(self) -> int:
        """Cuts of the present log that the position takes into account."""
        return self._cuts[self.log]

    def slice(self, bytes_max: int) -> LogDamaged | None:
        """Check about `bytes_max` bytes, at least one entry; give the damage that was found first. The next slice goes on behind it.

        Behind a damaged envelope nothing says where the next entry begins, so the rest of that segment waits for the next round.
        """
        until = self.bytes_read + bytes_max
        while self.bytes_read < until:
            segments = self._logs[self.log]
            if self.position >= segments.flushed:
                if not self._next_log():
                    return None
                continue
            try:
                found = self._scrub_segment(segments, until - self.bytes_read)
            except _Gone:
                self._find_place(segments)
                return None
            if found is not None:
                return found
        return None

    def _next_log(self) -> bool:
        """Go to the other log's begin; False at the end of a round."""
        self.log = 1 - self.log
        self.position = self._logs[self.log].start
        self.rounds += self.log == 0
        return self.log != 0

    def _find_place(self, segments: Segments) -> None:
        """After a cut no entry need begin where we were: one begins where the segment does."""
        self._cuts[self.log] = segments.cuts
        self.position = segments.base_of(max(self.position, segments.start))

    def _scrub_segment(self, segments: Segments, bytes_max: int) -> LogDamaged | None:
        """Go on in one segment. Raises _Gone."""
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
        try:
            return _Walk(self, segments, fd, base, min(end, segments.flushed)).run(bytes_max)
        finally:
            if base != bases[-1] and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            segments.disk.close(fd)


class _Walk:
    """A walk over entries of one segment's file, from the scrubber's position on."""

    def __init__(self, scrubber: Scrubber, segments: Segments, fd: int, base: int, end: int) -> None:
        self._scrubber = scrubber
        self._segments = segments
        self._end = end

        def read(position: int, size: int) -> bytes:
            return segments.disk.read_around(fd, min(size, end - position), position - base)

        self._window = ReadWindow(read, _READ_BYTES)

    def run(self, bytes_max: int) -> LogDamaged | None:
        """Check `bytes_max` bytes or so. Raises _Gone."""
        scrubber, done = self._scrubber, 0
        while scrubber.position < self._end and done < bytes_max:
            try:
                size = self._check()
            except CorruptBatch:
                damage = self._look_again()
                if damage is not None:
                    return damage
                continue
            scrubber.position += size
            scrubber.bytes_read += size
            done += size
        return None

    def _check(self) -> int:
        """Size of the entry at the scrubber's position. Raises CorruptBatch."""
        envelope = parse_envelope(self._bytes(ENVELOPE_BYTES))
        data = self._bytes(envelope.total_bytes)
        if len(data) < envelope.total_bytes:
            raise CorruptBatch("the entry is incomplete")
        check_region(data[ENVELOPE_BYTES:], envelope.region_crc)
        return envelope.total_bytes

    def _bytes(self, size: int) -> bytes:
        return self._window.read(self._scrubber.position, size)

    def _look_again(self) -> LogDamaged | None:
        """Something does not hold: damage, unless the log was cut under us or it is mended already. Raises _Gone."""
        scrubber, position = self._scrubber, self._scrubber.position
        self._window.clear()
        cause = self._flaw()
        if self._segments.cuts != scrubber.cuts_seen or position < self._segments.start:
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
        """Where to go on: behind the entry if its envelope holds, else at the segment's end."""
        try:
            return min(position + parse_envelope(self._bytes(ENVELOPE_BYTES)).total_bytes, self._end)
        except CorruptBatch:
            return self._end
