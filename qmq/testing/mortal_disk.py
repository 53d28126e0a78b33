"""A disk that fails for a killed process: its files do not change any more."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from qmq.log.disk import Disk


class MortalDisk(Disk):
    """The real disk until `die`. After that every change fails; open files can be read and closed."""

    def __init__(self) -> None:
        self._is_dead = False

    def die(self) -> None:
        """Fail all changes from now on, as after the process was killed."""
        self._is_dead = True

    def _require_alive(self) -> None:
        if self._is_dead:
            raise OSError(errno.EIO, "the process was killed (a fault that the test asked for)")

    def open_append(self, path: Path) -> int:
        self._require_alive()
        return super().open_append(path)

    def write(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
        self._require_alive()
        super().write(fd, buffers, at)

    def truncate(self, fd: int, size: int) -> None:
        self._require_alive()
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._require_alive()
        super().sync(fd)

    def sync_folder(self, folder: Path) -> None:
        self._require_alive()
        super().sync_folder(folder)

    def delete(self, path: Path) -> None:
        self._require_alive()
        super().delete(path)

    def replace(self, path: Path, data: bytes) -> None:
        self._require_alive()
        super().replace(path, data)

    def rewrite(self, path: Path, data: bytes) -> None:
        self._require_alive()
        super().rewrite(path, data)
