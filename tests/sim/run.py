"""Runs one seed: builds a group, makes faults for some simulated minutes, then heals all and
demands that the group works; repeatedly.

Safety is checked after every event (`Checks`). Each round ends with a liveness phase: everything
is healed, and within 90 simulated seconds there must be a master, new messages must be committed,
and every voter must have all acknowledged entries.

The events of one seed as readable lines: `tools/run sim --replay SEED`.

The checks after every event: Raft's five properties (Ongaro and Ousterhout, figure 3) and ours.

election safety        an epoch has one master
log matching           an (index, epoch) has one value, and one epoch before it, on every replica
leader completeness    the master of an epoch has everything that was committed in the epochs before it
state machine safety   an index is committed with one value only
durability             a committed entry is stored on a majority of the voters that the coordination store has at that moment (a replica
                       that lost it since it acknowledged it knows this, and does not count in an
                       election before it has it again)
membership             changes go from one version to the next, by one voter; when one is made, a
                       majority of the voters before it has everything committed
ours                   a process's commit position never goes back; an acknowledged entry is
                       committed, and is there at the end
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmq_coordination.broker_groups import EpochClaim, group_key
from qmq_coordination.coordination_store import Put
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import Ack, Append, Message, Mismatch, Ready

from sim.nemesis import Nemesis, Plan, draw
from sim.node import Node, Stranger
from sim.world import Entry, Etcd, Network, Store, World

if TYPE_CHECKING:
    from sim.node import Node


class Violation(AssertionError):
    """A property does not hold."""


class Checks:
    """Everything that was observed in one run. `committed[i]` is the entry at index i + 1."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._nodes = nodes
        self.masters: dict[int, str] = {}
        self.written: dict[tuple[int, int], tuple[int, int]] = {}
        self.committed: list[Entry] = []
        self.committed_in: list[int] = []
        """The epoch whose master committed it first."""
        self.acknowledged: dict[int, int] = {}
        """Value by index."""
        self.flushed: dict[int, Entry] = {}
        """What was acknowledged because a majority had flushed it, by index."""

    def wrote(self, name: str, index: int, entry: Entry, epoch_before: int) -> None:
        """A replica wrote an entry after one of `epoch_before`."""
        found = self.written.setdefault((index, entry.epoch), (entry.value, epoch_before))
        if found != (entry.value, epoch_before):
            raise Violation(
                f"log matching: {name} has {(entry.value, epoch_before)} at "
                f"{(index, entry.epoch)}, another {found}"
            )

    def became_master(self, node: Node, epoch: int) -> None:
        """A replica begins to lead."""
        if self.masters.setdefault(epoch, node.name) != node.name:
            raise Violation(
                f"election safety: epoch {epoch} has {self.masters[epoch]} and {node.name}"
            )
        image = node.disk.image
        if (
            image.entries[: max(len(self.committed) - image.start, 0)]
            == self.committed[image.start :]
        ):
            return
        for index, (entry, committed_in) in enumerate(
            zip(self.committed, self.committed_in, strict=True), 1
        ):
            if committed_in < epoch and not node.disk.holds(index, entry, durably=False):
                raise Violation(
                    f"leader completeness: {node.name} leads in {epoch} without {entry} at "
                    f"{index} of {committed_in}"
                )

    def commits(self, node: Node, before: int, after: int, members: ReplicaMembership) -> None:
        """A replica reports that everything up to `after` is committed, while the coordination
        store has `members`.
        """
        if after < before:
            raise Violation(
                f"commit position: that of {node.name} went back from {before} to {after}"
            )
        image = node.disk.image
        if after > image.last:
            raise Violation(
                f"commit position: {node.name} commits {after}, but ends at {image.last}"
            )
        first = max(before, image.start)
        for index, entry in enumerate(
            image.entries[first - image.start : after - image.start], first + 1
        ):
            if index > len(self.committed):
                self._first_commit(node, index, entry, members)
            elif self.committed[index - 1] != entry:
                raise Violation(
                    f"state machine safety: {index} is {self.committed[index - 1]}, "
                    f"{node.name} commits {entry}"
                )

    def _first_commit(
        self, node: Node, index: int, entry: Entry, members: ReplicaMembership
    ) -> None:
        holders = self._holders(index, entry)
        if not members.is_majority(holders):
            raise Violation(
                f"durability: {node.name} commits {entry} at {index}, which only {holders} "
                f"of {members.voters} hold"
            )
        assert node.core is not None
        self.committed.append(entry)
        self.committed_in.append(node.core.state.promised)

    def _holders(self, index: int, entry: Entry) -> list[str]:
        return [
            name
            for name, node in self._nodes.items()
            if node.is_doubtful or node.disk.holds(index, entry, durably=node.plan.is_sync)
        ]

    def proposes(self, node: Node, after: ReplicaMembership) -> None:
        """A master takes an operator's change of the membership: a majority of the new voters was
        there a moment ago.
        """
        assert node.core is not None
        timing = node.core.state.timing
        since_ms = node.world.now - timing.suspect_ms - timing.heartbeat_ms
        there = [
            name for name, each in self._nodes.items() if each.is_up or each.died_ms >= since_ms
        ]
        if len(after.voters) < len(node.core.state.membership.voters) and not after.is_majority(
            there
        ):
            raise Violation(f"membership: {node.name} proposes {after}, and only {there} are there")

    def changes(self, before: ReplicaMembership, after: ReplicaMembership) -> None:
        """The coordination store's membership changes."""
        if after.version != before.version + 1 or len(set(before.voters) ^ set(after.voters)) > 1:
            raise Violation(f"membership: from {before} to {after}")
        if self.committed and not before.is_majority(
            holders := self._holders(len(self.committed), self.committed[-1])
        ):
            raise Violation(
                f"membership: from {before} to {after}, but what is committed is only on {holders}"
            )

    def acknowledges(self, name: str, index: int, value: int) -> None:
        """A producer got the answer that its message is stored."""
        if index > len(self.committed) or self.committed[index - 1].value != value:
            found = self.committed[index - 1 : index]
            raise Violation(
                f"acknowledged is committed: {name} acknowledges {value} at {index}, where "
                f"{found} is"
            )
        self.acknowledged[index] = value

    def acknowledges_flushed(
        self, node: Node, index: int, entry: Entry, members: ReplicaMembership
    ) -> None:
        """A producer got the answer that its message is flushed on a majority."""
        holders = [
            name
            for name, each in self._nodes.items()
            if each.is_doubtful or each.disk.holds(index, entry, durably=True)
        ]
        if not members.is_majority(holders):
            raise Violation(
                f"flushed: {node.name} says so of {entry} at {index}, which only {holders} "
                f"of {members.voters} have flushed"
            )
        self.flushed[index] = entry

    def everybody_lost_power(self) -> None:
        """A power cut of all replicas: messages that were committed in page caches may be lost,
        those flushed on a majority may not.
        """
        self.committed.clear()
        self.committed_in.clear()
        self.acknowledged.clear()

    def flushed_survived(self, node: Node) -> None:
        """After a power cut of everybody a replica must hold all that waited for a flush."""
        for index, entry in self.flushed.items():
            if not node.disk.holds(index, entry, durably=False):
                raise Violation(
                    f"flushed: {entry} at {index} is not on {node.name} after a power cut of "
                    "everybody"
                )

    def survived(self, node: Node) -> None:
        """At the end a replica must hold all that was acknowledged."""
        for index, value in self.acknowledged.items():
            if not node.disk.holds(
                index, Entry(self.committed[index - 1].epoch, value), durably=False
            ):
                raise Violation(
                    f"durability: the acknowledged message {value} at {index} is not on {node.name}"
                )


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
