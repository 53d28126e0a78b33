"""One replica of a group: starts it, stops it, and asks it to hand its mastership over.
`qmq/node/broker.py` and `qmq/node/delay.py` make it; qmq_replication decides about replication.

    DATA/replica.json       the replica's promises and identity (qmq_replication/identity.py)
    DATA/broker/            its store (qmq/log/store.py), the same bytes as on every other replica

A start reads the identity, asks the coordination store for the group's members (or creates the
group), opens the store (and repairs damage from the others), listens, and joins the group. A
replica always begins as a slave; the replicas elect the master.

`hand_over` asks a replica of this machine before its process is stopped (`qmq broker hand-over`, a
pod's preStop). A process that gets SIGTERM hands over, too. An earlier hand-over has two
advantages. The former master still answers, so it sends clients to the new master instead of
closing their connections. And a hand-over that fails, because no other replica is in step, is tried
again.

`ReplicaRegistering` registers a replica in the coordination store, and detects there an older copy
of its folder (qmq_replication/identity.py):

    1. read the replica's record        an older copy of the folder: the replica is in doubt, and
                                        promises the store's highest epoch
    2. save the next generation
    3. put it into the record           from now on every copy of the folder that was made before is
                                        older
    4. take part                        the first acknowledgements and promises of this generation

    dies after 2                        the folder is ahead by one, which is no sign of a copy
    dies after 3                        folder and record agree

While the replica works, 2 and 3 are repeated once a minute if its log or promise has changed, so a
copy of a folder in use is older after a minute. If the store cannot be reached at the start, the
replica takes part without it, as it always did, but counts in no election until the store has
answered: without the store no replica can win one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import grpc
from qmq_coordination.access_records import ensure_server_token
from qmq_coordination.broker_groups import (
    Mode,
    Registration,
    ReplicaRecord,
    ensure_cluster,
    read_group,
    replica_key,
)
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.view import ViewChange
from qmq_replication import identity
from qmq_replication.coordinator import SECRET, find_secret
from qmq_replication.driver import Driver
from qmq_replication.identity import require_cluster
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import EPOCH_MAX

from qmq.broker.control import ProcessParts
from qmq.broker.replica_time import ControlPorts, ReplicaTime
from qmq.errors import CoordinationError, DiskFull, QmqError, Unavailable, WrongServer
from qmq.log.checkpoint import close_store
from qmq.log.log_config import Flush
from qmq.log.store import Store
from qmq.meta.access import follow_access
from qmq.node import process
from qmq.node.audit_subject import audit_subject_of
from qmq.node.metrics import serving
from qmq.node.metrics.broker import TieringSource
from qmq.node.metrics.replica import CoordinationSource
from qmq.node.metrics.serving import AccessSource, ExposureSource
from qmq.node.process import NodeTiming, process_status
from qmq.node.replica.broker import ReplicaBroker, ReplicaKind
from qmq.node.replica.context import ReplicaContext, StoreOpener
from qmq.node.replica.status import of_replica
from qmq.process.event_loop import SystemClock
from qmq.process.files import make_private
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.channel import typed_error
from qmq.rpc.network import Network
from qmq.rpc.server_name import ServerName, always
from qmq.security.audit import AuditLog
from qmq.text import joined
from qmq.tiering.object_store import READ_RETRY_S, READ_S, open_objects
from qmq.tiering.segment_copier import SegmentCopier
from qmq.tiering.stored_reads import StoredBeginnings, StoredReads

if TYPE_CHECKING:
    from qmq.metrics.endpoint import MetricsServer
    from qmq.metrics.figures import FigureSource, Readiness
    from qmq.node.replica.context import ReplicaConfig


RETRY_S: Final = 1.0


class ReplicaRegistering:
    def __init__(
        self, store: CoordinationStore, driver: Driver, record: ReplicaRecord, timing: NodeTiming
    ) -> None:
        self._store = store
        self._driver = driver
        self._record = record
        self._timing = timing
        self._registration = Registration(store, record)
        self._registered = 0
        """The generation that the store has."""
        self.older_store = ""
        """Not empty if the store has forgotten something of this replica or its group."""
        self._task: asyncio.Task[None] | None = None
        driver.core.withhold_vote()

    async def start(self) -> None:
        """Register. If the store does not answer in time, this continues in the background."""
        registered = asyncio.Event()
        self._task = asyncio.create_task(self._run(registered))
        waiting = asyncio.create_task(registered.wait())
        await asyncio.wait(
            [waiting, self._task],
            timeout=self._timing.known_wait_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        waiting.cancel()

    async def stop(self) -> None:
        """Delete the keys under the lease."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._registration.stop()

    async def _run(self, registered: asyncio.Event) -> None:
        while True:
            try:
                await self._register()
                break
            except (CoordinationError, DiskFull, WrongServer) as failure:
                log.warning("registering this replica failed, trying again: %s", failure)
                await asyncio.sleep(RETRY_S)
        registered.set()
        seen = self._state()
        while True:
            await asyncio.sleep(self._timing.generation_s)
            now = self._state()
            if now != seen and await self._grow():
                seen = now

    async def _register(self) -> None:
        driver, group = self._driver, self._record.group
        cluster = await ensure_cluster(self._store, driver.identity.cluster)
        require_cluster(driver.identity, cluster)
        await ensure_server_token(self._store)
        driver.set_secret(await find_secret(self._store, group))
        found = await self._store.get(replica_key(group, self._record.replica))
        known = (
            ReplicaRecord("", "", "", "") if found is None else ReplicaRecord.decode(found.value)
        )
        state = await read_group(self._store, group)
        epoch, members = state.claim.epoch, state.members
        if found is not None:
            self._doubt_older_copy(known, epoch)
        self.older_store = self._forgotten(known, epoch, members)
        if self.older_store:
            log.critical(
                (
                    "the data of the coordination store was put back: %s. docs/BACKUP.md says "
                    "what to do"
                ),
                self.older_store,
            )
        driver.grow(replace(driver.identity.grown(known.folder, known.generation), cluster=cluster))
        self._registration = Registration(self._store, self._present())
        await self._registration.start()
        self._registered = driver.identity.generation
        driver.call_core(lambda _: driver.core.vouch(), "generation")

    def _doubt_older_copy(self, known: ReplicaRecord, epoch: int) -> None:
        identity = self._driver.identity
        if identity.is_older_than(known.folder, known.generation):
            what = f"its generation is {identity.generation}, and {known.generation} is registered"
            if known.folder != identity.folder:
                what = "another folder is registered for it"
            log.warning(
                (
                    "the folder of %s is an older copy, or a new one (%s): it does not vote "
                    "before it has caught up"
                ),
                identity.replica,
                what,
            )
            self._driver.doubt(epoch)

    def _forgotten(self, known: ReplicaRecord, epoch: int, members: bytes | None) -> str:
        """What the store has forgotten of this replica's group,
        by the replica's folder; empty if nothing.
        """
        identity = self._driver.identity
        mine = identity.members()
        version = 0 if members is None else ReplicaMembership.decode(members).version
        if epoch < identity.promised <= EPOCH_MAX:
            return f"the highest epoch of {identity.group} was {identity.promised}, and is {epoch}"
        if mine is not None and version < mine.version:
            return (
                f"the membership of {identity.group} had version {mine.version}, and has {version}"
            )
        if identity.shows_older_store(known.folder, known.generation):
            return (
                f"{identity.replica} had registered generation {identity.registered}, and "
                f"{known.generation} is registered"
            )
        return ""

    def _present(self) -> ReplicaRecord:
        return replace(self._record, generation=self._driver.identity.generation)

    def _state(self) -> tuple[int, int]:
        core = self._driver.core.state
        return core.promised, core.history.last_index

    async def _grow(self) -> bool:
        identity = self._driver.identity
        try:
            self._driver.grow(identity.grown(identity.folder, self._registered))
            await self._registration.update(self._present())
        except (CoordinationError, DiskFull) as failure:
            log.warning(
                "registering the next generation of %s failed, trying again: %s",
                identity.replica,
                failure,
            )
            return False
        self._registered = self._driver.identity.generation
        return True


