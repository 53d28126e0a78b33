"""Assembles a running broker. Every node makes its broker here; each part gets what it needs from its constructor.

                            single node (`qmq dev`)         replica (`qmq broker`, `qmq delay`)
    turns, state            Broker, or DelayBroker          the same
    says what is committed  Alone                           Driver, with the Coordinator of its mastership
    fencing by lease        -                               WriteLease
    flushes, checkpoints    Maintenance                     Maintenance
    repairs damage          -                               BackgroundRepair
    knows operators' rules  ViewRules                       ViewRules
    knows routes            ViewRouting, if not delayed     ViewRouting, if not delayed
    data port               DataServer                      DataServer
    control port            SingleGroupStatus               ReplicaStatus

A broker and its parts need each other: the broker tells the committer what is written, and the committer tells the broker what is
committed. So a broker is handed a function that makes its parts (`Broker.__init__`), and that is the method `_make_parts` here.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from qmq_coordination.broker_groups import MasterRecord
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.view import ClusterView
from qmq_replication.coordinator import Coordinator
from qmq_replication.driver import Driver
from qmq_replication.ready import Role
from qmq_replication.replica_identity import ReplicaIdentity
from qmq_replication.replica_membership import ReplicaMembership

from qmq.broker.broker import Broker, MakeParts
from qmq.broker.broker_parts import BrokerParts
from qmq.broker.committer import Alone
from qmq.broker.control import serve_control
from qmq.broker.data_server import DataServer
from qmq.broker.group_rules import GroupRules, NoGroupRules
from qmq.broker.group_status import SingleGroupStatus
from qmq.broker.maintenance import TICK_S, Maintenance, stop_process
from qmq.broker.ordered_writes import NoRouting, Routing
from qmq.clock import Clock
from qmq.log.recent_writes import Place
from qmq.log.store import Store
from qmq.network import NETWORK, Network, RpcPort
from qmq.node.broker_view import ViewRules
from qmq.node.environment import Environment
from qmq.node.replica_repair import BackgroundRepair
from qmq.node.replica_status import ReplicaStatus
from qmq.node.write_lease import WriteLease
from qmq.process_description import DescribeProcess
from qmq.proto.v1 import control_pb2 as pb
from qmq.security.access_control import OpenAccess

if TYPE_CHECKING:
    import grpc

STOP_GRACE_S: Final = 1.0

B = TypeVar("B", bound=Broker)
MakeBroker = Callable[[MakeParts], B]
AddServices = Callable[["grpc.aio.Server"], None]
"""Adds services to the control port."""


class StandaloneBroker(Generic[B]):
    """The broker of a node without replicas, which is always master. Without a `view` it has no group rules."""

    def __init__(
        self,
        make_broker: MakeBroker[B],
        view: ClusterView | None = None,
        routing: Routing | None = None,
        *,
        network: Network = NETWORK,
        access: OpenAccess | None = None,
        fatal: Callable[[BaseException], None] = stop_process,
        tick_s: float = TICK_S,
        process: DescribeProcess = pb.ProcessStatus,
    ) -> None:
        self._view = view
        self._routing = routing or NoRouting()
        self._network = network
        self._access = access or OpenAccess()
        self._fatal = fatal
        self._tick_s = tick_s
        self._process = process
        self.broker = make_broker(self._make_parts)
        self.data = DataServer(self.broker, network)
        self.status = SingleGroupStatus(self.broker)
        self._control: RpcPort | None = None

    def _make_parts(self, broker: Broker) -> BrokerParts:
        self.maintenance = Maintenance(broker, self._fatal, tick_s=self._tick_s)
        rules: GroupRules = NoGroupRules()
        if self._view is not None:
            rules = ViewRules(self._view, broker.config.retries, broker.look_again)
        return BrokerParts(Alone(broker), self._fatal, self.maintenance.after_turn, routing=self._routing, access=self._access, rules=rules)

    async def listen(self, host: str, data_port: int, control_port: int, also: AddServices | None = None) -> tuple[str, str]:
        """Serve both ports; their addresses. Raises OSError if a port is taken."""
        await self.data.start(host, data_port)
        self.maintenance.start()
        self._control = await serve_control(
            self.broker,
            self.status,
            self.broker.config.name,
            host,
            control_port,
            also=also,
            network=self._network,
            access=self._access,
            process=self._process,
        )
        return f"{host}:{self.data.port}", f"{host}:{self._control.port}"

    async def stop(self) -> None:
        """Answer what is under way. The caller closes the store."""
        if self._control is not None:
            await self._control.stop(STOP_GRACE_S)
        await self.data.stop()
        await self.maintenance.stop()


class ReplicaLife(Protocol):
    """What a replica's parts need of their node."""

    @property
    def is_opening(self) -> bool:
        """Whether the store is being reopened: its files must not be read."""
        ...

    def may_serve(self) -> bool:
        """Whether this replica has everything that it needs to serve clients; without that, a master leads and serves nobody."""
        ...

    def must_hold_back(self) -> bool:
        """Whether checkpoints and deletions must wait now."""
        ...

    def role_changed(self, role: Role) -> None:
        """The replica has a new role."""
        ...

    def donors(self) -> dict[str, str]:
        """Control addresses of the other replicas."""
        ...

    def reopen(self, until: int | None, place: Place | None) -> Awaitable[Store]:
        """Reopen the store: with everything after an index cut, or beginning anew at a place."""
        ...

    def save(self, identity: ReplicaIdentity) -> None:
        """Write and sync the replica's promises and identity."""
        ...


