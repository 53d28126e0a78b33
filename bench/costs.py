"""What messages, subjects and micro-batches cost:
the figures of docs/SIZING.md and docs/adr/0015.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from typing import Final

import qmq
from bench.processes import (
    BATCH,
    SUBJECT,
    Figures,
    Node,
    ReplicaSet,
    cpu_s,
    fill,
    in_loop,
    resident_mib,
    together,
)

IDLE_S: Final = 5.0
REST_S: Final = 10.0
"""Seconds after which a node has finished the work caused by creating subjects."""
AT_ONCE: Final = 200
ROWS: Final = 1_000
"""Of a micro-batch."""


# --- replication ----------------------------------------------------------------------------------


async def produce(address: str, count: int, size: int) -> tuple[float, float]:
    """(seconds from the first sent to the last acknowledged,
    seconds of this process's CPU time).
    """
    async with qmq.connect(address) as mq:
        producer = mq.producer(SUBJECT)
        await producer.send(b"x")
        bodies = [os.urandom(size) for _ in range(BATCH)]
        begin, used_s = time.monotonic(), time.process_time()
        for _ in range(count // BATCH):
            for body in bodies:
                producer.send(body)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return time.monotonic() - begin, time.process_time() - used_s


def replicated(replicas: int, count: int, size: int) -> Figures:
    """One producer sends to a group of this many replicas, with `acks=quorum` and without
    consumers: acknowledged messages a second, and microseconds of CPU time a message. All processes
    share the machine's cores, so the rate falls with all CPU time together.
    """
    group = ReplicaSet(replicas)
    try:
        pids = [group.processes[name].pid for name in group.names]
        before_s = [cpu_s(pid) for pid in pids]
        took_s, client_s = together((produce, group.address, count, size))[0]
        used_s = sorted(
            (cpu_s(pid) - before for pid, before in zip(pids, before_s, strict=True)), reverse=True
        )
    finally:
        group.stop()
    found = {
        "acknowledged/s": count / took_s,
        "client, us": 1e6 * client_s / count,
        "master, us": 1e6 * used_s[0] / count,
    }
    return found | (
        {"each slave, us": 1e6 * statistics.mean(used_s[1:]) / count} if replicas > 1 else {}
    )


# --- subjects -------------------------------------------------------------------------------------


def subjects(count: int) -> Figures:
    """Many subjects with one message each: created, listed, and read after a restart."""
    empty = Node("--no-delay")
    empty_mib = resident_mib(empty.pid)
    empty.stop()
    node = Node("--no-delay")
    made: Figures = in_loop(_make_subjects, node, count)
    node.stop(keep=True)
    begin = time.monotonic()
    again = Node("--no-delay", data=node.data)
    started_s = time.monotonic() - begin
    started_mib = resident_mib(again.pid)
    again.stop()
    return made | {
        "start, s": started_s,
        "MiB after the start": started_mib,
        "KiB a subject after the start": (started_mib - empty_mib) * 1024 / count,
    }


async def _make_subjects(node: Node, count: int) -> Figures:
    async with qmq.connect(node.address) as mq:
        begin = time.monotonic()
        for at in range(0, count, AT_ONCE):
            await asyncio.gather(
                *[
                    mq.send(f"subject-{number}", b"x")
                    for number in range(at, min(at + AT_ONCE, count))
                ]
            )
        made_s, begin = time.monotonic() - begin, time.monotonic()
        found = await mq.metadata.list_subjects()
        assert len(found) >= count, f"{len(found)} of {count} subjects are listed"
        listed_s = time.monotonic() - begin
        await asyncio.sleep(REST_S)
        before_s = cpu_s(node.pid)
        await asyncio.sleep(IDLE_S)
        return {
            "made/s": count / made_s,
            "listed, s": listed_s,
            "CPU of the idle node, %": 100 * (cpu_s(node.pid) - before_s) / IDLE_S,
            "MiB": resident_mib(node.pid),
        }


# --- micro-batches --------------------------------------------------------------------------------


def micro_batches(count: int) -> Figures:
    """The time of Spark's micro-batches of ROWS rows, without pauses between triggers, in
    milliseconds. The first ten are not counted.
    """
    from pyspark_qmq.session import session

    spark = session("qmq-bench", master="local[2]", conf={"spark.ui.enabled": "false"})
    node = Node()
    try:
        with tempfile.TemporaryDirectory(prefix="qmq-spark-") as checkpoint:
            in_loop(fill, node.address, (count + 20) * ROWS, 100)
            reader = (
                spark.readStream.format("qmq")
                .option("qmq.servers", node.address)
                .option("subscribe", SUBJECT)
            )
            rows = (
                reader.option("startingOffsets", "earliest")
                .option("maxOffsetsPerTrigger", str(ROWS))
                .load()
            )
            query = (
                rows.writeStream.format("noop")
                .option("checkpointLocation", checkpoint)
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            took_ms = [each["durationMs"] for each in query.recentProgress if each["numInputRows"]][
                10:
            ]
    finally:
        node.stop()
    names = {
        "trigger": "triggerExecution",
        "of which latestOffset": "latestOffset",
        "of which addBatch": "addBatch",
    }
    return {
        f"{said}, ms": statistics.median(each.get(name, 0) for each in took_ms)
        for said, name in names.items()
    }
