"""Files that only grow, and whose newest bytes wait in memory: a schedule has thousands of them, and most get a few bytes at a time.

A *growing file* is `written` bytes on disk and a `tail` behind them; whoever reads sees both. The tail is written when it has become large,
when the schedule has too much of it in all, or by a checkpoint, from another thread. Writing the same bytes at the same place twice does no
harm, so nobody has to know who is first.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from qmq.errors import DiskFull, FlushFailed, LogDamaged
from qmq.limits import KIB
from qmq.log.disk import Disk

TAIL_BYTES_MAX: Final = 256 * KIB
"""A file with more than this in memory is written at once."""
LARGE_BYTES: Final = 32 * KIB
_OPEN_FILES_MAX: Final = 128
_SYNC_ALL_FILES: Final = 64
"""With more files than this one sync of the file system is cheaper than one of each."""


class AppendFile:
    """One file: how much of it is on disk, and what is not yet."""

    __slots__ = ("name", "tail", "written")

    def __init__(self, name: str, written: int = 0) -> None:
        self.name = name
        self.written = written
        self.tail = bytearray()

    @property
    def end(self) -> int:
        """Its length, once everything is written."""
        return self.written + len(self.tail)

    def wrote(self, end: int) -> None:
        """Everything before `end` is on disk: memory may forget it."""
        size = end - self.written
        if size > 0:
            del self.tail[:size]
            self.written = end


class Grown(NamedTuple):
    """A file's tail as it was at one moment."""

    file: AppendFile
    at: int
    data: bytes


class AppendFiles:
    """The folder they lie in. Keeps few of them open. Not safe in a thread, except for what says so."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self.disk = disk
        self.folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()
        self._unsynced: dict[str, int] = {}
        self._write_number = 0

    def read(self, file: AppendFile, at: int, size: int) -> bytes:
        """Bytes from `at` on; fewer where the file ends. Raises LogDamaged if what was written is gone."""
        begin = at - file.written
        if begin >= 0:
            return bytes(file.tail[begin : begin + size])
        data = self.disk.read(self._fd(file.name), min(size, -begin), at)
        if len(data) < min(size, -begin):
            raise damaged(file.name, at + len(data), f"it has had {file.written} bytes")
        return data + bytes(file.tail[: size - len(data)]) if size > len(data) else data

    def stretch(self, file: AppendFile, begin: int, size: int) -> Callable[[int, int], bytes]:
        """Read many small pieces of so many bytes from `begin` on, by (place in them, size). Good until the next call of any method.

        What it gives raises LogDamaged if what was written is gone.
        """
        if begin + size > file.written:
            return lambda at, wanted: self.read(file, begin + at, wanted)
        read, fd = self.disk.read, self._fd(file.name)

        def read_piece(at: int, wanted: int) -> bytes:
            data = read(fd, wanted, begin + at)
            if len(data) < wanted:
                raise damaged(file.name, begin + at + len(data), f"it has had {file.written} bytes")
            return data

        return read_piece

    def append(self, file: AppendFile, envelope: bytes, region: bytes) -> None:
        """Add a batch; a large one is written at once, for it costs more to keep."""
        if len(region) > LARGE_BYTES:
            with suppress(DiskFull):  # then it is kept
                self._write(file, [bytes(file.tail), envelope, region])
                return
        file.tail += envelope
        file.tail += region

    def write(self, file: AppendFile) -> None:
        """Write the tail. Raises DiskFull."""
        if file.tail:
            self._write(file, [bytes(file.tail)])

    def _write(self, file: AppendFile, buffers: list[bytes]) -> None:
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
        """Close all; what is only in memory stays there."""
        while self._open:
            self.disk.close(self._open.popitem()[1])

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def unsynced(self) -> dict[str, int]:
        """What was written and not synced, for `sync` and `synced`."""
        return dict(self._unsynced)

    def synced(self, names: dict[str, int]) -> None:
        """These were synced, if they were not written since."""
        for name, number in names.items():
            if self._unsynced.get(name) == number:
                del self._unsynced[name]

    def write_and_sync(self, tails: list[Grown], others: dict[str, int]) -> None:
        """Write tails, make them and other files survive a power cut. Safe in a thread. Raises DiskFull, FlushFailed."""
        for tail in tails:
            fd = self.disk.open_append(self.folder / tail.file.name)
            try:
                self.disk.write(fd, [tail.data], tail.at)
            finally:
                self.disk.close(fd)
        self._sync(others.keys() | {tail.file.name for tail in tails})

    def _sync(self, names: set[str]) -> None:
        if len(names) > _SYNC_ALL_FILES:
            os.sync()
            return
        for name in names:
            try:
                fd = self.disk.open_read(self.folder / name)
            except FileNotFoundError:
                continue  # its bucket was closed
            except OSError as cause:
                raise FlushFailed(f"schedule/{name} cannot be synced: {cause}") from cause
            try:
                self.disk.sync(fd)
            finally:
                self.disk.close(fd)
        if names:
            self.disk.sync_folder(self.folder)


def damaged(name: str, position: int, why: str) -> LogDamaged:
    """The error that says which file does not hold, and where."""
    return LogDamaged(
        f"schedule/{name} is damaged at byte {position} ({why}): "
        "restore the file from a copy, or move this replica's data folder away and start it again",
        position=position,
    )
