"""`qmq dev`: everything in one process, one replica, on one folder. The same code paths as a
cluster's, with the embedded store.

DATA/coordination.db        what a cluster keeps in etcd
DATA/broker/                the broker's store (qmq/log/store.py)
DATA/delay/                 the delay server's store, with its schedule
DATA/retention-time.json    the time by which retention counts (qmq/log/retention_time.py)
DATA/gateway/               the authority and the certificate of the gateway for RocketMQ's clients
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qmq_coordination.access_records import ensure_server_token
from qmq_coordination.broker_groups import DelaySettings, ensure_cluster
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.view import ClusterView
from qmq_replication.identity import boot_id

from qmq.broker.broker import Broker, MakeParts
from qmq.broker.config import BrokerConfig
from qmq.broker.control import ProcessParts
from qmq.broker.replica_time import ReplicaTime
from qmq.broker.timekeeper import SteadyClock
from qmq.delay.config import DelayConfig
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import Progress, open_store
from qmq.meta.access import follow_access, server_network
from qmq.meta.server import MetaConfig, MetaServer
from qmq.node import process
from qmq.node.audit_subject import audit_subject_of
from qmq.node.broker_assembly import StandaloneBroker, ViewRouting
from qmq.node.metrics import serving
from qmq.node.metrics.broker import GroupsSource
from qmq.node.metrics.meta import MetaSource, of_meta
from qmq.node.metrics.replica import CoordinationSource, CountedStore
from qmq.node.metrics.serving import AccessSource, ExposureSource
from qmq.node.process import process_status
from qmq.node.single_replica import SingleReplica
from qmq.process.event_loop import Clock, SystemClock
from qmq.process.files import make_private
from qmq.rpc.network import NETWORK, Network
from qmq.security.access import AccessConfig
from qmq.security.audit import AuditLog
from qmq.text import joined

if TYPE_CHECKING:
    from qmq.metrics.endpoint import MetricsServer
    from qmq.metrics.figures import FigureSource, Readiness
    from qmq.node.dev import DelayPart
    from qmq.node.dev_gateway import DevGateway

RELIST_S: Final = 300.0
"""How often the view lists all keys. The store is in this process and its watch loses nothing, so
listing would only take time.
"""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """A node's data folder and ports. Port 0 takes a free one.

    With `delay` the node has a delay group, too, with these settings, which must not change later.
    """

    data: Path
    host: str = "127.0.0.1"
    meta_port: int = 20880
    data_port: int = 20881
    control_port: int = 20882
    advertise: str = field(default="", kw_only=True)
    """The host by which clients reach the node; empty means `host`."""
    auto_create: bool = True
    log: LogConfig = field(default_factory=LogConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    delay: bool = True
    delay_group: str = "delay"
    delay_data_port: int = 0
    delay_control_port: int = 0
    delay_settings: DelaySettings = process.DEFAULT
    delay_config: DelayConfig = field(default_factory=DelayConfig)
    metrics_port: int | None = None
    """The port of /metrics; None: no metrics are served."""
    metrics_host: str = ""
    """The address on which /metrics listens; empty means loopback only."""
    access: AccessConfig = field(default_factory=AccessConfig)
    gateway_port: int | None = None
    """The port for RocketMQ's clients; None: they are not served."""


def _no_progress(_what: str, _done: int, _total: int) -> None:
    return


