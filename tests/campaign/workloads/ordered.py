"""ordered: keys whose order holds while the route changes.

Two producers with keys of their own, two groups of two consumers each, one of them with a strict
gate, and a router that splits, merges or moves partitions between two broker groups without end.
The variants differ in what the router does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from system.ordered_nemesis import Changer
from system.ordered_workload import Item, PutRecorder, RouteRecorder, consume

from campaign.checkers.ordered import all_settled, doubting
from campaign.client import Job
from campaign.values import Role, Workload
from qmq.errors import QmqError
from qmq.model import Order, SubjectConfig

GATES: Final = {"lanes": "lanes", "strict": "strict"}
"""Consumer groups and their gates; consumers 0 and 1 are of the first, 2 and 3 of the second."""
GROUPS: Final = tuple(GATES)
BROKER_GROUPS: Final = ("g1", "g2")
LOGICAL_PARTITIONS: Final = 64
KEYS: Final = 40
BATCH: Final = 10
PAUSE_S: Final = 0.06
LEASE_MS: Final = 3_000
LOOK_S: Final = 0.3
CHANGE_S: Final = (1.5, 4.0)


async def set_up(job: Job, partitions: int = 0) -> None:
    """An ordered subject, whose first route is written down."""
    config = SubjectConfig(job.subject, order=Order.STRICT, logical_partitions=LOGICAL_PARTITIONS)
    await job.client.metadata.create_subject(config, partitions=partitions)
    await RouteRecorder(job.recorder, job.client.metadata, job.subject).look()


def _items(job: Job) -> Iterator[Item]:
    for number in itertools.count():
        yield Item(f"{job.name}/{job.random.randrange(KEYS)}", b"%d" % number)


async def produce(
    job: Job, items: Iterator[Item], *, batch: int = BATCH, pause_s: float = PAUSE_S
) -> None:
    """Batches of one producer, one after another, until SIGTERM."""
    put = PutRecorder(job.recorder, job.name, job.subject)
    async with job.client.ordered_producer(
        job.subject, delivery_timeout_s=120.0, acks=job.acks
    ) as producer:
        while await job.pause(pause_s * job.random.uniform(0.5, 1.5)):
            await put.send(producer, list(itertools.islice(items, batch)))


async def _consume(job: Job) -> None:
    group = GROUPS[job.number // 2]
    await job.until_stopped(
        consume(
            job.client,
            job.recorder,
            job.subject,
            group,
            job.name,
            gate=GATES[group],
            lease_ms=LEASE_MS,
            in_bulk=job.number % 2 == 1,
        )
    )


async def route(job: Job, *kinds: str) -> None:
    """Change the route, and write down all its versions. Both end at SIGTERM, the writing last."""
    routes = RouteRecorder(job.recorder, job.client.metadata, job.subject)
    changer = Changer(job.client.metadata, job.subject, BROKER_GROUPS, job.random)

    async def change() -> None:
        while await job.pause(job.random.uniform(*CHANGE_S)):
            with suppress(TimeoutError):
                await changer.change(job.random.choice(kinds))

    async def look() -> None:
        while await job.pause(LOOK_S):
            with suppress(QmqError):
                await routes.look()

    async def both() -> None:
        await asyncio.gather(change(), look())

    await job.until_stopped(both())
    while True:
        try:
            return await routes.look()
        except QmqError:
            continue


def _workload(name: str, what: str, kinds: tuple[str, ...], only: tuple[str, ...]) -> Workload:
    return Workload(
        name=name,
        what=f"keys of two producers in order for two groups, while the router {what}",
        roles=(
            Role(name="producer", count=2, is_sender=True),
            Role(name="router", count=1),
            Role(name="consumer", count=4),
        ),
        programs={
            "setup": set_up,
            "producer": lambda job: produce(job, _items(job)),
            "consumer": _consume,
            "router": lambda job: route(job, *kinds),
        },
        checkers=(
            "ordered_no_loss",
            "ordered_no_phantom",
            "key_order",
            "replay_in_order",
            "lane_fenced",
            "ranges_in_order",
            "ordered_log",
            "ordered_stored_once",
            "writers_go_on",
        ),
        groups=GROUPS,
        strict=("strict",),
        gates={"put": 50, "deliver": 50, "settle": 20, "route": 3},
        is_drained=all_settled(GROUPS),
        only=only,
        broker_groups=len(BROKER_GROUPS),
        doubting=doubting,
    )


WORKLOADS = (
    _workload(
        "ordered-split",
        "splits partitions",
        ("split",),
        (
            *("none", "kill-master", "kill-all", "kill-meta", "kill-client"),
            *("stop-master", "stop-client", "partition-master", "partition-oneway"),
            *("partition-no-answers", "etcd-no-quorum", "power-all", "kill-master-and-kill-meta"),
        ),
    ),
    _workload(
        "ordered-merge",
        "splits and merges partitions",
        ("split", "merge", "merge"),
        (
            *("none", "kill-master", "kill-pair", "kill-meta", "kill-client", "stop-master"),
            "stop-client",
            *("partition-master", "partition-bridge", "partition-from-etcd", "etcd-kill-one"),
            *("power-master", "clock-forward-master", "restart-in-turn"),
        ),
    ),
    _workload(
        "ordered-move",
        "moves partitions between broker groups",
        ("move",),
        (
            *("none", "kill-master", "kill-meta", "stop-master"),
            *("stop-client", "partition-master", "partition-deaf", "partition-from-etcd"),
            *("partition-inside-etcd", "etcd-no-quorum-and-*", "partition-from-etcd-and-kill-one"),
            *("clock-back-master", "clock-strobe-client", "release-all", "move-meta"),
            *("swap-addresses", "power-all-flushed", "late-replica"),
        ),
    ),
)
