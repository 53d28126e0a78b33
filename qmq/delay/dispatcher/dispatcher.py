"""Takes due messages of all subjects, mixed, and has every batch planned in the log before it leaves.

    dispatcher = DueDispatcher(links, plan_log, new_producer_id=ProducerIds())
    dispatcher.resume(plan, messages)      every open plan of earlier masters, in the order of their numbers, before the first put
    dispatcher.put(messages)
    ...
    await dispatcher.stop()

    waiting ──plan──▶ planned ──done──▶ out
       ▲ │               │
       │ └─withdraw─▶ out│
       └──────void───────┘ doubtful if it may be stored: then it cannot be withdrawn

Rules:
* Each subject has one dispatcher (subject.py), and none waits for another.
* A separate task plans each batch: tasks begin in the order in which they are made. The plan log must write plans, dones and voids in the
  order of the calls (several may share an entry). While a plan is open in the log, no plan that depends on it is therefore written.
* If the plan log refuses a plan, this replica is no longer master. A halted dispatcher sends nothing, and writes nothing more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final

from qmq import limits
from qmq.client.connection.pool import ConnectionPool
from qmq.delay.dispatcher.due_batcher import Limits, size_of
from qmq.delay.dispatcher.due_window import DueBatch
from qmq.delay.dispatcher.subject import DueDestination, SubjectDispatcher
from qmq.delay.interfaces import Draft, DueMessage, PlanLog, SchedulePlace
from qmq.errors import QmqError
from qmq.log.actions import PlanAction
from qmq.wire.frame_payloads import Produced

log = logging.getLogger("qmq.delay")

BATCH_MESSAGES: Final = 1_000
BATCH_BYTES: Final = 256 * limits.KIB
SUBJECTS_MAX: Final = 4_096
"""Beyond this number, subjects are kept only while they have messages."""
LOOKUPS_MAX: Final = 16
"""Subjects that are located at the same time."""


class DueDispatcher:
    """Sends due messages of all subjects during one term of a master. The locator of `links` must not create subjects, so that a deleted
    subject stays deleted.
    """

    def __init__(
        self,
        links: ConnectionPool,
        plan_log: PlanLog,
        *,
        batch_messages: int = BATCH_MESSAGES,
        batch_bytes: int = BATCH_BYTES,
        new_producer_id: Callable[[], int],
    ) -> None:
        self.links = links
        self.limits = Limits(batch_messages, batch_bytes)
        self.new_producer_id = new_producer_id
        self.lookups = asyncio.Semaphore(LOOKUPS_MAX)
        self.planned = 0
        """Messages that are planned (or about to be) and undecided."""
        self.resent = 0
        """Messages sent again although they may be stored: their partition was fenced before it answered, or forgot their producer."""
        self._plan_log = plan_log
        self._subjects: dict[str, SubjectDispatcher] = {}
        self._kept = SUBJECTS_MAX
        self._waiting: dict[SchedulePlace, SubjectDispatcher] = {}
        self._doubtful: set[SchedulePlace] = set()
        self._producer_id = 0
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_halted = False

    # --- in ------------------------------------------------------------------------------------------------------------

    def resume(self, plan: PlanAction, messages: Sequence[DueMessage]) -> None:
        """An open plan of an earlier master, and its messages in order: sent again under its own number, before newer messages of its keys.
        Plans come in the order of their numbers, all of them before the first `put`.
        """
        if self._is_halted:
            return
        draft = Draft(plan.subject, plan.partition, plan.broker_group, plan.producer_id, plan.batch_sequence, messages)
        size = sum([size_of(message) for message in messages])
        self.planned += len(messages)
        self._subject(plan.subject).resume(DueBatch(draft, plan, size=size, is_uncertain=True))

    def put(self, messages: Sequence[DueMessage]) -> None:
        """Due messages in order, all subjects mixed. They wait here until they are planned."""
        if self._is_halted:
            return
        by_subject: dict[str, list[DueMessage]] = {}
        for message in messages:
            found = by_subject.get(message.subject)
            if found is None:
                found = by_subject[message.subject] = []
            found.append(message)
        for subject, its in by_subject.items():
            dispatcher = self._subject(subject)
            self._wait(dispatcher, its)
            dispatcher.put(its)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that is cancelled or moved; False if it is planned, may be delivered, or is not here."""
        dispatcher = self._waiting.get(place)
        if dispatcher is None or place in self._doubtful or not dispatcher.withdraw(place):
            return False
        del self._waiting[place]
        return True

    def _wait(self, dispatcher: SubjectDispatcher, messages: Sequence[DueMessage]) -> None:
        self._waiting.update(dict.fromkeys([message.place for message in messages], dispatcher))

    def _subject(self, subject: str) -> SubjectDispatcher:
        dispatcher = self._subjects.get(subject)
        if dispatcher is None:
            if len(self._subjects) >= self._kept:
                self._close_idle()
            dispatcher = self._subjects[subject] = SubjectDispatcher(subject, self)
        return dispatcher

    def _close_idle(self) -> None:
        for subject, dispatcher in list(self._subjects.items()):
            if dispatcher.is_idle:
                dispatcher.close()
                del self._subjects[subject]
        self._kept = max(SUBJECTS_MAX, 2 * len(self._subjects))

    # --- plans, for the dispatchers of subjects ------------------------------------------------------------------------

    def next_number(self) -> tuple[int, int]:
        """(producer id, number) of the next batch to an unordered subject: all of them share one producer."""
        if not self._producer_id:
            self._producer_id = self.new_producer_id()
        return self._producer_id, next(self._numbers)

    def plan(self, dispatcher: SubjectDispatcher, destination: DueDestination, draft: Draft, size: int) -> None:
        """Admit a batch to a destination and have it planned; the dispatcher is told when it may be sent."""
        batch = DueBatch(draft, size=size)
        destination.admit(batch)
        self.planned += len(draft.messages)
        for message in draft.messages:
            del self._waiting[message.place]
        task = asyncio.create_task(self._plan(dispatcher, destination, batch))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def _plan(self, dispatcher: SubjectDispatcher, destination: DueDestination, batch: DueBatch) -> None:
        if self._is_halted:
            return
        try:
            plan = await self._plan_log.plan(batch.draft)
        except QmqError as failure:
            log.info("this delay server stops delivering messages: %s", failure)
            self.halt()
            return
        if not self._is_halted:
            destination.planned(batch, plan)
            dispatcher.planned(destination)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report an unexpected failure of a plan immediately, not when its task is garbage-collected."""
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            text = "due messages were not planned"
            asyncio.get_running_loop().call_exception_handler({"message": text, "exception": failure, "task": task})

    def done(self, batch: DueBatch, produced: Produced) -> None:
        if not self._is_halted and batch.plan is not None:
            self.planned -= len(batch.draft.messages)
            if self._doubtful:
                self._doubtful.difference_update([message.place for message in batch.draft.messages])
            self._plan_log.done(batch.plan, produced.append_time_ms)

    def void(self, dispatcher: SubjectDispatcher, batches: Sequence[DueBatch]) -> None:
        """These batches will not be sent again: their messages wait again. Written from the last to the first (see `DueWindow`)."""
        for batch in [] if self._is_halted else reversed(batches):
            assert batch.plan is not None
            messages: Sequence[DueMessage] = batch.draft.messages
            self.planned -= len(messages)
            self._wait(dispatcher, messages)
            if batch.is_lost:
                self.resent += len(messages)
                self._doubtful.update([message.place for message in messages])
            self._plan_log.void(batch.plan)

    # --- how it stands -------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages put and not planned."""
        return len(self._waiting)

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
        self._is_halted = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for dispatcher in self._subjects.values():
            dispatcher.close()

    async def stop(self) -> None:
        """This replica lost the mastership, or the process ends: stop immediately."""
        self.halt()
        await asyncio.gather(*self._tasks, return_exceptions=True)
