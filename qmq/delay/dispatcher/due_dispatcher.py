"""Takes due messages of all subjects, mixed. Each subject has a separate dispatcher, and none waits for another.

    dispatcher = DueDispatcher(links, plan_log, new_producer_id=ProducerIds())
    dispatcher.resume(plan, messages)      every open plan of earlier masters, in the order of their numbers, before the first put
    dispatcher.put(messages)
    ...
    await dispatcher.stop()

The plan log must write plans, dones and voids in the order of the calls (several may share an entry). While a plan is open in the log,
no plan that depends on it is therefore written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from qmq import limits
from qmq.client.links import Links
from qmq.delay.dispatcher.batch_planner import BatchPlanner
from qmq.delay.dispatcher.due_batcher import Limits, size_of
from qmq.delay.dispatcher.due_window import DueBatch
from qmq.delay.dispatcher.subject_dispatcher import SubjectDispatcher
from qmq.delay.interfaces import Draft, DueMessage, PlanLog, SchedulePlace
from qmq.log.actions import PlanAction

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
    def set_aside(self) -> int:
        """Messages that cannot be delivered; the log names them."""
        return sum([each.set_aside_messages for each in self._subjects.values()])

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
