"""Runs one seed: builds a cluster, makes faults and changes of the route for a while, then heals
all and demands progress; repeatedly.

Safety is checked at every event (checks.py). In a calm phase everything is healed. As long as work
is left (unfinished changes, undecided messages, groups that have not read everything or are not at
the latest version), it must shrink within each simulated minute.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from qmq_coordination.coordination_store import Put
from qmq_coordination.ordered_records import FENCES, latest_key, route_key
from qmq_coordination.subjects import encode_subject, subject_key
from qmq_ordering.changes import first_route
from qmq_ordering.routes import Phase
from sim.world import World

from ordersim.checks import Checks, Ledger, Routes
from ordersim.clients import ConsumerProcess, Operator, ProducerProcess
from ordersim.loop import RAISED, Network, Story, Violation, bury, own_violations
from ordersim.nemesis import Nemesis, Plan, draw, with_holds, with_parks
from ordersim.servers import BrokerGroup, Metaserver, WatchedEtcd
from ordersim.tracer import Tracer, silent
from qmq.broker.dispatch import lanes
from qmq.client.connection import connection
from qmq.errors import QmqError
from qmq.log import lane_state
from qmq.model import Fencing, Order, SubjectConfig

SUBJECT = "orders"
BOOT_MS = 4_000
ROUND_MS = 30_000
CALM_MS = 60_000
SWEEP_S = 0.5
"""How often connections look at the times of their requests; more seldom than in production, to be
faster.
"""

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a seed. `failure` is empty if no property was violated."""

    seed: int
    failure: str
    trace: int
    events: int
    stored: int
    handed: int
    again: int
    versions: int
    simulated_ms: int
    faults: dict[str, int]


