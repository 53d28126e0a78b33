"""Bugs of ordered messages: some of those that the simulator's tests plant (`ordersim.bugs`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ordersim.bugs import BUGS as IN_SIMULATOR

from campaign.values import Bug

_PLANTED = ExitStack()
"""Holds the simulator's bugs as long as the process lives: one whose block nobody holds ends."""


def as_simulated(name: str) -> Callable[[], None]:
    """Plant a bug of the simulator, for good."""

    def plant() -> None:
        _PLANTED.enter_context(IN_SIMULATOR[name]())

    return plant


BUGS = (
    Bug(
        name="zombie-settles",
        what="verdicts count under a token that is void",
        plant=as_simulated("let a zombie's verdicts count"),
        found_by="ordered-move-stop-client",
        finds=("lane_fenced", "replay_in_order", "ordered_no_loss"),
    ),
    Bug(
        name="begin-at-end",
        what="a lane of a new partition begins at the partition's end",
        plant=as_simulated("begin a target at its end"),
        found_by="ordered-split-none",
        finds=("ordered_no_loss", "key_order"),
    ),
    Bug(
        name="write-behind-seal",
        what="a broker takes batches behind the command message of a sealed partition",
        plant=as_simulated("take batches behind the command message"),
        found_by="ordered-move-none",
        finds=("ordered_log", "ordered_no_loss", "key_order", "ranges_in_order"),
    ),
)
