"""Clusters in this event loop, on one coordination store in memory: broker groups, three replicas
that a test starts one by one, and a delay group. And the calls by which a client first reaches one.

Readers of columns block, so tests run them in a thread: `await asyncio.to_thread(...)`.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from qmq_coordination.broker_groups import DelaySettings
from qmq_coordination.view import ClusterView

import qmq
from qmq.broker.config import BrokerConfig
from qmq.client.metadata.cache import Master
from qmq.columns.model import QueuePiece, ReadSelection, SourceBatch
from qmq.columns.servers.log import ServerLog
from qmq.delay.broker import schedule_of
from qmq.delay.config import DelayConfig
from qmq.delay.schedule import Schedule
from qmq.limits import KIB
from qmq.log.log_config import LogConfig
from qmq.meta.server import MetaConfig, MetaServer
from qmq.node.broker import broker_node
from qmq.node.delay import DelayReplicaConfig, delay_node
from qmq.node.process import MACHINE, TIMING, Environment, EtcdOptions, NodeTiming
from qmq.node.replica.context import ReplicaConfig
from qmq.node.replica.node import ReplicaNode
from qmq.rpc.network import NETWORK, Network
from qmq.wire.batch import BatchView
from support import eventually
from support.stores import SharedStore

NAMES = ("a", "b", "c")
THREE = {"g1": ("g1-a",), "g2": ("g2-a",), "g3": ("g3-a",)}
REPLICATED = {"g1": ("g1-a", "g1-b", "g1-c")}
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


def replica_config(
    folder: Path, name: str, replicas: Sequence[str] = NAMES, *, group: str = "g", **options: Any
) -> ReplicaConfig:
    """A replica of a broker group, on free ports."""
    chosen: dict[str, Any] = {"data_port": 0, "control_port": 0, **options}
    return ReplicaConfig(group, name, tuple(replicas), folder / name, NOWHERE, **chosen)


def delay_config(
    folder: Path, name: str, log: LogConfig | None = None, **others: Any
) -> DelayReplicaConfig:
    """A replica of the delay group `d`."""
    chosen: dict[str, Any] = {"group": "d", "settings": SETTINGS, **others}
    return DelayReplicaConfig(
        replica=name,
        replicas=NAMES,
        data=folder / name,
        etcd=NOWHERE,
        data_port=0,
        control_port=0,
        log=log or LogConfig(),
        broker=BrokerConfig(retention_interval_ms=50),
        delay=DelayConfig(tick_ms=50),
        **chosen,
    )


class LoopCluster:
    """A metaserver, and the replicas that run, by name."""

    def __init__(self, folder: Path, network: Network = NETWORK) -> None:
        """`network` is the metaserver's."""
        self.folder = folder
        self.store = SharedStore()
        self.view = ClusterView(self.store)
        self.nodes: dict[str, ReplicaNode] = {}
        self.meta = MetaServer(self.store, self.view, MetaConfig("127.0.0.1", 0), network=network)
        self._has_meta = True

    async def stop(self, name: str) -> None:
        """Stop a replica, which hands over first."""
        await self.nodes.pop(name).stop()

    async def stop_all(self) -> None:
        # the last ones have nobody to hand over to
        with patch("qmq.node.replica.status.TRANSFER_S", 0.1):
            for name in list(self.nodes):
                await self.stop(name)

    async def stop_meta(self) -> None:
        """No metaserver is left."""
        if self._has_meta:
            self._has_meta = False
            await self.meta.stop()

    async def crash(self, name: str) -> None:
        """End the server as if its process had been killed: only what is on disk remains."""
        folder, image = self.folder / name, self.folder / f"{name}-as-it-was"
        shutil.copytree(folder, image)
        await self.stop(name)
        shutil.rmtree(folder)
        image.rename(folder)

    async def only_master(self, names: Collection[str], other_than: str = "") -> ReplicaNode:
        """Wait until one of these replicas serves as master."""

        def serving() -> list[ReplicaNode]:
            return [
                node
                for name, node in self.nodes.items()
                if name in names and name != other_than and node.broker.is_serving
            ]

        await eventually(lambda: len(serving()) == 1)
        return serving()[0]

    @asynccontextmanager
    async def with_meta(self) -> AsyncIterator[str]:
        """The metaserver runs, at this address. At the end everything is stopped."""
        await self.view.start()
        await self.meta.start()
        try:
            yield self.meta.address
        finally:
            await self.stop_all()
            await self.stop_meta()
            await self.view.stop()
            await self.store.end()