class Simulation:
    """One run. `folder` is for the brokers' files."""

    checks_class: type[Checks] = Checks
    ledger_class: type[Ledger] = Ledger
    routes_class: type[Routes] = Routes

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        plan: Plan | None = None,
        story: Story | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.seed = seed
        self.folder = folder
        self.story = story
        self.tracer = tracer or silent()
        self.world = World(seed)
        self.plan = plan or self._drawn()
        self.subject = SUBJECT
        self.faults: Counter[str] = Counter()
        self.graveyard: list[asyncio.Task[Any]] = []
        self.round = 0
        self.is_calm = True
        self.is_over = False
        self._ids = 0
        self._lives: Counter[str] = Counter()
        self.network = Network(self.world, self.plan)
        self.etcd = WatchedEtcd(self.world)
        self.checks = self.checks_class(self)
        self.ledger = self.ledger_class(self)
        self.routes = self.routes_class(self, SUBJECT)
        self.etcd.on_revision = self.routes.changed
        self.metaserver_names = tuple(
            f"m{number}" for number in range(1, self.plan.metaservers + 1)
        )
        self.consumer_groups: dict[str, str] = dict.fromkeys(self.plan.groups, "earliest")
        """How each begins."""
        self._consumers: dict[str, tuple[str, str]] = {}
        """(group, gate) of each."""
        self.nemesis = Nemesis(self)
        self.groups: dict[str, BrokerGroup] = {}
        self.operator = Operator(self, "operator")

    # --- environment ------------------------------------------------------------------------------

    def _drawn(self) -> Plan:
        plan = with_holds(draw(self.world.random), random.Random(f"holds {self.seed}"))
        return with_parks(plan, random.Random(f"parks {self.seed}"))

    def new_id(self) -> str:
        """Never the same twice."""
        self._ids += 1
        return f"id{self._ids}"

    def new_producer_id(self) -> int:
        """A new producer id as a number."""
        self._ids += 1
        return self._ids << 20

    def tell(self, name: str, what: str) -> None:
        """Add a line to the story, if one is recorded."""
        if self.story is not None:
            self.story.tell(self.world.now, name, what)

    def broke(self, name: str, cause: BaseException) -> None:
        """Record an exception that was not caught."""
        if not isinstance(cause, Violation):
            Violation(f"broken: {name}: {type(cause).__name__}: {cause}").__cause__ = cause
        self.world.after(0, self._stop)

    def _stop(self) -> None:
        raise RAISED[0]

    def start_of(self, group: str) -> str:
        """The start position of a consumer group."""
        return self.consumer_groups[group]

    def set_mode(self, key: str, mode: str) -> None:
        """An operator drains a broker group, or resumes it."""
        self.etcd.txn((), [Put(key, mode.encode())])

    # --- processes --------------------------------------------------------------------------------

    def _build(self) -> None:
        plan = self.plan
        names = [chr(ord("a") + number) for number in range(plan.broker_groups)]
        fencing = Fencing.LEASE if plan.is_lease else Fencing.MAJORITY
        config = SubjectConfig(
            SUBJECT,
            groups=tuple(names),
            order=Order.STRICT,
            logical_partitions=plan.logical_partitions,
            fencing=fencing,
        )
        route = first_route(plan.logical_partitions, plan.partitions, names)
        puts = [
            Put(subject_key(SUBJECT), encode_subject(config)),
            Put(route_key(SUBJECT, 1), route.encode()),
            Put(latest_key(SUBJECT), b"1"),
        ]
        self.etcd.txn((), puts)
        self.groups.update({name: BrokerGroup(self, name) for name in names})
        for name in self.metaserver_names:
            self.start(name)
        for number in range(plan.producers):
            self.world.after(2_000, self.start, f"p{number}")
        for group in self.consumer_groups:
            for _ in range(plan.consumers):
                self.join(group)

    def start(self, name: str) -> None:
        """A metaserver, producer or consumer: its next life."""
        old = self.network.processes.get(name)
        if old is not None and old.is_up:
            return
        self._lives[name] += 1
        self.tell(name, f"starts, life {self._lives[name]}")
        if name in self.metaserver_names:
            Metaserver(self, name)
        elif name in self._consumers:
            ConsumerProcess(self, name, *self._consumers[name])
        else:
            ProducerProcess(self, name, self._lives[name])

    def join(self, group: str, gate: str = "") -> None:
        """One more consumer."""
        if len([name for name, (other, _) in self._consumers.items() if other == group]) < 5:
            name = f"r{len(self._consumers)}"
            self._consumers[name] = (group, gate or self.plan.gate)
            self.world.after(self.world.random.randint(0, 3_000), self.start, name)

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> Result:
        """Run the simulation to its end."""
        failure = ""
        try:
            self._build()
            self.world.run(BOOT_MS)
            self._rounds()
        except Violation as cause:
            failure = str(cause)
        except Exception as cause:
            failure = f"broken: {type(cause).__name__}: {cause}"
        finally:
            self._end()
        return Result(
            self.seed,
            failure,
            self.world.trace,
            self.world.events,
            len(self.checks.stored),
            self.checks.handed_count,
            self.checks.again_count,
            self.routes.latest,
            self.world.now,
            dict(self.faults),
        )

    def _rounds(self) -> None:
        for _ in range(self.plan.rounds):
            self._begin_round()
            self.world.run(self.world.now + ROUND_MS)
            self._calm_down()
        self.checks.survived()

    def _begin_round(self) -> None:
        self.round += 1
        self.is_calm = self.network.is_calm = False
        self.tell("", f"round {self.round}")
        self.nemesis.begin()

    def _heal(self) -> None:
        self.tell("", "everything is healed")
        self.is_calm = self.network.is_calm = True
        self.nemesis.end()

    def _calm_down(self) -> None:
        self._heal()
        self.world.run(self.world.now + 5_000)
        self.nemesis.end()
        self._stop_producers()
        left, since = self._left(), self.world.now
        while left:
            self.nemesis.end()
            for name in (*self.metaserver_names, *self._consumers):
                self.start(name)
            self.nemesis.give_all_back()
            self.world.run(self.world.now + 3_000)
            before, left = left, self._left()
            if left != before:
                since = self.world.now
            elif self.world.now > since + CALM_MS:
                raise Violation(
                    f"liveness: for {CALM_MS} ms without any fault nothing has come to its "
                    f"end of: {'; '.join(left)}"
                )
        self._start_producers()

    def _producers(self) -> list[ProducerProcess]:
        return [
            each
            for each in self.network.processes.values()
            if isinstance(each, ProducerProcess) and each.is_up
        ]

    def _stop_producers(self) -> None:
        for producer in self._producers():
            producer.is_stopped = True

    def _start_producers(self) -> None:
        for producer in self._producers():
            producer.is_stopped = False

    def _left(self) -> list[str]:
        """The unfinished work."""
        routes = self.routes
        found = [
            f"{each.name} waits for {each.undecided} answers"
            for each in self._producers()
            if each.undecided
        ]
        for version, change in routes.changes.items():
            if change.phase is not Phase.DONE:
                found.append(f"change {change.id} to version {version} is {change.phase.value}")
        for name, group in routes.groups.items():
            if group.record.frontier.version < routes.latest:
                found.append(
                    f"group {name} is at {group.record.frontier}, {routes.latest} is the latest"
                )
        fences = [f"the store has {key}" for key in self.etcd.items if key.startswith(FENCES)]
        parked = [
            f"group {group} has {key!r} parked in partition {number}"
            for group, key, number in self.nemesis.to_give_back()
        ]
        return found + fences + parked + self.checks.undrained()

    def _end(self) -> None:
        self.is_over = True
        for group in self.groups.values():
            for replica in group.processes():
                replica.kill()
        for process in self.network.processes.values():
            self.graveyard += process.loop.kill()
        bury(self.graveyard)


