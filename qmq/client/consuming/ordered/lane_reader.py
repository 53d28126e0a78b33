"""Reads one lane from the current master of its broker group, and holds the messages of a
consumer's lanes that the application has not finished. Thin: `lane.py` decides.

A reader keeps a session with the master (`qmq/client/consuming/session.py`), a pull under way, and
at most one LANE_SETTLE (`LaneAcks`). After a broken connection, or at a new master, the reader
attaches with the token that it was granted, and keeps its messages. If the token is no longer valid
(the lease ended, an operator moved the group, another consumer has the range), the broker grants
another token or none, and all held messages are void.

Answers of the broker:

    LaneHeld, LaneNotOpen, UnknownPartition     another consumer still has it, or this broker does
                                                not know yet: retry soon
    LaneLost                                    drop everything; attach again, with no token
    UnknownConsumer, NotConnected, Stopping     attach again, with the token
    NotMaster                                   the same, at the new master
    MessagesExpired, LogDamaged, CorruptBatch   report to the application

Lane readers put messages in, the consumer and the tasks that wait take them out, and messages give
their verdicts here. The pulls of several lanes are written together, so that the broker answers
them in one turn and by one write.

`LaneAcks` sends a lane's verdicts to the master: gathers them, sends one request at a time, and
lets callers wait. All consumers of a client send their verdicts together (`SettleClock`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from qmq_ordering.lanes import Lane
from qmq_ordering.routes import LpRange

from qmq import limits
from qmq.client.connection.connection import Connection, OnAnswer
from qmq.client.connection.pool import (
    LANE_VERDICTS,
    ConnectionPool,
    SettleClock,
    SettleReporter,
)
from qmq.client.consuming.message import ReceivedBatches
from qmq.client.consuming.ordered.keys import BulkDispatcher, KeyDispatcher
from qmq.client.consuming.ordered.lane import (
    Cell,
    DeliveredRuns,
    FailurePolicy,
    LaneCore,
    LaneRequest,
    LaneState,
    unpack_delivery,
    unpack_keys,
)
from qmq.client.consuming.ordered.message import (
    LaneRun,
    LaneSource,
    MessageRun,
    OrderedMessages,
)
from qmq.client.consuming.session import ANSWER_S, ConsumerSession, SessionLoop
from qmq.errors import (
    CallerError,
    ClientClosed,
    LaneHeld,
    LaneLost,
    LaneNotOpen,
    MessagesExpired,
    NotConnected,
    NotMaster,
    Outcome,
    PeerError,
    QmqError,
    StorageError,
    Unavailable,
    UnknownConsumer,
    UnknownPartition,
)
from qmq.process.event_loop import require_alive
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import LaneVerdict


class LaneAcks:
    """`session_lost` is called when the session has ended;
    `all_settled` when no verdict is left to send.
    """

    def __init__(
        self,
        core: LaneCore,
        name: str,
        retry_s: float,
        clock: SettleClock,
        *,
        session_lost: Callable[[QmqError], None],
        all_settled: Callable[[], None],
        reporter: SettleReporter | None = None,
    ) -> None:
        self._core = core
        self._name = name
        self._retry_s = retry_s
        self._clock = clock
        self._is_soon = False
        self._send = self.now
        self._session_lost = session_lost
        self._all_settled = all_settled
        self._reporter = reporter
        self._loop = asyncio.get_running_loop()
        self._session: ConsumerSession | None = None
        self._token = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: dict[Cell, asyncio.Future[None]] = {}
        self._is_closed = False

    def attached(self, session: ConsumerSession, token: int) -> None:
        """Send verdicts over this session from now on."""
        self._session, self._token = session, token
        self.now()

    def detached(self) -> None:
        """The session has ended; no more answers come."""
        self._session = None
        self._core.detached()

    # --- sending ----------------------------------------------------------------------------------

    def soon(self) -> None:
        """There may be verdicts to send; they wait for others."""
        if not self._is_soon and self._timer is None and not self._is_closed:
            self._is_soon = True
            self._clock.add(self._send)

    def _later(self, wait_s: float) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = self._loop.call_later(wait_s, self._send)

    def _stop_waiting(self) -> None:
        if self._is_soon:
            self._is_soon = False
            self._clock.discard(self._send)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def now(self) -> None:
        """Send the verdicts now."""
        self._stop_waiting()
        session = self._session
        if session is None or not session.connection.is_open:
            return
        request = self._core.take()
        if request is None:
            self._all_settled()
            return
        on_answer: OnAnswer = partial(self._settled, session, request)
        if self._reporter is not None and (verdicts := _counted(request)):
            on_answer = self._reporter.watch(session.connection.address, verdicts, on_answer)
        payload = wire.pack_lane_settle(session.number, self._token, request.settlements)
        session.connection.request(FrameKind.LANE_SETTLE, on_answer, payload, timeout_s=ANSWER_S)

    def _settled(
        self, session: ConsumerSession, request: LaneRequest, answer: Frame | QmqError
    ) -> None:
        if session is not self._session:
            return
        if not isinstance(answer, QmqError):
            over = self._core.settled(request)
            if self._waiters:
                for cell in over:
                    _resolve(self._waiters.pop(cell, None), None)
            if self._waiters or not self._core.has_verdicts:
                self.now()
            else:
                self.soon()
            return
        if isinstance(answer, NotMaster | UnknownConsumer | LaneLost | NotConnected):
            self._session_lost(answer)
            return
        if not isinstance(answer, Unavailable):
            log.warning("%s: verdicts were refused and will be sent again: %s", self._name, answer)
        self._core.detached()
        self._later(self._retry_s)

    # --- waiting ----------------------------------------------------------------------------------

    async def confirmed(self, cell: Cell, lost: LaneLost) -> None:
        """Returns when the broker has the verdict. Raises `lost`, NotConnected (the verdict is sent
        again and again), ClientClosed.
        """
        if cell.state is LaneState.VOID:
            raise lost
        if cell.state not in (LaneState.DONE, LaneState.PARKED):
            return
        if self._is_closed:
            raise _closed()
        require_alive(self._loop)
        waiter = self._waiters.setdefault(cell, self._loop.create_future())
        self._loop.call_soon(self.now)
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.shield(waiter)
        except TimeoutError:
            raise NotConnected(
                (
                    "no answer from the lane's master in time: the verdict is retried, and the "
                    "message may be delivered again"
                ),
                outcome=Outcome.UNKNOWN,
            ) from None

    def voided(self, cells: Iterable[Cell], lost: LaneLost) -> None:
        """Waiters for these cells get the error `lost`: the consumer no longer holds them."""
        for cell in cells:
            _resolve(self._waiters.pop(cell, None), lost)

    def close(self) -> None:
        """Stop sending; waiters get an error with unknown outcome."""
        self._is_closed = True
        self._stop_waiting()
        for waiter in self._waiters.values():
            _resolve(waiter, _closed())


def _counted(request: LaneRequest) -> Mapping[str, int]:
    """How many messages get each verdict; stretches of other lanes' messages do not count."""
    found: Counter[str] = Counter()
    for settlement, cells in request.pieces:
        if cells:
            found[LANE_VERDICTS[LaneVerdict(settlement.verdict)]] += sum(
                [cell.count for cell in cells]
            )
    return found


