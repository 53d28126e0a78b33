"""Sends a lane's verdicts to the master: gathers them, sends one request at a time, and lets callers wait. `lane.py` provides the
verdicts.

The lanes of one consumer send their verdicts together, so that the broker gets one write for all, handles it in one turn, and writes one
entry to its log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from qmq.client.connection.connection import OnAnswer
from qmq.client.connection.pool import LANE_VERDICTS, SettleReporter
from qmq.client.consuming.ordered.lane import Cell, LaneCore, LaneRequest, LaneState
from qmq.client.consuming.session import ANSWER_S, ConsumerSession
from qmq.errors import ClientClosed, LaneLost, NotConnected, NotMaster, Outcome, QmqError, Unavailable, UnknownConsumer
from qmq.process.event_loop import require_alive
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import LaneVerdict

SETTLE_DELAY_S: Final = 0.005
"""Verdicts wait this long, to be sent together with others."""

Send = Callable[[], None]


class SettleClock:
    """Shared by all lanes of a consumer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Send, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, send: Send) -> None:
        """Call `send` with the others, `SETTLE_DELAY_S` after the first of them was added."""
        self._waiting[send] = None
        if self._timer is None:
            self._timer = self._loop.call_later(SETTLE_DELAY_S, self._ring)

    def discard(self, send: Send) -> None:
        """Do not call `send`, if it waits."""
        self._waiting.pop(send, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for send in waiting:
            send()


log = logging.getLogger("qmq.client")


class LaneAcks:
    """`sent_away` is called when the session has ended; `at_rest` when no verdict is left to send."""

    def __init__(
        self,
        core: LaneCore,
        name: str,
        retry_s: float,
        clock: SettleClock,
        *,
        sent_away: Callable[[QmqError], None],
        at_rest: Callable[[], None],
        reporter: SettleReporter | None = None,
    ) -> None:
        self._core = core
        self._name = name
        self._retry_s = retry_s
        self._clock = clock
        self._is_soon = False
        self._send = self.now
        self._sent_away = sent_away
        self._at_rest = at_rest
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

    # --- sending -------------------------------------------------------------------------------------------------------

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
            self._at_rest()
            return
        on_answer: OnAnswer = partial(self._settled, session, request)
        if self._reporter is not None and (verdicts := _counted(request)):
            on_answer = self._reporter.watch(session.connection.address, verdicts, on_answer)
        payload = wire.pack_lane_settle(session.number, self._token, request.settlements)
        session.connection.request(FrameKind.LANE_SETTLE, on_answer, payload, timeout_s=ANSWER_S)

    def _settled(self, session: ConsumerSession, request: LaneRequest, answer: Frame | QmqError) -> None:
        if session is not self._session:
            return
        if not isinstance(answer, QmqError):
            over = self._core.settled(request)
            if self._waiters:
                for cell in over:
                    _tell(self._waiters.pop(cell, None), None)
            if self._waiters or not self._core.has_verdicts:
                self.now()
            else:
                self.soon()
            return
        if isinstance(answer, NotMaster | UnknownConsumer | LaneLost | NotConnected):
            self._sent_away(answer)
            return
        if not isinstance(answer, Unavailable):
            log.warning("%s: verdicts were refused and will be sent again: %s", self._name, answer)
        self._core.detached()
        self._later(self._retry_s)

    # --- waiting -------------------------------------------------------------------------------------------------------

    async def confirmed(self, cell: Cell, lost: LaneLost) -> None:
        """Returns when the broker has the verdict. Raises `lost`, NotConnected (the verdict is sent again and again), ClientClosed."""
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
                "no answer from the lane's master in time: the verdict is retried, and the message may be delivered again",
                outcome=Outcome.UNKNOWN,
            ) from None

    def voided(self, cells: Iterable[Cell], lost: LaneLost) -> None:
        """Waiters for these cells get the error `lost`: the consumer no longer holds them."""
        for cell in cells:
            _tell(self._waiters.pop(cell, None), lost)

    def close(self) -> None:
        """Stop sending; waiters get an error with unknown outcome."""
        self._is_closed = True
        self._stop_waiting()
        for waiter in self._waiters.values():
            _tell(waiter, _closed())


def _counted(request: LaneRequest) -> Mapping[str, int]:
    """How many messages get each verdict; stretches of other lanes' messages do not count."""
    found: Counter[str] = Counter()
    for settlement, cells in request.pieces:
        if cells:
            found[LANE_VERDICTS[LaneVerdict(settlement.verdict)]] += sum([cell.count for cell in cells])
    return found


def _closed() -> ClientClosed:
    return ClientClosed("the consumer was closed before the answer came", outcome=Outcome.UNKNOWN)


def _tell(waiter: asyncio.Future[None] | None, failure: QmqError | None) -> None:
    if waiter is None or waiter.done():
        return
    if failure is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(failure)
        waiter.exception()  # the waiter may have been cancelled; then asyncio must not warn that the exception was never retrieved
