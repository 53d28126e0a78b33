"""Maps the segment files of a log into memory, without copying, while a broker may be writing,
truncating and deleting them.

Only committed entries are read, and they are never truncated. A file deleted by retention stays
readable while it is mapped.

* `SegmentFiles.list` lists the segments; a gap between two is damage. Segments that a broker keeps
  in an object store only are refused: leaving them out would be taken for their messages' end.
* `SegmentFiles.map` maps one segment up to a position. A shorter file is damage, because the
  position was committed.
* `Mapped.entry` returns an entry's verified envelope, `Mapped.region` its verified region as a view
  that does not change.

Errors name the file and the byte offset, and say what to do.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from google_crc32c import value as crc32c

from qmq.errors import CorruptBatch, InvalidArgument, LogDamaged
from qmq.log.segment_index import SUFFIX as STORED
from qmq.log.segments import SUFFIX, segment_name
from qmq.wire.batch import ENVELOPE_BYTES, Envelope, parse_envelope

_RESTORE: Final = (
    "restore the file from a copy or from another replica (`qmq log dump` shows its valid entries)"
)


class Mapped:
    """One segment's bytes from its `base` to `end`, positions of the log."""

    __slots__ = ("_bytes", "_view", "base", "end", "path")

    def __init__(self, path: Path, base: int, end: int, memory: mmap.mmap | bytes) -> None:
        self.path = path
        self.base = base
        self.end = end
        self._bytes = np.frombuffer(memory, np.uint8)  # A view, so that checksums need no copy.
        self._view = memoryview(memory)

    def envelope(self, position: int) -> Envelope:
        """The envelope at a position. Raises LogDamaged if it is damaged."""
        try:
            return parse_envelope(self._view, position - self.base)
        except CorruptBatch as cause:
            raise self.damaged(position, cause.message) from cause

    def entry(self, position: int) -> Envelope:
        """The envelope of a whole entry. Raises LogDamaged if it is damaged or the
        entry is incomplete.
        """
        at, envelope = position - self.base, self.envelope(position)
        if position + envelope.total_bytes > self.end:
            raise LogDamaged(
                f"{self.path}: the entry at byte {at} ends after byte {self.end - self.base}, "
                "which is said to be the committed end: the commit mark is another log's, "
                "or the file is truncated. Start the broker once on its folder, "
                "or restore the file from a copy"
            )
        return envelope

    def region(self, position: int, envelope: Envelope) -> memoryview:
        """The region of the entry at a position. Raises LogDamaged if it is damaged."""
        begin, end = (
            position - self.base + ENVELOPE_BYTES,
            position - self.base + envelope.total_bytes,
        )
        if crc32c(self._bytes[begin:end]) != envelope.region_crc:
            raise self.damaged(position, "the producer's checksum is wrong")
        return self._view[begin:end]

    def head(self, position: int, envelope: Envelope) -> memoryview:
        """The region without verification, for the walk, which needs only its first bytes."""
        return self._view[
            position - self.base + ENVELOPE_BYTES : position - self.base + envelope.total_bytes
        ]

    def is_blank(self, position: int) -> bool:
        """Whether only zeros follow, which a power cut may leave."""
        at = position - self.base
        return not self._bytes[at : at + ENVELOPE_BYTES].any() and not self._bytes[at:].any()

    def damaged(self, position: int, what: str) -> LogDamaged:
        return LogDamaged(
            f"{self.path} is damaged at byte {position - self.base} ({what}): {_RESTORE}"
        )


@dataclass(frozen=True, slots=True)
class SegmentFiles:
    """The segments of a folder at one point in time."""

    folder: Path
    bases: tuple[int, ...]
    """Ascending."""

    @classmethod
    def list(cls, folder: Path) -> SegmentFiles:
        """Raises OSError; InvalidArgument if older segments are in an object store only."""
        found = sorted(_bases(folder, SUFFIX))
        if found and min(_bases(folder, STORED), default=found[0]) < found[0]:
            raise InvalidArgument(
                f"{folder} begins at position {found[0]}: older messages are in the "
                "broker's object store only (local retention), which files do not show. "
                "Read through the brokers: option qmq.servers instead of qmq.path"
            )
        return cls(folder, tuple(found))

    @property
    def start(self) -> int:
        """The position of the first byte."""
        return self.bases[0] if self.bases else 0

    def base_of(self, position: int) -> int:
        """The start of the segment that contains a position."""
        return self.bases[bisect_right(self.bases, position) - 1]

    def path(self, base: int) -> Path:
        """The path of the segment that starts at this position."""
        return self.folder / segment_name(base)

    def map(self, base: int, committed: int) -> Mapped:
        """Map a segment up to `committed` or its end; -1: the whole file.

        Raises:
            FileNotFoundError: the segment has been deleted.
            LogDamaged: the file is too short.
        """
        path = self.path(base)
        after = bisect_right(self.bases, base)
        following = self.bases[after] if after < len(self.bases) else -1
        with path.open("rb") as file:
            size = file.seek(0, 2)
            end = base + size if committed < 0 else committed
            if following >= 0:
                end = following if committed < 0 else min(committed, following)
            if base + size < end:
                what = "its successor says it goes" if end == following else "the log is committed"
                raise _short(path, size, end - base, what)
            return _mapped(file, path, base, end)


def _bases(folder: Path, suffix: str) -> list[int]:
    return [
        int(each.stem)
        for each in folder.glob(f"*{suffix}")
        if each.stem.isdigit() and len(each.stem) == 20
    ]


def map_part(path: Path, base: int, end: int) -> Mapped:
    """Map a segment up to a committed position.
    Raises FileNotFoundError and LogDamaged like `SegmentFiles.map`.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if base + size < end:
            raise _short(path, size, end - base, "the log is committed")
        return _mapped(file, path, base, end)


def _short(path: Path, size: int, needed: int, what: str) -> LogDamaged:
    return LogDamaged(
        f"{path} has {size} bytes, and {what} up to byte {needed} of it: it is truncated, or "
        f"a segment is missing; {_RESTORE}"
    )


def _mapped(file: BinaryIO, path: Path, base: int, end: int) -> Mapped:
    memory = mmap.mmap(file.fileno(), end - base, access=mmap.ACCESS_READ) if end > base else b""
    return Mapped(path, base, end, memory)
