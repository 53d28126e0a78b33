"""Disks of machines that lose power and whose sectors cannot be read. What is wrong with a disk outlives the machine's process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from support.disks import BadBlocks

from qmq.testing.mortal_disk import MortalDisk


class Platter:
    """The part of a machine's disk that outlives its process: bad blocks, and what was overwritten since the last sync."""

    def __init__(self) -> None:
        self.blocks = BadBlocks()
        self.lock = threading.Lock()
        self._before: list[tuple[Path, int, bytes, int]] = []
        """(file, place, what was there, the file's size), oldest first, of each write and cut that is not synced."""
        self._new: set[Path] = set()
        """Files whose names are not synced."""

    def make(self, path: Path) -> None:
        """A file is made, on other blocks than one of that name before."""
        self._new.add(path)
        self.blocks.cut(path)

    def change(self, path: Path, at: int, size: int) -> None:
        """A part of a file is about to change."""
        with path.open("rb") as file:
            file.seek(at)
            self._before.append((path, at, file.read(size), path.stat().st_size))

    def sync(self, path: Path) -> None:
        """The file's data is on the disk."""
        self._before = [each for each in self._before if each[0] != path]

    def sync_folder(self, folder: Path) -> None:
        """The names of a folder's files are on the disk."""
        self._new = {path for path in self._new if path.parent != folder}

    def lose_power(self, loses: Callable[[Path], bool]) -> int:
        """Take back every change of these files that no sync followed. Returns the number of changes taken back."""
        with self.lock:
            lost = [each for each in self._before if loses(each[0])]
            for path, at, data, size in reversed(lost):
                if path.exists():
                    with path.open("r+b") as file:
                        file.seek(at)
                        file.write(data)
                        file.truncate(size)
            new = [path for path in self._new if loses(path) and path.exists()]
            for path in new:
                path.unlink()
            self._before.clear()
            self._new.clear()
            return len(lost) + len(new)


class FailingDisk(MortalDisk):
    """A process's way to a platter."""

    def __init__(self, platter: Platter) -> None:
        super().__init__()
        self._platter = platter
        self._paths: dict[int, Path] = {}
        self.failed_reads = 0

    def open_append(self, path: Path) -> int:
        with self._platter.lock:
            is_new = not path.exists()
            fd = super().open_append(path)
            self._paths[fd] = path
            if is_new:
                self._platter.make(path)
        return fd

    def open_read(self, path: Path) -> int:
        fd = super().open_read(path)
        self._paths[fd] = path
        return fd

    def read(self, fd: int, size: int, at: int) -> bytes:
        data = super().read(fd, size, at)
        try:
            self._platter.blocks.require_readable(self._paths[fd], at, at + len(data))
        except OSError:
            self.failed_reads += 1
            raise
        return data

    def write(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
        path, size = self._paths[fd], sum(map(len, buffers))
        with self._platter.lock:
            self._platter.blocks.write(path, at, at + size)
            if path.exists():  # another file may have taken the name
                self._platter.change(path, at, size)
            super().write(fd, buffers, at)

    def truncate(self, fd: int, size: int) -> None:
        path = self._paths[fd]
        with self._platter.lock:
            if path.exists():
                self._platter.change(path, size, path.stat().st_size)
            super().truncate(fd, size)
            self._platter.blocks.cut(path, size)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        with self._platter.lock:
            self._platter.sync(self._paths[fd])

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        with self._platter.lock:
            self._platter.sync_folder(folder)

    def replace(self, path: Path, data: bytes) -> None:
        super().replace(path, data)
        with self._platter.lock:
            self._platter.blocks.cut(path)

    def delete(self, path: Path) -> None:
        super().delete(path)
        with self._platter.lock:
            self._platter.blocks.cut(path)
