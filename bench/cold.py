"""Reads a backlog that is only on disk while a producer sends at a steady rate. Measures the reader's throughput and the producer's
latency: alone, beside the reader, and beside a reader that may use only a part of a core.

On a machine with two cores, node, producer and reader compete for them. A producer then waits for a core, which says nothing about the
broker. With the limited reader there is a core for each.

`scripts/bench --only cold` runs it. The log's files are put out of the page cache first; the default is 2 GiB of 1 KB messages.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

import qmq
from bench.processes import Node, together

SUBJECT: Final = "bench"
LIVE: Final = "live"
SIZE: Final = 1024
RATE: Final = 20_000
BURST: Final = 20
"""Messages that the producer sends together, each millisecond."""

READER_CORE_PART: Final = 0.2

Figures = dict[str, float]


async def fill(address: str, count: int) -> None:
    async with qmq.connect(address) as mq, mq.producer(SUBJECT) as producer:
        bodies = [os.urandom(SIZE) for _ in range(1_000)]
        for _ in range(count // 1_000):
            producer.send_many(bodies)
            if producer.full:
                await producer.drain()
        await producer.flush()


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


async def drain(address: str, count: int, group: str = "g") -> float:
    """Seconds from the first message to the last."""
    async with qmq.connect(address) as mq:
        consumer, got, begin = mq.consumer(SUBJECT, group, prefetch=20_000), 0, 0.0
        while got < count:
            found = await consumer.pull(20_000)
            begin = begin or time.monotonic()
            got += len(found.bodies)
            found.ack_later()
        return time.monotonic() - begin


async def pace(address: str, seconds: float) -> list[float]:
    """How long each burst waited for its acknowledgement, milliseconds, in order of size."""
    waited: list[float] = []
    body = os.urandom(100)

    async def burst() -> None:
        begin = time.perf_counter()
        await producer.send_many([body] * BURST)
        waited.append(1e3 * (time.perf_counter() - begin))

    async with qmq.connect(address) as mq, mq.producer(LIVE) as producer:
        await producer.send(body)
        begin, tasks = time.monotonic(), set[asyncio.Task[None]]()
        sent = 0
        while time.monotonic() < begin + seconds:
            while begin + sent * BURST / RATE <= time.monotonic():
                tasks.add(task := asyncio.create_task(burst()))
                task.add_done_callback(tasks.discard)
                sent += 1
            await asyncio.sleep(0.0005)
        await asyncio.gather(*tasks)
    return sorted(waited)


def p99(waited_ms: list[float]) -> float:
    """Of what `pace` returns."""
    return waited_ms[int(len(waited_ms) * 0.99)]


def cold(count: int, seconds: float = 5.0) -> Figures:
    """Read `count` messages from the disk. A producer's latency is measured without that, with it, and with a limited reader."""
    node = Node("--no-delay")
    together((fill, node.address, count))
    node.stop(keep=True)
    node = Node("--no-delay", data=node.data)
    try:
        alone = together((pace, node.address, seconds))[0]
        figures = latencies("alone", alone)
        for group, name, part in (("g", "meanwhile", 0.0), ("limited", "beside a limited reader", READER_CORE_PART)):
            forget(node.data)
            jobs = (drain, node.address, count, group), (pace, node.address, seconds)
            took_s, beside = together(*jobs, core_part=part, limited_jobs=1)
            read = f"read{', limited' if part else ''}, MiB/s"
            figures |= {read: count * SIZE / took_s / (1 << 20)} | latencies(name, beside)
        return figures
    finally:
        node.stop()


def latencies(name: str, waited_ms: list[float]) -> Figures:
    """Of what `pace` returns."""
    return {
        f"p50 of a producer {name}, ms": waited_ms[len(waited_ms) // 2],
        f"p99 of a producer {name}, ms": p99(waited_ms),
        f"worst of a producer {name}, ms": waited_ms[-1],
    }
