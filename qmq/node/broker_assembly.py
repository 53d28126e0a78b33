"""Assembles a running broker. Each part gets what it needs from its constructor.

                            single node (`qmq dev`)         replica (`qmq broker`, `qmq delay`)
    turns, state            Broker                          Broker
    work while it serves    -, or DelayWork                 the same (qmq/delay/delay_broker.py)
    commits                 Alone                           Driver, with the Coordinator of its mastership
    fencing by lease        -                               WriteLease
    flushes, checkpoints    Maintenance                     Maintenance
    repairs damage          -                               BackgroundRepair
    knows operators' rules  ViewRules                       ViewRules
    knows routes            ViewRouting, if not delayed     ViewRouting, if not delayed
    data port               DataServer                      DataServer
    control port            SingleGroupStatus               ReplicaStatus
    assembled by            StandaloneBroker                ReplicaBroker (replica_broker.py)

A broker and its parts need each other: the broker reports written entries to the committer, and the committer reports committed entries to
the broker. So a broker gets a function that makes its parts (`Broker.__init__`): the method `_make_parts` of both classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from qmq_coordination.view import ClusterView

from qmq.broker.broker import Broker, MakeParts
from qmq.broker.broker_parts import BrokerParts, KindParts
from qmq.broker.committer import Alone
from qmq.broker.control import serve_control
from qmq.broker.data_server import DataServer
from qmq.broker.group_rules import GroupRules, NoGroupRules
from qmq.broker.group_status import SingleGroupStatus
from qmq.broker.maintenance import TICK_S, Maintenance, stop_process
from qmq.broker.ordered_writes import NoRouting, Routing
from qmq.broker.replica_time import ReplicaTime
from qmq.network import NETWORK, Network, RpcPort
from qmq.node.broker_view import ViewRules
from qmq.process_description import DescribeProcess
from qmq.proto.v1 import control_pb2 as pb
from qmq.security.access_control import OpenAccess
from qmq.server_name import ServerName
from qmq.text_numbers import joined

if TYPE_CHECKING:
    import grpc

STOP_GRACE_S: Final = 1.0

MakeBroker = Callable[[MakeParts], Broker]
AddServices = Callable[["grpc.aio.Server"], None]
"""Adds services to the control port."""


class StandaloneBroker:
    """The broker of a node without replicas, which is always master. Without a `view` it has no group rules."""

    def __init__(
        self,
        make_broker: MakeBroker,
        view: ClusterView | None = None,
        routing: Routing | None = None,
        *,
        time: ReplicaTime | None = None,
        kind: KindParts | None = None,
        network: Network = NETWORK,
        access: OpenAccess | None = None,
        fatal: Callable[[BaseException], None] = stop_process,
        tick_s: float = TICK_S,
        process: DescribeProcess = pb.ProcessStatus,
    ) -> None:
        """Without a `time` the broker's clock is trusted."""
        self._time = time
        self._view = view
        self._routing = routing or NoRouting()
        self._kind = kind or KindParts()
        self._network = network
        self._access = access or OpenAccess()
        self._fatal = fatal
        self._tick_s = tick_s
        self._process = process
        self.broker = make_broker(self._make_parts)
        self.data = DataServer(self.broker, network, own=self._own_name)
        self.status = SingleGroupStatus(self.broker)
        self._control: RpcPort | None = None

    def _make_parts(self, broker: Broker) -> BrokerParts:
        self.maintenance = Maintenance(
            broker, self._fatal, retention_before=self._time.before_ms if self._time is not None else None, tick_s=self._tick_s
        )
        rules: GroupRules = NoGroupRules()
        if self._view is not None:
            rules = ViewRules(self._view, broker.config.retries, broker.look_again)
        return BrokerParts(
            Alone(broker),
            self._fatal,
            self.maintenance.after_turn,
            routing=self._routing,
            access=self._access,
            kind=self._kind,
            rules=rules,
        )

    def _own_name(self) -> ServerName:
        name = self.broker.config.name
        return ServerName("" if self._view is None else self._view.cluster, name, name)

    async def listen(
        self, host: str, data_port: int, control_port: int, also: AddServices | None = None, *, advertise: str = ""
    ) -> tuple[str, str]:
        """Serve both ports, and return their addresses, with `advertise` as the host. Raises OSError if a port is taken."""
        await self.data.start(host, data_port)
        self.maintenance.start()
        self._control = await serve_control(
            self.broker,
            self.status,
            self.broker.config.name,
            host,
            control_port,
            also=also,
            time=self._time,
            network=self._network,
            access=self._access,
            process=self._process,
            own=self._own_name,
        )
        return joined(advertise or host, self.data.port), joined(advertise or host, self._control.port)

    async def stop(self) -> None:
        """Answer the requests under way. The caller closes the store."""
        if self._control is not None:
            await self._control.stop(STOP_GRACE_S)
        await self.data.stop()
        await self.maintenance.stop()
