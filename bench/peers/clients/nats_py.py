"""NATS JetStream by nats-py: `publish_async` with 4,000 pending; a callback that acknowledges each
message, or `fetch`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any

import nats
from nats.js.api import ConsumerConfig
from phases import LARGE, Run, at_a_rate, in_tasks

PENDING = 4_000
PENDING_LARGE = 32
FETCH = 1_000


class Client:
    def __init__(self, address: str, settings: dict[str, Any]) -> None:
        self._address = address

    async def open(self) -> None:
        self._client = await nats.connect(f"nats://{self._address}")
        self._stream = self._client.jetstream(publish_async_max_pending=PENDING)
        self._large = self._client.jetstream(publish_async_max_pending=PENDING_LARGE)

    async def make(self, run: Run) -> None:
        await self._stream.add_stream(name=run.phase.topic, subjects=[run.phase.topic])
        run.begin()

    async def publish(self, run: Run) -> None:
        stream = self._large if run.phase.size > LARGE else self._stream
        sent = deque[Any]()
        run.begin()
        while run.may_send:
            for body in run.lap():
                sent.append(await stream.publish_async(run.phase.topic, body))
            while sent and sent[0].done():
                sent.popleft().result()  # a message that is not stored ends the row
        await stream.publish_async_completed()
        for each in sent:
            each.result()

    async def awaited(self, run: Run) -> None:
        run.begin()
        await in_tasks(run, lambda body: self._stream.publish(run.phase.topic, body))

    async def paced(self, run: Run) -> None:
        run.begin()
        await at_a_rate(run, lambda body: self._stream.publish_async(run.phase.topic, body))
        await self._stream.publish_async_completed()

    async def consume(self, run: Run) -> None:
        phase, config = run.phase, ConsumerConfig(max_ack_pending=10_000)
        if not (phase.each or phase.per_s):
            pulls = [
                await self._stream.pull_subscribe(phase.topic, durable=group, config=config)
                for group in phase.group_names
            ]
            run.begin()
            await asyncio.gather(
                *[self._fetch(each, run) for each in pulls for _ in range(phase.consumers)]
            )
            return
        counts = run.counts

        async def take(message: Any) -> None:
            if phase.per_s:
                run.arrived(message.data)
            else:
                counts[message.data[:8]] += 1
            await message.ack()

        for group in phase.group_names:
            for _ in range(phase.consumers):
                shared = {"queue": group} if phase.consumers > 1 else {"durable": group}
                await self._stream.subscribe(
                    phase.topic,
                    **shared,
                    cb=take,
                    manual_ack=True,
                    config=config,
                    pending_msgs_limit=1_000_000,
                    pending_bytes_limit=1 << 30,
                )
        run.begin()
        await asyncio.Event().wait()

    async def _fetch(self, pull: Any, run: Run) -> None:
        while True:
            with suppress(nats.errors.TimeoutError):
                messages = await pull.fetch(FETCH, 1)
                run.counts.update([message.data[:8] for message in messages])
                await asyncio.gather(*[message.ack() for message in messages])
