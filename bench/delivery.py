"""Benchmarks of listeners, of failing messages up to the dead-letter queue, and of the outbox."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from sqlalchemy import create_engine, text

import qmq
from bench.processes import Node, in_loop
from qmq.sql import outbox

SUBJECT, GROUP = "bench", "g"
CONCURRENCY = 16
FAILS_EVERY = 100


async def _filled(mq: qmq.Client, count: int) -> None:
    bodies = [os.urandom(100) for _ in range(1_000)]
    for _ in range(count // 1_000):
        await mq.send_many(SUBJECT, bodies)


async def _done(mq: qmq.Client, count: int) -> None:
    while True:
        found = [each for each in await mq.metadata.describe_groups(SUBJECT) if each.group == GROUP]
        if sum(each.settled_before for each in found) >= count:
            return
        await asyncio.sleep(0.02)


async def _listen(address: str, count: int, fails: bool) -> float:
    async with qmq.connect(address) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig(SUBJECT))
        await mq.metadata.set_group_settings(SUBJECT, GROUP, retry_delays_ms=[0])
        await _filled(mq, count)
        seen = 0

        @mq.listener(SUBJECT, group=GROUP, concurrency=CONCURRENCY)
        async def handle(body: bytes, context: qmq.Context) -> None:
            nonlocal seen
            seen += 1
            if fails and context.message.sequence % FAILS_EVERY == 0:
                raise qmq.Retry("it always fails")

        begin = time.monotonic()
        async with mq.listening():
            await _done(mq, count)
            return count / (time.monotonic() - begin)


def listening(count: int, *, fails: bool = False) -> float:
    """Messages per second through an empty handler; with `fails`, one of a hundred fails until it is a dead letter."""
    node = Node("--no-delay")
    try:
        found: float = in_loop(_listen, node.address, count, fails)
        return found
    finally:
        node.stop()


async def _outbox(address: str, folder: Path, count: int) -> dict[str, float]:
    engine = create_engine(f"sqlite:///{folder / 'shop.sqlite'}", connect_args={"timeout": 30})
    with engine.begin() as connection:
        connection.execute(text("PRAGMA journal_mode = WAL"))
        connection.execute(text("CREATE TABLE orders (number INTEGER)"))
    outbox.create_tables(engine)
    body = os.urandom(100)
    async with qmq.connect(address) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig(SUBJECT))
        begin, singles = time.monotonic(), max(count // 50, 20)
        for number in range(singles):
            async with mq.outbox(engine) as box:
                box.connection.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})
                box.send(SUBJECT, body)
        each_ms = (time.monotonic() - begin) / singles * 1000
        begin = time.monotonic()
        async with mq.outbox(engine) as box:
            for _ in range(count):
                box.send(SUBJECT, body)
        async with mq.consumer(SUBJECT, GROUP) as consumer:
            got = 0
            while got < count + singles:
                found = await consumer.pull(1_000, timedelta(seconds=30))
                assert found, "the outbox was not emptied"
                found.ack_later()
                got += len(found)
        took_s = time.monotonic() - begin
    engine.dispose()
    return {"one message a transaction, ms": each_ms, "one transaction, messages/s": count / took_s}


def sending(count: int) -> dict[str, float]:
    """Send through an outbox in SQLite: the time of a transaction with one message, and the rate of one with many messages."""
    node = Node("--no-delay")
    try:
        with tempfile.TemporaryDirectory() as folder:
            found: dict[str, float] = in_loop(_outbox, node.address, Path(folder), count)
            return found
    finally:
        node.stop()
