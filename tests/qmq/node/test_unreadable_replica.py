"""A replica with an unreadable sector is repaired from the other replicas, while it serves and when
it starts.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

from qmq_coordination.view import ClusterView
from support import eventually
from support.disks import BadSectors
from support.stores import SharedStore

import qmq
from qmq.log.disk import BLOCK_BYTES
from qmq.log.log_config import LogConfig
from qmq.meta.server import MetaConfig, MetaServer
from qmq.node.broker import broker_node
from qmq.node.process import Environment, EtcdOptions
from qmq.node.replica.context import ReplicaConfig
from qmq.node.replica.node import ReplicaNode
from qmq.testing.machine import TIMING

NAMES = ("a", "b", "c")
COUNT = 200


class Cluster:
    """Three replicas, each on its own disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.coordination = folder, SharedStore()
        self.disks = {name: BadSectors() for name in NAMES}
        self.fatal: list[BaseException] = []
        self.nodes: dict[str, ReplicaNode] = {}

    async def start(self, name: str) -> None:
        log = LogConfig(segment_bytes=64 * 1024, cache_bytes=0)
        etcd = EtcdOptions(("127.0.0.1:1",))
        config = ReplicaConfig(
            "g", name, NAMES, self.folder / name, etcd, data_port=0, control_port=0, log=log
        )
        node = broker_node(
            config,
            self.coordination,
            environment=Environment(disk=self.disks[name], timing=TIMING, fatal=self.fatal.append),
        )
        self.nodes[name] = node
        await node.start()

    def first_segment(self, name: str) -> Path:
        return self.folder / name / "broker" / "message" / f"{0:020d}.log"

    async def master(self) -> str:
        await eventually(lambda: any(node.broker.is_serving for node in self.nodes.values()))
        return next(name for name, node in self.nodes.items() if node.broker.is_serving)

    async def all_have_everything(self) -> None:
        def count(node: ReplicaNode) -> int:
            queue = node.broker.store.queue("s", 0)
            return queue.next_sequence if queue is not None else 0

        await eventually(lambda: all(count(node) == COUNT for node in self.nodes.values()))


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Cluster, qmq.Client]]:
    cluster = Cluster(folder)
    view = ClusterView(cluster.coordination)
    await view.start()
    meta = MetaServer(cluster.coordination, view, MetaConfig("127.0.0.1", 0))
    await meta.start()
    try:
        for name in NAMES:
            await cluster.start(name)
        async with qmq.connect(meta.address) as mq:
            await cluster.master()
            for begin in range(0, COUNT, 5):
                await mq.send_many(
                    "s", [b"%d" % number + bytes(900) for number in range(begin, begin + 5)]
                )
            await cluster.all_have_everything()
            yield cluster, mq
    finally:
        for node in cluster.nodes.values():
            await node.stop()
        await meta.stop()
        await view.stop()
        await cluster.coordination.end()


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
