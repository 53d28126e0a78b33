"""Takes due messages of all subjects, mixed. Each subject has a separate dispatcher, and none waits for another.

    dispatcher = DueDispatcher(links, plan_log, new_producer_id=ProducerIds())
    dispatcher.resume(plan, messages)      every open plan of earlier masters, in the order of their numbers, before the first put
    dispatcher.put(messages)
    ...
    await dispatcher.stop()

Rules:
* The plan log must write plans, dones and voids in the order of the calls (several may share an entry). While a plan is open in the log,
  no plan that depends on it is therefore written.
* A separate task plans each batch before it is sent: tasks begin in the order in which they are made, and the plan log writes in
  that order.
* A closed planner writes nothing more. If the plan log refuses a plan, this replica is no longer master, and the planner closes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final

from qmq import limits
from qmq.client.connection.pool import Links
from qmq.delay.dispatcher.due_batcher import Limits, size_of
from qmq.delay.dispatcher.due_window import DueBatch, DueWindow
from qmq.delay.dispatcher.subject import SubjectDispatcher
from qmq.delay.interfaces import Draft, DueMessage, PlanLog, SchedulePlace
from qmq.errors import QmqError
from qmq.log.actions import PlanAction
from qmq.wire.frame_payloads import Produced

log = logging.getLogger("qmq.delay")

LOOKUPS_MAX: Final = 16
"""Subjects that are located at the same time."""
Withdraw = Callable[[SchedulePlace], bool]
"""Removes a waiting message; False if it does not wait there."""


class BatchPlanner:
    """`on_refused` is called once, if the plan log refuses a plan."""

    def __init__(self, links: Links, plan_log: PlanLog, limits: Limits, new_id: Callable[[], int], on_refused: Callable[[], None]) -> None:
        self.links = links
        self.limits = limits
        self.new_id = new_id
        self.waiting: dict[SchedulePlace, Withdraw] = {}
        """Every unplanned message, and the function of its subject that removes it."""
        self.planned = 0
        """Planned and undecided messages."""
        self.resent = 0
        """Messages that were sent again although they may be stored: their partition was fenced, or the broker forgot their producer."""
        self.doubtful: set[SchedulePlace] = set()
        """Messages that wait to be sent again although they may be stored: whether the first try delivered them is unknown."""
        self.lookups = asyncio.Semaphore(LOOKUPS_MAX)
        self.is_closed = False
        self._plan_log = plan_log
        self._on_refused = on_refused
        self._producer_id = 0
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    def next_number(self) -> tuple[int, int]:
        """(producer id, number) of the next batch to an unordered subject: all of them share one producer."""
        if not self._producer_id:
            self._producer_id = self.new_id()
        return self._producer_id, next(self._numbers)

    # --- the plan log ----------------------------------------------------------------------------------------------------

    def plan(self, window: DueWindow, draft: Draft, size: int, then: Callable[[], None]) -> None:
        """Admit a batch and have it planned; `then` is called when it may be sent."""
        batch = DueBatch(draft, size=size)
        window.admit(batch)
        self.planned += len(draft.messages)
        waiting = self.waiting
        for message in draft.messages:
            del waiting[message.place]
        task = asyncio.create_task(self._plan(window, batch, then))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report an unexpected failure of a plan immediately, not when its task is garbage-collected."""
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            text = "due messages were not planned"
            asyncio.get_running_loop().call_exception_handler({"message": text, "exception": failure, "task": task})

    async def _plan(self, window: DueWindow, batch: DueBatch, then: Callable[[], None]) -> None:
        if self.is_closed:
            return
        try:
            plan = await self._plan_log.plan(batch.draft)
        except QmqError as failure:
            log.info("this delay server stops delivering messages: %s", failure)
            self._on_refused()
            return
        if not self.is_closed:
            window.planned(batch, plan)
            then()

    def resume(self, batches: Sequence[DueBatch]) -> None:
        self.planned += sum([len(batch.draft.messages) for batch in batches])

    def done(self, batch: DueBatch, produced: Produced) -> None:
        if not self.is_closed and batch.plan is not None:
            self.planned -= len(batch.draft.messages)
            if self.doubtful:
                self.doubtful.difference_update([message.place for message in batch.draft.messages])
            self._plan_log.done(batch.plan, produced.append_time_ms)

    def void(self, batches: Sequence[DueBatch], withdraw: Withdraw) -> None:
        """These batches will not be sent again: their messages wait again. Written from the last to the first (see `DueWindow`)."""
        for batch in [] if self.is_closed else reversed(batches):
            assert batch.plan is not None
            messages: Sequence[DueMessage] = batch.draft.messages
            self.planned -= len(messages)
            self.waiting.update(dict.fromkeys([message.place for message in messages], withdraw))
            if batch.is_lost:
                self.resent += len(messages)
                self.doubtful.update([message.place for message in messages])
            self._plan_log.void(batch.plan)

    # --- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write no more to the plan log."""
        self.is_closed = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def wait_closed(self) -> None:
        """Wait for the running writes."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


BATCH_MESSAGES: Final = 1_000
BATCH_BYTES: Final = 256 * limits.KIB
SUBJECTS_MAX: Final = 4_096
"""Beyond this number, subjects are kept only while they have messages."""


class DueDispatcher:
    """Sends due messages of all subjects during one term of a master. The locator of `links` must not create subjects, so that a deleted
    subject stays deleted.
    """

    def __init__(
        self,
        links: Links,
        plan_log: PlanLog,
        *,
        batch_messages: int = BATCH_MESSAGES,
        batch_bytes: int = BATCH_BYTES,
        new_producer_id: Callable[[], int],
    ) -> None:
        self._planner = BatchPlanner(links, plan_log, Limits(batch_messages, batch_bytes), new_producer_id, self.halt)
        self._subjects: dict[str, SubjectDispatcher] = {}
        self._kept = SUBJECTS_MAX

    # --- in ------------------------------------------------------------------------------------------------------------

    def resume(self, plan: PlanAction, messages: Sequence[DueMessage]) -> None:
        """An open plan of an earlier master, and its messages in order: sent again under its own number, before newer messages of its keys.
        Plans come in the order of their numbers, all of them before the first `put`.
        """
        draft = Draft(plan.subject, plan.partition, plan.broker_group, plan.producer_id, plan.batch_sequence, messages)
        size = sum([size_of(message) for message in messages])
        if not self._planner.is_closed:
            self._subject(plan.subject).resume(DueBatch(draft, plan, size=size, is_uncertain=True))

    def put(self, messages: Sequence[DueMessage]) -> None:
        """Due messages in order, all subjects mixed. They wait here until they are planned."""
        if self._planner.is_closed:
            return
        by_subject: dict[str, list[DueMessage]] = {}
        for message in messages:
            found = by_subject.get(message.subject)
            if found is None:
                found = by_subject[message.subject] = []
            found.append(message)
        for subject, its in by_subject.items():
            self._subject(subject).put(its)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that is cancelled or moved; False if it is planned, may be delivered, or is not here."""
        withdraw = self._planner.waiting.get(place)
        return withdraw is not None and place not in self._planner.doubtful and withdraw(place)

    def _subject(self, subject: str) -> SubjectDispatcher:
        dispatcher = self._subjects.get(subject)
        if dispatcher is None:
            if len(self._subjects) >= self._kept:
                self._close_idle()
            dispatcher = self._subjects[subject] = SubjectDispatcher(subject, self._planner)
        return dispatcher

    def _close_idle(self) -> None:
        for subject, dispatcher in list(self._subjects.items()):
            if dispatcher.is_idle:
                dispatcher.close()
                del self._subjects[subject]
        self._kept = max(SUBJECTS_MAX, 2 * len(self._subjects))

    # --- how it stands -------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages put and not planned."""
        return len(self._planner.waiting)

    @property
    def planned(self) -> int:
        """Messages that are planned (or about to be) and undecided."""
        return self._planner.planned

    @property
    def resent(self) -> int:
        """Messages sent again although they may be stored: their partition was fenced before it answered, or forgot their producer."""
        return self._planner.resent

    @property
    def subjects(self) -> int:
        """The subjects for which something is kept: those with messages, and some that had any lately."""
        return len(self._subjects)

    @property
    def set_aside(self) -> int:
        """Messages that cannot be delivered; the log names them."""
        return sum([len(each.aside) for each in self._subjects.values()])

    def stuck(self, subject: str) -> int:
        """Waiting messages of the subject that cannot be delivered now; 0 if all can."""
        dispatcher = self._subjects.get(subject)
        return 0 if dispatcher is None else dispatcher.trouble()[0]

    def troubles(self) -> list[tuple[str, int, str]]:
        """(subject, waiting messages, reason) of subjects with messages that cannot be delivered now."""
        found = [(subject, *each.trouble()) for subject, each in self._subjects.items()]
        return [each for each in found if each[1]]

    # --- the end -------------------------------------------------------------------------------------------------------

    def halt(self) -> None:
        """Send no more batches, and write no more to the plan log."""
        self._planner.close()
        for dispatcher in self._subjects.values():
            dispatcher.close()

    async def stop(self) -> None:
        """This replica lost the mastership, or the process ends: stop immediately."""
        self.halt()
        await self._planner.wait_closed()
