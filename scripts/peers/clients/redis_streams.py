"""Redis Streams by redis-py with hiredis: pipelines of 1,000 XADD; XREADGROUP of 1,000, and one XACK for them."""

from __future__ import annotations

import asyncio
from typing import Any

import redis
import redis.asyncio

STREAM, GROUP = "bench", "g"


def _connect(address: str) -> Any:
    host, _, port = address.rpartition(":")
    return redis.Redis(host=host, port=int(port))


def publish(address: str, clock: Any, bodies: list[bytes]) -> int:
    client, count = _connect(address), 0
    client.ping()
    clock.begin()
    while not clock.is_over:
        pipe = client.pipeline(transaction=False)
        for body in bodies:
            pipe.xadd(STREAM, {"b": body})
        pipe.execute()
        count += len(bodies)
    return count


async def awaited(address: str, clock: Any, bodies: list[bytes], tasks: int) -> int:
    host, _, port = address.rpartition(":")
    client = redis.asyncio.Redis(host=host, port=int(port), max_connections=tasks)
    count = 0

    async def sender() -> None:
        nonlocal count
        while not clock.is_over:
            await client.xadd(STREAM, {"b": bodies[count % 1000]})
            count += 1

    await asyncio.gather(*[client.ping() for _ in range(tasks)])  # each task has its own connection
    clock.begin()
    await asyncio.gather(*[sender() for _ in range(tasks)])
    return count


def consume(address: str, clock: Any, wanted: int) -> int:
    client, count = _connect(address), 0
    try:
        client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    except redis.ResponseError as failure:
        if "BUSYGROUP" not in str(failure):
            raise
    while True:
        found = client.xreadgroup(GROUP, "c", {STREAM: ">"}, count=1_000, block=10_000)
        if not found:
            break
        if not count:
            clock.begin()
        names = []
        for name, _ in found[0][1]:
            names.append(name)
            count += 1
        client.xack(STREAM, GROUP, *names)
        if (wanted and count >= wanted) or clock.is_over:
            break
    return count
