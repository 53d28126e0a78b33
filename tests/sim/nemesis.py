"""Makes the faults of a plan, one after the other, and aims some of them at a master's weak
moments.

Each `_do_KIND` is one kind of FAULTS. The nemesis heals all cuts and starts killed processes again
a little later; faults overlap. It leaves out faults that the contract excludes: with `flush=async`
no majority of the voters loses power or a disk at one time.

The plan of a seed's run: it draws its own probabilities, some of them zero, so that rare faults
happen together (swarm testing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import TakeOver, Timing

from sim.world import kept_from

if TYPE_CHECKING:
    from sim.node import Node
    from sim.run import Simulation


@dataclass(frozen=True, slots=True)
class Plan:
    """Probabilities per message, request or step; mean times between faults and between messages of
    producers in milliseconds.
    """

    voters: int = 3
    is_sync: bool = True
    """Whether an entry counts once it is synced; otherwise once it is written (`flush=async`)."""
    is_ordered: bool = True
    """Whether a link keeps the order of the messages that it delivers, as one TCP connection
    does.
    """
    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    """A second copy comes up to a minute later."""
    slow: float = 0.0
    slow_ms: int = 100
    etcd_loss: float = 0.0
    etcd_late: float = 0.0
    """A request to the coordination store is done only after its sender has given up waiting."""
    failpoint: float = 0.0
    sync_ms: int = 15
    """How long a sync takes at most."""
    aim: float = 0.0
    """How often a fault goes for the master."""
    regicide: float = 0.0
    """How often a fault hits a new master immediately. A tenth as often, a fault hits a master that
    has just committed.
    """
    fills: float = 0.0
    """How often a fault, and the end of a master, find the disks of some replicas full."""
    fault_every_ms: int = 10_000
    proposal_every_ms: int = 1_000
    read_entries: int = 8
    """Entries that one Append carries."""
    inflight: int = 24
    faults: tuple[str, ...] = ()
    minutes: int = 10
    timing: Timing = field(default_factory=Timing)


FAULTS = (
    "kill",
    "kill_all",
    "power",
    "power_all",
    "crash_loop",
    "pause",
    "wipe",
    "retention",
    "outrun",
    "amnesia",
    "isolate",
    "isolate_in",
    "isolate_out",
    "halves",
    "bridge",
    "swizzle",
    "etcd_cut",
    "etcd_all",
    "lease",
    "join",
    "leave",
    "transfer",
    "provoke",
    "usurp",
    "shrink",
    "storm",
)

WEAK_MOMENTS = ("outrun", "amnesia", "provoke", "usurp", "usurp", "shrink", "storm")
"""Faults that aim at one weak moment of the protocol; a seed that is obsessed has little else."""


def draw(random: Random, minutes: int) -> Plan:
    """A different plan for each seed."""
    is_obsessed = random.random() < 0.4
    kinds = random.sample(
        FAULTS, random.randint(0, 2) if is_obsessed else random.randint(4, len(FAULTS))
    )
    if is_obsessed:
        kinds.append(random.choice(WEAK_MOMENTS))
    inflight = random.choice((1, 4, 24))
    beside = Random()
    # so that the other seeds tell the same story with and without this fault
    beside.setstate(random.getstate())
    return Plan(
        voters=random.choice((3, 5) if is_obsessed else (3, 3, 5)),
        is_sync=random.random() < 0.6,
        is_ordered=random.random() < 0.8,
        drop=random.choice((0.0, 0.0, 0.02, 0.1)),
        double=random.choice((0.0, 0.02, 0.1)),
        late=random.choice((0.0, 0.0, 0.01, 0.05)),
        slow=random.choice((0.0, 0.02, 0.2)),
        slow_ms=random.choice((100, 500, 3_000, 15_000)),
        etcd_loss=random.choice((0.0, 0.02, 0.15)),
        etcd_late=random.choice((0.0, 0.0, 0.1)),
        sync_ms=random.choice((15, 15, 2_000)),
        failpoint=random.choice((0.0, 0.0, 0.001, 0.005)),
        aim=random.choice((0.0, 0.3, 0.7)),
        regicide=random.choice((0.0, 0.0, 0.2, 0.5)),
        fills=beside.choice((0.0, 0.0, 0.0, 0.1, 0.5)),
        fault_every_ms=3_000 if is_obsessed else random.choice((1_000, 3_000, 10_000, 20_000)),
        proposal_every_ms=random.choice((400, 1_000, 3_000)),
        read_entries=random.choice((1, 8)),
        inflight=inflight,
        faults=tuple(kinds),
        minutes=minutes,
        timing=Timing(
            heartbeat_ms=800,
            suspect_ms=2_400,
            lost_ms=300,
            poll_ms=300,
            fence_ms=2_500,
            quorum_ms=3_200,
            inflight_bytes_max=inflight,
            chunk_bytes_max=8,
        ),
    )


class Nemesis:
    """See the module."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._plan = simulation.plan
        self._network = simulation.network
        self._nodes = simulation.nodes
        self._faults = simulation.faults
        self._usurped = ""
        self._friends: set[str] = set()
        self._returning = ""
        self._usurper = ""
        self._storm_until = 0
        self.etcd_cut: set[str] = set()

    def begin(self) -> None:
        """Inject faults until `calm`."""
        random = self._world.random
        if self._plan.faults and not self._simulation.is_calm:
            self.strike(random.choice(self._plan.faults))
            self._world.after(
                1 + int(random.expovariate(1 / self._plan.fault_every_ms)), self.begin
            )

    def strike(self, kind: str) -> None:
        """One fault."""
        members = self._simulation.membership
        node = self._nodes[self._world.random.choice(members.replicas)]
        if self._world.random.random() < self._plan.aim:
            node = self._master() or node
        self._faults[kind] += 1
        self._simulation.tell(node.name, f"FAULT {kind}")
        if self._plan.fills and self._world.random.random() < self._plan.fills:
            self._fill_some(members)
        getattr(self, f"_do_{kind}")(node, members)

    def _fill_some(self, members: ReplicaMembership) -> None:
        """Fill disks up to the last byte for a while, just before a fault: promises are made, and
        entries cut, while they are full.
        """
        random = self._world.random
        self._faults["disks full"] += 1
        for name in random.sample(members.replicas, random.randint(1, len(members.replicas))):
            self._fill(name, takes_state=random.random() < 0.3)

    def _fill(self, name: str, *, takes_state: bool) -> None:
        disk = self._nodes[name].disk
        disk.fill(takes_state=takes_state)
        self._later(disk.empty)

    def end(self) -> None:
        """Heal everything."""
        self._network.heal()
        for link in list(self._network.clogged):
            self._network.flow(link)
        self.etcd_cut.clear()
        for node in self._nodes.values():
            node.disk.empty()
        self._usurped = self._usurper = self._returning = ""

    # --- helpers ----------------------------------------------------------------------------------

    def _master(self) -> Node | None:
        leaders = [
            node
            for node in self._nodes.values()
            if node.core is not None and node.core.leader is not None
        ]
        return max(
            leaders,
            key=lambda node: node.core.state.promised if node.core is not None else 0,
            default=None,
        )

    def _later(self, act: Callable[..., object], *args: Any) -> None:
        self._world.after(self._world.random.randint(200, 15_000), act, *args)

    def _soon(self, act: Callable[..., object], *args: Any) -> None:
        self._world.after(self._world.random.randint(0, 400), act, *args)

    def _isolate(self, node: Node, **ways: bool) -> None:
        """Cut off a replica. By chance the others' connections break immediately or later."""
        self._network.isolate(node.name, **ways)
        if self._world.random.random() < 0.5:
            self._network.tell_of_loss(node.name)
        self._later(self._network.heal)

    def _may_lose(self, name: str, members: ReplicaMembership) -> bool:
        """Whether a majority of voters with complete state is left if this one loses its state. The
        contract requires that.
        """
        whole = [
            each for each in members.voters if each != name and not self._nodes[each].is_doubtful
        ]
        return len(whole) >= members.majority

    # --- processes and disks ----------------------------------------------------------------------

    def _do_kill(self, node: Node, _: ReplicaMembership) -> None:
        node.kill()
        self._later(node.start)

    def _do_kill_all(self, _: Node, members: ReplicaMembership) -> None:
        for name in members.replicas:
            self._nodes[name].kill()
            self._soon(self._nodes[name].start)

    def _do_power(self, node: Node, members: ReplicaMembership) -> None:
        if self._plan.is_sync or self._may_lose(node.name, members):
            node.cut_power()
            self._later(node.start)

    def _do_power_all(self, _: Node, members: ReplicaMembership) -> None:
        for name in members.replicas:
            node = self._nodes[name]
            if self._plan.is_sync:
                node.cut_power()
            else:
                node.kill()
            self._later(node.start)

    def _do_crash_loop(self, node: Node, _: ReplicaMembership) -> None:
        for turn in range(6):
            self._world.after(turn * 300, node.kill)
            self._world.after(turn * 300 + self._world.random.randint(1, 250), node.start)

    def _do_pause(self, node: Node, _: ReplicaMembership) -> None:
        node.pause(self._world.random.randint(200, 20_000))

    def _do_wipe(self, node: Node, members: ReplicaMembership) -> None:
        if self._may_lose(node.name, members):
            self._wipe(node)
            self._later(node.start)

    def _wipe(self, node: Node) -> None:
        node.kill()
        node.disk.wipe()

    def _do_retention(self, node: Node, _: ReplicaMembership) -> None:
        """Forget what is committed, up to some point."""
        core = node.core
        if (
            core is not None
            and not core.state.resetting_until
            and core.state.commit - node.disk.image.start >= 4
        ):
            self._forget_before(
                node, self._world.random.randint(node.disk.image.start + 1, core.state.commit - 1)
            )

    def _forget_before(self, node: Node, index: int) -> None:
        if (
            node.core is not None
            and not node.core.state.resetting_until
            and node.disk.image.start < index <= node.core.state.commit
        ):
            node.disk.write("drop", index)
            node.core.state.history = kept_from(node.core.state.history, index + 1)

    def _do_outrun(self, node: Node, members: ReplicaMembership) -> None:
        """The master continues without one replica, and immediately deletes the entries that this
        replica lacks.
        """
        master = self._master()
        if master is None or master is node:
            return
        self._network.cut.add((master.name, node.name))
        self._simulation.propose_soon(4)
        self._world.after(1_400, self._forget_all, master)
        self._world.after(1_450, self._network.heal)

    def _forget_all(self, node: Node) -> None:
        if node.core is not None:
            self._forget_before(node, node.core.state.commit)

    def _do_amnesia(self, node: Node, members: ReplicaMembership) -> None:
        """Only one replica hears the master, and its answers are delayed. The replica dies and
        loses its state. Then all its answers arrive together.
        """
        master = self._master()
        if master is None or master is node or not self._may_lose(node.name, members):
            return
        others = set(self._nodes) - {master.name, node.name}
        self._network.split({master.name}, others)
        self._network.clog((node.name, master.name))
        self._simulation.propose_soon(8)
        flow_ms = self._world.random.randint(1_550, 1_700)
        self._world.after(1_000, self._forget, node)
        self._world.after(1_020, node.start)
        self._world.after(flow_ms, self._network.flow_backwards, (node.name, master.name), 200)
        self._world.after(
            flow_ms + self._world.random.randint(10, 60),
            self._network.cut.add,
            (master.name, node.name),
        )
        self._world.after(flow_ms + 500, self._network.heal)

    def _forget(self, node: Node) -> None:
        if self._may_lose(node.name, self._simulation.membership):
            node.cut_power()
            if self._plan.is_sync:
                node.disk.wipe()

    # --- network ----------------------------------------------------------------------------------

    def _do_isolate(self, node: Node, _: ReplicaMembership) -> None:
        self._isolate(node)

    def _do_isolate_in(self, node: Node, _: ReplicaMembership) -> None:
        self._isolate(node, is_outward=False)

    def _do_isolate_out(self, node: Node, _: ReplicaMembership) -> None:
        self._isolate(node, is_inward=False)

    def _do_halves(self, _: Node, members: ReplicaMembership) -> None:
        left = set(self._world.random.sample(members.replicas, len(members.replicas) // 2))
        self._network.split(left, set(self._nodes) - left)
        self._later(self._network.heal)

    def _do_bridge(self, node: Node, members: ReplicaMembership) -> None:
        """Two sides that do not see each other, and one replica that sees both."""
        others = [name for name in members.replicas if name != node.name]
        half = len(others) // 2
        self._network.split(set(others[:half]), set(others[half:]))
        self._later(self._network.heal)

    def _do_swizzle(self, _: Node, members: ReplicaMembership) -> None:
        """FoundationDB's fault: stop links one by one, and restore them in another order."""
        links = [
            (a, b)
            for a in members.replicas
            for b in members.replicas
            if a != b and self._world.random.random() < 0.5
        ]
        for number, link in enumerate(links):
            self._world.after(number * 100, self._network.clog, link)
            self._world.after(
                len(links) * 100 + self._world.random.randint(0, 5_000), self._network.flow, link
            )

    # --- the coordination store -------------------------------------------------------------------

    def _do_etcd_cut(self, node: Node, _: ReplicaMembership) -> None:
        self.etcd_cut.add(node.name)
        self._later(self.etcd_cut.discard, node.name)

    def _do_etcd_all(self, _: Node, __: ReplicaMembership) -> None:
        self.etcd_cut.add("*")
        self._later(self.etcd_cut.discard, "*")

    def _do_lease(self, _: Node, __: ReplicaMembership) -> None:
        for lease in list(self._simulation.etcd.leases):
            self._simulation.etcd.end(lease)

    # --- operators --------------------------------------------------------------------------------

    def _do_join(self, _: Node, members: ReplicaMembership) -> None:
        spare = next((each for each in self._nodes if each not in members.replicas), None)
        if spare is not None and len(members.replicas) < 6:
            if not self._nodes[spare].is_up:
                self._nodes[spare].start()
            self._operate("join", spare)

    def _do_leave(self, node: Node, members: ReplicaMembership) -> None:
        if len(members.voters) > 3:
            self._operate("leave", node.name)

    def _do_transfer(self, node: Node, _: ReplicaMembership) -> None:
        self._operate("transfer", node.name)

    def _operate(self, what: str, name: str) -> None:
        for node in self._nodes.values():
            node.operate(what, name)

    def _do_storm(self, _: Node, __: ReplicaMembership) -> None:
        """Joins and leaves as fast as they go, for some seconds."""
        if self._world.now >= self._storm_until:
            self._storm_until = self._world.now + 8_000
            self._storm()

    def _storm(self) -> None:
        if self._world.now < self._storm_until and not self._simulation.is_calm:
            members = self._simulation.membership
            kind = self._do_join if self._world.random.random() < 0.5 else self._do_leave
            kind(self._nodes[self._world.random.choice(members.replicas)], members)
            self._world.after(self._world.random.randint(50, 800), self._storm)

    # --- weak moments -----------------------------------------------------------------------------

    def _do_provoke(self, node: Node, _: ReplicaMembership) -> None:
        """A delayed TakeOver arrives: two replicas want to lead."""
        if node.core is not None:
            other = next(each for each in self._nodes if each != node.name)
            node.receive(other, TakeOver(node.core.state.promised))

    def _do_usurp(self, _: Node, members: ReplicaMembership) -> None:
        """Cut the master off, with half of a minority; the moment another one leads, change the
        sides (has_become_master).
        """
        master = self._master()
        if master is None:
            return
        friends = [name for name in members.voters if name != master.name]
        left = {
            master.name,
            *self._world.random.sample(
                friends, self._world.random.randint(0, max(len(friends) // 2 - 1, 0))
            ),
        }
        self._network.split(left, set(self._nodes) - left)
        self._network.tell_of_loss(master.name)
        if self._plan.fills:
            self._fill(
                self._world.random.choice([name for name in members.voters if name not in left]),
                takes_state=False,
            )
        self.etcd_cut.add(master.name)
        self._later(self.etcd_cut.discard, master.name)
        self._later(self._network.heal)
        self._simulation.propose_soon(3)
        self._usurped, self._friends = master.name, left - {master.name}

    def _do_shrink(self, _: Node, members: ReplicaMembership) -> None:
        """A minority lags behind; two of the other replicas leave in quick succession; the master
        dies.
        """
        master = self._master()
        if master is None or len(members.voters) < 5:
            return
        others = [
            name
            for name in self._world.random.sample(members.voters, len(members.voters))
            if name != master.name
        ]
        for name in others[:2]:
            self._network.cut.add((master.name, name))
        self._world.after(1_500, self._operate, "leave", others[2])
        self._world.after(
            1_500 + self._world.random.randint(60, 400), self._operate, "leave", others[3]
        )
        self._world.after(2_200, self._network.heal)
        self._world.after(2_200, self._do_kill, master, members)

    def has_become_master(self, node: Node) -> None:
        """A replica leads now."""
        if self._simulation.is_calm:
            return
        random = self._world.random
        if self._plan.late:
            self._network.echo(node.name)
        if self._usurped and self._usurped != node.name:
            (self._return if random.random() < 0.4 else self._restore)(node)
        elif self._returning == node.name:
            self._leave_one(node)
        elif random.random() < self._plan.regicide:
            self._faults["new master struck"] += 1
            strikes = (
                self._do_kill,
                self._isolate_now,
                self._isolate_now,
                self._do_isolate_out,
                self._do_pause,
            )
            self._soon(random.choice(strikes), node, self._simulation.membership)

    def has_committed(self, node: Node) -> None:
        """A master has committed something."""
        if self._usurper and self._usurper != node.name:
            self._usurper = ""
            self._world.after(0, self._do_kill, node, self._simulation.membership)
            self._world.after(0, self._network.heal)
        if (
            self._plan.regicide
            and self._world.random.random() < self._plan.regicide / 30
            and not self._simulation.is_calm
        ):
            self._faults["master struck as it committed"] += 1
            self._world.after(0, self._do_kill, node, self._simulation.membership)

    def _isolate_now(self, node: Node, _: ReplicaMembership) -> None:
        self._network.isolate(node.name)
        self._network.tell_of_loss(node.name)
        self._world.after(self._world.random.randint(500, 3_500), self._network.heal)

    def _return(self, _: Node) -> None:
        """The old master follows the new one, without the replicas that were with it, and soon
        leads again: late messages reach it then.
        """
        old, self._usurped = self._nodes[self._usurped], ""
        self._returning = old.name
        self.etcd_cut.discard(old.name)
        self._network.heal()
        for name in self._friends:
            self._network.isolate(name)
        self._world.after(
            self._world.random.randint(300, 900), self._do_provoke, old, self._simulation.membership
        )
        self._later(self._network.heal)

    def _leave_one(self, node: Node) -> None:
        """Only one of the replicas that promised hears the master that returned."""
        self._returning = ""
        others = [
            name
            for name in self._simulation.membership.voters
            if name != node.name and name not in self._friends
        ]
        if others:
            kept = self._world.random.choice(others)
            self._network.cut |= {
                (node.name, name) for name in self._nodes if name not in (node.name, kept)
            }
            self._world.after(400, self._network.heal)

    def _restore(self, node: Node) -> None:
        """The old master is back, the new one is cut off before it can say a word, and some that
        promised are killed.

        Should the old one then lead again, it is killed when it first commits, and the other one is
        back (Raft, figure 8).
        """
        old, self._usurped = self._usurped, ""
        self._usurper = node.name
        self.etcd_cut.discard(old)
        self._network.heal()
        self._network.isolate(node.name)
        random, members = self._world.random, self._simulation.membership
        for name in members.voters:
            if name not in (old, node.name) and random.random() < 0.5:
                self._world.after(random.randint(0, 20), self._nodes[name].kill)
                if self._nodes[name].disk.is_full:
                    self._world.after(20, self._nodes[name].disk.empty)
                if random.random() < 0.3 and self._may_lose(name, members):
                    self._world.after(20, self._wipe, self._nodes[name])
                self._world.after(random.randint(21, 200), self._nodes[name].start)
        self._later(self._network.heal)
