"""How a process runs its event loop, the clocks that it gives to components, and the rounds of a
client in the loop.

`run` takes uvloop's event loop, if it is installed, which needs about two thirds of the time of
asyncio's, and settings for streams of messages. Nodes have these settings, too; a library must not
change them. Production passes the system's clock, tests and the simulator pass others.

In one round of the event loop in a client (`EventLoopTick`), frames arrive, the tasks that waited
for them continue, and their requests are sent.

    frames of one connection
    ─▶ answers are noted
    ─▶ waiting tasks run          `wake`
    ─▶ open batches are closed    `at_end`
    ─▶ frames are written         `write_at_end`

All of it happens in the one callback in which the frames arrived. With futures and `call_soon` the
same work took two more rounds of the event loop: each is a system call and about 10 µs, more than
the client's own work for a message. Calls from outside of such a callback, by a task or a timer,
take effect in the next round, as with `call_soon`.

Tasks run after everything else that concerns the answers, so that they find every part of the
client in a consistent state.

A client belongs to one event loop: the first in which it sends or receives
(`EventLoopTick.own_loop`). Its connections, timers and waiting tasks are that loop's, so that in
another one nothing would wake who waits. Calls to metaservers work in any loop.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol, TypeVar

from qmq.errors import CallerError, ClientClosed, InvalidArgument
from qmq.wire.frame_stream import FrameStream

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
SWITCH_INTERVAL_S: Final = 0.00005
"""How long the event loop waits for the interpreter while a thread in the background computes. It
waits again behind each of its system calls, so with ten times as much the scrubber delayed the
messages of a tenth of a second by 2 ms. Python's default is 5 ms.
"""

_KEEP_BYTES: Final = 1 << 30
_TOP_PAD_BYTES: Final = 16 << 20


def calm_collector() -> None:
    """Make the cyclic garbage collector run rarely, and never over existing objects: a broker's
    objects die by reference count, and walking those of ten thousand queues takes as long as a
    hundred batches. It also begins with the collector if that is disabled: a program that disables
    it makes no garbage until then.
    """
    if gc.isenabled():
        gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    gc.enable()


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks: returning each to the kernel and faulting it in again
    costs a third of the speed.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # imported here, because a client that does not use `qmq.run` needs none of it

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)


def tune_process() -> None:
    """Make the settings of every broker process."""
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


_R = TypeVar("_R")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's factory if uvloop is installed, otherwise None (asyncio's event loop)."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run(main: Coroutine[Any, Any, _R]) -> _R:
    """Run a program's coroutine to its end, as `asyncio.run` does; with uvloop where it is
    installed (`pip install 'qmq[fast]'`).

        qmq.run(main())

    It also changes two settings of the process, which stay: malloc keeps large freed blocks for the
    next batch (glibc), and the cyclic garbage collector runs rarely, and never over what was
    imported before. A program that makes many reference cycles sets its own thresholds in `main`,
    with `gc.set_threshold`.

    Raises what `main` raises, and RuntimeError inside a running event loop.
    """
    keep_freed_memory()
    calm_collector()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


TIME_MS_MIN: Final = -62_135_596_800_000
"""The calendar's first moment, 0001-01-01T00:00:00Z."""
TIME_MS_MAX: Final = 253_402_300_799_999
"""The calendar's last millisecond."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def ms_of(time_ns: int) -> int:
    """Nanoseconds as whole milliseconds, rounded down."""
    return time_ns // 1_000_000


def time_of(time_ms: int) -> datetime:
    """Milliseconds since 1970 as a datetime in UTC; a time beyond the calendar becomes the
    calendar's last or first moment. Senders choose the times of their messages.
    """
    return _EPOCH + timedelta(milliseconds=min(max(time_ms, TIME_MS_MIN), TIME_MS_MAX))


class Clock(Protocol):
    """Wall time for people and logs; monotonic time for leases and deadlines."""

    def time_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; may jump."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since some start; never goes back."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


Wakeup = Callable[["TickFuture"], object]


def not_here(loop: asyncio.AbstractEventLoop) -> CallerError:
    """The error of a caller that runs in another event loop than the client's, `loop`."""
    if loop.is_closed():
        return ClientClosed(
            "the event loop in which this client was used has ended: "
            "make a client in each asyncio.run() or qmq.run(), "
            "with `async with qmq.connect(...) as mq`, or use qmq.blocking"
        )
    return InvalidArgument(
        "this client belongs to another event loop: make one client for each event loop; "
        "threads without one share a client of qmq.blocking"
    )


def require_alive(loop: asyncio.AbstractEventLoop) -> None:
    """Raise ClientClosed if the client's event loop has ended."""
    if loop.is_closed():
        raise not_here(loop)