log = logging.getLogger("qmq.node")

VIEW_RETRY_S: Final = 0.1
"""Pause before the coordination store is listed again; doubled after each failure."""
VIEW_RETRY_S_MAX: Final = 5.0


class ReplicaNode:
    """A running replica. Call `start`, then `stop`; after a crash call `start` again."""

    def __init__(self, context: ReplicaContext, kind: ReplicaKind) -> None:
        config, environment = context.config, context.environment
        self.config = config
        self.coordination = context.coordination
        self.view = context.view
        self._context = context
        self._environment = environment
        self._kind = kind
        self._stored = _stored_reads(config)
        url = config.log.object_store_url
        self._objects = open_objects(url) if url else None
        self._opener = StoreOpener(
            context, kind.projection, kind.discard, self._stored, self._beginnings()
        )
        self._audit = audit_subject_of(
            config.access,
            context.coordination,
            self.view,
            environment.network,
            f"{config.group}/{config.replica}",
        )
        self.access = follow_access(
            self.view, config.access, AuditLog(sink=self._audit), environment.clock or SystemClock()
        )
        self._copier: SegmentCopier | None = None
        self.metrics: MetricsServer | None = None

    # --- starting ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover, then join the group.

        Raises: FolderInUse: another process has the folder. InvalidArgument: the group is of
        another kind. LogDamaged: acknowledged data is damaged, and no other replica could repair
        it. OSError: a port is taken. WrongServer: the coordination store is another cluster's.
        """
        config = self.config
        make_private(config.data)
        found = identity.load(config.data, config.group, config.replica, self._environment.disk)
        self._identity = found or identity.new(config.group, config.replica)
        self._viewing = asyncio.ensure_future(self._begin_view())
        await asyncio.wait(
            [self._viewing],
            timeout=self._environment.node_timing.known_wait_s
            if self._identity.membership
            else None,
        )
        try:
            self._membership = await self._join()
            store = await self._open()
        except BaseException:
            self._viewing.cancel()
            await asyncio.gather(self._viewing, return_exceptions=True)
            await self.view.stop()
            await self.coordination.close()
            raise
        self._decide_if_whole(store, is_new=found is None)
        self._time = self._make_time()
        self._running = self._assemble(store)
        self.broker, self.driver, self.status = (
            self._running.broker,
            self._running.driver,
            self._running.status,
        )
        self._time.begin(store.last_time_ms)
        self._copier = self._make_copier()
        await self._running.listen(config.data_port, config.control_port)
        await self._take_part()
        if self._audit is not None:
            self._audit.start()
        self.metrics = await serving.serve(
            serving.metrics_host(config.host, config.metrics_host),
            config.metrics_port,
            self.sources(),
            self.readiness,
            self._environment.network,
        )

    def _assemble(self, store: Store) -> ReplicaBroker:
        config, network = self.config, self._environment.network
        return ReplicaBroker(
            self._kind,
            self._context,
            store,
            self._opener,
            self._identity,
            self._membership,
            parts=ProcessParts(
                self._time,
                network,
                self.access,
                process_status(config.host, config.etcd, network.credentials),
                self._environment.clock or SystemClock(),
            ),
        )

    def _make_time(self) -> ReplicaTime:
        return ReplicaTime(
            self._context.clock,
            self._context.folder,
            self._environment.disk,
            identity.boot_id(),
            addresses=self._context.witnesses,
            voters=lambda: len(self.driver.core.state.membership.voters),
            is_delay=self._kind.settings is not None,
            ports=ControlPorts(self._environment.network),
        )

    def _beginnings(self) -> StoredBeginnings | None:
        """Choose segments for a log that starts over. Without a local retention, the disk must have
        all of them.
        """
        if self._objects is None or not self.config.log.is_local_retention_set:
            return None
        return StoredBeginnings(self._objects, self.config.group)

    def _make_copier(self) -> SegmentCopier | None:
        """Make the copier of sealed segments to the object store, if there is one."""
        if self._objects is None:
            return None
        return SegmentCopier(
            lambda: self._running.open_store,
            lambda: self._running.is_master,
            self._objects,
            self.config.group,
            self._environment.fatal,
            lambda: self.view.group(self.config.group).lineage,
            indexes=self.config.log.is_local_retention_set,
        )

    async def _begin_view(self) -> None:
        """Begin to follow the coordination store. Retries until the store accepts, because a
        replica without a view would silently miss every change.
        """
        pause_s = VIEW_RETRY_S
        while True:
            try:
                await self.view.start()
                return
            except Exception as failure:
                log.warning(
                    "reading the coordination store failed, trying again in %.1f s: %s",
                    pause_s,
                    failure,
                )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, VIEW_RETRY_S_MAX)

    async def _join(self) -> ReplicaMembership:
        """The group's members. Checks that the cluster is ours, and the group of our kind."""
        identity.require_cluster(self._identity, self.view.cluster)
        config, known, settings = self.config, self._identity.members(), self._kind.settings
        if known is None:
            known = await process.found(self.coordination, config.group, config.replicas, settings)
            # if this fails, the membership is read again when this replica registers
            with suppress(CoordinationError):
                secret = await find_secret(self.coordination, config.group)
                self._identity = replace(self._identity, secret=secret.decode())
            process.note_folder(self._environment.disk, config.data, settings)
            return known
        process.check_folder(config.data, config.group, settings)
        process.check_group(self.view.group(config.group), settings)
        return known

    async def _open(self) -> Store:
        """Open the store. A reset that a crash interrupted begins again."""
        is_resetting = self._identity.resetting_until > 0
        if is_resetting:
            self._identity = replace(self._identity, resetting_until=0, is_whole=False)
        return await self._opener.open(is_resetting=is_resetting)

    def _decide_if_whole(self, store: Store, *, is_new: bool) -> None:
        """Decide whether this replica may lack entries that it acknowledged, or promises that it
        made with an earlier folder.
        """
        past, boot = self._identity, identity.boot_id()
        lost_power = (
            past.boot not in (boot, identity.CLEAN) and self.config.log.flush is Flush.ASYNC
        )
        is_whole = past.is_whole and not lost_power and not store.lost_tail
        promised = past.promised
        epoch = self.view.group(self.config.group).claim.epoch
        if is_new and epoch:
            is_whole, promised = False, epoch
        if past.is_whole and not is_whole:
            log.warning(
                "this replica may lack entries that it acknowledged: it does not vote until "
                "it has caught up with a master"
            )
        self._identity = replace(
            past, is_whole=is_whole, promised=promised, boot=boot
        )  # the driver saves it before it takes part

    async def _take_part(self) -> None:
        config, running = self.config, self._running
        record = ReplicaRecord(
            config.replica,
            config.group,
            running.data_address,
            running.control_address,
            self._identity.folder,
        )
        self._registering = ReplicaRegistering(
            self.coordination, self.driver, record, self._environment.node_timing
        )
        self.status.older_store = lambda: (
            self._stale_routes() or self._registering.older_store or self.view.went_back
        )
        self._unfollow = self.view.on_change(self._changed)
        self._changed(ViewChange())
        self._time.start()
        await self._registering.start()
        running.start()
        if self._copier is not None:
            self._copier.start()
        running.own.start()

    def _stale_routes(self) -> str:
        """What the coordination store has forgotten of this group's seals; empty if nothing."""
        found = (
            (config.name, state.stale.get(self.config.group))
            for config, state in self.view.ordered_subjects()
        )
        return next(
            (f"subject {subject}: {what}" for subject, what in found if what is not None), ""
        )

    def readiness(self) -> Readiness:
        """The state for /readyz."""
        return of_replica(
            self.driver.core, is_serving=self.broker.is_serving, has_all=self._running.has_all
        )

    def sources(self) -> list[FigureSource]:
        """The sources of its metrics."""
        shared = serving.sources_of(
            self.broker,
            self.config.group,
            self._running.data,
            self.status.describe,
            self._running.roles,
            lambda: self.driver.refused,
            self._time,
        )
        return [
            *shared,
            self._running.own.source,
            *self._tiering_sources(),
            CoordinationSource(self.coordination, self.view),
            AccessSource(self.access),
            ExposureSource(
                self.config.host, self.config.etcd, self._environment.network.credentials
            ),
        ]

    def _tiering_sources(self) -> list[FigureSource]:
        if self._copier is None or self._stored is None:
            return []
        return [
            TieringSource(
                self._copier, self._stored, lambda: self.broker.store.messages, self.config.group
            )
        ]

    # --- while it runs ----------------------------------------------------------------------------

    def _changed(self, change: ViewChange) -> None:
        """Handle a change of the coordination store,
        which may come before the replica has started.
        """
        state = self.view.group(self.config.group)
        records = self.view.replicas(self.config.group)
        addresses = {
            name: each.data_address for name, each in records.items() if name != self.config.replica
        }
        addresses = {**self.driver.identity.addresses, **addresses}
        self.driver.mesh.update(addresses)
        master_address = None
        # The record of a former master may stay until its lease ends: then this is not where to go.
        if state.master is not None:
            master_address = (
                state.master.data_address if state.master.replica != self.config.replica else ""
            )
        is_read_only = state.mode is Mode.READ_ONLY
        self.broker.cluster_changed(
            is_read_only=is_read_only, master_address=master_address, subjects=change.subjects
        )
        if SECRET in state.items:
            self.driver.set_secret(state.items[SECRET].value)
        if state.members is not None:
            membership = ReplicaMembership.decode(state.members)
            self.driver.call_core(
                lambda now_ms: self.driver.core.on_lookup(now_ms, state.claim.epoch, membership),
                "members",
            )
            self.driver.call_core(
                lambda _: self.driver.remember(self.driver.core.state.membership, addresses),
                "addresses",
            )
        if state.master is None and state.claim.epoch:
            self.driver.call_core(lambda now_ms: self.driver.core.master_gone(now_ms), "no master")

    # --- the end ----------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Host and port of the data port."""
        return joined(self.config.host, self._running.data.port)

    @property
    def control_address(self) -> str:
        """Host and port of the control port."""
        return self._running.control_address

    async def stop(self, *, abruptly: bool = False) -> None:
        """Hand the mastership over if this replica has it, answer requests under way, and close so
        that the next start replays little. `abruptly` skips all of that, for a test that needs the
        state after a killed process (qmq/testing).
        """
        await self._running.own.stop()
        if self.metrics is not None:
            await self.metrics.stop()
        if self._audit is not None:
            await self._audit.stop()
        await self._time.stop()
        if self._running.is_master and not abruptly:
            try:
                await self._running.hand_over()
            except QmqError as failure:
                log.warning("stopping without handing over: %s", failure)
        self.broker.begin_stop()
        if self._copier is not None:
            await self._copier.stop()
        self._viewing.cancel()
        await asyncio.gather(self._viewing, return_exceptions=True)
        await self._running.repair.stop()
        self._opener.stop()
        self._unfollow()  # a change of the view would connect the stopped driver to its peers again
        await self.driver.stop()
        await self._registering.stop()
        await self._running.stop_serving(abruptly=abruptly)
        await self.view.stop()
        await self.coordination.close()
        if abruptly:
            self.broker.store.close()
        else:
            self._close_store()
        if self._stored is not None:
            self._stored.close()

    def _close_store(self) -> None:
        store = self.broker.store
        try:
            if (
                store.committed_index >= store.applied_index
                and not self._running.must_hold_back()
                and not store.unwritten.waits
            ):
                close_store(store)
                self._context.save(replace(self.driver.identity, boot=identity.CLEAN))
            else:
                store.begin_flush().run()
                store.close()
        except DiskFull as failure:
            log.warning("closed without a checkpoint: %s", failure)
            store.close()


