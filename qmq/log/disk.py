"""What storage asks of the disk: its calls, pages that are to be in memory, and the lock of a data
folder.

Tests pass a `Disk` that fails. Rules: a failed fsync is final and raises FlushFailed (the kernel
marks the pages clean, so a second fsync would report success wrongly: "fsyncgate"); no space raises
DiskFull; every other failure stays an OSError, which stops the broker. Only an unreadable sector of
a log does not stop it: `read_around` replaces the sector by bytes that fail every checksum, so that
the sector counts as damage.

`load` brings a part of a file into the kernel's page cache, from a thread, by few system calls:
after each one the thread takes the interpreter lock again, and the event loop waits for it.

`FolderLock` gives a data folder to one process, and ends with the process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from qmq import limits
from qmq.errors import DiskFull, FlushFailed, FolderInUse
from qmq.process.files import FILE_MODE, NO_SPACE, SHORT_OF
from qmq.process.kernel_sync import SystemCall, flush_failed, system_call

_CACHESTAT: Final = 451
"""The number of the system call on all architectures of Linux;
older kernels than 6.5 do not have it.
"""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_SCRATCH_BYTES: Final = 256 * limits.KIB
_VIEWS_MAX: Final = 64
"""Buffers of one read: together a window of `qmq.broker.reading.cold_reads`."""


class _Range(ctypes.Structure):
    _fields_ = (("at", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("being_written", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


@cache
def _syscall() -> Any:
    return ctypes.CDLL(None).syscall if sys.platform.startswith("linux") else None


def sync_file_system(fd: int) -> None:
    """Write back everything of the file system that `fd` is on. Does nothing where there is no such
    call. Raises OSError.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if call is not None and call(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_cached(fd: int, size: int, at: int) -> bool:
    """True if all pages of a part of a file are in the page cache; some of them may still be read.
    False where the kernel does not tell.
    """
    call, pages = _syscall(), _Pages()
    if (
        call is None
        or call(_CACHESTAT, fd, ctypes.byref(_Range(at, size)), ctypes.byref(pages), 0) != 0
    ):
        return False
    wanted = (at + size - 1) // _PAGE_BYTES - at // _PAGE_BYTES + 1
    return bool(pages.cached >= wanted)


def load(fd: int, size: int, at: int) -> None:
    """Return when a part of a file is in the page cache. Raises OSError."""
    if is_cached(fd, size, at):
        os.pread(fd, 1, at + size - 1)  # waits if another thread began to read these pages just now
        return
    # Into the same memory again and again, which stays in the processor's cache. For one large
    # request the kernel reads in large pieces.
    scratch, end = memoryview(bytearray(min(_SCRATCH_BYTES, size))), at + size
    while at < end:
        views = [scratch] * min((end - at) // len(scratch), _VIEWS_MAX)
        done = os.preadv(fd, views or [scratch[: end - at]], at)
        if not done:
            return
        at += done


log = logging.getLogger("qmq.log")

_IOV_MAX: Final = 1024
WRITE_BYTES_MAX: Final = 512 * 1024
"""The bytes of one system call that writes. For larger ones the kernel takes its pages from free
blocks of a MiB and more, which a virtual machine may have to get from its host first.
"""

_SYNC_TOGETHER_FILES: Final = 64
_FREE_CHECK_BYTES: Final = 4 * 1024 * 1024
BLOCK_BYTES: Final = 4096
"""The unit of a failed read; a write that covers a whole block does not need its old content."""

_UNREADABLE: Final = b"\xa5"
"""The value of each byte that could not be read. It is not zero, since a power cut leaves zeros at
a log's end.
"""


def chunks_of(buffers: Sequence[bytes | memoryview]) -> Iterator[Sequence[memoryview]]:
    """The buffers in parts that one system call writes."""
    chunk, room = list[memoryview](), WRITE_BYTES_MAX
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            part = rest[:room]
            chunk.append(part)
            rest, room = rest[len(part) :], room - len(part)
            if not room or len(chunk) == _IOV_MAX:
                yield chunk
                chunk, room = [], WRITE_BYTES_MAX
    if chunk:
        yield chunk


class Disk:
    """The real file system."""

    unreadable = 0
    """The number of blocks that could not be read."""

    def kernel_call(self) -> SystemCall | None:
        """The system calls for `KernelSyncs`. None if every sync must be a call of `sync`, as with
        a disk of a test that has its own.
        """
        return system_call() if type(self).sync is Disk.sync else None

    def open_append(self, path: Path) -> int:
        """Open a file for reading and writing at offsets. Create it if absent.
        Raises DiskFull, OSError.
        """
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as cause:
            raise _translated(cause, path) from cause

    def open_read(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], at: int) -> None:
        """Write all buffers from byte `at` on. Raises DiskFull, and an unknown part of them is
        written then.
        """
        size = sum(map(len, buffers))
        is_small = size <= WRITE_BYTES_MAX and len(buffers) <= _IOV_MAX
        try:
            chunks: Iterable[Sequence[bytes | memoryview]] = (
                (buffers,) if is_small else chunks_of(buffers)
            )
            for chunk in chunks:
                size = size if is_small else sum(map(len, chunk))
                done = os.pwritev(fd, chunk, at)
                if done < size:
                    self._write_rest(fd, b"".join(chunk), at, done)
                at += size
        except OSError as cause:
            raise _translated(cause, None) from cause

    def _write_rest(self, fd: int, chunk: bytes, at: int, done: int) -> None:
        rest = memoryview(chunk)
        while done < len(chunk):
            done += os.pwrite(fd, rest[done:], at + done)

    def append(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
        """Like `write`, at the end of a file whose data has checksums. If the block of the end is
        unreadable, it is written as a whole, because the kernel would have to read it to write a
        part: what it had fails every checksum from now on.
        """
        try:
            self.write(fd, buffers, at)
        except OSError as cause:
            if cause.errno != errno.EIO or not self._ends_unreadable(fd, at):
                raise
            had, data = at % BLOCK_BYTES, b"".join(buffers)
            end = at - had + BLOCK_BYTES
            block = _UNREADABLE * had + data[: end - at]
            self.write(fd, [block.ljust(BLOCK_BYTES, b"\0")], at - had)
            self.truncate(fd, at - had + len(block))
            self.write(fd, [data[end - at :]], end)

    def _ends_unreadable(self, fd: int, at: int) -> bool:
        if not at % BLOCK_BYTES or self.size(fd) != at:
            return False
        before = self.unreadable
        self._read_block(fd, at % BLOCK_BYTES, at - at % BLOCK_BYTES)
        return self.unreadable > before

    def read(self, fd: int, size: int, at: int) -> bytes:
        """Read up to `size` bytes from byte `at`; fewer only at the end of the file."""
        data = os.pread(fd, size, at)
        while len(data) < size:
            more = os.pread(fd, size - len(data), at + len(data))
            if not more:
                break
            data += more
        return data

    def read_around(self, fd: int, size: int, at: int) -> bytes:
        """Like `read`, for data with checksums: unreadable blocks (EIO) are replaced by bytes that
        fail every checksum.
        """
        try:
            return self.read(fd, size, at)
        except OSError as cause:
            if cause.errno != errno.EIO:
                raise
        end = min(at + size, self.size(fd))
        cuts = [at, *range(at - at % BLOCK_BYTES + BLOCK_BYTES, end, BLOCK_BYTES), end]
        before = self.unreadable
        data = b"".join(
            [
                self._read_block(fd, following - begin, begin)
                for begin, following in pairwise(cuts)
                if following > begin
            ]
        )
        log.warning(
            "the disk could not read %d blocks of the %d bytes of a file from byte %d on (EIO)",
            self.unreadable - before,
            size,
            at,
        )
        return data

    def _read_block(self, fd: int, size: int, at: int) -> bytes:
        try:
            return self.read(fd, size, at)
        except OSError as cause:
            if cause.errno != errno.EIO:
                raise
            self.unreadable += 1
            return _UNREADABLE * size

    def read_ahead(self, path: Path, size: int, at: int) -> None:
        """Read a part of a file into the page cache, and wait until it is there. Safe in a thread.
        Raises OSError.
        """
        fd = self.open_read(path)
        try:
            load(fd, size, at)
        finally:
            self.close(fd)

    def drop_cached(self, fd: int, size: int, at: int) -> None:
        """Drop a part of a file from the page cache, except for unwritten pages. A block of pages
        that is only in part inside it stays.
        """
        if size and hasattr(os, "posix_fadvise"):  # a size of 0 would mean the rest of the file
            os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)

    def read_file(self, path: Path) -> bytes:
        """Read a small file as a whole, with unreadable blocks as in `read_around`."""
        fd = self.open_read(path)
        try:
            return self.read_around(fd, self.size(fd), 0)
        finally:
            self.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Make the file's data survive a power cut.
        Raises FlushFailed, which must not be retried.
        """
        try:
            os.fdatasync(fd)
        except OSError as cause:
            raise flush_failed(cause) from cause

    def sync_files(self, paths: Collection[Path]) -> None:
        """As `sync`, for files whose writers closed them, and their folders. A file that was
        deleted meanwhile is left out.

        Each file gets its own fdatasync, since no other call tells of a write-back that failed:
        sync(2) never does, and syncfs(2) only from Linux 5.8 on. Many files are first written back
        together, which is one commit of the file system's journal. Raises FlushFailed.
        """
        folders = {path.parent for path in paths}
        if len(paths) > _SYNC_TOGETHER_FILES:
            for folder in folders:
                self._write_back(folder)
        for path in paths:
            try:
                fd = self.open_read(path)
            except FileNotFoundError:
                continue
            except OSError as cause:
                raise FlushFailed(
                    f"{path.parent.name}/{path.name} cannot be synced: {cause}"
                ) from cause
            try:
                self.sync(fd)
            finally:
                self.close(fd)
        for folder in folders:
            self.sync_folder(folder)

    def _write_back(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_file_system(fd)
        except OSError as cause:
            raise FlushFailed(
                f"syncing the file system of {folder} failed: {cause}; the broker stops, "
                "restart it to recover"
            ) from cause
        finally:
            os.close(fd)

    def sync_folder(self, folder: Path) -> None:
        """Make new, renamed and deleted names survive; without it ext4 may forget a rename.
        Raises FlushFailed.
        """
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as cause:
            raise FlushFailed(f"fsync of folder {folder} failed: {cause}") from cause
        finally:
            os.close(fd)

    def replace(self, path: Path, data: bytes) -> None:
        """Put `data` at `path` all or nothing:
        temporary file, fsync, rename, fsync of the folder.
        """
        temporary = path.with_name(path.name + ".tmp")
        fd = self.open_append(temporary)
        try:
            self.truncate(fd, 0)
            self.write(fd, [data], 0)
            self.sync(fd)
        except DiskFull:
            self.truncate(fd, 0)  # free the space that the temporary file took on a full disk
            raise
        finally:
            self.close(fd)
        self.rename(temporary, path)
        self.sync_folder(path.parent)

    def rewrite(self, path: Path, data: bytes) -> None:
        """As `replace`, for a small text file that must be writable on a full disk. The file and
        its spare, `path.spare`, have blocks of their own and take turns: space is needed only for
        the first spare, and when the data needs a block more. The data is padded with spaces to
        whole blocks. Raises DiskFull, and the file is as it was then.
        """
        spare = self._spare_of(path)
        padded = data + b" " * (-len(data) % BLOCK_BYTES)
        self._write_synced(spare, padded)
        if path.exists():
            held = path.with_name(path.name + ".held")
            self.link(path, held)  # the old content's blocks become the next spare
            self.rename(spare, path)
            self.rename(held, spare)
            self.sync_folder(path.parent)
        else:
            self.rename(spare, path)
            self.sync_folder(path.parent)
            with suppress(DiskFull):  # then the next call needs space
                self._write_synced(spare, padded)

    def _spare_of(self, path: Path) -> Path:
        """The path of the spare. Mends what a crash left: `held` is the old content, or a second
        name of the current one.
        """
        spare, held = path.with_name(path.name + ".spare"), path.with_name(path.name + ".held")
        for each in (held, spare):
            if each.exists() and path.exists() and each.samefile(path):
                each.unlink()
        if held.exists():
            self.rename(held, spare)
        return spare

    def _write_synced(self, path: Path, data: bytes) -> None:
        fd = self.open_append(path)
        try:
            self.write(fd, [data], 0)
            self.truncate(fd, len(data))
            self.sync(fd)
        finally:
            self.close(fd)

    def rename(self, path: Path, to: Path) -> None:
        """Raises DiskFull: a new name may need a block of the folder."""
        try:
            path.rename(to)
        except OSError as cause:
            raise _translated(cause, to) from cause

    def link(self, path: Path, to: Path) -> None:
        """Give a file a second name. Raises DiskFull."""
        try:
            to.hardlink_to(path)
        except OSError as cause:
            raise _translated(cause, to) from cause

    def delete(self, path: Path) -> None:
        """Delete a file if it exists. Raises OSError."""
        path.unlink(missing_ok=True)

    def free_bytes(self, folder: Path) -> int:
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


def _translated(cause: OSError, path: Path | None) -> Exception:
    if cause.errno in NO_SPACE:
        return DiskFull(
            f"no space left{f' for {path.name}' if path else ''}: free some space, or "
            "shorten retention"
        )
    # temporary, like a full disk: the caller's request fails, and is retried
    if cause.errno in SHORT_OF:
        return DiskFull(
            f"the system allows no more open files{f' ({path.name})' if path else ''}: raise "
            "the limit (ulimit -n)"
        )
    return cause


class FreeSpace:
    """Checks that a disk has room beside a reserve. Asks the disk again only after some writes."""

    def __init__(self, disk: Disk, folder: Path, reserve_bytes: int) -> None:
        self._disk = disk
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._step_bytes = min(_FREE_CHECK_BYTES, reserve_bytes // 2)
        self._asked_at = self._free_bytes = 0

    def require(self, size: int, position: int, *, leave: float = 1.0) -> None:
        """Raise DiskFull unless there is room for `size` bytes after `position`, where the log
        ends, and for this part of the reserve.
        """
        wanted = size + int(self._reserve_bytes * leave)
        if self._free_bytes < wanted or position - self._asked_at > self._step_bytes:
            self._free_bytes = self._disk.free_bytes(self._folder)
            self._asked_at = position
        if self._free_bytes < wanted:
            raise DiskFull(
                f"the broker's disk has less than {self._reserve_bytes} bytes free, "
                "which it reserves for acknowledgements: free some space, or shorten retention"
            )

    def forget(self) -> None:
        """Forget the free space: the next write asks the disk."""
        self._free_bytes = 0


class Unflushed:
    """The age of the oldest unflushed append, which a power cut may lose.

    Keeps one time for each running flush, and one for later appends.
    """

    __slots__ = ("_marks", "is_open")

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int]] = deque()
        """(index, time) of the first append after the beginning of each flush."""
        self.is_open = False
        """True if the last mark covers current appends: then `wrote` changes nothing."""

    def wrote(self, index: int, now_ms: int) -> None:
        """Note that entries from `index` on were appended."""
        if not self.is_open:
            self._marks.append((index, now_ms))
            self.is_open = True

    def begun(self) -> None:
        """Note that a flush has begun. The flush does not cover later appends."""
        self.is_open = False

    def flushed(self, index: int) -> None:
        """Note that everything up to `index` is flushed."""
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= index + 1:
            marks.popleft()
        if marks and not self.is_open and len(marks) == 1 and marks[0][0] <= index:
            marks.clear()

    def clear(self) -> None:
        """Note that everything is flushed."""
        self._marks.clear()
        self.is_open = False

    def age_ms(self, now_ms: int) -> int:
        """The age of the oldest unflushed entry in milliseconds; 0 if there is none."""
        return max(now_ms - self._marks[0][1], 0) if self._marks else 0


class FolderLock:
    """The lock, held from construction to `release`. Raises FolderInUse."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise FolderInUse(
                f"{folder} is used by another running broker: stop it first, or choose "
                "another folder"
            ) from None

    def release(self) -> None:
        """Release the folder, for another process or another store of this one."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
