"""How many files a message passes, and so how many a reader must open. The test has an upper limit, so that the number grows only on
purpose.

A module counts if one of its functions runs while the message is on its way, and not also while the cluster is idle (timers).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType

import qmq
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb
from qmq.testing import TestCluster

ROOT = Path(qmq.__file__).resolve().parents[1]
PACKAGES = tuple(str(ROOT / each) + "/" for each in ("qmq", "coordination", "ordering", "replication"))
TESTING = str(ROOT / "qmq" / "testing") + "/"
IDLE_S = 1.2
"""Longer than the periods of heartbeats, leases and ticks in a test cluster."""

Function = tuple[str, str]
"""(file, qualified name)."""


@contextmanager
def functions_run() -> Iterator[set[Function]]:
    """The functions of ours that are called in this thread."""
    found: set[Function] = set()

    def called(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(PACKAGES) and not code.co_filename.startswith(TESTING)
        if is_ours and code.co_name != "<module>":
            found.add((code.co_filename, code.co_qualname))

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


async def idle() -> set[Function]:
    await asyncio.sleep(0.3)
    with functions_run() as found:
        await asyncio.sleep(IDLE_S)
    return found


def modules(run: set[Function], timers: set[Function]) -> list[str]:
    return sorted({file.removeprefix(str(ROOT) + "/") for file, _ in run - timers})


async def path_of_a_message(cluster: TestCluster, delay: timedelta | None = None) -> list[str]:
    """The modules of a later message, from `send` to its acknowledgement: connections and sessions are there."""
    mq = cluster.client()
    consumer = mq.consumer("s", "g")

    async def pass_through() -> set[Function]:
        with functions_run() as found:
            received = asyncio.ensure_future(anext(consumer))
            await mq.send("s", b"body", delay=delay)
            await (await received).ack()
            await asyncio.sleep(0.05)
        return found

    await pass_through()
    timers = await idle()
    # What each of them runs: a rare timer falls into the time of one message, not of all.
    found = set.intersection(*[await pass_through() for _ in range(4)])
    return modules(found, timers)


async def test_a_message_passes_at_most_61_files() -> None:
    async with TestCluster(delay=False) as cluster:
        found = await path_of_a_message(cluster)
    assert {
        "qmq/client/producing/producer.py",
        "qmq/log/store.py",
        "qmq/broker/dispatch/dispatch.py",
        "qmq/client/consuming/consumer.py",
    } <= set(found)
    assert len(found) <= 61, found


async def test_a_delayed_message_passes_at_most_84_files() -> None:
    async with TestCluster() as cluster:
        found = await path_of_a_message(cluster, timedelta(milliseconds=200))
    assert {"qmq/delay/engine.py", "qmq/delay/wheel.py", "qmq/delay/plan_log.py"} <= set(found)
    assert len(found) <= 84, found


async def test_a_split_passes_at_most_77_files() -> None:
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        await mq.metadata.create_subject(SubjectConfig("o", order=Order.STRICT, logical_partitions=64), partitions=2)
        sender = cluster.client()
        await sender.send("o", b"body", key="k")
        await sender.close()  # it would learn the new routes at moments of its own
        timers, runs = await idle(), []
        for _ in range(4):  # what each of them runs, as above
            route = (await mq.metadata.describe_route("o")).route
            with functions_run() as found:
                split = pb.SplitOperation(partition=route.partitions[0].number, parts=2)
                await mq.metadata.change_route("o", split=split, from_version=route.version)
            runs.append(found)
    passed = modules(set.intersection(*runs), timers)
    assert {"qmq/meta/ordered/changes.py", "qmq/broker/lanes/admin.py"} <= set(passed)
    assert len(passed) <= 77, passed
