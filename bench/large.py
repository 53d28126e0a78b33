"""Bodies of some MiB: throughput of one producer and one consumer compared with the disk's, and the node's memory meanwhile.

`scripts/bench --only large` runs it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import qmq
from bench.processes import Node, together
from qmq.model import SubjectConfig

SUBJECT: Final = "bench"
MIB: Final = 1 << 20
LOOK_S: Final = 0.05

Figures = dict[str, float]


async def send(address: str, mib: int, count: int) -> float:
    """MiB a second, all acknowledged."""
    async with qmq.connect(address) as mq:
        await mq.metadata.create_subject(SubjectConfig(SUBJECT, body_bytes_max=15 * MIB))
        async with mq.producer(SUBJECT, body_bytes_max=15 * MIB) as producer:
            body = os.urandom(mib * MIB - 200)
            begin = time.monotonic()
            for _ in range(count):
                producer.send(body)
                await (producer.drain() if producer.full else asyncio.sleep(0))
            await producer.flush()
            return mib * count / (time.monotonic() - begin)


async def receive(address: str, mib: int, count: int) -> float:
    """MiB a second."""
    async with qmq.connect(address) as mq, mq.consumer(SUBJECT, "g") as consumer:
        begin, got = time.monotonic(), 0
        async for message in consumer:
            assert len(message.body) == mib * MIB - 200
            got += 1
            if got == count:
                break
        return mib * count / (time.monotonic() - begin)


@contextmanager
def watched(node: Node) -> Iterator[list[float]]:
    """The node's memory while the block runs, MiB."""
    seen, is_over = [node.resident_mib()], threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            seen.append(node.resident_mib())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        is_over.set()
        looking.join()


def disk(mib: int) -> float:
    """MiB a second that plain writes of a body's size into a new file reach, with one flush at the end."""
    with tempfile.TemporaryFile() as file:
        body, begin = os.urandom(mib * MIB), time.monotonic()
        for _ in range(512 // mib):
            file.write(body)
        file.flush()
        os.fdatasync(file.fileno())
        return 512 // mib * mib / (time.monotonic() - begin)


def bodies(mib: int, count: int) -> Figures:
    """`count` bodies of about `mib` MiB (15 at most)."""
    node = Node("--no-delay")
    try:
        idle_mib = node.resident_mib()
        found = {"disk alone, MiB/s": disk(mib)}
        for name, work in (("sent", send), ("received", receive)):
            with watched(node) as seen:
                rate = together((work, node.address, mib, count))[0]
            found |= {f"{name}, MiB/s": rate, f"node's memory while {name}, above idle, MiB": max(seen) - idle_mib}
        return found
    finally:
        node.stop()
