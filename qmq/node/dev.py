"""`qmq dev`: everything in one process, one replica, on one folder. The same code paths as a cluster's, with the embedded store.

    DATA/coordination.db        what a cluster keeps in etcd
    DATA/broker/                the broker's store (qmq/log/store.py)
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.groups import Claim, Master, Mode, ReplicaRecord, group_key
from qmq_coordination.registry import Registration
from qmq_coordination.store import Put, absent
from qmq_coordination.view import Change, ClusterView
from qmq_replication.membership import Membership

from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.control import serve_control
from qmq.broker.server import DataServer
from qmq.broker.standing import AloneStanding
from qmq.broker.upkeep import Upkeep
from qmq.clock import SystemClock
from qmq.errors import DiskFull
from qmq.log.checkpointing import close_store
from qmq.log.config import LogConfig
from qmq.log.recovery import Progress, open_store
from qmq.log.store import Store
from qmq.meta.server import MetaConfig, MetaServer
from qmq.node.routing import ViewRouting

log = logging.getLogger("qmq.node")

STOP_GRACE_S: Final = 1.0
RELIST_S: Final = 300.0
"""The store is in this process, and its watch loses nothing: listing ten thousand subjects would only take time from the broker."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Where a node keeps its data and listens. Port 0 takes a free one."""

    data: Path
    host: str = "127.0.0.1"
    meta_port: int = 20880
    data_port: int = 20881
    control_port: int = 20882
    auto_create: bool = True
    log: LogConfig = field(default_factory=LogConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)


def _no_progress(_what: str, _done: int, _total: int) -> None:
    return


class Node:
    """A running node. `start`, then `stop`; after a crash just `start` again."""

    def __init__(self, config: NodeConfig, progress: Progress = _no_progress) -> None:
        self.config = config
        self._progress = progress
        self._clock = SystemClock()
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Recover, then serve.

        Raises:
            FolderInUse: another process has the folder.
            LogDamaged: acknowledged data is hurt.
            OSError: a port is taken.
        """
        config = self.config
        config.data.mkdir(parents=True, exist_ok=True)
        self.coordination = EmbeddedStore(config.data / "coordination.db")
        self.view = ClusterView(self.coordination, relist_s=RELIST_S)
        await self.view.start()
        try:
            self.store = open_store(config.data / "broker", config.log, self._clock, progress=self._progress)
        except BaseException:
            await self.view.stop()
            await self.coordination.close()
            raise
        self.broker = Broker(self.store, self.view.subject, self._clock, config.broker, asyncio.get_running_loop())
        self.broker.routing = ViewRouting(self.view, config.broker.name)
        self.view.on_change(self._changed)
        self._changed(Change())
        self._upkeep = Upkeep(self.broker)
        self._data = DataServer(self.broker)
        self._meta = MetaServer(self.coordination, self.view, MetaConfig(config.host, config.meta_port, config.auto_create))
        try:
            await self._listen()
        except BaseException:
            await self.stop()
            raise

    def _changed(self, _: Change) -> None:
        """The coordination store has news; or had, before we started."""
        self.broker.forget_routes()
        self.broker.is_read_only = self.view.group(self.config.broker.name).mode is Mode.READ_ONLY

    async def _listen(self) -> None:
        config = self.config
        await self._data.start(config.host, config.data_port)
        self._upkeep.start()
        control, control_port = await serve_control(
            self.broker, AloneStanding(self.broker), config.broker.name, config.host, config.control_port
        )
        self._servers.append(control)
        await self._register(f"{config.host}:{self._data.port}", f"{config.host}:{control_port}")
        await self._meta.start()

    async def _register(self, data_address: str, control_address: str) -> None:
        """The same keys as a replicated group's, with a master that nobody elects: the folder's lock lets only one process be it."""
        name, epoch = self.config.broker.name, self.store.epoch
        claim = Claim(epoch, name, "dev")
        for key, value in (("members", Membership(1, (name,)).encode()), ("epoch", claim.encode())):
            await self.coordination.txn([absent(group_key(name, key))], [Put(group_key(name, key), value)])
        master = Master(name, epoch, claim.attempt, data_address, control_address)
        record = ReplicaRecord(name, name, data_address, control_address)
        self._registration = Registration(self.coordination, record, also={group_key(name, "master"): master.encode()})
        await self._registration.start()
        await self.view.refresh()

    @property
    def meta_port(self) -> int:
        """The metaserver's port."""
        return self._meta.port

    @property
    def address(self) -> str:
        """The metaserver's address, for clients."""
        return f"{self.config.host}:{self.meta_port}"

    @property
    def data_address(self) -> str:
        """The broker's data port."""
        return f"{self.config.host}:{self._data.port}"

    async def stop(self) -> None:
        """Answer what is under way, then close so that the next start replays nothing."""
        self.broker.is_stopping = True
        if hasattr(self, "_registration"):
            await self._registration.stop()
        await self._meta.stop()
        for server in self._servers:
            await server.stop(STOP_GRACE_S)
        await self._data.stop()
        await self._upkeep.stop()
        await self.view.stop()
        await self.coordination.close()
        _close(self.store)


def _close(store: Store) -> None:
    """Close; on a full disk without the checkpoint, so that the next start replays a little."""
    try:
        store.write_actions()
        close_store(store)
    except DiskFull as failure:
        log.warning("closed without a checkpoint: %s", failure)
        store.close()
