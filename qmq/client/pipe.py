"""A pipe: the in-order way of one producer to one broker group, over all the masters that group has in time.

    batch -> transmit -> in flight -> stored
                            |-> refused, certainly not stored -> given back: any pipe may take it
                            |-> nobody knows                  -> retries: sent again, in order, before anything else, and only here

Rules:
* A batch whose outcome is unknown stays. The group's replicas remember its number with the log, so sending it again *here* is harmless, and
  sending it anywhere else could make two of it.
* While there are retries nothing new is taken, so the group gets its batches in the order of their numbers.
* A pipe that was sent away (NotMaster), or learns of another master, *moves*: it takes no more, hears what the old master still answers
  for at most `GRACE_S`, then sends what is undecided to the new one.
* After a refusal one batch goes ahead as a probe; the rest follow when it is stored.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from typing import Final

from qmq import limits
from qmq.client.connection import Connection
from qmq.client.feeding import Feeder
from qmq.client.links import Links
from qmq.client.open_batch import Batch
from qmq.client.route_book import Master
from qmq.delivery.retries import final, is_worth_another_try, rest_s
from qmq.errors import NotMaster, Outcome, PeerError, QmqError, ReadOnly, Unavailable
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame

INFLIGHT_BATCHES_MAX: Final = 32
"""Half of the broker's window of remembered batches (qmq/log/producers.py), so that a retry always falls into it."""
INFLIGHT_BYTES_MAX: Final = 8 * limits.MIB
ANSWER_S: Final = 15.0
"""A broker that has not answered a batch by then is asked again."""
GRACE_S: Final = 0.2
STALL_S: Final = 1.0
"""A group that has answered nothing for so long while batches are with it gets no new ones if there is another group."""


