"""Writes plans to the log before batches are sent. Shared by all subjects, with the batch numbers and the counters.

Rules:
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

from qmq.client.connection.pool import Links
from qmq.delay.dispatcher.due_batcher import Limits
from qmq.delay.dispatcher.due_window import DueBatch, DueWindow
from qmq.delay.interfaces import Draft, DueMessage, PlanLog, SchedulePlace
from qmq.errors import QmqError
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
