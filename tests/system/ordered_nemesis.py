"""Two disturbers of an ordered workload: one changes the route, one breaks processes and networks.
`ordered_workload` has the plan.

Rules of the nemesis:
* It repairs each fault before the next one. The history has the outage from before the fault until
  the group has a serving master.
* It leaves a frozen or cut off broker group alone for longer than its master's lease, while the
  group's partitions are moved away. It waits until writers continue before it wakes the group. The
  group must have had a good share of the route, and so of the load, when it fell silent; if a
  change took that share away at the same moment, nothing was out of service, and the nemesis
  chooses a group again.

A change may conflict with one of the other disturber, or find a metaserver dead. It is then tried
again, from the route of that moment.

A whole run of ordered faults: a cluster, a workload, consumers as processes, changes and faults at
the same time, and the verdict.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

from binlog import OutOfOrder, Source
from history.events import Recorder, load
from history.ordered.checkers import OrderedReport
from history.ordered.events import Outage
from support import needs
from system.group import OrderedCluster, Shape, running_cluster
from system.ordered_workload import (
    BATCH,
    ConsumerProcess,
    Item,
    OrderedWorkload,
    Step,
    binlog_sources,
    evacuation,
    flight_sources,
    followed,
    held_by,
    is_share,
    operation,
    plan,
    worth_harming,
)

import qmq
from qmq.client.metadata.service import MetadataClient
from qmq.errors import QmqError
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

CHANGE_S = 120.0
"""A change waits for a lost group's lease, an election, and perhaps for the other one's changes."""
RETRY_S = 0.3
LEASE_S = 5.0
"""A master's lease in the coordination store (docs/OPERATIONS.md)."""
FREEZE_S = LEASE_S + 3.0
STOPPED_S = (0.5, 6.0)


