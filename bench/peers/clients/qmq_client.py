"""QMQ by its public client, with its defaults."""

from __future__ import annotations

import asyncio
from typing import Any

from phases import KEYS, Run, at_a_rate, in_tasks

import qmq
from qmq.model import Order, SubjectConfig


class Client:
    def __init__(self, address: str, settings: dict[str, Any]) -> None:
        self._mq = qmq.connect(address)
        self._acks = settings.get("acks", "quorum")

    async def open(self) -> None:
        await self._mq.__aenter__()

    async def make(self, run: Run) -> None:
        """Only ordered subjects are made before their first message."""
        if run.phase.ordered:
            config = SubjectConfig(run.phase.topic, order=Order.STRICT, logical_partitions=1024)
            await self._mq.metadata.create_subject(config, partitions=run.phase.partitions)
        run.begin()

    async def publish(self, run: Run) -> None:
        topic = run.phase.topic
        make: Any = self._mq.ordered_producer if run.phase.ordered else self._mq.producer
        async with make(topic, acks=self._acks) as producer:
            run.begin()
            while run.may_send:
                bodies = run.lap()
                if run.phase.ordered:
                    producer.send_many(bodies, KEYS)
                elif run.phase.each:
                    for body in bodies:
                        producer.send(body)
                else:
                    producer.send_many(bodies)
                await (producer.drain() if producer.full else asyncio.sleep(0))
            await producer.flush()

    async def awaited(self, run: Run) -> None:
        run.begin()
        await in_tasks(run, lambda body: self._mq.send(run.phase.topic, body, acks=self._acks))

    async def paced(self, run: Run) -> None:
        async with self._mq.producer(run.phase.topic) as producer:

            async def send(body: bytes) -> None:
                producer.send(body)

            run.begin()
            await at_a_rate(run, send)
            await producer.flush()

    async def consume(self, run: Run) -> None:
        phase = run.phase
        make: Any = self._mq.ordered_consumer if phase.ordered else self._mq.consumer
        work = self._timed if phase.per_s else self._each if phase.each else self._bulk
        consumers = [
            make(phase.topic, group, start="earliest")
            for group in phase.group_names
            for _ in range(phase.consumers)
        ]
        try:
            if phase.per_s:  # as NATS and aiokafka subscribe
                await asyncio.gather(*[consumer.join() for consumer in consumers])
            run.begin()
            await asyncio.gather(*[work(consumer, run) for consumer in consumers])
        finally:
            await asyncio.gather(*[consumer.close() for consumer in consumers])

    async def _each(self, consumer: Any, run: Run) -> None:
        counts = run.counts
        async for message in consumer:
            counts[message.body[:8]] += 1

    async def _bulk(self, consumer: Any, run: Run) -> None:
        async for messages in consumer.batches():
            run.counts.update([body[:8] for body in messages.bodies])

    async def _timed(self, consumer: Any, run: Run) -> None:
        async for message in consumer:
            run.arrived(message.body)
