"""Chooses the message that a consumer hands out next, over all its lanes, from the order of keys (`key_queue.py`) and the state of each
lane
(`lane_core.py`). Pure: time is a parameter.

Rules:
* A key is in work from the moment one of its messages is handed out until that message is finished. A failed message keeps its key in work
  through all its pauses: no later message of the key overtakes it.
* Messages to be retried go before all others.
* A lane hands out nothing while a failed message blocks it (except that message), and while its lease may have ended: a consumer that was
  paused, or cut off, must not hand out messages that another consumer may have by now. Messages that are already handed out are protected
  by the fencing token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from qmq.client.ordered.key_queue import KeyQueue
from qmq.client.ordered.lane_core import Cell, LaneState
from qmq.client.ordered.ordered_message import LaneSource, OrderedMessage


class KeyDispatcher:
    def __init__(self) -> None:
        self._keys: KeyQueue[LaneSource, OrderedMessage] = KeyQueue()
        self._tries: dict[Cell, OrderedMessage] = {}
        """Messages to be retried, now or when they are due. No other message of their keys is handed out."""
        self._again: deque[Cell] = deque()
        """Those of `_tries` that are due."""

    def put(self, messages: Sequence[OrderedMessage]) -> None:
        """Messages of one lane came, in its order."""
        if messages:
            self._keys.extend(messages[0].lane, ((each.cell.key, each) for each in messages))

    def take(self) -> OrderedMessage | None:
        """The next message. No other message of its key is handed out until it is finished."""
        for cell in list(self._again) if self._again else ():
            message = self._tries.get(cell)
            if message is not None and not message.lane.is_sure():
                continue
            self._again.remove(cell)
            if message is None:
                continue
            del self._tries[cell]
            if message.lane.core.begin(cell):
                return message
            self._keys.finished(cell.key)
        following = self._keys.next
        while (found := following()) is not None:
            key, message = found
            lane = message.lane
            if not lane.is_sure():
                self._hold_back(message)
            elif lane.core.begin(message.cell):
                return message
            else:
                self._keys.finished(key)
        return None

    def _hold_back(self, message: OrderedMessage) -> None:
        """Another consumer may have the message by now, so it waits. It keeps its place, before all others of its key."""
        self._keys.hold(message.lane)
        self._tries[message.cell] = message
        self._again.append(message.cell)

    def done(self, message: OrderedMessage) -> bool:
        """The message is finished; False if this consumer no longer holds it."""
        cell, keys = message.cell, self._keys
        is_ours = message.lane.core.done(cell)
        keys.finished(cell.key)  # `_over`, without a call: most messages end here
        if keys.held:
            self.review(message.lane)
        return is_ours

    def failed(self, message: OrderedMessage, now_ms: int, pause_ms: int | None) -> bool:
        """The message waits for another try, or is parked; False if this consumer no longer holds it."""
        core = message.lane.core
        is_ours = core.failed(message.cell, now_ms, pause_ms)
        if message.cell.state is LaneState.FAILED:
            self._tries[message.cell] = message.again()
            self.review(message.lane)
        else:
            self._over(message)
        return is_ours

    def rejected(self, message: OrderedMessage) -> bool:
        """Park the message's key; False if this consumer no longer holds the message."""
        is_ours = message.lane.core.rejected(message.cell)
        self._over(message)
        return is_ours

    def put_back(self, message: OrderedMessage) -> None:
        """The handler was cancelled: hand the message out again."""
        if message.lane.core.put_back(message.cell):
            self._tries[message.cell] = message.again()
            self._again.append(message.cell)
        else:
            self._over(message)

    def _over(self, message: OrderedMessage) -> None:
        self._keys.finished(message.cell.key)
        # Finishing a message never blocks a lane, and releases only a lane that is held; `take` checks the lease.
        if self._keys.held:
            self.review(message.lane)

    def due(self, cells: Iterable[Cell]) -> None:
        """Note that the pauses of these messages have ended."""
        self._again.extend(cells)

    def review(self, lane: LaneSource) -> None:
        """Hold or release the lane, after it was blocked or unblocked, or its lease changed. A lane that is not attached has nothing to
        hold.
        """
        if lane.core.position >= 0 and (lane.core.is_blocked or not lane.is_sure()):
            self._keys.hold(lane)
        else:
            self._keys.release(lane)

    def dropped(self, lane: LaneSource, cells: Iterable[Cell]) -> None:
        """This consumer lost the lane, and these cells are void."""
        self._keys.drop(lane)
        for cell in cells:
            if self._tries.pop(cell, None) is not None:
                self._keys.finished(cell.key)
