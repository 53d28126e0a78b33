"""`qmq delay`: one replica of one delay group. A replica like a broker's, and in the same folder:

    DATA/delay.json                  the settings with which the group was created (process.py)
    DATA/broker/schedule/            the schedule, with each message's position and due time: the projection of the store beside it
    DATA/broker/schedule-fetched/    a schedule that is being copied from another replica (schedule_transfer.py)

The common parts of replicas are in `qmq/node/replica/node.py` and `qmq/node/replica/broker.py`. A delay replica also has:

    broker          with DelayWork (qmq/delay/broker.py), which sends due messages while it is master; it finds real-time brokers in
                    the coordination store
    projection      Schedule
    control port    DelayService
    if its schedule is incomplete: ScheduleTransfer, which copies another replica's
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from qmq_coordination.broker_groups import DelaySettings

from qmq.broker.parts import KindParts
from qmq.broker.produce_checks import NoRouting
from qmq.delay.broker import DelayWork, schedule_of
from qmq.delay.config import DelayConfig
from qmq.delay.files import SCHEDULE, ReplicaScheduleFiles
from qmq.delay.schedule import Schedule
from qmq.delay.service import DelayIdentity, DelayService
from qmq.log.log_config import LogConfig
from qmq.log.store import Store
from qmq.node import process
from qmq.node.broker_assembly import ViewLocator
from qmq.node.metrics.delay import DelaySource
from qmq.node.process import MACHINE, Environment
from qmq.node.replica.broker import ReplicaBroker
from qmq.node.replica.context import ReplicaConfig, ReplicaContext, open_context
from qmq.node.replica.node import ReplicaNode
from qmq.node.schedule_transfer import ASIDE, ScheduleTransfer
from qmq.security.access import OpenAccess

if TYPE_CHECKING:
    from qmq_coordination.coordination_store import CoordinationStore

    from qmq.client.connection.pool import ConnectionPool


def delay_log() -> LogConfig:
    """A delay group's message log is only the input of the schedule: one day of it is enough for replicas that were away."""
    return LogConfig(retention_ms=process.DAY_MS)


@dataclass(frozen=True, slots=True)
class DelayReplicaConfig(ReplicaConfig):
    """The configuration of one replica. `settings` create the group, or must equal those of an existing group. `delay` is for this replica
    only."""

    data_port: int = 20883
    control_port: int = 20884
    log: LogConfig = field(default_factory=delay_log)
    settings: DelaySettings = process.DEFAULT
    delay: DelayConfig = field(default_factory=DelayConfig)


class DelayKind:
    """A replica of a delay group: it derives the schedule from its log, and serves only while the schedule is complete."""

    routing: Final = NoRouting()

    def __init__(self, context: ReplicaContext, settings: DelaySettings, delay: DelayConfig) -> None:
        self.settings = settings
        self._context = context
        self._locator = ViewLocator(context.coordination, context.view, context.environment.network)
        self._work = DelayWork(context.config.group, settings, delay, context.clock, self._links, context.environment.fatal)

    def projection(self) -> Schedule:
        return Schedule(self._context.folder / SCHEDULE, self._context.environment.disk, self.settings.bucket_ms)

    def discard(self) -> None:
        for name in (SCHEDULE, ASIDE):
            shutil.rmtree(self._context.folder / name, ignore_errors=True)

    def has_all(self, store: Store | None) -> bool:
        """True if the schedule is complete. If the log lost its beginning, the schedule must be copied from another replica."""
        return store is not None and schedule_of(store).is_whole

    def broker_parts(self, access: OpenAccess) -> KindParts:
        return self._work.parts(access)

    def _links(self) -> ConnectionPool:
        return self._locator.links(f"qmq-delay/{self._context.config.replica}")

    def own_parts(self, replica: ReplicaBroker) -> DelayParts:
        return DelayParts(self._context, replica, self._work, self.settings, self._locator)


class DelayParts:
    """The parts of a running replica that only a delay group has."""

    def __init__(
        self, context: ReplicaContext, replica: ReplicaBroker, work: DelayWork, settings: DelaySettings, locator: ViewLocator
    ) -> None:
        config, environment, broker = context.config, context.environment, replica.broker
        files = ReplicaScheduleFiles(context.folder, lambda: replica.has_all)
        identity = DelayIdentity(config.group, config.replica, settings.bucket_ms)
        self.services = DelayService(identity, lambda: work.admin if broker.is_serving else None, files).add_to
        self.source = DelaySource(broker, work, config.group)
        self.work = work
        self._context = context
        self._locator = locator
        self._transfer = ScheduleTransfer(
            replica, context.folder, environment.disk, Schedule, environment.fatal, environment.network, environment.node_timing
        )

    def start(self) -> None:
        self._transfer.start()

    def role_changed(self) -> None:
        self._transfer.role_changed()

    def log_starts_over(self) -> None:
        self._transfer.stop_fetch()

    def log_started_over(self) -> None:
        self._transfer.fetch()

    async def stop(self) -> None:
        """Stop the deliveries first, because the next master sends unanswered plans again."""
        await self._transfer.stop()
        await self.work.stop()
        self._locator.close()


def delay_node(
    config: DelayReplicaConfig, coordination: CoordinationStore | None = None, *, environment: Environment = MACHINE
) -> ReplicaNode:
    """Make a replica. The caller starts it. Without `coordination` the replica uses the configured etcd cluster. Raises
    InvalidArgument for impossible settings.
    """
    settings = process.check_settings(config.settings)
    context = open_context(config, coordination, environment)
    return ReplicaNode(context, DelayKind(context, settings, config.delay))
