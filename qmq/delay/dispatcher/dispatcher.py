"""Takes due messages of all subjects, mixed. Each subject has a separate dispatcher, and none waits for another.

    dispatcher = DueDispatcher(links, plan_log, new_producer_id=ProducerIds())
    dispatcher.resume(plan, messages)      every open plan of earlier masters, in the order of their numbers, before the first put
    dispatcher.put(messages)
    ...
    await dispatcher.stop()

The plan log must write plans, dones and voids in the order of the calls (several may share an entry). While a plan is open in the log,
no plan that depends on it is therefore written.

The dispatcher of one subject: finds out how the subject is ordered, and sends its messages by the dispatcher for that order.

    put ─▶ unlocated ─located─▶ BalancedDispatcher or PartitionedDispatcher ─▶ broker groups
             ▲                 │
             │                 ├ a faulty message (too large, not a valid message) ─▶ set aside, tried again after rising pauses
             └ another order ──┴ refused for good (OrderMismatch ...) ─▶ nothing new is planned until a rising pause ends

Rules:
* `SubjectOutcomes` says what is held and what is set aside.
* After the pause the subject is located again. If it has another order now, it gets the other dispatcher, once nothing is on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from qmq import limits
from qmq.client.connection.pool import Links
from qmq.client.metadata.cache import Ordering
from qmq.delay.dispatcher.balanced import BalancedDispatcher
from qmq.delay.dispatcher.batch_planner import BatchPlanner
from qmq.delay.dispatcher.due_batcher import Limits, size_of
from qmq.delay.dispatcher.due_window import DueBatch
from qmq.delay.dispatcher.outcomes import SubjectOutcomes
from qmq.delay.dispatcher.partitioned import PartitionedDispatcher
from qmq.delay.interfaces import Draft, DueMessage, PlanLog, SchedulePlace
from qmq.delivery.retries import pause_s
from qmq.errors import ClientClosed, QmqError, Unavailable
from qmq.log.actions import PlanAction

log = logging.getLogger("qmq.delay")


class LocatedDispatcher(Protocol):
    """Sends the messages of a located subject."""

    is_ordered: bool

    @property
    def waiting(self) -> int:
        """Messages that are not planned."""
        ...

    def put(self, messages: Sequence[DueMessage]) -> None: ...

    def put_back(self, messages: Sequence[DueMessage]) -> None: ...

    def pump(self) -> None:
        """Plan and send what can be planned and sent."""
        ...

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that is not planned; False if it is not here."""
        ...

    def take_waiting(self) -> list[DueMessage]:
        """Remove and return all unplanned messages, in order."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no planned batch is undecided."""
        ...

    def trouble(self) -> tuple[int, str]:
        """The messages that cannot be delivered now, and why."""
        ...

    def close(self) -> None:
        """Send no more batches."""
        ...


