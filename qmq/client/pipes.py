"""A producer's pipes, one for each broker group it uses, and the pool of batches that no group has been given yet.

A batch belongs to no group until the moment it leaves, so a group that stalls holds up nothing but what is in flight there:

    closed batch -> pool -> whichever pipe has room        certainly refused -> pool again, in its place

Rules:
* The choice is *sticky*: one pipe gets batches until `STAY_BYTES` have left (a small batch counts as `BATCH_COST_BYTES`: about 30 lone
  messages), then the next writable one with room. Switching for each batch would halve the batches of a producer of lone messages; never
  switching would load one group. A pipe without room (back-pressure) is passed over at once, so a slow group gets what it can take.
* A pipe that is stalled (nothing answered for a second) is used only if there is no other.
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
from qmq.client.links import Links
from qmq.client.open_batch import Batch
from qmq.client.pipe import Pipe
from qmq.client.route_book import spoken
from qmq.delivery.retries import final
from qmq.errors import CallerError, QmqError, ReadOnly
from qmq.wire.frame_payloads import Produced

STAY_BYTES: Final = 2 * limits.MIB
BATCH_COST_BYTES: Final = 64 * limits.KIB


class Pipes:
    def __init__(self, links: Links, sender: Sender) -> None:
        self.target = sender.target
        self.pool: deque[Batch] = deque()
        self.kind = sender.kind
        self.encode = sender.encode
        self.failed = sender.failed
        self.answered = sender.answered
        self._sender = sender
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._pipes: list[Pipe] = []
        self._at = 0
        self._current: Pipe | None = None
        self._stay = 0
        self._trouble: QmqError | None = None
        self._finding: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __iter__(self) -> Iterator[Pipe]:
        return iter(self._pipes)

    @property
    def has_waiting(self) -> bool:
        """Whether batches wait for any pipe."""
        return bool(self.pool)

    # --- the way out ---------------------------------------------------------------------------------------------------

    def put(self, batch: Batch) -> None:
        """One more batch; it leaves as soon as a pipe has room."""
        self.pool.append(batch)
        self.send()

    def send(self) -> None:
        """Send what can be sent."""
        pool = self.pool
        while pool:
            pipe = self._pick(pool[0].size)
            if pipe is None:
                self._wait()
                return
            batch = pool.popleft()
            self._stay -= batch.size + BATCH_COST_BYTES
            pipe.transmit(batch)

    def pump(self) -> None:
        """A pipe changed: send what can be sent, perhaps the open batch too."""
        if not self._is_closed:
            self.send()
            if self._pipes and not self.pool:
                self._sender.look_again()
            self._watch_time()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way where the next batch would go: then there is no reason to gather more."""
        if self.pool:
            return False
        pipe = self._pick(0)
        if pipe is not None:
            return not pipe.inflight
        return not any(each.inflight and each.connection is not None and not each.is_stalled for each in self._pipes)

    def flush(self) -> None:
        """Write now what the current pipe was given, not at the end of the next round of the event loop."""
        pipe = self._current
        if pipe is not None and pipe.connection is not None:
            pipe.connection.stream.flush()

    def _pick(self, size: int) -> Pipe | None:
        pipe = self._current
        if pipe is not None and self._stay > 0 and pipe.is_writable and not pipe.is_stalled and pipe.has_room(size):
            return pipe
        return self._rotate(size)

    def _rotate(self, size: int) -> Pipe | None:
        """The next pipe with room. A pipe that nobody tried yet is connected on the way, one at a time."""
        stalled: Pipe | None = None
        is_reaching = False
        count = len(self._pipes)
        for step in range(1, count + 1):
            at = (self._at + step) % count
            pipe = self._pipes[at]
            if not pipe.is_writable:
                continue
            if pipe.has_room(size):
                if not pipe.is_stalled:
                    self._choose(at, pipe)
                    return pipe
                stalled = stalled or pipe
            elif pipe.connection is None and not is_reaching:
                pipe.reach(ahead=True)
                is_reaching = pipe.trouble is None
        return stalled

    def _choose(self, at: int, pipe: Pipe) -> None:
        self._at, self._current, self._stay = at, pipe, STAY_BYTES
        self._links.locator.touch(self.target)

    # --- the way back --------------------------------------------------------------------------------------------------

    def stored(self, group: str, batch: Batch, produced: Produced) -> None:
        """A pipe's batch is decided."""
        self._sender.stored(group, batch, produced)

    def give_back(self, batch: Batch) -> None:
        """Certainly not stored: the batch takes its place again, in the order of the numbers."""
        place = bisect_left(self.pool, batch.sequence, key=lambda each: each.sequence)
        self.pool.insert(place, batch)

    # --- which groups there are ----------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Batches wait and no pipe takes them: are there others?"""
        if self._finding is None and not self._is_closed and not any(pipe.is_writable for pipe in self._pipes):
            self._finding = self._loop.create_task(self._find())
        self._watch_time()

    async def _find(self) -> None:
        try:
            while self.pool and not self._is_closed:
                try:
                    self._update(await self._links.locator.groups(self.target, anew=bool(self._pipes)))
                except CallerError as failure:
                    self.give_up(failure)
                    self.answered()
                    continue
                except QmqError as failure:
                    self._trouble = failure
                    continue
                if any(pipe.is_writable for pipe in self._pipes):
                    return
                self._trouble = ReadOnly(f"no broker group takes messages of {spoken(self.target)} just now: all are drained")
        finally:
            self._finding = None
            self.pump()

    def _update(self, groups: Mapping[str, bool]) -> None:
        if not self._pipes:
            self._links.locator.listen(self.target, self._rerouted)
        groups = self._sender.usable(groups)
        known = {pipe.group: pipe for pipe in self._pipes}
        for pipe in self._pipes:
            pipe.is_writable = groups.get(pipe.group, False)
        for group, is_writable in groups.items():
            if group not in known:
                pipe = Pipe(self._links, group, self, self._sender.inflight_max)
                pipe.is_writable = is_writable
                self._pipes.append(pipe)
        if self._current is None and self._pipes:
            self._at = random.randrange(len(self._pipes))  # noqa: S311 - so that many producers begin at different groups

    def _rerouted(self) -> None:
        groups = self._links.locator.book.groups(self.target)
        if not self._is_closed:
            self._update(groups or {})  # none: the subject was deleted, and who sends asks anew
            for pipe in self._pipes:
                pipe.moved()
            self.pump()

    # --- time ----------------------------------------------------------------------------------------------------------

    def _watch_time(self) -> None:
        """Wake up when the first of the batches that wait is out of time."""
        if self._expiry is None and not self._is_closed:
            ends = [pipe.retries[0].until for pipe in self._pipes if pipe.retries]
            if self.pool:
                ends.append(self.pool[0].until)
            if ends:
                self._expiry = self._loop.call_at(min(ends), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self._loop.time()
        while self.pool and self.pool[0].until <= now:
            batch = self.pool.popleft()
            troubles = [pipe.trouble for pipe in self._pipes if pipe.is_writable and pipe.trouble is not None]
            self._sender.failed(batch, final(batch.failure or next(iter(troubles), self._trouble), batch))
        for pipe in self._pipes:
            pipe.expire(now)
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
        self._links.locator.unlisten(self.target, self._rerouted)
        if self._finding is not None:
            self._finding.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        for pipe in self._pipes:
            pipe.abort(fail)
        while self.pool:
            fail(self.pool.popleft(), False)
