"""The consumer of an ordered subject: reads the lanes that it is assigned, and hands out their
messages, in order for each key.

    SyncMember ──▶ lanes ──▶ LaneReader for each ──▶ LaneInbox ──▶ the application
                                  ◀── verdicts ────────────────────────┘

    await consumer.run(handler)     as many keys at once as `concurrency`; acknowledged when the
                                    handler returns, failed when it raises
    async for message in consumer   one at a time; acknowledged when the task that got it asks for
                                    the next one (`task_messages.py`)
    ack="explicit"                  acknowledged by `await message.ack()`; the application may have
                                    several at once, of different keys

    async for messages in consumer.batches()   many of one lane at a time, as lists; acknowledged
                                               when the loop asks for the next list
    await consumer.pull()                      one such list; acknowledged by the application

Rules:
* A consumer reads single messages or in bulk; its first call decides which, for good. In bulk, the
  application has at most one slice of a lane at a time, and a verdict holds for the whole slice. So
  a failure blocks the lane, and no key is parked.
* The application has at most one message of a key at a time, in every mode: it gets the next one
  when the previous one was acknowledged (or parked after its last failure). Otherwise a failed
  message could not be retried before later ones. A message without a verdict blocks its key until
  the consumer closes, even if the message is stale: settle every message.
* The next message of a key does not wait until the acknowledgement is committed. If the
  acknowledgement is lost with its lane, the lane's next consumer begins at the first message
  without a committed acknowledgement: a replay, in order.
* When a lane is taken away, it hands out nothing more. Handlers may finish its messages for half a
  lease; then these are settled and the lane is given up. Other lanes are unaffected. The same range
  under another version is the same lane.
* If a range is assigned again, or a part of it, it waits until this consumer has given up its old
  lane.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from qmq_ordering.lanes import Lane

from qmq import limits
from qmq.client.connection.pool import ConnectionPool
from qmq.client.consuming import ReadyMessages
from qmq.client.consuming.consumer import Consumer, default_name
from qmq.client.consuming.message import Message
from qmq.client.consuming.ordered.lane import FailurePolicy
from qmq.client.consuming.ordered.lane_reader import (
    LaneCalls,
    LaneInbox,
    LaneReader,
    LaneTerms,
    PullWrites,
)
from qmq.client.consuming.ordered.membership import LaneMembership, Member, SyncMember
from qmq.client.consuming.ordered.message import (
    DecompressedBatches,
    OrderedMessage,
    OrderedMessages,
)
from qmq.client.consuming.session import LoopSlice, check_limits, clock_of
from qmq.client.metadata.cache import shared
from qmq.client.producing.producer import ignored
from qmq.client.task_messages import TaskLoop, TaskMessages
from qmq.errors import ClientClosed, InvalidArgument, OrderMismatch, QmqError
from qmq.model import check_name

log = logging.getLogger("qmq.client")

PREFETCH: Final = 8_000
"""Four times as many as an unordered consumer holds, because they are divided among the lanes."""
PREFETCH_BYTES: Final = 64 * limits.MIB
LEASE_MS: Final = 10_000
CONCURRENCY: Final = 64
PULL_BYTES: Final = limits.MIB

Handler = Callable[[OrderedMessage], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedConsumerOptions:
    """The options of an ordered consumer; `Client.ordered_consumer` describes them. Raises
    InvalidArgument.
    """

    name: str | None = None
    start: str = "earliest"
    gate: str = ""
    ack: str = "auto"
    policy: FailurePolicy
    prefetch: int = PREFETCH
    prefetch_bytes: int = PREFETCH_BYTES
    pull_bytes: int = PULL_BYTES
    lease_ms: int = LEASE_MS
    condition: str = ""

    def __post_init__(self) -> None:
        if (
            self.ack not in ("auto", "explicit")
            or self.start not in ("earliest", "latest")
            or self.gate not in ("", "strict", "lanes")
        ):
            raise InvalidArgument(
                "ack is 'auto' or 'explicit', start 'earliest' or 'latest', gate 'strict', "
                "'lanes' or '' (unchanged)"
            )
        check_limits(self.prefetch, self.prefetch_bytes)


class OrderedConsumer:
    """One consumer of a group of an ordered subject. Make it with `Client.ordered_consumer`.

    `stale` counts messages that this consumer lost after they were handed out and before they were
    settled: they are handed out again.
    """

    def __init__(
        self,
        links: ConnectionPool,
        sync: SyncMember,
        subject: str,
        group: str,
        options: OrderedConsumerOptions,
        *,
        on_closed: Callable[[Self], object] = ignored,
    ) -> None:
        self.subject = check_name("subject", subject)
        self.group = check_name("group", group)
        self.incarnation = os.urandom(8).hex()
        self.name = (
            check_name("consumer", options.name) if options.name else default_name(self.incarnation)
        )
        self.lease_ms = options.lease_ms
        self.prefetch, self.prefetch_bytes = options.prefetch, options.prefetch_bytes
        self._terms = LaneTerms(
            self.subject,
            self.group,
            self.name,
            self.incarnation,
            options.lease_ms,
            options.pull_bytes,
            options.policy,
        )
        self._links = links
        self._loop = links.round.own_loop()
        self._slice = LoopSlice(self._loop)
        self._inbox = LaneInbox(self.name, links.round.at_end, lambda: self.ready.end())
        self._pull_writes = PullWrites(lambda: len(self._readers))
        self._lane_calls = LaneCalls(
            self._room, lambda: self.is_paused, self._finished, self._failed
        )
        self._decompressed = DecompressedBatches(options.prefetch_bytes)
        self._by_key, self._in_bulk = self._inbox.by_key, self._inbox.in_bulk
        self._readers: list[LaneReader] = []
        """The readers of the assigned lanes.
        A reader starts when no overlapping lane is held any more.
        """
        self._leaving: dict[LaneReader, asyncio.Task[None]] = {}
        member = Member(
            self.subject,
            self.group,
            self.name,
            self.incarnation,
            options.lease_ms,
            options.start,
            options.gate,
            options.condition,
        )
        self._membership = LaneMembership(
            sync, member, self._assigned, self._failed, links.timing.session_retry_s
        )
        self._failure: QmqError | None = None
        self._held: TaskMessages[OrderedMessage | OrderedMessages] | None = None
        """What tasks work on, with automatic acknowledgement; None without."""
        if options.ack == "auto":
            self._held = TaskMessages(
                self.name, self._loop, _ack, self._abandoned, options.lease_ms / 1000
            )
        self.ready: ReadyMessages[OrderedMessage] = ReadyMessages(
            OrderedMessage,
            clock_of(self._loop),
            self._next_in_sequence,
            self._next,
            self._held,
            one_by_one=True,
        )
        self._is_started = self._is_member = self._is_closing = self._is_paused = False
        self._closed = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._on_closed = partial(on_closed, self)

    @property
    def stale(self) -> int:
        """Messages that this consumer lost."""
        return self._inbox.stale

    @property
    def readers(self) -> Sequence[LaneReader]:
        """The readers of the assigned lanes, whether or not the lanes are granted yet."""
        return tuple(self._readers)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that brokers have granted to this consumer, sorted."""
        return tuple(sorted(each.lane for each in self._readers if each.session is not None))

    # --- for the application ----------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[OrderedMessage]:
        self._links.round.own_loop()
        return self.ready

    def __anext__(self) -> Coroutine[Any, Any, OrderedMessage]:
        self._links.round.own_loop()
        return self.ready.__anext__()

    def _next_in_sequence(self) -> OrderedMessage | None:
        """The next message, if it can be handed out without waiting. `ready` then may have the
        messages behind it: of each it asks whether the one before it is finished.
        """
        message = self._next_ready(in_sequence=self._held is not None)
        run = self._by_key.in_sequence
        if message is not None and run is not None and run.count:
            self.ready.begin(run, run.count, run.lane.sure_until_s)
        return message

    def _next_ready(self, *, in_sequence: bool = False) -> OrderedMessage | None:
        """The next message, if it can be handed out without waiting;
        most messages come this way.
        """
        inbox = self._inbox
        if inbox.is_bulk is not False or self._failure is not None or self._is_closing:
            return None
        while not self.is_paused:
            message = self._by_key.take(in_sequence=in_sequence)
            if message is None:
                break
            if self._is_readable(message):
                inbox.notify_next()
                return message
        return None

    async def join(self) -> None:
        """Return when this consumer is a member of its group: from then on, a group that begins at
        "latest" gets every message whose `send` begins. Without `join` a consumer joins when it is
        first asked for messages.

        Raises UnknownSubject, OrderMismatch, AccessDenied, ClientClosed.
        """
        while not self._is_member:
            self._check_open()
            self._start_running()
            await self._inbox.wait()
        self._inbox.notify()  # the change may be news for another waiter, too

    async def pull(
        self, messages_max: int = 1000, wait: timedelta = timedelta(seconds=20)
    ) -> OrderedMessages:
        """Up to `messages_max` consecutive messages of one lane, and fewer if their bodies have 8
        MiB; empty if none came within `wait`. Settle them with `ack`, `ack_later` or `fail`; until
        then their lane hands out nothing else. Lanes take turns.

        Raises MessagesExpired, LogDamaged, UnknownSubject, OrderMismatch, ClientClosed;
        InvalidArgument if the consumer reads one by one, or parks keys.
        """
        if not 0 < messages_max <= limits.CONSUMER_UNACKED_MAX:
            raise InvalidArgument(
                f"messages_max is 1 to {limits.CONSUMER_UNACKED_MAX}, not {messages_max}"
            )
        if not self._terms.policy.blocks:
            raise InvalidArgument(
                "reading in bulk fails as a whole, and cannot park single keys: use "
                "on_failure='block', or `run`"
            )
        self._links.round.own_loop()
        self._read(in_bulk=True)
        until_s = self._loop.time() + wait.total_seconds()
        if self._slice.clock() > self._slice.until_s:
            await self._slice.end()
        while True:
            self._check_open()
            runs = [] if self.is_paused else self._in_bulk.take(messages_max)
            if runs:
                self._inbox.notify()  # there may be another lane for another waiter
                return OrderedMessages(runs, self._inbox.finish_all, self._inbox.fail_all)
            self._start_running()
            is_changed = await self._inbox.wait(until_s)
            self._slice.begin()
            if not is_changed:
                return OrderedMessages([], self._inbox.finish_all, self._inbox.fail_all)

    def batches(self, messages_max: int = 1000) -> AsyncIterator[OrderedMessages]:
        """Repeated `pull`. Each batch is acknowledged when the task that got it asks for the next
        one, unless it was settled (`ack="auto"`).
        """
        return TaskLoop(self._held, partial(self._next_batch, messages_max))

    async def _next_batch(self, messages_max: int) -> OrderedMessages:
        while True:
            found = await self.pull(messages_max)
            if found.runs:
                return found

    async def take(
        self, messages_max: int = 32, wait: timedelta = timedelta(seconds=20)
    ) -> list[OrderedMessage]:
        """Up to `messages_max` messages of different keys, and fewer if their bodies have 8 MiB; an
        empty list if none came within `wait`. Each is settled by itself. Several messages may be
        unsettled at once; the next message of a key comes when the one before it is settled.
        Unsettled messages count towards `prefetch`. Raises as iteration does; InvalidArgument if
        the consumer reads in bulk.
        """
        if messages_max < 1:
            raise InvalidArgument(f"messages_max is 1 or more, not {messages_max}")
        self._links.round.own_loop()
        found: list[OrderedMessage] = []
        if self._slice.clock() > self._slice.until_s:
            await self._slice.end()
        message = self._next_ready()
        if message is None:
            try:
                async with asyncio.timeout(wait.total_seconds()):
                    message = await self._next_waited()
            except TimeoutError:
                return found
        size = 0
        while message is not None:
            found.append(message)
            size += len(message.body)
            message = (
                self._next_ready()
                if len(found) < messages_max and size < limits.PULL_BYTES_MAX
                else None
            )
        return found

    async def run(self, handler: Handler, *, concurrency: int = CONCURRENCY) -> None:
        """Call `handler` for every message, for up to `concurrency` messages at a time and never
        for two messages of one key. When the handler returns, the message is acknowledged; when it
        raises, the message has failed. Returns when the consumer is closed.

        Raises MessagesExpired, LogDamaged, UnknownSubject, OrderMismatch; before that, handlers
        finish. Cancelling `run` cancels the handlers, and their messages wait for another `run`.
        """
        if concurrency < 1:
            raise InvalidArgument(f"concurrency is 1 or more, not {concurrency}")
        self._links.round.own_loop()
        busy: set[asyncio.Task[Any]] = set()
        stop = asyncio.Event()
        over = self._loop.create_task(self._closed.wait())
        workers = [
            self._loop.create_task(self._work(handler, busy, stop)) for _ in range(concurrency)
        ]
        try:
            done, _ = await asyncio.wait((*workers, over), return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            failure = next((each.exception() for each in done if each is not over), None)
            if failure is None or (self._is_closing and isinstance(failure, ClientClosed)):
                await (
                    self._closed.wait()
                )  # `close` waits for unfinished messages, as long as this consumer holds them
                return
            await _cancel([each for each in workers if each not in busy])
            if busy:
                await asyncio.wait(set(busy))
            raise failure
        finally:
            await _cancel([over, *workers])

    async def _work(
        self, handler: Handler, busy: set[asyncio.Task[Any]], stop: asyncio.Event
    ) -> None:
        """Handle one message after another, until `stop`.
        `busy` has the tasks whose handler runs.
        """
        task = asyncio.current_task()
        assert task is not None
        try:
            while not stop.is_set():
                message = await anext(self.ready)
                busy.add(task)
                try:
                    await self._handle(handler, message)
                finally:
                    busy.discard(task)
        finally:
            # Of a worker that is dropped unfinished, another task may be the running one.
            if self._held is not None and asyncio.current_task() is task:
                self._held.take()  # it has a verdict

    async def _handle(self, handler: Handler, message: OrderedMessage) -> None:
        try:
            await handler(message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                log.warning("%s: the handler of %r cancelled itself", self.name, message)
                message.fail()
                return
            self._put_back(message)
            raise
        except Exception:
            log.warning("%s: the handler of %r failed", self.name, message, exc_info=True)
            message.fail()
        else:
            message.ack_later()

    @property
    def is_paused(self) -> bool:
        """Whether this consumer or its client was paused by the application. Brokers keep the
        pauses of operators; the consumer does not see them.
        """
        return self._is_paused or self._links.is_paused

    def pause(self) -> None:
        """Hand out nothing and pull nothing until `resume`. The consumer keeps its lanes and its
        messages: messages that were handed out may be settled as usual.
        """
        self._is_paused = True
        self.ready.end()

    def resume(self) -> None:
        """Resume delivery, unless the whole client is paused (`Client.pause`)."""
        self._is_paused = False
        self.pause_changed()

    def pause_changed(self) -> None:
        """The consumer may have been paused or resumed."""
        self.ready.end()
        if not self.is_paused:
            for reader in self._readers:
                reader.pull_more()
            self._inbox.notify()  # a waiter that finds a message wakes the next one

    # --- handing out ------------------------------------------------------------------------------

    def _read(self, *, in_bulk: bool) -> None:
        if self._inbox.is_bulk is None:
            self._inbox.is_bulk = in_bulk
        elif self._inbox.is_bulk is not in_bulk:
            ways = ("pull", "run and iteration") if in_bulk else ("run and iteration", "pull")
            raise InvalidArgument(
                f"this consumer was used with {ways[1]}; {ways[0]} would break the order of "
                "keys: make another consumer"
            )

    async def _next(self) -> OrderedMessage:
        if self._slice.clock() > self._slice.until_s:
            await self._slice.end()
        return self._next_in_sequence() or await self._next_waited(self._next_in_sequence)

    async def _next_waited(
        self, look: Callable[[], OrderedMessage | None] | None = None
    ) -> OrderedMessage:
        self._read(in_bulk=False)
        look = look or self._next_ready
        while True:
            self._check_open()
            message = look()
            if message is not None:
                return message
            self._start_running()
            await self._inbox.wait()
            self._slice.begin()

    def _is_readable(self, message: OrderedMessage) -> bool:
        """Whether the body of a message that is to be handed out can be decompressed. If not, the
        message has failed.
        """
        batch = message.batch
        if not batch.view.header.compression:
            return True
        failure = batch.unreadable
        if failure is not None:
            message.fail(error=failure)
            return False
        self._decompressed.used(batch)
        return True

    def _check_open(self) -> None:
        if self._is_closing or self._links.is_closed:
            raise ClientClosed("the consumer is closed: make a new one")
        self._links.round.own_loop()
        failure, self._failure = self._failure, None
        if failure is not None:
            for reader in self._readers:
                reader.failure = None
            raise failure

    def _start_running(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._links.locator.listen(self.subject, self._moved)
        self._membership.start()
        self._start_readers()
        for reader in self._readers:
            reader.pull_more()

    def _room(self) -> tuple[int, int]:
        """How many unfinished messages and bytes each lane may have: an equal part, so that no lane
        starves another.
        """
        lanes = max(len(self._readers), 1)
        return max(self.prefetch // lanes, 1), max(self.prefetch_bytes // lanes, 1)

    def _finished(self, lane: Lane) -> None:
        """The whole lane is done and committed, to its end."""
        if not self._is_closing:
            self._membership.finished(lane)

    def _failed(self, failure: QmqError) -> None:
        """Report to the application that a lane cannot continue."""
        self._failure = self._failure or failure
        self.ready.end()
        self._inbox.notify()

    # --- which lanes there are --------------------------------------------------------------------

    def _assigned(self, lanes: tuple[Lane, ...]) -> None:
        """A new assignment. Lanes that stay assigned are unaffected."""
        if self._is_closing:
            return
        wanted = {_identity(lane): lane for lane in lanes}
        for reader in [each for each in self._readers if _identity(each.lane) not in wanted]:
            self._let_go(reader, self.lease_ms / 2000)
        for reader in self._readers:
            reader.lane = wanted.pop(_identity(reader.lane))
        self._readers += [self._reader(lane) for lane in wanted.values()]
        self._start_readers()
        if not self._is_member:
            self._is_member = True
            self._inbox.notify_all()

    def _reader(self, lane: Lane) -> LaneReader:
        return LaneReader(
            self._links,
            self._inbox,
            self._terms,
            lane,
            self._pull_writes,
            self._lane_calls,
        )

    def _start_readers(self) -> None:
        """Start the readers of new lanes. A reader waits while this consumer still holds a part of
        the range under another lane.
        """
        for reader in self._readers:
            if not any(_overlap(reader.lane, other.lane) for other in self._leaving):
                reader.start()

    def _let_go(self, reader: LaneReader, grace_s: float, *, is_last: bool = False) -> None:
        self._readers.remove(reader)
        reader.release()
        self._leaving[reader] = task = self._loop.create_task(
            reader.leave(grace_s, is_last=is_last)
        )
        task.add_done_callback(lambda done: self._gone(reader, done))

    def _gone(self, reader: LaneReader, done: asyncio.Task[None]) -> None:
        del self._leaving[reader]
        if not done.cancelled() and done.exception() is not None:
            log.error("%s: releasing %s failed", self.name, reader.lane, exc_info=done.exception())
        if not self._is_closing:
            self._start_readers()

    def _moved(self) -> None:
        for reader in (*self._readers, *self._leaving):
            reader.sessions.moved()

    # --- the end ----------------------------------------------------------------------------------

    async def close(self, error: BaseException | None = None) -> None:
        """Let handlers finish, for half a lease; settle their messages, give up all lanes, and
        leave the group. A message that the calling task itself is handling, in its loop, counts as
        unfinished and will be delivered again. After an error, handlers are not waited for.
        Cancelling a call of `close` does not stop it; another call waits for the same end.
        """
        if self._links.round.is_over:  # what a consumer does to leave ended with the event loop
            self._is_closing = True
            self._on_closed()
            return
        self._links.round.own_loop()
        if self._closing is None:
            self._is_closing = True
            self.ready.end()
            self._inbox.notify_all()
            if self._held is not None:
                for each in self._held.take() if error is None else self._held.close():
                    self._put_back(each)
            self._closing = self._loop.create_task(
                self._close(0 if error is not None else self.lease_ms / 2000)
            )
        await shared(self._closing)

    async def _close(self, grace_s: float) -> None:
        try:
            self._links.locator.unlisten(self.subject, self._moved)
            for reader in list(self._readers):
                self._let_go(reader, grace_s, is_last=True)
            if self._leaving:
                await asyncio.wait(list(self._leaving.values()))
            await self._membership.leave()
        finally:
            if self._held is not None:
                self._held.close()
            self._closed.set()
            self._on_closed()

    def _abandoned(
        self, message: OrderedMessage | OrderedMessages, failure: BaseException | None
    ) -> None:
        """The task that got the message has ended."""
        if failure is not None:
            message.fail(error=failure)
        else:
            self._put_back(message)
            self._inbox.notify()

    def _put_back(self, message: OrderedMessage | OrderedMessages) -> None:
        """Hand the message out again, as if it had not been handed out."""
        if message.is_settled:
            return
        message.is_settled = True
        if isinstance(message, OrderedMessages):
            self._in_bulk.put_back(message)
        else:
            self._inbox.release(message.lane_run, message.pull_sequence)

    async def __aenter__(self) -> OrderedConsumer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(error)


def _ack(message: OrderedMessage | OrderedMessages) -> None:
    message.ack_later()


def _identity(lane: Lane) -> tuple[object, ...]:
    """Two lanes with the same identity are the same lane under different versions: the partition is
    the same in both.
    """
    return lane.partition, lane.range, lane.group


def _overlap(lane: Lane, other: Lane) -> bool:
    return lane.partition == other.partition and lane.range.overlaps(other.range)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


AnyMessage = Message | OrderedMessage
AnyConsumer = Consumer | OrderedConsumer


def fail(
    message: AnyMessage, delay: timedelta | None = None, error: str | BaseException = ""
) -> None:
    """Count a failed attempt: the message is handed out again, after the group's own delay if none
    is given.
    """
    if isinstance(message, Message):
        message.nack(delay, error)
    else:
        message.fail(delay, error)


async def joined(consumer: AnyConsumer) -> None:
    """Join the group. Raises as `join`; then the consumer is closed."""
    try:
        await consumer.join()
    except BaseException:
        await consumer.close()
        raise


async def joined_unordered(consumer: Consumer) -> bool:
    """Join the group. Returns False, with the consumer closed, if the subject is ordered: use an
    ordered consumer. Raises UnknownSubject, AccessDenied, ClientClosed; then the consumer is
    closed, too.
    """
    try:
        await joined(consumer)
    except OrderMismatch:
        return False
    return True