class ServerCluster(LoopCluster):
    """`shape`: the replicas of each broker group."""

    def __init__(self, folder: Path, shape: Mapping[str, Sequence[str]], log: LogConfig) -> None:
        super().__init__(folder)
        self.shape = shape
        self.log = log

    @property
    def servers(self) -> str:
        """The metaserver's address."""
        return self.meta.address

    async def start(self, name: str) -> ReplicaNode:
        """Start a replica."""
        group, names = next(each for each in self.shape.items() if name in each[1])
        config = replica_config(self.folder, name, names, group=group, log=self.log)
        node = self.nodes[name] = broker_node(config, self.store)
        await node.start()
        return node

    async def master(self, group: str, *, other_than: str = "") -> ReplicaNode:
        """Wait for a replica that serves as master."""
        return await self.only_master(self.shape[group], other_than)

    async def stop(self, name: str) -> None:
        """Stop a replica without waiting for a hand-over."""
        with patch("qmq.node.replica.status.TRANSFER_S", 0.1):
            await super().stop(name)


@asynccontextmanager
async def cluster(
    folder: Path, shape: Mapping[str, Sequence[str]] = THREE, log: LogConfig | None = None
) -> AsyncIterator[ServerCluster]:
    """A started cluster with a master in each group."""
    found = ServerCluster(folder, shape, log or LogConfig())
    async with found.with_meta():
        for names in shape.values():
            for name in names:
                await found.start(name)
        for group in shape:
            await found.master(group)
        yield found


class ThreeReplicas(LoopCluster):
    """Three replicas of the broker group `g`."""

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

    async def master(self) -> str:
        await eventually(lambda: any(node.broker.is_serving for node in self.nodes.values()))
        return next(name for name, node in self.nodes.items() if node.broker.is_serving)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """All of them, and the metaserver's address."""
        async with self.with_meta() as address:
            await self.start(*NAMES)
            yield address


class DelayCluster(LoopCluster):
    """A delay group of three, and a broker group of one."""

    def __init__(self, folder: Path, log: LogConfig | None, timing: NodeTiming) -> None:
        super().__init__(folder)
        self.environment = Environment(node_timing=timing)
        self.log = log
        self.broker = broker_node(replica_config(folder, "x", ("x",)), self.store)

    async def start(self, name: str) -> ReplicaNode:
        """Start one replica of the delay group."""
        node = self.nodes[name] = delay_node(
            delay_config(self.folder, name, self.log), self.store, environment=self.environment
        )
        await node.start()
        return node

    async def stop_all(self) -> None:
        await super().stop_all()
        with patch("qmq.node.replica.status.TRANSFER_S", 0.1):
            await self.broker.stop()

    async def master(self, *, other_than: str = "") -> ReplicaNode:
        """The replica that serves as master."""
        return await self.only_master(self.nodes, other_than)

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
    folder: Path, log: LogConfig | None = None, timing: NodeTiming = TIMING
) -> AsyncIterator[tuple[DelayCluster, str]]:
    """Everything, and the metaserver's address."""
    cluster = DelayCluster(folder, log, timing)
    async with cluster.with_meta() as address:
        await cluster.broker.start()
        for name in NAMES:
            await cluster.start(name)
        await cluster.master()
        await eventually(lambda: cluster.broker.broker.is_serving)
        yield cluster, address


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


# --- a client's first calls -----------------------------------------------------------------------


async def _consume(mq: qmq.Client) -> object:
    return await anext(mq.consumer("s", group="g"))


async def _consume_ordered(mq: qmq.Client) -> object:
    return await anext(mq.ordered_consumer("keys", group="g"))


async def _browse(mq: qmq.Client) -> object:
    return [each async for each in mq.browse("s")]


async def _produce(mq: qmq.Client) -> object:
    producer = mq.producer("s")
    ticket = producer.send(b"x")
    await producer.flush()
    return await ticket


CALLS: dict[str, Callable[[qmq.Client], Awaitable[object]]] = {
    "send": lambda mq: mq.send("s", b"x"),
    "send delayed": lambda mq: mq.send("s", b"x", delay=timedelta(hours=1)),
    "send ordered": lambda mq: mq.send("keys", b"x", key="k"),
    "produce": _produce,
    "consume": _consume,
    "consume ordered": _consume_ordered,
    "browse": _browse,
}


class KnownMasters:
    """A locator that knows all masters."""

    def __init__(self, masters: dict[str, Master]) -> None:
        self._masters = masters

    async def master(self, _subject: str, group: str) -> Master:
        return self._masters[group]

    async def close(self) -> None: ...

    def doubt(self, *_: object) -> None: ...
