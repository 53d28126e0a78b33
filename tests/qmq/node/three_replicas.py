"""Three replicas of a broker group and a metaserver in one event loop, on one coordination store in
memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from qmq_coordination.view import ClusterView
from support import eventually
from support.stores import SharedStore

from qmq.meta.server import MetaConfig, MetaServer
from qmq.node.broker import broker_node
from qmq.node.process import MACHINE, Environment, EtcdOptions
from qmq.node.replica.context import ReplicaConfig
from qmq.node.replica.node import ReplicaNode

NAMES = ("a", "b", "c")


def replica_config(folder: Path, name: str, **options: Any) -> ReplicaConfig:
    """A replica of group `g`."""
    chosen: dict[str, Any] = {"data_port": 0, "control_port": 0, **options}
    return ReplicaConfig("g", name, NAMES, folder / name, EtcdOptions(("127.0.0.1:1",)), **chosen)


class ThreeReplicas:
    """The replicas that run, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, SharedStore()
        self.nodes: dict[str, ReplicaNode] = {}

    def config(self, name: str) -> ReplicaConfig:
        return replica_config(self.folder, name)

    def environment_of(self, name: str) -> Environment:
        return MACHINE

    async def start(self, *names: str, store: Any = None) -> None:
        """Start these, on the common coordination store if no other is given."""
        for name in names:
            environment = self.environment_of(name)
            node = broker_node(self.config(name), store or self.store, environment=environment)
            await node.start()
            self.nodes[name] = node

    async def stop(self, name: str) -> None:
        await self.nodes.pop(name).stop()

    async def master(self) -> str:
        await eventually(lambda: any(node.broker.is_serving for node in self.nodes.values()))
        return next(name for name, node in self.nodes.items() if node.broker.is_serving)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """All of them, and the metaserver's address."""
        view = ClusterView(self.store)
        await view.start()
        meta = MetaServer(self.store, view, MetaConfig("127.0.0.1", 0))
        await meta.start()
        try:
            await self.start(*NAMES)
            yield meta.address
        finally:
            for name in list(self.nodes):
                await self.stop(name)
            await meta.stop()
            await view.stop()
            await self.store.end()