def _closed() -> ClientClosed:
    return ClientClosed("the consumer was closed before the answer came", outcome=Outcome.UNKNOWN)


def _resolve(waiter: asyncio.Future[None] | None, failure: QmqError | None) -> None:
    if waiter is None or waiter.done():
        return
    if failure is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(failure)
        # the waiter may have been cancelled; then asyncio must not warn that the exception was
        # never retrieved
        waiter.exception()


log = logging.getLogger("qmq.client")


class LaneInbox:
    """`by_key` has the messages of a consumer that reads one by one, `in_bulk` those of one that
    reads in bulk. `stale` counts messages that were lost after they were handed out and before they
    were settled.
    """

    def __init__(
        self,
        name: str,
        at_end: Callable[[Callable[[], None]], None],
        stop: Callable[[], object],
    ) -> None:
        """`at_end` calls at the end of this round of the event loop.
        `stop` is that of `KeyDispatcher`.
        """
        self.at_end = at_end
        self.by_key = KeyDispatcher(stop)
        self.in_bulk = BulkDispatcher()
        self.is_bulk: bool | None = None
        """Whether the consumer reads in bulk; None before its first message."""
        self.stale = 0
        self._name = name
        self._loop = asyncio.get_running_loop()
        self.waiting: dict[asyncio.Future[bool], None] = {}
        self.woken: asyncio.Future[bool] | None = None
        """The waiter that was woken last and has not looked yet. Until it has looked, a message
        wakes no other waiter.
        """

    # --- waiters ----------------------------------------------------------------------------------

    async def wait(self, until_s: float = math.inf) -> bool:
        """Wait until something changes; False if nothing did until then."""
        waiting: asyncio.Future[bool] = self._loop.create_future()
        self.waiting[waiting] = None
        timer = (
            self._loop.call_at(until_s, _set_result, waiting, False) if until_s < math.inf else None
        )
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

    # --- verdicts ---------------------------------------------------------------------------------

    def finish(self, run: LaneRun, sequence: int) -> None:
        """The message was handled."""
        if self.by_key.done(run, sequence):
            run.lane.worked(is_urgent=False)
            self.notify_next()

    def finish_range(self, run: LaneRun, last: int) -> None:
        """The messages of a run in sequence, up to `last`, were handled."""
        self.by_key.done_through(run, last)
        run.lane.worked(is_urgent=False)

    def fail(self, run: LaneRun, sequence: int, pause_ms: int | None) -> None:
        """The message failed."""
        if self.by_key.failed(run, sequence, int(self._loop.time() * 1000), pause_ms):
            run.lane.worked(is_urgent=True)
            self.notify()

    def reject(self, run: LaneRun, sequence: int) -> None:
        """No other attempt will help."""
        if self.by_key.rejected(run, sequence):
            run.lane.worked(is_urgent=True)
            self.notify()

    def release(self, run: LaneRun, sequence: int) -> None:
        """Hand the message out again, as if it had not been handed out."""
        if self.by_key.put_back(run, sequence):
            run.lane.worked(is_urgent=False)
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

    # --- from the lanes ---------------------------------------------------------------------------

    def arrived(self, lane: LaneSource, runs: list[LaneRun]) -> None:
        """A lane got runs of messages, to be handed out one by one."""
        self.by_key.put(lane, runs)
        self.notify()

    def arrived_in_bulk(self, lane: LaneSource, runs: list[MessageRun]) -> None:
        """A lane got runs of messages."""
        self.in_bulk.put(lane, runs)
        self.notify()

    def voided(self, lane: LaneSource, cells: list[Cell], stale: int) -> None:
        """Hand out nothing of the lane; these cells are void. `stale` of their messages had been
        handed out.
        """
        self.by_key.dropped(lane, cells)
        self.in_bulk.dropped(lane)
        if stale:
            self.stale += stale
            log.warning(
                "%s: %d messages of %s were lost before they were settled",
                self._name,
                stale,
                lane.lane,
            )
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


