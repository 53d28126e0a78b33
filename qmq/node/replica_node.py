"""`qmq broker`: one replica of one broker group. Assembles the parts; qmq_replication decides about replication.

    DATA/replica.json       the replica's promises and identity (qmq_replication/replica_identity.py)
    DATA/broker/            its store (qmq/log/store.py), the same bytes as on every other replica

Starting: read the identity, ask the coordination store for the group's members (creating a new group), open the store (repairing damage
from the others), listen, take part. It always begins as a slave; the replicas elect the master.

A replica of another kind overrides the methods under *by kind* (qmq/node/delay_node.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qmq_coordination.access_records import ensure_server_token
from qmq_coordination.broker_groups import DelaySettings, Mode, ReplicaRecord
from qmq_coordination.replica_registration import Registration
from qmq_coordination.view import ClusterView, ViewChange
from qmq_replication import replica_identity as identities
from qmq_replication.coordinator import SECRET, find_secret
from qmq_replication.ready import Role
from qmq_replication.replica_identity import ReplicaIdentity
from qmq_replication.replica_membership import ReplicaMembership

from qmq.broker.broker import Broker, MakeParts
from qmq.broker.broker_config import BrokerConfig
from qmq.broker.ordered_writes import Routing
from qmq.clock import Clock, SystemClock
from qmq.errors import CoordinationError, DiskFull, LogDamaged, QmqError
from qmq.log import follower
from qmq.log.checkpoint_writing import close_store
from qmq.log.log_config import Flush, LogConfig
from qmq.log.recent_writes import Place
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.node import bootstrap, replica_repair
from qmq.node.audit_subject import audit_subject_of
from qmq.node.broker_assembly import AddServices, ReplicaBroker
from qmq.node.broker_view import ViewRouting
from qmq.node.environment import MACHINE, Environment
from qmq.node.etcd_options import EtcdOptions
from qmq.node.metering import serving
from qmq.node.metering.access_metrics import AccessSource
from qmq.node.metering.coordination_metrics import CoordinationSource, CountedStore
from qmq.node.metering.exposure_metrics import ExposureSource
from qmq.node.metering.tiering_metrics import TieringSource
from qmq.node.process_status import process_status
from qmq.node.replica_readiness import of_replica
from qmq.private_files import make_private
from qmq.security.access_control import AccessConfig
from qmq.security.audit import AuditLog
from qmq.security.cluster_access import follow_access, server_network
from qmq.tiering.object_store import open_objects
from qmq.tiering.segment_copier import SegmentCopier

if TYPE_CHECKING:
    from qmq_coordination.coordination_store import CoordinationStore

    from qmq.log.projection import Projection
    from qmq.metrics.endpoint import MetricsServer
    from qmq.metrics.figures import FigureSource
    from qmq.metrics.readiness import Readiness

log = logging.getLogger("qmq.node")

MEND_TRIES: Final = 1_000


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One replica. `replicas` are used to create the group. Port 0 takes a free one."""

    group: str
    replica: str
    replicas: tuple[str, ...]
    data: Path
    etcd: EtcdOptions
    host: str = "127.0.0.1"
    data_port: int = 20881
    control_port: int = 20882
    advertise: str = ""
    log: LogConfig = field(default_factory=LogConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    metrics_port: int | None = None
    """The port of /metrics; None: no metrics are served."""
    metrics_host: str = ""
    """The address on which /metrics listens; empty: loopback only."""
    access: AccessConfig = field(default_factory=AccessConfig)


class ReplicaNode:
    """A running replica. Call `start`, then `stop`; after a crash call `start` again."""

    def __init__(
        self,
        config: ReplicaConfig,
        coordination: CoordinationStore | None = None,
        *,
        clock: Clock | None = None,
        kind: DelaySettings | None = None,
        environment: Environment = MACHINE,
    ) -> None:
        self.config = config
        self.kind = kind
        self.folder = config.data / "broker"
        self.coordination = CountedStore(coordination or config.etcd.open())
        self.view = ClusterView(self.coordination)
        self.environment = replace(environment, network=server_network(environment.network, self.view))
        self._audit = audit_subject_of(
            config.access, self.coordination, self.view, self.environment.network, f"{config.group}/{config.replica}"
        )
        self._clock = clock or environment.clock or SystemClock()
        self.access = follow_access(self.view, config.access, AuditLog(sink=self._audit), self._clock)
        self._disk = environment.disk
        self._is_opening = False
        url = config.log.object_store_url
        self._objects = open_objects(url) if url else None
        self._copier: SegmentCopier | None = None
        self._roles: dict[str, int] = {}
        """How often it took each role."""
        self.metrics: MetricsServer | None = None

    # --- starting ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover, then take part.

        Raises: FolderInUse: another process has the folder. InvalidArgument: the group is of another kind. LogDamaged: acknowledged data is
        damaged, and no other replica could repair it. OSError: a port is taken.
        """
        config = self.config
        make_private(config.data)
        found = identities.load(config.data, config.group, config.replica)
        self._identity = found or identities.new(config.group, config.replica)
        self._viewing = asyncio.ensure_future(self._begin_view())
        await asyncio.wait([self._viewing], timeout=self.environment.node_timing.known_wait_s if self._identity.membership else None)
        try:
            self._membership = await self._join()
            self.store = await self._open()
        except BaseException:
            self._viewing.cancel()
            await asyncio.gather(self._viewing, return_exceptions=True)
            await self.view.stop()
            await self.coordination.close()
            raise
        self._judge_past(is_new=found is None)
        self._running = self._assemble()
        self.broker, self.driver, self.standing = self._running.broker, self._running.driver, self._running.status
        self._copier = self._make_copier()
        await self._running.listen(config.data_port, config.control_port, self._also_served())
        self._take_part()
        if self._audit is not None:
            self._audit.start()
        self.metrics = await serving.serve(
            serving.metrics_host(config.host, config.metrics_host),
            config.metrics_port,
            self.sources(),
            self.readiness,
            self.environment.network,
        )

    def _assemble(self) -> ReplicaBroker[Broker]:
        config = self.config
        return ReplicaBroker(
            self._make_broker,
            self,
            self._identity,
            self._membership,
            self.coordination,
            self.view,
            self._clock,
            self.environment,
            access=self.access,
            routing=self._routing(),
            host=config.host,
            advertise=config.advertise,
            process=process_status(config.host, config.etcd, self.environment.network.credentials),
        )

    def _make_copier(self) -> SegmentCopier | None:
        """What copies sealed segments to the object store, if there is one."""
        if self._objects is None:
            return None
        return SegmentCopier(
            lambda: None if self._is_opening else self.broker.store,
            lambda: self.driver.core.role is Role.MASTER,
            self._objects,
            self.config.group,
            self.environment.fatal,
        )

    async def _begin_view(self) -> None:
        """Begin to follow the coordination store. Retries until the store accepts: a replica without a view would miss every change, and no
        one would notice.
        """
        timing = self.environment.node_timing
        pause_s = timing.view_retry_s
        while True:
            try:
                await self.view.start()
                return
            except Exception as failure:
                log.warning("reading the coordination store failed, trying again in %.1f s: %s", pause_s, failure)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, timing.view_retry_s_max)

    async def _join(self) -> ReplicaMembership:
        """The group's members; the group must be of our kind."""
        config, known = self.config, self._identity.members()
        if known is None:
            known = await bootstrap.found(self.coordination, config.group, config.replicas, self.kind)
            with suppress(CoordinationError):  # it is asked for again when this replica registers
                secret = await find_secret(self.coordination, config.group)
                self._identity = replace(self._identity, secret=secret.decode())
            bootstrap.note_folder(self._disk, config.data, self.kind)
            return known
        bootstrap.check_folder(config.data, config.group, self.kind)
        bootstrap.check_group(self.view.group(config.group), self.kind)
        return known

    async def _open(self) -> Store:
        """Open the store; if it is damaged, repair it from the others first."""
        folder = self.folder
        if self._identity.resetting_until:
            self._forget()
            follower.begin_anew(self.folder, (0, 0))
            self._identity = replace(self._identity, resetting_until=0, is_whole=False)
        for _ in range(MEND_TRIES):
            try:
                return self._open_store()
            except LogDamaged as damage:
                if damage.position < 0 or not await self._mend_folder(folder, damage):
                    raise
        raise LogDamaged(
            f"{folder} has more than {MEND_TRIES} damaged entries: move the folder away and start again; "
            "the replica copies the data from the others"
        )

    def _open_store(self, until: int | None = None) -> Store:
        return open_store(
            self.folder, self.config.log, self._clock, disk=self._disk, is_replicated=True, until=until, projection=self._projection()
        )

    async def _mend_folder(self, folder: Path, damage: LogDamaged) -> bool:
        where = self.donors(), folder, self.config.log.segment_bytes, damage
        return await replica_repair.repair_folder(*where, self.environment.network, self._disk)

    def _judge_past(self, *, is_new: bool) -> None:
        """Judge whether this replica may lack entries that it acknowledged, or promises that a folder before this one made."""
        past, boot = self._identity, identities.boot_id()
        lost_power = past.boot not in (boot, identities.CLEAN) and self.config.log.flush is Flush.ASYNC
        is_whole = past.is_whole and not lost_power and not self.store.lost_tail
        promised = past.promised
        epoch = self.view.group(self.config.group).claim.epoch
        if is_new and epoch:
            is_whole, promised = False, epoch
        if past.is_whole and not is_whole:
            log.warning("this replica may lack entries that it acknowledged: it does not vote until it has caught up with a master")
        self._identity = replace(past, is_whole=is_whole, promised=promised, boot=boot)
        self.save(self._identity)

    def save(self, identity: ReplicaIdentity) -> None:
        """Write and sync the replica's promises and identity."""
        identity.save(self._disk, self.config.data)

    def _take_part(self) -> None:
        config, running = self.config, self._running
        record = ReplicaRecord(config.replica, config.group, running.data_address, running.control_address, self._identity.folder)
        self._registration = Registration(self.coordination, record)
        self._registering = asyncio.ensure_future(self._register())
        self.view.on_change(self._changed)
        self._changed(ViewChange())
        running.start()
        if self._copier is not None:
            self._copier.start()

    def readiness(self) -> Readiness:
        """The state for /readyz."""
        return of_replica(self.driver.core, is_serving=self.broker.is_serving, has_all=self.may_serve())

    def sources(self) -> list[FigureSource]:
        """The sources of its metrics."""
        own = serving.sources_of(
            self.broker,
            self.config.group,
            self._running.data,
            self.standing.describe,
            self._roles,
            lambda: self.driver.refused,
        )
        return [
            *own,
            *([TieringSource(self._copier, self.config.group)] if self._copier is not None else []),
            CoordinationSource(self.coordination, self.view),
            AccessSource(self.access),
            ExposureSource(self.config.host, self.config.etcd, self.environment.network.credentials),
        ]

    async def _register(self) -> None:
        while True:
            try:
                await ensure_server_token(self.coordination)
                self.driver.know_secret(await find_secret(self.coordination, self.config.group))
                await self._registration.start()
                return
            except (CoordinationError, DiskFull) as failure:
                log.warning("registering this replica failed, trying again: %s", failure)
                await asyncio.sleep(1)

    # --- by kind -------------------------------------------------------------------------------------------------------

    def _projection(self) -> Projection | None:
        """The store's projection; a new one for each opening."""
        return None

    def _make_broker(self, make_parts: MakeParts) -> Broker:
        config = self.broker_config()
        return Broker(
            self.store, self.view.subject, self._clock, config, asyncio.get_running_loop(), make_parts=make_parts, is_serving=False
        )

    def broker_config(self) -> BrokerConfig:
        """The broker's configuration, with the replica's name."""
        return replace(self.config.broker, name=self.config.replica)

    def _routing(self) -> Routing | None:
        return ViewRouting(self.view, self.config.group)

    def _also_served(self) -> AddServices | None:
        """Adds services to the control port."""
        return None

    def _forget(self) -> None:
        """The log is about to begin anew: remove everything else that was derived from the old one."""

    def may_serve(self) -> bool:
        """Whether the replica has everything that it needs to serve clients."""
        return True

    def must_hold_back(self) -> bool:
        """Whether checkpoints and deletions must wait now."""
        return self.driver.core.resetting_until > 0

    # --- while it runs -------------------------------------------------------------------------------------------------

    def role_changed(self, role: Role) -> None:
        """The replica has a new role."""
        self._roles[role.value] = self._roles.get(role.value, 0) + 1
        if role is not Role.MASTER:
            self._running.write_lease.end()
        self._running.maintenance.after_turn()

    def donors(self) -> dict[str, str]:
        """Control addresses of the other replicas."""
        records = self.view.replicas(self.config.group)
        return {name: each.control_address for name, each in records.items() if name != self.config.replica}

    def _changed(self, _: ViewChange) -> None:
        """The coordination store changed, perhaps before we started."""
        state = self.view.group(self.config.group)
        records = self.view.replicas(self.config.group)
        addresses = {name: each.data_address for name, each in records.items() if name != self.config.replica}
        addresses = {**self.driver.identity.addresses, **addresses}
        self.driver.mesh.update(addresses)
        master_address = state.master.data_address if state.master is not None else None
        self.broker.cluster_changed(is_read_only=state.mode is Mode.READ_ONLY, master_address=master_address)
        if SECRET in state.items:
            self.driver.know_secret(state.items[SECRET].value)
        if state.members is not None:
            membership = ReplicaMembership.decode(state.members)
            self.driver.tell(lambda now_ms: self.driver.core.looked_up(now_ms, state.claim.epoch, membership))
            self.driver.tell(lambda _: self.driver.remember(self.driver.core.membership, addresses))
        if state.master is None and state.claim.epoch:
            self.driver.tell(lambda now_ms: self.driver.core.master_gone(now_ms))

    @property
    def is_opening(self) -> bool:
        """Whether the store is being reopened: its files must not be read."""
        return self._is_opening

    async def reopen(self, until: int | None, place: Place | None) -> Store:
        """Reopen the store in a thread: with everything after an index cut, or beginning anew at a place. The broker's store is closed only
        then.
        """
        self._is_opening = True
        await self._running.repair.stop()
        await self._running.maintenance.pause()
        past = self.broker.store
        past.give_way()
        if place is not None:
            self._forget()
        self.broker.reopened(await asyncio.to_thread(self._open_anew, until, place))
        past.close()
        self._is_opening = False
        self._running.maintenance.go_on()
        return self.broker.store

    def _open_anew(self, until: int | None, place: Place | None) -> Store:
        if place is not None:
            follower.begin_anew(self.folder, place)
        return self._open_store(until)

    # --- the end -------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Host and port of the data port."""
        return f"{self.config.host}:{self._running.data.port}"

    async def stop(self, *, abruptly: bool = False) -> None:
        """Hand the mastership over if this replica has it, answer requests under way, and close so that the next start replays little.
        `abruptly` skips all of that: a test that shut the environment before finds what a killed process leaves (qmq/testing).
        """
        if self.metrics is not None:
            await self.metrics.stop()
        if self._audit is not None:
            await self._audit.stop()
        if self.driver.core.role is Role.MASTER and not abruptly:
            try:
                await self.standing.transfer("")
            except QmqError as failure:
                log.warning("stopping without handing over: %s", failure)
        self.broker.begin_stop()
        if self._copier is not None:
            await self._copier.stop()
        for task in (self._registering, self._viewing):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._running.repair.stop()
        await self.driver.stop()
        await self._registration.stop()
        await self._running.stop_serving(abruptly=abruptly)
        await self.view.stop()
        await self.coordination.close()
        if abruptly:
            self.broker.store.close()
        else:
            self._close_store()

    def _close_store(self) -> None:
        store = self.broker.store
        try:
            if store.committed_index >= store.applied_index and not self.must_hold_back() and not store.unwritten:
                close_store(store)
                self.save(replace(self.driver.identity, boot=identities.CLEAN))
            else:
                store.begin_flush().run()
                store.close()
        except DiskFull as failure:
            log.warning("closed without a checkpoint: %s", failure)
            store.close()


async def run_replica(make: Callable[[], ReplicaNode], role: str = "broker") -> None:
    """Run the node that `make` returns until SIGINT or SIGTERM."""
    from qmq.node.role_process import until_signal
    from qmq.process_tuning import calm_collector, tune_process

    tune_process()
    node = make()
    config = node.config

    async def start() -> str:
        await node.start()
        calm_collector()
        metrics = f", metrics at {node.metrics.address}" if node.metrics is not None else ""
        return f"qmq {role} is ready at {node.address} (replica {config.replica} of {config.group}, folder {config.data}{metrics})"

    if await until_signal(start):
        await node.stop()
