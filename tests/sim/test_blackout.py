"""With `flush=async`, a power cut of all replicas at one moment: what producers were told is
flushed is there afterwards, and only that.
"""

from __future__ import annotations

from qmq_replication.core import Replica
from qmq_replication.leader import Leader

from sim.nemesis import Plan
from sim.node import Node
from sim.run import Simulation, Violation

FAULTS = (
    "kill",
    "pause",
    "isolate",
    "isolate_in",
    "isolate_out",
    "halves",
    "bridge",
    "swizzle",
    "lease",
    "transfer",
    "provoke",
    "usurp",
)
ROUND_MS = 40_000
ROUNDS = 4


class FlushingNode(Node):
    """Its producers wait for the flush."""

    wants_flush = True

    def black_out(self) -> None:
        """Cut a replica's power. Its boot id changes, whether it lost anything or not."""
        self.cut_power()
        self._lost_power = True


def blackouts(seed: int, node_class: type[FlushingNode] = FlushingNode) -> tuple[int, int]:
    """How many messages were flushed and how many committed, over some rounds of faults and a power
    cut of everybody. Raises Violation.
    """
    plan = Plan(
        voters=3 if seed % 3 else 5,
        is_sync=False,
        drop=0.02,
        double=0.02,
        slow=0.1,
        regicide=0.2 * (seed % 2),
        aim=0.5,
        faults=FAULTS,
        fault_every_ms=2_000,
        proposal_every_ms=300,
        minutes=0,
    )
    simulation = Simulation(seed, node_class=node_class, plan=plan)
    simulation.world.after(1_000, simulation.propose_often)
    committed = 0
    for _ in range(ROUNDS):
        simulation.is_calm = simulation.network.is_calm = False
        simulation.nemesis.begin()
        simulation.world.run(
            simulation.world.now + ROUND_MS + simulation.world.random.randint(0, 5_000)
        )
        committed += len(simulation.checks.acknowledged)
        for name in simulation.membership.voters:
            node = simulation.nodes[name]
            assert isinstance(node, FlushingNode)
            node.black_out()
        simulation.checks.everybody_lost_power()
        simulation.calm_down()
        for name in simulation.membership.voters:
            simulation.checks.flushed_survived(simulation.nodes[name])
    return len(simulation.checks.flushed), committed


def is_found(node_class: type[FlushingNode], seeds: int = 60) -> bool:
    """Whether a planted bug is found by one of the first seeds."""
    for seed in range(1, seeds + 1):
        try:
            blackouts(seed, node_class)
        except Violation:
            return True
    return False


def test_a_power_cut_of_all_replicas_loses_no_flushed_message() -> None:
    flushed = sum([blackouts(seed)[0] for seed in range(1, 13)])
    assert flushed > 100


def test_letting_flushed_answers_go_when_a_majority_has_written_is_found() -> None:
    class Written(Replica):
        def flushed(self, index: int) -> None:
            super().flushed(self.state.history.last_index)

    class WrittenNode(FlushingNode):
        replica_class = Written

    assert is_found(WrittenNode)


def test_letting_flushed_answers_go_when_the_master_alone_has_flushed_is_found() -> None:
    class Hasty(Leader):
        def _of_majority(self, held: dict[str, int]) -> int:
            if held[self.state.name] == self.state.flushed_index != self.state.stored_index:
                return held[self.state.name]
            return super()._of_majority(held)

    class HastyReplica(Replica):
        def lead(self) -> None:
            super().lead()
            if self.leader is not None:
                self.leader.__class__ = Hasty

    class HastyNode(FlushingNode):
        replica_class = HastyReplica

    assert is_found(HastyNode)


def test_keeping_what_was_flushed_when_the_log_is_cut_is_found() -> None:
    class Forgetful(Replica):
        def truncate(self, index: int) -> None:
            before = self.state.flushed_index
            super().truncate(index)
            self.state.flushed_index = before

    class ForgetfulNode(FlushingNode):
        replica_class = Forgetful

    assert is_found(ForgetfulNode)
