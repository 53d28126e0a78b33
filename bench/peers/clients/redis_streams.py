"""Redis Streams by redis-py with hiredis: pipelines of 1,000 XADD; XREADGROUP of 1,000, and one
XACK for them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import redis
import redis.asyncio
from phases import Run, at_a_rate, in_tasks

READ = 1_000


class Client:
    def __init__(self, address: str, settings: dict[str, Any]) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    def _connect(self, connections: int = 256) -> Any:
        return redis.asyncio.Redis(host=self._host, port=self._port, max_connections=connections)

    async def open(self) -> None:
        self._client, self._blocking = (
            self._connect(),
            redis.Redis(host=self._host, port=self._port),
        )
        self._blocking.ping()

    async def make(self, run: Run) -> None:
        run.begin()

    async def publish(self, run: Run) -> None:
        run.begin()
        while run.may_send:
            pipe = self._blocking.pipeline(transaction=False)
            for body in run.lap():
                pipe.xadd(run.phase.topic, {"b": body})
            pipe.execute()

    async def awaited(self, run: Run) -> None:
        await asyncio.gather(
            *[self._client.ping() for _ in range(run.phase.tasks)]
        )  # each task has its own connection
        run.begin()
        await in_tasks(run, lambda body: self._client.xadd(run.phase.topic, {"b": body}))

    async def paced(self, run: Run) -> None:
        await self._client.ping()
        run.begin()
        await at_a_rate(run, lambda body: self._client.xadd(run.phase.topic, {"b": body}))

    async def consume(self, run: Run) -> None:
        phase = run.phase
        for group in phase.group_names:
            with suppress(redis.ResponseError):  # another process of the row has made it
                self._blocking.xgroup_create(phase.topic, group, id="0", mkstream=True)
        reader = self._connect(phase.groups * phase.consumers + 1)
        await reader.ping()
        run.begin()
        await asyncio.gather(
            *[
                self._take(reader, run, group, f"c{number}")
                for group in phase.group_names
                for number in range(phase.consumers)
            ]
        )

    async def _take(self, client: Any, run: Run, group: str, name: str) -> None:
        topic = run.phase.topic
        while True:
            found = await client.xreadgroup(group, name, {topic: ">"}, count=READ, block=1_000)
            if not found:
                continue
            entries = found[0][1]
            if run.phase.per_s:
                for _, fields in entries:
                    run.arrived(fields[b"b"])
            else:
                run.counts.update([fields[b"b"][:8] for _, fields in entries])
            await client.xack(topic, group, *[entry for entry, _ in entries])