class Changer:
    """Changes the route of one subject."""

    def __init__(
        self, metadata: MetadataClient, subject: str, groups: Sequence[str], coin: Random
    ) -> None:
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Tries that ended with an error, by code: conflicts with the other one's changes,
        metaservers that died.
        """
        self._metadata, self._subject, self._groups, self._coin = metadata, subject, groups, coin
        self._latest = 1

    async def change(self, kind: str) -> None:
        """One step of the plan. A drain is a move of everything that a broker group has."""
        if kind == "drain":
            await self.evacuate(self._coin.choice(list(self._groups)))
        else:
            await self._until_done(
                kind, lambda route: operation(self._coin, kind, route, self._groups)
            )
        self.done[kind] += 1

    async def route(self, version: int = 0) -> pb.OrderedRoute:
        """A version of the route; 0: the latest, and never an older one than was seen before.
        Raises TimeoutError.
        """
        async with asyncio.timeout(CHANGE_S):
            while True:
                try:
                    route = (await self._metadata.describe_route(self._subject, version)).route
                except QmqError:
                    await asyncio.sleep(RETRY_S)
                    continue
                if version or route.version >= self._latest:
                    self._latest = max(self._latest, route.version)
                    return route
                await asyncio.sleep(RETRY_S)  # from a metaserver that lags

    async def still_held(self, group: str, since: int) -> frozenset[int]:
        """The partitions that a group has held in every version of the route since then; none if
        they are too few for a useful fault.
        """
        latest = await self.route()
        routes = [latest, *[await self.route(version) for version in range(since, latest.version)]]
        held = frozenset.intersection(*[held_by(route, group) for route in routes])
        return held if is_share(held, latest, self._groups) else frozenset()

    async def evacuate(self, group: str) -> None:
        """Move partitions away from a broker group until it has none in the latest route."""

        def next_move(route: pb.OrderedRoute) -> dict[str, object] | None:
            moves = evacuation(route, group, self._groups, self._coin)
            return {"move": moves[0]} if moves else None

        while await self._until_done("drain", next_move):
            pass

    async def _until_done(
        self, reason: str, choose: Callable[[pb.OrderedRoute], dict[str, Any] | None]
    ) -> bool:
        """One change; False if there was nothing to change. Raises TimeoutError."""
        async with asyncio.timeout(CHANGE_S):
            while True:
                try:
                    route = (await self._metadata.describe_route(self._subject)).route
                    wanted = choose(route)
                    if wanted is None:
                        return False
                    await self._metadata.change_route(
                        self._subject, **wanted, from_version=route.version, reason=reason
                    )
                    self._latest = max(self._latest, route.version + 1)
                    return True
                except QmqError as failure:
                    self.refused[f"E{failure.code}"] += 1
                    await asyncio.sleep(RETRY_S)


class Victims(Protocol):
    """The cluster, as far as the nemesis needs it: see `ordered_cluster.OrderedCluster`."""

    replicas: dict[str, list[str]]
    metas: list[str]
    cluster: Any

    async def master(self, group: str, *, other_than: str = "", within_s: float = 240.0) -> str:
        """The serving master, waited for."""
        ...

    async def settled(self, group: str, *, within_s: float = 240.0) -> str:
        """The master, when all replicas are in step."""
        ...

    async def do(self, act: Callable[..., None], *names: str, **options: Any) -> None:
        """A verb of the cluster."""
        ...

    async def start(self, name: str) -> None:
        """Start a service again; it answers when this returns."""
        ...


class Progress(Protocol):
    """Waits for the writers."""

    async def __call__(self, count: int, within_s: float, lps: Collection[int] = ()) -> None:
        """Wait for this many more acknowledged messages, of these logical partitions or of any.
        Raises TimeoutError.
        """
        ...


class Nemesis:
    """Breaks, and mends."""

    def __init__(
        self,
        victims: Victims,
        consumers: Sequence[ConsumerProcess],
        recorder: Recorder,
        changer: Changer,
        coin: Random,
        *,
        note: Callable[[str], None],
        progress: Progress,
        consumer_lease_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.done: Counter[str] = Counter()
        self._victims, self._consumers, self._recorder, self._changer, self._coin = (
            victims,
            consumers,
            recorder,
            changer,
            coin,
        )
        self._note, self._progress, self._sleep = note, progress, sleep
        self._consumer_lease_s = consumer_lease_s
        self._outages = 0

    async def strike(self, kind: str) -> None:
        """One fault, from its beginning to its end."""
        act: Callable[[], Awaitable[None]] = getattr(self, f"_{kind.replace('-', '_')}")
        await act()
        self.done[kind] += 1

    async def _group(self) -> str:
        """Choose a broker group that has partitions."""
        route = await self._changer.route()
        return self._coin.choice(sorted({part.broker_group for part in route.partitions}))

    # --- brokers ----------------------------------------------------------------------------------

    async def _kill_master(self) -> None:
        await self._with_master(self._killed)

    async def _stop_master(self) -> None:
        await self._with_master(self._stopped)

    async def _with_master(self, harm: Callable[[str, str], Awaitable[None]]) -> None:
        group = await self._group()
        await harm(group, await self._victims.settled(group))

    async def _killed(self, group: str, master: str) -> None:
        victims = self._victims
        async with self._outage(group, "a kill of the master", master):
            await victims.do(victims.cluster.kill, master)
            if len(victims.replicas[group]) == 1:
                await victims.start(master)
            await victims.master(group)
        if len(victims.replicas[group]) > 1:
            await victims.start(master)

    async def _stopped(self, group: str, master: str) -> None:
        victims = self._victims
        alone = len(victims.replicas[group]) == 1
        async with self._outage(group, "a stop of the master", master):
            await victims.do(victims.cluster.pause, master)
            if alone:
                await self._sleep(FREEZE_S)
                await victims.do(victims.cluster.resume, master)
            await victims.master(group, other_than="" if alone else master)
        if not alone:
            await self._sleep(self._coin.uniform(*STOPPED_S))
            await victims.do(victims.cluster.resume, master)

    async def _kill_slave(self) -> None:
        victims, group = self._victims, await self._group()
        master = await victims.settled(group)
        slaves = [name for name in victims.replicas[group] if name != master]
        if not slaves:
            return await self._killed(group, master)
        slave = self._coin.choice(slaves)
        self._note(f"kill {slave}, a slave")
        await victims.do(victims.cluster.kill, slave)
        await self._progress(200, 240.0)
        await victims.start(slave)

    # --- whole broker groups ----------------------------------------------------------------------

    async def _freeze_group(self) -> None:
        victims = self._victims

        async def freeze(group: str) -> None:
            await victims.do(victims.cluster.pause, *victims.replicas[group])

        async def thaw(group: str) -> None:
            await victims.do(victims.cluster.resume, *victims.replicas[group])

        await self._take_away("a frozen group", freeze, thaw)

    async def _cut_group(self) -> None:
        victims = self._victims
        services = [
            name for name in victims.cluster.services if name.startswith("etcd")
        ] + victims.metas

        async def cut(group: str) -> None:
            for replica in victims.replicas[group]:
                for service in services:
                    await victims.do(victims.cluster.partition, replica, service)

        async def heal(_: str) -> None:
            await victims.do(victims.cluster.heal)

        await self._take_away("a cut off group", cut, heal)

    async def _take_away(
        self,
        kind: str,
        harm: Callable[[str], Awaitable[None]],
        mend: Callable[[str], Awaitable[None]],
    ) -> None:
        """Repeat until a group had its share from before the outage until it was unreachable:
        changes continue meanwhile.
        """
        victims, held = self._victims, frozenset[int]()
        while not held:
            group, version = await self._worthy()
            async with self._outage(group, kind, *victims.replicas[group]):
                try:
                    await harm(group)
                    held = await self._changer.still_held(group, version)
                    if held:
                        await self._leave(group, held)
                finally:
                    await mend(group)
                await victims.settled(group)

    async def _worthy(self) -> tuple[str, int]:
        """A settled group that is worth harming, and in which version of the route."""
        names = list(self._victims.replicas)
        while True:
            group = self._coin.choice(worth_harming(await self._changer.route(), names))
            await self._victims.settled(group)
            route = await self._changer.route()
            if group in worth_harming(route, names):
                return group, route.version

    async def _leave(self, group: str, held: Collection[int]) -> None:
        """Move everything away, and check that writers continue on other groups and that the
        group's lease has ended.
        """
        since_s = time.monotonic()
        if len(self._victims.replicas) > 1:
            await self._changer.evacuate(group)
            await self._progress(200, 240.0, held)
        await self._sleep(max(FREEZE_S - (time.monotonic() - since_s), 0.0))

    def _outage(self, group: str, kind: str, *names: str) -> _Outage:
        self._outages += 1
        self._note(f"{kind}: {group}, {' '.join(names)}")
        return _Outage(
            self._recorder,
            Outage(
                process="nemesis", type="invoke", broker_group=group, kind=kind, op=self._outages
            ),
        )

    # --- metaservers and consumers ----------------------------------------------------------------

    async def _kill_meta(self) -> None:
        victims, meta = self._victims, self._coin.choice(self._victims.metas)
        self._note(f"kill {meta}")
        await victims.do(victims.cluster.kill, meta)
        await self._sleep(self._coin.uniform(*STOPPED_S))
        await victims.start(meta)

    async def _kill_consumer(self) -> None:
        consumer = self._coin.choice(list(self._consumers))
        self._note(f"kill consumer {consumer.name}")
        await asyncio.to_thread(consumer.kill)
        await self._sleep(self._coin.uniform(0.0, 2.0))
        consumer.start()

    async def _stop_consumer(self) -> None:
        consumer = self._coin.choice(list(self._consumers))
        self._note(f"stop consumer {consumer.name}")
        consumer.pause()
        try:
            await self._sleep(self._consumer_lease_s * self._coin.uniform(1.2, 1.8))
        finally:
            consumer.resume()


class _Outage:
    """An outage in the history: its end is written only if the group is well again."""

    def __init__(self, recorder: Recorder, begun: Outage) -> None:
        self._recorder = recorder
        self._begun = begun

    async def __aenter__(self) -> None:
        self._begun = self._recorder.record(self._begun)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._recorder.record(self._begun.ended("ok"))


async def follow(
    steps: Sequence[Step],
    act: Callable[[str], Awaitable[None]],
    done: Callable[[], None],
    *,
    begin_s: float,
) -> None:
    """Take one step after the other, none before its time."""
    for step in steps:
        await asyncio.sleep(max(begin_s + step.at_s - time.monotonic(), 0.0))
        await act(step.kind)
        done()


LOGICAL_PARTITIONS = 1024
PRODUCERS = 2
GROUPS = {"g": "lanes", "strict": "strict"}
"""Consumer groups, and their gates."""
CONSUMER_LEASE_MS = 3_000
SAME = "the same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run."""

    changes: int = 6
    kills: int = 6
    freezes: int = 1
    seconds: float = 40.0
    seed: int = 1
    rate: float = 2_000.0
    """Messages a second, of all producers together."""
    consumers: int = 2
    """Consumers in each group."""
    workload: str = "flights"
    rows: int = 200_000
    """Rows of the binlog, at most."""
    shape: Shape = field(default_factory=Shape)
    network: str = ""
    secure: bool = False
    flush: str = "async"
    slow_s: float = 5.0
    """A message that waits longer needs a reason. Generous: on a small machine everything waits for
    the processor now and then.
    """
    after_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run."""

    report: OrderedReport
    changes: dict[str, int]
    refused: dict[str, int]
    faults: dict[str, int]
    failures: dict[str, int]
    tables: dict[str, str]
    """With a binlog: of each group "the same", or what is wrong with the table that follows what it
    was given.
    """
    seconds: float

    @property
    def ok(self) -> bool:
        """No promise was broken."""
        return self.report.ok and set(self.tables.values()) <= {SAME}

    @property
    def figures(self) -> dict[str, Any]:
        """For a table."""
        found: dict[str, Any] = {
            "seconds under load": round(self.seconds, 1),
            "changes published": self.report.counts["changes"],
        }
        found |= {f"asked for: {kind}": count for kind, count in sorted(self.changes.items())}
        found |= {
            f"tries of changes that ended in {code}": count
            for code, count in sorted(self.refused.items())
        }
        found |= {f"fault: {kind}": count for kind, count in sorted(self.faults.items())}
        found |= {
            f"messages that failed, {what}": count for what, count in sorted(self.failures.items())
        }
        found |= {
            f"messages: {name}": count
            for name, count in self.report.counts.items()
            if name not in ("changes", "outages")
        }
        found |= {f"table of group {group}": text for group, text in self.tables.items()}
        return {
            **found,
            **self.report.figures,
            "anomalies": [str(each) for each in self.report.anomalies][:10],
        }


def sources_of(options: Options) -> list[Iterator[Item]]:
    """The messages that producers send."""
    if options.workload == "flights":
        return flight_sources(PRODUCERS)
    return binlog_sources(PRODUCERS, Source(options.seed), options.rows)


def tables_of(options: Options, path: Path) -> dict[str, str]:
    """Whether each group's table is the source's, byte for byte."""
    source = Source(options.seed)
    changes, found = list(source.changes(options.rows)), dict[str, str]()
    for group in GROUPS:
        try:
            found[group] = (
                SAME if followed(load(path), changes, group) == source.dump() else "another one"
            )
        except OutOfOrder as failure:
            found[group] = str(failure)
    return found


async def run(
    cluster: OrderedCluster, options: Options, folder: Path, done: Callable[[], None] = lambda: None
) -> Result:
    """Make all changes and faults under load, then drain, then judge. Raises errors that prevent a
    verdict.
    """
    subject = f"faults.ordered.{options.seed}"
    async with qmq.connect(cluster.server) as client:
        config = SubjectConfig(subject, order=Order.STRICT, logical_partitions=LOGICAL_PARTITIONS)
        await client.metadata.create_subject(config)
    pause_s = BATCH * PRODUCERS / options.rate
    work = OrderedWorkload(
        cluster.server,
        subject,
        folder / "history.jsonl",
        sources=sources_of(options),
        consumers={},
        elsewhere=tuple(GROUPS),
        pause_s=pause_s,
    )
    consumers = [
        ConsumerProcess(
            cluster.server,
            subject,
            group,
            f"{group}-{at}",
            work.path,
            lease_ms=CONSUMER_LEASE_MS,
            gate=gate,
        )
        for group, gate in GROUPS.items()
        for at in range(options.consumers)
    ]
    try:
        return await _run(cluster, options, work, consumers, done)
    finally:
        for consumer in consumers:
            await asyncio.to_thread(consumer.stop)
        await work.close()


async def _run(
    cluster: OrderedCluster,
    options: Options,
    work: OrderedWorkload,
    consumers: list[ConsumerProcess],
    done: Callable[[], None],
) -> Result:
    coin = Random(options.seed)
    changer = Changer(work.client.metadata, work.subject, sorted(cluster.replicas), coin)

    async def progress(count: int, within_s: float, lps: Collection[int] = ()) -> None:
        await work.wait_for_acks(count, within_s=within_s, lps=lps)

    nemesis = Nemesis(
        cluster,
        consumers,
        work.recorder,
        changer,
        coin,
        note=work.note,
        progress=progress,
        consumer_lease_s=CONSUMER_LEASE_MS / 1000,
    )
    for consumer in consumers:
        consumer.start()
    await work.start()
    await work.wait_for_acks(500)
    changes, faults = plan(
        options.seed,
        changes=options.changes,
        kills=options.kills,
        freezes=options.freezes,
        seconds=options.seconds,
        can_cut=options.network != "loopback" and needs.can_use_namespaces(),
    )
    begin_s = time.monotonic()
    async with asyncio.TaskGroup() as both:
        both.create_task(follow(changes, changer.change, done, begin_s=begin_s))
        both.create_task(follow(faults, nemesis.strike, done, begin_s=begin_s))
    for group in cluster.replicas:
        await cluster.settled(group)
    if options.workload == "flights":
        await work.wait_for_acks(500)
    else:
        await work.wait_for_end()
    seconds = time.monotonic() - begin_s
    strict = [group for group, gate in GROUPS.items() if gate == "strict"]
    report = await work.stop(
        within_s=300.0, strict=strict, slow_s=options.slow_s, after_s=options.after_s
    )
    return Result(
        report=report,
        changes=dict(changer.done),
        refused=dict(changer.refused),
        faults=dict(nemesis.done),
        failures=work.failures,
        tables=await asyncio.to_thread(tables_of, options, work.path)
        if options.workload == "binlog"
        else {},
        seconds=seconds,
    )


async def run_in(folder: Path, options: Options, done: Callable[[], None] = lambda: None) -> Result:
    """The same with a new cluster."""
    manager = running_cluster(
        folder, options.shape, options.network, {"QMQ_FLUSH": options.flush}, secure=options.secure
    )
    cluster = await asyncio.to_thread(manager.__enter__)
    try:
        return await run(cluster, options, folder, done)
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
