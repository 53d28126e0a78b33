"""Runs one seed: builds a group, makes faults for some simulated minutes, then heals all and
demands that the group works; repeatedly.

Safety is checked after every event (checks.py). Each round ends with a liveness phase: everything
is healed, and within 90 simulated seconds there must be a master, new messages must be committed,
and every voter must have all acknowledged entries.

The events of one seed as readable lines: `tools/run sim --replay SEED`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmq_coordination.broker_groups import EpochClaim, group_key
from qmq_coordination.coordination_store import Put
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import Ack, Append, Message, Mismatch, Ready

from sim.checks import Checks, Violation
from sim.nemesis import Nemesis, Plan, draw
from sim.node import Node, Stranger
from sim.world import Etcd, Network, Store, World

if TYPE_CHECKING:
    from sim.node import Node


class Story:
    """Lines of (milliseconds, who, what). Signs of life and acknowledgements are left out."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []

    def tell(self, now_ms: int, name: str, what: str) -> None:
        """One line."""
        self.lines.append((now_ms, name, what))

    def did(self, node: Node, ready: Ready) -> None:
        """A replica's next action."""
        parts = [
            *_own(ready),
            *(
                f"to {to}: {_short(message)}"
                for to, message in ready.messages
                if not _is_routine(message)
            ),
        ]
        if parts:
            self.tell(node.world.now, node.name, ", ".join(parts))


def _own(ready: Ready) -> list[str]:
    found: list[str] = []
    if ready.save is not None:
        found.append("save promised {} whole {} resetting until {}".format(*ready.save))
    if ready.reset is not None:
        found.append(f"start over behind {ready.reset.start_index}")
    if ready.truncate is not None:
        found.append(f"cut to {ready.truncate}")
    found += [f"write to {each.last_index}" for each in ready.append]
    if ready.commit is not None:
        found.append(f"commit {ready.commit}")
    if ready.role is not None:
        found.append(f"become {ready.role.value}")
    if ready.lead is not None:
        found.append(f"LEAD {ready.lead}")
    return found + [str(each) for each in ready.requests]


def _is_routine(message: Message) -> bool:
    return isinstance(message, Ack) or (
        isinstance(message, Append) and message.prev_index == message.last_index and not message.cut
    )


def _short(message: Message) -> str:
    if isinstance(message, Append):
        what = "cut behind" if message.cut else f"entries to {message.last_index} behind"
        return (
            f"Append {what} {(message.prev_epoch, message.prev_index)}, commit {message.commit}, "
            f"round {message.round}"
        )
    if isinstance(message, Mismatch):
        runs = " ".join(f"{run.epoch}@{run.first}" for run in message.runs[-3:])
        return f"Mismatch round {message.round}, ends at {message.last_index}, last runs {runs}"
    return str(message)


