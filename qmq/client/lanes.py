"""A producer's lanes, one for each broker group it uses, and the pool of batches that no group has been given yet.

A batch belongs to no group until the moment it leaves, so a group that stalls holds up nothing but what is in flight there:

    closed batch -> pool -> whichever lane has room        certainly refused -> pool again, in its place

Rules:
* The choice is *sticky*: one lane gets batches until `STAY_BYTES` have left (a small batch counts as `BATCH_COST_BYTES`: about 30 lone
  messages), then the next writable one with room. Switching for each batch would halve the batches of a producer of lone messages; never
  switching would load one group. A lane without room (back-pressure) is passed over at once, so a slow group gets what it can take.
* A lane that is stalled (nothing answered for a second) is used only if there is no other.
* Drained groups get nothing new; what may be stored there is asked for there until it is known.
* If no group takes messages, batches wait until their time is over, and their error says why.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from qmq import limits
from qmq.client.feeding import Sender
from qmq.client.lane import Lane
from qmq.client.link import Links
from qmq.client.outbox import Batch
from qmq.client.refusals import final
from qmq.errors import CallerError, QmqError, ReadOnly
from qmq.wire.messages import Produced

STAY_BYTES: Final = 2 * limits.MIB
BATCH_COST_BYTES: Final = 64 * limits.KIB


class Lanes:
    """See the module."""

    def __init__(self, links: Links, sender: Sender) -> None:
        self.subject = sender.subject
        self.pool: deque[Batch] = deque()
        self.kind = sender.kind
        self.encode = sender.encode
        self.failed = sender.failed
        self.answered = sender.answered
        self._sender = sender
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._lanes: list[Lane] = []
        self._at = 0
        self._current: Lane | None = None
        self._stay = 0
        self._trouble: QmqError | None = None
        self._finding: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    @property
    def has_waiting(self) -> bool:
        """Whether batches wait for any lane."""
        return bool(self.pool)

    # --- the way out ---------------------------------------------------------------------------------------------------

    def put(self, batch: Batch) -> None:
        """One more batch; it leaves as soon as a lane has room."""
        self.pool.append(batch)
        self.send()

    def send(self) -> None:
        """Send what can be sent."""
        pool = self.pool
        while pool:
            lane = self._pick(pool[0].size)
            if lane is None:
                self._wait()
                return
            batch = pool.popleft()
            self._stay -= batch.size + BATCH_COST_BYTES
            lane.transmit(batch)

    def pump(self) -> None:
        """A lane changed: send what can be sent, perhaps the open batch too."""
        if not self._is_closed:
            self.send()
            if self._lanes and not self.pool:
                self._sender.look_again()
            self._watch_time()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way where the next batch would go: then there is no reason to gather more."""
        if self.pool:
            return False
        lane = self._pick(0)
        if lane is not None:
            return not lane.inflight
        return not any(each.inflight and each.connection is not None and not each.is_stalled for each in self._lanes)

    def flush(self) -> None:
        """Write now what the current lane was given, not at the end of the next round of the event loop."""
        lane = self._current
        if lane is not None and lane.connection is not None:
            lane.connection.stream.flush()

    def _pick(self, size: int) -> Lane | None:
        lane = self._current
        if lane is not None and self._stay > 0 and lane.is_writable and not lane.is_stalled and lane.has_room(size):
            return lane
        return self._rotate(size)

    def _rotate(self, size: int) -> Lane | None:
        """The next lane with room. A lane that nobody tried yet is connected on the way, one at a time."""
        stalled: Lane | None = None
        is_reaching = False
        count = len(self._lanes)
        for step in range(1, count + 1):
            at = (self._at + step) % count
            lane = self._lanes[at]
            if not lane.is_writable:
                continue
            if lane.has_room(size):
                if not lane.is_stalled:
                    self._choose(at, lane)
                    return lane
                stalled = stalled or lane
            elif lane.connection is None and not is_reaching:
                lane.reach(ahead=True)
                is_reaching = lane.trouble is None
        return stalled

    def _choose(self, at: int, lane: Lane) -> None:
        self._at, self._current, self._stay = at, lane, STAY_BYTES
        self._links.locator.touch(self.subject)

    # --- the way back --------------------------------------------------------------------------------------------------

    def stored(self, group: str, batch: Batch, produced: Produced) -> None:
        """A lane's batch is decided."""
        self._sender.stored(group, batch, produced)

    def give_back(self, batch: Batch) -> None:
        """Certainly not stored: the batch takes its place again, in the order of the numbers."""
        place = bisect_left(self.pool, batch.sequence, key=lambda each: each.sequence)
        self.pool.insert(place, batch)

    # --- which groups there are ----------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Batches wait and no lane takes them: are there others?"""
        if self._finding is None and not self._is_closed and not any(lane.is_writable for lane in self._lanes):
            self._finding = self._loop.create_task(self._find())
        self._watch_time()

    async def _find(self) -> None:
        try:
            while self.pool and not self._is_closed:
                try:
                    self._update(await self._links.locator.groups(self.subject, anew=bool(self._lanes)))
                except CallerError as failure:
                    self.give_up(failure)
                    self.answered()
                    continue
                except QmqError as failure:
                    self._trouble = failure
                    continue
                if any(lane.is_writable for lane in self._lanes):
                    return
                self._trouble = ReadOnly(f"no broker group takes messages of {self.subject!r} just now: all are drained")
        finally:
            self._finding = None
            self.pump()

    def _update(self, groups: Mapping[str, bool]) -> None:
        if not self._lanes:
            self._links.locator.listen(self.subject, self._rerouted)
        known = {lane.group: lane for lane in self._lanes}
        for lane in self._lanes:
            lane.is_writable = groups.get(lane.group, False)
        for group, is_writable in groups.items():
            if group not in known:
                lane = Lane(self._links, group, self)
                lane.is_writable = is_writable
                self._lanes.append(lane)
        if self._current is None and self._lanes:
            self._at = random.randrange(len(self._lanes))  # noqa: S311 - so that many producers begin at different groups

    def _rerouted(self) -> None:
        groups = self._links.locator.book.groups(self.subject)
        if groups is not None and not self._is_closed:
            self._update(groups)
            for lane in self._lanes:
                lane.moved()
            self.pump()

    # --- time ----------------------------------------------------------------------------------------------------------

    def _watch_time(self) -> None:
        """Wake up when the first of the batches that wait is out of time."""
        if self._expiry is None and not self._is_closed:
            ends = [lane.retries[0].until for lane in self._lanes if lane.retries]
            if self.pool:
                ends.append(self.pool[0].until)
            if ends:
                self._expiry = self._loop.call_at(min(ends), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self._loop.time()
        while self.pool and self.pool[0].until <= now:
            batch = self.pool.popleft()
            troubles = [lane.trouble for lane in self._lanes if lane.is_writable and lane.trouble is not None]
            self._sender.failed(batch, final(batch.failure or next(iter(troubles), self._trouble), batch))
        for lane in self._lanes:
            lane.expire(now)
        self.pump()

    def give_up(self, failure: QmqError) -> None:
        """Nothing can be sent anywhere: what waits fails."""
        while self.pool:
            batch = self.pool.popleft()
            self._sender.failed(batch, final(failure, batch))

    # --- the end -------------------------------------------------------------------------------------------------------

    def abort(self, fail: Callable[[Batch, bool], None]) -> None:
        """End now: `fail` gets each batch, and whether an answer is still to come."""
        self._is_closed = True
        self._links.locator.unlisten(self.subject, self._rerouted)
        if self._finding is not None:
            self._finding.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        for lane in self._lanes:
            lane.abort(fail)
        while self.pool:
            fail(self.pool.popleft(), False)
