"""The broker of a replica with all its parts, and the parts that differ between broker groups and
delay groups (`ReplicaKind`).

`qmq/node/broker_assembly.py` has the table of a broker's parts.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from qmq_coordination.broker_groups import DelaySettings, MasterRecord
from qmq_replication.coordinator import Coordinator
from qmq_replication.driver import DriverCalls, DriverSurroundings
from qmq_replication.identity import ReplicaIdentity
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import Role

from qmq.broker.broker import Broker
from qmq.broker.connection.server import DataServer
from qmq.broker.control import ControlService, ProcessParts, serve_control
from qmq.broker.maintenance import Maintenance
from qmq.broker.parts import BrokerParts, KindParts
from qmq.broker.produce_checks import Routing
from qmq.log.recent_writes import Place
from qmq.log.recovery import whole_from
from qmq.log.store import Store
from qmq.node.broker_assembly import STOP_GRACE_S, AddServices, ViewRules
from qmq.node.replica.context import BackgroundRepair, ReplicaContext, StoreOpener
from qmq.node.replica.status import ReplicaStatus, WriteLease
from qmq.rpc.network import RpcPort
from qmq.rpc.server_name import ServerName
from qmq.security.access import OpenAccess
from qmq.text import joined

if TYPE_CHECKING:
    from qmq.log.store import Projection
    from qmq.metrics.figures import FigureSource


@dataclass(frozen=True, slots=True)
class OwnParts:
    """Parts of a running replica that only its kind of group has."""

    source: FigureSource
    """Metrics that only this kind of group has."""
    start: Callable[[], None]
    """Called when the replica has joined its group."""
    stop: Callable[[], Awaitable[None]]
    """Called before the replica hands over its mastership."""
    services: AddServices | None = None
    """Adds services to the control port."""
    role_changed: Callable[[], None] = lambda: None
    log_starts_over: Callable[[], None] = lambda: None
    """Stop using the log: it and all derived data are about to be discarded."""
    log_started_over: Callable[[], None] = lambda: None
    """Continue with the open store, whose log started over."""


class ReplicaKind(Protocol):
    """The parts that differ between kinds of groups: `qmq/node/broker.py`, `qmq/node/delay.py`."""

    @property
    def settings(self) -> DelaySettings | None:
        """The settings of a delay group; None for a broker group."""
        ...

    @property
    def routing(self) -> Routing: ...

    def projection(self) -> Projection | None:
        """Make the store's projection, if it has one. Each opening gets a new one."""
        ...

    def discard(self) -> None:
        """Delete everything derived from the log, because the log starts over."""
        ...

    def has_all(self, store: Store | None) -> bool:
        """True if the replica has all data that it needs to serve clients. Otherwise a master leads
        without serving. The store is None while it is being reopened.
        """
        ...

    def broker_parts(self, access: OpenAccess) -> KindParts: ...

    def own_parts(self, replica: ReplicaBroker) -> OwnParts: ...


