"""RabbitMQ by aio-pika: a quorum queue, publisher confirms with 1,000 in flight; a callback with
prefetch 1,000 that acknowledges each.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika
from phases import RING, Run, at_a_rate, in_tasks

PREFETCH = 1_000


class Client:
    def __init__(self, address: str, settings: dict[str, Any]) -> None:
        self._address = f"amqp://guest:guest@{address}/"

    async def open(self) -> None:
        self._connection = await aio_pika.connect(self._address)
        self._channel = await self._connection.channel(publisher_confirms=True)

    async def make(self, run: Run) -> None:
        await self._channel.declare_queue(
            run.phase.topic, durable=True, arguments={"x-queue-type": "quorum"}
        )
        run.begin()

    async def _send(self, topic: str, body: bytes) -> None:
        message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await self._channel.default_exchange.publish(message, topic)

    async def publish(self, run: Run) -> None:
        run.begin()

        async def sender() -> None:
            while run.may_send:
                await self._send(run.phase.topic, run.next())

        await asyncio.gather(*[sender() for _ in range(RING)])

    async def awaited(self, run: Run) -> None:
        run.begin()
        await in_tasks(run, lambda body: self._send(run.phase.topic, body))

    async def paced(self, run: Run) -> None:
        sending: set[asyncio.Task[None]] = set()

        async def send(body: bytes) -> None:
            task = asyncio.create_task(self._send(run.phase.topic, body))
            sending.add(task)
            task.add_done_callback(sending.discard)

        run.begin()
        await at_a_rate(run, send)
        await asyncio.gather(*sending)

    async def consume(self, run: Run) -> None:
        """A queue has one group."""
        connection = await aio_pika.connect(self._address)

        async def take(message: Any) -> None:
            if run.phase.per_s:
                run.arrived(message.body)
            else:
                run.counts[message.body[:8]] += 1
            await message.ack()

        try:
            channels = [await connection.channel() for _ in range(run.phase.consumers)]
            run.begin()
            for channel in channels:
                await channel.set_qos(prefetch_count=PREFETCH)
                await (await channel.get_queue(run.phase.topic)).consume(take)
            await asyncio.Event().wait()
        finally:
            await connection.close()
