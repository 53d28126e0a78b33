"""The broker of a delay group: an ordinary `Broker` with these parts (`DelayWork.parts`):

    find_destination      DelayDestinations   takes delayed batches only, of all subjects, and
                                              checks their due times
    admission             DelayedQuota        bounds how many messages of a subject wait
    begin_work, end_work  DelayWork           while it is master, an Engine that sends due messages
                                              to the brokers of their subjects
    has_consumers         False               due messages leave by the engine

Its store has a projection, the `Schedule`. Its control port has, besides the broker's services, the
DelayService, which calls `DelayWork.admin`. `qmq/node/delay.py` assembles a replica,
`qmq/node/dev_node.py` the group of `qmq dev`.

Each batch goes into its subject's queue. Before a batch is stored, its due times, the flag of
ordered subjects, required keys, and the recurrence of recurring messages are checked.

The quota `delayed_messages` (qmq/security/quotas.py) is that of a subject, and of the principal
that created the subject. It is checked just before a request's batches are stored, after all
earlier ones. A batch that is stored already is acknowledged again, regardless of the quota.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from qmq_coordination.broker_groups import DelaySettings

from qmq.broker.parts import Admit, KindParts, ServingBroker
from qmq.broker.produce_checks import CheckDueTimes, Destination, FindSubject
from qmq.broker.timekeeper import SteadyClock
from qmq.client.producing.producer import ProducerIds
from qmq.delay.admin import EngineAdmin
from qmq.delay.batches import check_due
from qmq.delay.config import DelayConfig
from qmq.delay.dispatcher import DueDispatcher
from qmq.delay.engine import Engine
from qmq.delay.plan_log import StorePlanLog
from qmq.delay.recurrence import check as check_recurrence
from qmq.delay.schedule import PendingCounts
from qmq.errors import InvalidArgument, NotMaster, OrderMismatch, Overloaded, QuotaExceeded
from qmq.log.store import Intake, Store
from qmq.model import CRON, SCHEDULE_ID, ZONE, Order, SubjectConfig, SubjectFlush
from qmq.process.event_loop import Clock
from qmq.security.access import OpenAccess
from qmq.wire.batch import BatchView, Envelope
from qmq.wire.batch_columns import BatchFlag, Layout, RegionHeader

if TYPE_CHECKING:
    from qmq.client.connection.pool import ConnectionPool
    from qmq.delay.schedule import Schedule

_ORDERED: Final = int(BatchFlag.ORDERED)
_RECURRING: Final = int(BatchFlag.RECURRING)
_HALF: Final = int(BatchFlag.HALF)


class DelayDestinations:
    """`full_buckets` returns the buckets that take no more messages."""

    def __init__(
        self,
        settings: DelaySettings,
        now_ms: Callable[[], int],
        full_buckets: Callable[[], Collection[int]],
    ) -> None:
        self._settings = settings
        self._now_ms = now_ms
        self._full_buckets = full_buckets

    def find(
        self, store: Store, find_subject: FindSubject, subject: bytes, partition: int
    ) -> Destination:
        try:
            config = find_subject(subject.decode())
        except UnicodeDecodeError:
            raise InvalidArgument("a subject must be UTF-8") from None
        if partition != 0:
            raise InvalidArgument(f"a delayed message has no partition yet: {partition} was named")
        queue, awaits_flush = store.open_queue(config.name, 0), config.flush is SubjectFlush.SYNC
        return Destination(
            queue,
            config.body_bytes_max,
            check_due_times=self._check_of(config),
            awaits_flush=awaits_flush,
        )

    def _check_of(self, config: SubjectConfig) -> CheckDueTimes:
        is_ordered = config.order is not Order.NONE

        def check(region: bytes, header: RegionHeader, layout: Layout) -> None:
            if layout.due < 0:
                raise InvalidArgument(
                    "a delay group takes only delayed messages: send this one to the "
                    "subject's broker group"
                )
            now_ms = self._now_ms()
            due_times_ms = np.frombuffer(region, "<i8", header.count, layout.due)
            earliest_ms, latest_ms = int(due_times_ms.min()), int(due_times_ms.max())
            for due_ms in (earliest_ms, latest_ms):
                check_due(due_ms, now_ms, self._settings.delay_ms_max)
            if header.compression:
                raise InvalidArgument(
                    "a delayed batch is cut by due time, so its bodies must not be "
                    "compressed: compress each, if need be"
                )
            self._require_room(due_times_ms)
            if bool(header.flags & _ORDERED) != is_ordered:
                raise OrderMismatch(
                    f"subject {config.name!r} is {'' if is_ordered else 'not '}ordered, and "
                    "the batch says otherwise"
                )
            if is_ordered and layout.key < 0:
                raise OrderMismatch(f"messages to the ordered subject {config.name!r} need keys")
            if header.flags & _RECURRING:
                if header.flags & _HALF:
                    raise InvalidArgument(
                        "a recurring message cannot wait for a decision: send it when it is decided"
                    )
                check_recurring(region, header)
            if header.flags & _HALF and earliest_ms <= now_ms:
                raise InvalidArgument(
                    "the half message would be rolled back at once: its limit has passed by "
                    "the delay group's time (check the clock)"
                )

        return check

    def _require_room(self, due_times_ms: npt.NDArray[np.int64]) -> None:
        full_buckets, bucket_ms = self._full_buckets(), self._settings.bucket_ms
        if not full_buckets:
            return
        wanted = set((due_times_ms // bucket_ms).tolist())
        full = wanted.intersection(full_buckets)
        if full:
            raise Overloaded(
                f"the hour that begins at {min(full) * bucket_ms} ms is full: "
                "send to another delay group, or create one with shorter buckets"
            )


def check_recurring(region: bytes, header: RegionHeader) -> None:
    """Raises InvalidArgument."""
    headers = BatchView(Envelope(0, 0, 0, -1, 0, 0, 0, 0), region).headers()
    if (
        header.count != 1
        or headers is None
        or CRON not in headers[0]
        or ZONE not in headers[0]
        or SCHEDULE_ID in headers[0]
    ):
        raise InvalidArgument(
            f"a recurring message must be alone in its batch, with the headers {CRON} and {ZONE}"
        )
    try:
        check_recurrence(headers[0][CRON].decode(), headers[0][ZONE].decode())
    except UnicodeDecodeError:
        raise InvalidArgument(f"{CRON} and {ZONE} must be UTF-8") from None


BatchKey = tuple[str, int, int]
"""(subject, producer id, batch number)."""


class _Limit(NamedTuple):
    whose: str
    subjects: Collection[str]
    messages: int
    quota: str


class DelayedQuota:
    """Checks the batches of one write."""

    def __init__(self, pending: PendingCounts, access: OpenAccess, group: str) -> None:
        self._pending, self._access, self._group = pending, access, group
        self._admitted: set[BatchKey] = set()
        self._taken: Counter[str] = Counter()

    def admit(self, batches: list[Intake]) -> None:
        """Admit all batches of a request, or none. Raises QuotaExceeded."""
        admitted = set[BatchKey]()
        taken: Counter[str] = Counter()
        for batch in batches:
            subject, header = batch.queue.id.subject, batch.header
            limits, key = (
                self._limits(subject),
                (subject, header.producer_id, header.batch_sequence),
            )
            if not limits or key in admitted or self._is_here(key, batch):
                continue
            for limit in limits:
                waiting = sum(
                    [
                        self._pending.of(each) + self._taken[each] + taken[each]
                        for each in limit.subjects
                    ]
                )
                if waiting + header.count > limit.messages:
                    raise QuotaExceeded(
                        f"{limit.whose} {waiting} delayed messages that wait in delay group "
                        f"{self._group!r}, and {header.count} more are over the {limit.messages} "
                        f"that quota {limit.quota!r} allows: wait until some are due, "
                        "cancel some (`qmq delay list`, `qmq delay cancel`), or raise the quota"
                    )
            admitted.add(key)
            taken[subject] += header.count
        self._admitted |= admitted
        self._taken += taken

    def _limits(self, subject: str) -> list[_Limit]:
        found, quota, created = (
            list[_Limit](),
            self._access.subject_quota(subject),
            self._access.created_with(subject),
        )
        if quota is not None and quota.delayed_messages:
            found.append(
                _Limit(f"subject {subject!r} has", (subject,), quota.delayed_messages, quota.id)
            )
        if created is not None and created.quota.delayed_messages:
            whose = f"the subjects that {created.principal} created have"
            found.append(
                _Limit(whose, created.subjects, created.quota.delayed_messages, created.quota.id)
            )
        return found

    def _is_here(self, key: BatchKey, batch: Intake) -> bool:
        return key in self._admitted or batch.queue.find_duplicate(batch.header) is not None


class DelayWork:
    """`links` makes the connections to the real-time brokers, for one term as master; `fatal` stops
    the process.
    """

    def __init__(
        self,
        group: str,
        settings: DelaySettings,
        config: DelayConfig,
        clock: Clock,
        links: Callable[[], ConnectionPool],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self.engine: Engine | None = None
        """While this replica is master."""
        self.admin = EngineAdmin(self.require_engine, group, settings.delay_ms_max)
        self.timekeeper: SteadyClock | None = clock if isinstance(clock, SteadyClock) else None
        self._group, self._settings, self._config = group, settings, config
        self._clock = clock
        self._make_links = links
        self._fatal = fatal
        self._links: ConnectionPool | None = None
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
        return KindParts(destinations.find, admission, self.begin, self.end, has_consumers=False)

    def _full_buckets(self) -> set[int]:
        return self.engine.full_buckets if self.engine is not None else set()

    def begin(self, store: Store, broker: ServingBroker) -> None:
        """Due messages are sent from now on."""
        self._broker = broker
        self._links = self._make_links()
        self.engine = Engine(
            schedule_of(store),
            broker,
            self._clock,
            self._config,
            self._dispatcher,
            self._fatal,
            self.timekeeper,
        )
        self.engine.start()

    def _dispatcher(self, plan_log: StorePlanLog) -> DueDispatcher:
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


async def _end(engine: Engine, links: ConnectionPool) -> None:
    await engine.stop()
    await links.close()