class SubjectDispatcher:
    def __init__(self, subject: str, planner: BatchPlanner) -> None:
        self.subject = subject
        self._planner = planner
        self._outcomes = SubjectOutcomes(subject, planner, self._find_again, self._put_back, self.withdraw)
        self._loop = asyncio.get_running_loop()
        self._unlocated: deque[DueMessage] = deque()
        self._resumed: list[DueBatch] = []
        self._located: LocatedDispatcher | None = None
        self._finding: asyncio.Task[None] | None = None
        self._is_closed = False

    # --- in ------------------------------------------------------------------------------------------------------------

    def put(self, messages: Sequence[DueMessage]) -> None:
        """Add due messages, in order."""
        self._planner.waiting.update(dict.fromkeys([message.place for message in messages], self.withdraw))
        if self._located is None:
            self._unlocated.extend(messages)
            self._find(0.0)
        else:
            self._located.put(messages)

    def resume(self, batch: DueBatch) -> None:
        """Take over the plans of an earlier master. Call it before the first `put`."""
        self._resumed.append(batch)
        self._planner.resume([batch])
        self._find(0.0)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that waits; False if it does not wait here."""
        if not self._outcomes.take_aside(place) and (self._located is None or not self._located.withdraw(place)):
            kept = [message for message in self._unlocated if message.place != place]
            if len(kept) == len(self._unlocated):
                return False
            self._unlocated = deque(kept)
        self._outcomes.forget([place])
        del self._planner.waiting[place]
        return True

    # --- which way ---------------------------------------------------------------------------------------------------------

    def _find(self, wait_s: float, *, refresh: bool = False) -> None:
        if self._finding is None and not self._is_closed:
            self._finding = self._loop.create_task(self._locate(wait_s, refresh))

    def _find_again(self, wait_s: float) -> None:
        self._find(wait_s, refresh=True)

    async def _locate(self, wait_s: float, refresh: bool) -> None:
        planner, failures = self._planner, 0
        while True:
            if wait_s:
                await asyncio.sleep(wait_s)
            try:
                async with planner.lookups:
                    ordering = await planner.links.locator.ordering(self.subject, refresh=refresh)
                break
            except ClientClosed:
                return
            except QmqError as failure:
                self._outcomes.not_located(failure)
                failures += 1
                wait_s, refresh = 0.0 if isinstance(failure, Unavailable) else pause_s(failures, failure), True
            except Exception as cause:
                log.exception("locating subject %r failed: trying again", self.subject)
                refusal = QmqError(f"subject {self.subject!r} cannot be located: {type(cause).__name__}: {cause}")
                self._outcomes.not_located(refusal)
                failures += 1
                wait_s, refresh = pause_s(failures, refusal), True
        self._finding = None
        self._outcomes.located()
        self._go(ordering)

    def _go(self, ordering: Ordering | None) -> None:
        located = self._located
        if located is not None and located.is_ordered != (ordering is not None):
            if not located.is_idle:
                self._outcomes.hold(QmqError(f"subject {self.subject!r} changed its order while batches are under way"))
                return
            self._unlocated.extend(located.take_waiting())
            located.close()
            located = None
        if located is None:
            resumed, self._resumed = self._resumed, []
            located = self._make(ordering, resumed)
            self._located = located
            unlocated, self._unlocated = self._unlocated, deque()
            if unlocated:
                located.put(unlocated)
        located.pump()

    def _make(self, ordering: Ordering | None, resumed: Sequence[DueBatch]) -> LocatedDispatcher:
        if ordering is None:
            return BalancedDispatcher(self.subject, self._planner, self._outcomes, resumed)
        return PartitionedDispatcher(self.subject, self._planner, self._outcomes, ordering, resumed)

    def _put_back(self, message: DueMessage) -> None:
        """A message that was set aside is tried again."""
        if self._located is None:
            self._unlocated.appendleft(message)
        else:
            self._located.put_back([message])
            self._located.pump()

    # --- for people ----------------------------------------------------------------------------------------------------

    @property
    def set_aside_messages(self) -> int:
        """Messages that no partition accepts as they are."""
        return self._outcomes.aside_messages

    @property
    def is_idle(self) -> bool:
        """Whether no message waits and no batch is in flight."""
        located = self._located
        is_waiting = self._unlocated or self._resumed or self._outcomes.aside_messages
        return not is_waiting and (located is None or (located.is_idle and not located.waiting))

    def trouble(self) -> tuple[int, str]:
        """The messages that cannot be delivered now, and why; (0, "") if there are none."""
        if self._located is None:
            count, why = len(self._unlocated) + sum([len(each.draft.messages) for each in self._resumed]), ""
        else:
            count, why = self._located.trouble()
        if self._outcomes.refusal is not None:
            why = str(self._outcomes.refusal)
        count += self._outcomes.aside_messages
        why = why or self._outcomes.why_aside
        return (count, why) if why and count else (0, "")

    def close(self) -> None:
        """Stop sending immediately."""
        self._is_closed = True
        if self._finding is not None:
            self._finding.cancel()
        self._outcomes.close()
        if self._located is not None:
            self._located.close()


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
