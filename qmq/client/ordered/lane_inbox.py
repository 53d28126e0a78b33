"""The messages of a consumer's lanes that the application has not finished, and the tasks that wait for messages. Lane readers put messages
in, the consumer takes them out, and messages give their verdicts here.
"""

from __future__ import annotations

import asyncio
import logging
import math

from qmq.client.ordered.bulk_dispatcher import BulkDispatcher
from qmq.client.ordered.key_dispatcher import KeyDispatcher
from qmq.client.ordered.lane_core import Cell
from qmq.client.ordered.ordered_message import LaneSource, OrderedMessage
from qmq.client.ordered.ordered_messages import MessageRun, OrderedMessages

log = logging.getLogger("qmq.client")


class LaneInbox:
    """`by_key` has the messages of a consumer that reads one by one, `in_bulk` those of one that reads in bulk. `stale` counts messages
    that were lost after they were handed out and before they were settled.
    """

    def __init__(self, name: str) -> None:
        self.by_key = KeyDispatcher()
        self.in_bulk = BulkDispatcher()
        self.is_bulk: bool | None = None
        """Whether the consumer reads in bulk; None before its first message."""
        self.stale = 0
        self._name = name
        self._loop = asyncio.get_running_loop()
        self.waiting: dict[asyncio.Future[bool], None] = {}
        self.woken: asyncio.Future[bool] | None = None
        """The waiter that was woken last and has not looked yet. Until it has looked, a message wakes no other waiter."""

    # --- waiters -------------------------------------------------------------------------------------------------------

    async def wait(self, until_s: float = math.inf) -> bool:
        """Wait until something changes; False if nothing did until then."""
        waiting: asyncio.Future[bool] = self._loop.create_future()
        self.waiting[waiting] = None
        timer = self._loop.call_at(until_s, _set_result, waiting, False) if until_s < math.inf else None
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.notify()  # the wake-up was for a waiter, and this one has stopped looking
            raise
        finally:
            if self.woken is waiting:
                self.woken = None
            self.waiting.pop(waiting, None)
            if timer is not None:
                timer.cancel()

    def notify(self) -> None:
        """Something changed: wake one waiter, which wakes the next one if it finds a message."""
        while self.waiting:
            waiting = next(iter(self.waiting))
            del self.waiting[waiting]
            if _set_result(waiting, True):
                self.woken = waiting
                return

    def notify_next(self) -> None:
        """There may be another message for another waiter: wake it, unless one is about to look."""
        if self.waiting and self.woken is None:
            self.notify()

    def notify_all(self) -> None:
        """The consumer closes."""
        waiting, self.waiting = self.waiting, {}
        for each in waiting:
            _set_result(each, True)

    # --- verdicts ------------------------------------------------------------------------------------------------------

    def finish(self, message: OrderedMessage) -> None:
        """The message was handled."""
        self.by_key.done(message)
        message.lane.worked(is_urgent=False)
        if self.waiting and self.woken is None:
            self.notify()

    def fail(self, message: OrderedMessage, pause_ms: int | None) -> None:
        """The message failed."""
        self.by_key.failed(message, int(self._loop.time() * 1000), pause_ms)
        message.lane.worked(is_urgent=True)
        self.notify()

    def reject(self, message: OrderedMessage) -> None:
        """No other attempt will help."""
        self.by_key.rejected(message)
        message.lane.worked(is_urgent=True)
        self.notify()

    def release(self, message: OrderedMessage) -> None:
        """Hand the message out again, as if it had not been handed out."""
        self.by_key.put_back(message)
        message.lane.worked(is_urgent=False)
        self.notify()

    def finish_all(self, messages: OrderedMessages) -> None:
        """The messages were handled."""
        self.in_bulk.done(messages)
        messages.runs[0].lane.worked(is_urgent=False)
        self.notify()

    def fail_all(self, messages: OrderedMessages, pause_ms: int | None) -> None:
        """The messages failed."""
        self.in_bulk.failed(messages, int(self._loop.time() * 1000), pause_ms)
        messages.runs[0].lane.worked(is_urgent=True)
        self.notify()

    # --- from the lanes ------------------------------------------------------------------------------------------------

    def arrived(self, messages: list[OrderedMessage]) -> None:
        """A lane got messages."""
        self.by_key.put(messages)
        self.notify()

    def arrived_in_bulk(self, lane: LaneSource, runs: list[MessageRun]) -> None:
        """A lane got runs of messages."""
        self.in_bulk.put(lane, runs)
        self.notify()

    def voided(self, lane: LaneSource, cells: list[Cell], stale: int) -> None:
        """Hand out nothing of the lane; these cells are void. `stale` of their messages had been handed out."""
        self.by_key.dropped(lane, cells)
        self.in_bulk.dropped(lane)
        if stale:
            self.stale += stale
            log.warning("%s: %d messages of %s were lost before they were settled", self._name, stale, lane.lane)
        self.notify()

    def due(self, cells: list[Cell]) -> None:
        """Failed messages may be retried."""
        if not self.is_bulk:
            self.by_key.due(cells)
        self.notify()

    def changed(self, lane: LaneSource) -> None:
        """The lane may hand out again."""
        if not self.is_bulk:
            self.by_key.review(lane)
        self.notify()


def _set_result(waiting: asyncio.Future[bool], is_changed: bool) -> bool:
    """Wake the waiter; False if it has stopped waiting."""
    if waiting.done():
        return False
    waiting.set_result(is_changed)
    return True