class Pipe:
    """`trouble` is why it cannot be used just now; None if it can, or was not tried."""

    def __init__(self, links: Links, group: str, feeder: Feeder, inflight_max: int = INFLIGHT_BATCHES_MAX) -> None:
        self.group = group
        self.is_writable = True
        self.is_stalled = False
        self.trouble: QmqError | None = None
        self.connection: Connection | None = None
        self.inflight: dict[int, Batch] = {}
        self.retries: list[Batch] = []
        self._links = links
        self._feeder = feeder
        self._loop = asyncio.get_running_loop()
        self._master: Master | None = None
        self._inflight_max = self._window = inflight_max
        self._room_bytes = 0
        self._refusals = 0
        self._stored = 0
        self._pause: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._reaching: asyncio.Task[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._is_closed = False

    # --- the way out ---------------------------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Whether a new batch of `size` bytes can leave now."""
        return not self.retries and self._has_way(size)

    def _has_way(self, size: int) -> bool:
        connection = self.connection
        return (
            connection is not None
            and self._pause is None
            and len(self.inflight) < self._window
            and (not self.inflight or connection.produce_bytes + size <= self._room_bytes)
            and connection.is_open
            and connection.stream.is_writable
        )

    def transmit(self, batch: Batch) -> None:
        """Send a batch; there must be room."""
        connection = self.connection
        assert connection is not None
        try:
            if batch.encoded is None:
                batch.encoded = self._feeder.encode(batch)
        except QmqError as failure:
            self._feeder.failed(batch, failure)
            return
        self.inflight[batch.sequence] = batch
        batch.attempts = attempt = batch.attempts + 1
        left_s = min(max(batch.until - self._loop.time(), 0.1), ANSWER_S)
        connection.request(self._feeder.kind, lambda answer: self._answered(batch, attempt, answer), *batch.encoded, timeout_s=left_s)
        if self._watch is None:
            self._watch = self._loop.call_later(STALL_S, self._look, self._stored)

    def resend(self) -> None:
        """Send what is to be sent again."""
        while self.retries and self._has_way(self.retries[0].size):
            self.transmit(self.retries.pop(0))

    # --- the way back --------------------------------------------------------------------------------------------------

    def _answered(self, batch: Batch, attempt: int, answer: Frame | QmqError) -> None:
        if isinstance(answer, QmqError):
            if batch.attempts != attempt or self.inflight.pop(batch.sequence, None) is None:
                return
            self._refused(batch, answer)
        else:
            produced = wire.unpack_one_produced(answer.payload)
            if batch.ticket.is_done:
                return
            if self.inflight.pop(batch.sequence, None) is None:
                self.retries.remove(batch)
            self._accepted()
            self._feeder.stored(self.group, batch, produced)
        if self._emptied is not None and not self.inflight:
            _set(self._emptied)
        if self.retries:
            self.resend()
        self._feeder.answered()

    def _accepted(self) -> None:
        self._stored += 1
        if self._refusals or self.is_stalled or self.trouble is not None:
            self._refusals, self.is_stalled, self.trouble = 0, False, None
            self._window = self._inflight_max
            self._links.locator.confirm(self.group)

    def _refused(self, batch: Batch, failure: QmqError) -> None:
        batch.is_uncertain |= failure.outcome is Outcome.UNKNOWN
        batch.failure = failure
        is_retried = is_worth_another_try(failure)
        if not is_retried or self._is_closed or self._loop.time() >= batch.until:
            self._feeder.failed(batch, final(failure, batch))
        elif batch.is_uncertain:
            insort(self.retries, batch, key=_number)
        else:
            self._feeder.give_back(batch)
        if isinstance(failure, NotMaster):
            self.trouble = failure
            self._sent_away()
        elif is_retried and self.connection is not None and self.connection.is_open:
            self._rest(failure)

    def _sent_away(self) -> None:
        if self._master is not None and self.connection is not None:
            self._links.locator.doubt(self.group, self._master)
            self._refusals += 1
            self._window = 1
            self.move()

    def _rest(self, failure: QmqError) -> None:
        """Keep still for a while, then probe."""
        self._window, self.trouble = 1, failure
        if isinstance(failure, ReadOnly):
            self._links.locator.refresh(self._feeder.target)
        if self._pause is None and not self._is_closed:
            self._refusals += 1
            self._pause = self._loop.call_later(rest_s(self._refusals, failure), self._rested)

    def _rested(self) -> None:
        self._pause = None
        self.resend()
        self._feeder.pump()

    def _look(self, stored_before: int) -> None:
        """Once a second while batches are in flight: does the group answer at all?"""
        self._watch = None
        if not self.inflight or self._is_closed:
            self.is_stalled = False
            return
        if self._stored == stored_before:
            self.is_stalled = True
            self._links.locator.refresh(self._feeder.target)
            self._feeder.pump()
        if self._watch is None:
            self._watch = self._loop.call_later(STALL_S, self._look, self._stored)

    # --- masters come and go -------------------------------------------------------------------------------------------

    def moved(self) -> None:
        """Routes changed: if the group has another master now, go there."""
        known = self._links.locator.book.master(self.group)
        if self.connection is not None and known is not None and known != self._master:
            self.move()

    def move(self) -> None:
        """Leave this master; look for the one to use if there is need."""
        self._leave()
        self.reach()

    def _leave(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.on_closed.pop(self._lost, None)
            connection.on_writable.pop(self._feeder.pump, None)

    def _lost(self) -> None:
        self._leave()
        self._loop.call_soon(self.reach)
        self._loop.call_soon(self._feeder.pump)

    @property
    def _is_needed(self) -> bool:
        return not self._is_closed and bool(self.retries or self.inflight or (self.is_writable and self._feeder.has_waiting))

    def reach(self, *, ahead: bool = False) -> None:
        """Find the master and connect, again and again while there is something for it; `ahead`: once, to have another choice soon."""
        if self._reaching is None and self.connection is None and not self._is_closed and (ahead or self._is_needed):
            self._reaching = self._loop.create_task(self._reach(ahead))

    async def _reach(self, ahead: bool) -> None:
        try:
            while (ahead or self._is_needed) and self.connection is None:
                ahead = False
                try:
                    master, connection = await self._links.reach(self._feeder.target, self.group)
                    await self._hear_out()
                    self._use(master, connection)
                except (Unavailable, PeerError) as failure:
                    self.trouble = failure
                    self._feeder.pump()
        except QmqError as failure:
            self.trouble = failure
            self._fail_all(failure)
            self._feeder.give_up(failure)
        finally:
            self._reaching = None
            if self.connection is not None:
                self.resend()
            self._feeder.pump()

    async def _hear_out(self) -> None:
        """What the old master answers is better than not to know; but it may be silent for ever."""
        if self.inflight:
            self._emptied = self._loop.create_future()
            try:
                async with asyncio.timeout(GRACE_S):
                    await self._emptied
            except TimeoutError:
                pass
            finally:
                self._emptied = None
        for batch in self.inflight.values():
            batch.is_uncertain = True
            insort(self.retries, batch, key=_number)
        self.inflight.clear()

    def _use(self, master: Master, connection: Connection) -> None:
        if not connection.is_open or self._is_closed:
            return
        self._master, self.connection = master, connection
        self._room_bytes = min(INFLIGHT_BYTES_MAX, connection.inflight_bytes_max)
        self.is_stalled = False
        if not self._refusals:
            self.trouble = None
        connection.on_closed[self._lost] = None
        connection.on_writable[self._feeder.pump] = None

    # --- the end -------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Fail what was to be sent again and whose time is over."""
        for batch in [each for each in self.retries if each.until <= now]:
            self.retries.remove(batch)
            self._feeder.failed(batch, final(self.trouble or batch.failure, batch))

    def _fail_all(self, failure: QmqError) -> None:
        retries, self.retries = self.retries, []
        for batch in retries:
            self._feeder.failed(batch, final(failure, batch))

    def abort(self, fail: Callable[[Batch, bool], None]) -> None:
        """End now: `fail` gets each batch, and whether an answer is still to come."""
        self._is_closed = True
        self._leave()
        for timer in (self._pause, self._watch):
            if timer is not None:
                timer.cancel()
        if self._reaching is not None:
            self._reaching.cancel()
        inflight, retries = list(self.inflight.values()), self.retries
        self.inflight, self.retries = {}, []
        for batch in inflight:
            fail(batch, True)
        for batch in retries:
            fail(batch, False)


def _number(batch: Batch) -> int:
    return batch.sequence


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
