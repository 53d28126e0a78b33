"""An append-only log of bytes in segment files, each named by the 20-digit position of its first
byte.

The file for a position is found by binary search. Only the last segment is written; earlier ones
are complete and never change. Rules:
* `append` writes at the known end; after a partial failure the next append overwrites the remains,
  and `truncate` removes them immediately.
* A gap between two segments is damage: retention deletes only at the front.
* A segment is flushed before the next one begins, so that after a power cut only the last one can
  be short.
* A segment that a cut would leave empty is deleted, unless the one before it has no file here: the
  log may continue in that one.
* A file that a thread may be syncing stays open: it is set aside instead of closed, and `close` or
  `close_set_aside` close it after the sync.
* The oldest sealed segments may have no file here: their bytes are in an object store
  (docs/TIERING.md), and their index is here.
* Flushing is split in three, so that the slow part can run in a thread: `begin_sync` makes a plan,
  `SyncPlan.run` executes it, `end_sync` records the result.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from qmq.errors import LogDamaged, check
from qmq.limits import MIB
from qmq.log.disk import Disk
from qmq.log.reading import StoredBytes
from qmq.log.segment_index import SegmentIndex, index_name, read_indexes
from qmq.process.files import make_private

_OPEN_FILES_MAX: Final = 64
_LOOK_BYTES: Final = 8 * MIB
SUFFIX: Final = ".log"


def segment_name(position: int) -> str:
    """The name of a segment: 20 digits, so that names sort as positions do."""
    return f"{position:020d}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The files to sync so that everything before `position` survives."""

    disk: Disk
    position: int
    file: int
    is_dirty: bool
    folder: Path | None
    changes: int
    cuts: int
    """`Segments.cuts` when the plan was made: the plan does not cover later writes after a cut."""

    def run(self) -> None:
        """Sync the files. Safe in a thread. Raises FlushFailed."""
        if self.is_dirty or self.folder is not None:
            self.disk.sync(
                self.file
            )  # syncing a file without new data would still flush the device's cache
        if self.folder is not None:
            self.disk.sync_folder(self.folder)


@dataclass(frozen=True, slots=True)
class FlushPlan:
    """One flush of both logs: sync `files`, or call `run` in a thread; then `Store.end_flush`."""

    messages: SyncPlan
    actions: SyncPlan
    index: int
    """Entries up to this index are on disk after `run`."""

    @property
    def files(self) -> list[int]:
        """The files whose syncs, in any order, are the whole flush; none if it needs `run`.

        Either log may be the first to survive a power cut: the kernel writes pages back in any
        order, so recovery expects that.
        """
        messages, actions = self.messages, self.actions
        if messages.folder is not None or actions.folder is not None:
            return []
        return [each.file for each in (messages, actions) if each.is_dirty]

    def run(self) -> None:
        """Sync both logs. Raises FlushFailed."""
        self.messages.run()
        self.actions.run()