class ReplicaBroker(Generic[B]):
    """The broker of a replica, which serves while the driver says that it is master."""

    def __init__(
        self,
        make_broker: MakeBroker[B],
        life: ReplicaLife,
        identity: ReplicaIdentity,
        membership: ReplicaMembership,
        coordination: CoordinationStore,
        view: ClusterView,
        clock: Clock,
        environment: Environment,
        *,
        access: OpenAccess,
        routing: Routing | None = None,
        host: str,
        advertise: str = "",
        process: DescribeProcess = pb.ProcessStatus,
    ) -> None:
        self._life = life
        self._identity = identity
        self._membership = membership
        self._coordination = coordination
        self._view = view
        self._clock = clock
        self._environment = environment
        self._access = access
        self._routing = routing or NoRouting()
        self._host = host
        self._advertised_host = advertise or host
        self._process = process
        self.broker = make_broker(self._make_parts)
        self.data = DataServer(self.broker, environment.network)
        self.status = ReplicaStatus(self.broker, self.driver, environment.steady)
        self._control: RpcPort | None = None

    def _make_parts(self, broker: Broker) -> BrokerParts:
        life, identity, environment = self._life, self._identity, self._environment
        coordinator = Coordinator(self._coordination, identity.group, self.master_record, lambda: secrets.token_hex(8))
        self.maintenance = Maintenance(broker, environment.fatal, holds_back=life.must_hold_back)
        self.repair = BackgroundRepair(broker, life, environment.network, environment.fatal)
        self.write_lease = WriteLease(
            broker, self._coordination, identity.group, self._clock, lease_ms=lambda: int(coordinator.lease_s * 1000)
        )
        self.driver = Driver(
            broker,
            identity,
            self._membership,
            coordinator,
            clock=environment.steady,
            reopen=life.reopen,
            save=life.save,
            fatal=environment.fatal,
            report_damage=self.repair.report_damage,
            may_serve=life.may_serve,
            on_role=life.role_changed,
            on_held=self.write_lease.held,
            timing=environment.timing,
            network=environment.network,
            lease_clock=self._clock,
        )
        return BrokerParts(
            self.driver,
            environment.fatal,
            self.maintenance.after_turn,
            self.repair.report_damage,
            self.driver.accept,
            self.write_lease,
            self._routing,
            self._access,
            ViewRules(self._view, broker.config.retries, broker.look_again),
        )

    def master_record(self) -> MasterRecord:
        """How clients find this replica while it is master. Its ports are known after `listen`."""
        return MasterRecord(self._identity.replica, 0, "", self.data_address, self.control_address)

    @property
    def data_address(self) -> str:
        return f"{self._advertised_host}:{self.data.port}"

    @property
    def control_address(self) -> str:
        return f"{self._advertised_host}:{self._control.port if self._control is not None else 0}"

    async def listen(self, data_port: int, control_port: int, also: AddServices | None = None) -> None:
        """Serve both ports. Raises OSError if a port is taken."""
        await self.data.start(self._host, data_port)
        self._control = await serve_control(
            self.broker,
            self.status,
            self._identity.group,
            self._host,
            control_port,
            also=also,
            wall=self._environment.clock,
            network=self._environment.network,
            access=self._access,
            process=self._process,
        )

    def start(self) -> None:
        """Begin to take part in the group. Call `listen` first, so that clients can find a master."""
        self.maintenance.start()
        self.driver.start()

    async def stop_serving(self, *, abruptly: bool = False) -> None:
        """Finish requests, and end the background work. The caller closes the store."""
        if self._control is not None:
            await self._control.stop(None if abruptly else STOP_GRACE_S)
        self.broker.retire()
        await self.data.stop()
        await self.maintenance.stop()
