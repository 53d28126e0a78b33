"""Kafka by aiokafka: acks=all, idempotent; `async for` and `getmany`, with automatic commits."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from kafka_confluent import make_topic
from phases import KEYS, Run, at_a_rate, in_tasks

PENDING = 20_000


class Client:
    def __init__(self, address: str, settings: dict[str, Any]) -> None:
        self._address = address

    async def open(self) -> None:
        self._producer = AIOKafkaProducer(bootstrap_servers=self._address, enable_idempotence=True)
        await self._producer.start()

    async def make(self, run: Run) -> None:
        make_topic(self._address, run.phase.topic, run.phase.partitions, run.phase.flushed)
        await self._producer.partitions_for(run.phase.topic)
        run.begin()

    async def publish(self, run: Run) -> None:
        window = deque[Any]()
        keys = KEYS if run.phase.ordered else [None] * len(run.bodies)
        run.begin()
        while run.may_send:
            for body, key in zip(run.lap(), keys, strict=False):
                window.append(await self._producer.send(run.phase.topic, body, key))
            while len(window) > PENDING:
                await window.popleft()
        await asyncio.gather(*window)

    async def awaited(self, run: Run) -> None:
        run.begin()
        await in_tasks(run, lambda body: self._producer.send_and_wait(run.phase.topic, body))

    async def paced(self, run: Run) -> None:
        run.begin()
        await at_a_rate(run, lambda body: self._producer.send(run.phase.topic, body))
        await self._producer.flush()

    async def consume(self, run: Run) -> None:
        phase = run.phase
        consumers = [
            AIOKafkaConsumer(
                phase.topic,
                bootstrap_servers=self._address,
                group_id=group,
                auto_offset_reset="earliest",
            )
            for group in phase.group_names
            for _ in range(phase.consumers)
        ]
        await asyncio.gather(*[each.start() for each in consumers])
        try:
            run.begin()
            await asyncio.gather(*[self._take(each, run) for each in consumers])
        finally:
            await asyncio.gather(*[each.stop() for each in consumers])

    async def _take(self, consumer: Any, run: Run) -> None:
        counts = run.counts
        if run.phase.per_s:
            async for message in consumer:
                run.arrived(message.value)
        elif run.phase.each:
            async for message in consumer:
                counts[message.value[:8]] += 1
        else:
            while True:
                for found in (await consumer.getmany(timeout_ms=100)).values():
                    counts.update([message.value[:8] for message in found])
