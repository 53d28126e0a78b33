"""Groups that are far behind are read ahead by threads, while the event loop continues
(qmq/broker/reading/cold_reads.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support import eventually, node_config

import qmq
from qmq.broker.config import BrokerConfig
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.node.dev_node import Node

BODY, COUNT = bytes(1_000), 3_000


class HeldDisk(Disk):
    """A disk on which reading ahead waits until the test continues it, as on a busy disk."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.asked = 0
        self.fails = False

    def read_ahead(self, path: Path, size: int, at: int) -> None:
        self.asked += 1
        if not self.may_read.wait(30):
            raise TimeoutError("the test did not let it continue")
        if self.fails:
            raise OSError("the file is gone")
        super().read_ahead(path, size, at)


@asynccontextmanager
async def node_on(folder: Path, disk: Disk, recent_bytes: int = 100_000) -> AsyncIterator[Node]:
    node = Node(
        node_config(
            folder, LogConfig(cache_bytes=0), broker=BrokerConfig(recent_bytes=recent_bytes)
        ),
        disk=disk,
    )
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def fill(mq: qmq.Client) -> None:
    for at in range(0, COUNT, 100):
        await mq.send_many("s", [b"%d " % number + BODY for number in range(at, at + 100)])


async def read(mq: qmq.Client, group: str) -> list[int]:
    found: list[int] = []
    async with mq.consumer("s", group) as consumer:
        async for message in consumer:
            found.append(int(message.body.split()[0]))
            if len(found) == COUNT:
                return found
    raise AssertionError


async def test_a_disk_that_is_slow_to_read_keeps_only_groups_waiting_that_are_far_behind(
    tmp_path: Path,
) -> None:
    disk = HeldDisk()
    async with node_on(tmp_path, disk) as node, qmq.connect(node.address) as mq:
        await fill(mq)
        behind = asyncio.create_task(read(mq, "behind"))
        await eventually(lambda: disk.asked > 0)
        async with mq.consumer("s", "near", start="latest") as near:
            waiting = asyncio.create_task(anext(near))
            await eventually(lambda: "near" in {each.name for each in node.broker.dispatch.groups})
            await mq.send("s", b"now")
            assert (await waiting).body == b"now"
        assert not behind.done()
        disk.may_read.set()
        assert await behind == list(range(COUNT))


async def test_what_cannot_be_read_ahead_is_read_all_the_same(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.fails = True
    disk.may_read.set()
    async with node_on(tmp_path, disk) as node, qmq.connect(node.address) as mq:
        await fill(mq)
        assert await read(mq, "behind") == list(range(COUNT))
        assert disk.asked > 0


async def test_near_the_end_of_the_log_nothing_is_read_ahead(tmp_path: Path) -> None:
    disk = HeldDisk()
    async with (
        node_on(tmp_path, disk, recent_bytes=1 << 30) as node,
        qmq.connect(node.address) as mq,
    ):
        await fill(mq)
        assert await read(mq, "near") == list(range(COUNT))
        assert disk.asked == 0