class TickFuture:
    """An awaitable for one task; `EventLoopTick.wake` ends the wait.

    To the task it is a future, by the protocol that asyncio has for classes of others
    (`asyncio.isfuture`). A future would run the task by `call_soon`, in the next round; a
    `TickFuture` runs it at the end of the present round.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_context",
        "_is_cancelled",
        "_loop",
        "_message",
        "_wakeup",
        "is_done",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is the running event loop: asking for it takes a system call."""
        self._asyncio_future_blocking = True
        """For the task: that it was yielded by an `__await__`, and not by mistake. The task sets it
        to False.
        """
        self._loop = loop or asyncio.get_running_loop()
        self._wakeup: Wakeup | None = None
        self._context: Context | None = None
        self._is_cancelled = False
        self._message: object = None
        self.is_done = False
        """Whether the task was woken or cancelled."""

    def __await__(self) -> Generator[TickFuture, None, None]:
        """Suspend the task until it is woken; at most once. Raises CancelledError; as
        `EventLoopTick.own_loop` in another event loop.
        """
        try:
            yield self
        except RuntimeError:  # by the task, for an awaitable of another event loop
            raise not_here(self._loop) from None

    def wake_soon(self) -> None:
        """Run the task in the next round of the event loop."""
        if not self.is_done:
            self.is_done = True
            self._loop.call_soon(self.run)

    def run(self) -> None:
        """Run the task now; no other task may be running."""
        if self._wakeup is not None and self._context is not None:
            self._context.run(self._wakeup, self)

    # --- for the task -----------------------------------------------------------------------------

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """For the task: a `TickFuture` belongs to one event loop."""
        return self._loop

    def add_done_callback(self, wakeup: Wakeup, *, context: Context) -> None:
        """The task calls this to say how it is resumed."""
        self._wakeup, self._context = wakeup, context

    def cancel(self, msg: object = None) -> bool:
        """The task was cancelled: it resumes with CancelledError.
        False if it is resumed already.
        """
        if self.is_done:
            return False
        self._is_cancelled, self._message = True, msg
        self.wake_soon()
        return True

    def result(self) -> None:
        """For the task, when it resumes. Raises CancelledError."""
        if self._is_cancelled:
            raise asyncio.CancelledError(*([] if self._message is None else [self._message]))


class EventLoopTick:
    """The remaining work of this round, for all producers,
    consumers and connections of a client.
    """

    def __init__(self) -> None:
        self._woken: list[TickFuture] = []
        self._calls: list[Callable[[], object]] = []
        self._streams: list[FrameStream] = []
        self._has_end = False
        """Whether the end of this round, or of the next one, is scheduled."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The client's event loop, as soon as the client was used in one."""

    # --- the client's event loop ------------------------------------------------------------------

    def own_loop(self) -> asyncio.AbstractEventLoop:
        """The client's event loop: from the first call on, the one that runs then. Raises
        ClientClosed if that one has ended, and InvalidArgument if another one runs, or none.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise InvalidArgument(
                "no event loop runs here: call an asyncio client in an async function, in "
                "its event loop's thread, or use qmq.blocking"
            ) from None
        if self.loop is None:
            self.loop = running
        elif self.loop is not running:
            raise not_here(self.loop)
        return running

    @property
    def is_over(self) -> bool:
        """Whether the client's event loop has ended,
        and with it all that the client does in the background.
        """
        return self.loop is not None and self.loop.is_closed()

    # --- what is to be done -----------------------------------------------------------------------

    def wake(self, waiter: TickFuture) -> None:
        """Wake a task at the end of the round."""
        if not waiter.is_done:
            waiter.is_done = True
            self._woken.append(waiter)
            if not self._has_end:
                self._expect()

    def wake_all(self, waiters: list[TickFuture]) -> None:
        """Wake tasks at the end of the round, in this order."""
        woken = self._woken
        for waiter in waiters:
            if not waiter.is_done:
                waiter.is_done = True
                woken.append(waiter)
        if woken and not self._has_end:
            self._expect()

    def at_end(self, call: Callable[[], object]) -> None:
        """Call this at the end of the round, when tasks have run."""
        self._calls.append(call)
        if not self._has_end:
            self._expect()

    def write_at_end(self, stream: FrameStream) -> None:
        """Write the stream's collected bytes when the round ends."""
        self._streams.append(stream)
        if not self._has_end:
            self._expect()

    def _expect(self) -> None:
        """Schedule the end of the round. Callers check `_has_end` themselves: for a lone message it
        is set three times of four.
        """
        loop = self.loop or self.own_loop()
        try:
            loop.call_soon(self._run)
        except RuntimeError:
            raise not_here(loop) from None
        self._has_end = True

    # --- the round --------------------------------------------------------------------------------

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Frames have arrived in the running event loop; `end` follows in the same callback."""
        self.loop = loop
        self._has_end = True

    def end(self) -> None:
        """The frames are handled: wake tasks and write. Inside a task, which only a test can cause,
        this happens in the next round.
        """
        if asyncio.current_task(self.loop) is None:
            self._run()
        else:
            self._has_end = False
            if self._woken or self._calls or self._streams:
                self._expect()

    def _run(self) -> None:
        self._has_end = True
        try:
            if self._woken:
                self._run_tasks()
            calls, self._calls = self._calls, []
            for call in calls:
                try:
                    call()
                except Exception as failure:
                    self._report(call, failure)
            streams, self._streams = self._streams, []
            for stream in streams:
                try:
                    stream.flush()
                except Exception as failure:
                    self._report(stream.flush, failure)
        finally:
            self._has_end = False
            if self._woken or self._calls or self._streams:
                self._expect()

    def _run_tasks(self) -> None:
        woken, self._woken = self._woken, []
        waiting = iter(woken)
        try:
            for waiter in waiting:
                waiter.run()
        finally:  # a task that ends the program must not keep the others from ending themselves
            self._woken[:0] = waiting

    @staticmethod
    def _report(call: Callable[[], object], failure: Exception) -> None:
        """A callback failed: the others still run, and the event loop reports the failure."""
        said: dict[str, Any] = {
            "message": f"{call!r} failed at the end of a round",
            "exception": failure,
        }
        asyncio.get_running_loop().call_exception_handler(said)
