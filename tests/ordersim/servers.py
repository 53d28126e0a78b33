"""etcd with watches, and an unreliable connection to it for each process: `sim.world.Etcd` for
event loops.

A lease lives a little shorter or longer than requested: the margin of a master's write lease (a
tenth) must be enough.

A replica of a broker group in the simulator: the real broker, store, lanes, coordinator and write
lease; `BrokerGroup` models replication.

Around them it does the work of `qmq_replication.driver`: it campaigns, leads (it writes a barrier
and serves when that is committed), keeps the master's key, and retires when it learns that another
replica leads. Until then it is a zombie that takes requests and commits nothing.

A model of replication for a broker group: which replica leads, what is committed, and what a
failover loses.

A commit needs a majority. There is one unless the nemesis decides otherwise or the master is cut
off. When a candidate has won an epoch and a majority has promised it, the old master commits
nothing more, even if it does not know this. The new master's log is the old one, cut somewhere
between the last committed entry and the last written one.

A metaserver in the simulator: its side of ordered subjects is product code. The simulator may kill
or pause it at any step.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmq_coordination.broker_groups import MasterRecord, Mode, ReplicaRecord, group_key
from qmq_coordination.coordination_store import (
    NO_LEASE,
    Compare,
    Delete,
    KeyValue,
    LeaseId,
    Operation,
    Put,
    Revision,
    TxnResult,
    WatchedChanges,
    WatchEvent,
)
from qmq_coordination.view import ClusterView, ViewChange
from qmq_replication.coordinator import Coordinator
from qmq_replication.membership import ReplicaMembership
from sim.world import STORE_LATE_MS, TIMEOUT_MS, AskedStore, Etcd, World

from ordersim.loop import Process
from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.connection.server import DataConnection
from qmq.broker.control import ControlService
from qmq.broker.parts import BrokerParts
from qmq.errors import (
    Compacted,
    CoordinationError,
    CoordinationUnavailable,
    CoordinationUnknown,
    DiskFull,
    LeaseNotFound,
    Outcome,
    from_wire,
)
from qmq.limits import KIB
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.meta.calls import Brokers, PartitionMasters
from qmq.meta.catalog import ClusterCatalog
from qmq.meta.description import route_of
from qmq.meta.ordered.changes import RouteChanges
from qmq.meta.ordered.controller import Controller
from qmq.meta.ordered.service import OrderedService
from qmq.node.broker_assembly import ViewRouting
from qmq.node.replica.status import WriteLease
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import CODE, OUTCOME, RETRY
from qmq.rpc.server_name import ServerName
from qmq.wire.subject_settings import settings_of

if TYPE_CHECKING:
    from ordersim.loop import Process
    from ordersim.run import Simulation

KEPT = 400
"""Revisions that a watch may still begin from."""


class WatchedEtcd(Etcd):
    """The store, with the changes of each revision."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.history: list[WatchedChanges] = []
        self.watchers: dict[Callable[[], None], None] = {}
        self.on_revision: Callable[[WatchedChanges, dict[str, KeyValue]], None] = (
            lambda changes, before: None
        )
        """Told of each change, and of what was there before."""

    def txn(self, compares: Sequence[Compare], success: Sequence[Operation]) -> TxnResult:
        """Compare, then put or delete."""
        if not all(self._holds(each) for each in compares):
            return TxnResult(False, Revision(self.revision), ())
        for each in success:
            if isinstance(each, Put) and each.lease and each.lease not in self.leases:
                raise LeaseNotFound(f"lease {each.lease} has ended")
        revision = self.revision + 1
        events = [event for each in success for event in self._events(each, revision)]
        self._apply(events)
        return TxnResult(True, Revision(self.revision), tuple(() for _ in success))

    def _events(self, operation: Operation, revision: int) -> list[WatchEvent]:
        if isinstance(operation, Put):
            before = self.items.get(operation.key)
            created, version = (
                (before.create_revision, before.version + 1) if before else (revision, 1)
            )
            item = KeyValue(
                operation.key, operation.value, created, revision, version, operation.lease
            )
            return [WatchEvent(operation.key, revision, item)]
        assert isinstance(operation, Delete)
        return [WatchEvent(operation.key, revision, None)] if operation.key in self.items else []

    def _apply(self, events: list[WatchEvent]) -> None:
        if not events:
            return
        self.revision += 1
        before = {event.key: self.items[event.key] for event in events if event.key in self.items}
        for event in events:
            if event.now is None:
                self.items.pop(event.key, None)
            else:
                self.items[event.key] = event.now
        changes = WatchedChanges(Revision(self.revision), tuple(events))
        self.history.append(changes)
        del self.history[:-KEPT]
        self.on_revision(changes, before)
        for wake in list(self.watchers):
            wake()

    def grant(self, ttl_s: float) -> LeaseId:
        """A lease, a little shorter or longer."""
        return super().grant(ttl_s * self.world.random.choice((0.93, 1.0, 1.0, 1.3)))

    def end(self, lease: int) -> None:
        """End a lease now; its keys go."""
        if self.leases.pop(lease, None) is None:
            raise LeaseNotFound(f"lease {lease} has ended")
        keys = sorted(key for key, item in self.items.items() if item.lease == lease)
        self._apply([WatchEvent(key, self.revision + 1, None) for key in keys])


