"""The plan log writes the dispatcher's plans and their results to the action log. Nothing else
writes plans.

A message is *in dispatch* from the moment it goes to the dispatcher until its plan is committed: to
cancel it, the dispatcher must give it back (`DueDispatcher.withdraw`). The entry that plans a run
of a recurring message also has the next run: the alias of the first run's id names the newest run,
so a run that is planned again (its first plan was void) has its successor already.

`Lateness` measures how late messages are: a histogram of the last minute, in milliseconds. Up to
1,023 ms every millisecond has a bin; above, each doubling has 512 bins, so that a percentile is at
most 0.2 % too high. There are six slots of ten seconds, which are reused in turn: a percentile is
about the last 50 to 60 seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.parts import ServingBroker
from qmq.delay.batches import DueMessage, SchedulePlace, planned_ms
from qmq.delay.recurrence import next_run
from qmq.errors import InvalidArgument, MessageNotFound
from qmq.log.actions import Cancel, PlanAction, PlanDone, PlanVoid, Recur
from qmq.metrics.figures import Histogram
from qmq.model import CRON, PLANNED, SCHEDULE_ID, ZONE
from qmq.wire.batch_columns import BatchFlag

if TYPE_CHECKING:
    from qmq.delay.schedule import Schedule


SLOT_MS: Final = 10_000
SLOTS: Final = 6
BOUNDS_S: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Upper ends of the bins of `Lateness.histogram`: a tick is half a second."""
_BOUNDS_MS: Final = np.array([round(1000 * each) for each in BOUNDS_S], np.int64)
_EXACT: Final = 1024
_BINS: Final = 512
_DOUBLINGS: Final = 30
"""Up to 2^40 ms: 34 years."""
_LATENESS_MAX: Final = (_EXACT << _DOUBLINGS) - 1


