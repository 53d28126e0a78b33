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
from qmq.log.group_state import Share, ShareEvent
from qmq.log.lane_state import LaneShare
from qmq.log.queue import Queue


def _whole(queue: Queue, _group: str) -> Queue:
    return queue


CHANGES: Final[dict[type[Any], tuple[Callable[[Queue, str], Any], Callable[..., Any]]]] = {
    Begin: (Queue.share, Share.begin),
    Join: (Queue.share, Share.join),
    Return: (Queue.share, Share.take_back),
    PullAction: (Queue.share, Share.pull),
    SettleAction: (Queue.share, Share.settle),
    Leave: (Queue.share, Share.leave),
    Reset: (Queue.share, Share.reset),
    DeadLettered: (Queue.share, Share.dead_lettered),
    LaneBegin: (Queue.lane_share, LaneShare.begin),
    LaneGrant: (Queue.lane_share, LaneShare.grant),
    LaneRelease: (Queue.lane_share, LaneShare.release),
    LaneDone: (Queue.lane_share, LaneShare.done),
    LaneFail: (Queue.lane_share, LaneShare.fail),
    LanePark: (Queue.lane_share, LaneShare.park),
    LaneUnpark: (Queue.lane_share, LaneShare.unpark),
    LaneReset: (Queue.lane_share, LaneShare.reset),
    LaneInherit: (Queue.lane_share, LaneShare.inherit),
    Forget: (_whole, Queue.forget),
    DropQueue: (_whole, Queue.forget_all),
}
"""For each kind of action: the part of the queue that it changes, found by the action's group, and the function that changes it."""


def apply(queue: Queue, action: ShareAction | LaneAction) -> Any:
    """Apply an action to its queue; the group's share, or its lanes, are created if absent. Returns what the table's function returns."""
    part, change = CHANGES[type(action)]
    return change(part(queue, action.group), action)


def apply_to(state: Share | LaneShare, action: ShareAction | LaneAction, *events: list[ShareEvent]) -> Any:
    """As `apply`, on a share or a group's lanes that are kept without their queue. A share adds its events to the list."""
    return CHANGES[type(action)][1](state, action, *events)
