"""The broker of a delay group: takes delayed batches, has no consumers, and runs an engine while it is master.

Before a batch is stored, its due times, the flag of ordered subjects, required keys, and the recurrence of recurring messages are checked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from qmq_coordination.broker_groups import DelaySettings

from qmq.batch import BatchView, Envelope
from qmq.batch_columns import BatchFlag, Layout, RegionHeader
from qmq.broker.broker import Broker, LookUpSubject, MakeParts
from qmq.broker.broker_config import BrokerConfig
from qmq.broker.produce_checks import CheckDueTimes, Destination
from qmq.client.producer import ProducerIds
from qmq.clock import Clock
from qmq.delay.delay_admin import EngineAdmin, check_due
from qmq.delay.delay_config import DelayConfig
from qmq.delay.delay_engine import Dispatcher, Engine, SettlingClock
from qmq.delay.delayed_quota import DelayedQuota
from qmq.delay.dispatcher.due_dispatcher import DueDispatcher
from qmq.delay.plan_log import StorePlanLog
from qmq.delay.recurrence import check as check_recurrence
from qmq.delay.timekeeper import SteadyClock
from qmq.errors import InvalidArgument, NotMaster, OrderMismatch, Overloaded
from qmq.headers import CRON, SCHEDULE_ID, ZONE
from qmq.log.actions import ScheduleAction
from qmq.log.store import Intake, Store
from qmq.model import Order, SubjectConfig, SubjectFlush

if TYPE_CHECKING:
    from qmq.client.links import Links
    from qmq.delay.schedule import Schedule

log = logging.getLogger("qmq.delay")

_ORDERED, _RECURRING, _HALF = int(BatchFlag.ORDERED), int(BatchFlag.RECURRING), int(BatchFlag.HALF)


class DelayBroker(Broker):
    """`links` makes the connections to the real-time brokers, for one term as master."""

    def __init__(
        self,
        store: Store,
        look_up: LookUpSubject,
        clock: Clock,
        config: BrokerConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        group: str,
        settings: DelaySettings,
        delay: DelayConfig,
        links: Callable[[], Links],
        make_parts: MakeParts | None = None,
        is_serving: bool = True,
    ) -> None:
        super().__init__(store, look_up, clock, config, loop, make_parts=make_parts, is_serving=is_serving)
        self.settings = settings
        self.delay = delay
        self._group = group
        self.engine: Engine | None = None
        self.admin = EngineAdmin(self.require_engine, group, settings.delay_ms_max)
        self._make_links = links
        self._links: Links | None = None
        self._new_producer_id = ProducerIds()
        self.timekeeper: SettlingClock | None = clock if isinstance(clock, SteadyClock) else None
        self._ending: set[asyncio.Task[None]] = set()
        if is_serving:
            self._begin()

    # --- serving -------------------------------------------------------------------------------------------------------

    def serve(self, store: Store) -> None:
        """Begin to serve: due messages are sent from now on."""
        super().serve(store)
        self._begin()

    def _begin(self) -> None:
        self._links = self._make_links()
        self.engine = Engine(schedule_of(self.store), self, self.clock, self.delay, self._dispatcher, self.fatal, self.timekeeper)
        self.engine.start()

    def _dispatcher(self, plan_log: StorePlanLog) -> Dispatcher:
        assert self._links is not None
        return DueDispatcher(self._links, plan_log, new_producer_id=self._new_producer_id)

    def retire(self) -> None:
        """Stop serving: plan and send no more messages."""
        if self.is_serving:
            self.end_engine()
        super().retire()

    def end_engine(self) -> asyncio.Task[None] | None:
        """Stop the tasks of a master; awaited when the process ends."""
        engine, links, self.engine, self._links = self.engine, self._links, None, None
        if engine is None or links is None:
            return None
        engine.halt()
        task = self.loop.create_task(_end(engine, links))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def require_engine(self) -> Engine:
        """The engine. Raises NotMaster."""
        self.require_serving()
        if self.engine is None:
            raise NotMaster(self._not_master())
        return self.engine

    def require_consumption(self) -> None:
        """A delay group has no consumers. Raises InvalidArgument."""
        raise InvalidArgument("a delay group serves no consumers: attach to the subject's broker group")

    def subject_or_none(self, _name: str) -> SubjectConfig | None:
        """The retention of subjects does not apply: messages stay in the schedule until they are delivered."""
        return None

    # --- the log -------------------------------------------------------------------------------------------------------

    def act(self, action: ScheduleAction) -> None:
        """See `qmq.delay.plan_log.PlanWriter`. Raises NotMaster."""
        if not self.is_serving:
            raise NotMaster(self._not_master())
        self.store.act(action)
        self.schedule()

    # --- intake --------------------------------------------------------------------------------------------------------

    def _open_route(self, subject: bytes, partition: int) -> Destination:
        try:
            config = self.subject(subject.decode())
        except UnicodeDecodeError:
            raise InvalidArgument("a subject must be UTF-8") from None
        if partition != 0:
            raise InvalidArgument(f"a delayed message has no partition yet: {partition} was named")
        queue, awaits_flush = self.store.open_queue(config.name, 0), config.flush is SubjectFlush.SYNC
        return Destination(queue, config.body_bytes_max, check_due_times=self._check_of(config), awaits_flush=awaits_flush)

    def _check_of(self, config: SubjectConfig) -> CheckDueTimes:
        is_ordered = config.order is not Order.NONE

        def check(region: bytes, header: RegionHeader, layout: Layout) -> None:
            if layout.due < 0:
                raise InvalidArgument("a delay group takes only delayed messages: send this one to the subject's broker group")
            check_due(latest_due(region, header, layout), self.clock.time_ms(), self.settings.delay_ms_max)
            if header.compression:
                raise InvalidArgument("a delayed batch is cut by due time, so its bodies must not be compressed: compress each, if need be")
            if self.engine is not None and self.engine.full_buckets:
                self._require_room(region, header, layout)
            if bool(header.flags & _ORDERED) != is_ordered:
                raise OrderMismatch(f"subject {config.name!r} is {'' if is_ordered else 'not '}ordered, and the batch says otherwise")
            if is_ordered and layout.key < 0:
                raise OrderMismatch(f"messages to the ordered subject {config.name!r} need keys")
            if header.flags & _RECURRING:
                if header.flags & _HALF:
                    raise InvalidArgument("a recurring message cannot wait for a decision: send it when it is decided")
                check_recurring(region, header)

        return check

    def _admission(self, batches: list[Intake]) -> Callable[[list[Intake]], None] | None:
        """The admission check, extended by the quotas of delayed messages."""
        admit = super()._admission(batches)
        if not self.access.has_quotas:
            return admit
        quota = DelayedQuota(self.store, schedule_of(self.store).pending, self.access, self._group)

        def admit_within_quota(request: list[Intake]) -> None:
            quota.admit(request)
            if admit is not None:
                admit(request)

        return admit_within_quota

    def _require_room(self, region: bytes, header: RegionHeader, layout: Layout) -> None:
        assert self.engine is not None
        wanted = set((np.frombuffer(region, "<i8", header.count, layout.due) // self.settings.bucket_ms).tolist())
        full = wanted & self.engine.full_buckets
        if full:
            raise Overloaded(
                f"the hour that begins at {min(full) * self.settings.bucket_ms} ms is full: send to another delay "
                "group, or create one with shorter buckets"
            )


def schedule_of(store: Store) -> Schedule:
    """The schedule of a delay group's store."""
    schedule: Any = store.projection
    assert schedule is not None, "a delay group's store has a schedule"
    return schedule  # type: ignore[no-any-return]


def latest_due(region: bytes, header: RegionHeader, layout: Layout) -> int:
    """The latest due time of a batch; a negative one if the batch has any."""
    due_times_ms = np.frombuffer(region, "<i8", header.count, layout.due)
    earliest = int(due_times_ms.min())
    return earliest if earliest < 0 else int(due_times_ms.max())


def check_recurring(region: bytes, header: RegionHeader) -> None:
    """Raises InvalidArgument."""
    headers = BatchView(Envelope(0, 0, 0, -1, 0, 0, 0, 0), region).headers()
    if header.count != 1 or headers is None or CRON not in headers[0] or ZONE not in headers[0] or SCHEDULE_ID in headers[0]:
        raise InvalidArgument(f"a recurring message must be alone in its batch, with the headers {CRON} and {ZONE}")
    try:
        check_recurrence(headers[0][CRON].decode(), headers[0][ZONE].decode())
    except UnicodeDecodeError:
        raise InvalidArgument(f"{CRON} and {ZONE} must be UTF-8") from None


async def _end(engine: Engine, links: Links) -> None:
    await engine.stop()
    await links.close()