class ReplicaBroker:
    """The broker of a replica, which serves while the driver says that it is master."""

    def __init__(
        self,
        kind: ReplicaKind,
        context: ReplicaContext,
        store: Store,
        opener: StoreOpener,
        identity: ReplicaIdentity,
        membership: ReplicaMembership,
        *,
        parts: ProcessParts,
    ) -> None:
        self._kind = kind
        self._parts = parts
        self._context = context
        self._opener = opener
        self._identity = identity
        self._membership = membership
        self._host = context.config.host
        self._advertised_host = context.config.advertise or context.config.host
        self._is_opening = False
        self.roles: dict[str, int] = {}
        """How often the replica took each role."""
        self.broker = Broker(
            store,
            context.view.subject,
            context.clock,
            context.broker_config,
            asyncio.get_running_loop(),
            make_parts=self._make_parts,
            is_serving=False,
        )
        self.data = DataServer(self.broker, context.environment.network, own=self._own_name)
        self.status = ReplicaStatus(self.broker, self.driver, context.environment.steady)
        self.own = kind.own_parts(self)
        self._control: RpcPort | None = None

    def _make_parts(self, broker: Broker) -> BrokerParts:
        context, identity, environment = self._context, self._identity, self._context.environment
        coordinator = Coordinator(
            context.coordination, identity.group, self.master_record, lambda: secrets.token_hex(8)
        )
        self.maintenance = Maintenance(
            broker,
            environment.fatal,
            holds_back=self.must_hold_back,
            retention_before=self._parts.retention_before,
        )
        self.repair = BackgroundRepair(
            broker,
            context.donors,
            lambda: self._is_opening,
            environment.network,
            environment.fatal,
            lambda: len(self.driver.core.state.membership.replicas) - 1,
        )
        self.write_lease = WriteLease(
            broker,
            context.coordination,
            identity.group,
            context.clock,
            lease_ms=lambda: int(coordinator.lease_s * 1000),
        )
        self.driver = environment.make_driver(
            broker,
            identity,
            self._membership,
            coordinator,
            DriverCalls(
                reopen=self.reopen,
                save=context.save,
                fatal=environment.fatal,
                report_damage=self.repair.report_damage,
                may_serve=lambda: self.has_all,
                on_role=self._role_changed,
                on_held=self.write_lease.held,
            ),
            DriverSurroundings(
                environment.steady, context.clock, environment.timing, environment.network
            ),
            asks_reset=self._opener.begins_in_store
            and context.view.group(identity.group).claim.epoch > 0,
        )
        return BrokerParts(
            self.driver,
            environment.fatal,
            self._turn_ended,
            self.repair.report_damage,
            self.driver.accept,
            self.write_lease,
            self._kind.routing,
            self._parts.access,
            self._kind.broker_parts(self._parts.access),
            ViewRules(context.view, broker.config.retries, broker.serve_waiting),
        )

    def _turn_ended(self) -> None:
        # The slaves' disks first: their flushes are what an answer waits for.
        self.driver.mesh.flush()
        self.maintenance.after_turn()

    def _own_name(self) -> ServerName:
        return self._context.server_name(self._identity.replica)

    # --- addresses --------------------------------------------------------------------------------

    def master_record(self) -> MasterRecord:
        """The record by which clients find this replica while it is master. The ports are known
        after `listen`.
        """
        return MasterRecord(self._identity.replica, 0, "", self.data_address, self.control_address)

    @property
    def data_address(self) -> str:
        return joined(self._advertised_host, self.data.port)

    @property
    def control_address(self) -> str:
        return joined(self._advertised_host, self._control.port if self._control is not None else 0)

    def donors(self) -> dict[ServerName, str]:
        """Control addresses of the other replicas."""
        return self._context.donors()

    # --- state ------------------------------------------------------------------------------------

    @property
    def open_store(self) -> Store | None:
        """The store; None while it is being reopened, when its files must not be read."""
        return None if self._is_opening else self.broker.store

    @property
    def has_all(self) -> bool:
        """True if this replica has all data that it needs to serve clients."""
        return self._kind.has_all(self.open_store)

    @property
    def complete_from(self) -> int | None:
        """The lowest index from which on its log is complete;
        None while the store is being reopened.
        """
        store = self.open_store
        return None if store is None else whole_from(store)

    @property
    def committed(self) -> int:
        """The index up to which the log is committed; -1 while the store is being reopened."""
        return -1 if self._is_opening else self.driver.core.state.commit

    @property
    def is_master(self) -> bool:
        return self.driver.core.state.role is Role.MASTER

    def must_hold_back(self) -> bool:
        """True if checkpoints and deletions must wait now."""
        return self.driver.core.state.resetting_until > 0 or not self.has_all

    # --- life -------------------------------------------------------------------------------------

    async def listen(self, data_port: int, control_port: int) -> None:
        """Serve both ports. Raises OSError if a port is taken."""
        await self.data.start(self._host, data_port)
        self._control = await serve_control(
            ControlService(self.broker, self.status, self._identity.group, self._parts),
            self._host,
            control_port,
            also=self.own.services,
            own=self._own_name,
        )

    def start(self) -> None:
        """Join the group. Call `listen` first, so that clients can find a master."""
        self.maintenance.start()
        self.driver.start()

    def _role_changed(self, role: Role) -> None:
        self.roles[role.value] = self.roles.get(role.value, 0) + 1
        if role is not Role.MASTER:
            self.write_lease.end()
        self.maintenance.after_turn()
        self.own.role_changed()

    async def hand_over(self, to: str = "") -> None:
        """Hand the mastership over; without a name to any replica. Raises QmqError."""
        await self.status.transfer(to)

    async def stop_serving(self, *, abruptly: bool = False) -> None:
        """Finish requests, and end the background work. The caller closes the store."""
        if self._control is not None:
            await self._control.stop(None if abruptly else STOP_GRACE_S)
        self.broker.retire()
        await self.data.stop()
        await self.maintenance.stop()

    # --- another store ----------------------------------------------------------------------------

    async def reopen(self, until: int | None, place: Place | None) -> Store:
        """Reopen the store in a thread, with everything after an index cut, or with a log that
        starts over at a place. Closes the broker's old store.
        """
        self._is_opening = True
        await self.repair.stop()
        await self.maintenance.pause()
        past = self.broker.store
        past.release_folder()
        if place is not None:
            self.own.log_starts_over()
            self._kind.discard()
        self.broker.use_store(await self._opener.reopen(until, place))
        past.close()
        self._is_opening = False
        self.maintenance.go_on()
        if place is not None:
            self.own.log_started_over()
        return self.broker.store

    def reopen_now(self) -> None:
        """Reopen the store without an await,
        because the projection was replaced by another replica's.
        """
        self.maintenance.quiesce()
        self.broker.store.close()
        self.broker.use_store(self._opener.open_at())
        self.broker.commit(self.driver.core.state.commit)
        self.driver.serve_if_due()
