"""A replica of a broker group, as `qmq broker` runs it. The common parts of replicas are in
`qmq/node/replica/node.py` and `qmq/node/replica/broker.py`.

`StaleRoutes` finds subjects whose routes in the coordination store are older than this broker
group's log: the store's data was put back. A broker seals a partition for a change that the store
has (`closes` in broker_assembly.py), and a change is deleted only with its subject. So a seal whose
change the store does not have shows routes that went back: partitions are missing in them, and the
next change would use numbers again. The master says so in `/qmq/routes/SUBJECT/stale/GROUP`.
Metaservers then neither serve nor change the subject's routes, until the store has the change
again, or is rebuilt from the brokers' folders (docs/BACKUP.md).

A seal counts when two checks in a row find it. If the master dies before the key is put, the next
master finds the seal.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from qmq_coordination.coordination_store import Compare, CompareTarget, CoordinationStore, Put
from qmq_coordination.ordered_records import latest_key, stale_key
from qmq_coordination.view import ClusterView

from qmq.broker.broker import Broker
from qmq.broker.parts import KindParts
from qmq.errors import CoordinationError
from qmq.log.store import Store
from qmq.node.broker_assembly import ViewRouting
from qmq.node.metrics.broker import GroupsSource
from qmq.node.process import MACHINE, Environment
from qmq.node.replica.broker import OwnParts, ReplicaBroker
from qmq.node.replica.context import ReplicaConfig, ReplicaContext, open_context
from qmq.node.replica.node import ReplicaNode
from qmq.security.access import OpenAccess

log = logging.getLogger("qmq.node")

CHECK_S: Final = 5.0


class StaleRoutes:
    """Checks from `start` to `stop`. `group` is the broker's own group."""

    def __init__(
        self,
        broker: Broker,
        view: ClusterView,
        store: CoordinationStore,
        group: str,
        check_s: float = CHECK_S,
    ) -> None:
        self._broker = broker
        self._view = view
        self._store = store
        self._group = group
        self._check_s = check_s
        self._seen: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._check_s)
            if self._broker.is_serving:
                with suppress(CoordinationError):  # the next check tries again
                    await self._check()

    async def _check(self) -> None:
        found = self._forgotten()
        for config, state in self._view.ordered_subjects():
            what, known = found.get(config.name), state.stale.get(self._group)
            if what is None and known is not None:
                await self._store.delete(stale_key(config.name, self._group))
            elif what is not None and known is None and config.name in self._seen:
                log.critical(
                    "the routes of subject %s in the coordination store were put back: %s",
                    config.name,
                    what,
                )
                exists = Compare(latest_key(config.name), CompareTarget.CREATE, ">", 0)
                await self._store.txn(
                    [exists], [Put(stale_key(config.name, self._group), what.encode())]
                )
        self._seen = found

    def _forgotten(self) -> dict[str, str]:
        """By subject, what the store has forgotten."""
        found: dict[str, str] = {}
        states = {config.name: state for config, state in self._view.ordered_subjects()}
        for queue in self._broker.store.queues.values():
            state, sealed = states.get(queue.id.subject), queue.sealed
            if state is None or sealed is None:
                continue
            change = state.changes.get(sealed.to_version)
            if change is None or change.id != sealed.change_id:
                found[queue.id.subject] = (
                    f"{self._group} sealed partition {queue.id.partition} for version "
                    f"{sealed.to_version}, and the latest is {state.latest}"
                )
        return found


class BrokerKind:
    """A replica of a broker group: it knows routes,
    and derives nothing from its log beside the store.
    """

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

    def own_parts(self, replica: ReplicaBroker) -> OwnParts:
        context = self._context
        group = context.config.group
        stale = StaleRoutes(
            replica.broker,
            context.view,
            context.coordination,
            group,
            context.environment.node_timing.stale_routes_s,
        )
        return OwnParts(GroupsSource(replica.broker, group), stale.start, stale.stop)


def broker_node(
    config: ReplicaConfig,
    coordination: CoordinationStore | None = None,
    *,
    environment: Environment = MACHINE,
) -> ReplicaNode:
    """Make a replica. The caller starts it. Without `coordination` the replica uses the configured
    etcd cluster.
    """
    context = open_context(config, coordination, environment)
    return ReplicaNode(context, BrokerKind(context))
