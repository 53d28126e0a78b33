"""Bugs of parked keys: some of those that the simulator's tests plant (`ordersim.bugs`)."""

from __future__ import annotations

from campaign.bugs.ordering import as_simulated
from campaign.values import Bug

BUGS = (
    Bug(
        name="replay-not-all",
        what="the last message of a parked key is left out of its replay",
        plant=as_simulated("leave the last message of a parked key out of its replay"),
        found_by="parked-none",
        finds=("key_order", "ordered_no_loss"),
    ),
    Bug(
        name="forget-parked",
        what="a consumer that gets a lane is not told which keys are parked there",
        plant=as_simulated("tell a reader of no parked keys"),
        found_by="parked-none",
        finds=("parked_waits",),
    ),
)
