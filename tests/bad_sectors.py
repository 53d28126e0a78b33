"""A disk with unreadable blocks, as with a worn-out sector: reads fail with EIO until the whole block is written again."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from qmq.log.disk import BLOCK_BYTES, Disk


class BadSectors(Disk):
    """The real disk, except for the blocks that `spoil` named: reading one fails with EIO, and so does writing a part of one."""

    def __init__(self) -> None:
        self.bad: set[tuple[Path, int]] = set()
        self._paths: dict[int, Path] = {}

    def spoil(self, path: Path, at: int) -> None:
        """The block that holds a file's byte."""
        self.bad.add((path, at // BLOCK_BYTES))

    def open_append(self, path: Path) -> int:
        fd = super().open_append(path)
        self._paths[fd] = path
        return fd

    def open_read(self, path: Path) -> int:
        fd = super().open_read(path)
        self._paths[fd] = path
        return fd

    def read(self, fd: int, size: int, at: int) -> bytes:
        data = super().read(fd, size, at)
        if any((self._paths[fd], block) in self.bad for block in range(at // BLOCK_BYTES, -(-(at + len(data)) // BLOCK_BYTES))):
            raise OSError(errno.EIO, "Input/output error (in this test)")
        return data

    def write(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
        end, path = at + sum(map(len, buffers)), self._paths[fd]
        for block in range(at // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            is_whole = at <= block * BLOCK_BYTES and (block + 1) * BLOCK_BYTES <= end
            if (path, block) in self.bad and not is_whole:
                raise OSError(errno.EIO, "Input/output error (in this test)")
            self.bad.discard((path, block))
        super().write(fd, buffers, at)
