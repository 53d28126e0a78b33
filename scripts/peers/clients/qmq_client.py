"""QMQ, by its public client, with its defaults."""

from __future__ import annotations

import asyncio
from typing import Any

import qmq

SUBJECT, GROUP = "bench", "g"


async def publish(address: str, clock: Any, bodies: list[bytes]) -> int:
    count = 0
    async with qmq.connect(address) as mq, mq.producer(SUBJECT) as producer:
        clock.begin()
        while not clock.is_over:
            for body in bodies:
                producer.send(body)
            count += len(bodies)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
    return count


async def awaited(address: str, clock: Any, bodies: list[bytes], tasks: int) -> int:
    count = 0

    async def sender() -> None:
        nonlocal count
        while not clock.is_over:
            await mq.send(SUBJECT, bodies[count % 1000])
            count += 1

    async with qmq.connect(address) as mq:
        await mq.send(SUBJECT, b"first")
        clock.begin()
        await asyncio.gather(*[sender() for _ in range(tasks)])
    return count


async def consume(address: str, clock: Any, wanted: int) -> int:
    count = 0
    async with qmq.connect(address) as mq, mq.consumer(SUBJECT, GROUP) as consumer:
        async for _ in consumer:
            if not count:
                clock.begin()
            count += 1
            if count == wanted or clock.is_over:
                break
    return count
