"""Has batches planned in the log before they leave: what all subjects share, with the numbers of batches, and the counts.

Rules:
* A parcel is planned with the ledger before it is sent, each by a task of its own: tasks begin in the order in which they are made, and
  the ledger writes in that order.
* When the planner is closed nothing more is written, whatever comes in. A ledger that refuses a plan closes it: this master is one no
  longer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from qmq.client.links import Links
from qmq.delay.interfaces import Draft, DueMessage, PlanLog, SchedulePlace
from qmq.delay.outlets.channel import Channel
from qmq.delay.outlets.due_batcher import Limits
from qmq.delay.outlets.parcel import Parcel
from qmq.errors import QmqError
from qmq.wire.frame_payloads import Produced

if TYPE_CHECKING:
    from qmq.delay.outlets.subject_dispatcher import SubjectDispatcher

log = logging.getLogger("qmq.delay")

LOOKUPS_MAX: Final = 16
"""Subjects that are located at once."""


class BatchPlanner:
    """`on_refused` is called once, if the ledger refuses a plan."""

    def __init__(self, links: Links, ledger: PlanLog, limits: Limits, new_id: Callable[[], int], on_refused: Callable[[], None]) -> None:
        self.links = links
        self.limits = limits
        self.new_id = new_id
        self.waiting: dict[SchedulePlace, SubjectDispatcher] = {}
        """Whose each message is that is not planned."""
        self.planned = 0
        """Messages planned and not decided."""
        self.resent = 0
        """Messages that were sent again although they may be stored: their partition was fenced, or their producer forgotten."""
        self.doubtful: set[SchedulePlace] = set()
        """Messages waiting to be sent again although they may be stored: nobody can truly say any more that they are not delivered."""
        self.lookups = asyncio.Semaphore(LOOKUPS_MAX)
        self.is_closed = False
        self._ledger = ledger
        self._on_refused = on_refused
        self._producer_id = 0
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    def next_number(self) -> tuple[int, int]:
        """(producer id, number) of the next batch to an unordered subject: one producer for all of them."""
        if not self._producer_id:
            self._producer_id = self.new_id()
        return self._producer_id, next(self._numbers)

    # --- the ledger ----------------------------------------------------------------------------------------------------

    def plan(self, channel: Channel, draft: Draft, size: int, then: Callable[[], None]) -> None:
        """Admit a parcel, and have it planned; `then` is called when it may leave."""
        parcel = Parcel(draft, size=size)
        channel.admit(parcel)
        self.planned += len(draft.messages)
        waiting = self.waiting
        for message in draft.messages:
            del waiting[message.place]
        task = asyncio.create_task(self._plan(channel, parcel, then))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A plan that failed in a way that nobody foresaw is reported at once, not when its task is forgotten."""
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            text = "due messages were not planned"
            asyncio.get_running_loop().call_exception_handler({"message": text, "exception": failure, "task": task})

    async def _plan(self, channel: Channel, parcel: Parcel, then: Callable[[], None]) -> None:
        if self.is_closed:
            return
        try:
            plan = await self._ledger.plan(parcel.draft)
        except QmqError as failure:
            log.info("no more messages leave from here: %s", failure)
            self._on_refused()
            return
        if not self.is_closed:
            channel.planned(parcel, plan)
            then()

    def resume(self, parcels: Sequence[Parcel]) -> None:
        self.planned += sum([len(parcel.draft.messages) for parcel in parcels])

    def done(self, parcel: Parcel, produced: Produced) -> None:
        if not self.is_closed and parcel.plan is not None:
            self.planned -= len(parcel.draft.messages)
            if self.doubtful:
                self.doubtful.difference_update([message.place for message in parcel.draft.messages])
            self._ledger.done(parcel.plan, produced.append_time_ms)

    def void(self, parcels: Sequence[Parcel], owner: SubjectDispatcher) -> None:
        """They will not be sent again as they are: their messages wait again. Written from the last to the first (see `Channel`)."""
        for parcel in [] if self.is_closed else reversed(parcels):
            assert parcel.plan is not None
            messages: Sequence[DueMessage] = parcel.draft.messages
            self.planned -= len(messages)
            self.waiting.update(dict.fromkeys([message.place for message in messages], owner))
            if parcel.is_lost:
                self.resent += len(messages)
                self.doubtful.update([message.place for message in messages])
            self._ledger.void(parcel.plan)

    # --- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """No further call of the ledger."""
        self.is_closed = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def wait_closed(self) -> None:
        """Until what was begun has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