class PullWrites:
    """Shared by all lanes of a consumer; `lanes` says how many there are. What is left is written
    at the end of the round.
    """

    def __init__(self, lanes: Callable[[], int]) -> None:
        self._lanes = lanes
        self._pulls = 0
        self._flushes: dict[Callable[[], None], None] = {}

    def add(self, flush: Callable[[], None]) -> None:
        """A lane pulls because its messages were handled; `flush` writes its connection's bytes.
        When half of the lanes pull, write.

        Not at the end of this round of the event loop: a loop that finds messages ready does not
        let it go round, and the broker is to work meanwhile. While the other half is here, there is
        no hurry.
        """
        self._pulls += 1
        self._flushes[flush] = None
        if self._pulls * 2 >= self._lanes():
            flushes, self._flushes, self._pulls = self._flushes, {}, 0
            for each in flushes:
                each()


WAIT_MS: Final = 20_000
"""How long a pull may wait at the broker."""


@dataclass(frozen=True, slots=True)
class LaneTerms:
    """The consumer's terms, the same for all its lanes."""

    subject: str
    group: str
    name: str
    incarnation: str
    lease_ms: int
    pull_bytes: int
    policy: FailurePolicy


@dataclass(frozen=True, slots=True)
class LaneCalls:
    """What a reader tells its consumer, and asks it."""

    room: Callable[[], tuple[int, int]]
    """How many unfinished messages and bytes the lane may have."""
    is_paused: Callable[[], bool]
    finished: Callable[[Lane], None]
    """The whole lane is done and committed, to its end."""
    failed: Callable[[QmqError], None]
    """The lane cannot continue."""


