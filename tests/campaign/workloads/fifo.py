"""fifo: RocketMQ's own client sends and receives messages of message groups through gateways.

Each client process has a gateway beside it, which dies and stands still with it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import Any, Final

from support.etcd_process import free_ports

from campaign.checkers.fifo import FifoReceive, FifoSend, all_received
from campaign.client import Job
from campaign.values import Role, Workload
from campaign.workloads.children import beside, listens
from campaign.workloads.handling import FEW, RETRY_S
from qmq.model import Order, SubjectConfig

GROUP: Final = "takers"
LOGICAL_PARTITIONS: Final = 64
PARTITIONS: Final = 2
KEYS: Final = 6
PAUSE_S: Final = 0.05
MOST: Final = 32
INVISIBLE_S: Final = 15
WAIT_S: Final = 2
REQUEST_S: Final = 10


async def _set_up(job: Job) -> None:
    config = SubjectConfig(job.subject, order=Order.STRICT, logical_partitions=LOGICAL_PARTITIONS)
    await job.client.metadata.create_subject(config, partitions=PARTITIONS)


@asynccontextmanager
async def _gateway(job: Job) -> AsyncIterator[Any]:
    """What a client of the gateway beside it needs."""
    os.environ["HOME"] = str(job.folder)  # the client writes its log there
    from rocketmq import ClientConfiguration, Credentials

    port = free_ports(1)[0]
    servers = ",".join(job.client.addresses)
    async with beside(job, "gateway", "--server", servers, "--port", str(port)):
        while not await listens(port):
            await asyncio.sleep(RETRY_S)
        yield ClientConfiguration(f"127.0.0.1:{port}", Credentials(), request_timeout=REQUEST_S)


async def _started(job: Job, make: Any) -> Any:
    """A client that has started, however often that fails; None after SIGTERM."""
    while not job.stops.is_set():
        client = make()
        try:
            await asyncio.to_thread(client.startup)
        except Exception:
            await job.pause(RETRY_S)
        else:
            return client
    return None


async def _send(job: Job) -> None:
    async with _gateway(job) as configuration:
        from rocketmq import Message, Producer

        producer = await _started(
            job, lambda: Producer(configuration, (job.subject,), None, tls_enable=False)
        )
        serials = Counter[str]()
        while await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
            key = f"{job.name}/{job.random.randrange(KEYS)}"
            serials[key] += 1
            message = Message()
            message.topic, message.message_group = job.subject, key
            message.body = f"{job.name} {serials[key]}".encode()
            begun = job.recorder.record(
                FifoSend(process=job.name, type="invoke", key=key, serial=serials[key])
            )
            try:
                await asyncio.to_thread(producer.send, message)
            except Exception:
                job.recorder.record(begun.ended("info"))
            else:
                job.recorder.record(begun.ended("ok"))
        if producer is not None:
            await asyncio.to_thread(producer.shutdown)


async def _receive(job: Job) -> None:
    async with _gateway(job) as configuration:
        from rocketmq import FilterExpression, SimpleConsumer

        consumer = await _started(
            job,
            lambda: SimpleConsumer(
                configuration,
                GROUP,
                {job.subject: FilterExpression()},
                await_duration=WAIT_S,
                tls_enable=False,
            ),
        )
        while not job.stops.is_set():
            try:
                found = await asyncio.to_thread(consumer.receive, MOST, INVISIBLE_S)
            except Exception:
                await job.pause(RETRY_S)
                continue
            for each in found or ():
                _record(job, each)
                with suppress(Exception):  # it comes again
                    await asyncio.to_thread(consumer.ack, each)
        if consumer is not None:
            await asyncio.to_thread(consumer.shutdown)


def _record(job: Job, message: Any) -> None:
    producer, serial = message.body.decode().split()
    job.recorder.record(
        FifoReceive(
            process=job.name,
            type="ok",
            producer=producer,
            key=message.message_group,
            serial=int(serial),
            attempt=message.delivery_attempt,
        )
    )


def _lacks() -> str:
    return "" if find_spec("rocketmq") else "RocketMQ's client: pip install rocketmq-python-client"


WORKLOADS = (
    Workload(
        name="fifo",
        what="RocketMQ's client sends and receives FIFO messages through gateways",
        roles=(Role(name="sender", count=2, is_sender=True), Role(name="receiver", count=2)),
        programs={"setup": _set_up, "sender": _send, "receiver": _receive},
        checkers=("fifo_comes", "fifo_order", "fifo_no_phantom"),
        groups=(GROUP,),
        gates={"fifo": 30, "received": 30},
        is_drained=all_received,
        lacks=_lacks,
        only=FEW,
    ),
)