class Node:
    """A running node. Call `start`, then `stop`; after a crash call `start` again."""

    def __init__(
        self,
        config: NodeConfig,
        progress: Progress = _no_progress,
        clock: Clock | None = None,
        network: Network = NETWORK,
        disk: Disk | None = None,
    ) -> None:
        """`clock` replaces the machine's clock and is trusted. `network` is for all ports and
        connections, `disk` for the broker's logs.
        """
        self._disk = disk
        self._given_network = network
        self.config = config
        self._progress = progress
        self._wall = clock or SystemClock()
        self._clock = clock or SteadyClock()

    async def start(self) -> None:
        """Recover, then serve.

        Raises: FolderInUse: another process has the folder. InvalidArgument: the folder's groups
        are not those that the config names. LogDamaged: acknowledged data is damaged. OSError: a
        port is taken.
        """
        config = self.config
        make_private(config.data)
        self.coordination = CountedStore(EmbeddedStore(config.data / "coordination.db"))
        self.view = ClusterView(self.coordination, relist_s=RELIST_S)
        self._network = server_network(self._given_network, self.view)
        self._audit = audit_subject_of(
            config.access, self.coordination, self.view, self._network, "dev"
        )
        self.access = follow_access(
            self.view, config.access, AuditLog(sink=self._audit), self._wall
        )
        self._process = process_status(config.host, credentials=self._network.credentials)
        self.delay: DelayPart | None = None
        self.metrics: MetricsServer | None = None
        self.gateway: DevGateway | None = None
        await self.view.start()
        try:
            await ensure_server_token(self.coordination)
            await ensure_cluster(self.coordination)
            await self._open()
        except BaseException:
            await self.view.stop()
            await self.coordination.close()
            raise
        meta = MetaConfig(config.host, config.meta_port, config.auto_create)
        self.meta = MetaServer(
            self.coordination,
            self.view,
            meta,
            clock=self._wall,
            network=self._network,
            access=self.access,
            process=self._process,
        )
        try:
            await self._listen()
        except BaseException:
            await self.stop()
            raise

    async def _open(self) -> None:
        config = self.config
        name = config.broker.name
        await process.found(self.coordination, name, (name,), None)
        self._time = ReplicaTime(
            self._clock, config.data, self._disk or Disk(), boot_id()
        )  # nobody is asked: all is on one machine
        self.store = open_store(
            config.data / "broker",
            config.log,
            self._clock,
            disk=self._disk,
            progress=self._progress,
        )
        self._parts = ProcessParts(self._time, self._network, self.access, self._process)
        routing = ViewRouting(self.view, name)
        self._part = SingleReplica(
            self._make_broker,
            self.coordination,
            self.view,
            routing,
            parts=self._parts,
        )
        self.broker = self._part.broker
        if config.delay:
            try:
                self.delay = await self._open_delay()
            except BaseException:
                await self._part.stop()
                self._part.close()
                raise

    def _make_broker(self, make_parts: MakeParts) -> Broker:
        return Broker(
            self.store,
            self.view.subject,
            self._clock,
            self.config.broker,
            asyncio.get_running_loop(),
            make_parts=make_parts,
        )

    async def _open_delay(self) -> DelayPart:
        from qmq.node.dev import DelayPart, DelayPartConfig

        config = self.config
        broker = replace(config.broker, name=config.delay_group)
        settings = process.check_settings(config.delay_settings)
        await process.found(self.coordination, broker.name, (broker.name,), settings)
        return DelayPart(
            DelayPartConfig(
                config.data / "delay", config.log, broker, settings, config.delay_config
            ),
            self._clock,
            self.coordination,
            self.view,
            progress=self._progress,
            parts=self._parts,
        )

    async def _listen(self) -> None:
        config = self.config
        self._time.begin(self.store.last_time_ms)
        self._time.start()
        await self._part.start(
            config.host, config.data_port, config.control_port, advertise=config.advertise
        )
        if self.delay is not None:
            await self.delay.start(
                config.host,
                config.delay_data_port,
                config.delay_control_port,
                advertise=config.advertise,
            )
        await self.view.refresh()
        await self.meta.start()
        if self._audit is not None:
            self._audit.start()
        if config.gateway_port is not None:
            from qmq.node.dev_gateway import DevGateway  # few nodes have one

            folder = config.data / "gateway"
            self.gateway = DevGateway(
                self.address,
                folder,
                config.host,
                config.gateway_port,
                self._clock,
                self._given_network,
            )
            await self.gateway.start()
        self.metrics = await serving.serve(
            serving.metrics_host(config.host, config.metrics_host),
            config.metrics_port,
            self.sources(),
            self.readiness,
            self._network,
        )

    def readiness(self) -> Readiness:
        """The state for /readyz."""
        return of_meta(self.broker.is_serving)

    def sources(self) -> list[FigureSource]:
        """The sources of its metrics."""
        of_delay = self.delay.sources() if self.delay is not None else []
        own = (
            MetaSource(self.meta, self.view),
            CoordinationSource(self.coordination, self.view),
            AccessSource(self.access),
            ExposureSource(self.config.host, credentials=self._network.credentials),
        )
        return [
            *self._part.sources(),
            GroupsSource(self.broker, self.config.broker.name),
            *of_delay,
            *own,
        ]

    @property
    def running(self) -> StandaloneBroker:
        """The broker's data port, its status and its maintenance."""
        return self._part.running

    @property
    def meta_port(self) -> int:
        return self.meta.port

    @property
    def address(self) -> str:
        """The metaserver's address, for clients."""
        return joined(self.config.advertise or self.config.host, self.meta_port)

    @property
    def data_address(self) -> str:
        """The broker's data port."""
        return joined(self.config.advertise or self.config.host, self._part.data_port)

    async def stop(self) -> None:
        """Finish requests, then close so that the next start replays nothing."""
        if self.metrics is not None:
            await self.metrics.stop()
        if self.gateway is not None:
            await self.gateway.stop()
        if self._audit is not None:
            await self._audit.stop()
        await self._time.stop()
        if self.delay is not None:
            await self.delay.retire()
        await self._part.retire()
        await self.meta.stop()
        if self.delay is not None:
            await self.delay.stop()
        await self._part.stop()
        await self.view.stop()
        await self.coordination.close()
        if self.delay is not None:
            self.delay.close()
        self._part.close()
