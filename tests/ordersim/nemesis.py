"""Draws and makes the faults, and the operators' changes. Each `_do_KIND` is one of FAULTS, each
`_make_KIND` one of CHANGES.

The nemesis heals all cuts and starts killed processes again a little later; faults overlap.

The plan of a seed's run: it draws its own probabilities, some of them zero, so that rare faults
happen together (swarm testing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from qmq_coordination.broker_groups import group_key
from qmq_coordination.ordered_records import MEMBERS

from ordersim.checks import version_at
from ordersim.clients import ConsumerProcess, ProducerProcess
from ordersim.loop import Process
from ordersim.servers import Metaserver, Replica
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

if TYPE_CHECKING:
    from ordersim.run import Simulation
    from ordersim.servers import BrokerGroup

FAULTS = (
    "kill_master",
    "pause_master",
    "failover",
    "isolate_master",
    "isolate_group",
    "isolate_group_long",
    "hide_group",
    "stall_group",
    "silence_group",
    "handover",
    "kill_broker_process",
    "disk_full",
    "etcd_cut_one",
    "etcd_cut_all",
    "lease_end",
    "kill_metaserver",
    "pause_metaserver",
    "isolate_metaserver",
    "cut_connections",
    "isolate_client",
    "kill_producer",
    "pause_producer",
    "kill_consumer",
    "pause_consumer",
    "leave_consumer",
    "join_consumer",
    "pause_consumer_long",
    "flip_gate",
    "new_group",
    "unpark",
)

OBSESSIONS = (
    ("isolate_group_long",),
    ("isolate_group_long", "cut_connections"),
    ("hide_group",),
    ("stall_group", "cut_connections", "pause_master"),
    ("failover", "pause_consumer_long"),
    ("kill_master", "etcd_cut_one"),
    ("pause_consumer_long",),
    ("kill_metaserver",),
    ("disk_full",),
    ("silence_group",),
)
"""Seeds that have little else."""

CHANGES = ("split", "merge", "move", "split_many", "merge_many", "drain")


HOLDS = 0.2
"""The fraction of plans in which connections are held."""
PARKS = 0.15
"""The fraction of plans in which many keys are parked, and given back."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Probabilities per message, request or step; mean times in milliseconds."""

    rounds: int = 2
    logical_partitions: int = 16
    partitions: int = 2
    broker_groups: int = 2
    metaservers: int = 2
    producers: int = 2
    keys: int = 5
    """Messages of each producer."""
    consumers: int = 2
    """Initial consumers of each group."""
    groups: tuple[str, ...] = ("g",)
    is_lease: bool = True
    unknown: str = "resend"
    delivery_s: float = 600.0
    on_failure: str = "block"
    gate: str = ""
    """The lease that consumers request."""
    send_every_ms: int = 400
    handler_ms: int = 40
    handler_fails: float = 0.0
    prefetch: int = 20
    concurrency: int = 4
    slow: float = 0.0
    slow_ms: int = 100
    loss: float = 0.0
    """The timeout of calls."""
    etcd_loss: float = 0.0
    etcd_late: float = 0.0
    arrow_kill: float = 0.0
    arrow_stall: float = 0.0
    aim: float = 0.0
    """How often a step of a change is struck at its weak moment."""
    fault_every_ms: int = 4_000
    change_every_ms: int = 6_000
    hold_every_ms: int = 0
    """How often connections between producers and a broker group are held; 0: never."""
    give_back_every_ms: int = 0
    """How often an operator replays or skips a parked key; 0: only as a fault. Then everything is
    given back in the end.
    """
    parked_bytes_max: int = 8 << 20
    faults: tuple[str, ...] = ()
    changes: tuple[str, ...] = CHANGES


