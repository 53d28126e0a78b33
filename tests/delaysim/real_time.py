"""A simple model of `qmq.delay.dispatcher` and the real-time brokers, with connections that lose answers, refuse, or are down.

A broker answers a batch with a known producer id and number as it did the first time, and does not store it again. The model needs nothing
else of a real-time broker. A dispatcher sends a subject's batches one by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from ordersim.loop import ProcessLoop
from sim.world import World

from qmq.delay.interfaces import Draft, DueMessage, SchedulePlace
from qmq.delay.plan_log import StorePlanLog
from qmq.errors import NotMaster
from qmq.log.actions import PlanAction
from qmq.model import SCHEDULE_ID

BATCH = 5


class RealTime:
    """The messages stored at the real-time brokers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_away = False
        self.gone: set[str] = set()
        """Subjects that nobody has."""
        self.batches: dict[tuple[int, int], tuple[int, tuple[bytes, ...]]] = {}
        self.closed: set[tuple[int, int]] = set()
        """Batches that will never be stored: their partition was sealed before they came."""
        self.stored: list[tuple[str, DueMessage, int]] = []
        """(subject, message, when), in order."""

    def close(self, plan: PlanAction) -> bool:
        """Seal the partition that it goes to; False if it is stored there already."""
        name = (plan.producer_id, plan.batch_sequence)
        if name not in self.batches:
            self.closed.add(name)
        return name not in self.batches

    def store(self, subject: str, producer_id: int, number: int, messages: Sequence[DueMessage]) -> int | None:
        """When it was stored, now or before; None if it never will be."""
        if (producer_id, number) in self.closed:
            return None
        ids = tuple(message.message_id for message in messages)
        known = self.batches.get((producer_id, number))
        if known is None:
            known = self.batches[producer_id, number] = (self.world.now, ids)
            self.stored += [(subject, message, self.world.now) for message in messages]
        assert known[1] == ids, "a number was used for other messages"
        return known[0]


class SimDispatcher:
    """In the place of `qmq.delay.dispatcher.dispatcher.DueDispatcher`."""

    def __init__(self, world: World, loop: ProcessLoop, plan_log: StorePlanLog, real_time: RealTime, name: str) -> None:
        self.planned = 0
        self._world = world
        self._loop = loop
        self._plan_log = plan_log
        self._real_time = real_time
        self._waiting: dict[str, deque[DueMessage]] = {}
        self._resumed: dict[str, deque[tuple[PlanAction, Sequence[DueMessage]]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._producer_id = int(name.split()[1]) << 20
        self._next = 0

    @property
    def waiting(self) -> int:
        """Messages that are not planned yet."""
        return sum(map(len, self._waiting.values()))

    def put(self, messages: Sequence[DueMessage]) -> None:
        """See DueDispatcher."""
        for message in messages:
            self._waiting.setdefault(message.subject, deque()).append(message)
            self._begin(message.subject)

    def resume(self, plan: PlanAction, messages: Sequence[DueMessage]) -> None:
        """See DueDispatcher."""
        self._resumed.setdefault(plan.subject, deque()).append((plan, messages))
        self._begin(plan.subject)

    def withdraw(self, place: SchedulePlace) -> bool:
        """See DueDispatcher."""
        for queue in self._waiting.values():
            for message in queue:
                if message.place == place:
                    queue.remove(message)
                    return True
        return False

    @property
    def set_aside(self) -> int:
        """See DueDispatcher."""
        return 0

    def stuck(self, subject: str) -> int:
        """See DueDispatcher."""
        is_stuck = self._real_time.is_away or subject in self._real_time.gone
        return len(self._waiting.get(subject, ())) if is_stuck else 0

    def troubles(self) -> list[tuple[str, int, str]]:
        """See DueDispatcher."""
        return [(subject, self.stuck(subject), "away") for subject in self._waiting if self.stuck(subject)]

    def halt(self) -> None:
        """See DueDispatcher."""
        for task in self._tasks.values():
            task.cancel()

    async def stop(self) -> None:
        """See DueDispatcher."""
        self.halt()

    def _begin(self, subject: str) -> None:
        task = self._tasks.get(subject)
        if task is None or task.done():
            self._tasks[subject] = self._loop.create_task(self._work(subject))

    async def _work(self, subject: str) -> None:
        try:
            resumed, again = self._resumed.get(subject, deque()), list[DueMessage]()
            while resumed:
                plan, messages = resumed.popleft()
                if self._world.random.random() < 0.2:
                    self._real_time.close(plan)
                # A temporary refusal is not enough: the previous master may still send the same plan.
                if not await self._send(plan, messages, may_refuse=False):
                    again += messages
            queue = self._waiting.setdefault(subject, deque())
            queue.extendleft(reversed(again))
            while queue:
                messages = [queue.popleft() for _ in range(min(len(queue), self._world.random.randrange(1, BATCH + 1)))]
                self._next += 1
                plan = await self._plan_log.plan(Draft(subject, 0, "g", self._producer_id, self._next, messages))
                if not await self._send(plan, messages, may_refuse=True):
                    queue.extendleft(reversed(messages))
        except NotMaster:
            return

    async def _send(self, plan: PlanAction, messages: Sequence[Any], *, may_refuse: bool) -> bool:
        self.planned += len(messages)
        random = self._world.random
        while True:
            await asyncio.sleep(random.random() * 0.05)
            if self._real_time.is_away or plan.subject in self._real_time.gone:
                await asyncio.sleep(0.3)
                continue
            if may_refuse and random.random() < 0.1:
                self.planned -= len(messages)
                self._plan_log.void(plan)
                return False
            at = self._real_time.store(plan.subject, plan.producer_id, plan.batch_sequence, messages)
            if at is None:
                self.planned -= len(messages)
                self._plan_log.void(plan)
                return False
            may_refuse = False
            if random.random() < 0.8:
                self.planned -= len(messages)
                self._plan_log.done(plan, at)
                return True


def first_id(message: DueMessage) -> str:
    """The id of the recurring message of a run."""
    return message.headers[SCHEDULE_ID].decode()
