"""Sends to a node from tests that are not asynchronous."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark_qmq.files.log import FileAddress

import qmq
from qmq.errors import UnknownSubject
from qmq.model import Order, SubjectConfig


def send(
    server: str,
    subject: str,
    bodies: Sequence[str],
    keys: Sequence[str] | None = None,
    tags: Sequence[Sequence[str]] | None = None,
    headers: Sequence[Mapping[str, bytes]] | None = None,
) -> None:
    """Send messages, and wait until all are stored."""

    async def work() -> None:
        async with qmq.connect(server) as mq, mq.producer(subject) as producer:
            await producer.send_many([body.encode() for body in bodies], keys=keys, tags=tags, headers=headers)

    asyncio.run(work())


def send_ordered(server: str, subject: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Send (key, body) pairs to an ordered subject, in order."""

    async def work() -> None:
        async with qmq.connect(server) as mq, mq.ordered_producer(subject) as producer:
            await producer.send_many([body.encode() for _, body in pairs], [key for key, _ in pairs])

    asyncio.run(work())


def until_in_files(folder: Path, subject: str, count: int) -> None:
    """Wait until a node's files say that so many messages of a subject are committed: within a second or so."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        log = FileAddress((str(folder),)).open()
        try:
            if sum(queue.end for queue in log.topology([subject]).queues.values()) >= count:
                return
        except UnknownSubject:
            pass
        finally:
            log.close()
        time.sleep(0.05)
    raise AssertionError(f"{subject} does not get into the files")


def create_ordered(server: str, subject: str, partitions: int = 1) -> None:
    """An ordered subject of 1,024 logical partitions."""

    async def work() -> None:
        async with qmq.connect(server) as mq:
            await mq.metadata.create_subject(SubjectConfig(subject, order=Order.STRICT, logical_partitions=1024), partitions=partitions)

    asyncio.run(work())


def change_route(server: str, subject: str, **change: Any) -> None:
    """Split, merge or move partitions. Returns when the new route is published."""

    async def work() -> None:
        async with qmq.connect(server) as mq:
            await mq.metadata.change_route(subject, **change)

    asyncio.run(work())
