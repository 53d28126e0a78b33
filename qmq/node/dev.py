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
from qmq_coordination.registry import BrokerRecord, Registration
from qmq_coordination.subjects import SubjectCache

from qmq.broker.admin import BrokerAdmin
from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.control import serve_control
from qmq.broker.server import DataServer
from qmq.broker.upkeep import Upkeep
from qmq.clock import SystemClock
from qmq.errors import DiskFull
from qmq.log.checkpointing import close_store
from qmq.log.config import LogConfig
from qmq.log.recovery import Progress, open_store
from qmq.log.store import Store
from qmq.meta.service import MetaService, serve_meta

log = logging.getLogger("qmq.node")

STOP_GRACE_S: Final = 1.0


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
        self._subjects = SubjectCache(self.coordination)
        await self._subjects.start()
        self.store = open_store(config.data / "broker", config.log, self._clock, progress=self._progress)
        self.broker = Broker(
            self.store, self._subjects.look_up, self._clock, config.broker, asyncio.get_running_loop()
        )
        self._subjects.on_change = self.broker.forget_routes
        self._upkeep = Upkeep(self.broker)
        self._data = DataServer(self.broker)
        self._meta = MetaService(self.coordination, auto_create=config.auto_create)
        try:
            await self._listen()
        except BaseException:
            await self.stop()
            raise

    async def _listen(self) -> None:
        config = self.config
        await self._data.start(config.host, config.data_port)
        self._upkeep.start()
        control, control_port = await serve_control(
            BrokerAdmin(self.broker), config.broker.name, config.host, config.control_port
        )
        self._servers.append(control)
        record = BrokerRecord(
            config.broker.name, f"{config.host}:{self._data.port}", f"{config.host}:{control_port}", self.store.epoch
        )
        self._registration = Registration(self.coordination, record)
        await self._registration.start()
        meta, self.meta_port = await serve_meta(self._meta, config.host, config.meta_port)
        self._servers.append(meta)

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
        for server in self._servers:
            await server.stop(STOP_GRACE_S)
        await self._meta.close()
        await self._data.stop()
        await self._upkeep.stop()
        await self._subjects.stop()
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
