"""Brings a part of a file into the kernel's page cache, from a thread, by few system calls: after each one the thread takes the interpreter
lock again, and the event loop waits for it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any, Final

from qmq import limits

_CACHESTAT: Final = 451
"""The number of the system call on all architectures of Linux; older kernels than 6.5 do not have it."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_SCRATCH_BYTES: Final = 256 * limits.KIB
_VIEWS_MAX: Final = 64
"""Buffers of one read: together a window of `qmq.broker.cold_reads`."""


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
    """Write back everything of the file system that `fd` is on. Does nothing where there is no such call. Raises OSError."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if call is not None and call(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_cached(fd: int, size: int, at: int) -> bool:
    """True if all pages of a part of a file are in the page cache; some of them may still be read. False where the kernel does not tell."""
    call, pages = _syscall(), _Pages()
    if call is None or call(_CACHESTAT, fd, ctypes.byref(_Range(at, size)), ctypes.byref(pages), 0) != 0:
        return False
    wanted = (at + size - 1) // _PAGE_BYTES - at // _PAGE_BYTES + 1
    return bool(pages.cached >= wanted)


def load(fd: int, size: int, at: int) -> None:
    """Return when a part of a file is in the page cache. Raises OSError."""
    if is_cached(fd, size, at):
        os.pread(fd, 1, at + size - 1)  # waits if another thread began to read these pages just now
        return
    # Into the same memory again and again, which stays in the processor's cache. For one large request the kernel reads in large pieces.
    scratch, end = memoryview(bytearray(min(_SCRATCH_BYTES, size))), at + size
    while at < end:
        views = [scratch] * min((end - at) // len(scratch), _VIEWS_MAX)
        done = os.preadv(fd, views or [scratch[: end - at]], at)
        if not done:
            return
        at += done