class Lateness:
    """`delivered` counts all messages."""

    def __init__(self) -> None:
        self.delivered = 0
        self._bins = np.zeros(len(BOUNDS_S) + 1, np.int64)
        self._sum_ms = 0
        self._counts = np.zeros((SLOTS, _EXACT + _BINS * _DOUBLINGS), np.uint32)
        self._slots = [-1] * SLOTS
        """Which ten seconds each slot is for."""

    def note(self, now_ms: int, lateness_ms: npt.NDArray[np.int64]) -> None:
        """Messages were delivered this late. Negative values count as zero."""
        slot = now_ms // SLOT_MS
        place = slot % SLOTS
        if self._slots[place] != slot:
            self._slots[place] = slot
            self._counts[place] = 0
        np.add.at(self._counts[place], _bins(lateness_ms), 1)
        self.delivered += len(lateness_ms)
        self._bins += np.bincount(
            np.searchsorted(_BOUNDS_MS, lateness_ms), minlength=len(self._bins)
        )
        self._sum_ms += int(np.maximum(lateness_ms, 0).sum())

    def histogram(self) -> Histogram:
        """The histogram of all messages, in seconds."""
        return Histogram(BOUNDS_S, self._bins.tolist(), self._sum_ms / 1000)

    def percentile(self, now_ms: int, percent: int) -> int:
        """A percentile of the last minute, in milliseconds; 0 without messages."""
        now = now_ms // SLOT_MS
        recent = [place for place, slot in enumerate(self._slots) if now - SLOTS < slot <= now]
        totals = self._counts[recent].sum(axis=0, dtype=np.int64).cumsum()
        if not totals[-1]:
            return 0
        rank = -(-int(totals[-1]) * percent // 100)
        return _highest(int(totals.searchsorted(rank)))


def _bins(lateness_ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = np.clip(lateness_ms, 0, _LATENESS_MAX)
    doublings = np.maximum(np.frexp(values.astype(np.float64))[1].astype(np.int64) - 10, 0)
    bins: npt.NDArray[np.int64] = (values >> doublings) + _BINS * doublings
    return bins


def _highest(place: int) -> int:
    """The largest value of a bin."""
    if place < _EXACT:
        return place
    doublings = place // _BINS - 1
    return ((place - _BINS * doublings + 1) << doublings) - 1


log = logging.getLogger("qmq.delay")

_RECURRING, _HALF = int(BatchFlag.RECURRING), int(BatchFlag.HALF)


class Draft(NamedTuple):
    """A batch that a dispatcher wants to send."""

    subject: str
    partition: int
    broker_group: str
    producer_id: int
    batch_sequence: int
    messages: Sequence[DueMessage]


class StorePlanLog:
    """The plan log of one term of a master."""

    def __init__(
        self,
        writer: ServingBroker,
        schedule: Schedule,
        now_ms: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self.in_dispatch: set[SchedulePlace] = set()
        """Messages that the dispatcher has, or whose plan is not committed,
        and those in `_ending`.
        """
        self.leaving: set[SchedulePlace] = set()
        """Messages that are being cancelled or moved, which the schedule does not know yet."""
        self.lateness = Lateness()
        self._writer = writer
        self._schedule = schedule
        self._now_ms = now_ms
        self._wake = wake
        self._next = schedule.next_plan
        self._due_times_ms: dict[int, Sequence[int]] = {}
        self._ending: set[SchedulePlace] = set()
        """Messages in dispatch that are due and are never delivered themselves: recurring messages
        before their first run, and half messages, until they are cancelled.
        """

    def take(self, messages: Iterable[DueMessage]) -> None:
        """Pass these messages to the dispatcher."""
        self._forget_ended()
        self.in_dispatch.update(message.place for message in messages)

    def _forget_ended(self) -> None:
        done = {place for place in self._ending if not self._waits(place)}
        self.in_dispatch -= done
        self._ending -= done

    def _waits(self, ending: SchedulePlace) -> bool:
        try:
            return self._schedule.state_of(ending) == "pending"
        except MessageNotFound:  # it is done, and its bucket was deleted
            return False

    async def plan(self, draft: Draft) -> PlanAction:
        """Write the plan. Returns when it is committed; only then may the batch be sent. Plans are
        written in the order of the calls. Raises NotMaster: whether it is planned is unknown, and
        this replica must send nothing more.
        """
        places = [message.place for message in draft.messages]
        action = PlanAction(
            self._next,
            draft.subject,
            draft.partition,
            draft.broker_group,
            draft.producer_id,
            draft.batch_sequence,
            runs_of(places),
        )
        self._next += 1
        self._writer.act(action)
        for message in draft.messages:
            if message.flags & _RECURRING:
                self._recur(message)
        self._due_times_ms[action.number] = [message.due_ms for message in draft.messages]
        self._wake()
        await self._writer.committed()
        self.in_dispatch.difference_update(places)
        return action

    def done(self, plan: PlanAction, append_time_ms: int) -> None:
        """The batch is stored at its destination; the time is by the real-time broker's clock."""
        self._writer.act(PlanDone((plan.number,)))
        due_times_ms = self._due_times_ms.pop(plan.number, None)
        if due_times_ms is not None:
            self.lateness.note(self._now_ms(), append_time_ms - np.array(due_times_ms, np.int64))
        self._wake()

    def void(self, plan: PlanAction) -> None:
        """The batch is certainly not stored, and will not be sent again under this plan: its
        messages will be planned again.
        """
        self._due_times_ms.pop(plan.number, None)
        self.in_dispatch.update(places_of(plan))
        self._writer.act(PlanVoid((plan.number,)))

    def seed(self, message: DueMessage) -> None:
        """A recurring message is due for its first run: write the run and finish the recurring
        message, both or neither.
        """
        try:
            due_ms = next_run(
                message.headers[CRON].decode(), message.headers[ZONE].decode(), message.due_ms - 1
            )
        except (InvalidArgument, KeyError, ValueError) as failure:
            log.error(
                "the next run of recurring message %s cannot be computed: %r",
                message.message_id.hex(),
                failure,
            )
        else:
            self._writer.act(Recur(*message.place, due_ms))
            self._end(message)

    def drop(self, message: DueMessage) -> None:
        """Cancel a half message that is due without a decision."""
        self._forget_ended()
        self._end(message)

    def _end(self, message: DueMessage) -> None:
        self._ending.add(message.place)
        self.in_dispatch.add(message.place)
        self._writer.act(Cancel(*message.place))

    def _recur(self, message: DueMessage) -> None:
        try:
            first = bytes.fromhex(message.headers[SCHEDULE_ID].decode())
            if self._schedule.alias(first) != message.place:
                return
            at_ms = planned_ms(message.headers.get(PLANNED, b""), message.due_ms)
            due_ms = next_run(message.headers[CRON].decode(), message.headers[ZONE].decode(), at_ms)
        except (InvalidArgument, KeyError, ValueError) as failure:
            log.error(
                "the next run of recurring message %s cannot be computed: %r",
                message.message_id.hex(),
                failure,
            )
        else:
            self._writer.act(Recur(*message.place, due_ms))


def is_seed(message: DueMessage) -> bool:
    """Whether the message is a recurring message before its first run: it has the schedule and is
    not delivered itself.
    """
    return bool(message.flags & _RECURRING) and SCHEDULE_ID not in message.headers


def is_half(message: DueMessage) -> bool:
    """Whether the message waits for a decision: without one it is never delivered."""
    return bool(message.flags & _HALF)


def runs_of(places: Sequence[SchedulePlace]) -> tuple[tuple[int, bytes], ...]:
    """The places of a plan: (bucket, ordinals), in order."""
    return tuple(
        (bucket, np.array([place.ordinal for place in run], "<u4").tobytes())
        for bucket, run in groupby(places, key=lambda each: each.bucket)
    )


def places_of(plan: PlanAction) -> list[SchedulePlace]:
    return [
        SchedulePlace(bucket, int(each))
        for bucket, ordinals in plan.items
        for each in np.frombuffer(ordinals, "<u4")
    ]
