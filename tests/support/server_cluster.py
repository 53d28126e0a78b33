"""Broker groups of one replica or of three and a metaserver, in this event loop, on one
coordination store in memory.

Their readers block, so tests run them in a thread: `await asyncio.to_thread(...)`.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

from qmq_coordination.view import ClusterView

from qmq.columns.model import QueuePiece, ReadSelection, SourceBatch
from qmq.columns.servers.log import ServerLog
from qmq.log.log_config import LogConfig
from qmq.meta.server import MetaConfig, MetaServer
from qmq.node.broker import broker_node
from qmq.node.process import EtcdOptions
from qmq.node.replica.context import ReplicaConfig
from qmq.node.replica.node import ReplicaNode
from qmq.wire.batch import BatchView
from support import eventually
from support.stores import SharedStore

THREE = {"g1": ("g1-a",), "g2": ("g2-a",), "g3": ("g3-a",)}
REPLICATED = {"g1": ("g1-a", "g1-b", "g1-c")}


class ServerCluster:
    """`shape`: the replicas of each broker group."""

    def __init__(self, data: Path, shape: Mapping[str, Sequence[str]], log: LogConfig) -> None:
        self.data = data
        self.shape = shape
        self.log = log
        self.store = SharedStore()
        self.nodes: dict[str, ReplicaNode] = {}
        self.view = ClusterView(self.store)
        self.meta = MetaServer(self.store, self.view, MetaConfig("127.0.0.1", 0))

    @property
    def servers(self) -> str:
        """The metaserver's address."""
        return self.meta.address

    def _config(self, group: str, name: str) -> ReplicaConfig:
        nowhere = EtcdOptions(("127.0.0.1:1",))
        return ReplicaConfig(
            group,
            name,
            tuple(self.shape[group]),
            self.data / name,
            nowhere,
            data_port=0,
            control_port=0,
            log=self.log,
        )

    async def start(self, name: str) -> ReplicaNode:
        """Start a replica."""
        group = next(group for group, names in self.shape.items() if name in names)
        node = self.nodes[name] = broker_node(self._config(group, name), self.store)
        await node.start()
        return node

    async def master(self, group: str, *, other_than: str = "") -> ReplicaNode:
        """Wait for a replica that serves as master."""

        def serving() -> list[ReplicaNode]:
            names = [
                name for name in self.nodes if name in self.shape[group] and name != other_than
            ]
            return [self.nodes[name] for name in names if self.nodes[name].broker.is_serving]

        await eventually(lambda: len(serving()) == 1)
        return serving()[0]

    async def stop(self, name: str) -> None:
        """Stop a replica without waiting for a hand-over."""
        with patch("qmq.node.replica.status.TRANSFER_S", 0.1):
            await self.nodes.pop(name).stop()

    async def crash(self, name: str) -> None:
        """End the server as if its process had been killed: only what is on disk remains."""
        data, image = self.data / name, self.data / f"{name}-as-it-was"
        shutil.copytree(data, image)
        await self.stop(name)
        shutil.rmtree(data)
        image.rename(data)


@asynccontextmanager
async def cluster(
    data: Path, shape: Mapping[str, Sequence[str]] = THREE, log: LogConfig | None = None
) -> AsyncIterator[ServerCluster]:
    """A started cluster with a master in each group."""
    found = ServerCluster(data, shape, log or LogConfig())
    await found.view.start()
    await found.meta.start()
    try:
        for names in shape.values():
            for name in names:
                await found.start(name)
        for group in shape:
            await found.master(group)
        yield found
    finally:
        for name in list(found.nodes):
            await found.stop(name)
        await found.meta.stop()
        await found.view.stop()
        await found.store.end()


def read_all(
    log: ServerLog, pieces: Sequence[QueuePiece], selection: ReadSelection | None = None
) -> list[SourceBatch]:
    """Read the pieces, one after another."""
    return [
        batch
        for piece in pieces
        for batch in log.read(piece, selection or ReadSelection(), skips_lost=False)
    ]


def bodies(batches: Sequence[SourceBatch]) -> list[bytes]:
    """The bodies of all messages, in order."""
    return [
        body for envelope, region in batches for body in BatchView(envelope, bytes(region)).bodies()
    ]
