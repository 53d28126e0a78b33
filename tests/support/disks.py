"""Disks with unreadable blocks, or to be filled to the last byte, and kernels that fail to sync."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from qmq.log.disk import BLOCK_BYTES, Disk
from qmq.process.kernel_sync import NUMBERS, SyncEvent, SystemCall


class BadBlocks:
    """The blocks of a disk that cannot be read until all of each is written."""

    def __init__(self) -> None:
        self.bad: set[tuple[Path, int]] = set()

    def spoil(self, path: Path, at: int) -> None:
        """The block that holds a file's byte."""
        self.bad.add((path, at // BLOCK_BYTES))

    def require_readable(self, path: Path, at: int, end: int) -> None:
        """Raises OSError if one of the bytes is in a bad block."""
        if any((path, block) in self.bad for block in _blocks(at, end)):
            raise OSError(errno.EIO, "Input/output error (in this test)")

    def write(self, path: Path, at: int, end: int) -> None:
        """These bytes are about to be written: whole blocks are good from now on. Raises OSError
        for a part of a bad one.
        """
        for block in _blocks(at, end):
            is_whole = at <= block * BLOCK_BYTES and (block + 1) * BLOCK_BYTES <= end
            if (path, block) in self.bad and not is_whole:
                raise OSError(errno.EIO, "Input/output error (in this test)")
            self.bad.discard((path, block))

    def cut(self, path: Path, size: int = 0) -> None:
        """The file has this size now, or is another one: its blocks from there on are others."""
        self.bad = {each for each in self.bad if each[0] != path or each[1] * BLOCK_BYTES < size}


def _blocks(at: int, end: int) -> range:
    return range(at // BLOCK_BYTES, -(-end // BLOCK_BYTES))


class BadSectors(Disk):
    """The real disk, except for the blocks that `spoil` named: reading one fails with EIO, and so
    does writing a part of one.
    """

    def __init__(self) -> None:
        self._blocks = BadBlocks()
        self._paths: dict[int, Path] = {}

    @property
    def bad(self) -> set[tuple[Path, int]]:
        return self._blocks.bad

    def spoil(self, path: Path, at: int) -> None:
        """The block that holds a file's byte."""
        self._blocks.spoil(path, at)

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
        self._blocks.require_readable(self._paths[fd], at, at + len(data))
        return data

    def write(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
        self._blocks.write(self._paths[fd], at, at + sum(map(len, buffers)))
        super().write(fd, buffers, at)


@contextmanager
def small_disk_at(folder: Path, mib: int) -> Iterator[Path]:
    """A tmpfs of so many MiB, in a new folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take the last byte; returns the file that has it."""
    filler = folder / "filler"
    file = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with suppress(OSError):
        while True:
            os.write(file, bytes(4096))
    os.close(file)
    return filler


class FailingKernel(Disk):
    """The real disk and kernel, but what the kernel's own syncs report can be made an EIO. It
    counts them.
    """

    def __init__(self) -> None:
        self.fails = False
        self.begun = 0

    def kernel_call(self) -> SystemCall | None:
        call = super().kernel_call()
        if call is None:
            return None
        numbers = NUMBERS[platform.machine()]

        def called(number: int, a: int, b: int, c: int, d: int, e: int) -> int:
            done = call(number, a, b, c, d, e)
            if number == numbers.submit and done > 0:
                self.begun += done
            if number == numbers.get_events and self.fails:
                for event in (SyncEvent * max(done, 0)).from_address(d):
                    event.result = -errno.EIO
            return done

        return called


class RefusingKernel(Disk):
    """The real disk, with a kernel that refuses one of the calls of its own syncs, as containers
    and some file systems make it do.
    """

    def __init__(self, call: str, error: int) -> None:
        self._refused, self._error = call, error

    def kernel_call(self) -> SystemCall | None:
        call = super().kernel_call()
        if call is None:
            return None
        refused = getattr(NUMBERS[platform.machine()], self._refused)

        def called(number: int, a: int, b: int, c: int, d: int, e: int) -> int:
            return -self._error if number == refused else call(number, a, b, c, d, e)

        return called
