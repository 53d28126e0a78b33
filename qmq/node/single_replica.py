"""A broker group of one replica, in a process that has the coordination store in it: what `qmq dev` has one or two of.

It has the same keys as a replicated group, with a master that nobody elects: the folder's lock lets only one process be it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from qmq_coordination.broker_groups import EpochClaim, MasterRecord, Mode, ReplicaRecord, group_key
from qmq_coordination.coordination_store import CoordinationStore, Put, absent
from qmq_coordination.replica_registration import Registration
from qmq_coordination.view import ClusterView, ViewChange

from qmq.broker.broker import Broker
from qmq.broker.control import serve_control
from qmq.broker.data_server import DataServer
from qmq.broker.group_status import SingleGroupStatus
from qmq.broker.maintenance import Maintenance
from qmq.errors import DiskFull
from qmq.log.checkpoint_writing import close_store
from qmq.log.store import Store
from qmq.network import NETWORK, Network
from qmq.node.metering import serving
from qmq.node.view_rules import ViewRules

if TYPE_CHECKING:
    import grpc

    from qmq.metrics.figures import FigureSource

log = logging.getLogger("qmq.node")

STOP_GRACE_S: Final = 1.0


class SingleReplica:
    """Runs a broker, whose name is also its group's. Make it, `start` it, `stop` it; stopping works however far starting came."""

    def __init__(self, broker: Broker, coordination: CoordinationStore, view: ClusterView, network: Network = NETWORK) -> None:
        self.broker = broker
        self._name = broker.config.name
        self._coordination = coordination
        self._view = view
        self._upkeep = Maintenance(broker)
        self._network = network
        self._data = DataServer(broker, network)
        self._standing = SingleGroupStatus(broker)
        self._control: grpc.aio.Server | None = None
        self._registration: Registration | None = None
        broker.rules = ViewRules(view, broker.config.retries, broker.look_again)
        view.on_change(self._changed)
        self._changed(ViewChange())

    def _changed(self, _: ViewChange) -> None:
        """The coordination store has news; or had, before we started."""
        self.broker.forget_routes()
        self.broker.is_read_only = self._view.group(self._name).mode is Mode.READ_ONLY

    async def start(self, host: str, data_port: int, control_port: int, *, also: Callable[[grpc.aio.Server], None] | None = None) -> None:
        """Listen, and say so. Raises OSError if a port is taken."""
        await self._data.start(host, data_port)
        self._upkeep.start()
        self._control, bound = await serve_control(
            self.broker, self._standing, self._name, host, control_port, also=also, network=self._network
        )
        await self._register(f"{host}:{self._data.port}", f"{host}:{bound}")

    async def _register(self, data_address: str, control_address: str) -> None:
        name, epoch = self._name, self.broker.store.epoch
        claim = EpochClaim(epoch, name, "dev")
        await self._coordination.txn([absent(group_key(name, "epoch"))], [Put(group_key(name, "epoch"), claim.encode())])
        master = MasterRecord(name, epoch, claim.attempt, data_address, control_address)
        record = ReplicaRecord(name, name, data_address, control_address)
        self._registration = Registration(self._coordination, record, also={group_key(name, "master"): master.encode()})
        await self._registration.start()

    def sources(self) -> list[FigureSource]:
        """What reads its figures."""
        return serving.sources_of(self.broker, self._name, self._data, self._standing.describe, {})

    @property
    def data_port(self) -> int:
        return self._data.port

    async def retire(self) -> None:
        """Let nothing new in, and be found no more."""
        self.broker.is_stopping = True
        if self._registration is not None:
            await self._registration.stop()

    async def stop(self) -> None:
        """Answer what is under way."""
        if self._control is not None:
            await self._control.stop(STOP_GRACE_S)
        await self._data.stop()
        await self._upkeep.stop()

    def close(self) -> None:
        """Close the store so that the next start replays nothing."""
        close(self.broker.store)


def close(store: Store) -> None:
    """Close; on a full disk without the checkpoint, so that the next start replays a little."""
    try:
        store.write_actions()
        close_store(store)
    except DiskFull as failure:
        log.warning("closed without a checkpoint: %s", failure)
        store.close()