def draw(random: Random) -> Plan:
    """A different plan for each seed."""
    is_obsessed = random.random() < 0.4
    faults = (
        random.choice(OBSESSIONS) if is_obsessed else random.sample(FAULTS, random.randint(4, 14))
    )
    return Plan(
        partitions=random.choice((1, 2, 3)),
        broker_groups=random.choice((2, 2, 3)),
        metaservers=random.choice((2, 2, 3)),
        producers=random.choice((1, 2, 2)),
        keys=random.choice((2, 5, 8)),
        consumers=random.choice((1, 2, 3)),
        groups=random.choice((("g",), ("g", "h"))),
        is_lease=random.random() < 0.75,
        unknown=random.choice(("resend", "resend", "resend", "fail")),
        delivery_s=random.choice((600.0, 600.0, 12.0)),
        gate=random.choice(("", "", "strict")),
        on_failure=random.choice(("block", "block", "park")),
        send_every_ms=random.choice((300, 700, 2_000)),
        handler_ms=random.choice((5, 40, 200)),
        handler_fails=random.choice((0.0, 0.0, 0.02, 0.1)),
        prefetch=random.choice((1, 6, 40)),
        concurrency=random.choice((1, 4, 16)),
        slow=random.choice((0.0, 0.0, 0.02, 0.2)),
        slow_ms=random.choice((50, 300, 2_000)),
        loss=random.choice((0.0, 0.0, 0.02, 0.15)),
        etcd_loss=random.choice((0.0, 0.0, 0.02, 0.1)),
        etcd_late=random.choice((0.0, 0.0, 0.03)),
        arrow_kill=random.choice((0.0, 0.0, 0.05, 0.2)),
        arrow_stall=random.choice((0.0, 0.0, 0.1, 0.3)),
        aim=random.choice((0.0, 0.0, 0.3, 0.7)),
        fault_every_ms=random.choice(
            (3_000, 6_000, 12_000) if is_obsessed else (1_500, 3_000, 6_000)
        ),
        change_every_ms=random.choice((2_000, 4_000, 10_000)),
        faults=tuple(sorted(faults)),
        changes=tuple(sorted(random.sample(CHANGES, random.randint(2, len(CHANGES))))),
    )


def with_holds(plan: Plan, random: Random) -> Plan:
    """Some plans hold connections for longer than a producer waits. They are drawn from a separate
    `random`, so that the other parts of the plan do not change.
    """
    if random.random() >= HOLDS:
        return plan
    return replace(
        plan,
        hold_every_ms=random.choice((4_000, 8_000)),
        delivery_s=random.choice((3.0, 8.0)),
        unknown=random.choice(("fail", "resend")),
        send_every_ms=300,
    )


def with_parks(plan: Plan, random: Random) -> Plan:
    """In some plans handlers fail often, many keys are parked and given back, and there may be
    little room. Drawn as in `with_holds`.
    """
    if random.random() >= PARKS:
        return plan
    return replace(
        plan,
        on_failure="park",
        keys=random.choice((2, 5)),
        send_every_ms=random.choice((300, 700)),
        handler_ms=random.choice((5, 40)),
        handler_fails=random.choice((0.1, 0.2, 0.4)),
        give_back_every_ms=random.choice((1_000, 3_000, 8_000)),
        parked_bytes_max=random.choice((300, 1_000, plan.parked_bytes_max)),
    )


_P = TypeVar("_P", bound=Process)


