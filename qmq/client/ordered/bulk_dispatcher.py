"""What a consumer that reads in bulk may hand out next, over all its lanes. Pure: time is handed in. `key_dispatcher.py` is for one by one.

Rules:
* Of a lane one slice is in hand at a time, and nothing else of its logical partitions, whatever lane that comes from: a lane may be lost
  while a slice is in hand, and its keys come back in another one. Slices that cannot share a key are in hand together.
* Lanes take turns. A lane begins with what failed, and gives nothing out until that may be tried again, nor while its lease may have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from qmq_ordering.route import LpRange

from qmq.client.ordered.lane_core import LaneState
from qmq.client.ordered.ordered_message import LaneSource
from qmq.client.ordered.ordered_messages import MessageRun, OrderedMessages


class BulkDispatcher:
    def __init__(self) -> None:
        self._lanes: dict[LaneSource, deque[MessageRun]] = {}
        """Of each lane what waits, in its order. The lane whose turn it is comes first."""
        self._in_hand: dict[MessageRun, LpRange] = {}
        """The first run of each slice in hand, and where its keys belong."""

    def put(self, lane: LaneSource, runs: Sequence[MessageRun]) -> None:
        """Runs came, in the order of their lane."""
        self._lanes.setdefault(lane, deque()).extend(runs)

    def take(self, messages_max: int) -> list[MessageRun]:
        """The next slice, which is in work now: up to so many messages of one lane; empty if there is none."""
        lane = next(filter(self._may_give, self._lanes), None)
        if lane is None:
            return []
        waiting = self._lanes.pop(lane)
        taken: list[MessageRun] = []
        room = messages_max
        while room and waiting and waiting[0].cell.state is LaneState.WAITING:
            run = waiting.popleft()
            if len(run.indices) > room:
                waiting.appendleft(run.split(room))
            lane.core.begin(run.cell)
            taken.append(run)
            room -= len(run.indices)
        if waiting:
            self._lanes[lane] = waiting
        self._in_hand[taken[0]] = lane.lps
        return taken

    def _may_give(self, lane: LaneSource) -> bool:
        first = self._lanes[lane][0]
        return first.cell.state is LaneState.WAITING and lane.is_sure() and not any(map(lane.lps.overlaps, self._in_hand.values()))

    # --- what became of a slice ----------------------------------------------------------------------------------------

    def done(self, messages: OrderedMessages) -> None:
        del self._in_hand[messages.runs[0]]
        for run in messages.runs:
            run.lane.core.done(run.cell)

    def failed(self, messages: OrderedMessages, now_ms: int, pause_ms: int | None) -> None:
        """It waits for another try, before everything else of its lane; all of it equally long."""
        core = messages.runs[0].lane.core
        pause = core.policy.pause_ms(messages.attempt) if pause_ms is None else pause_ms
        self._back(messages, [run for run in messages.runs if core.failed(run.cell, now_ms, pause)])

    def put_back(self, messages: OrderedMessages) -> None:
        """Nobody finished it: hand it out again."""
        self._back(messages, [run for run in messages.runs if run.lane.core.put_back(run.cell)])

    def _back(self, messages: OrderedMessages, runs: list[MessageRun]) -> None:
        """Those are the lane's still."""
        del self._in_hand[messages.runs[0]]
        if runs:
            self._lanes.setdefault(runs[0].lane, deque()).extendleft([run.again() for run in reversed(runs)])

    def dropped(self, lane: LaneSource) -> None:
        """Nothing of the lane is to be handed out. What is in hand stays there until something is said of it."""
        self._lanes.pop(lane, None)
