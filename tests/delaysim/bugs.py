"""Planted bugs: each one breaks a rule of docs/DELAY.md, and the simulator must find it. `patch` undoes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from qmq.delay.admin import EngineAdmin
from qmq.delay.engine import Engine
from qmq.delay.interfaces import Places
from qmq.delay.plan_log import StorePlanLog
from qmq.delay.recurrence import next_run
from qmq.log.actions import Recur
from qmq.model import CRON, PLANNED, ZONE

_start, _next, _pending, _plan, _recur = Engine.start, Engine._next, Engine._pending, StorePlanLog.plan, StorePlanLog._recur


def _forget_plans(self: Engine) -> None:
    with patch.object(self.schedule, "plans", {}):
        _start(self)


def _ask_nobody(self: EngineAdmin, place: Any) -> bool:
    return self._engine().schedule.state_of(place) == "pending"


def _recur_again(self: StorePlanLog, message: Any) -> None:
    due_ms = next_run(message.headers[CRON].decode(), message.headers[ZONE].decode(), message.due_ms)
    self._writer.act(Recur(*message.place, due_ms))


def _recur_from_the_due_time(self: StorePlanLog, message: Any) -> None:
    """As release 0.2: the runs between a moved run's time by the schedule and its due time are skipped, or it comes again."""
    headers = {name: value for name, value in message.headers.items() if name != PLANNED}
    _recur(self, replace(message, headers=headers))


def _hold_nothing(self: Engine) -> Any:
    found = _next(self)
    return None if found is None else (found[0], True)


class _Hasty:
    def __init__(self, writer: Any) -> None:
        self.act = writer.act

    async def committed(self) -> None:
        """Says so."""


async def _send_uncommitted(self: StorePlanLog, draft: Any) -> Any:
    writer, self._writer = self._writer, _Hasty(self._writer)
    try:
        return await _plan(self, draft)
    finally:
        self._writer = writer


def _tick_ahead(self: Engine) -> Any:
    self._boundary_ms += self.config.tick_ms
    return _next(self)


def _miss_what_comes(_: Engine, __: Places) -> None:
    return


def _take_twice(self: Engine, places: Places) -> None:
    """Dispatch messages again that are already being dispatched, if the wheel returns them."""
    _pending(self, places)
    self.loader.stored(places)


def _trust_the_wheel(self: Engine, places: Places) -> Places:
    return places


@asynccontextmanager
async def _read_what_is_written(self: EngineAdmin) -> AsyncIterator[Any]:
    yield self._engine().schedule


BUGS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "plans of earlier masters are forgotten": (Engine, "start", _forget_plans),
    "what the dispatcher has is cancelled without asking it": (EngineAdmin, "_is_free", _ask_nobody),
    "what is shown may be undone": (EngineAdmin, "_committed_read", _read_what_is_written),
    "a run that is planned again begets another next run": (StorePlanLog, "_recur", _recur_again),
    "the next run is reckoned from where the last one was moved to": (StorePlanLog, "_recur", _recur_from_the_due_time),
    "on ordered subjects what is due overtakes what is late": (Engine, "_next", _hold_nothing),
    "a plan is sent before it is committed": (StorePlanLog, "plan", _send_uncommitted),
    "a tick comes too early": (Engine, "_next", _tick_ahead),
    "what is stored for the near future is not put into the wheel": (Engine, "_pending", _miss_what_comes),
    "what is stored is put into the wheel twice, and nobody asks whether it left": (Engine, "_pending", _take_twice),
    "what was cancelled while it was in the wheel is delivered": (Engine, "_pending_of", _trust_the_wheel),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug is planted until the end of the block."""
    owner, attribute, bug = BUGS[name]
    with patch.object(owner, attribute, bug):
        yield
