"""The metrics of a delay server's schedule, wheel, deliveries and clock. Every replica has the schedule, only a master the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.broker.broker import Broker
from qmq.delay.broker import DelayWork, schedule_of
from qmq.metrics.figures import COUNTER, GAUGE, HISTOGRAM, Figure, Reading, one

_OF: Final = ("broker_group",)

PENDING: Final = Figure("qmq_delay_pending_messages", GAUGE, _OF, "Delayed messages that are neither delivered, cancelled nor moved.")
BUCKETS: Final = Figure("qmq_delay_buckets", GAUGE, _OF, "Buckets of the schedule that are kept.")
SCHEDULE_BYTES: Final = Figure("qmq_delay_schedule_bytes", GAUGE, _OF, "Bytes of the buckets' files.")
WHEEL: Final = Figure("qmq_delay_wheel_messages", GAUGE, _OF, "Messages in the wheel: due before the horizon, in memory.")
WHEEL_BYTES: Final = Figure("qmq_delay_wheel_bytes", GAUGE, _OF, "Memory that the wheel uses.")
HORIZON: Final = Figure(
    "qmq_delay_horizon_timestamp_seconds", GAUGE, _OF, "The horizon: messages due before it are in the wheel; seconds since 1970."
)
WAITING: Final = Figure("qmq_delay_waiting_messages", GAUGE, _OF, "Due messages that are not planned yet, including late ones.")
PLANNED: Final = Figure("qmq_delay_planned_messages", GAUGE, _OF, "Messages in plans: on their way to the real-time brokers.")
TROUBLED: Final = Figure("qmq_delay_troubled_messages", GAUGE, (*_OF, "subject"), "Due messages of a subject that cannot be delivered now.")
UNREADABLE: Final = Figure("qmq_delay_unreadable_messages", GAUGE, _OF, "Due messages that cannot be read: the schedule is damaged there.")
SET_ASIDE: Final = Figure(
    "qmq_delay_set_aside_messages", GAUGE, _OF, "Due messages that cannot be delivered and are set aside: the log names them."
)
DISPATCHED: Final = Figure("qmq_delay_dispatched_messages_total", COUNTER, _OF, "Messages delivered to real-time brokers.")
CANCELLED: Final = Figure("qmq_delay_cancelled_messages_total", COUNTER, _OF, "Messages that were cancelled.")
MOVED: Final = Figure("qmq_delay_moved_messages_total", COUNTER, _OF, "Messages that were moved to another due time.")
LATENESS: Final = Figure(
    "qmq_delay_lateness_seconds", HISTOGRAM, _OF, "Time from a message's due time until it was stored at a real-time broker."
)
CLOCK_STEP: Final = Figure(
    "qmq_delay_clock_step_seconds", GAUGE, _OF, "Difference between the machine's clock and the kept time; 0 while the clock is trusted."
)


class DelaySource:
    figures: Final = (
        PENDING,
        BUCKETS,
        SCHEDULE_BYTES,
        WHEEL,
        WHEEL_BYTES,
        HORIZON,
        WAITING,
        PLANNED,
        TROUBLED,
        UNREADABLE,
        SET_ASIDE,
        DISPATCHED,
        CANCELLED,
        MOVED,
        LATENESS,
        CLOCK_STEP,
    )

    def __init__(self, broker: Broker, work: DelayWork, group: str) -> None:
        self._broker = broker
        self._work = work
        self._group = group

    def read(self) -> Iterator[Reading | None]:
        work, group = self._work, self._group
        buckets = schedule_of(self._broker.store).buckets()
        yield one(PENDING, sum([each.pending for each in buckets]), group)
        yield one(BUCKETS, len(buckets), group)
        yield one(SCHEDULE_BYTES, sum([each.stored_bytes for each in buckets]), group)
        yield None
        yield from self._of_engine()
        yield one(CANCELLED, work.admin.cancelled, group)
        yield one(MOVED, work.admin.moved, group)
        yield one(CLOCK_STEP, work.timekeeper.step_ms / 1000 if work.timekeeper is not None else 0, group)

    def _of_engine(self) -> Iterator[Reading | None]:
        engine, group = self._work.engine, self._group
        if engine is None:
            return
        lateness = engine.plan_log.lateness
        yield one(WHEEL, len(engine.wheel), group)
        yield one(WHEEL_BYTES, engine.wheel.nbytes, group)
        if engine.loader.horizon_ms > 0:  # the engine has begun
            yield one(HORIZON, engine.loader.horizon_ms / 1000, group)
        yield one(WAITING, engine.waiting, group)
        yield one(PLANNED, engine.dispatcher.planned, group)
        yield Reading(TROUBLED, [((group, subject), count) for subject, count, _ in engine.dispatcher.troubles()])
        yield one(UNREADABLE, len(engine.damaged), group)
        yield one(SET_ASIDE, engine.dispatcher.set_aside, group)
        yield one(DISPATCHED, lateness.delivered, group)
        yield one(LATENESS, lateness.histogram(), group)
