"""A whole run of ordered faults: a cluster, a workload, consumers as processes, changes and faults at the same time, and the verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from binlog import OutOfOrder, Source
from history import load
from history.ordered import OrderedReport
from support import needs

import qmq
from qmq.model import Order, SubjectConfig
from system.ordered_cluster import OrderedCluster, Shape, running_cluster
from system.ordered_consumer import ConsumerProcess
from system.ordered_nemesis import Changer, Nemesis, follow
from system.ordered_plan import plan
from system.ordered_recording import Item
from system.ordered_workload import BATCH, OrderedWorkload, binlog_sources, flight_sources, followed

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
    """A message that waits longer needs a reason. Generous: on a small machine everything waits for the processor now and then."""
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
    """With a binlog: of each group "the same", or what is wrong with the table that follows what it was given."""
    seconds: float

    @property
    def ok(self) -> bool:
        """No promise was broken."""
        return self.report.ok and set(self.tables.values()) <= {SAME}

    @property
    def figures(self) -> dict[str, Any]:
        """For a table."""
        found: dict[str, Any] = {"seconds under load": round(self.seconds, 1), "changes published": self.report.counts["changes"]}
        found |= {f"asked for: {kind}": count for kind, count in sorted(self.changes.items())}
        found |= {f"tries of changes that ended in {code}": count for code, count in sorted(self.refused.items())}
        found |= {f"fault: {kind}": count for kind, count in sorted(self.faults.items())}
        found |= {f"messages that failed, {what}": count for what, count in sorted(self.failures.items())}
        found |= {f"messages: {name}": count for name, count in self.report.counts.items() if name not in ("changes", "outages")}
        found |= {f"table of group {group}": text for group, text in self.tables.items()}
        return {**found, **self.report.figures, "anomalies": [str(each) for each in self.report.anomalies][:10]}


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
            found[group] = SAME if followed(load(path), changes, group) == source.dump() else "another one"
        except OutOfOrder as failure:
            found[group] = str(failure)
    return found


async def run(cluster: OrderedCluster, options: Options, folder: Path, done: Callable[[], None] = lambda: None) -> Result:
    """Make all changes and faults under load, then drain, then judge. Raises errors that prevent a verdict."""
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
        ConsumerProcess(cluster.server, subject, group, f"{group}-{at}", work.path, lease_ms=CONSUMER_LEASE_MS, gate=gate)
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
    cluster: OrderedCluster, options: Options, work: OrderedWorkload, consumers: list[ConsumerProcess], done: Callable[[], None]
) -> Result:
    coin = Random(options.seed)
    changer = Changer(work.client.metadata, work.subject, sorted(cluster.replicas), coin)

    async def progress(count: int, within_s: float, lps: Collection[int] = ()) -> None:
        await work.wait_for_acks(count, within_s=within_s, lps=lps)

    nemesis = Nemesis(
        cluster, consumers, work.recorder, changer, coin, note=work.note, progress=progress, consumer_lease_s=CONSUMER_LEASE_MS / 1000
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
    report = await work.stop(within_s=300.0, strict=strict, slow_s=options.slow_s, after_s=options.after_s)
    return Result(
        report=report,
        changes=dict(changer.done),
        refused=dict(changer.refused),
        faults=dict(nemesis.done),
        failures=work.failures,
        tables=await asyncio.to_thread(tables_of, options, work.path) if options.workload == "binlog" else {},
        seconds=seconds,
    )


async def run_in(folder: Path, options: Options, done: Callable[[], None] = lambda: None) -> Result:
    """The same with a new cluster."""
    manager = running_cluster(folder, options.shape, options.network, {"QMQ_FLUSH": options.flush}, secure=options.secure)
    cluster = await asyncio.to_thread(manager.__enter__)
    try:
        return await run(cluster, options, folder, done)
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
