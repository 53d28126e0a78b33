"""Chooses what a consumer that reads in bulk hands out next, over all its lanes. Pure: time is a parameter. `key_dispatcher.py` chooses
single messages.

Rules:
* At most one slice of a lane is handed out, and no other slice with the same logical partitions, from any lane: a lane may be lost while a
  slice is handed out, and its keys return in another lane. Slices that cannot share a key are handed out at the same time.
* Lanes take turns. A failed slice comes first in its lane, and the lane hands out nothing until the slice may be retried, nor while its
  lease may have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from qmq_ordering.route import LpRange

from qmq import limits
from qmq.client.ordered.lane_core import LaneState
from qmq.client.ordered.ordered_message import LaneSource
from qmq.client.ordered.ordered_messages import MessageRun, OrderedMessages


class BulkDispatcher:
    def __init__(self) -> None:
        self._lanes: dict[LaneSource, deque[MessageRun]] = {}
        """The waiting runs of each lane, in order. The lane whose turn it is comes first."""
        self._handed_out: dict[MessageRun, LpRange] = {}
        """The first run of each slice that is handed out, and the logical partitions of the slice."""

    def put(self, lane: LaneSource, runs: Sequence[MessageRun]) -> None:
        """Add runs, in the order of their lane."""
        self._lanes.setdefault(lane, deque()).extend(runs)

    def take(self, messages_max: int) -> list[MessageRun]:
        """The next slice, up to `messages_max` messages of one lane, which counts as handed out from now on. Empty if there is none.

        A slice ends with the batch that reaches `PULL_BYTES_MAX` of decompressed bodies: what came as a few bytes may be large then.
        """
        lane = next(filter(self._may_give, self._lanes), None)
        if lane is None:
            return []
        waiting = self._lanes.pop(lane)
        taken: list[MessageRun] = []
        room, room_bytes = messages_max, limits.PULL_BYTES_MAX
        while room and waiting and waiting[0].cell.state is LaneState.WAITING:
            run = waiting[0]
            if not taken or taken[-1].batch is not run.batch:
                if room_bytes <= 0:
                    break
                room_bytes -= run.batch.view.bodies_bytes
            waiting.popleft()
            if len(run.indices) > room:
                waiting.appendleft(run.split(room))
            lane.core.begin(run.cell)
            taken.append(run)
            room -= len(run.indices)
        if waiting:
            self._lanes[lane] = waiting
        self._handed_out[taken[0]] = lane.lps
        return taken

    def _may_give(self, lane: LaneSource) -> bool:
        first = self._lanes[lane][0]
        return first.cell.state is LaneState.WAITING and lane.is_sure() and not any(map(lane.lps.overlaps, self._handed_out.values()))

    # --- what became of a slice ----------------------------------------------------------------------------------------

    def done(self, messages: OrderedMessages) -> None:
        del self._handed_out[messages.runs[0]]
        for run in messages.runs:
            run.lane.core.done(run.cell)

    def failed(self, messages: OrderedMessages, now_ms: int, pause_ms: int | None) -> None:
        """The slice waits as a whole for another try, before everything else of its lane."""
        core = messages.runs[0].lane.core
        pause = core.policy.pause_ms(messages.attempt) if pause_ms is None else pause_ms
        self._back(messages, [run for run in messages.runs if core.failed(run.cell, now_ms, pause)])

    def put_back(self, messages: OrderedMessages) -> None:
        """The slice was not finished: hand it out again."""
        self._back(messages, [run for run in messages.runs if run.lane.core.put_back(run.cell)])

    def _back(self, messages: OrderedMessages, runs: list[MessageRun]) -> None:
        """Put back the runs that still belong to the lane."""
        del self._handed_out[messages.runs[0]]
        if runs:
            self._lanes.setdefault(runs[0].lane, deque()).extendleft([run.again() for run in reversed(runs)])

    def dropped(self, lane: LaneSource) -> None:
        """Forget the waiting runs of a lane. Slices that were handed out stay with the application until they are settled."""
        self._lanes.pop(lane, None)
