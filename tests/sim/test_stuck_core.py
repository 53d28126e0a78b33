"""The simulator calls a core as the driver does: not while its process stands still, and not while
its disk has no room for the state that the core wants to save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qmq_replication.core import Replica

from sim.nemesis import Plan
from sim.node import Node
from sim.run import Simulation

CALLS = (
    "tick",
    "step",
    "stored",
    "flushed",
    "disconnected",
    "master_gone",
    "on_lookup",
    "campaign_won",
    "campaign_lost",
    "superseded",
)
FULL_MS = 5_000
SEEDS = 12


class WatchedNode(Node):
    """A replica that counts the calls of its core that must not be."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation, name)
        self.wrong_calls: list[str] = []
        calls = {name: self._watched(name) for name in CALLS}
        self.replica_class = type("WatchedReplica", (Replica,), calls)

    def _watched(self, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(Replica, name)

        def watched(core: Replica, *given: Any) -> Any:
            if self.is_stuck:
                self.wrong_calls.append(name)
            return call(core, *given)

        return watched


def wrong_calls(seed: int) -> tuple[bool, list[str]]:
    """Whether a replica waited for room on its disk, and its calls meanwhile. Its master dies while
    entries are written that are not synced yet.
    """
    simulation = Simulation(
        seed, node_class=WatchedNode, plan=Plan(is_sync=False, proposal_every_ms=20)
    )
    world = simulation.world
    world.after(1_000, simulation.propose_often)
    world.run(4_000)
    nodes = [simulation.nodes[name] for name in simulation.membership.voters]
    master = next(node for node in nodes if node.core is not None and node.core.leader is not None)
    slave = next(node for node in nodes if node is not master)
    assert isinstance(slave, WatchedNode)
    slave.disk.fill(takes_state=False)
    master.kill()
    world.run(world.now + FULL_MS)
    return slave.is_stuck, slave.wrong_calls


def test_no_core_is_called_while_its_disk_has_no_room() -> None:
    found = [wrong_calls(seed) for seed in range(1, SEEDS + 1)]
    assert all(was_stuck for was_stuck, _ in found), "the test shows nothing"
    assert not any(calls for _, calls in found)
