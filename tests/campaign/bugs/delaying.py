"""Bugs of delayed messages."""

from __future__ import annotations

from typing import Any

from campaign.bugs.storing import replacing
from campaign.values import Bug
from qmq.delay.admin import EngineAdmin
from qmq.delay.wheel import Wheel

EARLY_MS = 3_000
DELAYS = frozenset({"delays"})
_advance = Wheel.advance


def _early(self: Wheel, now_ms: int, *rest: Any, **options: Any) -> Any:
    return _advance(self, now_ms + EARLY_MS, *rest, **options)


async def _cancel_nothing(self: Any, delayed: Any) -> Any:
    found = self._engine().schedule.find(delayed)
    return self._message(found)


BUGS = (
    Bug(
        name="deliver-early",
        what="a delayed message goes three seconds before its time",
        plant=replacing((Wheel, "advance", _early)),
        found_by="delayed-none",
        finds=("never_early",),
        into=DELAYS,
    ),
    Bug(
        name="cancel-nothing",
        what="a cancellation is answered and not recorded",
        plant=replacing((EngineAdmin, "cancel", _cancel_nothing)),
        found_by="delayed-none",
        finds=("cancelled_or_delivered",),
        into=DELAYS,
    ),
)
