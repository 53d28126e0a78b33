"""A producer's pipes, one for each broker group it uses, and the pool of batches that are not sent yet.

A batch is assigned to a group at the moment it is sent, so a stalled group delays only the batches that are in flight there:

    closed batch -> pool -> a pipe with room
    certainly not stored -> pool again, in its place

Rules:
* `Balancer` (qmq/delivery/balancer.py) says which pipe gets the next batch. A pipe that is skipped because it is not connected yet is
  connected meanwhile, one at a time.
* If no group takes messages, batches wait until they time out, and their error says why.

A pipe sends one producer's batches to one broker group, through changes of the group's master. `SenderWindow` decides about batches. The
pipe owns the connection, and puts decided batches into the pool.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from qmq import limits
from qmq.client.connection.connection import Connection
from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import spoken
from qmq.client.producing.batch import Batch
from qmq.client.producing.master_connection import MasterConnection
from qmq.client.producing.sender_window import BatchPool, DecidedBatch, SenderWindow
from qmq.delivery.balancer import Balancer
from qmq.errors import CallerError, QmqError, ReadOnly
from qmq.wire.frame_payloads import Produced

INFLIGHT_BATCHES_MAX: Final = 32
"""Half of the batches that a broker remembers for each producer (qmq/log/producers.py), so that it always recognises a retry."""


class BatchDestination(Protocol):
    """The destination and the encoding of a producer's batches: the difference between the kinds of producers."""

    target: str
    """The target under which the locator knows the subject (qmq/client/metadata/cache.py)."""
    kind: int
    """PRODUCE, or one of the frames of other `acks`."""

    @property
    def inflight_max(self) -> int:
        """How many batches may be in flight to one broker group."""
        ...

    def usable(self, groups: Mapping[str, bool]) -> Mapping[str, bool]:
        """Choose the groups to use among the broker groups (and whether each is writable)."""
        ...

    def encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises QmqError."""
        ...


class GroupSender(MasterConnection[Batch]):
    """`answered` is called after each answer, `changed` after every other change."""

    def __init__(
        self,
        links: ConnectionPool,
        destination: BatchDestination,
        group: str,
        pool: BatchPool,
        *,
        answered: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self.window = SenderWindow(destination.inflight_max)
        super().__init__(links, destination.target, group, self.window, self.pump)
        self.kind = destination.kind
        self.is_writable = True
        self._destination = destination
        self._pool = pool
        self._after_answers = answered
        self._after_change = changed

    @property
    def is_stalled(self) -> bool:
        """Whether the group has not answered for a while: then it gets no new batches if there is another group."""
        return self.window.is_stalled

    # --- the way out ---------------------------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Whether a new batch of `size` bytes can be sent now."""
        connection, window = self.connection, self.window
        return (
            connection is not None
            and not window.has_retries
            and window.has_room(size, self._loop.time(), self._room_bytes - connection.produce_bytes)
            and connection.is_open
            and connection.stream.is_writable
        )

    def transmit(self, batch: Batch) -> None:
        """Send a batch; there must be room."""
        assert self.connection is not None
        self.window.send(batch)
        self._transmit(self.connection, batch)

    def pump(self) -> None:
        """Send batches to be sent again, then new ones."""
        super().pump()
        self._after_change()

    def _encode(self, batch: Batch) -> tuple[bytes, ...]:
        return self._destination.encode(batch)

    # --- the way back --------------------------------------------------------------------------------------------------

    def _stored(self, batch: Batch, produced: Produced, now: float) -> None:
        if self.window.acknowledged(batch, now):
            self._pool.stored(self.group, batch, produced)

    def _refused(self, connection: Connection, failure: QmqError) -> None:
        super()._refused(connection, failure)
        self._report()

    def _report(self) -> None:
        for batch, failure in self.window.take_failed():
            self._pool.failed(batch, failure)
        for batch in self.window.take_given_back():
            self._pool.give_back(batch)

    def _after_answer(self) -> None:
        if self.window.has_retries:
            super().pump()
        self._after_answers()

    @property
    def _is_needed(self) -> bool:
        return not self.is_closed and bool(self.window.flight or (self.is_writable and self._pool.waiting))

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        self.window.disconnected(failure)
        self.window.fail_retries(failure)
        self._report()
        self._pool.give_up(failure)
        self._loop.call_soon(self._changed)
        return True

    # --- the end -------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Fail batches that were to be sent again and have timed out."""
        self.window.expire(now)
        self._report()

    def abort(self, fail: Callable[[Batch, bool], None]) -> None:
        """End now: `fail` is called for each batch, with whether its answer is still outstanding."""
        self.close()
        for batch in self.window.drop():
            fail(batch, batch.unanswered > 0)


STAY_BYTES: Final = 2 * limits.MIB
"""Bytes sent to a broker group before the next group's turn."""


