"""spark: a stream of Spark copies a subject into another one, exactly once.

The driver, its JVM and its tasks are beside a client, and die with it; their checkpoint stays in
the folder of the test.

    python -m campaign.workloads.spark SERVERS SOURCE TARGET CHECKPOINT        the driver
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Final

from campaign.checkers.mirrored import MirrorCopy, all_copied
from campaign.client import Job
from campaign.programs import LEASE_MS, TIMEOUT_S, queue_of, send
from campaign.values import Role, Workload
from campaign.workloads.children import beside
from campaign.workloads.handling import FEW, RETRY_S
from qmq.errors import QmqError
from qmq.model import SubjectConfig

TARGET: Final = "campaign-copy"
BATCH: Final = 5
PAUSE_S: Final = 0.1
QUICK: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A compiler and a collector of Java for short lives."""
CONF: Final = {"spark.driver.memory": "512m", "spark.ui.enabled": "false"}


async def _set_up(job: Job) -> None:
    for name in (job.subject, TARGET):
        await job.client.metadata.create_subject(SubjectConfig(name))


async def _send(job: Job) -> None:
    values = itertools.count(job.first_value)
    async with job.client.producer(
        job.subject, delivery_timeout_s=TIMEOUT_S, acks=job.acks
    ) as producer:
        while await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
            await send(job, producer, tuple(itertools.islice(values, BATCH)))


async def _copy(job: Job) -> None:
    async def copy() -> None:
        os.environ["JAVA_TOOL_OPTIONS"] = QUICK
        servers, checkpoint = ",".join(job.client.addresses), str(job.folder / "checkpoint")
        program = (sys.executable, "-m", "campaign.workloads.spark")
        words = (servers, job.subject, TARGET, checkpoint)
        while True:
            async with beside(job, *words, program=program) as driver:
                await driver.wait()

    await job.until_stopped(copy())


async def _read(job: Job) -> None:
    async def read() -> None:
        async with job.client.consumer(
            TARGET, "auditor", name=job.name, lease_ms=LEASE_MS
        ) as consumer:
            while True:
                with suppress(QmqError):
                    async for message in consumer:
                        job.recorder.record(
                            MirrorCopy(
                                process=job.name,
                                type="ok",
                                value=int(message.body),
                                queue=queue_of(TARGET, message.broker_group),
                                sequence=message.sequence,
                            )
                        )
                await job.pause(RETRY_S)

    await job.until_stopped(read())


def _lacks() -> str:
    if not find_spec("pyspark"):
        return "Spark: pip install qmq[spark]"
    return "" if os.environ.get("JAVA_HOME") or shutil.which("java") else "Spark: needs Java"


WORKLOADS = (
    Workload(
        name="spark",
        what="a stream of Spark copies a subject into another one, exactly once",
        roles=(
            Role(name="producer", count=1, is_sender=True),
            Role(name="copier", count=1),
            Role(name="reader", count=1),
        ),
        programs={"setup": _set_up, "producer": _send, "copier": _copy, "reader": _read},
        checkers=("stored_once", "copy_no_loss", "copy_once", "copy_no_phantom"),
        groups=(),
        gates={"send": 50, "copied": 50},
        is_drained=all_copied,
        lacks=_lacks,
        only=FEW,
    ),
)


def drive(servers: str, source: str, target: str, checkpoint: str) -> None:
    """Copy without end."""
    from pyspark_qmq.session import session

    stream = (
        session("campaign", master="local[1]", conf=CONF)
        .readStream.format("qmq")
        .option("qmq.servers", servers)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "5000")
        .load()
        .selectExpr("body")
    )
    query = (
        stream.writeStream.format("qmq")
        .option("qmq.servers", servers)
        .option("subject", target)
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime="1 second")
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    drive(*sys.argv[1:])
