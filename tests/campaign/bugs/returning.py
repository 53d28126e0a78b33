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

_METAS = frozenset({"metas"})
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
        name="advance-on-first-source",
        what="a group reads a merged partition when one of its sources is finished",
        plant=as_simulated("advance when the first of several sources is finished"),
        found_by="ordered-merge-stop-client",
        finds=("ranges_in_order", "key_order", "replay_in_order", "ordered_no_loss"),
        into=_METAS,
    ),
    Bug(
        name="forget-when-sealed",
        what="of a batch that is stored a sealed partition says that it is not",
        plant=as_simulated("say of a batch that is stored that it is not, once sealed"),
        found_by="ordered-split-partition-no-answers",
        finds=("ordered_stored_once", "ordered_log", "key_order"),
    ),
    Bug(
        name="overlapping-lanes",
        what="a consumer is granted a lane that another one still holds",
        plant=as_simulated("grant a lane that overlaps another one"),
        found_by="ordered-split-kill-client",
        finds=("lane_fenced", "replay_in_order", "key_order"),
    ),
)