class Nemesis:
    """See the module."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._plan = simulation.plan
        self._network = simulation.network
        self._faults = simulation.faults
        self._random = simulation.world.random
        self.etcd_cut: dict[str, None] = {}
        """Processes that cannot reach it."""

    # --- when -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Inject faults until `calm`."""
        round_number = self._simulation.round
        self._world.after(self._random.randint(500, 3_000), self._fault, round_number)
        self._world.after(self._random.randint(500, 3_000), self._change, round_number)
        if self._plan.hold_every_ms:
            self._world.after(self._random.randint(500, 3_000), self._hold, round_number)
        if self._plan.give_back_every_ms:
            self._world.after(self._plan.give_back_every_ms, self._give_one_back, round_number)

    def _is_over(self, round_number: int) -> bool:
        return self._simulation.is_calm or self._simulation.round != round_number

    def _fault(self, round_number: int) -> None:
        if not self._is_over(round_number) and self._plan.faults:
            self.strike(self._random.choice(self._plan.faults))
            self._world.after(
                1 + int(self._random.expovariate(1 / self._plan.fault_every_ms)),
                self._fault,
                round_number,
            )

    def _change(self, round_number: int) -> None:
        if not self._is_over(round_number):
            for _ in range(self._random.choice((1, 1, 1, 2))):
                self.change(self._random.choice(self._plan.changes))
            self._world.after(
                1 + int(self._random.expovariate(1 / self._plan.change_every_ms)),
                self._change,
                round_number,
            )

    def _hold(self, round_number: int) -> None:
        """Hold the connections between producers and a group without closing them; held data
        arrives when the hold ends.
        """
        if not self._is_over(round_number):
            self._faults["hold_connections"] += 1
            until_ms = self._random.randint(2_000, 14_000)
            for name in self._group().replicas:
                self._network.held[name] = None
                self._world.after(until_ms, self._let_go, name)
            self._world.after(until_ms + self._plan.hold_every_ms, self._hold, round_number)

    def _let_go(self, name: str) -> None:
        self._network.let_go(name, lambda: self._random.choice((0, self._random.randint(0, 3_000))))

    def strike(self, kind: str) -> None:
        """One fault."""
        self._faults[kind] += 1
        self._simulation.tell("", f"FAULT {kind}")
        getattr(self, f"_do_{kind}")()

    def end(self) -> None:
        """Heal everything."""
        self.etcd_cut.clear()
        for name in [*self._network.cut, *self._network.hidden, *self._network.silent]:
            self._network.heal(name)
        for name in list(self._network.held):
            self._let_go(name)
        for group in self._simulation.groups.values():
            group.has_majority = True
            for replica in group.processes():
                replica.disk.is_full = False
                replica.resume()
            group.catch_up()
        for process in list(self._network.processes.values()):
            process.resume()

    # --- weak moments -----------------------------------------------------------------------------

    def aims_at(self, step: str) -> int:
        """Pause a metaserver for this many milliseconds before it takes a step of a change."""
        if self._random.random() >= self._plan.aim:
            return 0
        self._faults[f"struck {step}"] += 1
        if step == "before fence":  # the group comes back just now, and elects
            for name in [*self._network.cut, *self._network.hidden]:
                self._world.after(self._random.randint(0, 2_000), self._network.heal, name)
            return self._random.choice((0, 3_000, 6_000))
        if step == "before seal" and self._random.random() < 0.7:
            self._write_without_answer(self._group())
        elif step == "before seal":
            self._answer_without_hearer(self._group())
        return 0

    def _write_without_answer(self, group: BrokerGroup) -> None:
        """The group writes the requests in flight, and does not commit them for a while."""
        group.has_majority = False
        self._world.after(self._random.randint(300, 1_500), self._cut_all)
        after_ms = self._random.randint(600, 3_000)
        self._world.after(after_ms, self._give_majority, group)
        # it commits, and seals; but who asks about what was on its way gets no answer
        if self._random.random() < 0.5:
            self._world.after(
                after_ms + self._random.randint(20, 400), self._pause_master_of, group
            )

    def _answer_without_hearer(self, group: BrokerGroup) -> None:
        """The group stores or refuses the many messages on their way; producers hear of the next
        route before they hear of that.
        """
        self._silence(group, self._random.randint(2_000, 6_000))
        for process in list(self._network.processes.values()):
            if isinstance(process, ProducerProcess) and process.is_up:
                process.send_now(self._random.randint(4, 12))

    def _silence(self, group: BrokerGroup, ms: int) -> None:
        for name in group.replicas:
            self._network.silent[name] = None
            self._world.after(ms, self._network.heal, name)

    def _cut_all(self) -> None:
        for end in list(self._network.connections):
            end.break_off(20)

    def _pause_master_of(self, group: BrokerGroup) -> None:
        master = group.master()
        if master is not None and not self._simulation.is_calm:
            master.pause(3_000)

    # --- helpers ----------------------------------------------------------------------------------

    def _later(self, most_ms: int, act: Callable[..., object], *args: Any) -> None:
        self._world.after(self._random.randint(200, most_ms), act, *args)

    def start_later(self, name: str) -> None:
        """A process died, and is started again."""
        self._world.after(self._random.randint(100, 4_000), self._simulation.start, name)

    def _group(self) -> BrokerGroup:
        return self._random.choice(list(self._simulation.groups.values()))

    def _any(self, kind: type[_P]) -> _P | None:
        found = [
            each
            for each in self._network.processes.values()
            if isinstance(each, kind) and each.is_up
        ]
        return self._random.choice(found) if found else None

    def _isolate(self, names: Sequence[str], most_ms: int, *, within_ms: int | None = None) -> None:
        """Cut off; the ends of connections notice soon, or late."""
        ms = self._random.choice((50, 2_000, 12_000)) if within_ms is None else within_ms
        until = self._random.randint(300, most_ms)
        for name in names:
            self._network.isolate(name, ms)
            self._world.after(until, self._network.heal, name)

    # --- broker groups ----------------------------------------------------------------------------

    def _do_kill_master(self) -> None:
        master = self._group().master()
        if master is not None:
            master.kill()

    def _do_kill_broker_process(self) -> None:
        """The process may be a zombie, or about to become master."""
        processes = self._group().processes()
        if processes:
            self._random.choice(processes).kill()

    def _do_pause_master(self) -> None:
        """Stopped; sometimes another one is elected meanwhile."""
        group = self._group()
        master = group.master()
        if master is not None:
            master.pause(self._random.choice((300, 3_000, 15_000)))
            if self._random.random() < 0.5:
                self._world.after(500, group.elect)

    def _do_failover(self) -> None:
        """Another one wins, and the old one does not know."""
        self._group().elect()

    def _do_isolate_master(self) -> None:
        group = self._group()
        master = group.master()
        if master is not None:
            self._isolate([master.name], 15_000)
            if self._random.random() < 0.7:
                self._world.after(self._random.randint(500, 3_000), group.elect)

    def _do_isolate_group(self) -> None:
        self._isolate(self._group().replicas, 4_000)

    def _do_isolate_group_long(self) -> None:
        """For longer than the lease, so the group may be fenced."""
        group = self._group()
        until_ms = self._random.randint(7_000, 25_000)
        if (
            self._random.random() < 0.6
            # what is written just before is not answered, and may be committed when the group is
            # back
        ):
            group.has_majority = False
            self._world.after(until_ms + self._random.randint(0, 2_000), self._give_majority, group)
        self._world.after(
            self._random.randint(0, 1_500), self._isolate_until, group, self._world.now + until_ms
        )
        if self._random.random() < 0.7:
            self.change("leave", group)

    def _isolate_until(self, group: BrokerGroup, until_ms: int) -> None:
        if not self._simulation.is_calm:
            ms = self._random.choice((50, 2_000, 12_000))
            for name in group.replicas:
                self._network.isolate(name, ms)
                self._world.after(max(until_ms - self._world.now, 0), self._network.heal, name)

    def _do_hide_group(self) -> None:
        """The group is unreachable for etcd and metaservers, but not for clients, for longer than
        its lease.
        """
        group = self._group()
        until_ms = self._random.randint(6_000, 20_000)
        for name in group.replicas:
            self._network.hidden[name] = None
            self._world.after(until_ms, self._network.heal, name)
        self.change("leave", group)

    def _do_silence_group(self) -> None:
        """Producers get no answers from the group. It stores what they sent, and then the partition
        is closed: producers must not count those messages as lost.
        """
        group = self._group()
        self._silence(group, self._random.randint(4_000, 12_000))
        self._later(1_500, self.change, "leave", group)

    def _do_stall_group(self) -> None:
        """The group has no majority for a while: entries that are written wait."""
        group = self._group()
        group.has_majority = False
        self._later(8_000, self._give_majority, group)
        if self._random.random() < 0.3:
            self._later(3_000, self._kill_master_of, group)

    def _kill_master_of(self, group: BrokerGroup) -> None:
        master = group.master()
        if master is not None and not self._simulation.is_calm:
            master.kill()

    def _give_majority(self, group: BrokerGroup) -> None:
        group.has_majority = True
        group.catch_up()

    def _do_handover(self) -> None:
        """The mastership is handed over: nothing new is begun meanwhile."""
        group = self._group()
        master = group.master()
        if master is not None and master.broker.is_serving and not master.loop.is_paused:
            master.broker.pause()
            group.elect()
            self._world.after(2_000, self._resume, master)

    def _resume(self, master: Replica) -> None:
        if master.is_up and not master.is_deposed and master.broker.is_serving:
            master.loop.enter(master.broker.resume)

    def _do_disk_full(self) -> None:
        """The disk is full for a while, or repeatedly for a moment, so that one batch is refused
        and the next one is stored.
        """
        master = self._group().master()
        if master is not None:
            is_brief = self._random.random() < 0.6
            for turn in range(150 if is_brief else 1):
                at_ms = turn * 12 + self._random.randint(0, 8)
                self._world.after(
                    at_ms, self._fill, master, 3 if is_brief else self._random.randint(200, 1_500)
                )

    def _fill(self, master: Replica, ms: int) -> None:
        master.disk.is_full = True
        master.store.space.forget()
        self._world.after(ms, setattr, master.disk, "is_full", False)

    # --- etcd -------------------------------------------------------------------------------------

    def _do_etcd_cut_one(self) -> None:
        group = self._group()
        master = group.master()
        name = (
            master.name
            if master is not None and self._random.random() < 0.6
            else self._random.choice(self._simulation.metaserver_names)
        )
        self.etcd_cut[name] = None
        self._later(15_000, self.etcd_cut.pop, name, None)

    def _do_etcd_cut_all(self) -> None:
        self._isolate(["etcd"], 12_000)

    def _do_lease_end(self) -> None:
        """Consumers' leases end early: their metaservers did not keep them."""
        etcd = self._simulation.etcd
        leases = [
            item.lease
            for key, item in etcd.items.items()
            if key.startswith(MEMBERS) and item.lease in etcd.leases
        ]
        for lease in dict.fromkeys(leases):
            etcd.end(lease)

    # --- metaservers ------------------------------------------------------------------------------

    def _do_kill_metaserver(self) -> None:
        found = self._any(Metaserver)
        if found is not None:
            found.kill()
            self.start_later(found.name)

    def _do_pause_metaserver(self) -> None:
        found = self._any(Metaserver)
        if found is not None:
            found.pause(self._random.randint(300, 12_000))

    def _do_isolate_metaserver(self) -> None:
        self._isolate([self._random.choice(self._simulation.metaserver_names)], 12_000)

    # --- clients ----------------------------------------------------------------------------------

    def _do_cut_connections(self) -> None:
        for end in list(self._network.connections):
            if self._random.random() < 0.25:
                end.break_off(self._random.choice((20, 1_000)))

    def _do_isolate_client(self) -> None:
        found = self._any(ConsumerProcess if self._random.random() < 0.6 else ProducerProcess)  # type: ignore[type-abstract]
        if found is not None:
            self._isolate([found.name], 8_000)

    def _do_kill_producer(self) -> None:
        found = self._any(ProducerProcess)
        if found is not None:
            found.kill()
            self.start_later(found.name)

    def _do_pause_producer(self) -> None:
        found = self._any(ProducerProcess)
        if found is not None:
            found.pause(self._random.randint(300, 15_000))

    def _do_kill_consumer(self) -> None:
        found = self._any(ConsumerProcess)
        if found is not None:
            found.kill()
            self.start_later(found.name)

    def _do_pause_consumer(self) -> None:
        found = self._any(ConsumerProcess)
        if found is not None:
            found.pause(self._random.randint(300, 3_500))

    def _do_pause_consumer_long(self) -> None:
        """For longer than the lease: the consumer wakes up as a zombie."""
        found = self._any(ConsumerProcess)
        if found is not None:
            found.pause(self._random.randint(3_000, 15_000))

    def _do_leave_consumer(self) -> None:
        found = self._any(ConsumerProcess)
        if found is not None:
            found.leave()
            self._world.after(
                self._random.randint(3_000, 9_000), self._simulation.start, found.name
            )

    def _do_join_consumer(self) -> None:
        self._simulation.join(self._random.choice(list(self._simulation.consumer_groups)))

    def _do_flip_gate(self) -> None:
        """A consumer joins that asks for the other gate."""
        group = self._random.choice(list(self._simulation.consumer_groups))
        self._simulation.join(group, gate=self._random.choice(("strict", "lanes")))

    def _do_new_group(self) -> None:
        simulation = self._simulation
        if len(simulation.consumer_groups) < 4:
            name = f"n{len(simulation.consumer_groups)}"
            simulation.consumer_groups[name] = self._random.choice(("earliest", "latest"))
            simulation.join(name)

    def _do_unpark(self) -> None:
        """Give a parked key back."""
        ledger, operator = self._simulation.ledger, self._simulation.operator
        found = [
            (group, part.part.number, key)
            for part in ledger.parts.values()
            for group, progress in part.groups.items()
            for key, sequences in progress.parked.items()
            if sequences and self._is_read(group, part.part.number, part.messages[sequences[0]].lp)
        ]
        if found:
            group, number, key = self._random.choice(found)
            request = control.UnparkRequest(
                subject=self._simulation.subject,
                group=group,
                partition=number,
                key=key,
                replay=True,
            )
            operator.tell(f"unpark {key!r} of {group} in {number}")
            operator.loop.create_task(
                operator.ask(
                    self._random.choice(self._simulation.metaserver_names), "Unpark", request
                )
            )

    def to_give_back(self) -> list[tuple[str, bytes, int]]:
        """Group, key and the oldest partition that has parked messages of the key. Newer ones
        follow it.
        """
        found: dict[tuple[str, bytes], int] = {}
        for number, part in (
            sorted(self._simulation.ledger.parts.items()) if self._plan.give_back_every_ms else ()
        ):
            for group, progress in part.groups.items():
                for key in [key for key, sequences in progress.parked.items() if sequences]:
                    found.setdefault((group, key), number)
        return [(group, key, number) for (group, key), number in found.items()]

    def _give_one_back(self, round_number: int) -> None:
        if not self._is_over(round_number):
            found = self.to_give_back()
            if found:
                self._give_back(*self._random.choice(found), replays=self._random.random() < 0.9)
            self._world.after(
                1 + int(self._random.expovariate(1 / self._plan.give_back_every_ms)),
                self._give_one_back,
                round_number,
            )

    def give_all_back(self) -> None:
        """Replay every parked key."""
        for each in self.to_give_back():
            self._give_back(*each, replays=True)

    def _give_back(self, group: str, key: bytes, number: int, *, replays: bool) -> None:
        self._faults["replay" if replays else "skip"] += 1
        operator = self._simulation.operator
        operator.tell(f"{'replays' if replays else 'skips'} {key!r} of {group} in {number}")
        request = control.UnparkRequest(
            subject=self._simulation.subject, group=group, partition=number, key=key, replay=replays
        )
        operator.loop.create_task(
            operator.ask(self._random.choice(self._simulation.metaserver_names), "Unpark", request)
        )

    def _is_read(self, group: str, number: int, lp: int) -> bool:
        """Whether the group reads the partition still."""
        routes = self._simulation.routes
        route = routes.routes[version_at(routes.groups[group].record.frontier, lp)]
        return route.partition(number) is not None

    # --- changes ----------------------------------------------------------------------------------

    def change(self, kind: str, group: BrokerGroup | None = None) -> None:
        """Have a metaserver change the route, or two of them at once."""
        route = self._simulation.routes.routes.get(self._simulation.routes.latest)
        if route is None:
            return
        request = pb.ChangeRouteRequest(subject=self._simulation.subject, reason="simulated")
        if not getattr(self, f"_make_{kind}")(request, route, group):
            return
        operator = self._simulation.operator
        operator.tell(f"wants {kind}: {' '.join(str(request).split())[:120]}")
        self._faults[f"change: {kind}"] += 1
        for _ in range(self._random.choice((1, 1, 2))):
            operator.loop.create_task(
                operator.ask(
                    self._random.choice(self._simulation.metaserver_names), "ChangeRoute", request
                )
            )

    def _place(self) -> str:
        return self._random.choice(list(self._simulation.groups))

    def _make_split(self, request: Any, route: Any, _: Any, parts: int = 2) -> bool:
        wide = [part for part in route.partitions if part.range.width >= parts]
        if not wide or len(route.partitions) > 5:
            return False
        part = self._random.choice(wide)
        at = sorted(self._random.sample(range(part.range.first + 1, part.range.end), parts - 1))
        places = [self._place() for _ in range(parts)]
        request.split.CopyFrom(
            pb.SplitOperation(partition=part.number, at=at, broker_groups=places)
        )
        return True

    def _make_split_many(self, request: Any, route: Any, group: Any) -> bool:
        return self._make_split(request, route, group, parts=3)

    def _make_merge(self, request: Any, route: Any, _: Any, parts: int = 2) -> bool:
        if len(route.partitions) < parts:
            return False
        first = self._random.randint(0, len(route.partitions) - parts)
        numbers = [part.number for part in route.partitions[first : first + parts]]
        request.merge.CopyFrom(pb.MergeOperation(partitions=numbers, broker_group=self._place()))
        return True

    def _make_merge_many(self, request: Any, route: Any, group: Any) -> bool:
        return self._make_merge(request, route, group, parts=3)

    def _make_move(self, request: Any, route: Any, _: Any) -> bool:
        request.move.CopyFrom(
            pb.MoveOperation(
                partition=self._random.choice(route.partitions).number, broker_group=self._place()
            )
        )
        return True

    def _make_leave(self, request: Any, route: Any, group: BrokerGroup | None) -> bool:
        """Move something away from a group, which may be out of reach."""
        there = [
            part for part in route.partitions if group is not None and part.group == group.name
        ]
        others = [
            name for name in self._simulation.groups if group is not None and name != group.name
        ]
        if not there:
            return False
        request.move.CopyFrom(
            pb.MoveOperation(
                partition=self._random.choice(there).number,
                broker_group=self._random.choice(others),
            )
        )
        return True

    def _make_drain(self, request: Any, route: Any, _: Any) -> bool:
        """Drain a group: its mode, and one move after the other; and back later."""
        group = self._group()
        key = group_key(group.name, "mode")
        others = [name for name in self._simulation.groups if name != group.name]
        if any(
            self._simulation.etcd.items.get(group_key(name, "mode")) is not None for name in others
        ):
            return False
        self._simulation.set_mode(key, "read-only")
        self._later(12_000, self._simulation.set_mode, key, "read-write")
        return self._make_leave(request, route, group)
