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
  it was delivered, and these acks know from which pull sequence on they are void.
* Verdicts that cannot be sent, or that have no answer when the session ends, are written to the
  client's spool (`qmq/client/consuming/ack_spool.py`) until they are answered, because this process
  may end first.
* A retry after more than `limits.REQUEUE_MS_MAX` is *postponed*: the message counts as held, and
  its verdict is given when a delay group has stored the copy or has refused it
  (`long_retries.py`). A verdict in the meantime is ignored, as after any verdict.

Worked example: pull sequences 0 to 9 came under acks A. A new master knows 0 to 5 only: A is void
from 6 on, and 6 comes again, under acks B, as another message. `A.settle(4, 7)` settles 4 and 5;
`B.settle(6, 6)` settles the new 6.

When the verdicts of a queue are in its file (`QueueSpool`):

    session ends      everything that is not answered is written
    no session        a new verdict is appended, with the other verdicts of this round of the event
                      loop
    part is void      the remaining verdicts are written again, before anything else is pulled
    session begins    nothing is written; the file is deleted when all verdicts that were unanswered
                      at this moment are answered
    closing           the file is deleted if the broker has answered everything, else another
                      process hands it in
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

from qmq import limits
from qmq.client.connection.connection import OnAnswer
from qmq.client.connection.pool import ConnectionPool, counted
from qmq.client.consuming.ack_spool import SpoolFile
from qmq.client.consuming.long_retries import LongRetry
from qmq.client.consuming.message import AckRange, BatchSlice, retry_ms
from qmq.client.consuming.session import (
    ANSWER_S,
    ConsumerCalls,
    ConsumerSession,
    SessionLoop,
    SubscriptionOptions,
)
from qmq.errors import (
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
from qmq.wire.frame_payloads import BY_GROUP_MS, Settlement, Verdict

log = logging.getLogger("qmq.client")

ACKS_MAX: Final = 64
"""Acknowledgements that are gathered before they are settled; an eighth of `prefetch` if that is
more, so that pulls are sent in time.
"""
_FOR_EVER: Final = 1 << 62
_ERRORS_CHARS: Final = 256 * 1024
"""Most characters of errors in one SETTLE."""


class UnackedRanges:
    """The pull sequences without a verdict, and their bytes."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []
        """(first, last, bytes of each message)"""
        self.messages = 0
        self.bytes = 0

    def add(self, first: int, count: int, message_bytes: int = 0) -> None:
        """Add `count` messages from pull sequence `first` on, which is behind all earlier ones,
        each of so many bytes.
        """
        if count:
            self._ranges.append((first, first + count - 1, message_bytes))
            self.messages += count
            self.bytes += count * message_bytes

    def remove(self, first: int, last: int) -> list[tuple[int, int]]:
        """Remove the pull sequences from `first` to `last` that are outstanding;
        returns them as ranges.
        """
        at = max(bisect_right(self._ranges, first, key=lambda each: each[0]) - 1, 0)
        stop, kept, removed = at, list[tuple[int, int, int]](), list[tuple[int, int]]()
        while stop < len(self._ranges) and self._ranges[stop][0] <= last:
            low, high, message_bytes = self._ranges[stop]
            begin, end = max(low, first), min(high, last)
            if low < first:
                kept.append((low, min(high, first - 1), message_bytes))
            if last < high:
                kept.append((max(low, last + 1), high, message_bytes))
            if begin <= end:
                removed.append((begin, end))
                self.messages -= end - begin + 1
                self.bytes -= (end - begin + 1) * message_bytes
            stop += 1
        self._ranges[at:stop] = kept
        return removed

    def cut(self, before: int) -> None:
        """Forget pull sequences from `before` on."""
        if self._ranges and self._ranges[-1][1] >= before:
            self.remove(before, self._ranges[-1][1])


class AckBatch:
    """Collects verdicts to be sent; `take` returns them."""

    def __init__(self) -> None:
        self.collected: list[Settlement] = []
        self.messages = 0

    def add(self, first: int, last: int, verdict: int, delay_ms: int, error: str = "") -> None:
        """Add a range; it is joined to the last one if it is adjacent and has the same verdict."""
        self.messages += last - first + 1
        if self.collected:
            before = self.collected[-1]
            if before.last + 1 == first and before[2:] == (verdict, delay_ms, error):
                self.collected[-1] = Settlement(before.first, last, verdict, delay_ms, error)
                return
        self.collected.append(Settlement(first, last, verdict, delay_ms, error))

    def take(self) -> list[Settlement]:
        """Return and remove the collected verdicts."""
        taken, self.collected, self.messages = self.collected, [], 0
        return taken

    def cut(self, before: int) -> int:
        """Drop verdicts on pull sequences from `before` on, which are void.
        Returns their number.
        """
        self.collected, lost = cut(self.collected, before)
        self.messages -= lost
        return lost


def cut(settlements: list[Settlement], before: int) -> tuple[list[Settlement], int]:
    """The verdicts on pull sequences before `before`, and the number of the other messages."""
    kept = [
        each._replace(last=min(each.last, before - 1))
        for each in settlements
        if each.first < before
    ]
    return kept, count(settlements) - count(kept)


def in_frames(settlements: list[Settlement]) -> Iterator[list[Settlement]]:
    """The verdicts in parts of limited size: errors may be long, and each failed message may have
    its own.
    """
    part: list[Settlement] = []
    errors = 0
    for each in settlements:
        if part and (
            errors + len(each.error) > _ERRORS_CHARS or len(part) == limits.SETTLE_RANGES_SENT
        ):
            yield part
            part, errors = [], 0
        part.append(each)
        errors += len(each.error)
    if part:
        yield part


def count(settlements: list[Settlement]) -> int:
    """How many messages the verdicts are about."""
    return sum([each.last - each.first + 1 for each in settlements])


@dataclass(slots=True, eq=False)
class SettleRequest:
    """Verdicts that were sent, kept until the broker answers.

    `is_repeated`: an earlier answer may have been lost, so a verdict that settles nothing now was
    effective then.
    """

    settlements: list[Settlement]
    waiter: asyncio.Future[None] | None = None
    is_repeated: bool = False
    is_flying: bool = False
    lost: int = 0
    """Messages of the request that became void on the way."""

    def covers(self, first: int, last: int) -> bool:
        """Whether the request has a verdict on any of these."""
        return any(each.first <= last and first <= each.last for each in self.settlements)

    def cut(self, before: int) -> int:
        self.settlements, lost = cut(self.settlements, before)
        self.lost += lost
        return lost


class ConsumerAcks(AckRange):
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
        self.gather_from(pull, self._verdicts.gathered_max, self._verdicts.at_end)

    def settle_range(self, first: int, last: int) -> None:
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
        self.acks = ConsumerAcks(self, 0)
        self._all_acks = [self.acks]
        self._calls = calls
        self._sessions = sessions
        self._retry_s = links.timing.session_retry_s[-1]
        self._reporter = links.settle_reporter(terms.subject, terms.group, group)
        self.loop = asyncio.get_running_loop()
        self._unsent = AckBatch()
        self._requests: list[SettleRequest] = []
        self._is_flushing = False
        """Whether a flush is scheduled for the end of this round of the event loop."""
        self._clock = links.settle_clock
        self._is_soon = False
        """Whether the clock will call `flush`."""
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
        return sum([each.ack_last - each.ack_first + 1 for each in self._all_acks])

    # --- from the application ---------------------------------------------------------------------

    def postpone(
        self, acks: ConsumerAcks, part: BatchSlice, last: int, delay_ms: int, error: str
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
                LongRetry(acks.settle_postponed, part.message(pull - part.pull), due_ms, error)
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
        was_flushing = self._is_flushing
        for begin, end in parts:
            self._unsent.add(begin, end, verdict, delay, error)
            if self._sessions.session is None:
                self._spool.given(Settlement(begin, end, verdict, delay, error))
        if self._unsent.messages * 4 >= self._calls.limit.messages:
            if not self._is_flushing:
                self._is_flushing = True
                self.loop.call_soon(self.flush)
        elif not self._is_soon:
            self._is_soon = True
            self._clock.add(self.flush)
        self._calls.pull_more()
        if was_flushing and (session := self._sessions.session) is not None:
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
                [Settlement(*part, verdict, 0) for part in parts], self.loop.create_future()
            )
            if self._sessions.session is None:
                for each in request.settlements:
                    self._spool.given(each)
            self._send(request)
            self._calls.pull_more()
            await self._wait_for_answer(request)
            return
        self.flush()
        for request in [each for each in self._requests if each.covers(first, last)]:
            request.waiter = request.waiter or self.loop.create_future()
            await self._wait_for_answer(request)

    async def _wait_for_answer(self, request: SettleRequest) -> None:
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
        self._is_flushing = False
        for each in self._all_acks:
            each.settle_acks()
        self._no_longer_soon()
        if self._unsent.messages and self._sessions.session is not None:
            for part in in_frames(self._unsent.take()):
                self._send(SettleRequest(part))

    def _send(self, request: SettleRequest) -> None:
        self._requests.append(request)
        self._count_sent(request.settlements)
        self._transmit(request)

    def _count_sent(self, settlements: Iterable[Settlement]) -> None:
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

    def _unanswered(self) -> list[Settlement]:
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
        for each in self._all_acks:
            each.settle_acks()
            each.void_from = min(each.void_from, before)
        self.acks = ConsumerAcks(self, following)
        self._all_acks = [each for each in self._all_acks if each.void_from > each.first]
        self._all_acks.append(self.acks)
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

    def close(self, *, is_answered: bool) -> None:
        """Stop sending; waiters get the error that the outcome is unknown. `is_answered`: the
        master has all verdicts, and knows that the consumer leaves.
        """
        self._spool.close(is_answered=is_answered)
        self._is_closed = True
        for request in list(self._requests):
            self._drop(
                request,
                ClientClosed(
                    "the consumer was closed before the answer came", outcome=Outcome.UNKNOWN
                ),
            )
        self._no_longer_soon()

    def _no_longer_soon(self) -> None:
        if self._is_soon:
            self._is_soon = False
            self._clock.discard(self.flush)


def _fail(waiter: asyncio.Future[None], failure: QmqError) -> None:
    waiter.set_exception(failure)
    # without a waiter, asyncio must not warn that the exception was never retrieved
    waiter.exception()


class QueueSpool:
    """Decides when the verdicts of one queue are written to its file.

    `unanswered` returns all unanswered verdicts in the order in which they were given.
    """

    def __init__(
        self, file: SpoolFile | None, unanswered: Callable[[], Sequence[Settlement]]
    ) -> None:
        self._file = file
        self._unanswered = unanswered
        self._loop = asyncio.get_running_loop()
        self._is_attached = True
        self._given = AckBatch()
        """Verdicts that are not written yet."""
        self._waited_for: set[SettleRequest] = set()
        """Requests that were unanswered when the session began, and still are."""

    def given(self, settlement: Settlement) -> None:
        """Record a verdict that was given without a session."""
        if self._file is not None and not self._is_attached:
            if not self._given.messages:
                self._loop.call_soon(self._write)
            self._given.add(*settlement)

    def _write(self) -> None:
        settlements = self._given.take()
        if self._file is None or not settlements:
            return
        if self._file.exists:
            self._file.append(settlements)
        else:
            self._write_all()

    def _write_all(self) -> None:
        self._given.take()
        if self._file is not None:
            settlements = self._unanswered()
            if settlements:
                self._file.rewrite(settlements)
            else:
                self._file.clear()

    def detached(self) -> None:
        """The session has ended. Harmless to repeat."""
        if self._is_attached:
            self._is_attached = False
            self._write_all()

    def voided(self) -> None:
        """A part of the unanswered verdicts is void."""
        if self._file is not None and self._file.exists:
            self._write_all()

    def attached(self, requests: Iterable[SettleRequest]) -> None:
        """A session has begun; these requests hold all unanswered verdicts."""
        self._is_attached = True
        self._given.take()
        self._waited_for = set(requests)
        self._clear_if_answered()

    def over(self, request: SettleRequest) -> None:
        """A request was answered, or came too late."""
        if request in self._waited_for:
            self._waited_for.remove(request)
            self._clear_if_answered()

    def _clear_if_answered(self) -> None:
        if self._file is not None and self._is_attached and not self._waited_for:
            self._file.clear()

    def close(self, *, is_answered: bool) -> None:
        """The consumer closes. `is_answered`: the master has answered everything."""
        if self._file is None:
            return
        if is_answered:
            self._file.clear()
        elif self._is_attached:
            self.detached()
        else:
            self._write()
        self._file.leave()
        self._file = None
