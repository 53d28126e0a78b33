"""The files of a schedule: appends whose newest bytes are in memory, and a folder that matches the
state when it is opened after any crash.

A schedule has thousands of files, and most get a few bytes at a time.

An append file has `written` bytes on disk and a `tail` in memory after them; readers see both. The
tail is written when it is large, when all tails together are too large, or by a checkpoint in
another thread. Writing the same bytes at the same place twice is harmless, so no lock is needed.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from qmq.errors import DiskFull, LogDamaged, NotConnected
from qmq.limits import KIB
from qmq.log import checkpoint
from qmq.log.disk import Disk

LOG, IDX, DONE, RUN = SUFFIXES = (".log", ".idx", ".done", ".run")
"""The endings of a bucket's files: messages, index, final states; and of runs (spread.py), whose
names sort before those of buckets.
"""

TAIL_BYTES_MAX: Final = 256 * KIB
"""A larger tail is written immediately."""
LARGE_BYTES: Final = 32 * KIB
_OPEN_FILES_MAX: Final = 128


class AppendFile:
    """One file: its written length, and its tail."""

    __slots__ = ("name", "tail", "written")

    def __init__(self, name: str, written: int = 0) -> None:
        self.name = name
        self.written = written
        self.tail = bytearray()

    @property
    def end(self) -> int:
        """The length including the tail."""
        return self.written + len(self.tail)

    def wrote(self, end: int) -> None:
        """Everything before `end` is on disk: drop it from memory."""
        size = end - self.written
        if size > 0:
            del self.tail[:size]
            self.written = end


class UnwrittenTail(NamedTuple):
    """A file's tail at one moment."""

    file: AppendFile
    at: int
    data: bytes


