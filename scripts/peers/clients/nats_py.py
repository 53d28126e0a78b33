"""NATS JetStream by nats-py: asynchronous publishing with 4,000 pending; a push consumer that acknowledges each message."""

from __future__ import annotations

import asyncio
from typing import Any

import nats
from nats.js.api import ConsumerConfig

SUBJECT = "bench"


async def _stream(address: str, pending: int = 4_000) -> tuple[Any, Any]:
    client = await nats.connect(f"nats://{address}")
    stream = client.jetstream(publish_async_max_pending=pending)
    await stream.add_stream(name=SUBJECT, subjects=[SUBJECT])
    return client, stream


async def publish(address: str, clock: Any, bodies: list[bytes]) -> int:
    _, stream = await _stream(address)
    count = 0
    clock.begin()
    while not clock.is_over:
        for body in bodies:
            await stream.publish_async(SUBJECT, body)
        count += len(bodies)
    await stream.publish_async_completed()
    return count


async def awaited(address: str, clock: Any, bodies: list[bytes], tasks: int) -> int:
    _, stream = await _stream(address)
    count = 0

    async def sender() -> None:
        nonlocal count
        while not clock.is_over:
            await stream.publish(SUBJECT, bodies[count % 1000])
            count += 1

    clock.begin()
    await asyncio.gather(*[sender() for _ in range(tasks)])
    return count


async def consume(address: str, clock: Any, wanted: int) -> int:
    client, stream = await _stream(address)
    count = 0
    config = ConsumerConfig(max_ack_pending=10_000)
    found = await stream.subscribe(SUBJECT, durable="g", manual_ack=True, config=config, pending_msgs_limit=1_000_000)
    async for message in found.messages:
        if not count:
            clock.begin()
        await message.ack()
        count += 1
        if count == wanted or clock.is_over:
            break
    await client.flush()
    return count
