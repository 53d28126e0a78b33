"""The broker of a delay group: an ordinary `Broker` with these parts (`DelayWork.parts`):

    destinations   DelayDestinations   takes delayed batches only, of all subjects, and checks their due times
    admission      DelayedQuota        bounds how many messages of a subject wait
    work           DelayWork           while it is master, an Engine that sends due messages over Links to the brokers of their subjects
    has_consumers  False               due messages leave by the engine

Its store has a projection, the `Schedule`. Its control port has, besides the broker's services, the DelayService, which calls
`DelayWork.admin`. `qmq/node/delay_node.py` assembles a replica, `qmq/node/dev_delay.py` the group of `qmq dev`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qmq_coordination.broker_groups import DelaySettings

from qmq.broker.broker_parts import Admit, KindParts, ServingBroker
from qmq.client.producer import ProducerIds
from qmq.clock import Clock
from qmq.delay.delay_admin import EngineAdmin
from qmq.delay.delay_config import DelayConfig
from qmq.delay.delay_destinations import DelayDestinations
from qmq.delay.delay_engine import Dispatcher, Engine, SettlingClock
from qmq.delay.delayed_quota import DelayedQuota
from qmq.delay.dispatcher.due_dispatcher import DueDispatcher
from qmq.delay.plan_log import StorePlanLog
from qmq.errors import NotMaster
from qmq.log.store import Store
from qmq.security.access_control import OpenAccess
from qmq.timekeeper import SteadyClock

if TYPE_CHECKING:
    from qmq.client.links import Links
    from qmq.delay.schedule import Schedule


class DelayWork:
    """`links` makes the connections to the real-time brokers, for one term as master; `fatal` stops the process."""

    def __init__(
        self,
        group: str,
        settings: DelaySettings,
        config: DelayConfig,
        clock: Clock,
        links: Callable[[], Links],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self.engine: Engine | None = None
        """While this replica is master."""
        self.admin = EngineAdmin(self.require_engine, group, settings.delay_ms_max)
        self.timekeeper: SettlingClock | None = clock if isinstance(clock, SteadyClock) else None
        self._group, self._settings, self._config = group, settings, config
        self._clock = clock
        self._make_links = links
        self._fatal = fatal
        self._links: Links | None = None
        self._broker: ServingBroker | None = None
        self._new_producer_id = ProducerIds()
        self._ending: set[asyncio.Task[None]] = set()

    def parts(self, access: OpenAccess) -> KindParts:
        """The parts of this group's broker; `access` knows the quotas."""

        def admission(store: Store) -> Admit | None:
            if not access.has_quotas:
                return None
            return DelayedQuota(schedule_of(store).pending, access, self._group).admit

        destinations = DelayDestinations(self._settings, self._clock.time_ms, self._full_buckets)
        return KindParts(destinations, admission, self, has_consumers=False)

    def _full_buckets(self) -> set[int]:
        return self.engine.full_buckets if self.engine is not None else set()

    def begin(self, store: Store, broker: ServingBroker) -> None:
        """Due messages are sent from now on."""
        self._broker = broker
        self._links = self._make_links()
        self.engine = Engine(schedule_of(store), broker, self._clock, self._config, self._dispatcher, self._fatal, self.timekeeper)
        self.engine.start()

    def _dispatcher(self, plan_log: StorePlanLog) -> Dispatcher:
        assert self._links is not None
        return DueDispatcher(self._links, plan_log, new_producer_id=self._new_producer_id)

    def end(self) -> None:
        """Plan and send no more messages."""
        engine, links, self.engine, self._links = self.engine, self._links, None, None
        if engine is None or links is None:
            return
        engine.halt()
        task = asyncio.get_running_loop().create_task(_end(engine, links))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        """End, and wait for the tasks of all terms."""
        self.end()
        await asyncio.gather(*self._ending)

    def require_engine(self) -> Engine:
        """The engine. Raises NotMaster."""
        if self._broker is not None:
            self._broker.require_serving()
        if self.engine is None:
            raise NotMaster(f"this replica is not the master of {self._group}")
        return self.engine


def schedule_of(store: Store) -> Schedule:
    """The schedule of a delay group's store."""
    schedule: Any = store.projection
    assert schedule is not None, "a delay group's store has a schedule"
    return schedule  # type: ignore[no-any-return]


async def _end(engine: Engine, links: Links) -> None:
    await engine.stop()
    await links.close()
