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
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qmq_coordination.access_records import ensure_server_token
from qmq_coordination.broker_groups import (
    DelaySettings,
    EpochClaim,
    MasterRecord,
    Mode,
    Registration,
    ReplicaRecord,
    ensure_cluster,
    group_key,
)
from qmq_coordination.coordination_store import CoordinationStore, Put, absent
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.view import ClusterView, ViewChange
from qmq_replication.identity import boot_id

from qmq.broker.broker import Broker, MakeParts
from qmq.broker.config import BrokerConfig
from qmq.broker.control import ProcessParts
from qmq.broker.maintenance import stop_process
from qmq.broker.parts import KindParts
from qmq.broker.produce_checks import Routing
from qmq.broker.replica_time import ReplicaTime
from qmq.broker.timekeeper import SteadyClock
from qmq.delay.broker import DelayWork
from qmq.delay.config import DelayConfig
from qmq.delay.files import SCHEDULE, ReplicaScheduleFiles
from qmq.delay.schedule import Schedule
from qmq.delay.service import DelayIdentity, DelayService
from qmq.errors import DiskFull, LogDamaged
from qmq.log.checkpoint import close_store
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import Progress, open_store
from qmq.meta.access import follow_access, server_network
from qmq.meta.server import MetaConfig, MetaServer
from qmq.node import process
from qmq.node.audit_subject import audit_subject_of
from qmq.node.broker_assembly import (
    AddServices,
    MakeBroker,
    StandaloneBroker,
    ViewLocator,
    ViewRouting,
)
from qmq.node.metrics import serving
from qmq.node.metrics.broker import DelaySource, GroupsSource
from qmq.node.metrics.meta import MetaSource, of_meta
from qmq.node.metrics.replica import CoordinationSource, CountedStore
from qmq.node.metrics.serving import AccessSource, ExposureSource
from qmq.node.process import process_status
from qmq.process.event_loop import Clock, SystemClock
from qmq.process.files import make_private
from qmq.rpc.network import NETWORK, Network
from qmq.security.access import AccessConfig
from qmq.security.audit import AuditLog
from qmq.text import joined

if TYPE_CHECKING:
    from qmq.client.connection.pool import ConnectionPool
    from qmq.metrics.endpoint import MetricsServer
    from qmq.metrics.figures import FigureSource, Readiness
    from qmq.node.dev_gateway import DevGateway

log = logging.getLogger("qmq.node")

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


class SingleReplica:
    """A broker group, or delay group, of one replica, which has the group's name. It has the same
    keys as a replicated group, and its master is not elected: the folder's lock admits one process
    only. Call `start`, then `stop`, also after a failed start.
    """

    def __init__(
        self,
        make_broker: MakeBroker,
        coordination: CoordinationStore,
        view: ClusterView,
        routing: Routing | None = None,
        *,
        parts: ProcessParts,
        kind: KindParts | None = None,
    ) -> None:
        self.running = StandaloneBroker(make_broker, view, routing, parts=parts, kind=kind)
        """The broker's data port, its status and its maintenance."""
        self.broker = self.running.broker
        self._time = parts.time
        self._name = self.broker.config.name
        self._coordination = coordination
        self._view = view
        self._registration: Registration | None = None
        view.on_change(self._changed)
        self._changed(ViewChange())

    def _changed(self, change: ViewChange) -> None:
        """Handle a change of the coordination store, which may come before the start."""
        is_read_only = self._view.group(self._name).mode is Mode.READ_ONLY
        self.broker.cluster_changed(is_read_only=is_read_only, subjects=change.subjects)

    async def start(
        self,
        host: str,
        data_port: int,
        control_port: int,
        *,
        also: AddServices | None = None,
        advertise: str = "",
    ) -> None:
        """Listen, and register, with `advertise` as the host if it is given. Raises OSError if a
        port is taken.
        """
        await self._register(
            *await self.running.listen(host, data_port, control_port, also, advertise=advertise)
        )

    async def _register(self, data_address: str, control_address: str) -> None:
        name, epoch = self._name, self.broker.store.epoch
        claim = EpochClaim(epoch, name, "dev")
        await self._coordination.txn(
            [absent(group_key(name, "epoch"))], [Put(group_key(name, "epoch"), claim.encode())]
        )
        master = MasterRecord(name, epoch, claim.attempt, data_address, control_address)
        record = ReplicaRecord(name, name, data_address, control_address)
        self._registration = Registration(
            self._coordination, record, also={group_key(name, "master"): master.encode()}
        )
        await self._registration.start()

    def sources(self) -> list[FigureSource]:
        """The sources of its metrics, without those of its kind of group."""
        return serving.sources_of(
            self.broker,
            self._name,
            self.running.data,
            self.running.status.describe,
            {},
            time=self._time,
        )

    @property
    def data_port(self) -> int:
        return self.running.data.port

    async def retire(self) -> None:
        """Accept no new requests, and unregister."""
        self.broker.begin_stop()
        if self._registration is not None:
            await self._registration.stop()

    async def stop(self) -> None:
        """Answer the requests under way."""
        await self.running.stop()

    def close(self) -> None:
        """Close the store so that the next start replays nothing. On a full disk close without a
        checkpoint, so that the next start replays a little.
        """
        store = self.broker.store
        try:
            store.write_actions()
            close_store(store)
        except DiskFull as failure:
            log.warning("closed without a checkpoint: %s", failure)
            store.close()


