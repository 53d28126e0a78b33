"""Bugs of delay groups and of clocks: what a new master does not know, and wall clocks that are
taken for right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from delaysim.run import BUGS as IN_SIMULATOR

from campaign.bugs.storing import replacing
from campaign.values import Bug
from qmq.broker.timekeeper import SteadyClock, wall_ms
from qmq.delay.schedule import Schedule
from qmq.log.store import Store

_DELAYS = frozenset({"delays"})
_apply_entry = Store.apply_entry
_time_ms = SteadyClock.time_ms


def _nothing(*_: Any) -> None:
    return


def _apply_without_cancels(self: Store, *entry: Any) -> None:
    """The master that cancels does not come here: it acts when it writes."""
    with patch.object(Schedule, "_cancel", _nothing):
        _apply_entry(self, *entry)


def _planted(name: str) -> Callable[[], None]:
    owner, attribute, other = IN_SIMULATOR[name]
    return replacing((owner, attribute, other))


def _time_by_the_wall(self: SteadyClock) -> int:
    _time_ms(self)  # else the clock never settles, and the process serves nobody
    return wall_ms()


_believe_the_wall = replacing((SteadyClock, "time_ms", _time_by_the_wall))


BUGS = (
    Bug(
        name="forget-cancels",
        what="a cancellation is forgotten at a restart and by the next master",
        plant=replacing((Store, "apply_entry", _apply_without_cancels)),
        found_by="delayed-kill-delay-master",
        finds=("cancelled_or_delivered",),
        into=_DELAYS,
    ),
    Bug(
        name="forget-plans",
        what="a new master does not continue the plans of the last one",
        plant=_planted("plans of earlier masters are forgotten"),
        found_by="delayed-stop-master-and-kill-delay-master",
        finds=("due_comes", "due_once"),
        into=_DELAYS,
    ),
    Bug(
        name="due-by-the-wall",
        what="delayed messages are due by the machine's wall clock",
        plant=_believe_the_wall,
        found_by="delayed-clock-forward-delay-master",
        finds=("never_early",),
        into=_DELAYS,
    ),
    Bug(
        name="stamp-by-the-wall",
        what="messages are stamped with the machine's wall clock",
        plant=_believe_the_wall,
        found_by="delayed-clock-back-master",
        finds=("never_early",),
    ),
)
