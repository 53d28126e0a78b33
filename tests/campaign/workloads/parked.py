"""parked, parked-routes: an ordered consumer whose handler fails for some messages; their keys are
parked, an operator gives them back. In the second one keys move on with the route while they are
parked: a message that is parked counts as done for its partition, so `ranges_in_order` says nothing
here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Final

from history.ordered.events import Settle
from system.ordered_workload import DeliveryRecorder, Item, parse

import qmq
from campaign.checkers.ordered import all_settled
from campaign.checkers.parked import Refuse, Unpark
from campaign.client import Job
from campaign.values import Role, Workload
from campaign.workloads.handling import FEW, RETRY_S, until_stopped
from campaign.workloads.ordered import BROKER_GROUPS, produce, route, set_up
from qmq.errors import QmqError

GROUP: Final = "careful"
PARTITIONS: Final = 2
KEYS: Final = 30
BATCH: Final = 5
PAUSE_S: Final = 0.08
LEASE_MS: Final = 3_000
ATTEMPTS_MAX: Final = 2
RETRY_DELAYS_S: Final = (0.1,)
POISON: Final = b"poison"
POISONED: Final = 0.03
"""The share of messages that a handler refuses, each time by a coin."""
REJECTED: Final = 0.3
"""The share of refusals that park the key at once."""
CONCURRENCY: Final = 16
UNPARK_S: Final = (0.5, 2.0)


def _items(job: Job) -> Iterator[Item]:
    for number in itertools.count():
        is_poison = job.random.random() < POISONED
        key = f"{job.name}/{job.random.randrange(KEYS)}"
        yield Item(key, POISON if is_poison else b"%d" % number)


async def _consume(job: Job) -> None:
    async def consume() -> None:
        async with job.client.ordered_consumer(
            job.subject,
            GROUP,
            name=job.name,
            ack="explicit",
            on_failure="park",
            attempts_max=ATTEMPTS_MAX,
            retry_delays_s=RETRY_DELAYS_S,
            lease_ms=LEASE_MS,
        ) as consumer:
            log = DeliveryRecorder(job.recorder, f"{job.name}.{consumer.incarnation}", GROUP)

            async def handle(message: qmq.OrderedMessage) -> None:
                log.delivered(message)
                if message.body.endswith(POISON) and job.random.random() < 0.5:
                    _refuse(job, f"{job.name}.{consumer.incarnation}", message)
                else:
                    await log.ack(message)

            try:
                await consumer.run(handle, concurrency=CONCURRENCY)
            finally:
                log.flush()

    await until_stopped(job, consume)


def _refuse(job: Job, process: str, message: qmq.OrderedMessage) -> None:
    producer, serial, _ = parse(message.body)
    how = "reject" if job.random.random() < REJECTED else "fail"
    job.recorder.record(
        Settle(
            process=process,
            type="fail",
            group=GROUP,
            partition=message.partition,
            token=message.token,
            sequences=(message.sequence,),
        )
    )
    job.recorder.record(
        Refuse(
            process=process,
            type="info",
            group=GROUP,
            partition=message.partition,
            token=message.token,
            key=message.key or "",
            producer=producer,
            serial=serial,
            attempt=message.attempt,
            how=how,
        )
    )
    if how == "reject":
        message.reject("refused for good")
    else:
        message.fail(error="refused")


async def _unpark(job: Job) -> None:
    async def unpark() -> None:
        while await job.pause(job.random.uniform(*UNPARK_S)):
            for found in await job.client.metadata.parked(job.subject, GROUP):
                begun = job.recorder.record(
                    Unpark(
                        process=job.name,
                        type="invoke",
                        group=GROUP,
                        partition=found.partition,
                        key=found.key.decode(),
                    )
                )
                try:
                    count = await job.client.metadata.unpark(
                        job.subject, GROUP, found.partition, found.key, replay=True
                    )
                except QmqError:
                    job.recorder.record(begun.ended("info"))
                    await job.pause(RETRY_S)
                else:
                    job.recorder.record(begun.ended("ok", count=count))

    await until_stopped(job, unpark)


def _workload(name: str, what: str, kinds: tuple[str, ...], only: Collection[str]) -> Workload:
    """`kinds` are the changes of the route that a router makes."""
    routers = (Role(name="router", count=1),) if kinds else ()
    return Workload(
        name=name,
        what=f"handlers refuse some messages, whose keys are parked and given back{what}",
        roles=(
            Role(name="producer", count=2, is_sender=True),
            Role(name="consumer", count=2),
            Role(name="operator", count=1),
            *routers,
        ),
        programs={
            "setup": lambda job: set_up(job, PARTITIONS),
            "producer": lambda job: produce(job, _items(job), batch=BATCH, pause_s=PAUSE_S),
            "consumer": _consume,
            "operator": _unpark,
            "router": lambda job: route(job, *kinds),
        },
        checkers=(
            "ordered_no_loss",
            "ordered_no_phantom",
            "key_order",
            "replay_in_order",
            "lane_fenced",
            "ordered_log",
            "ordered_stored_once",
            "parked_waits",
        ),
        groups=(GROUP,),
        gates={
            **{"put": 50, "deliver": 50, "settle": 20, "unpark": 3},
            **({"route": 3} if kinds else {}),
        },
        is_drained=all_settled((GROUP,)),
        broker_groups=len(BROKER_GROUPS) if kinds else 1,
        only=only,
    )


WORKLOADS = (
    _workload("parked", "", (), FEW | {"stop-client"}),
    _workload(
        "parked-routes",
        ", while the router splits, merges and moves partitions",
        ("split", "merge", "move"),
        FEW | {"kill-pair", "kill-meta", "stop-client", "partition-no-answers", "etcd-no-quorum"},
    ),
)
