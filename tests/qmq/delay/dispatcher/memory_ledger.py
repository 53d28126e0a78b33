"""Due messages, and a plan log in a list. A forbidden request to the plan log fails an assertion."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from qmq.delay.interfaces import Draft, DueMessage, SchedulePlace
from qmq.errors import NotMaster, Outcome
from qmq.log.actions import PlanAction


def due(ordinal: int, subject: str = "s", **fields: Any) -> DueMessage:
    """A message whose body is its number."""
    found = {
        "place": SchedulePlace(7, ordinal),
        "due_ms": 1_000 + ordinal,
        "subject": subject,
        "body": b"%d" % ordinal,
        "key": b"",
        "tags": (),
        "headers": {},
        "create_time_ms": 5,
        "message_id": ordinal.to_bytes(16, "big"),
        "flags": 0,
    }
    return DueMessage(**(found | fields))


class Line:
    """First in, first out: timers with equal times fire in any order."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def at(self, after_s: float) -> float:
        self._last_s = max(self._last_s + 1e-6, asyncio.get_running_loop().time() + after_s)
        return self._last_s

    async def wait(self, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        loop.call_at(self.at(after_s), lambda: done.done() or done.set_result(None))
        await done


class MemoryLedger:
    """A log of plans, dones and voids, in the order of the calls. Entries are committed a little later."""

    def __init__(self, log: Sequence[tuple[str, PlanAction]] = (), commit_s: float = 0.003) -> None:
        self.log: list[tuple[str, PlanAction]] = []
        self.commit_s = commit_s
        self._line = Line()
        self.is_deposed = False
        self.is_closed = False
        """Whether the dispatcher were stopped: they must not call any more."""
        self.states: dict[SchedulePlace, str] = {}
        """Of each message that was ever planned: planned, done or pending."""
        self._open: dict[int, PlanAction] = {}
        self._at: dict[tuple[int, int], int] = {}
        for what, plan in log:
            self._add(what, plan)
        self.committed = len(self.log)
        self._next = 1 + max([plan.number for _, plan in self.log], default=0)

    async def plan(self, draft: Draft) -> PlanAction:
        assert not self.is_closed
        items = tuple((message.place.bucket, message.place.ordinal.to_bytes(4, "little")) for message in draft.messages)
        plan = PlanAction(self._next, draft.subject, draft.partition, draft.broker_group, draft.producer_id, draft.batch_sequence, items)
        self._next += 1
        self._add("plan", plan)
        end = len(self.log)
        await self._line.wait(self.commit_s)
        if self.is_deposed:
            raise NotMaster("deposed", outcome=Outcome.UNKNOWN)
        self.committed = max(self.committed, end)
        return plan

    def done(self, plan: PlanAction, append_time_ms: int) -> None:
        assert append_time_ms > 0
        assert not self.is_closed
        self._add("done", plan)

    def void(self, plan: PlanAction) -> None:
        assert not self.is_closed
        self._add("void", plan)

    def _add(self, what: str, plan: PlanAction) -> None:
        its = places(plan)
        if what == "plan":
            assert all(self.states.get(place, "pending") == "pending" for place in its), "planned twice"
            self._open[plan.number] = plan
            self._at[plan.producer_id, plan.batch_sequence] = len(self.log)
        else:
            assert self._open.pop(plan.number, None) == plan, f"{what}, but it is decided already, or was never planned"
        self.states.update(dict.fromkeys(its, {"plan": "planned", "done": "done", "void": "pending"}[what]))
        self.log.append((what, plan))

    def open(self) -> list[PlanAction]:
        """Plans that are neither done nor void."""
        return list(self._open.values())

    def is_committed(self, producer_id: int, number: int) -> bool:
        """Whether there is such a plan."""
        return self._at.get((producer_id, number), self.committed) < self.committed


def places(plan: PlanAction) -> list[SchedulePlace]:
    """The plan's messages."""
    return [SchedulePlace(bucket, int.from_bytes(ordinal, "little")) for bucket, ordinal in plan.items]