def _stored_reads(config: ReplicaConfig) -> StoredReads | None:
    """Make the reader of segments that are in the object store only, if there is one."""
    url = config.log.object_store_url
    if not url:
        return None
    objects = open_objects(url, request_s=READ_S, retry_s=READ_RETRY_S)
    return StoredReads(
        objects,
        config.group,
        config.data / "object_store_cache",
        config.log.object_store_cache_bytes,
    )


async def run_replica(make: Callable[[], ReplicaNode], role: str = "broker") -> None:
    """Run the node that `make` returns until SIGINT or SIGTERM."""
    from qmq.node.process import until_signal
    from qmq.process.event_loop import calm_collector, tune_process

    tune_process()
    node = make()
    config = node.config

    async def start() -> str:
        await node.start()
        calm_collector()
        metrics = f", metrics at {node.metrics.address}" if node.metrics is not None else ""
        return (
            f"qmq {role} is ready at {node.address} (replica {config.replica} of {config.group}, "
            f"folder {config.data}{metrics})"
        )

    if await until_signal(start):
        await node.stop()


CALL_S: Final = 5.0
"""The deadline of one answer. It is longer than a replica waits for its successor."""
AGAIN_S: Final = 0.2
MASTER: Final = "master"


async def hand_over(network: Network, address: str, replica: ServerName, wait_s: float) -> str:
    """Ask until another replica leads, or there is no other voter. `address` is the `replica`'s
    control port. Returns the group's master.

    Raises Unavailable if no other replica has taken over after `wait_s`, or the replica does not
    answer; AccessDenied.
    """
    channel = network.channel(address, always(replica))
    stub = control_pb2_grpc.BrokerControlStub(channel)
    try:
        async with asyncio.timeout(wait_s) as limit:
            while True:
                try:
                    return await _once(stub, address)
                except Unavailable:
                    remaining_s = (limit.when() or 0.0) - asyncio.get_running_loop().time()
                    if remaining_s < AGAIN_S:
                        raise
                await asyncio.sleep(AGAIN_S)
    except TimeoutError:
        raise Unavailable(
            f"no other replica took over from {address} within {wait_s:g} s: see `qmq "
            "cluster status`"
        ) from None
    finally:
        await channel.close()


async def _once(stub: Any, address: str) -> str:
    try:
        now: pb.ReplicaStatus = await stub.DescribeReplica(
            pb.DescribeReplicaRequest(), timeout=CALL_S
        )
        if now.role != MASTER or set(now.voters) <= {now.replica}:
            return now.master
        done: pb.TransferResponse = await stub.Transfer(pb.TransferRequest(), timeout=CALL_S)
        return done.master
    except grpc.RpcError as failure:  # a TLS channel raises another subclass than a plain one
        raise typed_error(failure, address) from failure
