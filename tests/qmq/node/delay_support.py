"""A delay group of three, a broker group of one and a metaserver in one event loop, on one
coordination store in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from qmq_coordination.broker_groups import DelaySettings
from qmq_coordination.view import ClusterView
from support import eventually
from support.stores import SharedStore

from qmq.broker.config import BrokerConfig
from qmq.delay.broker import schedule_of
from qmq.delay.config import DelayConfig
from qmq.delay.schedule import Schedule
from qmq.limits import KIB
from qmq.log.log_config import LogConfig
from qmq.meta.server import MetaConfig, MetaServer
from qmq.node.broker import broker_node
from qmq.node.delay import DelayReplicaConfig, delay_node
from qmq.node.process import TIMING, Environment, EtcdOptions, NodeTiming
from qmq.node.replica.context import ReplicaConfig
from qmq.node.replica.node import ReplicaNode

NAMES = ("a", "b", "c")
SETTINGS = DelaySettings(3_600_000, 10**11)
SHORT = LogConfig(
    segment_bytes=64 * KIB,
    action_segment_bytes=64 * KIB,
    retention_ms=1,
    checkpoint_interval_ms=100,
    tail_bytes=KIB,
)
"""A log that soon loses its beginning, in memory too."""
NOWHERE = EtcdOptions(("127.0.0.1:1",))


def delay_config(
    data: Path, name: str, log: LogConfig | None = None, **others: Any
) -> DelayReplicaConfig:
    """Replica `name` of group `d`."""
    chosen: dict[str, Any] = {"group": "d", "settings": SETTINGS, **others}
    return DelayReplicaConfig(
        replica=name,
        replicas=NAMES,
        data=data / name,
        etcd=NOWHERE,
        data_port=0,
        control_port=0,
        log=log or LogConfig(),
        broker=BrokerConfig(retention_interval_ms=50),
        delay=DelayConfig(tick_ms=50),
        **chosen,
    )


def broker_config(data: Path, name: str = "x", group: str = "g") -> ReplicaConfig:
    """The only replica of a broker group."""
    return ReplicaConfig(group, name, (name,), data / name, NOWHERE, data_port=0, control_port=0)


class DelayCluster:
    """See the module."""

    def __init__(self, data: Path, log: LogConfig | None, timing: NodeTiming) -> None:
        self.data = data
        self.environment = Environment(node_timing=timing)
        self.log = log
        self.store = SharedStore()
        self.view = ClusterView(self.store)
        self.nodes: dict[str, ReplicaNode] = {}
        self.broker = broker_node(broker_config(data), self.store)
        self.meta: MetaServer | None = MetaServer(self.store, self.view, MetaConfig("127.0.0.1", 0))

    async def start(self, name: str) -> ReplicaNode:
        """Start one replica of the delay group."""
        node = self.nodes[name] = delay_node(
            delay_config(self.data, name, self.log), self.store, environment=self.environment
        )
        await node.start()
        return node

    async def stop(self, name: str) -> None:
        """Stop it."""
        await self.nodes.pop(name).stop()

    async def crash(self, name: str) -> None:
        """End the node as if its process had been killed: only what is on disk remains."""
        data, image = self.data / name, self.data / f"{name}-as-it-was"
        shutil.copytree(data, image)
        await self.stop(name)
        shutil.rmtree(data)
        image.rename(data)

    async def stop_meta(self) -> None:
        """No metaserver is left."""
        meta, self.meta = self.meta, None
        if meta is not None:
            await meta.stop()

    async def master(self, *, other_than: str = "") -> ReplicaNode:
        """The replica that serves as master."""

        def serving() -> list[ReplicaNode]:
            return [
                node
                for name, node in self.nodes.items()
                if node.broker.is_serving and name != other_than
            ]

        await eventually(lambda: len(serving()) == 1)
        return serving()[0]

    async def slave(self) -> str:
        """A replica that is not the master."""
        master = await self.master()
        return next(name for name in self.nodes if name != master.config.replica)

    def delivered(self, subject: str) -> int:
        """How many messages the real-time broker has of a subject."""
        queue = self.broker.broker.store.queue(subject, 0)
        return 0 if queue is None else queue.next_sequence

    def schedule(self, name: str) -> Schedule:
        """A replica's."""
        return schedule_of(self.nodes[name].broker.store)

    def pending(self, name: str) -> dict[int, int]:
        """For each bucket, the number of pending messages as a replica sees it."""
        return {each.bucket: each.pending for each in self.schedule(name).buckets() if each.pending}


@asynccontextmanager
async def running_delay(
    data: Path, log: LogConfig | None = None, timing: NodeTiming = TIMING
) -> AsyncIterator[tuple[DelayCluster, str]]:
    """Everything, and the metaserver's address."""
    cluster = DelayCluster(data, log, timing)
    await cluster.view.start()
    assert cluster.meta is not None
    await cluster.meta.start()
    try:
        await cluster.broker.start()
        for name in NAMES:
            await cluster.start(name)
        await cluster.master()
        await eventually(lambda: cluster.broker.broker.is_serving)
        yield cluster, cluster.meta.address
    finally:
        # the last ones have nobody to hand over to
        with patch("qmq.node.replica.status.TRANSFER_S", 0.1):
            for name in list(cluster.nodes):
                await cluster.stop(name)
            await cluster.broker.stop()
        await cluster.stop_meta()
        await cluster.view.stop()
        await cluster.store.end()