class AppendFiles:
    """The files of one folder, of which few are open. Only methods that say so are thread-safe."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self.disk = disk
        self.folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()
        self._unsynced: dict[str, int] = {}
        self._write_number = 0

    def read(self, file: AppendFile, at: int, size: int) -> bytes:
        """Bytes from `at` on; fewer at the file's end.
        Raises LogDamaged if written bytes are missing.
        """
        begin = at - file.written
        if begin >= 0:
            return bytes(file.tail[begin : begin + size])
        data = read_written(self.disk, self._fd(file.name), file.name, min(size, -begin), at)
        if len(data) < min(size, -begin):
            raise damaged(file.name, at + len(data), f"it has had {file.written} bytes")
        return data + bytes(file.tail[: size - len(data)]) if size > len(data) else data

    def stretch(self, file: AppendFile, begin: int, size: int) -> Callable[[int, int], bytes]:
        """A function that reads small pieces of `size` bytes from `begin` on, by (place there,
        size). Valid until the next call of any method.

        The function raises LogDamaged if written bytes are missing.
        """
        if begin + size > file.written:
            return lambda at, wanted: self.read(file, begin + at, wanted)
        fd = self._fd(file.name)

        def read_piece(at: int, wanted: int) -> bytes:
            data = read_written(self.disk, fd, file.name, wanted, begin + at)
            if len(data) < wanted:
                raise damaged(file.name, begin + at + len(data), f"it has had {file.written} bytes")
            return data

        return read_piece

    def append(self, file: AppendFile, envelope: bytes, region: bytes) -> None:
        """Add a batch; a large one is written immediately, because keeping it costs more."""
        if len(region) > LARGE_BYTES:
            with suppress(DiskFull):  # then it stays in memory
                self._write(file, [bytes(file.tail), envelope, region])
                return
        file.tail += envelope
        file.tail += region

    def append_all(self, file: AppendFile, buffers: Sequence[bytes | memoryview]) -> None:
        """Write these bytes at once, or keep them in memory while the disk is full."""
        if not file.tail:
            with suppress(DiskFull):
                self._write(file, buffers)
                return
        file.tail += b"".join(buffers)

    def write(self, file: AppendFile) -> None:
        """Write the tail. Raises DiskFull."""
        if file.tail:
            self._write(file, [bytes(file.tail)])

    def _write(self, file: AppendFile, buffers: Sequence[bytes | memoryview]) -> None:
        self.disk.write(self._fd(file.name), buffers, file.written)
        self._write_number += 1
        self._unsynced[file.name] = self._write_number
        file.written += sum(map(len, buffers))
        file.tail.clear()

    def _fd(self, name: str) -> int:
        fd = self._open.get(name)
        if fd is not None:
            self._open.move_to_end(name)
            return fd
        if len(self._open) >= _OPEN_FILES_MAX:
            self.disk.close(self._open.popitem(last=False)[1])
        fd = self._open[name] = self.disk.open_append(self.folder / name)
        return fd

    def forget(self, name: str) -> None:
        """The file will be deleted."""
        fd = self._open.pop(name, None)
        if fd is not None:
            self.disk.close(fd)

    def close(self) -> None:
        """Close all files. Unwritten tails stay in memory."""
        while self._open:
            self.disk.close(self._open.popitem()[1])

    # --- checkpoints ------------------------------------------------------------------------------

    def unsynced(self) -> dict[str, int]:
        """The files that were written and not synced, for `sync` and `synced`."""
        return dict(self._unsynced)

    def synced(self, names: dict[str, int]) -> None:
        """These files were synced, unless they were written since."""
        for name, number in names.items():
            if self._unsynced.get(name) == number:
                del self._unsynced[name]

    def write_and_sync(self, tails: list[UnwrittenTail], others: dict[str, int]) -> None:
        """Write tails, and sync them and other files. Safe in a thread.
        Raises DiskFull, FlushFailed.
        """
        for tail in tails:
            fd = self.disk.open_append(self.folder / tail.file.name)
            try:
                self.disk.write(fd, [tail.data], tail.at)
            finally:
                self.disk.close(fd)
        self.disk.sync_files(
            [self.folder / name for name in others.keys() | {tail.file.name for tail in tails}]
        )


def read_written(disk: Disk, fd: int, name: str, size: int, at: int) -> bytes:
    """Bytes of a file; fewer at its end. Raises LogDamaged if the disk cannot read them (EIO),
    OSError for other failures.
    """
    try:
        return disk.read(fd, size, at)
    except OSError as cause:
        if cause.errno != errno.EIO:
            raise
        raise damaged(name, at, f"the disk cannot read it: {cause}") from cause


def damaged(name: str, position: int, why: str) -> LogDamaged:
    """The error for a damaged file. It names no place in a log, since the schedule is not repaired
    from another replica.
    """
    return LogDamaged(
        f"schedule/{name} is damaged at byte {position} ({why}): "
        "restore the file from a copy, or move this replica's data folder away and start it again"
    )


def cut_back(
    disk: Disk, folder: Path, lengths: dict[str, int], first_kept: str, *, keep: str
) -> set[str]:
    """Cut files to their lengths, and delete those that are not named. Returns the files that an
    earlier checkpoint may name.

    They are of buckets before `first_kept`. The file `keep` stays. Raises LogDamaged if a file is
    shorter, and then nothing was changed.
    """
    missing = dict(lengths)
    long: list[tuple[Path, int]] = []
    unknown: list[Path] = []
    older: set[str] = set()
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        length = missing.pop(entry.name, None)
        if length is not None:
            size = entry.stat().st_size
            if size < length:
                raise damaged(
                    entry.name,
                    size,
                    f"it ends there, and had {length} bytes when the last checkpoint was written",
                )
            if size > length:
                long.append((Path(entry.path), length))
        elif entry.name < first_kept and entry.name.endswith(SUFFIXES):
            older.add(entry.name)
        elif entry.name != keep:
            unknown.append(Path(entry.path))
    for name, length in missing.items():
        raise damaged(
            name, 0, f"it is gone, and had {length} bytes when the last checkpoint was written"
        )
    for path, length in long:
        fd = disk.open_append(path)
        disk.truncate(fd, length)
        disk.close(fd)
    for path in unknown:
        path.unlink()
    return older


class Leftovers:
    """The files of closed buckets. Older checkpoints name them, so a file stays until the newest
    two checkpoints no longer name it. `names` are the files found at the start that the loaded
    checkpoint does not name.
    """

    def __init__(self, folder: Path, names: Iterable[str] = ()) -> None:
        self._folder = folder
        self._all = set(names)
        self._unnamed = frozenset(self._all)
        """The files that the newest checkpoint does not name."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def add(self, names: Iterable[str]) -> None:
        self._all.update(names)

    def remove(self, name: str) -> None:
        """The file is in use again: its content was written a second time, after a crash."""
        self._all.discard(name)
        self._unnamed -= {name}

    def captured(self) -> frozenset[str]:
        """The files that a checkpoint captured now does not name, for `saved`."""
        return frozenset(self._all)

    def saved(self, unnamed: frozenset[str]) -> None:
        """That checkpoint and the previous one are on disk: delete files that neither names."""
        unlink(self._folder, self._unnamed)
        self._all -= self._unnamed
        self._unnamed = unnamed - self._unnamed


def delete_all(folder: Path) -> None:
    """Delete all files; they will be rebuilt from the log."""
    unlink(folder, os.listdir(folder))


def unlink(folder: Path, names: Iterable[str]) -> None:
    """Delete those of the files that exist."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


SCHEDULE: Final = "schedule"
"""The folder's name within the store's."""


class ReplicaScheduleFiles:
    """The files of the newest checkpoint's schedule, for another replica. `store` is the folder of
    this replica's store.
    """

    def __init__(self, store: Path, is_ready: Callable[[], bool]) -> None:
        self._store = store
        self._is_ready = is_ready

    def describe(self) -> tuple[bytes, int]:
        """The projection's state as MessagePack, and the index of that state.
        Raises NotConnected.
        """
        if not self._is_ready():
            raise NotConnected("this replica has no schedule yet: ask another one")
        try:
            found = checkpoint.load(self._store / "checkpoint")
        except OSError as cause:
            raise NotConnected(f"the checkpoint could not be read ({cause}): ask again") from cause
        if found is None or found.projection is None:
            raise NotConnected("this replica has written no checkpoint yet: ask again in a minute")
        return msgspec.msgpack.encode(found.projection), found.index

    def read(self, file: str, offset: int, bytes_max: int) -> bytes:
        """Read bytes of a file; none behind its end. Safe in a thread.
        Raises FileNotFoundError, OSError.
        """
        with (self._store / SCHEDULE / file).open("rb") as content:
            if offset >= os.fstat(content.fileno()).st_size:
                return b""  # the system refuses places that no file can have
            content.seek(offset)
            return content.read(bytes_max)
