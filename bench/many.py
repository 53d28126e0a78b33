"""Benchmarks of many groups and many subjects on one node: the cost of each while idle and while active.

`scripts/bench --only many` runs them. CPU time is the node's, from /proc, in ticks of 10 ms.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Final, Protocol

import qmq
from bench.processes import Node, in_loop

SUBJECT: Final = "bench"
IDLE_S: Final = 5.0
REST_S: Final = 10.0
"""Seconds after which a node has finished the work caused by creating subjects."""
MESSAGES: Final = 50
AT_ONCE: Final = 200

Figures = dict[str, float]


class HasProcess(Protocol):
    """The parts that run in separate processes."""

    process: subprocess.Popen[Any]


def cpu_s(node: HasProcess) -> float:
    """The CPU time of a process, user and system."""
    fields = Path(f"/proc/{node.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def groups(count: int) -> Figures:
    """Many groups with one consumer each on one subject: idle, then each gets the same messages."""
    node = Node("--no-delay")
    try:
        return in_loop(_groups, node, count)  # type: ignore[no-any-return]
    finally:
        node.stop()


async def _groups(node: Node, count: int) -> Figures:
    async with qmq.connect(node.address) as mq:
        await mq.send(SUBJECT, b"first")
        consumers = [mq.consumer(SUBJECT, f"g{number}") for number in range(count)]
        begin = time.monotonic()
        await asyncio.gather(*[anext(consumer) for consumer in consumers])
        attached_s = time.monotonic() - begin
        await asyncio.sleep(1.0)
        before = cpu_s(node)
        await asyncio.sleep(IDLE_S)
        idle = (cpu_s(node) - before) / IDLE_S
        readers = [asyncio.create_task(_read(consumer)) for consumer in consumers]
        await asyncio.sleep(0.5)
        before, begin = cpu_s(node), time.monotonic()
        await mq.send_many(SUBJECT, [bytes(100)] * MESSAGES)
        await asyncio.gather(*readers)
        deliveries = count * MESSAGES
        return {
            "attached/s": count / attached_s,
            "CPU of the idle node, %": 100 * idle,
            "deliveries/s": deliveries / (time.monotonic() - begin),
            "CPU of the node, us a delivery": (cpu_s(node) - before) / deliveries * 1e6,
        }


async def _read(consumer: qmq.Consumer) -> None:
    for _ in range(MESSAGES):
        await anext(consumer)


def subjects(count: int) -> Figures:
    """Many subjects with one message each: created, listed, and read after a restart."""
    empty = Node("--no-delay")
    empty_mib = empty.resident_mib()
    empty.stop()
    node = Node("--no-delay")
    made = in_loop(_make_subjects, node, count)
    node.stop(keep=True)
    begin = time.monotonic()
    again = Node("--no-delay", data=node.data)
    started_s = time.monotonic() - begin
    started_mib = again.resident_mib()
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
            await asyncio.gather(*[mq.send(f"subject-{number}", b"x") for number in range(at, min(at + AT_ONCE, count))])
        made_s, begin = time.monotonic() - begin, time.monotonic()
        found = await mq.metadata.list_subjects()
        assert len(found) >= count, f"{len(found)} of {count} subjects are listed"
        listed_s = time.monotonic() - begin
        await asyncio.sleep(REST_S)
        before = cpu_s(node)
        await asyncio.sleep(IDLE_S)
        idle = (cpu_s(node) - before) / IDLE_S
        return {
            "made/s": count / made_s,
            "listed, s": listed_s,
            "CPU of the idle node, %": 100 * idle,
            "MiB": node.resident_mib(),
        }