@dataclass(frozen=True, slots=True)
class DelayPartConfig:
    """The delay group's folder and settings."""

    folder: Path
    log: LogConfig
    broker: BrokerConfig
    settings: DelaySettings
    delay: DelayConfig


class DelayPart:
    """The delay group, in the same process as its broker. It finds the real-time broker as in a
    cluster, through the coordination store and a connection to its data port. So there is one
    delivery path. The constructor opens the store, and raises the errors of `open_store`.
    """

    def __init__(
        self,
        config: DelayPartConfig,
        clock: Clock,
        coordination: CoordinationStore,
        view: ClusterView,
        *,
        progress: Progress,
        parts: ProcessParts,
    ) -> None:
        folder, broker, settings = config.folder, config.broker, config.settings
        self.clock = clock
        disk = Disk()
        schedule = Schedule(folder / SCHEDULE, disk, settings.bucket_ms)
        store = open_store(
            folder, config.log, clock, disk=disk, progress=progress, projection=schedule
        )
        if not schedule.is_whole:
            store.close()
            raise LogDamaged(
                f"{folder}: the checkpoints are missing, and the log no longer reaches back "
                "to the beginning: restore a copy"
            )
        self._locator = ViewLocator(coordination, view, parts.network)

        self.work = DelayWork(broker.name, settings, config.delay, clock, self._links, stop_process)
        kind = self.work.parts(parts.access)

        def make_broker(make_parts: MakeParts) -> Broker:
            loop = asyncio.get_running_loop()
            return Broker(
                store,
                view.subject,
                clock,
                broker,
                loop,
                make_parts=make_parts,
                is_serving=False,
            )

        self._part = SingleReplica(make_broker, coordination, view, parts=parts, kind=kind)
        self.broker = self._part.broker
        files = ReplicaScheduleFiles(folder, lambda: True)
        identity = DelayIdentity(broker.name, broker.name, settings.bucket_ms)
        self._service = DelayService(
            identity, lambda: self.work.admin if self.broker.is_serving else None, files
        )

    def _links(self) -> ConnectionPool:
        return self._locator.links("qmq-delay/dev")

    async def start(
        self, host: str, data_port: int, control_port: int, *, advertise: str = ""
    ) -> None:
        """Serve clients. Raises OSError if a port is taken."""
        self.broker.serve(self.broker.store)
        await self._part.start(
            host, data_port, control_port, also=self._service.add_to, advertise=advertise
        )

    @property
    def data_port(self) -> int:
        return self._part.data_port

    def sources(self) -> list[FigureSource]:
        """The sources of its metrics."""
        return [*self._part.sources(), DelaySource(self.broker, self.work, self.broker.config.name)]

    async def retire(self) -> None:
        """Stop delivering and accepting messages."""
        await self._part.retire()
        await self.work.stop()
        self._locator.close()

    async def stop(self) -> None:
        """Finish the requests under way, and end."""
        await self._part.stop()

    def close(self) -> None:
        self._part.close()
