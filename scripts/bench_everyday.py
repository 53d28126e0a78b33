"""Benchmarks of everyday use: message by message, through the public client, with asyncio's own event loop.

One server process and one client process, messages of 100 B. `scripts/bench --only everyday` runs them, alternating like all benchmarks.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench_processes import Node

import qmq
from qmq.model import Order, SubjectConfig

SUBJECT, GROUP = "bench", "g"
BODY = os.urandom(100)
TASKS = 256
PARTITIONS = 4
KEYS = 1_000

Work = Callable[[qmq.Client, int], Awaitable[Any]]


def measured(work: Work, count: int) -> Any:
    """The result of `work` on a new node."""

    async def run(address: str) -> Any:
        async with qmq.connect(address) as mq:
            return await work(mq, count)

    node = Node("--no-delay")
    try:
        return asyncio.run(run(node.address))
    finally:
        node.stop()


async def _fill(mq: qmq.Client, count: int) -> None:
    async with mq.producer(SUBJECT) as producer:
        for _ in range(count // 1_000):
            producer.send_many([BODY] * 1_000)
            if producer.full:
                await producer.drain()


async def one_sender(mq: qmq.Client, count: int) -> dict[str, float]:
    """One task that awaits each send."""
    await mq.send(SUBJECT, BODY)
    took_s = []
    begin = time.perf_counter()
    for _ in range(count):
        before = time.perf_counter()
        await mq.send(SUBJECT, BODY)
        took_s.append(time.perf_counter() - before)
    return {"messages/s": count / (time.perf_counter() - begin), "p50 us": statistics.median(took_s) * 1e6}


async def many_senders(mq: qmq.Client, count: int) -> float:
    """Many tasks that each await their sends."""

    async def sender() -> None:
        for _ in range(count // TASKS):
            await mq.send(SUBJECT, BODY)

    await mq.send(SUBJECT, BODY)
    begin = time.perf_counter()
    await asyncio.gather(*[sender() for _ in range(TASKS)])
    return count // TASKS * TASKS / (time.perf_counter() - begin)


async def backlog(mq: qmq.Client, count: int) -> float:
    """`async for` over a backlog, with automatic acknowledgement."""
    await _fill(mq, count)
    left = count
    async with mq.consumer(SUBJECT, GROUP) as consumer:
        begin = time.perf_counter()
        async for _ in consumer:
            left -= 1
            if not left:
                break
    return count / (time.perf_counter() - begin)


async def acknowledging(mq: qmq.Client, count: int) -> float:
    """`async for` over a backlog; the program acknowledges each message."""
    await _fill(mq, count)
    left = count
    async with mq.consumer(SUBJECT, GROUP, ack="explicit") as consumer:
        begin = time.perf_counter()
        async for message in consumer:
            await message.ack()
            left -= 1
            if not left:
                break
    return count / (time.perf_counter() - begin)


async def end_to_end(mq: qmq.Client, count: int) -> float:
    """One program sends and receives at the same time."""

    async def send() -> None:
        async with mq.producer(SUBJECT) as producer:
            for number in range(count):
                producer.send(BODY)
                if producer.full:
                    await producer.drain()
                elif number % 100 == 0:
                    await asyncio.sleep(0)

    await mq.metadata.create_subject(SubjectConfig(SUBJECT))
    left = count
    async with mq.consumer(SUBJECT, GROUP) as consumer:
        begin = time.perf_counter()
        sending = asyncio.create_task(send())
        async for _ in consumer:
            left -= 1
            if not left:
                break
        rate = count / (time.perf_counter() - begin)
        await sending
    return rate


async def listening(mq: qmq.Client, count: int) -> float:
    """A listener with an empty handler."""
    await _fill(mq, count)
    left = count

    @mq.listener(SUBJECT, group=GROUP)
    async def handle(body: bytes) -> None:
        nonlocal left
        left -= 1
        if not left:
            mq.stop()

    begin = time.perf_counter()
    await mq.run()
    return count / (time.perf_counter() - begin)


async def in_order(mq: qmq.Client, count: int) -> float:
    """`async for` over an ordered subject."""
    await mq.metadata.create_subject(SubjectConfig(SUBJECT, order=Order.STRICT, logical_partitions=1024), partitions=PARTITIONS)
    async with mq.ordered_producer(SUBJECT) as producer:
        for number in range(count):
            producer.send(BODY, b"%d" % (number % KEYS))
            if producer.full:
                await producer.drain()
    left = count
    async with mq.ordered_consumer(SUBJECT, GROUP) as consumer:
        begin = time.perf_counter()
        async for _ in consumer:
            left -= 1
            if not left:
                break
    return count / (time.perf_counter() - begin)
