"""Bugs of what comes back to a consumer group, and of lanes and changes of routes; those of lanes
are some that the simulator's tests plant (`ordersim.bugs`).
"""

from __future__ import annotations

from typing import Any

from campaign.bugs.ordering import as_simulated
from campaign.values import Bug
from qmq.log import queue
from qmq.log.actions import Return
from qmq.log.group_state import GroupState

_take_back = GroupState.take_back


def _keep_what_never_arrived(self: GroupState, action: Any, events: Any = None) -> None:
    requeued = list(self.requeued)
    _take_back(self, action, events)
    self.requeued[:] = requeued


def _keep() -> None:
    queue.CHANGES[Return] = (queue.Queue.share, _keep_what_never_arrived)


BUGS = (
    Bug(
        name="keep-what-never-arrived",
        what="messages whose delivery was lost with a connection are not handed out again",
        plant=_keep,
        found_by="log-partition-no-answers",
        finds=("read_in_order", "no_loss"),
    ),
    Bug(
        name="forget-when-sealed",
        what="of a batch that is stored a sealed partition says that it is not",
        plant=as_simulated("say of a batch that is stored that it is not, once sealed"),
        found_by="ordered-split-partition-no-answers",
        finds=("ordered_stored_once", "ordered_log", "key_order"),
    ),
)
