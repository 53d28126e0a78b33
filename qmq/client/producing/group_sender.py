"""A producer's senders, one for each broker group it uses, and the pool of batches that are not
sent yet.

A batch is assigned to a group at the moment it is sent, so a stalled group delays only the batches
that are in flight there:

    closed batch -> pool -> a sender with room
    certainly not stored -> pool again, in its place

Rules:
* `Balancer` (qmq/delivery/balancer.py) says which sender gets the next batch. A sender that is
  skipped because it is not connected yet is connected meanwhile, one at a time.
* If no group takes messages, batches wait until they time out, and their error says why.

A `GroupSender` sends one producer's batches to one broker group, through changes of the group's
master. `SenderWindow` (`batch.py`) decides about batches. The sender owns the connection, and puts
decided batches into the pool.

`MasterConnection` is what all senders of batches have in common: the connection to a broker group's
master sends the batches of a window, and reports answers, lost connections and time to the window.
It follows the group's masters: after NotMaster, or news of another master, it connects there, and
late answers of the old master still count. Subclasses say how a batch is encoded, whether a
connection is needed, and what to do with the batches when no master can be found.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, Generic, TypeVar

from qmq import limits
from qmq.client.connection.connection import Connection
from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import Master, described
from qmq.client.producing.batch import Batch, BatchPool, DecidedBatch, SenderWindow
from qmq.delivery.balancer import Balancer
from qmq.delivery.window import InFlightBatch, InFlightWindow
from qmq.errors import (
    CallerError,
    NotConnected,
    NotMaster,
    PeerError,
    QmqError,
    ReadOnly,
    Unavailable,
)
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Compression
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import Produced

INFLIGHT_BYTES_MAX: Final = 8 * limits.MIB

B = TypeVar("B", bound=InFlightBatch)


class MasterConnection(Generic[B]):
    """`target` is the locator's name for the destination. `encode` returns the encoded batch, or
    raises QmqError. `changed` tells the owner of changes; `answered`, if it is given, of those that
    an answer made.
    """

    kind: int = FrameKind.PRODUCE
    """PRODUCE, or one of the frames of other `acks`."""

    def __init__(
        self,
        links: ConnectionPool,
        target: str,
        group: str,
        window: InFlightWindow[B],
        encode: Callable[[B], tuple[bytes, ...]],
        changed: Callable[[], None],
        answered: Callable[[], None] | None = None,
    ) -> None:
        self.group = group
        self.connection: Connection | None = None
        self.is_closed = False
        self._links = links
        self._answer_s = links.timing.answer_s
        self._target = target
        self._window = window
        self._encode = encode
        self._notify, self._notify_answered = changed, answered or changed
        self._loop = asyncio.get_running_loop()
        self._master: Master | None = None
        self._is_confirmed = False
        self._room_bytes = 0
        self._answers = 0
        self._wake: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._is_watched = False
        self._reaching: asyncio.Task[None] | None = None

    # --- what subclasses say ----------------------------------------------------------------------

    def _stored(self, batch: B, produced: Produced, now: float) -> None:
        """Tell the window that the batch is stored."""
        raise NotImplementedError

    @property
    def _is_needed(self) -> bool:
        """Whether batches wait to be sent, now or soon."""
        raise NotImplementedError

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        """Whether to give up, because waiting for a master will not help: the subject is gone, or
        the client is closed.
        """
        raise NotImplementedError

    def _tick(self, now: float) -> None:
        """Pass the time to the window."""
        self._window.tick(now)

    # --- the way out ------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what may be sent now, or connect if batches wait."""
        if self.is_closed:
            return
        connection = self.connection
        if connection is None:
            self.reach()
        elif connection.is_open and connection.stream.is_writable:
            now = self._loop.time()
            while (
                batch := self._window.next(now, self._room_bytes - connection.produce_bytes)
            ) is not None:
                self.transmit(connection, batch)
        self._arm()

    def transmit(self, connection: Connection, batch: B) -> None:
        """Send a batch that counts as sent in the window."""
        attempt = batch.attempts
        try:
            if batch.encoded is None:
                batch.encoded = self._encode(batch)
        except QmqError as failure:
            self._loop.call_soon(self._answered, connection, batch, attempt, failure)
            return
        left_s = min(max(batch.until - self._loop.time(), 0.1), self._answer_s)
        connection.request(
            self.kind,
            partial(self._answered, connection, batch, attempt),
            *batch.encoded,
            timeout_s=left_s,
        )
        if not self._is_watched:
            self._is_watched = True
            self._links.answer_watch.expect(self._check_answers, self._answers, self._loop)

    # --- the way back -----------------------------------------------------------------------------

    def _answered(
        self, connection: Connection, batch: B, attempt: int, answer: Frame | QmqError
    ) -> None:
        if isinstance(answer, QmqError):
            self._is_confirmed = False
            self._window.refused(batch, attempt, answer, self._loop.time())
            self._refused(connection, answer)
        else:
            self._stored(batch, wire.unpack_one_produced(answer.payload), self._loop.time())
            self._answers += 1
            if not self._is_confirmed:
                self._is_confirmed = True
                self._links.locator.confirm(self.group)
            if not self._window.flight:
                self._is_watched = False
                self._links.answer_watch.expected.pop(self._check_answers, None)
        if not self.is_closed:
            self._notify_answered()

    def _refused(self, connection: Connection, failure: QmqError) -> None:
        """Handle what a refusal says about the group."""
        if self.is_closed:
            return
        if isinstance(failure, ReadOnly):
            self._links.locator.refresh(self._target)
        if (
            isinstance(failure, NotMaster)
            and connection is self.connection
            and self._master is not None
        ):
            self._links.locator.doubt(self.group, self._master)
            self._leave(failure)
        self._arm()

    def _check_answers(self, answers_before: int) -> int | None:
        """Check once a second, while batches are unanswered, whether the group answers at all."""
        self._is_watched = False
        if not self._window.flight or self.is_closed:
            return None
        if self._answers == answers_before and self.connection is not None:
            self._window.stalled()
            self._links.locator.refresh(self._target)
            self._notify()
        if self._is_watched or self.is_closed:  # the owner has sent a batch meanwhile
            return None
        self._is_watched = True
        return self._answers

    # --- time -------------------------------------------------------------------------------------

    def _arm(self) -> None:
        at = self._window.wake_at(self._loop.time())
        if at < self._wakes_at and not self.is_closed:
            if self._wake is not None:
                self._wake.cancel()
            self._wakes_at, self._wake = at, self._loop.call_at(at, self._woken)

    def _woken(self) -> None:
        self._wakes_at, self._wake = math.inf, None
        self._tick(self._loop.time())
        self._notify()

    # --- masters come and go ----------------------------------------------------------------------

    def reach(self, *, ahead: bool = False) -> None:
        """Find the master and connect, repeatedly while batches wait; with `ahead` once, to be
        ready soon.
        """
        if (
            self._reaching is None
            and self.connection is None
            and not self.is_closed
            and (ahead or self._is_needed)
        ):
            self._reaching = self._loop.create_task(self._reach(ahead))

    async def _reach(self, ahead: bool) -> None:
        failures = 0
        try:
            while (ahead or self._is_needed) and self.connection is None and not self.is_closed:
                ahead = False
                try:
                    self._use(*await self._links.reach(self._target, self.group))
                except (Unavailable, PeerError) as failure:
                    failures = 0
                    self._unreached(failure)
                except QmqError as failure:
                    failures += 1
                    if await self._gives_up(failure, failures):
                        return
        finally:
            self._reaching = None
        self._changed()

    def _unreached(self, failure: QmqError) -> None:
        self._window.disconnected(failure)
        self._notify()

    def _use(self, master: Master, connection: Connection) -> None:
        if not connection.is_open or self.is_closed:
            return
        self._master, self.connection = master, connection
        self._is_confirmed = False
        self._room_bytes = min(INFLIGHT_BYTES_MAX, connection.inflight_bytes_max)
        connection.on_closed[self._lost] = None
        connection.on_writable[self.pump] = None
        self._window.connected()

    def moved(self) -> None:
        """Routes changed: if the group has another master now, connect to that one."""
        known = self._links.locator.book.master(self.group)
        if self.connection is not None and known is not None and known != self._master:
            self._leave(NotConnected(f"broker group {self.group} has another master"))
            self.pump()

    def _leave(self, cause: QmqError) -> None:
        if self._detach():
            self._window.disconnected(cause)

    def _detach(self) -> bool:
        """Drop the connection. Returns whether there was one."""
        connection, self.connection = self.connection, None
        if connection is None:
            return False
        connection.on_closed.pop(self._lost, None)
        connection.on_writable.pop(self.pump, None)
        return True

    def _lost(self) -> None:
        self._leave(NotConnected(f"the connection to broker group {self.group} ended"))
        self._loop.call_soon(self._changed)

    def _changed(self) -> None:
        if not self.is_closed:
            self._notify()

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Send no more batches; late answers are ignored."""
        self.is_closed = True
        self._detach()
        if self._wake is not None:
            self._wake.cancel()
        if self._reaching is not None:
            self._reaching.cancel()


INFLIGHT_BATCHES_MAX: Final = 32
"""Half of the batches that a broker remembers for each producer (qmq/log/queue.py), so that it
always recognises a retry.
"""


class BrokerGroupDestination:
    """The destination of an unordered subject's batches: any of its broker groups. Delayed messages
    have another one (`delayed.py`).

    `target` is the name under which the locator knows the subject (qmq/client/metadata/cache.py);
    `kind` is PRODUCE, or one of the frames of other `acks`.
    """

    def __init__(
        self,
        target: str,
        kind: int,
        subject: str,
        producer_id: int,
        compression: Compression = Compression.NONE,
    ) -> None:
        self.target, self.kind = target, kind
        self._subject = subject.encode()
        self._producer_id = producer_id
        self._compression = compression

    @property
    def inflight_max(self) -> int:
        """How many batches may be in flight to one broker group."""
        return INFLIGHT_BATCHES_MAX

    def usable(self, groups: Mapping[str, bool]) -> Mapping[str, bool]:
        """Choose the groups to use among the broker groups (and whether each is writable)."""
        return groups

    def encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises MessageTooLarge, InvalidArgument."""
        return encode(
            self._subject,
            batch.columns,
            producer_id=self._producer_id,
            batch_sequence=batch.sequence,
            create_time_ms=batch.create_time_ms,
            flags=batch.flags,
            compression=self._compression,
        )


