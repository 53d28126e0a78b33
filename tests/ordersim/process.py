"""A process: a name, an event loop, and its listeners. Subclasses are brokers, metaservers, producers and consumers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ordersim.loop import ProcessLoop

if TYPE_CHECKING:
    from ordersim.run import Simulation


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
    """One run of a process. After `kill` it does nothing more; a restart is another object with the same name."""

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
