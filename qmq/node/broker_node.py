"""`qmq broker`: one replica of one broker group. What is common to replicas is in `replica_node.py` and `replica_broker.py`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from qmq.broker.broker import Broker, MakeParts
from qmq.log.store import Store
from qmq.node.broker_view import ViewRouting
from qmq.node.environment import MACHINE, Environment
from qmq.node.replica_broker import ReplicaBroker
from qmq.node.replica_config import ReplicaConfig
from qmq.node.replica_context import ReplicaContext, open_context
from qmq.node.replica_node import ReplicaNode

if TYPE_CHECKING:
    from qmq_coordination.coordination_store import CoordinationStore

BrokerNode = ReplicaNode[Broker]


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

    def make_broker(self, store: Store, make_parts: MakeParts) -> Broker:
        context = self._context
        return Broker(
            store,
            context.view.subject,
            context.clock,
            context.broker_config,
            asyncio.get_running_loop(),
            make_parts=make_parts,
            is_serving=False,
        )

    def make_parts(self, _: ReplicaBroker[Broker]) -> NoParts:
        return NoParts()


class NoParts:
    """A replica of a broker group has no parts of its own."""

    services = None

    def start(self) -> None:
        pass

    def role_changed(self) -> None:
        pass

    def log_begins_anew(self) -> None:
        pass

    def log_began_anew(self) -> None:
        pass

    async def stop(self) -> None:
        pass


def broker_node(config: ReplicaConfig, coordination: CoordinationStore | None = None, *, environment: Environment = MACHINE) -> BrokerNode:
    """A replica that is not started yet. Without `coordination` it uses the etcd cluster that the configuration names."""
    context = open_context(config, coordination, environment)
    return ReplicaNode(context, BrokerKind(context))