class GroupSender(MasterConnection[Batch]):
    """`answered` is called after each answer, `changed` after every other change."""

    def __init__(
        self,
        links: ConnectionPool,
        destination: BrokerGroupDestination,
        group: str,
        pool: BatchPool,
        *,
        answered: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self.window = SenderWindow(destination.inflight_max)
        super().__init__(
            links, destination.target, group, self.window, destination.encode, self.pump, answered
        )
        self.kind = destination.kind
        self.is_writable = True
        self._pool = pool
        self._after_change = changed

    @property
    def is_stalled(self) -> bool:
        """Whether the group has not answered for a while: then it gets no new batches if there is
        another group.
        """
        return self.window.is_stalled

    # --- the way out ------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Whether a new batch of `size` bytes can be sent now."""
        connection, window = self.connection, self.window
        return (
            connection is not None
            and not (window.flight and window.has_retries)
            and window.has_room(
                size, self._loop.time(), self._room_bytes - connection.produce_bytes
            )
            and connection.is_open
            and connection.stream.is_writable
        )

    def pump(self) -> None:
        """Send batches to be sent again, then new ones."""
        super().pump()
        self._after_change()

    # --- the way back -----------------------------------------------------------------------------

    def _stored(self, batch: Batch, produced: Produced, now: float) -> None:
        window = self.window
        if window.acknowledged(batch, now):
            self._pool.decided.append(DecidedBatch(batch, produced, self.group))
        if window.flight:
            self._send_again()

    def _refused(self, connection: Connection, failure: QmqError) -> None:
        super()._refused(connection, failure)
        self._report()
        self._send_again()

    def _send_again(self) -> None:
        """Send the batches that are to be sent again, before any new one."""
        if self.window.has_retries:
            super().pump()

    def _report(self) -> None:
        for batch, failure in self.window.take_failed():
            self._pool.failed(batch, failure)
        for batch in self.window.take_requeued():
            self._pool.requeue(batch)

    @property
    def _is_needed(self) -> bool:
        return not self.is_closed and bool(
            self.window.flight or (self.is_writable and self._pool.waiting)
        )

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        self.window.disconnected(failure)
        self.window.fail_retries(failure)
        self._report()
        self._pool.give_up(failure)
        self._loop.call_soon(self._changed)
        return True

    # --- the end ----------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Fail batches that were to be sent again and have timed out."""
        self.window.expire(now)
        self._report()

    def abort(self, fail: Callable[[Batch, bool], None]) -> None:
        """End now: `fail` is called for each batch,
        with whether its answer is still outstanding.
        """
        self.close()
        for batch in self.window.drop():
            fail(batch, batch.unanswered > 0)


STAY_BYTES: Final = 2 * limits.MIB
"""Bytes sent to a broker group before the next group's turn."""


class GroupSenders:
    """`answered` is called after each answer: time to take what is decided and to send the open
    batch. `changed` is called after every other change: time to take what is decided, and to send
    the open batch if the senders are idle.
    """

    def __init__(
        self,
        links: ConnectionPool,
        destination: BrokerGroupDestination,
        *,
        answered: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._target = destination.target
        self._destination = destination
        self._answered, self._notify = answered, changed
        self._pool = BatchPool()
        self.waiting: Final = self._pool.waiting
        """Batches that no sender has taken; after a new one is added, `send` is called."""
        self.decided: Final = self._pool.decided
        """Batches that were decided, and that the producer has not taken out."""
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._balancer = Balancer(
            self._make,
            GroupSender.has_room,
            stay_bytes=STAY_BYTES,
            first=random.randrange,  # so that many producers begin with different groups
            turned=self._picked,
        )
        self._trouble: QmqError | None = None
        self._finding: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __iter__(self) -> Iterator[GroupSender]:
        return iter(self._balancer)

    # --- the way out ------------------------------------------------------------------------------

    def send(self) -> None:
        """Send what waits, as far as senders have room."""
        waiting, balancer = self.waiting, self._balancer
        while waiting:
            sender = balancer.pick(waiting[0].size)
            if sender is None or sender.connection is None:  # a sender with room has one
                self._wait()
                return
            batch = waiting.popleft()
            balancer.charge(batch.size)
            sender.window.send(batch)
            sender.transmit(sender.connection, batch)

    def _changed(self) -> None:
        """A sender changed: send what can be sent, perhaps the open batch, too."""
        if not self._is_closed:
            self.send()
            self._notify()
            self._watch_time()

    @property
    def is_idle(self) -> bool:
        """Whether no batch is in flight at the sender that gets the next one: then the open batch
        need not gather more.
        """
        if self._pool.waiting:
            return False
        if not any([each.window.is_sending for each in self._balancer]):  # noqa: C419 - faster than a generator
            return True
        sender = self._balancer.pick(0)
        if sender is not None:
            return not sender.window.is_sending
        return not any(
            each.window.is_sending and each.connection is not None and not each.is_stalled
            for each in self._balancer
        )

    def _picked(self, chosen: GroupSender | None, passed: list[GroupSender]) -> None:
        if chosen is not None:
            self._links.locator.touch(self._target)
        for sender in passed:
            if sender.connection is None:
                sender.reach(ahead=True)
                if sender.window.trouble is None:
                    break

    # --- the way back -----------------------------------------------------------------------------

    @property
    def has_groups(self) -> bool:
        """Whether the subject's broker groups are known."""
        return bool(self._balancer)

    # --- which groups there are -------------------------------------------------------------------

    def _wait(self) -> None:
        """Batches wait and no sender takes them: look for other groups."""
        if self._finding is None and not self._is_closed and not self._balancer.is_writable:
            self._finding = self._loop.create_task(self._find())
        self._watch_time()

    async def _find(self) -> None:
        try:
            while self._pool.waiting and not self._is_closed:
                try:
                    self._update(
                        await self._links.locator.groups(self._target, refresh=bool(self._balancer))
                    )
                except CallerError as failure:
                    self._pool.give_up(failure)
                    self._answered()
                    continue
                except QmqError as failure:
                    self._trouble = failure
                    continue
                if self._balancer.is_writable:
                    return
                self._trouble = ReadOnly(
                    f"all broker groups of {described(self._target)} are drained: resume one "
                    "with `qmq broker resume`"
                )
        finally:
            self._finding = None
            self._changed()

    def _update(self, groups: Mapping[str, bool]) -> None:
        if not self._balancer:
            self._links.locator.listen(self._target, self._rerouted)
        self._balancer.learn(self._destination.usable(groups))

    def _make(self, group: str) -> GroupSender:
        return GroupSender(
            self._links,
            self._destination,
            group,
            self._pool,
            answered=self._answered,
            changed=self._changed,
        )

    def _rerouted(self) -> None:
        groups = self._links.locator.book.groups(self._target)
        if not self._is_closed:
            self._update(
                groups or {}
            )  # none: the subject was deleted, and the next `send` asks again
            for sender in self._balancer:
                sender.moved()
            self._changed()

    # --- time -------------------------------------------------------------------------------------

    def _watch_time(self) -> None:
        """Wake up when the first waiting batch times out."""
        if self._expiry is None and not self._is_closed:
            ends = [
                sender.window.retries[0].until
                for sender in self._balancer
                if sender.window.has_retries
            ]
            if self._pool.waiting:
                ends.append(self._pool.waiting[0].until)
            if ends:
                self._expiry = self._loop.call_at(min(ends), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self._loop.time()
        troubles = [
            sender.window.trouble
            for sender in self._balancer
            if sender.is_writable and sender.window.trouble is not None
        ]
        self._pool.expire(now, next(iter(troubles), self._trouble))
        for sender in self._balancer:
            sender.expire(now)
        self._changed()

    # --- the end ----------------------------------------------------------------------------------

    def abort(self, fail: Callable[[Batch, bool], None]) -> None:
        """End now: `fail` is called for each batch,
        with whether its answer is still outstanding.
        """
        self._is_closed = True
        self._links.locator.unlisten(self._target, self._rerouted)
        if self._finding is not None:
            self._finding.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        for sender in self._balancer:
            sender.abort(fail)
        while self._pool.waiting:
            fail(self._pool.waiting.popleft(), False)
