"""Older copies of replicas' disks are put back while the group works: nothing that was acknowledged
is lost.

The simulated nodes judge a copy by the product's own rule (`ReplicaIdentity.is_older_than`). A copy
is put back only where a majority of whole voters is left, as REPLICATION.md assumes.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from qmq_replication import identity
from qmq_replication.identity import ReplicaIdentity

from sim.nemesis import Plan
from sim.node import Node
from sim.run import Simulation, Violation
from sim.world import Disk

FAULTS = (
    "kill",
    "pause",
    "isolate",
    "isolate_in",
    "isolate_out",
    "halves",
    "bridge",
    "lease",
    "transfer",
    "provoke",
    "usurp",
)
ROUND_MS = 60_000
ROUNDS = 3
SEEDS = 6


class CopiedNode(Node):
    """A replica whose disk is copied while it is down, and put back later."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation, name)
        self.identity = identity.new("g", name)
        self.registered = 0
        """The generation at the replica's record in the coordination store."""
        self.copied: tuple[Disk, ReplicaIdentity] | None = None

    def is_older_copy(self) -> bool:
        return self.identity.is_older_than(self.identity.folder, self.registered)

    @property
    def is_doubtful(self) -> bool:
        return super().is_doubtful or self.identity.generation < self.registered

    async def _recover(self) -> None:
        if self.is_older_copy():
            epoch = await self._highest_epoch()
            self.disk.state = self.disk.state._replace(
                promised=max(epoch, self.disk.state.promised), is_whole=False
            )
        self.identity = self.identity.grown(self.identity.folder, self.registered)
        self.registered = self.identity.generation
        await super()._recover()

    def copy_disk(self) -> None:
        self.kill()
        self.disk.sync(self.disk.pending)
        self.copied = deepcopy(self.disk), self.identity

    def put_back(self) -> None:
        self.kill()
        assert self.copied is not None
        (self.disk, self.identity), self.copied = self.copied, None


class Careless(CopiedNode):
    """Takes an older copy for the latest."""

    def is_older_copy(self) -> bool:
        return False


class Forgetful(CopiedNode):
    """Knows an older copy, and keeps to the promise that is in it."""

    async def _highest_epoch(self) -> int:
        return 0


def _exchange_disks(simulation: Simulation) -> None:
    """Copy a replica's disk, or put an older copy back."""
    random, world = simulation.world.random, simulation.world
    if not simulation.is_calm:
        node: Any = simulation.nodes[random.choice(simulation.membership.voters)]
        voters = simulation.membership.voters
        whole = [
            name for name in voters if name != node.name and not simulation.nodes[name].is_doubtful
        ]
        if node.copied is None:
            node.copy_disk()
        elif len(whole) >= simulation.membership.majority:
            node.put_back()
        world.after(random.randint(50, 2_000), node.start)
    world.after(random.randint(500, 4_000), _exchange_disks, simulation)


def put_back(seed: int, node_class: type[CopiedNode] = CopiedNode) -> int:
    """The number of acknowledged messages, over some rounds of faults. Raises Violation."""
    plan = Plan(
        voters=3 if seed % 3 else 5,
        drop=0.02,
        double=0.02,
        slow=0.1,
        regicide=0.2 * (seed % 2),
        aim=0.5,
        faults=FAULTS,
        fault_every_ms=4_000,
        proposal_every_ms=200,
        minutes=0,
    )
    simulation = Simulation(seed, node_class=node_class, plan=plan)
    simulation.world.after(1_000, simulation.propose_often)
    simulation.world.after(2_000, _exchange_disks, simulation)
    for _ in range(ROUNDS):
        simulation.is_calm = simulation.network.is_calm = False
        simulation.nemesis.begin()
        simulation.world.run(simulation.world.now + ROUND_MS)
        simulation.calm_down()
    return len(simulation.checks.acknowledged)


def is_found(node_class: type[CopiedNode], seeds: int = 60) -> bool:
    for seed in range(1, seeds + 1):
        try:
            put_back(seed, node_class)
        except Violation:
            return True
    return False


def test_older_copies_of_disks_put_back_lose_nothing_that_was_acknowledged() -> None:
    assert all(put_back(seed) for seed in range(1, SEEDS + 1))


@pytest.mark.parametrize("planted", [Careless, Forgetful])
def test_a_node_that_trusts_an_older_copy_is_found(planted: type[CopiedNode]) -> None:
    assert is_found(planted)
