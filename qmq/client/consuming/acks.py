"""Sends verdicts from the application to the current master of the queue.

    ack         -> gathered in `ConsumerAcks` -> collected in `PendingAcks` -> SettleRequest
                -> SETTLED: consecutive ones, as one range
    settle      -> collected in `PendingAcks` -> SettleRequest
                -> SETTLED: sent soon, with others
    settle_now  -> SettleRequest
                -> SETTLED: sent immediately; the caller waits

Rules:
* A request is kept until it is answered. If the session ends first, its verdicts are sent again in
  the next one, if this consumer still holds the messages. If they settle nothing then, the first
  request was effective, because another consumer cannot have had the messages in between.
* A message that this consumer no longer holds is *void* (`qmq/client/consuming/attachment.py` says
  when): no verdict on it is sent, since its pull sequence may name another message by then. A pull
  sequence alone does not distinguish them, so each message refers to the `ConsumerAcks` under which
  it was delivered, and a hold knows from which pull sequence on it is void.
* Verdicts that cannot be sent, or that have no answer when the session ends, are written to the
  client's spool (`qmq/client/consuming/settlements.py`) until they are answered, because this
  process may end first.
* A retry after more than `limits.REQUEUE_MS_MAX` is *postponed*: the message counts as held, and
  its verdict is given when a delay group has stored the copy or has refused it
  (`long_retries.py`). A verdict in the meantime is ignored, as after any verdict.

Worked example: pull sequences 0 to 9 came under hold A. A new master knows 0 to 5 only: A is void
from 6 on, and 6 comes again, under hold B, as another message. `A.settle(4, 7)` settles 4 and 5;
`B.settle(6, 6)` settles the new 6.

`SpoolSender` hands in the verdicts that an earlier client left in the spool (`settlements.py`), in
the background of a consumer:

    a file, locked ──reach its broker group's master──▶ ATTACH as that consumer, only to resume
        known still      SETTLE what is not void, DETACH: the rest goes back to the group; the file
                         is deleted
        not known        the lease was lost, the broker has put all messages back; the file is
                         deleted
        not reached      again after a pause; other files, and the consumer's own work, continue
                         meanwhile

A consumer that restarts under its name takes over the messages of its earlier incarnation. So the
verdicts of that incarnation are handed in before the consumer attaches to the same broker group
(`inherit`); verdicts of other names can wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Final

from qmq import limits
from qmq.client.connection.connection import Connection, OnAnswer, pause_s
from qmq.client.connection.pool import ConnectionPool, counted
from qmq.client.consuming import GatheredAcks
from qmq.client.consuming.long_retries import LongRetry
from qmq.client.consuming.message import BatchSlice, retry_ms
from qmq.client.consuming.session import (
    ANSWER_S,
    ConsumerCalls,
    ConsumerSession,
    SessionLoop,
    SubscriptionOptions,
)
from qmq.client.consuming.settlements import (
    AckBatch,
    AckSpool,
    QueueSpool,
    SettleRequest,
    SpoolFile,
    SpoolOwner,
    SpoolRemainder,
    UnackedRanges,
    count,
    in_frames,
    still_to_say,
)
from qmq.errors import (
    CallerError,
    ClientClosed,
    NotConnected,
    NotMaster,
    Outcome,
    QmqError,
    StaleDelivery,
    Unavailable,
    UnknownConsumer,
)
from qmq.process.event_loop import ms_of, require_alive
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.settle_payloads import BY_GROUP_MS, Verdict

log = logging.getLogger("qmq.client")

SETTLE_DELAY_S: Final = 0.005
ACKS_MAX: Final = 64
"""Acknowledgements that are gathered before they are settled; an eighth of `prefetch` if that is
more, so that pulls are sent in time.
"""
_FOR_EVER: Final = 1 << 62


class ConsumerAcks(GatheredAcks):
    """Takes the verdicts on messages that were delivered between two losses.
    The module describes it.
    """

    __slots__ = ("_verdicts", "broker_group", "first", "subject", "void_from")

    def __init__(self, verdicts: PendingAcks, first: int) -> None:
        super().__init__()
        self._verdicts = verdicts
        self.subject = verdicts.terms.subject
        self.broker_group = verdicts.group
        self.first = first
        self.void_from = _FOR_EVER

    def begin_acks(self, pull: int) -> None:
        """Acknowledge a message, and gather those behind it."""
        self.settle_acks()
        self.ack_first = self.ack_last = pull
        self.ack_limit = pull + self._verdicts.gathered_max - 1
        self._verdicts.at_end(self.settle_acks)

    def settle_acks(self) -> None:
        """Settle the gathered acknowledgements."""
        first, last = self.ack_first, self.ack_last
        if first <= last:
            self.ack_first, self.ack_last, self.ack_limit = 0, -1, -1
            self._give(first, last, Verdict.ACK)

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        """Give a verdict on pull sequences; it is sent soon, with others. A message that has a
        verdict keeps it.
        """
        self.settle_acks()
        self._give(first, last, verdict, delay, error)

    def _give(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        last = self._last_of_ours(first, last)
        if first <= last:
            self._verdicts.collect(
                self._verdicts.outstanding.remove(first, last), verdict, delay, error
            )

    def _last_of_ours(self, first: int, last: int) -> int:
        """The last pull sequence that is not void. Counts the void ones."""
        if last >= self.void_from:
            self._verdicts.count_lost(last - max(first, self.void_from) + 1)
        return min(last, self.void_from - 1)

    def nack(self, part: BatchSlice, delay: timedelta | None, error: str = "") -> None:
        """Hand messages out again. Raises InvalidArgument, DelayTooLong."""
        self.settle_acks()
        first, last = part.pull, part.pull + part.count - 1
        waits_ms = BY_GROUP_MS if delay is None else retry_ms(delay)
        if delay is None or waits_ms <= limits.REQUEUE_MS_MAX:
            self._give(first, last, Verdict.NACK, waits_ms, error)
            return
        if 0 < self._verdicts.attempts_max <= part.attempt:
            # After the last attempt the message dies; the broker does that.
            self._give(first, last, Verdict.NACK, limits.REQUEUE_MS_MAX, error)
            return
        last = self._last_of_ours(first, last)
        if first <= last:
            self._verdicts.postpone(self, part, last, waits_ms, error)

    def settle_postponed(self, pull: int, verdict: int, delay: int, error: str) -> None:
        """Give the verdict on a message that was postponed."""
        self._verdicts.no_longer_postponed()
        if self._last_of_ours(pull, pull) == pull:
            self._verdicts.collect(((pull, pull),), verdict, delay, error)

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        """Give a verdict and wait until the broker has it. Raises StaleDelivery, NotConnected (the
        broker may have it), ClientClosed.
        """
        self.settle_acks()
        if first < self.void_from:
            await self._verdicts.settle_now(first, min(last, self.void_from - 1), verdict)
        if last >= self.void_from:
            raise self._verdicts.stale(last - max(first, self.void_from) + 1)


class PendingAcks:
    """`outstanding` has the messages without a verdict; `postponed` counts the postponed ones.
    `attempts_max` is the group's setting from the answer to ATTACH: after so many attempts a
    message dies; 0: never.
    """

    def __init__(
        self,
        links: ConnectionPool,
        calls: ConsumerCalls,
        terms: SubscriptionOptions,
        group: str,
        sessions: SessionLoop[wire.Attached],
        file: SpoolFile | None,
    ) -> None:
        self.terms = terms
        self.group = group
        self._now_ns = links.now_ns
        self.at_end = links.round.at_end
        """Calls at the end of this round of the event loop."""
        self.outstanding = UnackedRanges()
        self.postponed = self.postponed_bytes = 0
        self.attempts_max = 0
        self._counters = links.counters.taking(terms.subject, terms.group)
        self.hold = ConsumerAcks(self, 0)
        self._holds = [self.hold]
        self._calls = calls
        self._sessions = sessions
        self._retry_s = links.timing.session_retry_s[-1]
        self._reporter = links.settle_reporter(terms.subject, terms.group, group)
        self.loop = asyncio.get_running_loop()
        self._unsent = AckBatch()
        self._requests: list[SettleRequest] = []
        self._is_leaving = False
        """Whether a flush is scheduled for the end of this round of the event loop."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._spool = QueueSpool(file, self._unanswered)

    @property
    def waiting(self) -> int:
        """Messages whose verdict the broker has not answered."""
        return (
            self.gathered
            + self._unsent.messages
            + sum([count(each.settlements) for each in list(self._requests)])
        )

    @property
    def gathered_max(self) -> int:
        """How many acknowledgements a `ConsumerAcks` gathers."""
        return max(ACKS_MAX, self._calls.limit.messages // 8)

    @property
    def gathered(self) -> int:
        """Acknowledged messages that are not settled yet."""
        return sum([each.ack_last - each.ack_first + 1 for each in self._holds])

    # --- from the application ---------------------------------------------------------------------

    def postpone(
        self, hold: ConsumerAcks, part: BatchSlice, last: int, delay_ms: int, error: str
    ) -> None:
        """For `ConsumerAcks`: the messages of a slice up to `last` that have no
        verdict are postponed.
        """
        if self._is_closed:
            return
        due_ms = ms_of(self._now_ns() + 999_999) + delay_ms
        before = self.outstanding.bytes
        waiting = [
            pull
            for begin, end in self.outstanding.remove(part.pull, last)
            for pull in range(begin, end + 1)
        ]
        self.postponed += len(waiting)
        self.postponed_bytes += before - self.outstanding.bytes
        self._calls.postpone(
            [
                LongRetry(hold.settle_postponed, part.message(pull - part.pull), due_ms, error)
                for pull in waiting
            ]
        )

    def no_longer_postponed(self) -> None:
        """For `ConsumerAcks`: a postponed message got its verdict."""
        self.postponed_bytes -= (
            self.postponed_bytes // self.postponed
        )  # the average of each; exact when the last one goes
        self.postponed -= 1

    def collect(
        self, parts: Iterable[tuple[int, int]], verdict: int, delay: int, error: str
    ) -> None:
        """Collect verdicts to be sent with others.
        Raises ClientClosed if the event loop has ended.
        """
        require_alive(self.loop)
        was_leaving = self._is_leaving
        for begin, end in parts:
            self._unsent.add(begin, end, verdict, delay, error)
            if self._sessions.session is None:
                self._spool.given(wire.Settlement(begin, end, verdict, delay, error))
        if self._unsent.messages * 4 >= self._calls.limit.messages:
            if not self._is_leaving:
                self._is_leaving = True
                self.loop.call_soon(self.flush)
        elif self._timer is None:
            self._timer = self.loop.call_later(SETTLE_DELAY_S, self.flush)
        self._calls.pull_more()
        if was_leaving and (session := self._sessions.session) is not None:
            # The event loop has not run a round since: the application finds messages ready, and
            # never waits. So that the broker works meanwhile, a pull leaves now.
            session.connection.stream.flush()

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        """For `ConsumerAcks`: settle pull sequences that are not void, and wait."""
        if self._is_closed:
            raise ClientClosed("the consumer is closed: make a new one")
        require_alive(self.loop)
        parts = self.outstanding.remove(first, last)
        if parts:
            request = SettleRequest(
                [wire.Settlement(*part, verdict, 0) for part in parts], self.loop.create_future()
            )
            if self._sessions.session is None:
                for each in request.settlements:
                    self._spool.given(each)
            self._send(request)
            self._calls.pull_more()
            await self._hear(request)
            return
        self.flush()
        for request in [each for each in self._requests if each.holds(first, last)]:
            request.waiter = request.waiter or self.loop.create_future()
            await self._hear(request)

    async def _hear(self, request: SettleRequest) -> None:
        assert request.waiter is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.shield(request.waiter)
        except TimeoutError:
            raise NotConnected(
                (
                    f"no answer from the master of {self.group} in time: the verdict is retried, "
                    "and the messages may be delivered again"
                ),
                outcome=Outcome.UNKNOWN,
            ) from None

    # --- to the broker ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the collected verdicts."""
        self._is_leaving = False
        for hold in self._holds:
            hold.settle_acks()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unsent.messages and self._sessions.session is not None:
            for part in in_frames(self._unsent.take()):
                self._send(SettleRequest(part))

    def _send(self, request: SettleRequest) -> None:
        self._requests.append(request)
        self._count_sent(request.settlements)
        self._transmit(request)

    def _count_sent(self, settlements: Iterable[wire.Settlement]) -> None:
        counters = self._counters
        for each in settlements:
            verdict, messages = each.verdict, each.last - each.first + 1
            if verdict == Verdict.ACK:
                counters.acked += messages
            elif verdict == Verdict.NACK:
                counters.nacked += messages
            elif verdict == Verdict.RELEASE:
                counters.released += messages
            else:
                counters.rejected += messages

    def _transmit(self, request: SettleRequest) -> None:
        session = self._sessions.session
        if session is None:
            self._sessions.start()
            return
        if request.is_flying or not session.connection.is_open:
            return
        request.is_flying = True
        payload = wire.pack_settle(session.number, request.settlements)
        deadline_ms = int(ANSWER_S * 1000) if request.waiter is not None else 0
        on_answer: OnAnswer = partial(self._settled, request, session)
        if self._reporter is not None:
            on_answer = self._reporter.watch(
                session.connection.address, counted(request.settlements), on_answer
            )
        session.connection.request(
            FrameKind.SETTLE, on_answer, payload, timeout_s=ANSWER_S, deadline_ms=deadline_ms
        )

    def _settled(
        self, request: SettleRequest, session: ConsumerSession, answer: Frame | QmqError
    ) -> None:
        if session is not self._sessions.session:
            return
        if not isinstance(answer, QmqError):
            self._done(request, wire.unpack_settled(answer.payload)[1])
            return
        request.is_flying = False
        request.is_repeated |= answer.outcome is Outcome.UNKNOWN
        if isinstance(answer, NotMaster | UnknownConsumer):
            self._sessions.failed(answer)
        elif not isinstance(answer, Unavailable):
            self._drop(request, answer)
        elif session.connection.is_open and not self._is_closed:
            self.loop.call_later(self._retry_s, self._transmit_all)

    def _done(self, request: SettleRequest, stale: int) -> None:
        self._over(request)
        if request.is_repeated:
            stale = 0
        if request.waiter is None:
            self.count_lost(stale)
        elif not request.waiter.done():
            lost = stale + request.lost
            _fail(request.waiter, self.stale(lost)) if lost else request.waiter.set_result(None)
        self._calls.notify()

    def _drop(self, request: SettleRequest, failure: QmqError) -> None:
        self._over(request)
        if request.waiter is not None and not request.waiter.done():
            _fail(request.waiter, failure)
        elif not isinstance(failure, StaleDelivery | ClientClosed):
            log.warning("%s: a verdict was refused: %s", self.terms.name, failure)

    def _over(self, request: SettleRequest) -> None:
        self._requests.remove(request)
        self._spool.over(request)

    def _transmit_all(self) -> None:
        for request in list(self._requests):
            self._transmit(request)

    def _unanswered(self) -> list[wire.Settlement]:
        return [
            each for request in self._requests for each in request.settlements
        ] + self._unsent.collected

    # --- sessions come and go ---------------------------------------------------------------------

    def attached(self) -> None:
        """Send unanswered and collected verdicts."""
        self._transmit_all()
        self.flush()
        self._spool.attached(self._requests)

    def detached(self) -> None:
        """No more answers come; requests under way may have been effective."""
        for request in self._requests:
            request.is_repeated |= request.is_flying
            request.is_flying = False
        self._spool.detached()

    def void(self, before: int, following: int) -> None:
        """Messages from pull sequence `before` on are void;
        the next message has the pull sequence `following`.
        """
        for hold in self._holds:
            hold.settle_acks()
            hold.void_from = min(hold.void_from, before)
        self.hold = ConsumerAcks(self, following)
        self._holds = [hold for hold in self._holds if hold.void_from > hold.first] + [self.hold]
        self.outstanding.cut(before)
        self.count_lost(self._unsent.cut(before))
        for request in list(self._requests):
            lost = request.cut(before)
            if request.waiter is None:
                self.count_lost(lost)
            if not request.settlements:
                self._drop(request, self.stale(request.lost))
        self._spool.voided()

    # --- the end ----------------------------------------------------------------------------------

    def stale(self, messages: int) -> StaleDelivery:
        """The error for waiters whose messages became void."""
        return StaleDelivery(
            f"{messages} of the messages were handed to another consumer since: "
            f"the lease of {self.terms.lease_ms} ms was lost, the group was reset, "
            "or the broker's new master did not know of the delivery"
        )

    def count_lost(self, messages: int) -> None:
        """Messages became void before they were settled."""
        if messages:
            self._calls.lost(messages)
            log.warning(
                "%s: %d messages were handed to another consumer before they were settled",
                self.terms.name,
                messages,
            )

    def close(self, *, is_told: bool) -> None:
        """Stop sending; waiters get the error that the outcome is unknown. `is_told`: the master
        has all verdicts, and knows that the consumer leaves.
        """
        self._spool.close(is_told=is_told)
        self._is_closed = True
        for request in list(self._requests):
            self._drop(
                request,
                ClientClosed(
                    "the consumer was closed before the answer came", outcome=Outcome.UNKNOWN
                ),
            )
        if self._timer is not None:
            self._timer.cancel()


def _fail(waiter: asyncio.Future[None], failure: QmqError) -> None:
    waiter.set_exception(failure)
    # without a waiter, asyncio must not warn that the exception was never retrieved
    waiter.exception()


LOOK_S: Final = 60.0
INHERIT_S: Final = 3.0
"""How long a consumer waits while another process hands in the verdicts of its
earlier incarnation.
"""


async def hand_in(connection: Connection, left: SpoolRemainder, links: ConnectionPool) -> int:
    """Send the verdicts of one file to the master of its broker group. Returns the number of
    messages, 0 if the lease was lost.

    Harmless to repeat. Raises the broker's error.
    """
    attach = left.origin.attach
    answer = await connection.call(FrameKind.ATTACH, attach.pack(), timeout_s=ANSWER_S)
    attached = wire.Attached.unpack(answer.payload)
    if not attached.resumed:
        return 0
    settlements = still_to_say(left.kept, attached.next_pull_sequence, _now_ms(links))
    reporter = links.settle_reporter(attach.subject, attach.group, left.origin.broker_group)
    for part in in_frames(settlements):
        told = (
            reporter.watch(connection.address, counted(part), _ignored)
            if reporter is not None
            else _ignored
        )
        try:
            told(
                await connection.call(
                    FrameKind.SETTLE, wire.pack_settle(attached.session, part), timeout_s=ANSWER_S
                )
            )
        except QmqError as failure:
            told(failure)
            raise
    await connection.call(FrameKind.DETACH, wire.pack_detach(attached.session), timeout_s=ANSWER_S)
    return count(settlements)


async def inherit(
    connection: Connection,
    links: ConnectionPool,
    store: AckSpool,
    terms: SubscriptionOptions,
    broker_group: str,
) -> None:
    """Hand in what earlier incarnations of a consumer left for a broker group. Raises Unavailable:
    then attaching would fail, too.
    """

    def is_mine(origin: SpoolOwner) -> bool:
        return (origin.broker_group, origin.attach.consumer) == (broker_group, terms.name)

    loop = asyncio.get_running_loop()
    until_s = loop.time() + INHERIT_S
    while True:
        for left in store.left(terms.subject, terms.group, _now_ms(links)):
            try:
                if is_mine(left.origin):
                    await _try(connection, left, links)
            finally:
                left.put_back()
        others = [
            each
            for each in store.busy(terms.subject, terms.group)
            if each.attach.incarnation != terms.incarnation
        ]
        if loop.time() > until_s or not any(map(is_mine, others)):
            return
        await asyncio.sleep(links.timing.hand_in_retry_s[0])


async def _try(connection: Connection, left: SpoolRemainder, links: ConnectionPool) -> None:
    """Hand in a file and delete it. A file that this broker will never accept is deleted, too.
    Raises Unavailable.
    """
    try:
        handed = await hand_in(connection, left, links)
    except (CallerError, UnknownConsumer) as failure:
        if isinstance(failure, ClientClosed):
            raise
        log.warning(
            "verdicts of consumer %s are lost, its messages will be delivered again: %s",
            left.origin.attach.consumer,
            failure,
        )
    else:
        attach = left.origin.attach
        log.info(
            "verdicts of consumer %s on %s: %d handed in to %s",
            attach.consumer,
            attach.subject,
            handed,
            left.origin.broker_group,
        )
    left.delete()


def _now_ms(links: ConnectionPool) -> int:
    return ms_of(links.now_ns())


def _ignored(_: Frame | QmqError) -> None: ...


def _put_back(left: SpoolRemainder, _: object) -> None:
    left.put_back()


class SpoolSender:
    """Periodically looks for files of one consumer's subject and group."""

    def __init__(self, links: ConnectionPool, store: AckSpool, terms: SubscriptionOptions) -> None:
        self._links, self._store, self._terms = links, store, terms
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Harmless to repeat."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while True:
            for left in self._store.left(
                self._terms.subject, self._terms.group, _now_ms(self._links)
            ):
                if left.origin.attach.consumer == self._terms.name:
                    left.put_back()
                    continue
                task = asyncio.get_running_loop().create_task(self._carry(left))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(partial(_put_back, left))
            await asyncio.sleep(LOOK_S * random.uniform(0.7, 1.3))  # noqa: S311 - jitter, not a secret

    async def _carry(self, left: SpoolRemainder) -> None:
        """Retry until the file is handed in."""
        tries = 0
        while True:
            try:
                await self._carry_once(left)
                return
            except ClientClosed:
                return
            except QmqError as failure:
                log.debug("verdicts for %s wait: %s", left.origin.broker_group, failure)
            jitter = random.uniform(0.7, 1.3)  # noqa: S311 - no secret
            await asyncio.sleep(pause_s(self._links.timing.hand_in_retry_s, tries) * jitter)
            tries += 1

    async def _carry_once(self, left: SpoolRemainder) -> None:
        group = left.origin.broker_group
        master, connection = await self._links.reach(self._terms.subject, group)
        try:
            await _try(connection, left, self._links)
        except NotMaster:
            self._links.locator.doubt(group, master)
            raise

    async def close(self) -> None:
        """Stop. Files that are not handed in stay for the next consumer."""
        tasks = [*self._tasks, *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
