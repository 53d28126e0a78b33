"""mirrored: a mirror copies two subjects to a second cluster, and moves its groups.

The second cluster is one node. It, the mirror and the target's readers are beside one client, which
dies with all of them; the node keeps its data, the mirror its state.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from history.events import Operation
from support.etcd_process import free_ports

import qmq
from campaign.checkers.fifo import FifoReceive, FifoSend, all_received
from campaign.checkers.mirrored import MirrorCopy, TargetPlace, all_copied
from campaign.client import Job
from campaign.programs import LEASE_MS, ask, consume, queue_of, send_batches
from campaign.values import Role, Workload
from campaign.workloads.children import beside, listens
from campaign.workloads.due import note_all
from campaign.workloads.handling import FEW, RETRY_S
from qmq.errors import QmqError
from qmq.model import Order, SubjectConfig

GROUP: Final = "reader"
KEYED: Final = "campaign-keys"
LOGICAL_PARTITIONS: Final = 64
KEYS: Final = 8
BATCH: Final = 5
PAUSE_S: Final = 0.1
LOOK_S: Final = 0.5


async def _set_up(job: Job) -> None:
    await job.client.metadata.create_subject(SubjectConfig(job.subject))
    keyed = SubjectConfig(KEYED, order=Order.STRICT, logical_partitions=LOGICAL_PARTITIONS)
    await job.client.metadata.create_subject(keyed)


async def _send_keyed(job: Job) -> None:
    serials = Counter[str]()
    while await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
        key = f"{job.name}/{job.random.randrange(KEYS)}"
        serials[key] += 1
        sending = FifoSend(process=job.name, type="invoke", key=key, serial=serials[key])
        body = f"{job.name} {serials[key]}".encode()
        await ask(job, sending, partial(job.client.send, KEYED, body, key=key))


async def _mirror(job: Job) -> None:
    """The second cluster, the mirror, and what is seen in the target."""

    async def mirror() -> None:
        port = free_ports(1)[0]
        server = f"127.0.0.1:{port}"
        node = (
            *("dev", "--data", str(job.folder / "west"), "--port", str(port), "--no-delay"),
            *("--data-port", "0", "--control-port", "0", "--console", "off"),
        )
        copy = (
            *("mirror", "run", "--source-name", "east", "--target-name", "west"),
            *("--server", ",".join(job.client.addresses), "--to-server", server),
            *("--state", str(job.folder / "mirror"), "--interval", "0.5"),
            *("--subject", job.subject, "--subject", KEYED),
        )
        async with beside(job, *node):
            while not await listens(port):
                await asyncio.sleep(RETRY_S)
            async with beside(job, *copy), qmq.connect(server, state_dir=False) as west:
                await asyncio.gather(
                    _see_copies(job, west), _see_keyed(job, west), _see_places(job, west)
                )

    await job.until_stopped(mirror())


async def _see_copies(job: Job, west: qmq.Client) -> None:
    def copied(message: qmq.Message) -> Operation:
        return MirrorCopy(
            process=job.name,
            type="ok",
            value=int(message.body),
            queue=queue_of(job.subject, message.broker_group),
            sequence=message.sequence,
        )

    await note_all(job, "auditor", copied, west)


async def _see_keyed(job: Job, west: qmq.Client) -> None:
    """The subject is there, and ordered, when the mirror has made it."""
    while True:
        try:
            if await west.metadata.find_subject(KEYED) is not None:
                await _read_keyed(job, west)
        except QmqError:
            pass
        await asyncio.sleep(RETRY_S)


async def _read_keyed(job: Job, west: qmq.Client) -> None:
    async with west.ordered_consumer(
        KEYED, "auditor", name=job.name, lease_ms=LEASE_MS
    ) as consumer:
        async for message in consumer:
            producer, serial = message.body.decode().split()
            job.recorder.record(
                FifoReceive(
                    process=job.name,
                    type="ok",
                    producer=producer,
                    key=message.key or "",
                    serial=int(serial),
                    attempt=message.attempt,
                )
            )


async def _see_places(job: Job, west: qmq.Client) -> None:
    while True:
        with suppress(QmqError):
            for each in await west.metadata.describe_groups(job.subject):
                if each.group == GROUP:
                    job.recorder.record(
                        TargetPlace(
                            process=job.name,
                            type="ok",
                            group=GROUP,
                            queue=queue_of(job.subject, each.broker_group),
                            next_sequence=each.next_sequence,
                        )
                    )
        await asyncio.sleep(LOOK_S)


def _is_drained(events: Sequence[Operation]) -> bool:
    return all_copied(events) and all_received(events)


WORKLOADS = (
    Workload(
        name="mirrored",
        what="a mirror copies two subjects to a second cluster, and moves its groups",
        roles=(
            Role(name="producer", count=1, is_sender=True),
            Role(name="keyer", count=1, is_sender=True),
            Role(name="reader", count=1),
            Role(name="west", count=1),
        ),
        programs={
            "setup": _set_up,
            "producer": partial(send_batches, batch=BATCH, pause_s=PAUSE_S),
            "keyer": _send_keyed,
            "reader": partial(consume, groups=(GROUP,)),
            "west": _mirror,
        },
        checkers=(
            "no_phantom",
            "stored_once",
            "copy_no_loss",
            "copy_once",
            "copy_no_phantom",
            "mirror_not_ahead",
            "fifo_comes",
            "fifo_order",
            "fifo_no_phantom",
        ),
        groups=(GROUP,),
        gates={"send": 50, "ack": 20, "copied": 50, "received": 20, "place": 5},
        is_drained=_is_drained,
        only=FEW,
    ),
)
