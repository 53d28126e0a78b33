"""The dispatcher of one subject: finds out how the subject is ordered, and keeps messages that cannot be sent.

    put ─▶ unlocated ─located─▶ BalancedDispatcher or PartitionedDispatcher ─▶ broker groups
             ▲                 │
             │                 ├ a message that is at fault (too large, no valid message) ─▶ aside, tried again after rising pauses
             └ another order ──┴ refused for good (OrderMismatch ...) ─▶ nothing new is planned until a rising pause is over

Rules:
* What only somebody can mend (the subject is gone, its messages are refused) is tried again after pauses that rise to 30 s.
* A batch that is refused for what is in it is halved until the messages that are at fault are alone; only those wait, named in the log.
* After the pause the subject is located anew. If it has another order now, it gets the other dispatcher, once nothing is on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from qmq.client.route_book import Ordering
from qmq.delay.dispatcher.balanced_dispatcher import BalancedDispatcher
from qmq.delay.dispatcher.batch_planner import BatchPlanner
from qmq.delay.dispatcher.due_window import DueBatch, DueWindow
from qmq.delay.dispatcher.partitioned_dispatcher import PartitionedDispatcher
from qmq.delay.interfaces import DueMessage, SchedulePlace
from qmq.delivery.retries import pause_s
from qmq.errors import ClientClosed, InvalidArgument, MessageTooLarge, QmqError, Unavailable

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


class _Aside(NamedTuple):
    message: DueMessage
    why: QmqError
    timer: asyncio.TimerHandle


class SubjectDispatcher:
    def __init__(self, subject: str, planner: BatchPlanner) -> None:
        self.subject = subject
        self.planner = planner
        self.suspects: dict[SchedulePlace, int] = {}
        """Messages of batches that were refused because of their content, and how many may share a batch with each."""
        self._loop = asyncio.get_running_loop()
        self._unlocated: deque[DueMessage] = deque()
        self._resumed: list[DueBatch] = []
        self._located: LocatedDispatcher | None = None
        self._aside: dict[SchedulePlace, _Aside] = {}
        self._tries: dict[SchedulePlace, int] = {}
        self._refusal: QmqError | None = None
        self._refusals = 0
        self._finding: asyncio.Task[None] | None = None
        self._is_closed = False

    # --- in ------------------------------------------------------------------------------------------------------------

    def put(self, messages: Sequence[DueMessage]) -> None:
        """Add due messages, in order."""
        self.planner.waiting.update(dict.fromkeys([message.place for message in messages], self.withdraw))
        if self._located is None:
            self._unlocated.extend(messages)
            self._find(0.0)
        else:
            self._located.put(messages)

    def resume(self, batch: DueBatch) -> None:
        """Take over the plans of an earlier master. Call it before the first `put`."""
        self._resumed.append(batch)
        self.planner.resume([batch])
        self._find(0.0)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that waits; False if it does not wait here."""
        aside = self._aside.pop(place, None)
        if aside is not None:
            aside.timer.cancel()
        elif self._located is None or not self._located.withdraw(place):
            kept = [message for message in self._unlocated if message.place != place]
            if len(kept) == len(self._unlocated):
                return False
            self._unlocated = deque(kept)
        self._forget([place])
        del self.planner.waiting[place]
        return True

    # --- which way ---------------------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether planning is paused."""
        return self._refusal is not None

    def _find(self, wait_s: float, *, anew: bool = False) -> None:
        if self._finding is None and not self._is_closed:
            self._finding = self._loop.create_task(self._locate(wait_s, anew))

    async def _locate(self, wait_s: float, anew: bool) -> None:
        planner, failures = self.planner, 0
        while True:
            if wait_s:
                await asyncio.sleep(wait_s)
            try:
                async with planner.lookups:
                    ordering = await planner.links.locator.ordering(self.subject, anew=anew)
                break
            except ClientClosed:
                return
            except QmqError as failure:
                self._refusal = failure
                failures += 1
                wait_s, anew = 0.0 if isinstance(failure, Unavailable) else pause_s(failures, failure), True
            except Exception as cause:
                log.exception("locating subject %r failed: trying again", self.subject)
                self._refusal = QmqError(f"subject {self.subject!r} cannot be located: {type(cause).__name__}: {cause}")
                failures += 1
                wait_s, anew = pause_s(failures, self._refusal), True
        self._finding = None
        self._refusal = None
        self._go(ordering)

    def _go(self, ordering: Ordering | None) -> None:
        located = self._located
        if located is not None and located.is_ordered != (ordering is not None):
            if not located.is_idle:
                self.hold(QmqError(f"subject {self.subject!r} has another order now, and something is still under way"))
                return
            self._unlocated.extend(located.take_waiting())
            located.close()
            located = None
        if located is None:
            resumed, self._resumed = self._resumed, []
            located = BalancedDispatcher(self, resumed) if ordering is None else PartitionedDispatcher(self, ordering, resumed)
            self._located = located
            unlocated, self._unlocated = self._unlocated, deque()
            if unlocated:
                located.put(unlocated)
        located.pump()

    def hold(self, failure: QmqError) -> None:
        """Plan nothing for a while, then locate the subject anew."""
        if self._refusal is None:
            self._refusal = failure
            self._refusals += 1
            self._find(pause_s(self._refusals, failure), anew=True)

    # --- what became of batches ----------------------------------------------------------------------------------------

    def collect(self, window: DueWindow) -> list[DueMessage]:
        """Record what was decided. Returns the messages to be planned again, in order."""
        for batch, produced in window.take_done():
            self.planner.done(batch, produced)
            self._refusals = 0
            self._forget([message.place for message in batch.draft.messages])
        void = window.take_void()
        if not void:
            return []
        self.planner.void(void, self.withdraw)
        return [message for batch in void for message in self._again(batch)]

    def _forget(self, places: Sequence[SchedulePlace]) -> None:
        if self.suspects or self._tries:
            for place in places:
                self.suspects.pop(place, None)
                self._tries.pop(place, None)

    def _again(self, batch: DueBatch) -> Sequence[DueMessage]:
        messages, fault = batch.draft.messages, batch.fault
        if isinstance(fault, MessageTooLarge | InvalidArgument):
            if len(messages) == 1:
                self.set_aside(messages[0], fault)
                return []
            self.suspects.update(dict.fromkeys([message.place for message in messages], len(messages) // 2))
        elif fault is not None:
            self.hold(fault)
        return messages

    def set_aside(self, message: DueMessage, why: QmqError) -> None:
        """The message cannot be delivered now; it is retried later, alone."""
        place = message.place
        self.suspects[place] = 1
        tries = self._tries[place] = self._tries.get(place, 0) + 1
        if tries == 1:
            log.error(
                "message %s to %r cannot be delivered and is set aside; it will be tried again from time to time: %s",
                message.message_id.hex(),
                self.subject,
                why,
            )
        self._aside[place] = _Aside(message, why, self._loop.call_later(pause_s(tries, why), self._try_again, place))

    def _try_again(self, place: SchedulePlace) -> None:
        message = self._aside.pop(place).message
        if self._located is None:
            self._unlocated.appendleft(message)
        else:
            self._located.put_back([message])
            self._located.pump()

    # --- for people ----------------------------------------------------------------------------------------------------

    @property
    def set_aside_messages(self) -> int:
        """Messages that no partition accepts as they are."""
        return len(self._aside)

    @property
    def is_idle(self) -> bool:
        """Whether no message waits and no batch is in flight."""
        located = self._located
        is_waiting = self._unlocated or self._resumed or self._aside
        return not is_waiting and (located is None or (located.is_idle and not located.waiting))

    def trouble(self) -> tuple[int, str]:
        """The messages that cannot be delivered now, and why; (0, "") if there are none."""
        if self._located is None:
            count, why = len(self._unlocated) + sum([len(each.draft.messages) for each in self._resumed]), ""
        else:
            count, why = self._located.trouble()
        if self._refusal is not None:
            why = str(self._refusal)
        if self._aside:
            count += len(self._aside)
            why = why or str(next(iter(self._aside.values())).why)
        return (count, why) if why and count else (0, "")

    def close(self) -> None:
        """Stop sending at once."""
        self._is_closed = True
        if self._finding is not None:
            self._finding.cancel()
        for aside in self._aside.values():
            aside.timer.cancel()
        if self._located is not None:
            self._located.close()
