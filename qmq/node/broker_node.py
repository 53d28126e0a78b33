"""`qmq broker`: one replica of one broker group. The common parts of replicas are in `replica_node.py` and `replica_broker.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmq.broker.broker_parts import KindParts
from qmq.log.store import Store
from qmq.node.broker_view import ViewRouting
from qmq.node.environment import MACHINE, Environment
from qmq.node.metering.groups_metrics import GroupsSource
from qmq.node.replica_broker import ReplicaBroker
from qmq.node.replica_config import ReplicaConfig
from qmq.node.replica_context import ReplicaContext, open_context
from qmq.node.replica_node import ReplicaNode
from qmq.node.stale_routes import StaleRoutes
from qmq.security.access_control import OpenAccess

if TYPE_CHECKING:
    from qmq_coordination.coordination_store import CoordinationStore


class BrokerKind:
    """A replica of a broker group: it knows routes, and derives nothing from its log beside the store."""

    settings = None

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self.routing = ViewRouting(context.view, context.config.group)

    def projection(self) -> None:
        return None

    def discard(self) -> None:
        pass

    def has_all(self, _: Store | None) -> bool:
        return True

    def broker_parts(self, _: OpenAccess) -> KindParts:
        return KindParts()

    def own_parts(self, replica: ReplicaBroker) -> BrokerOwnParts:
        context = self._context
        group = context.config.group
        stale = StaleRoutes(replica.broker, context.view, context.coordination, group, context.environment.node_timing.stale_routes_s)
        return BrokerOwnParts(GroupsSource(replica.broker, group), stale)


class BrokerOwnParts:
    """The parts that only a broker group's replica has: the metrics of its consumer groups, and the check of its seals."""

    services = None

    def __init__(self, source: GroupsSource, stale: StaleRoutes) -> None:
        self.source = source
        self._stale = stale

    def start(self) -> None:
        self._stale.start()

    def role_changed(self) -> None:
        pass

    def log_starts_over(self) -> None:
        pass

    def log_started_over(self) -> None:
        pass

    async def stop(self) -> None:
        await self._stale.stop()


def broker_node(config: ReplicaConfig, coordination: CoordinationStore | None = None, *, environment: Environment = MACHINE) -> ReplicaNode:
    """Make a replica. The caller starts it. Without `coordination` the replica uses the configured etcd cluster."""
    context = open_context(config, coordination, environment)
    return ReplicaNode(context, BrokerKind(context))