class _Errors(logging.Handler):
    """Collects failures that the product logs."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(logging.ERROR)
        self._simulation = simulation

    def emit(self, record: logging.LogRecord) -> None:
        """A QmqError is the answer to a request; any other error is a bug of the program."""
        cause = record.exc_info[1] if record.exc_info else None
        if cause is not None and not isinstance(cause, QmqError):
            self._simulation.broke(record.name, cause)


@contextmanager
def _alone(seed: int, simulation: Simulation) -> Iterator[None]:
    """Replace all sources of randomness and of the machine's state by the seed's."""
    plan = simulation.plan
    state, chance, logger = random.getstate(), random.Random(seed), logging.getLogger("qmq")
    handler, level, propagates = _Errors(simulation), logger.level, logger.propagate
    random.seed(seed)
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    running = asyncio._get_running_loop()
    try:
        with (
            patch("os.urandom", chance.randbytes),
            patch("secrets.token_hex", lambda size=8: chance.randbytes(size).hex()),
            patch.object(connection, "SWEEP_S", SWEEP_S),
            patch.object(lane_state, "PARKED_BYTES_MAX", plan.parked_bytes_max),
            patch.object(lanes, "PARKED_BYTES_MAX", plan.parked_bytes_max),
        ):
            yield
    finally:
        asyncio._set_running_loop(running)
        random.setstate(state)
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def simulate(
    seed: int,
    bug: AbstractContextManager[object] | None = None,
    *,
    plan: Plan | None = None,
    story: Story | None = None,
    tracer: Tracer | None = None,
    simulation_class: type[Simulation] = Simulation,
) -> Result:
    """One seed's result. The same seed gives the same trace, always."""
    folder = Path(
        tempfile.mkdtemp(prefix="qmq-ordersim-", dir=_MEMORY if _MEMORY.is_dir() else None)
    )
    try:
        with own_violations(), bug or nullcontext():
            simulation = simulation_class(seed, folder, plan=plan, story=story, tracer=tracer)
            with _alone(seed, simulation):
                return simulation.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
