"""A broker group, or delay group, of `qmq dev`: one replica, in a process that has the coordination
store in it. It has the same keys as a replicated group, and its master is not elected: the folder's
lock admits one process only.
"""

from __future__ import annotations

import logging

from qmq_coordination.broker_groups import (
    EpochClaim,
    MasterRecord,
    Mode,
    Registration,
    ReplicaRecord,
    group_key,
)
from qmq_coordination.coordination_store import CoordinationStore, Put, absent
from qmq_coordination.view import ClusterView, ViewChange

from qmq.broker.control import ProcessParts
from qmq.broker.parts import KindParts
from qmq.broker.produce_checks import Routing
from qmq.errors import DiskFull
from qmq.log.checkpoint import close_store
from qmq.log.store import Store
from qmq.metrics.figures import FigureSource
from qmq.node.broker_assembly import AddServices, MakeBroker, StandaloneBroker
from qmq.node.metrics import serving

log = logging.getLogger("qmq.node")


class SingleReplica:
    """Runs a broker that has the same name as its group. Call `start`, then `stop`, also after a
    failed start.
    """

    def __init__(
        self,
        make_broker: MakeBroker,
        coordination: CoordinationStore,
        view: ClusterView,
        routing: Routing | None = None,
        *,
        parts: ProcessParts,
        kind: KindParts | None = None,
    ) -> None:
        self.running = StandaloneBroker(make_broker, view, routing, parts=parts, kind=kind)
        """The broker's data port, its status and its maintenance."""
        self.broker = self.running.broker
        self._time = parts.time
        self._name = self.broker.config.name
        self._coordination = coordination
        self._view = view
        self._registration: Registration | None = None
        view.on_change(self._changed)
        self._changed(ViewChange())

    def _changed(self, change: ViewChange) -> None:
        """Handle a change of the coordination store, which may come before the start."""
        is_read_only = self._view.group(self._name).mode is Mode.READ_ONLY
        self.broker.cluster_changed(is_read_only=is_read_only, subjects=change.subjects)

    async def start(
        self,
        host: str,
        data_port: int,
        control_port: int,
        *,
        also: AddServices | None = None,
        advertise: str = "",
    ) -> None:
        """Listen, and register, with `advertise` as the host if it is given. Raises OSError if a
        port is taken.
        """
        await self._register(
            *await self.running.listen(host, data_port, control_port, also, advertise=advertise)
        )

    async def _register(self, data_address: str, control_address: str) -> None:
        name, epoch = self._name, self.broker.store.epoch
        claim = EpochClaim(epoch, name, "dev")
        await self._coordination.txn(
            [absent(group_key(name, "epoch"))], [Put(group_key(name, "epoch"), claim.encode())]
        )
        master = MasterRecord(name, epoch, claim.attempt, data_address, control_address)
        record = ReplicaRecord(name, name, data_address, control_address)
        self._registration = Registration(
            self._coordination, record, also={group_key(name, "master"): master.encode()}
        )
        await self._registration.start()

    def sources(self) -> list[FigureSource]:
        """The sources of its metrics, without those of its kind of group."""
        return serving.sources_of(
            self.broker,
            self._name,
            self.running.data,
            self.running.status.describe,
            {},
            time=self._time,
        )

    @property
    def data_port(self) -> int:
        return self.running.data.port

    async def retire(self) -> None:
        """Accept no new requests, and unregister."""
        self.broker.begin_stop()
        if self._registration is not None:
            await self._registration.stop()

    async def stop(self) -> None:
        """Answer the requests under way."""
        await self.running.stop()

    def close(self) -> None:
        """Close the store so that the next start replays nothing."""
        close(self.broker.store)


def close(store: Store) -> None:
    """Close. On a full disk close without a checkpoint, so that the next start replays a little."""
    try:
        store.write_actions()
        close_store(store)
    except DiskFull as failure:
        log.warning("closed without a checkpoint: %s", failure)
        store.close()
