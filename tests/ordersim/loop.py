"""An event loop for each process, on the world's clock. It has only those parts of a loop that
asyncio needs.

A paused process handles what arrived meanwhile when it continues. A killed process does nothing
more: it runs no `finally` and sends no answer. Its coroutines are kept until the end of the run,
because collecting them would run their `finally` blocks.

A process: a name, an event loop, and its listeners. Subclasses are brokers, metaservers, producers
and consumers.

The network between processes: connections like TCP, and calls like gRPC.

A connection carries bytes in order. A cut loses all bytes on their way, and each end notices it
sooner or (much) later. A held connection delivers its bytes when it is released, perhaps when a
newer connection has long been in use. A call may be lost (nothing happened), its answer may be lost
(it happened), and either may be late.

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

from qmq.errors import DeadlineExceeded, NotConnected, Outcome, QmqError

if TYPE_CHECKING:
    from ordersim.nemesis import Plan
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


# --- the network ----------------------------------------------------------------------------------


class Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: Network, mine: Process, protocol: Any) -> None:
        super().__init__()
        self._network, self.process, self._protocol = network, mine, protocol
        self.peer: Transport
        self.is_lost = False
        """The protocol knows that it is over."""
        self.is_dead = False
        """Nothing comes through any more."""
        self._is_closing = False
        self._is_reading = True
        self._kept: list[bytes] = []
        self._arrives = 0

    # --- asyncio's side ---------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return self._is_reading

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        kept, self._kept = self._kept, []
        for data in kept:
            self._received(data)

    def write(self, data: Any) -> None:
        if self._is_closing or self.is_dead:
            return
        self._send(self.peer._received, bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(bytes(each) for each in list_of_data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self.is_dead:
                self._send(self.peer.lose, None)
            self.process.loop.call_soon(self.lose, None)

    def abort(self) -> None:
        self.close()

    # --- the simulator's side ---------------------------------------------------------------------

    def _send(self, act: Callable[[Any], None], data: Any) -> None:
        """Send in order. If an answer cannot be delivered, the connection breaks."""
        world = self._network.world
        if self._network.is_silent(self.process.name, self.peer.process.name):
            self.break_off(1_000)
            return
        if self._network.is_held(self.process.name, self.peer.process.name):
            self._network.kept.append((self, act, data))
            return
        at = self._arrives = max(world.now + self._network.delay_ms(), self._arrives)
        world.after(at - world.now, self._arrive, act, data)

    def let_go(self, after_ms: int) -> None:
        """Deliver the data that was held; data sent from now on follows it."""
        self._arrives = max(self._arrives, self._network.world.now + after_ms)

    def _arrive(self, act: Callable[[Any], None], data: Any) -> None:
        if self.is_dead or not self.peer.process.loop.is_alive:
            return
        self.peer.process.loop.call_soon(act, data)

    def _received(self, data: bytes) -> None:
        if self.is_lost or self._is_closing:
            return
        if not self._is_reading:
            self._kept.append(data)
            return
        at = 0
        while at < len(data) and not self._is_closing:
            room = self._protocol.get_buffer(-1)
            size = min(len(room), len(data) - at)
            room[:size] = data[at : at + size]
            at += size
            self._protocol.buffer_updated(size)

    def lose(self, cause: Exception | None) -> None:
        """Close the connection at the protocol."""
        if not self.is_lost:
            self.is_lost = self._is_closing = True
            self._network.connections.pop(self, None)
            self._protocol.connection_lost(cause)

    def break_off(self, within_ms: int) -> None:
        """Both ends notice, each at its own time."""
        for end in (self, self.peer):
            if not end.is_dead:
                end.is_dead = True
                ms = self._network.world.random.randint(0, within_ms)
                end.process.loop.call_later(
                    ms / 1000, end.lose, ConnectionResetError("cut (simulated)")
                )


class Network:
    """All connections, and the processes that cannot reach each other. `cut` has the names of
    unreachable processes.
    """

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.is_calm = False
        self.connections: dict[Transport, None] = {}
        self.processes: dict[str, Process] = {}
        self.cut: dict[str, None] = {}
        self.hidden: dict[str, None] = {}
        """Brokers that etcd and metaservers cannot reach, but clients can."""
        self.silent: dict[str, None] = {}
        """Brokers that producers do not hear: what they send arrives, the answers do not; and
        nobody gets a new connection.
        """
        self.held: dict[str, None] = {}
        """Brokers whose connections with producers stand still; and nobody gets a new
        connection.
        """
        self.kept: list[tuple[Transport, Callable[[Any], None], Any]] = []
        """What is on its way over connections that are held."""

    def delay_ms(self) -> int:
        """The network delay of a message."""
        random = self.world.random
        if not self.is_calm and random.random() < self.plan.slow:
            return random.randint(5, self.plan.slow_ms)
        return random.randint(1, 4)

    def reaches(self, one: str, another: str) -> bool:
        """Whether the two processes can reach each other."""
        if one == another or not (self.cut or self.hidden or self.silent or self.held):
            return True
        if one in self.cut or another in self.cut:
            return False
        return not any(self._is_apart(*pair) for pair in ((one, another), (another, one)))

    def _is_apart(self, one: str, another: str) -> bool:
        return (
            self._is_hidden(one, another)
            or self.is_silent(one, another)
            or self.is_held(one, another)
        )

    def is_silent(self, broker: str, another: str) -> bool:
        """Whether this process gets nothing from the broker."""
        return broker in self.silent and another.startswith("p")

    def is_held(self, one: str, another: str) -> bool:
        """Whether data between the two processes is held."""
        return bool(self.held) and (
            (one in self.held and another.startswith("p"))
            or (another in self.held and one.startswith("p"))
        )

    def let_go(self, name: str, late_ms: Callable[[], int]) -> None:
        """Release a broker's connections, older ones perhaps after newer ones: senders wait longer
        and longer before they try again.
        """
        self.held.pop(name, None)
        kept, self.kept = self.kept, []
        gone: dict[Transport, None] = {}
        for end, act, data in kept:
            if end not in gone and not self.is_held(end.process.name, end.peer.process.name):
                gone[end] = None
                end.let_go(late_ms())
            end._send(act, data)

    def _is_hidden(self, one: str, another: str) -> bool:
        return one in self.hidden and (another == "etcd" or another.startswith("m"))

    def isolate(self, name: str, within_ms: int) -> None:
        """Cut a process off."""
        self.cut[name] = None
        for end in [each for each in self.connections if each.process.name == name]:
            end.break_off(within_ms)

    def heal(self, name: str) -> None:
        """Make the process reachable again; its old connections stay broken."""
        for harmed in (self.cut, self.hidden, self.silent):
            harmed.pop(name, None)

    def died(self, name: str) -> None:
        """The operating system of a killed process ends its connections."""
        for end in [each for each in self.connections if each.process.name == name]:
            end.break_off(50)
            self.connections.pop(end, None)

    # --- connections ------------------------------------------------------------------------------

    async def connect(
        self, mine: Process, factory: Callable[[], Any], host: str
    ) -> tuple[Transport, Any]:
        """Raises ConnectionRefusedError; hangs if the other side cannot be reached."""
        await asyncio.sleep(self.delay_ms() / 1000)
        while not self.reaches(mine.name, host):
            await asyncio.sleep(0.25)
        there = self.processes.get(host)
        if there is None or not there.loop.is_alive or there.accept is None:
            raise ConnectionRefusedError(f"nobody listens at {host}")
        while there.loop.is_paused:
            await asyncio.sleep(0.1)
        if not there.loop.is_alive:
            raise ConnectionRefusedError(f"nobody listens at {host}")
        near = Transport(self, mine, factory())
        far = Transport(self, there, None)
        near.peer, far.peer = far, near
        self.connections[near] = self.connections[far] = None
        far._protocol = there.loop.enter(there.accept)
        there.loop.enter(far._protocol.connection_made, far)
        mine.loop.enter(near._protocol.connection_made, near)
        return near, near._protocol

    # --- calls ------------------------------------------------------------------------------------

    async def call(
        self, mine: Process, to: str, method: str, request: Any, timeout_s: float
    ) -> Any:
        """Raises the error that was raised there, NotConnected, DeadlineExceeded."""
        host = to.rpartition(":")[0]
        answer: asyncio.Future[Any] = mine.loop.create_future()
        late = DeadlineExceeded(f"no answer from {to} in time", outcome=Outcome.UNKNOWN)
        mine.loop.call_later(timeout_s, _set, answer, None, late)
        self.world.after(self.delay_ms(), self._asked, mine, host, method, request, answer)
        return await answer

    def _is_lost(self, one: str, another: str) -> bool:
        return not self.reaches(one, another) or (
            not self.is_calm and self.world.random.random() < self.plan.loss
        )

    def _asked(
        self, mine: Process, host: str, method: str, request: Any, answer: asyncio.Future[Any]
    ) -> None:
        there = self.processes.get(host)
        if self._is_lost(mine.name, host):
            return
        if there is None or not there.loop.is_alive:
            mine.loop.call_soon(_set, answer, None, NotConnected(f"nobody answers at {host}"))
            return
        there.loop.call_soon(self._serve, mine, there, method, request, answer)

    def _serve(
        self, mine: Process, there: Process, method: str, request: Any, answer: asyncio.Future[Any]
    ) -> None:
        there.loop.create_task(self._answer(mine, there, method, request, answer))

    async def _answer(
        self, mine: Process, there: Process, method: str, request: Any, answer: asyncio.Future[Any]
    ) -> None:
        result, error = None, None
        try:
            result = await there.serve(method, request)
        except QmqError as failure:
            error = failure
        self.world.after(self.delay_ms(), self._answered, mine, there, result, error, answer)

    def _answered(
        self,
        mine: Process,
        there: Process,
        result: Any,
        error: QmqError | None,
        answer: asyncio.Future[Any],
    ) -> None:
        if not self._is_lost(mine.name, there.name):
            mine.loop.call_soon(_set, answer, result, error)


def _set(future: asyncio.Future[Any], result: Any, error: QmqError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