class GroupSenders:
    """`answered` is called after each answer: time to take what is decided and to send the open batch. `changed` is called after every
    other change: time to take what is decided, and to send the open batch if the pipes are idle.
    """

    def __init__(
        self, links: ConnectionPool, destination: BatchDestination, *, answered: Callable[[], None], changed: Callable[[], None]
    ) -> None:
        self._target = destination.target
        self._destination = destination
        self._answered, self._tell = answered, changed
        self._pool = BatchPool()
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._balancer = Balancer(
            self._make,
            GroupSender.has_room,
            stay_bytes=STAY_BYTES,
            first=random.randrange,  # so that many producers begin with different groups
            turned=self._turned,
        )
        self._trouble: QmqError | None = None
        self._finding: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __iter__(self) -> Iterator[GroupSender]:
        return iter(self._balancer)

    # --- the way out ---------------------------------------------------------------------------------------------------

    def put(self, batch: Batch) -> None:
        """Add a batch; it is sent as soon as a pipe has room."""
        waiting = self._pool.waiting
        if waiting:
            waiting.append(batch)
            self.send()
            return
        pipe = self._balancer.pick(batch.size)
        if pipe is None:
            waiting.append(batch)
            self._wait()
            return
        self._balancer.charge(batch.size)
        pipe.transmit(batch)

    def send(self) -> None:
        """Send what can be sent."""
        waiting, balancer = self._pool.waiting, self._balancer
        while waiting:
            pipe = balancer.pick(waiting[0].size)
            if pipe is None:
                self._wait()
                return
            batch = waiting.popleft()
            balancer.charge(batch.size)
            pipe.transmit(batch)

    def _changed(self) -> None:
        """A pipe changed: send what can be sent, perhaps the open batch, too."""
        if not self._is_closed:
            self.send()
            self._tell()
            self._watch_time()

    @property
    def is_idle(self) -> bool:
        """Whether no batch is in flight at the pipe that gets the next one: then the open batch need not gather more."""
        if self._pool.waiting:
            return False
        if not any([each.window.is_sending for each in self._balancer]):  # noqa: C419 - faster than a generator
            return True
        pipe = self._balancer.pick(0)
        if pipe is not None:
            return not pipe.window.is_sending
        return not any(each.window.is_sending and each.connection is not None and not each.is_stalled for each in self._balancer)

    def _turned(self, chosen: GroupSender | None, passed: list[GroupSender]) -> None:
        if chosen is not None:
            self._links.locator.touch(self._target)
        for pipe in passed:
            if pipe.connection is None:
                pipe.reach(ahead=True)
                if pipe.window.trouble is None:
                    break

    # --- the way back --------------------------------------------------------------------------------------------------

    @property
    def has_groups(self) -> bool:
        """Whether the subject's broker groups are known."""
        return bool(self._balancer)

    def take_decided(self) -> list[DecidedBatch]:
        """The batches that were decided since the last call."""
        return self._pool.take_decided()

    # --- which groups there are ----------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Batches wait and no pipe takes them: look for other groups."""
        if self._finding is None and not self._is_closed and not self._balancer.is_writable:
            self._finding = self._loop.create_task(self._find())
        self._watch_time()

    async def _find(self) -> None:
        try:
            while self._pool.waiting and not self._is_closed:
                try:
                    self._update(await self._links.locator.groups(self._target, refresh=bool(self._balancer)))
                except CallerError as failure:
                    self._pool.give_up(failure)
                    self._answered()
                    continue
                except QmqError as failure:
                    self._trouble = failure
                    continue
                if self._balancer.is_writable:
                    return
                self._trouble = ReadOnly(f"all broker groups of {spoken(self._target)} are drained: resume one with `qmq broker resume`")
        finally:
            self._finding = None
            self._changed()

    def _update(self, groups: Mapping[str, bool]) -> None:
        if not self._balancer:
            self._links.locator.listen(self._target, self._rerouted)
        self._balancer.learn(self._destination.usable(groups))

    def _make(self, group: str) -> GroupSender:
        return GroupSender(self._links, self._destination, group, self._pool, answered=self._answered, changed=self._changed)

    def _rerouted(self) -> None:
        groups = self._links.locator.book.groups(self._target)
        if not self._is_closed:
            self._update(groups or {})  # none: the subject was deleted, and the next `send` asks again
            for pipe in self._balancer:
                pipe.moved()
            self._changed()

    # --- time ----------------------------------------------------------------------------------------------------------

    def _watch_time(self) -> None:
        """Wake up when the first waiting batch times out."""
        if self._expiry is None and not self._is_closed:
            ends = [pipe.window.retries[0].until for pipe in self._balancer if pipe.window.has_retries]
            if self._pool.waiting:
                ends.append(self._pool.waiting[0].until)
            if ends:
                self._expiry = self._loop.call_at(min(ends), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self._loop.time()
        troubles = [pipe.window.trouble for pipe in self._balancer if pipe.is_writable and pipe.window.trouble is not None]
        self._pool.expire(now, next(iter(troubles), self._trouble))
        for pipe in self._balancer:
            pipe.expire(now)
        self._changed()

    # --- the end -------------------------------------------------------------------------------------------------------

    def abort(self, fail: Callable[[Batch, bool], None]) -> None:
        """End now: `fail` is called for each batch, with whether its answer is still outstanding."""
        self._is_closed = True
        self._links.locator.unlisten(self._target, self._rerouted)
        if self._finding is not None:
            self._finding.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        for pipe in self._balancer:
            pipe.abort(fail)
        while self._pool.waiting:
            fail(self._pool.waiting.popleft(), False)
