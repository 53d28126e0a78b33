"""`qmq delay`: one replica of one delay group. A replica like a broker's, and in the same folder:

    DATA/delay.json                  what the group was founded with (bootstrap.py)
    DATA/broker/schedule/            which message is where and due when: the projection of the store beside it
    DATA/broker/schedule-fetched/    a schedule that is being copied from another replica (schedule_transfer.py)

It differs in its broker, which delivers due messages while it is master, in its clock, which does not follow every jump, and in one more
service on its control port. It finds real-time brokers in the coordination store, without a metaserver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qmq_coordination.broker_groups import DelaySettings
from qmq_replication.ready import Role

from qmq.broker.broker import MakeParts
from qmq.broker.ordered_writes import Routing
from qmq.clock import Clock
from qmq.delay.delay_broker import DelayBroker, schedule_of
from qmq.delay.delay_config import DelayConfig
from qmq.delay.delay_service import DelayIdentity, DelayService
from qmq.delay.schedule import Schedule
from qmq.delay.time_witnesses import TimeWitnesses
from qmq.delay.timekeeper import SteadyClock
from qmq.log.log_config import LogConfig
from qmq.log.recovery import whole_from
from qmq.node import bootstrap
from qmq.node.broker_assembly import AddServices
from qmq.node.environment import MACHINE, Environment
from qmq.node.replica_node import ReplicaConfig, ReplicaNode
from qmq.node.schedule_files import SCHEDULE, ReplicaScheduleFiles
from qmq.node.schedule_transfer import ScheduleTransfer
from qmq.node.view_locator import ViewLocator

if TYPE_CHECKING:
    from qmq_coordination.coordination_store import CoordinationStore

    from qmq.client.links import Links
    from qmq.log.projection import Projection


def delay_log() -> LogConfig:
    """A delay group's message log is only the input of the schedule: one day of it is enough for replicas that were away."""
    return LogConfig(retention_ms=bootstrap.DAY_MS)


@dataclass(frozen=True, slots=True)
class DelayReplicaConfig(ReplicaConfig):
    """One replica. `settings` are used to create the group, and must otherwise equal the group's; `delay` is this replica's own."""

    data_port: int = 20883
    control_port: int = 20884
    log: LogConfig = field(default_factory=delay_log)
    settings: DelaySettings = bootstrap.DEFAULT
    delay: DelayConfig = field(default_factory=DelayConfig)


class DelayNode(ReplicaNode):
    """A running replica of a delay group. Call `start`, then `stop`; after a crash call `start` again."""

    broker: DelayBroker

    def __init__(
        self, config: DelayReplicaConfig, coordination: CoordinationStore | None = None, *, environment: Environment = MACHINE
    ) -> None:
        self.clock: Clock = environment.clock or SteadyClock()
        super().__init__(config, coordination, clock=self.clock, kind=bootstrap.check_settings(config.settings), environment=environment)
        self.settings = config.settings
        self._delay = config.delay
        self._locator = ViewLocator(self.coordination, self.view, self.environment.network)
        self._witnesses: TimeWitnesses | None = None
        if isinstance(self.clock, SteadyClock):  # a clock that was passed in is trusted
            self._witnesses = TimeWitnesses(self.clock, self._witness_addresses, network=self.environment.network)
        self._transfer = ScheduleTransfer(
            self, self.folder, self._disk, Schedule, environment.fatal, self.environment.network, environment.node_timing
        )

    # --- by kind -------------------------------------------------------------------------------------------------------

    def _projection(self) -> Projection | None:
        return Schedule(self.folder / SCHEDULE, self._disk, self.settings.bucket_ms)

    def _make_broker(self, make_parts: MakeParts) -> DelayBroker:
        return DelayBroker(
            self.store,
            self.view.subject,
            self._clock,
            self.broker_config(),
            asyncio.get_running_loop(),
            group=self.config.group,
            settings=self.settings,
            delay=self._delay,
            links=self._links,
            make_parts=make_parts,
            is_serving=False,
        )

    def _routing(self) -> Routing | None:
        return None

    def _links(self) -> Links:
        return self._locator.links(f"qmq-delay/{self.config.replica}")

    def _also_served(self) -> AddServices:
        config = self.config
        files = ReplicaScheduleFiles(self.folder, lambda: self.has_schedule)
        identity = DelayIdentity(config.group, config.replica, self.settings.bucket_ms)
        return DelayService(identity, lambda: self.broker.admin if self.broker.is_serving else None, files).add_to

    def may_serve(self) -> bool:
        return self.has_schedule

    def _take_part(self) -> None:
        super()._take_part()
        if self._witnesses is not None:
            self._witnesses.start()
        self._transfer.start()

    def _forget(self) -> None:
        self._transfer.forget()

    def must_hold_back(self) -> bool:
        return super().must_hold_back() or not self.has_schedule

    def role_changed(self, role: Role) -> None:
        super().role_changed(role)
        self._transfer.role_changed()

    # --- the schedule's transfer, see schedule_transfer.Taker ----------------------------------------------------------

    @property
    def has_schedule(self) -> bool:
        """Whether the schedule is complete: if the log lost its beginning, it must be copied from another replica."""
        return not self._is_opening and schedule_of(self.broker.store).is_whole

    def needs_from(self) -> int | None:
        """The lowest index from which on our own log is complete."""
        return None if self._is_opening else whole_from(self.broker.store)

    @property
    def committed(self) -> int:
        """Up to where our own log is committed; -1 while it is being reopened, so that nothing is adopted."""
        return -1 if self._is_opening else self.driver.core.commit

    @property
    def leads(self) -> bool:
        """Whether this replica is master."""
        return self.driver.core.role is Role.MASTER

    def adopt(self) -> None:
        """Reopen the store with the copied schedule."""
        self._running.maintenance.quiesce()
        self.broker.store.close()
        self.broker.reopened(self._open_store())
        self.broker.commit(self.driver.core.commit)
        self.driver.serve_if_due()

    async def hand_over(self, to: str) -> None:
        """Hand the mastership over. Raises QmqError."""
        await self.standing.transfer(to)

    # --- the clock -----------------------------------------------------------------------------------------------------

    def _witness_addresses(self) -> Iterator[str]:
        """The other replicas first, then everybody else who is registered."""
        yield from self.donors().values()
        for state in self.view.groups():
            if state.name != self.config.group:
                yield from [each.control_address for each in self.view.present(state.name).values()]

    # --- the end -------------------------------------------------------------------------------------------------------

    async def stop(self, *, abruptly: bool = False) -> None:
        """See `ReplicaNode.stop`. Deliveries end first: the next master sends unanswered plans again."""
        await self._transfer.stop()
        if self._witnesses is not None:
            await self._witnesses.stop()
        ending = self.broker.end_engine()
        if ending is not None:
            await ending
        self._locator.close()
        await super().stop(abruptly=abruptly)
