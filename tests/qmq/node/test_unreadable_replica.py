"""A replica with an unreadable sector is repaired from the other replicas, while it serves and when
it starts.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

from support import eventually
from support.clusters import NAMES, ThreeReplicas, replica_config
from support.disks import BadSectors

import qmq
from qmq.log.disk import BLOCK_BYTES
from qmq.log.log_config import LogConfig
from qmq.node.process import Environment
from qmq.node.replica.context import ReplicaConfig
from qmq.node.replica.node import ReplicaNode
from qmq.testing.machine import TIMING

COUNT = 200
LOG = LogConfig(segment_bytes=64 * 1024, cache_bytes=0)


class Cluster(ThreeReplicas):
    """Each is on its own disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.disks = {name: BadSectors() for name in NAMES}
        self.fatal: list[BaseException] = []

    def config(self, name: str) -> ReplicaConfig:
        return replica_config(self.folder, name, log=LOG)

    def environment_of(self, name: str) -> Environment:
        return Environment(disk=self.disks[name], timing=TIMING, fatal=self.fatal.append)

    def first_segment(self, name: str) -> Path:
        return self.folder / name / "broker" / "message" / f"{0:020d}.log"

    async def all_have_everything(self) -> None:
        def count(node: ReplicaNode) -> int:
            queue = node.broker.store.queue("s", 0)
            return queue.next_sequence if queue is not None else 0

        await eventually(lambda: all(count(node) == COUNT for node in self.nodes.values()))


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Cluster, qmq.Client]]:
    cluster = Cluster(folder)
    async with cluster.running() as address, qmq.connect(address) as mq:
        await cluster.master()
        for begin in range(0, COUNT, 5):
            await mq.send_many(
                "s", [b"%d" % number + bytes(900) for number in range(begin, begin + 5)]
            )
        await cluster.all_have_everything()
        yield cluster, mq


async def test_what_a_consumer_reads_from_a_bad_sector_is_mended(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, mq):
        master = await cluster.master()
        disk = cluster.disks[master]
        disk.spoil(cluster.first_segment(master), 5 * BLOCK_BYTES)
        async with mq.consumer("s", "g") as consumer:
            found: list[bytes] = []
            while len(found) < COUNT:
                got = await consumer.pull(COUNT, timedelta(seconds=10))
                found += [message.body.rstrip(b"\0") for message in got]
                await got.ack_sync()
        assert found == [b"%d" % number for number in range(COUNT)]
        assert disk.unreadable > 0
        assert disk.bad == set()
        assert cluster.fatal == []


async def test_a_replica_that_starts_over_a_bad_sector_is_mended_first(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, _):
        name = next(each for each in NAMES if not cluster.nodes[each].broker.is_serving)
        await cluster.nodes.pop(name).stop()
        shutil.rmtree(tmp_path / name / "broker" / "checkpoint")
        disk = cluster.disks[name]
        disk.spoil(cluster.first_segment(name), 5 * BLOCK_BYTES)
        await cluster.start(name)
        await cluster.all_have_everything()
        assert disk.unreadable > 0
        assert disk.bad == set()
        assert len({cluster.first_segment(each).read_bytes() for each in NAMES}) == 1
        assert cluster.fatal == []