class Segments:
    """The files of one log. Positions count bytes from the log's first byte ever."""

    def __init__(
        self, disk: Disk, folder: Path, segment_bytes: int, stored: StoredBytes | None = None
    ) -> None:
        """`stored` reads segments that are in the object store only."""
        self.disk = disk
        self.folder = folder
        self.segment_bytes = segment_bytes
        make_private(folder)
        self._stored = stored or StoredBytes()
        files = sorted(int(path.stem) for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit())
        self._indexes = _of_this_log(read_indexes(folder, disk), files)
        self.bases = sorted({*files, *self._indexes})
        """The first position of each segment, ascending. Only this class changes the list."""
        self.local_start = _first_of_files(self.bases, files)
        """The position of the first byte that is on this disk."""
        self._readers: OrderedDict[int, int] = OrderedDict()
        self._set_aside: list[int] = []
        self._syncing: list[int] = []
        """The files of plans that were begun and did not end."""
        self._folder_changes = 1
        self._folder_changes_synced = 0
        self.cuts = 0
        """Increased when a cut of the end begins and when it ends: bytes near the end that were
        read before may have changed.
        """
        if not self.bases:
            self.bases = [0]
        self._active = disk.open_append(self._path(self.bases[-1]))
        self.end = self.bases[-1] + disk.size(self._active)
        self.flushed = self.bases[-1]
        self._check_gaps()

    def _path(self, base: int) -> Path:
        return self.folder / segment_name(base)

    def _check_gaps(self) -> None:
        for base, following in pairwise(self.bases):
            size = (
                self._indexes[base].size
                if base < self.local_start
                else self._path(base).stat().st_size
            )
            if base + size != following:
                raise LogDamaged(
                    f"{self.folder.name}: {segment_name(base)} has {size} bytes, "
                    f"but the next segment begins at {following}: a segment is missing or cut. "
                    "Restore it from a copy, then start again"
                )

    @property
    def start(self) -> int:
        """Position of the first kept byte."""
        return self.bases[0]

    @property
    def local_bytes(self) -> int:
        """The number of the log's bytes that are on this disk."""
        return self.end - self.local_start

    def mend(self, position: int, data: bytes) -> None:
        """Overwrite damaged bytes with another replica's copy, and sync them.

        Pass all damage of a segment at once: the kernel reads a block before it changes a part of
        it, and a damaged block may be unreadable.
        """
        base = self.base_of(position)
        # The file was deleted after the damage was found; the object store has a whole copy.
        if base < self.local_start:
            return
        fd = self.disk.open_append(self._path(base))
        try:
            self.disk.write(fd, [data], position - base)
            self.disk.sync(fd)
        finally:
            self.disk.close(fd)

    def must_roll(self, size: int) -> bool:
        """True if `size` more bytes need a new segment. A segment takes at least one append."""
        used = self.end - self.bases[-1]
        return used > 0 and used + size > self.segment_bytes

    def begins(self, size: int) -> bool:
        """True if an append of `size` bytes is the first of a segment that is
        not the log's first.
        """
        used = self.end - self.bases[-1]
        return used + size > self.segment_bytes if used else self.end > 0

    def roll(self) -> None:
        """Flush, then begin a new segment at the end. Raises FlushFailed, DiskFull. The old segment
        stays active then.
        """
        fd = self.disk.open_append(self._path(self.end))
        self.disk.sync(self._active)
        self.flushed = self.end
        self._readers[self.bases[-1]] = self._active
        self.bases.append(self.end)
        self._active = fd
        self._folder_changes += 1

    def append(self, buffers: Sequence[bytes], size: int) -> int:
        """Write the buffers, `size` bytes together, at the end, and return their position. Raises
        DiskFull, and appends nothing then.
        """
        position = self.end
        try:
            self.disk.append(self._active, buffers, position - self.bases[-1])
        except BaseException:
            self.disk.truncate(self._active, position - self.bases[-1])
            raise
        self.end = position + size
        return position

    def base_of(self, position: int) -> int:
        """The first position of the segment that contains `position`."""
        return self.bases[bisect_right(self.bases, position) - 1]

    def read(self, position: int, size: int) -> bytes:
        """Read bytes from `position` on, within one segment; fewer at its end. Raises LogDamaged
        outside the log, ColdRead.
        """
        base = self._base_in_log(position)
        if base < self.local_start:
            return self._read_stored(self._stored.read, base, position - base, size)
        return self.disk.read_around(self._reader(base), size, position - base)

    def read_waiting(self, position: int, size: int) -> bytes:
        """As `read`, but wait for the object store. Do not call this in the event loop. Raises
        LogDamaged outside the log, Overloaded.
        """
        base = self._base_in_log(position)
        if base < self.local_start:
            return self._read_stored(self._stored.read_waiting, base, position - base, size)
        return self.disk.read_around(self._reader(base), size, position - base)

    def _base_in_log(self, position: int) -> int:
        if not self.start <= position <= self.end:
            raise LogDamaged(f"position {position} is outside the log ({self.start} to {self.end})")
        return self.base_of(position)

    def _read_stored(
        self, read: Callable[[SegmentIndex, int, int], bytes], base: int, at: int, size: int
    ) -> bytes:
        index = self._indexes[base]
        size = min(size, index.size - at)
        return index.head[at : at + size] if at + size <= len(index.head) else read(index, at, size)

    def damaged_objects(self) -> list[str]:
        """The names of the log's objects that the object store has lost or changed, as far as that
        was noticed.
        """
        return sorted([name for base, name in self._stored.damaged() if base in self._indexes])

    def is_unreadable_behind(self, position: int) -> bool:
        """True if a part of the log from a position to its end is unreadable."""
        while position < self.end:
            base = self.base_of(position)
            size = min(_LOOK_BYTES, self.segment_end(base) - position)
            try:
                self.disk.read(self._reader(base), size, position - base)
            except OSError as cause:
                if cause.errno != errno.EIO:
                    raise
                return True
            position += size
        return False

    def _reader(self, base: int) -> int:
        if base == self.bases[-1]:
            return self._active
        fd = self._readers.get(base)
        if fd is None:
            fd = self._readers[base] = self.disk.open_read(self._path(base))
            if len(self._readers) > _OPEN_FILES_MAX:
                self._put_away(self._readers.popitem(last=False)[1])
        else:
            self._readers.move_to_end(base)
        return fd

    def _put_away(self, fd: int) -> None:
        """Close a file, after the sync if there is one under way:
        it was the active one when that began.
        """
        if fd in self._syncing:
            self._set_aside.append(fd)
        else:
            self.disk.close(fd)

    def segment_end(self, base: int) -> int:
        """The end of the segment that begins at `base`."""
        following = bisect_right(self.bases, base)
        return self.bases[following] if following < len(self.bases) else self.end

    def truncate(self, position: int) -> None:
        """Cut the log so that it ends at `position`; later segments are deleted. Only recovery, and
        a slave whose log diverged, do this.
        """
        check(
            position >= self.local_start,
            f"a cut to {position} would reach what is only in the object store",
        )
        self.flushed = min(
            self.flushed, position
        )  # lower and count first, for readers in other threads
        self.cuts += 1
        while self.bases[-1] >= position and self.bases[-1] > self.local_start:
            self._drop_last()
        self.disk.truncate(self._active, position - self.bases[-1])
        self.end = position
        self.cuts += (
            1  # count again, because lookups in the middle of the cut are not valid any more
        )
        self._folder_changes += 1

    def _drop_last(self) -> None:
        self.disk.truncate(self._active, 0)
        self._set_aside.append(self._active)
        self._path(self.bases.pop()).unlink()
        reader = self._readers.pop(self.bases[-1], None)
        if reader is not None:
            self._set_aside.append(reader)
        self._active = self.disk.open_append(self._path(self.bases[-1]))

    def drop_empty(self) -> None:
        """Remove an empty new segment: its opening snapshot did not fit on the disk, or was cut."""
        if self.end == self.bases[-1] > self.local_start:
            self.truncate(self.end)

    def drop_before(self, position: int) -> list[Path]:
        """Drop the segments that end before `position`.
        Returns their files, for the caller to delete.
        """
        dropped: list[Path] = []
        while len(self.bases) > 1 and self.bases[1] <= position:
            base = self.bases.pop(0)
            self._forget_reader(base)
            dropped.append(self._path(base))
            if self._indexes.pop(base, None) is not None:
                dropped.append(self._index_path(base))
        self.local_start = max(self.local_start, self.start)
        return dropped

    # --- segments in the object store -------------------------------------------------------------

    def _index_path(self, base: int) -> Path:
        return self.folder / index_name(base)

    def has_index(self, base: int) -> bool:
        """True if the segment can be read without its file."""
        return base in self._indexes

    def write_index(self, index: SegmentIndex) -> None:
        """Write the index of a segment, synced. Safe in a thread. Raises DiskFull, OSError."""
        self.disk.replace(self._index_path(index.base), index.encode())

    def note_index(self, index: SegmentIndex) -> bool:
        """Note that the segment's index is written. False if the log has no such segment any more,
        so that the file is unused.
        """
        base = index.base
        if base not in self.bases[:-1] or self.segment_end(base) != index.end:
            return False
        self._indexes[base] = index
        return True

    def begin_with(self, indexes: Sequence[SegmentIndex]) -> None:
        """Begin this empty log with segments that have written indexes and no files."""
        bases = [*[each.base for each in indexes], self.start]
        ends = [each.end for each in indexes]
        check(
            ends == bases[1:] and self.end == self.start,
            f"segments up to {ends[-1:]} do not end where the log begins, at {self.start}",
        )
        self.bases[:0] = bases[:-1]
        self._indexes.update({each.base: each for each in indexes})

    def release_before(self, position: int) -> list[Path]:
        """Give up the files of the segments that end before `position`, the oldest first, up to the
        first segment without an index. Returns the files, for the caller to delete.
        """
        released: list[Path] = []
        while (
            self.local_start in self._indexes
            and (end := self.segment_end(self.local_start)) <= position
        ):
            self._forget_reader(self.local_start)
            released.append(self._path(self.local_start))
            self.local_start = end
        return released

    # --- the end of a segment ---------------------------------------------------------------------

    def drop_files_before(self, position: int) -> None:
        """Delete the segments that end before `position`."""
        for path in self.drop_before(position):
            path.unlink(missing_ok=True)

    def _forget_reader(self, base: int) -> None:
        fd = self._readers.pop(base, None)
        if fd is not None:
            self._set_aside.append(fd)

    def close_set_aside(self) -> None:
        """Close the files that were set aside. No sync of them may be running."""
        for fd in self._set_aside:
            self.disk.close(fd)
        self._set_aside.clear()

    def begin_sync(self) -> SyncPlan:
        """Make the plan for syncing everything now."""
        changes = self._folder_changes
        folder = self.folder if changes > self._folder_changes_synced else None
        self._syncing.append(self._active)
        return SyncPlan(
            self.disk, self.end, self._active, self.flushed < self.end, folder, changes, self.cuts
        )

    def end_sync(self, plan: SyncPlan) -> None:
        """Finish a plan that was run: everything before its position survives a power cut, unless
        the log was cut meanwhile.
        """
        self._syncing.remove(plan.file)
        if plan.cuts == self.cuts:
            self.flushed = max(self.flushed, plan.position)
        self._folder_changes_synced = max(self._folder_changes_synced, plan.changes)

    def close(self) -> None:
        """Close all files without a flush."""
        for fd in (*self._readers.values(), *self._set_aside, self._active):
            self.disk.close(fd)
        self._readers.clear()
        self._set_aside.clear()


def _of_this_log(indexes: dict[int, SegmentIndex], files: Sequence[int]) -> dict[int, SegmentIndex]:
    """The indexes of segments that have a file, or follow each other up to the first file. Others
    belong to deleted segments.
    """
    found = {base: each for base, each in indexes.items() if files and files[0] <= base < files[-1]}
    by_end = {each.end: each for each in indexes.values()}
    start = files[0] if files else 0
    while (before := by_end.get(start)) is not None and before.size > 0:
        found[before.base] = before
        start = before.base
    return found


def _first_of_files(bases: Sequence[int], files: Sequence[int]) -> int:
    """The first base from which on every segment has its file. An older file, if one remains, is
    not used.
    """
    found, having = bases[-1] if bases else 0, set(files)
    for base in reversed(bases):
        if base not in having:
            break
        found = base
    return found
