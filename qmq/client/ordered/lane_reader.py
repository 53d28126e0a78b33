"""A lane as this consumer reads it, over all the masters that its broker group has in time. Thin: `lane_core.py` decides.

It keeps a session with the master, a pull under way, and at most one LANE_SETTLE (`lane_acks.py`). It comes back after a broken connection,
or to a new master, with the token that it was granted: what it holds is still its own then. Without it (the lease was over, an operator
moved the group, the range is somebody else's) the broker gives another token, or none, and everything in hand is void.

What a broker may answer, and what is done about it:

    LaneHeld, LaneNotOpen, UnknownPartition     somebody has not let go yet; this broker has not heard yet: again, soon
    LaneLost                                    drop everything; attach anew, with no token
    UnknownConsumer, NotConnected, Stopping     attach again, with the token
    NotMaster                                   the same, at the new master
    MessagesExpired, LogDamaged, CorruptBatch   the application is to know

The lease is counted here from when the last sign of life was *sent* that was answered, so it never ends later here than at the broker.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from qmq_ordering.lane import Lane
from qmq_ordering.route import LpRange

from qmq import limits
from qmq.client.client_timing import pause_s
from qmq.client.connection import Connection
from qmq.client.consumer_session import ANSWER_S, ConsumerSession
from qmq.client.links import Links
from qmq.client.ordered import lane_pull
from qmq.client.ordered.lane_acks import LaneAcks
from qmq.client.ordered.lane_core import Cell, FailurePolicy, LaneCore, LaneState
from qmq.client.ordered.ordered_message import LaneSettler, OrderedMessage
from qmq.client.ordered.ordered_messages import MessageRun
from qmq.client.route_book import Master
from qmq.errors import (
    CallerError,
    ClientClosed,
    LaneHeld,
    LaneLost,
    LaneNotOpen,
    MessagesExpired,
    NotConnected,
    NotMaster,
    OrderMismatch,
    PeerError,
    QmqError,
    StorageError,
    Unavailable,
    UnknownConsumer,
    UnknownPartition,
)
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind

log = logging.getLogger("qmq.client")

WAIT_MS: Final = 20_000
"""How long a pull may wait at its broker."""
REFUSALS_MAX: Final = 3
"""A broker may hear of a new subject later than we do."""


@dataclass(frozen=True, slots=True)
class LaneTerms:
    """Who reads, and how: the same for all lanes of a consumer."""

    subject: str
    group: str
    name: str
    incarnation: str
    lease_ms: int
    pull_bytes: int
    policy: FailurePolicy


class LaneOwner(LaneSettler, Protocol):
    """Whose lane it is: the consumer."""

    @property
    def room(self) -> int:
        """How many unfinished messages each lane may have."""
        ...

    @property
    def room_bytes(self) -> int:
        """How many bytes of them."""
        ...

    @property
    def is_bulk(self) -> bool:
        """Whether messages are wanted in runs."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether no messages are wanted now."""
        ...

    def arrived(self, messages: list[OrderedMessage]) -> None: ...

    def arrived_in_bulk(self, lane: LaneReader, runs: list[MessageRun]) -> None:
        """The same in runs."""
        ...

    def voided(self, lane: LaneReader, cells: list[Cell], stale: int) -> None:
        """Nothing of the lane is to be handed out; these cells are not ours any more, which is news for so many messages."""
        ...

    def due(self, cells: list[Cell]) -> None:
        """Failed messages may be tried again."""
        ...

    def changed(self, lane: LaneReader) -> None:
        """It may hand out again."""
        ...

    def finished(self, lane: LaneReader) -> None:
        """All of it, to its end, is done and committed."""
        ...

    def failed(self, failure: QmqError) -> None:
        """The application is to know."""
        ...