class LaneReader:
    """`core` has the state of the lane; while `failure` is set, the reader pulls nothing."""

    def __init__(
        self,
        links: ConnectionPool,
        inbox: LaneInbox,
        terms: LaneTerms,
        lane: Lane,
        pull_writes: PullWrites,
        calls: LaneCalls,
    ) -> None:
        """`inbox` gets the messages."""
        self.lane = lane
        self.subject = terms.subject
        self.broker_group = lane.group
        self.partition = lane.partition
        self.core = LaneCore(terms.policy)
        self.settling = LaneAcks(
            self.core,
            terms.name,
            links.timing.session_retry_s[-1],
            links.settle_clock,
            session_lost=self._session_lost,
            all_settled=self._all_settled,
            reporter=links.settle_reporter(terms.subject, terms.group, lane.group),
        )
        self.failure: QmqError | None = None
        self.sessions = SessionLoop[wire.LaneAttached](
            links,
            self,
            subject=terms.subject,
            group=lane.group,
            name=terms.name,
            lease_ms=terms.lease_ms,
        )
        """Keeps a session with the master, from `start` on."""
        self._inbox, self._terms = inbox, terms
        self._pull_writes = pull_writes
        self._calls = calls
        self._counters = links.counters.taking(terms.subject, terms.group)
        self._loop = asyncio.get_running_loop()
        self._token = 0
        self._batches = ReceivedBatches(links.arrived)
        self.is_pulling = self._has_reported_end = False
        """`is_pulling`: a pull is under way."""
        self._pulls_at = 0
        """With more open messages than this there is no room for another pull.
        Updated at each pull.
        """
        self._is_leaving = self._is_closed = False
        self._retry_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def session(self) -> ConsumerSession | None:
        """The session with the master, while there is one."""
        return self.sessions.session

    @property
    def lps(self) -> LpRange:
        """The logical partitions of the lane."""
        return self.lane.range

    @property
    def sure_until_s(self) -> float:
        """Until when, by the event loop's clock, the lease cannot end at the broker."""
        return self.sessions.sure_until_s

    def is_sure(self) -> bool:
        """Whether the lease cannot have ended at the broker yet."""
        return self._loop.time() <= self.sessions.sure_until_s

    # --- messages in ------------------------------------------------------------------------------

    def pull_more(self) -> None:
        """Pull if there is room for enough messages."""
        session, core = self.session, self.core
        if (
            self.is_pulling
            or session is None
            or self._is_leaving
            or core.is_end
            or self.failure is not None
        ):
            return
        room, room_bytes = self._calls.room()
        self._pulls_at = room // 2
        if core.open * 2 > room or core.open_bytes * 2 > room_bytes or self._calls.is_paused():
            return
        self.is_pulling = True
        messages = max(min(room - core.open, limits.PULL_MESSAGES_MAX), 1)
        size = max(min(room_bytes - core.open_bytes, self._terms.pull_bytes), 1)
        pull = wire.LanePull(session.number, self._token, core.position, messages, size, WAIT_MS)
        session.connection.request(
            FrameKind.LANE_PULL,
            partial(self._pulled, session),
            wire.pack_lane_pull(pull),
            timeout_s=WAIT_MS / 1000 + ANSWER_S,
        )

    def _pulled(self, session: ConsumerSession, answer: Frame | QmqError) -> None:
        if session is not self.session:
            return
        self.is_pulling = False
        try:
            if isinstance(answer, QmqError):
                raise answer
            server = session.connection.address
            self._accept(
                unpack_delivery(
                    answer.payload, session.number, self.core.parked, self._batches, server
                )
            )
        except (MessagesExpired, StorageError, PeerError) as failure:
            self._fail(failure)
        except QmqError as failure:
            self._session_lost(failure)
        else:
            self.settling.soon()
            self.pull_more()

    def _accept(self, delivery: DeliveredRuns) -> None:
        cells = self.core.delivered(
            delivery.arrivals, delivery.next_sequence, is_end=delivery.is_end
        )
        came = [
            (cell, part.batch, part.indices)
            for cell, part in zip(cells, delivery.parts, strict=False)
            if cell.state is LaneState.WAITING
        ]
        if not came:
            return
        self._counters.received += sum([cell.count for cell, _, _ in came])
        inbox, token, version = self._inbox, self._token, self.lane.version
        if inbox.is_bulk:
            inbox.arrived_in_bulk(
                self,
                [
                    MessageRun(self, cell, batch, indices, cell.attempt, token, version)
                    for cell, batch, indices in came
                ],
            )
        else:
            inbox.arrived(
                self, [LaneRun(inbox, self, *each, token=token, version=version) for each in came]
            )

    def _fail(self, failure: QmqError) -> None:
        self.failure = failure
        self._calls.failed(failure)

    # --- messages over ----------------------------------------------------------------------------

    def worked(self, *, is_urgent: bool) -> None:
        """A handler finished, successfully or not. Settle soon, or immediately if the request is
        full. Raises ClientClosed if the event loop has ended.
        """
        require_alive(self._loop)
        core = self.core
        if core.failing or self._retry_timer is not None:
            self.arm()
        if is_urgent:
            self.settling.now()
        else:
            self.settling.soon()
        if not self.is_pulling and core.open <= self._pulls_at:
            self.pull_more()
            session = self.session
            if self.is_pulling and session is not None:
                self._pull_writes.add(session.connection.stream.flush)
        if self._is_leaving:
            self._changed.set()

    def arm(self) -> None:
        """Wake up when the next failed message is due."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        due_ms = self.core.next_due_ms()
        if due_ms is not None:
            self._retry_timer = self._loop.call_at(due_ms / 1000, self._due)

    def _due(self) -> None:
        # Rounded up: a timer that fires too early would find nothing due and be set again.
        self._inbox.due(self.core.due(int(self._loop.time() * 1000) + 1))
        self.arm()

    async def confirmed(self, cell: Cell) -> None:
        """Returns when the broker has the verdict. Raises LaneLost, NotConnected (it is sent again
        and again), ClientClosed.
        """
        await self.settling.confirmed(cell, self._lost_error())

    def _all_settled(self) -> None:
        """All verdicts are answered."""
        self._changed.set()
        if self.core.is_finished and not self._has_reported_end:
            self._has_reported_end = True
            self._calls.finished(self.lane)

    # --- staying attached -------------------------------------------------------------------------

    ask_again = (LaneHeld, LaneNotOpen, UnknownPartition)

    @property
    def wants_session(self) -> bool:
        """True until the lane is given up. A leaving reader wants a session for as long as the
        broker counts the lane as its own.
        """
        return not self._is_closed and not (self._is_leaving and not self._token)

    def start(self) -> None:
        """Attach, and stay attached. Harmless to repeat."""
        if self.failure is None:
            self.sessions.start()

    async def ask(self, connection: Connection) -> wire.LaneAttached:
        """Send LANE_ATTACH with the current token."""
        terms, lane = self._terms, self.lane
        request = wire.LaneAttach(
            terms.subject,
            lane.partition,
            terms.group,
            terms.name,
            terms.incarnation,
            lane.range.first,
            lane.range.end,
            lane.version,
            self._token,
            terms.lease_ms,
        )
        answer = await connection.call(FrameKind.LANE_ATTACH, request.pack(), timeout_s=ANSWER_S)
        return wire.LaneAttached.unpack(answer.payload)

    def granted(self, answer: wire.LaneAttached) -> None:
        """The lane was granted: resumed, or granted again."""
        self._inbox.by_key.end_sequence()  # the lease may be shorter now
        is_resumed, parked = bool(answer.is_resumed), unpack_keys(answer.parked)
        if not is_resumed:
            self._void(self.core.lost)
        self.core.attached(answer.position, is_resumed=is_resumed, parked=parked)
        self._token = answer.token
        self._has_reported_end = self._has_reported_end and is_resumed

    def attached(self, session: ConsumerSession) -> None:
        """Send everything that waited for a session."""
        self.settling.attached(session, self._token)
        self.pull_more()
        self._changed.set()

    def lease_renewed(self) -> None:
        """The lease was renewed: the consumer may hand out again."""
        self._inbox.changed(self)

    def detached(self) -> None:
        """No pull and no verdict is under way any more."""
        self.is_pulling = False
        self.settling.detached()
        self._changed.set()

    def refused(self, failure: CallerError) -> None:
        """Report the failure to the application."""
        self._fail(failure)

    def _session_lost(self, failure: QmqError) -> None:
        if isinstance(failure, LaneLost):
            self.lost(failure)
        self.sessions.failed(failure)

    def lost(self, failure: LaneLost) -> None:
        """The lane is lost: all held messages are void."""
        log.info("%s lost lane %s: %s", self._terms.name, self.lane, failure)
        self._token = 0
        self._has_reported_end = False
        self.sessions.doubt()
        self._void(self.core.lost)

    def _void(self, take: Callable[[], list[Cell]], *, is_willing: bool = False) -> None:
        """The cells that `take` returns are void, and nothing else of the lane may be handed
        out.
        """
        self._inbox.by_key.end_sequence()
        cells = take()
        self.settling.voided(cells, self._lost_error())
        self.arm()
        self._inbox.voided(
            self, cells, 0 if is_willing else sum(cell.count for cell in cells if cell.is_seen)
        )
        self._changed.set()

    def _lost_error(self) -> LaneLost:
        return LaneLost(
            f"the lane {self.lane.range} of partition {self.partition} of {self.subject!r} no "
            "longer belongs to this consumer: the message may be delivered again"
        )

    # --- the end ----------------------------------------------------------------------------------

    def release(self) -> None:
        """The lane goes to another consumer: hand out no more of its messages. `leave` follows."""
        self._is_leaving = True
        self._void(self.core.release, is_willing=True)

    async def leave(self, grace_s: float, *, is_last: bool = False) -> None:
        """After `release`: let handlers finish for `grace_s`, settle, and give the lane up. With
        `is_last` the consumer closes: waiters for a verdict get ClientClosed, not LaneLost.
        """
        await self._until(lambda: not self.core.working, grace_s)
        self._void(partial(self.core.release, is_final=True))
        self.settling.now()
        await self._until(
            lambda: self.core.is_answered or not self._token,
            min(self._terms.lease_ms / 2000, ANSWER_S),
        )
        await self._until(
            lambda: not self.sessions.is_attaching, min(self._terms.lease_ms / 2000, ANSWER_S)
        )
        await self._send_detach()
        self._is_closed = True
        await self.sessions.end()
        self.sessions.detach()
        if is_last:
            self.settling.close()
        # Finished messages that could not be settled will be delivered again.
        self._void(self.core.lost)
        self.settling.close()

    async def _until(self, condition: Callable[[], bool], within_s: float) -> None:
        """Wait until the condition holds, or the time is up."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.debug(
                "%s: lane %s did not come to rest in %.1f s", self._terms.name, self.lane, within_s
            )

    async def _send_detach(self) -> None:
        session = self.session
        if session is None or not session.connection.is_open:
            return
        try:
            await session.connection.call(
                FrameKind.DETACH, wire.pack_detach(session.number), timeout_s=ANSWER_S
            )
        except QmqError as failure:
            log.debug("%s: %s: the lane's lease will expire", self._terms.name, failure)
