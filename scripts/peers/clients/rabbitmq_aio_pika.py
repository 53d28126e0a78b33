"""RabbitMQ by aio-pika: a quorum queue, publisher confirms with 1,000 in flight; a consumer with prefetch 1,000 that acknowledges each."""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika

QUEUE = "bench"


async def _channel(address: str) -> tuple[Any, Any, Any]:
    connection = await aio_pika.connect(f"amqp://guest:guest@{address}/")
    channel = await connection.channel(publisher_confirms=True)
    await channel.set_qos(prefetch_count=1_000)
    queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    return connection, channel, queue


def _message(body: bytes) -> Any:
    return aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)


async def publish(address: str, clock: Any, bodies: list[bytes]) -> int:
    return await awaited(address, clock, bodies, 1_000)


async def awaited(address: str, clock: Any, bodies: list[bytes], tasks: int) -> int:
    _, channel, _ = await _channel(address)
    count = 0

    async def sender() -> None:
        nonlocal count
        while not clock.is_over:
            await channel.default_exchange.publish(_message(bodies[count % 1000]), QUEUE)
            count += 1

    clock.begin()
    await asyncio.gather(*[sender() for _ in range(tasks)])
    return count


async def consume(address: str, clock: Any, wanted: int) -> int:
    connection, _, queue = await _channel(address)
    count = 0
    async with queue.iterator() as messages:
        async for message in messages:
            if not count:
                clock.begin()
            await message.ack()
            count += 1
            if count == wanted or clock.is_over:
                break
        return count
    await connection.close()
