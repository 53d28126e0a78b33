"""An event loop for each process, on the world's clock. It has only those parts of a loop that
asyncio needs.

A paused process handles what arrived meanwhile when it continues. A killed process does nothing
more: it runs no `finally` and sends no answer. Its coroutines are kept until the end of the run,
because collecting them would run their `finally` blocks.

A process: a name, an event loop, and its listeners. Subclasses are brokers, metaservers, producers
and consumers.

The exception that a check raises.

The events of one seed as readable lines: `tools/run sim_order --replay SEED`.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sim.world import World

from qmq.errors import QmqError

if TYPE_CHECKING:
    from ordersim.run import Simulation

RAISED: list[Violation] = []
"""The violations of the run that is under way: a check may be called by a coroutine whose caller
takes exceptions for something else.
"""


@contextmanager
def own_violations() -> Iterator[None]:
    """Keep the violations of this run apart from those of other runs."""
    RAISED.clear()
    try:
        yield
    finally:
        RAISED.clear()


class Violation(AssertionError):
    """A property was violated. The message names the property and the observation."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        RAISED.append(self)


class Story:
    """Lines of (milliseconds, who, what)."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []

    def tell(self, now_ms: int, name: str, what: str) -> None:
        """One line."""
        self.lines.append((now_ms, name, what))


AT_ONCE_MAX = 20_000
"""More steps than this within one millisecond count as an infinite loop."""
LOOK_S = 1e-9
"""Reading the clock takes time, so that waiting for a fraction of a millisecond ends."""


class Timer:
    """A pending callback."""

    __slots__ = ("_args", "_callback", "_context", "_is_cancelled", "_loop", "_when")

    def __init__(
        self,
        loop: ProcessLoop,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self._loop, self._when, self._callback, self._args = loop, when, callback, args
        # an empty one is false
        self._context = contextvars.copy_context() if context is None else context
        self._is_cancelled = False

    def cancel(self) -> None:
        """Cancel the call."""
        self._is_cancelled = True

    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self._is_cancelled

    def when(self) -> float:
        """The time of the callback on the loop's clock."""
        return self._when

    def fire(self) -> None:
        """Now, if the process can."""
        loop = self._loop
        if self._is_cancelled or not loop.is_alive:
            return
        if loop.is_paused:
            loop.frozen.append(self)
            return
        asyncio._set_running_loop(loop)
        self._context.run(self._callback, *self._args)
        if RAISED:
            raise RAISED[0]


class ProcessLoop(asyncio.AbstractEventLoop):
    """`broken` is called with uncaught errors."""

    def __init__(
        self, world: World, name: str, broken: Callable[[str, BaseException], None]
    ) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_paused = False
        self.frozen: list[Timer] = []
        self._now = self._count = 0
        self._looked_at = self._looks = 0
        self._broken = broken

    # --- asyncio's side ---------------------------------------------------------------------------

    def time(self) -> float:
        if self.world.now != self._looked_at:
            self._looked_at, self._looks = self.world.now, 0
        self._looks += 1
        return self.world.now / 1000 + self._looks * LOOK_S

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return self._in(0, callback, args, context)

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Any:
        return self._in(max(-int(-delay * 1000 // 1), 0), callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Any:
        return self._in(max(-int((self.world.now - when * 1000) // 1), 0), callback, args, context)

    def _in(
        self,
        ms: int,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> Timer:
        timer = Timer(self, (self.world.now + ms) / 1000, callback, args, context)
        if self.world.now != self._now:
            self._now, self._count = self.world.now, 0
        self._count += 1
        if self._count > AT_ONCE_MAX and not RAISED:
            raise Violation(f"livelock: {self.name} does not let time pass; it calls {callback}")
        if self.is_alive:
            self.world.after(ms, timer.fire)
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[Any]:  # type: ignore[override]
        task: asyncio.Task[Any] = asyncio.Task(
            coro, loop=self, name=name or "task", context=context
        )
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        cause = context.get("exception")
        if self.is_alive and cause is not None and not isinstance(cause, QmqError):
            self._broken(self.name, cause)

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:  # type: ignore[override]
        """The product asks other threads for the addresses of names only: every name has some."""
        assert func is socket.getaddrinfo, func
        found = self.create_future()
        found.set_result(args)
        return found

    async def create_connection(
        self, factory: Callable[[], Any], host: str = "", port: int = 0, **_: Any
    ) -> Any:  # type: ignore[override]
        return await self.connect(factory, host)

    connect: Callable[[Callable[[], Any], str], Awaitable[Any]]

    # --- the simulator's side ---------------------------------------------------------------------

    def pause(self) -> None:
        """Do nothing for now."""
        self.is_paused = True

    def resume(self) -> None:
        """Continue, with everything that arrived in the meantime, in order."""
        self.is_paused = False
        frozen, self.frozen = self.frozen, []
        for timer in frozen:
            self.world.after(0, timer.fire)

    def enter(self, do: Callable[..., Any], *args: Any) -> Any:
        """Call something as if the loop had."""
        asyncio._set_running_loop(self)
        return do(*args)

    def kill(self) -> list[asyncio.Task[Any]]:
        """The end; what was under way, to be kept until `bury`."""
        self.is_alive = False
        # Before the timers go: a task that a paused process has not begun is held by its timer
        # alone.
        tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
        self.frozen.clear()
        return tasks


def bury(tasks: list[asyncio.Task[Any]]) -> None:
    """Release the unfinished work of killed processes."""
    for task in tasks:
        try:
            task.get_coro().close()  # type: ignore[union-attr]
        except BaseException:
            continue


class SimClock:
    """The product's clock."""

    def __init__(self, simulation: Simulation) -> None:
        self._world = simulation.world

    def time_ms(self) -> int:
        """Simulated time since the Epoch of the simulation."""
        return self._world.now

    def monotonic_ms(self) -> int:
        """The same."""
        return self._world.now


class Process:
    """One run of a process. After `kill` it does nothing more; a restart is another object with the
    same name.
    """

    accept: Callable[[], Any] | None = None
    """Makes the protocol of a connection that comes in."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.random = simulation.world.random
        self.name = name
        self.clock = SimClock(simulation)
        self.loop = ProcessLoop(simulation.world, name, simulation.broke)
        self.loop.connect = lambda factory, host: simulation.network.connect(self, factory, host)
        simulation.network.processes[name] = self

    def tell(self, what: str) -> None:
        """Add a line to the story."""
        self.simulation.tell(self.name, what)

    async def serve(self, method: str, request: Any) -> Any:
        """Handle a call."""
        raise NotImplementedError

    @property
    def is_up(self) -> bool:
        return self.loop.is_alive

    def kill(self) -> None:
        """SIGKILL."""
        if self.loop.is_alive:
            self.tell("dies")
            self.simulation.graveyard += self.loop.kill()
            self.simulation.network.died(self.name)

    def pause(self, ms: int) -> None:
        """SIGSTOP, and SIGCONT later."""
        if self.loop.is_alive and not self.loop.is_paused:
            self.tell(f"is paused for {ms} ms")
            self.loop.pause()
            self.world.after(ms, self.resume)

    def resume(self) -> None:
        """SIGCONT."""
        if self.loop.is_alive and self.loop.is_paused:
            self.tell("continues")
            self.loop.resume()
