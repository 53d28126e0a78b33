"""Bugs of delayed messages that are moved, recur, or wait for a decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from campaign.bugs.storing import replacing
from campaign.values import Bug
from qmq.delay import engine, plan_log
from qmq.delay.admin import EngineAdmin
from qmq.delay.recurrence import next_run

DELAYS = frozenset({"delays"})


async def _move_nothing(self: Any, delayed: Any, due_ms: int) -> Any:
    return replace(self._message(self._engine().schedule.find(delayed)), due_ms=due_ms)


def _run_after_next(cron: str, zone: str, after_ms: int) -> int:
    return next_run(cron, zone, next_run(cron, zone, after_ms))


BUGS = (
    Bug(
        name="move-nothing",
        what="a move is answered and not recorded",
        plant=replacing((EngineAdmin, "move", _move_nothing)),
        found_by="moved-none",
        finds=("moved_comes", "moved_in_time"),
        into=DELAYS,
    ),
    Bug(
        name="skip-runs",
        what="every second run of a recurring message is left out",
        plant=replacing((plan_log, "next_run", _run_after_next)),
        found_by="recurring-none",
        finds=("every_tick_comes",),
        into=DELAYS,
    ),
    Bug(
        name="deliver-undecided",
        what="a half message that is due is delivered without a decision",
        plant=replacing((engine, "is_half", lambda message: False)),
        found_by="half-none",
        finds=("half_waits",),
        into=DELAYS,
    ),
)
