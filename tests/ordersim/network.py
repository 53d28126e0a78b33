"""The network between processes: connections like TCP, and calls like gRPC.

A connection carries bytes in order. A cut loses all bytes on their way, and each end notices it
sooner or (much) later. A held connection delivers its bytes when it is released, perhaps when a
newer connection has long been in use. A call may be lost (nothing happened), its answer may be lost
(it happened), and either may be late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim.world import World

from qmq.errors import DeadlineExceeded, NotConnected, Outcome, QmqError

if TYPE_CHECKING:
    from ordersim.loop import Process
    from ordersim.nemesis import Plan


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
