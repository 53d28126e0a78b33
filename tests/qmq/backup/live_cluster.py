"""What was sent to a cluster and acknowledged, and whether a restored cluster has it.

A cluster on real files, ports and etcd, whose nodes run in the test's process: broker groups, a
delay group, a metaserver.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Final

from qmq_coordination.etcd.store import EtcdStore
from qmq_coordination.view import ClusterView
from qmq_replication.ready import Timing
from support import eventually

import qmq
from qmq.backup.create import BackupCreator
from qmq.backup.manifest import BackupManifest
from qmq.backup.objects import BackupObjects
from qmq.backup.restore import ReplicaTarget, Restore
from qmq.broker.config import BrokerConfig
from qmq.limits import KIB
from qmq.log.log_config import LogConfig
from qmq.meta.server import MetaConfig, MetaServer
from qmq.model import Order, SubjectConfig
from qmq.node import process
from qmq.node.broker import broker_node
from qmq.node.delay import DelayReplicaConfig, delay_node
from qmq.node.process import Environment, EtcdOptions
from qmq.node.replica.context import ReplicaConfig
from qmq.node.replica.node import ReplicaNode
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.network import NETWORK
from qmq.tiering.object_store import open_objects

PLAIN: Final = "plain"
ORDERED: Final = "orders"
LATER: Final = "later"
GROUP: Final = "g"
KEYS: Final = tuple(f"key-{number}" for number in range(12))
BODY: Final = "x" * 300
QUIET_S: Final = 2.0
"""No message for this long: there are none left."""


@dataclass
class History:
    """The answers that clients got."""

    plain: list[bytes] = field(default_factory=list)
    ordered: dict[str, list[bytes]] = field(default_factory=lambda: {key: [] for key in KEYS})
    delayed: dict[bytes, str] = field(default_factory=dict)
    """Body to the id of the delayed message."""
    done: set[bytes] = field(default_factory=set)
    """Acknowledged by the group."""
    numbers: count[int] = field(default_factory=count)

    def body(self) -> bytes:
        return f"{next(self.numbers)} {BODY}".encode()

    async def create_subjects(self, mq: qmq.Client) -> None:
        await mq.metadata.create_subject(SubjectConfig(PLAIN))
        await mq.metadata.create_subject(SubjectConfig(LATER))
        await mq.metadata.create_subject(
            SubjectConfig(ORDERED, order=Order.STRICT, logical_partitions=64), partitions=2
        )

    async def send(self, mq: qmq.Client, rounds: int) -> None:
        """A plain message and one for each key, each round; what is recorded was acknowledged."""
        for _ in range(rounds):
            plain, mine = self.body(), {key: self.body() for key in KEYS}
            await asyncio.gather(
                mq.send(PLAIN, plain),
                *[mq.send(ORDERED, body, key=key) for key, body in mine.items()],
            )
            self.plain.append(plain)
            for key, body in mine.items():
                self.ordered[key].append(body)

    async def send_later(self, mq: qmq.Client, messages: int, delay: timedelta) -> None:
        for _ in range(messages):
            body = self.body()
            receipt = await mq.send(LATER, body, delay=delay)
            self.delayed[body] = str(receipt.delayed_id)

    async def consume(self, mq: qmq.Client, messages: int) -> None:
        """The group handles this many plain messages."""
        async with mq.consumer(PLAIN, GROUP, ack="explicit") as consumer:
            for _ in range(messages):
                message = await anext(consumer)
                await message.ack()
                self.done.add(message.body)

    async def split(self, mq: qmq.Client) -> None:
        route = (await mq.metadata.describe_route(ORDERED)).route
        largest = max(route.partitions, key=lambda each: each.lps.end - each.lps.first)
        await mq.metadata.change_route(
            ORDERED,
            split=pb.SplitOperation(partition=largest.number, parts=2),
            from_version=route.version,
        )

    def frozen(self) -> History:
        """A copy of what is acknowledged now."""
        ordered = {key: list(bodies) for key, bodies in self.ordered.items()}
        return History(list(self.plain), ordered, dict(self.delayed), set(self.done))


async def rest(
    mq: qmq.Client, subject: str, group: str, quiet_s: float = QUIET_S
) -> list[tuple[str, bytes]]:
    """(key, body) of all that a group gets until nothing comes any more."""
    found: list[tuple[str, bytes]] = []
    is_ordered = subject == ORDERED
    consumer = (
        mq.ordered_consumer(subject, group)
        if is_ordered
        else mq.consumer(subject, group, ack="explicit")
    )
    async with consumer:
        while True:
            try:
                message = await asyncio.wait_for(anext(consumer), quiet_s)
            except TimeoutError:
                if await _is_all_handed_out(mq, subject, group):
                    return found
                continue
            found.append((message.key or "", message.body))
            await message.ack()


async def _is_all_handed_out(mq: qmq.Client, subject: str, group: str) -> bool:
    """Whether no broker group has a message for the group: on a busy machine nothing may come for a
    while although there is more.
    """
    if subject == ORDERED:
        route = await mq.metadata.describe_route(subject)
        return not route.silent_groups and not any(
            each.backlog for each in route.groups if each.group == group
        )
    found = await mq.metadata.describe_groups(subject, group)
    return not found.silent and not any(
        each.waiting + each.requeued + each.unacked for each in found
    )


def require_order(
    found: Iterable[tuple[str, bytes]], sent: dict[str, list[bytes]], least: dict[str, list[bytes]]
) -> None:
    """Each key's messages are there from `least`, and first appear in the order of sending, of what
    was `sent`.
    """
    by_key: dict[str, list[bytes]] = {}
    for key, body in found:
        mine = by_key.setdefault(key, [])
        if body not in mine:
            mine.append(body)
    for key, wanted in least.items():
        got = by_key.get(key, [])
        assert got[: len(wanted)] == wanted, (
            f"{key}: {len(wanted)} messages were acknowledged before the backup"
        )
        assert got == sent[key][: len(got)], f"{key}: the messages are not in the order of sending"


DELAY: Final = "d"
TIMING: Final = Timing(
    heartbeat_ms=50, suspect_ms=400, lost_ms=80, poll_ms=80, fence_ms=1_000, quorum_ms=2_000
)
SEGMENT_BYTES: Final = 64 * KIB
"""Small, so that logs have sealed segments."""
GROUPS: Final = {"b1": ("b1-a",), "b2": ("b2-a",), DELAY: ("d-a",)}


class LiveCluster:
    """`groups` maps each group to the replicas that it begins with; the group `d` is a delay
    group.
    """

    def __init__(
        self,
        endpoint: str,
        namespace: str,
        folder: Path,
        groups: Mapping[str, tuple[str, ...]] = GROUPS,
        meta_port: int = 0,
    ) -> None:
        self.endpoint, self.namespace = endpoint, namespace
        self.folder = folder
        self.meta_port = meta_port
        self.groups = dict(groups)
        self.nodes: dict[str, ReplicaNode] = {}
        self.store = self.open_store()
        self._meta: MetaServer | None = None

    def open_store(self) -> EtcdStore:
        return EtcdStore([self.endpoint], namespace=self.namespace)

    def data(self, replica: str) -> Path:
        return self.folder / replica

    async def start(self) -> None:
        await asyncio.gather(
            *[
                self.start_replica(group, name)
                for group, names in self.groups.items()
                for name in names
            ]
        )
        self._view = ClusterView(self.store)
        await self._view.start()
        self._meta = MetaServer(
            self.store, self._view, MetaConfig(port=self.meta_port, evacuates=False)
        )
        await self._meta.start()
        self.server = self._meta.address
        self.meta_port = int(self.server.rpartition(":")[2])
        for group in self.groups:
            await self.until_master(group)

    async def start_replica(self, group: str, name: str) -> None:
        log = LogConfig(
            segment_bytes=SEGMENT_BYTES,
            action_segment_bytes=SEGMENT_BYTES,
            checkpoint_bytes=SEGMENT_BYTES,
        )
        place = (
            group,
            name,
            self.groups[group],
            self.data(name),
            EtcdOptions((self.endpoint,)),
            "127.0.0.1",
            0,
            0,
        )
        environment = Environment(timing=TIMING)
        if group == DELAY:
            config = DelayReplicaConfig(
                *place, log=log, broker=BrokerConfig(name), settings=process.DEFAULT
            )
            self.nodes[name] = delay_node(config, self.open_store(), environment=environment)
        else:
            self.nodes[name] = broker_node(
                ReplicaConfig(*place, log=log, broker=BrokerConfig(name)),
                self.open_store(),
                environment=environment,
            )
        await self.nodes[name].start()

    async def until_master(self, group: str) -> None:
        await eventually(
            lambda: (
                self._view.group(group).master is not None
                and any(self.nodes[name].broker.is_serving for name in self.groups[group])
            )
        )

    @asynccontextmanager
    async def client(self) -> AsyncIterator[qmq.Client]:
        async with qmq.connect(self.server) as mq:
            yield mq

    async def stop(self) -> None:
        """Stop what runs; again: nothing."""
        if self._meta is not None:
            await self._meta.stop()
            await self._view.stop()
            self._meta = None
        nodes, self.nodes = self.nodes, {}
        for node in nodes.values():
            await node.stop()
        await self.store.close()

    # --- backups ----------------------------------------------------------------------------------

    async def back_up(self, objects: BackupObjects) -> BackupManifest:
        return await BackupCreator(
            self.store, NETWORK, objects, now_ms=lambda: time.time_ns() // 1_000_000
        ).create()

    async def restore(self, objects: BackupObjects, manifest: BackupManifest) -> None:
        """Make this cluster from a backup: one replica of each group, the first."""
        targets = [
            ReplicaTarget(group, names[0], self.data(names[0]))
            for group, names in self.groups.items()
        ]
        assert await Restore(self.store, objects, manifest).run(targets) == []


def objects_in(folder: Path, *, chunk_bytes: int = 16 * KIB) -> BackupObjects:
    return BackupObjects(open_objects(f"file://{folder}"), chunk_bytes=chunk_bytes)


@asynccontextmanager
async def running(cluster: LiveCluster) -> AsyncIterator[LiveCluster]:
    try:
        await cluster.start()
        yield cluster
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await cluster.stop()
