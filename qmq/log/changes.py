"""What each action changes: one table, for a master that acts, for a slave that follows, and for every replay. Pure.

The actions of a schedule are not in it: they change no queue, and go to the store's projection (`qmq.log.projection`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from qmq.log.actions import (
    Begin,
    DeadLettered,
    DropQueue,
    Forget,
    Join,
    LaneAction,
    LaneBegin,
    LaneDone,
    LaneFail,
    LaneGrant,
    LaneInherit,
    LanePark,
    LaneRelease,
    LaneReset,
    LaneUnpark,
    Leave,
    PullAction,
    Reset,
    Return,
    SettleAction,
    ShareAction,
)
from qmq.log.group_state import GroupState, ShareEvent
from qmq.log.lane_state import GroupLaneState
from qmq.log.queue import Queue


def _whole(queue: Queue, _group: str) -> Queue:
    return queue


CHANGES: Final[dict[type[Any], tuple[Callable[[Queue, str], Any], Callable[..., Any]]]] = {
    Begin: (Queue.share, GroupState.begin),
    Join: (Queue.share, GroupState.join),
    Return: (Queue.share, GroupState.take_back),
    PullAction: (Queue.share, GroupState.pull),
    SettleAction: (Queue.share, GroupState.settle),
    Leave: (Queue.share, GroupState.leave),
    Reset: (Queue.share, GroupState.reset),
    DeadLettered: (Queue.share, GroupState.dead_lettered),
    LaneBegin: (Queue.lane_share, GroupLaneState.begin),
    LaneGrant: (Queue.lane_share, GroupLaneState.grant),
    LaneRelease: (Queue.lane_share, GroupLaneState.release),
    LaneDone: (Queue.lane_share, GroupLaneState.done),
    LaneFail: (Queue.lane_share, GroupLaneState.fail),
    LanePark: (Queue.lane_share, GroupLaneState.park),
    LaneUnpark: (Queue.lane_share, GroupLaneState.unpark),
    LaneReset: (Queue.lane_share, GroupLaneState.reset),
    LaneInherit: (Queue.lane_share, GroupLaneState.inherit),
    Forget: (_whole, Queue.forget),
    DropQueue: (_whole, Queue.forget_all),
}
"""For each kind of action: the part of the queue that it changes, found by the action's group, and the function that changes it."""


def apply(queue: Queue, action: ShareAction | LaneAction) -> Any:
    """Apply an action to its queue; the group's share, or its lanes, are created if absent. Returns what the table's function returns."""
    part, change = CHANGES[type(action)]
    return change(part(queue, action.group), action)


def apply_to(state: GroupState | GroupLaneState, action: ShareAction | LaneAction, *events: list[ShareEvent]) -> Any:
    """As `apply`, on a share or a group's lanes that are kept without their queue. A share adds its events to the list."""
    return CHANGES[type(action)][1](state, action, *events)
