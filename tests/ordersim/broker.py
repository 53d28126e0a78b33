"""A replica of a broker group in the simulator: the real broker, store, lanes, coordinator and write lease; `group` models replication.

Around them it does the work of `qmq_replication.driver`: it campaigns, leads (it writes a barrier and serves when that is committed), keeps
the master's key, and retires when it learns that another replica leads. Until then it is a zombie that takes requests and commits nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmq_coordination.broker_groups import MasterRecord, Mode
from qmq_coordination.view import ClusterView, ViewChange
from qmq_replication.coordinator import Coordinator

from ordersim.etcd import Store as Coordination
from ordersim.process import Process
from qmq.broker.admin import BrokerAdmin
from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.broker.connection.server import DataConnection
from qmq.broker.control import ControlService, LaneAdmin
from qmq.broker.parts import BrokerParts
from qmq.errors import CoordinationError, DiskFull, Outcome, from_wire
from qmq.limits import KIB
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.node.broker_assembly import ViewRouting
from qmq.node.replica.status import WriteLease
from qmq.rpc.channel import CODE, OUTCOME, RETRY
from qmq.rpc.server_name import ServerName

if TYPE_CHECKING:
    from ordersim.group import BrokerGroup
    from ordersim.run import Simulation

LOG = LogConfig(segment_bytes=64 * KIB, action_segment_bytes=64 * KIB, disk_free_bytes_min=1024, cache_bytes=KIB, tail_bytes=0)
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

    async def abort(self, _status: Any, details: str, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        found = dict(trailers)
        if CODE not in found:
            raise AssertionError(details)
        raise from_wire(int(found[CODE]), details, int(found.get(OUTCOME, Outcome.UNKNOWN.value)), int(found.get(RETRY, "0")))


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

    # --- starting --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        simulation, name = self.simulation, self.name
        self.coordination = Coordination(simulation.etcd, self)
        self.view = ClusterView(self.coordination, monotonic_s=self.loop.time)
        record = MasterRecord(name, 0, "", f"{name}:1", f"{name}:2")
        self.coordinator = Coordinator(self.coordination, self.group.name, lambda: record, simulation.new_id, lease_s=LEASE_S)
        config = BrokerConfig(name=name)
        self.broker = Broker(self.store, self.view.subject, self.clock, config, self.loop, make_parts=self._make_parts, is_serving=False)
        self.admin = LaneAdmin(self.broker, self.group.name)
        self._control = ControlService(BrokerAdmin(self.broker, self.group.name), self.admin, None, self.group.name)  # type: ignore[arg-type]
        own = ServerName(group=self.group.name, replica=name)
        self.accept = lambda: DataConnection(self.broker, lambda _: None, own=lambda: own).stream
        self.view.on_change(self._changed)
        self._tasks = [self.loop.create_task(self.view.start()), self.loop.create_task(self._tick())]

    def _make_parts(self, broker: Broker) -> BrokerParts:
        self.right = WriteLease(
            broker, self.coordination, self.group.name, self.clock, lease_ms=lambda: int(self.coordinator.lease_s * 1000)
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
        self.broker.cluster_changed(is_read_only=is_read_only, master_address=master_address, subjects=change.subjects)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.broker.tick()

    async def serve(self, method: str, request: Any) -> Any:
        """A call to the control port."""
        return await getattr(self._control, method)(request, _Context())

    # --- mastership ------------------------------------------------------------------------------------------------------

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
        self.store = open_store(self.folder, LOG, self.clock, disk=self.disk, is_replicated=True, until=until)
        self.broker.reopened(self.store)

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
                held = await self.coordinator.hold()
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

    # --- the committer's side --------------------------------------------------------------------------------------------

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
        if self.is_deposed or not self.epoch or not self.group.may_commit(self) or index > self.store.index:
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