SPARES = ("x", "y")
ROUND_MS = 150_000
CALM_MS = 90_000
MEMBERS = group_key("g", "members")
EPOCH = group_key("g", "epoch")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a seed. `failure` is empty if there is none."""

    seed: int
    failure: str
    trace: int
    events: int
    acknowledged: int
    masters: int
    simulated_ms: int
    faults: dict[str, int]


class Simulation:
    """One run. `node_class` is the product, or a planted bug."""

    checks_class: type[Checks] = Checks

    def __init__(
        self,
        seed: int,
        minutes: int = 10,
        node_class: type[Node] = Node,
        *,
        plan: Plan | None = None,
        story: Story | None = None,
    ) -> None:
        self.seed = seed
        self.world = World(seed)
        self.plan = plan or draw(self.world.random, minutes)
        self.story = story
        names = tuple("abcde"[: self.plan.voters])
        self.first_membership = self.membership = ReplicaMembership(1, names)
        self.faults: Counter[str] = Counter()
        self.nodes: dict[str, Node] = {}
        self.checks = self.checks_class(self.nodes)
        self.etcd = Etcd(self.world)
        self.network = Network(self.world, self.plan, self.nodes, self.faults)
        self.nemesis = Nemesis(self)
        self.stranger = Stranger(self)
        self.is_calm = False
        self._attempts = 0
        self._value = 0
        for name in (*names, *SPARES):
            self.nodes[name] = node_class(self, name)
        self.etcd.txn((), [Put(MEMBERS, self.membership.encode())])
        self.etcd.on_change = self._changes
        for name in names:
            self.nodes[name].start()

    # --- environment ------------------------------------------------------------------------------

    def new_attempt(self) -> str:
        """A number never used twice."""
        self._attempts += 1
        return str(self._attempts)

    def store_of(self, name: str) -> Store:
        """A replica's way to the coordination store."""
        return Store(
            self.etcd, lambda: self.is_etcd_cut(name), self.plan.etcd_loss, self.plan.etcd_late
        )

    def is_etcd_cut(self, name: str) -> bool:
        """Whether the replica cannot reach etcd."""
        return name in self.nemesis.etcd_cut or "*" in self.nemesis.etcd_cut

    @property
    def epoch(self) -> int:
        """The highest that the coordination store has."""
        item = self.etcd.items.get(EPOCH)
        return EpochClaim.decode(item.value).epoch if item is not None else 0

    def tell(self, name: str, what: str) -> None:
        """Add a line to the story, if there is a listener."""
        if self.story is not None:
            self.story.tell(self.world.now, name, what)

    def _changes(self, key: str, before: bytes, after: bytes) -> None:
        if key == MEMBERS:
            membership = ReplicaMembership.decode(after)
            self.tell("etcd", f"{membership}")
            self.checks.changes(ReplicaMembership.decode(before), membership)
            self.membership = membership

    # --- the run ----------------------------------------------------------------------------------

    def propose(self) -> None:
        """A producer offers a message to everybody; masters take it, if not too much waits
        already.
        """
        self._value += 1
        for node in self.nodes.values():
            node.propose(self._value * 10 + ord(node.name) % 10)

    def propose_soon(self, count: int) -> None:
        """Some messages within a second."""
        for _ in range(count):
            self.world.after(self.world.random.randint(1, 1_000), self.propose)

    def propose_often(self) -> None:
        if not self.is_calm:
            self.propose()
        self.world.after(
            1 + int(self.world.random.expovariate(1 / self.plan.proposal_every_ms)),
            self.propose_often,
        )

    def run(self) -> Result:
        failure = ""
        try:
            self.world.after(1_000, self.propose_often)
            while self.world.now < self.plan.minutes * 60_000:
                self.is_calm = self.network.is_calm = False
                self.nemesis.begin()
                self.stranger.begin()
                self.world.run(self.world.now + ROUND_MS)
                self.calm_down()
            for name in self.membership.voters:
                self.checks.survived(self.nodes[name])
        except Violation as cause:
            failure = str(cause)
        except Exception as cause:
            failure = f"{type(cause).__name__}: {cause}"
        return Result(
            self.seed,
            failure,
            self.world.trace,
            self.world.events,
            len(self.checks.acknowledged),
            len(self.checks.masters),
            self.world.now,
            dict(self.faults),
        )

    def calm_down(self) -> None:
        self.tell("", "everything is healed")
        self.is_calm = self.network.is_calm = True
        self.nemesis.end()
        before = len(self.checks.acknowledged)
        deadline = self.world.now + CALM_MS
        while self.world.now < deadline:
            for name in self.membership.replicas:
                self.nodes[name].is_paused = False
                self.nodes[name].start()
            self.world.run(self.world.now + 3_000)
            self.propose()
            self.world.run(self.world.now + 2_000)
            if len(self.checks.acknowledged) > before + 2 and self._has_converged():
                break
        else:
            raise Violation(
                f"liveness: {CALM_MS} ms after all faults were healed the group does not "
                f"work: {self._shape()}"
            )

    def _has_converged(self) -> bool:
        cores = [self.nodes[name].core for name in self.membership.voters]
        return all(
            core is not None and core.state.commit >= max(self.checks.acknowledged, default=0)
            for core in cores
        )

    def _shape(self) -> str:
        return "; ".join(
            f"{name} {node.core.state.role.value} {node.core.state.history.last} commit "
            f"{node.core.state.commit}"
            f" promised {node.core.state.promised}"
            f" whole {node.core.state.may_count}"
            for name, node in self.nodes.items()
            if node.core is not None
        )


def simulate(seed: int, minutes: int = 10, node_class: type[Node] = Node) -> Result:
    """One seed's result. The same seed gives the same trace, always."""
    return Simulation(seed, minutes, node_class).run()