class Coordination(AskedStore):
    """A CoordinationStore whose network is bad."""

    def __init__(self, etcd: WatchedEtcd, mine: Process) -> None:
        super().__init__(etcd)
        self._changing = etcd
        self._mine = mine
        self._world = mine.world
        self._network = mine.simulation.network

    @property
    def _is_cut(self) -> bool:
        return (
            not self._network.reaches(self._mine.name, "etcd")
            or self._mine.name in self._mine.simulation.nemesis.etcd_cut
        )

    def _is_lost(self) -> bool:
        return self._is_cut or (
            not self._network.is_calm
            and self._world.random.random() < self._mine.simulation.plan.etcd_loss
        )

    async def _ask(self, do: Callable[..., Any], *args: Any, is_change: bool) -> Any:
        world, loop = self._world, self._mine.loop
        future: asyncio.Future[Any] = loop.create_future()
        is_late = (
            not self._network.is_calm
            and world.random.random() < self._mine.simulation.plan.etcd_late
        )
        delay_ms = (
            world.random.randint(500, STORE_LATE_MS) if is_late else world.random.randint(1, 6)
        )
        world.after(delay_ms, self._arrive, future, do, args)
        failure = (CoordinationUnknown if is_change else CoordinationUnavailable)(
            "no answer (simulated)"
        )
        timer = loop.call_later(TIMEOUT_MS / 1000, _set, future, None, failure)
        try:
            return await future
        finally:
            timer.cancel()

    def _arrive(
        self, future: asyncio.Future[Any], do: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        if self._is_lost():
            return
        try:
            result, error = do(*args), None
        except LeaseNotFound as cause:
            result, error = None, cause
        self._world.after(self._world.random.randint(1, 6), self._answered, future, result, error)

    def _answered(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if not self._is_lost():
            self._mine.loop.call_soon(_set, future, result, error)

    # --- CoordinationStore ------------------------------------------------------------------------

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        """See CoordinationStore."""
        return (await self.txn((), [Put(key, value, lease)])).revision

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        """See CoordinationStore."""
        assert not is_prefix
        await self.txn((), [Delete(key)])
        return 1

    async def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchedChanges]:
        """See CoordinationStore. Breaks while the store cannot be reached, and now and then."""
        at = start_revision
        news = asyncio.Event()
        wake = lambda: self._mine.loop.call_soon(news.set)  # noqa: E731
        self._changing.watchers[wake] = None
        try:
            while True:
                await asyncio.sleep(self._network.delay_ms() / 1000)
                if self._is_cut or (
                    not self._network.is_calm
                    and self._world.random.random() < self._mine.simulation.plan.etcd_loss / 4
                ):
                    await asyncio.sleep(0.5)
                    raise CoordinationUnavailable("the watch broke (simulated)")
                news.clear()
                if (
                    self._changing.history
                    and self._changing.history[0].revision > at
                    and self._changing.revision >= at
                ):
                    raise Compacted("too old (simulated)")
                for changes in [each for each in self._changing.history if each.revision >= at]:
                    at = changes.revision + 1
                    yield changes
                await news.wait()
        finally:
            self._changing.watchers.pop(wake, None)

    async def compact(self, revision: int) -> None:
        """See CoordinationStore."""
        raise NotImplementedError

    async def close(self) -> None:
        """See CoordinationStore."""


def _set(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


LOG = LogConfig(
    segment_bytes=64 * KIB,
    action_segment_bytes=64 * KIB,
    disk_free_bytes_min=1024,
    cache_bytes=KIB,
    tail_bytes=0,
)
LEASE_S = 5.0
HOLD_S = 1.5
TICK_S = 0.2
COMMIT_MS_MAX = 12


class SimDisk(Disk):
    """The real file system without syncing, with a simulated limit of space."""

    is_full = False

    def sync(self, fd: int) -> None:
        return

    def sync_folder(self, folder: Path) -> None:
        return

    def free_bytes(self, folder: Path) -> int:
        return 0 if self.is_full else 1 << 40


class _Context:
    """The gRPC context through which a servicer raises errors."""

    async def abort(
        self, _status: Any, details: str, trailers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        found = dict(trailers)
        if CODE not in found:
            raise AssertionError(details)
        raise from_wire(
            int(found[CODE]),
            details,
            int(found.get(OUTCOME, Outcome.UNKNOWN.value)),
            int(found.get(RETRY, "0")),
        )


class Replica(Process):
    """One life of a replica's process."""

    def __init__(self, simulation: Simulation, group: BrokerGroup, name: str, folder: Path) -> None:
        super().__init__(simulation, name)
        self.group = group
        self.folder = folder
        self.disk = SimDisk()
        self.epoch = 0
        self.barrier = 0
        self.is_deposed = False
        """A majority has promised another one: it commits nothing any more."""
        self.store = open_store(folder, LOG, self.clock, disk=self.disk, is_replicated=True)
        self.loop.enter(self._start)

    # --- starting ---------------------------------------------------------------------------------

    def _start(self) -> None:
        simulation, name = self.simulation, self.name
        self.coordination = Coordination(simulation.etcd, self)
        self.view = ClusterView(self.coordination, monotonic_s=self.loop.time)
        record = MasterRecord(name, 0, "", f"{name}:1", f"{name}:2")
        self.coordinator = Coordinator(
            self.coordination, self.group.name, lambda: record, simulation.new_id, lease_s=LEASE_S
        )
        config = BrokerConfig(name=name)
        self.broker = Broker(
            self.store,
            self.view.subject,
            self.clock,
            config,
            self.loop,
            make_parts=self._make_parts,
            is_serving=False,
        )
        self._control = ControlService(self.broker, None, self.group.name)  # type: ignore[arg-type]
        own = ServerName(group=self.group.name, replica=name)
        self.accept = lambda: DataConnection(self.broker, lambda _: None, own=lambda: own).stream
        self.view.on_change(self._changed)
        self._tasks = [
            self.loop.create_task(self.view.start()),
            self.loop.create_task(self._tick()),
        ]

    def _make_parts(self, broker: Broker) -> BrokerParts:
        self.right = WriteLease(
            broker,
            self.coordination,
            self.group.name,
            self.clock,
            lease_ms=lambda: int(self.coordinator.lease_s * 1000),
        )
        return BrokerParts(
            committer=self,
            fatal=lambda cause: self.simulation.broke(self.name, cause),
            may_write=self.right,
            routing=ViewRouting(self.view, self.group.name),
        )

    def _changed(self, change: ViewChange) -> None:
        state = self.view.group(self.group.name)
        master_address = state.master.data_address if state.master is not None else None
        is_read_only = state.mode is Mode.READ_ONLY
        self.broker.cluster_changed(
            is_read_only=is_read_only, master_address=master_address, subjects=change.subjects
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.broker.tick()

    async def serve(self, method: str, request: Any) -> Any:
        """A call to the control port."""
        return await getattr(self._control, method)(request, _Context())

    # --- mastership -------------------------------------------------------------------------------

    def campaign(self) -> None:
        """Win the next epoch, however long that takes, unless the group chooses another one."""
        self._tasks.append(self.loop.create_task(self._campaign()))

    async def _campaign(self) -> None:
        while self.group.candidate is self:
            won = await self.coordinator.campaign()
            if won is not None:
                self.tell(f"wins epoch {won.epoch}")
                await asyncio.sleep(self.random.randint(1, 60) / 1000)
                while not self.group.may_promise(self):
                    await asyncio.sleep(0.3)
                self.group.promised(self, won.epoch)
                return
            await asyncio.sleep(self.random.randint(100, 600) / 1000)

    def reopen(self, until: int | None) -> None:
        """Open the store again, cut after an index."""
        self.store = open_store(
            self.folder, LOG, self.clock, disk=self.disk, is_replicated=True, until=until
        )
        self.broker.use_store(self.store)

    def lead(self, epoch: int) -> None:
        """A majority has promised."""
        self.epoch = epoch
        self.store.apply_pending()
        try:
            self.store.append_barrier(epoch)
        except DiskFull:
            self.group.lost(self)
            return
        self.barrier = self.store.index
        self.tell(f"LEADS in {epoch}, its barrier is {self.barrier}")
        self.written(self.store.index)
        self._tasks.append(self.loop.create_task(self._hold(epoch)))

    async def _hold(self, epoch: int) -> None:
        while self.epoch == epoch:
            asked_ms = self.clock.monotonic_ms()
            with suppress(CoordinationError):
                held = await self.coordinator.renew_key()
                if self.epoch != epoch:
                    return
                self.right.held(epoch, held, asked_ms)
                if held.epoch > epoch:
                    self.retire()
                    return
            await asyncio.sleep(HOLD_S)

    def retire(self) -> None:
        """The broker learns that another master has superseded it."""
        if self.epoch:
            self.tell("retires")
            self.epoch = 0
            self.right.end()
            self.loop.enter(self.broker.retire)
            self.world.after(self.random.randint(100, 2_000), self.kill)

    # --- the committer's side ---------------------------------------------------------------------

    def written(self, index: int) -> None:
        """See Committer."""
        if not self.is_deposed:
            self.loop.call_later(self.random.randint(1, COMMIT_MS_MAX) / 1000, self.commit, index)

    def stored(self, index: int) -> None:
        """See Committer."""

    def flush_wanted(self, index: int) -> None:
        """See Committer."""

    def commit(self, index: int) -> None:
        """Let a majority, if there is one, store everything up to `index`."""
        if (
            self.is_deposed
            or not self.epoch
            or not self.group.may_commit(self)
            or index > self.store.index
        ):
            return
        if index > self.group.committed:
            self.group.committed = index
            self.simulation.ledger.read(self.group, self.store, index)
        self.broker.commit(index)
        if not self.broker.is_serving and index >= self.barrier:
            self.tell("serves")
            self.broker.serve(self.store)

    def kill(self) -> None:
        """The process ends; the operating system has what it wrote."""
        if self.is_up:
            super().kill()
            self.store.close()
            self.group.died(self)


REPLICAS = 3
WATCH_MS = 400


class BrokerGroup:
    """See the module."""

    replica_class: type[Replica] = Replica

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.name = name
        self.replicas = tuple(f"{name}{number}" for number in range(1, REPLICAS + 1))
        self.committed = 0
        self.has_majority = True
        self.lives: dict[str, Replica] = {}
        """By name, the life that is or was last."""
        self.leader: Replica | None = None
        """Whom a majority promised last; its log is the group's."""
        self.candidate: Replica | None = None
        self._folders = 0
        self._idle_since = 0
        key, members = group_key(name, "members"), ReplicaMembership(1, self.replicas)
        simulation.etcd.txn((), [Put(key, members.encode())])
        self._elect(self.replicas[0])
        self.world.after(WATCH_MS, self._watch)

    # --- who may do what --------------------------------------------------------------------------

    def _is_alone(self, replica: Replica) -> bool:
        cut = self.simulation.network.cut
        return replica.name in cut and not all(name in cut for name in self.replicas)

    def may_commit(self, replica: Replica) -> bool:
        """Whether a majority follows the master."""
        return self.has_majority and not self._is_alone(replica) and self.leader is replica

    def may_promise(self, replica: Replica) -> bool:
        """Whether a majority can be reached."""
        return self.has_majority and not self._is_alone(replica)

    def catch_up(self) -> None:
        """There is a majority again: commit the waiting entries."""
        leader = self.leader
        if leader is not None and leader.is_up and not leader.loop.is_paused and leader.epoch:
            leader.loop.call_soon(leader.commit, leader.store.index)

    # --- elections --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Replicas miss their master after a while."""
        leader = self.leader
        is_led = leader is not None and leader.is_up and not leader.is_deposed and leader.epoch > 0
        if is_led or self.candidate is not None:
            self._idle_since = self.world.now
        elif self.world.now - self._idle_since > 600:
            self.elect()
        self.world.after(WATCH_MS + self.world.random.randint(0, 200), self._watch)

    def elect(self) -> None:
        """Another one wants to lead; or the same, if it is gone."""
        if self.candidate is not None and self.candidate.is_up:
            return
        leader = self.leader
        is_led = leader is not None and leader.is_up and leader.epoch > 0
        names = [
            name for name in self.replicas if not is_led or leader is None or name != leader.name
        ]
        self._elect(self.world.random.choice(names))

    def _elect(self, name: str) -> None:
        leader = self.leader
        old = self.lives.get(name)
        if old is not None and old.is_up:
            old.kill()
        is_restart = leader is not None and leader.name == name
        folder = leader.folder if leader is not None and is_restart else self._new_folder(name)
        self.candidate = replica = self.replica_class(self.simulation, self, name, folder)
        self.lives[name] = replica
        replica.tell("starts, and wants to lead")
        replica.campaign()

    def _new_folder(self, name: str) -> Path:
        self._folders += 1
        return self.simulation.folder / f"{name}-{self._folders}"

    def promised(self, replica: Replica, epoch: int) -> None:
        """A majority follows it from now on."""
        old, self.candidate = self.leader, None
        if old is not None and old is not replica:
            old.is_deposed = True
            written = old.store.index
            until = self.world.random.randint(self.committed, max(written, self.committed))
            if old.folder == replica.folder:
                until = written
            replica.tell(f"has {until} of {written}, committed are {self.committed}")
            if old.folder != replica.folder:
                replica.store.close()
                shutil.rmtree(replica.folder)
                shutil.copytree(
                    old.folder, replica.folder, ignore=shutil.ignore_patterns("lock", "consume")
                )
                replica.reopen(until)
        self.leader = replica
        replica.lead(epoch)

    def died(self, replica: Replica) -> None:
        """A process ended."""
        if self.candidate is replica:
            self.candidate = None

    def lost(self, replica: Replica) -> None:
        """A replica lost its mastership."""
        replica.is_deposed = True
        self._idle_since = self.world.now

    # --- faults -----------------------------------------------------------------------------------

    def master(self) -> Replica | None:
        """The master, if it is alive."""
        leader = self.leader
        return leader if leader is not None and leader.is_up and leader.epoch else None

    def processes(self) -> list[Replica]:
        """All living processes."""
        return [replica for replica in self.lives.values() if replica.is_up]


CHANGE_WAIT_S = 4.0


class SimBrokers(Brokers):
    """Brokers over the simulated network."""

    def __init__(self, mine: Process, view: ClusterView) -> None:
        super().__init__(view)
        self._mine = mine

    async def ask(
        self,
        group: str,
        place: MasterRecord | ReplicaRecord,
        method: str,
        request: Any,
        timeout_s: float = 2.5,
    ) -> Any:
        """See Brokers."""
        return await self._mine.simulation.network.call(
            self._mine, place.control_address, method, request, timeout_s
        )


class Metaserver(Process):
    """One life of one."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation, name)
        self.is_ready = False
        self.loop.enter(self._build)

    def _build(self) -> None:
        store = Coordination(self.simulation.etcd, self)
        self.view = ClusterView(store, monotonic_s=self.loop.time)
        brokers = SimBrokers(self, self.view)
        masters = PartitionMasters(brokers)
        self.cluster = ClusterCatalog(store, self.view, auto_create=False)
        self.controller = controller = Controller(store, self.view, masters, self.clock)
        controller.changes = RouteChanges(
            store,
            masters,
            sleep=asyncio.sleep,
            now_ms=self.clock.time_ms,
            new_id=self.simulation.new_id,
            arrow=self._arrow,
        )
        controller.groups._arrow = controller.placing._arrow = self._arrow
        self._ordered = OrderedService(
            self.cluster,
            self.view,
            brokers,
            controller,
            masters,
            None,
            change_wait_s=CHANGE_WAIT_S,  # type: ignore[arg-type]
        )
        self.loop.create_task(self._start())

    async def _start(self) -> None:
        await self.view.start()
        self.controller.start()
        self.is_ready = True

    async def _arrow(self, name: str) -> None:
        """A step of a change or a round is about to be taken, or was taken."""
        simulation, fate = self.simulation, self.random.random()
        if simulation.is_calm:
            return
        still_ms = simulation.nemesis.aims_at(name)
        if fate < simulation.plan.arrow_kill:
            simulation.faults[f"metaserver killed {name}"] += 1
            self.kill()
            simulation.nemesis.start_later(self.name)
            await self.loop.create_future()
        if fate < simulation.plan.arrow_kill + simulation.plan.arrow_stall:
            still_ms = self.random.randint(10, 9_000)
        if still_ms:
            simulation.faults["metaserver stands still"] += 1
            await asyncio.sleep(still_ms / 1000)

    async def serve(self, method: str, request: Any) -> Any:
        """A call."""
        while not self.is_ready:
            await asyncio.sleep(0.1)
        if method == "Locate":
            return await self._locate(request)
        calls = {
            "SyncMember": self._ordered.sync_member,
            "ChangeRoute": self._ordered.change_route,
            "Unpark": self._ordered.unpark,
            "DescribeParked": self._ordered.describe_parked,
        }
        return await calls[method](request)

    async def _locate(self, request: pb.LocateRequest) -> pb.LocateResponse:
        config, routes = await self.cluster.locate(request.subject, create=False)
        state = await self.cluster.ordered(config)
        assert state.route is not None
        return pb.LocateResponse(
            settings=settings_of(config), routes=routes, route=route_of(state.route, state.fenced)
        )
