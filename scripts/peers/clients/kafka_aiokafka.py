"""Kafka by aiokafka: acks=all, idempotent; `async for`, with automatic commits."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from kafka_confluent import TOPIC, make_topic


async def publish(address: str, clock: Any, bodies: list[bytes]) -> int:
    make_topic(address)
    count, window = 0, deque[Any]()
    async with AIOKafkaProducer(bootstrap_servers=address, enable_idempotence=True) as producer:
        await producer.send_and_wait(TOPIC, b"first")
        clock.begin()
        while not clock.is_over:
            for body in bodies:
                window.append(await producer.send(TOPIC, body))
            count += len(bodies)
            while len(window) > 20_000:
                await window.popleft()
        await asyncio.gather(*window)
        return count


async def awaited(address: str, clock: Any, bodies: list[bytes], tasks: int) -> int:
    make_topic(address)
    count = 0

    async def sender() -> None:
        nonlocal count
        while not clock.is_over:
            await producer.send_and_wait(TOPIC, bodies[count % 1000])
            count += 1

    async with AIOKafkaProducer(bootstrap_servers=address, enable_idempotence=True) as producer:
        await producer.send_and_wait(TOPIC, b"first")
        clock.begin()
        await asyncio.gather(*[sender() for _ in range(tasks)])
        return count


async def consume(address: str, clock: Any, wanted: int) -> int:
    count = 0
    async with AIOKafkaConsumer(TOPIC, bootstrap_servers=address, group_id="a", auto_offset_reset="earliest") as consumer:
        async for _ in consumer:
            if not count:
                clock.begin()
            count += 1
            if count == wanted or clock.is_over:
                break
        return count
