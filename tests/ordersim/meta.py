"""A metaserver in the simulator: its side of ordered subjects is product code. The simulator may kill or pause it at any step."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from qmq_coordination.broker_groups import MasterRecord, ReplicaRecord
from qmq_coordination.view import ClusterView

from ordersim.etcd import Store as Coordination
from ordersim.process import Process
from qmq.meta.calls import Brokers, PartitionMasters
from qmq.meta.catalog import ClusterCatalog
from qmq.meta.description import route_of
from qmq.meta.ordered.changes import RouteChanges
from qmq.meta.ordered.controller import Controller
from qmq.meta.ordered.service import OrderedService
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire.subject_settings import settings_of

if TYPE_CHECKING:
    from ordersim.run import Simulation

CHANGE_WAIT_S = 4.0


class SimBrokers(Brokers):
    """Brokers over the simulated network."""

    def __init__(self, mine: Process, view: ClusterView) -> None:
        super().__init__(view)
        self._mine = mine

    async def ask(self, group: str, place: MasterRecord | ReplicaRecord, method: str, request: Any, timeout_s: float = 2.5) -> Any:
        """See Brokers."""
        return await self._mine.simulation.network.call(self._mine, place.control_address, method, request, timeout_s)


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
            store, masters, sleep=asyncio.sleep, now_ms=self.clock.time_ms, new_id=self.simulation.new_id, arrow=self._arrow
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
        return pb.LocateResponse(settings=settings_of(config), routes=routes, route=route_of(state.route, state.fenced))
