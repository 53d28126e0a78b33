"""Syncs of files that the kernel runs by itself (Linux AIO), so that no thread waits for them.

With a thread, a sync costs a process about 100 µs of CPU time: the thread is woken, waits for the
disk and then for the interpreter, and wakes the event loop. Here it costs about 20 µs:

    io_submit(IOCB_CMD_FDSYNC) ─▶ a worker of the kernel does what fdatasync(2) does ─▶ eventfd
    the event loop's reader of the eventfd ─▶ io_getevents ─▶ `ended`

The worker syncs the same open file, so a write-back that failed is reported to this sync, as it
would be to an fdatasync.

The kernel, a container or a file system may refuse these calls. The caller then syncs in a thread.

What if it crashes here? The kernel finishes the syncs that it began, and nobody learns of it, as
with a thread. A process has ended when they have.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from errno import EINTR
from functools import cache, partial
from typing import Any, Final, NamedTuple

from qmq.errors import FlushFailed, InvariantBroken

SystemCall = Callable[[int, int, int, int, int, int], int]
"""Makes a system call of a number with five words; returns the result, or the error number as a
negative number.
"""
Ended = Callable[[Future[float]], None]

_FILES_MAX: Final = 2
"""Files of one flush: both logs of a store."""
_FDSYNC: Final = 3
_RAISE_EVENTFD: Final = 1


class Numbers(NamedTuple):
    """The numbers of the system calls."""

    setup: int
    destroy: int
    get_events: int
    submit: int


NUMBERS: Final = {"x86_64": Numbers(206, 207, 208, 209), "aarch64": Numbers(0, 1, 4, 2)}


class _Request(ctypes.Structure):
    """struct iocb of a little-endian machine."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("command", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("file", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("at", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("eventfd", ctypes.c_uint32),
    )


class SyncEvent(ctypes.Structure):
    """struct io_event: the end of a request."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


@cache
def system_call() -> SystemCall | None:
    """The calls of this machine's kernel; None if it is not one that is known here."""
    is_known = platform.machine() in NUMBERS and sys.byteorder == "little"
    if not (sys.platform.startswith("linux") and is_known and hasattr(os, "eventfd")):
        return None
    call: Any = ctypes.CDLL(None, use_errno=True).syscall
    call.restype, call.argtypes = ctypes.c_long, [ctypes.c_long] * 6

    def called(number: int, a: int, b: int, c: int, d: int, e: int) -> int:
        done: int = call(number, a, b, c, d, e)
        return done if done >= 0 else -ctypes.get_errno()

    return called


def flush_failed(why: object) -> FlushFailed:
    """The error of a sync that failed, in a thread or by the kernel."""
    return FlushFailed(f"fdatasync failed: {why}; the broker stops, restart it to recover")


class KernelSyncs:
    """Syncs in one event loop, of one flush at a time."""

    def __init__(self, call: SystemCall | None) -> None:
        """Without `call`, every flush is refused."""
        self._loop = asyncio.get_running_loop()
        self._call = call
        self._context = 0
        self._eventfd = -1
        self._flush: Future[float] | None = None
        self._running = self._failure = 0
        self._begin_s = 0.0

    def begin(self, files: Sequence[int], ended: Ended) -> Future[float] | None:
        """Begin to sync at most two files, at the same time; none of them may be closed before the
        end. The future's result is the time in seconds, or FlushFailed, which is final. `ended` is
        called with it in the event loop.

        None if the kernel does not do it: nothing is synced then. Raises FlushFailed.
        """
        if not files or self._call is None or not (self._context or self._opened(self._call)):
            return None
        for request, file in zip(self._requests, files, strict=False):
            request.file = file
        self._begin_s = time.perf_counter()
        count = len(files)
        done = self._call(self._numbers.submit, self._context, count, self._list_at, 0, 0)
        self._running, self._failure = max(done, 0), 0
        if done < count:
            self._refused()
            return None
        self._ended = ended
        self._flush = Future[float]()
        self._flush.set_running_or_notify_cancel()  # nobody may cancel it
        return self._flush

    def _opened(self, call: SystemCall) -> bool:
        """Prepare everything before the first flush. False if the kernel refuses it."""
        self._numbers = NUMBERS[platform.machine()]
        context = ctypes.c_uint64()
        try:
            self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:  # short of descriptors
            self._call = None
            return False
        if call(self._numbers.setup, _FILES_MAX, ctypes.addressof(context), 0, 0, 0) < 0:
            os.close(self._eventfd)
            self._call = None
            return False
        self._context = context.value
        self._loop.add_reader(self._eventfd, self._wake)
        self._requests = (_Request * _FILES_MAX)()
        for request in self._requests:
            request.command, request.flags = _FDSYNC, _RAISE_EVENTFD
            request.eventfd = self._eventfd
        self._list = (ctypes.c_uint64 * _FILES_MAX)(*map(ctypes.addressof, self._requests))
        self._list_at = ctypes.addressof(self._list)
        self._events = (SyncEvent * _FILES_MAX)()
        self._events_at = ctypes.addressof(self._events)
        return True

    def _refused(self) -> None:
        """The kernel takes no request, or only the first: a thread syncs from now on. What the
        first one reports is reported once, so it is waited for.
        """
        self._read_all()
        failure = self._failure
        self.close()
        if failure:
            raise flush_failed(os.strerror(failure))

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        if self._running:
            self._read_events(0)
            if not self._running:
                self._end()()

    def _read_all(self) -> None:
        """Wait for all requests."""
        while self._running:
            self._read_events(self._running)

    def _read_events(self, least: int) -> None:
        """Note the requests that have ended; wait for `least` of them."""
        if self._call is None:
            raise InvariantBroken("a sync runs that was not begun")
        count = -EINTR
        while count == -EINTR:
            count = self._call(
                self._numbers.get_events,
                self._context,
                least,
                _FILES_MAX,
                self._events_at,
                0,
            )
        if count < 0:  # nobody learns any more whether the files are synced
            self._failure, count = -count, self._running
        else:
            for event in self._events[:count]:
                if event.result < 0:
                    self._failure = -event.result
        self._running -= count

    def wait(self) -> None:
        """Block until the flush has ended, if there is one. `ended` is called later."""
        if self._flush is None:
            return
        self._read_all()
        self._loop.call_soon(self._end())

    def _end(self) -> Callable[[], None]:
        """Give the flush its result. Returns the call that tells it."""
        flush, self._flush = self._flush, None
        if flush is None:
            raise InvariantBroken("a flush ended that was not begun")
        if self._failure:
            flush.set_exception(flush_failed(os.strerror(self._failure)))
        else:
            flush.set_result(time.perf_counter() - self._begin_s)
        return partial(self._ended, flush)

    def close(self) -> None:
        """Wait for the flush, and begin no other."""
        self.wait()
        if self._context and self._call is not None:
            self._loop.remove_reader(self._eventfd)
            os.close(self._eventfd)
            self._call(self._numbers.destroy, self._context, 0, 0, 0, 0)
        self._call, self._context = None, 0