class LaneReader:
    """`core` is what it holds; `failure` keeps it from pulling until the application knows."""

    def __init__(self, links: Links, owner: LaneOwner, terms: LaneTerms, lane: Lane) -> None:
        self.lane = lane
        self.subject = terms.subject
        self.broker_group = lane.group
        self.partition = lane.partition
        self.core = LaneCore(terms.policy)
        self.settling = LaneAcks(self.core, terms.name, links.timing.session_retry_s[-1], sent_away=self._sent_away, at_rest=self._at_rest)
        self.session: ConsumerSession | None = None
        self.failure: QmqError | None = None
        self._links, self._owner, self._terms = links, owner, terms
        self._tally = links.tallies.taking(terms.subject, terms.group)
        self._loop = asyncio.get_running_loop()
        self._token = 0
        self._lease_ms = terms.lease_ms
        """As the broker granted it, which may be shorter than what was asked for."""
        self._sure_until_s = 0.0
        self._is_pulling = self._is_attaching = self._is_told_finished = False
        self._is_leaving = self._is_closed = False
        self._retry_timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._bell = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    @property
    def lps(self) -> LpRange:
        """Which logical partitions it has."""
        return self.lane.range

    def is_sure(self) -> bool:
        """Whether the lease cannot have ended yet at the broker."""
        return self._loop.time() < self._sure_until_s

    # --- messages in ---------------------------------------------------------------------------------------------------

    def pull_more(self) -> None:
        """Ask for messages if there is room for a good many."""
        session, core = self.session, self.core
        if self._is_pulling or session is None or self._is_leaving or core.is_end or self.failure is not None:
            return
        room, room_bytes = self._owner.room, self._owner.room_bytes
        if core.open * 2 > room or core.open_bytes * 2 > room_bytes or self._owner.is_paused:
            return
        self._is_pulling = True
        messages = max(min(room - core.open, limits.PULL_MESSAGES_MAX), 1)
        size = max(min(room_bytes - core.open_bytes, self._terms.pull_bytes), 1)
        pull = wire.LanePull(session.number, self._token, core.position, messages, size, WAIT_MS)
        session.connection.request(
            FrameKind.LANE_PULL,
            lambda answer: self._pulled(session, answer),
            wire.pack_lane_pull(pull),
            timeout_s=WAIT_MS / 1000 + ANSWER_S,
        )

    def _pulled(self, session: ConsumerSession, answer: Frame | QmqError) -> None:
        if session is not self.session:
            return
        self._is_pulling = False
        try:
            if isinstance(answer, QmqError):
                raise answer
            if self._owner.is_bulk:
                self._accept_runs(lane_pull.unpack_runs(answer.payload, session.number, self.core.parked))
            else:
                self._accept(lane_pull.unpack(answer.payload, session.number))
        except (MessagesExpired, StorageError, PeerError) as failure:
            self._fail(failure)
        except QmqError as failure:
            self._sent_away(failure)
        else:
            self.settling.soon()
            self.pull_more()

    def _accept(self, brought: lane_pull.Brought) -> None:
        cells = self.core.delivered(brought.arrivals, brought.next_sequence, is_end=brought.is_end)
        came = [
            OrderedMessage(self._owner, self, cell, place.batch, place.index, self._token, self.lane.version)
            for cell, place in zip(cells, brought.places, strict=False)
            if cell.state is LaneState.WAITING
        ]
        if came:
            self._tally.received += len(came)
            self._owner.arrived(came)

    def _accept_runs(self, brought: lane_pull.BroughtRuns) -> None:
        cells = self.core.delivered(brought.arrivals, brought.next_sequence, is_end=brought.is_end)
        came = [
            MessageRun(self, cell, part.batch, part.indices, cell.attempt, self._token, self.lane.version)
            for cell, part in zip(cells, brought.parts, strict=False)
            if cell.state is LaneState.WAITING
        ]
        if came:
            self._tally.received += sum([len(each.indices) for each in came])
            self._owner.arrived_in_bulk(self, came)

    def _fail(self, failure: QmqError) -> None:
        self.failure = failure
        self._owner.failed(failure)

    # --- messages over -------------------------------------------------------------------------------------------------

    def worked(self, *, is_urgent: bool) -> None:
        """A handler came to an end, one way or another; what that means is to be told soon, or at once."""
        if self._retry_timer is not None or self.core.has_failing:
            self.arm()
        if is_urgent:
            self.settling.now()
        else:
            self.settling.soon()
        if not self._is_pulling:
            self.pull_more()
        self._bell.set()

    def arm(self) -> None:
        """Wake up when the next failed message is due."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        due_ms = self.core.next_due_ms()
        if due_ms is not None:
            self._retry_timer = self._loop.call_at(due_ms / 1000, self._due)

    def _due(self) -> None:
        # Rounded up: a timer that rings a little early would find nothing, and ring again at once.
        self._owner.due(self.core.due(int(self._loop.time() * 1000) + 1))
        self.arm()

    async def confirmed(self, cell: Cell) -> None:
        """Returns when the broker has the verdict. Raises LaneLost, NotConnected (it is sent again and again), ClientClosed."""
        await self.settling.confirmed(cell, self._lost_error())

    def _at_rest(self) -> None:
        """The broker has every verdict there is."""
        self._bell.set()
        if self.core.is_finished and not self._is_told_finished:
            self._is_told_finished = True
            self._owner.finished(self)

    # --- staying attached ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach, and stay so. Harmless to repeat."""
        if (self._runner is None or self._runner.done()) and not self._is_closed and self.failure is None:
            self._runner = self._loop.create_task(self._run())

    async def _run(self) -> None:
        """Attach, and attach again whenever the connection or the session ends."""
        refusals = tries = 0
        while not self._is_closed and not (self._is_leaving and not self._token):
            rest_s = pause_s(self._links.timing.session_retry_s, tries)
            tries += 1
            try:
                # The way there keeps its own pauses; those of this loop are for what a broker answers.
                master, connection = await self._links.reach(self.subject, self.broker_group)
                if await self._serve_under(master, connection):
                    tries = refusals = 0
            except (LaneHeld, LaneNotOpen, UnknownPartition) as failure:
                tries, rest_s = 0, (failure.retry_after_ms or 50) / 1000 * random.uniform(0.7, 1.3)  # noqa: S311 - jitter, not a secret
            except Unavailable as failure:
                log.debug("%s: %s", self._terms.name, failure)
                continue
            except CallerError as failure:
                refusals += 1
                if isinstance(failure, ClientClosed | OrderMismatch) or refusals > REFUSALS_MAX:
                    self._fail(failure)
                    return
            except QmqError as failure:
                log.debug("%s: %s", self._terms.name, failure)
            await asyncio.sleep(rest_s)

    async def _serve_under(self, master: Master, connection: Connection) -> bool:
        """One session, from attaching to its end; whether there was one. Raises what attaching raises, unless it is worth another try."""
        is_attached = False
        try:
            await self._attach(master, connection)
            is_attached = True
            await self._stay_attached()
        except NotMaster:
            self._links.locator.doubt(self.broker_group, master)
        except LaneLost as failure:
            self._lost(failure)
        except (LaneHeld, LaneNotOpen):
            raise
        except (Unavailable, UnknownConsumer) as failure:
            log.debug("%s: %s", self._terms.name, failure)
        finally:
            self._detach()
        return is_attached

    async def _attach(self, master: Master, connection: Connection) -> None:
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
        self._is_attaching, sent_s = True, self._loop.time()
        try:
            answer = await connection.call(FrameKind.LANE_ATTACH, request.pack(), timeout_s=ANSWER_S)
            attached = wire.LaneAttached.unpack(answer.payload)
            parked = lane_pull.unpack_keys(attached.parked)
            if not connection.is_open:
                raise NotConnected("the connection ended while attaching")
            self._take_up(attached, parked, ConsumerSession(connection, attached.session, master), sent_s)
        finally:
            self._is_attaching = False
            self._bell.set()

    def _take_up(self, attached: wire.LaneAttached, parked: list[bytes], session: ConsumerSession, sent_s: float) -> None:
        is_resumed = bool(attached.is_resumed)
        self._links.locator.confirm(self.broker_group)
        if not is_resumed:
            self._drop(self.core.lost())
        self.core.attached(attached.position, is_resumed=is_resumed, parked=parked)
        self._token = attached.token
        self._is_told_finished = self._is_told_finished and is_resumed
        self.session = session
        self._ended.clear()
        session.connection.on_closed[self._detach] = None
        self._lease_ms = attached.lease_ms
        self._heard(sent_s)
        self.settling.attached(session, self._token)
        self.pull_more()

    async def _stay_attached(self) -> None:
        """Send signs of life until the session ends."""
        while (session := self.session) is not None:
            try:
                async with asyncio.timeout(self._lease_ms / 3000):
                    await self._ended.wait()
            except TimeoutError:
                sent_s = self._loop.time()
                await session.connection.call(FrameKind.HEARTBEAT, wire.pack_session(session.number), timeout_s=ANSWER_S)
                if session is self.session:
                    self._heard(sent_s)

    def _heard(self, sent_s: float) -> None:
        self._sure_until_s = sent_s + self._lease_ms / 1000
        self._owner.changed(self)

    def moved(self) -> None:
        """Routes changed: if the group has another master now, go there."""
        known = self._links.locator.book.master(self.broker_group)
        if self.session is not None and known is not None and known != self.session.master:
            self._detach()

    def _sent_away(self, failure: QmqError) -> None:
        log.debug("%s: %s", self._terms.name, failure)
        if isinstance(failure, LaneLost):
            self._lost(failure)
        elif isinstance(failure, NotMaster) and self.session is not None:
            self._links.locator.doubt(self.broker_group, self.session.master)
        self._detach()

    def _lost(self, failure: LaneLost) -> None:
        log.info("%s lost lane %s: %s", self._terms.name, self.lane, failure)
        self._token = 0
        self._is_told_finished = False
        self._sure_until_s = 0.0
        self._drop(self.core.lost())

    def _drop(self, cells: list[Cell], *, is_willing: bool = False) -> None:
        """These are not ours any more, and nothing else of the lane is to be handed out."""
        self.settling.voided(cells, self._lost_error())
        self.arm()
        self._owner.voided(self, cells, 0 if is_willing else sum(cell.count for cell in cells if cell.is_seen))
        self._bell.set()

    def _lost_error(self) -> LaneLost:
        return LaneLost(
            f"the lane {self.lane.range} of partition {self.partition} of {self.subject!r} is not this consumer's any more, or was let go:"
            " the message may be seen again"
        )

    def _detach(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.connection.on_closed.pop(self._detach, None)
        self._is_pulling = False
        self.settling.detached()
        self._ended.set()
        self._bell.set()

    # --- the end -------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """The lane goes to another: hand out nothing more of it. `leave` follows."""
        self._is_leaving = True
        self._drop(self.core.release(), is_willing=True)

    async def leave(self, grace_s: float, *, is_last: bool = False) -> None:
        """Let handlers finish for so long, tell the broker what they did, and give the lane up. `release` came before. If it `is_last`, the
        consumer is closed: whoever waits for an answer hears that, and not that the lane went to another.
        """
        await self._until(lambda: not self.core.working, grace_s)
        self._drop(self.core.release(is_final=True))
        self.settling.now()
        await self._until(lambda: self.core.is_told or not self._token, min(self._terms.lease_ms / 2000, ANSWER_S))
        await self._until(lambda: not self._is_attaching, min(self._terms.lease_ms / 2000, ANSWER_S))
        await self._say_goodbye()
        self._is_closed = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        self._detach()
        if is_last:
            self.settling.close()
        # What is finished and could not be told will be seen again.
        self._drop(self.core.lost())
        self.settling.close()

    async def _until(self, condition: Callable[[], bool], within_s: float) -> None:
        """Wait until it holds, or the time is up."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self._bell.clear()
                    await self._bell.wait()
        except TimeoutError:
            log.debug("%s: lane %s did not come to rest in %.1f s", self._terms.name, self.lane, within_s)

    async def _say_goodbye(self) -> None:
        session = self.session
        if session is None or not session.connection.is_open:
            return
        try:
            await session.connection.call(FrameKind.DETACH, wire.pack_detach(session.number), timeout_s=ANSWER_S)
        except QmqError as failure:
            log.debug("%s: %s: the lane's lease tells", self._terms.name, failure)
