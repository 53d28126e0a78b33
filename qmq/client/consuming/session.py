"""What a consumer's attachments share: its limits, its time slice of the event loop, its terms and
calls, and the session with the current master of one broker group.

`SessionLoop` keeps the session. The loop finds the master, asks for a session (ATTACH or
LANE_ATTACH), sends heartbeats until the session ends, and begins again. The loop's user, an
attachment (`attachment.py`) or a lane (`ordered/lane_reader.py`), builds the request and handles
the answer.

    outcome                                        next
    no connection to the master                    try again immediately: `ConnectionPool.reach`
                                                   keeps its own pauses
    NotMaster                                      ask the metaserver for the master, pause, try
                                                   again
    an error in the user's `ask_again`             pause as long as the broker says, try again
    LaneLost                                       tell the user, pause, try again
    the session ended, UnknownConsumer             pause, try again
    another error of the caller                    pause, try again; after REFUSALS_MAX of them tell
                                                   the user, and end
    ClientClosed, OrderMismatch                    tell the user, and end

The lease counts from the time at which the last answered heartbeat was *sent*, so it never ends
later here than at the broker.

By default the consumer's limit of messages follows the application (`PrefetchLimit`). A node that
is busy with producers answers a pull once in each round of its event loop, which takes a
millisecond or more; an application that handles 2,000 messages in less time would wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from qmq import limits
from qmq.client.connection.connection import Connection, pause_s
from qmq.client.connection.pool import ConnectionPool
from qmq.client.consuming import ReadyMessages
from qmq.client.consuming.iterator import LOOP_S
from qmq.client.metadata.cache import Master
from qmq.errors import (
    CallerError,
    ClientClosed,
    InvalidArgument,
    LaneLost,
    NeverReached,
    NotConnected,
    NotMaster,
    OrderMismatch,
    QmqError,
    Unavailable,
    UnknownConsumer,
)
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind

if TYPE_CHECKING:
    from qmq.client.consuming.long_retries import LongRetry

PREFETCH: Final = 2_000
PREFETCH_MAX: Final = 16_000
QUICK_S: Final = 0.1


def check_limits(prefetch: int, prefetch_bytes: int) -> None:
    """Raises InvalidArgument for invalid limits."""
    if not 0 < prefetch <= limits.CONSUMER_UNACKED_MAX:
        raise InvalidArgument(f"prefetch is 1 to {limits.CONSUMER_UNACKED_MAX}, not {prefetch}")
    if not 0 < prefetch_bytes <= limits.CONSUMER_UNACKED_BYTES_MAX:
        raise InvalidArgument(
            f"prefetch_bytes is 1 to {limits.CONSUMER_UNACKED_BYTES_MAX}, not {prefetch_bytes}"
        )


class PrefetchLimit:
    """How many messages a consumer may hold.

    `chosen` is the application's number. Without one the limit is `PREFETCH`. It doubles when a
    full answer comes less than `QUICK_S` after its pull left, and the application has handled
    everything that it held by then. It halves when pulls leave less often than that.
    """

    def __init__(self, chosen: int | None) -> None:
        self.messages = PREFETCH if chosen is None else chosen
        self._is_chosen = chosen is not None
        self._left_s = -math.inf
        self._is_ahead = False

    def choose(self, messages: int) -> None:
        """The application chose a number."""
        self.messages, self._is_chosen = messages, True

    def left(self, now_s: float, *, is_ahead: bool) -> None:
        """A pull leaves. `is_ahead`: the application still has messages to handle."""
        if now_s - self._left_s > QUICK_S and not self._is_chosen:
            self.messages = max(self.messages // 2, PREFETCH)
        self._left_s, self._is_ahead = now_s, is_ahead

    def starved(self, now_s: float) -> None:
        """A full answer came, and the application held nothing any more."""
        if self._is_ahead and now_s - self._left_s <= QUICK_S and not self._is_chosen:
            self.messages = min(2 * self.messages, PREFETCH_MAX)


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The event loop's clock: what `time` of asyncio's own event loops calls,
    and `time` of others.
    """
    return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time


class LoopSlice:
    """A consumer's time slice of the event loop, `LOOP_S` long. An application that never waits
    between its messages gets them without waiting: after `until_s`, the consumer has to `end` the
    slice before it hands out more, because heartbeats and other tasks need the event loop.
    `ReadyMessages` does the same.
    """

    __slots__ = ("clock", "until_s")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.clock = clock_of(loop)
        self.begin()

    def begin(self) -> None:
        """The event loop has run."""
        self.until_s = self.clock() + LOOP_S

    async def end(self) -> None:
        """Let the event loop run once."""
        await asyncio.sleep(0)
        self.begin()


ANSWER_S: Final = 10.0
"""How long a broker may take to answer anything but a pull that waits."""


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """The consumer's terms: group, subject and options, the same for all its attachments."""

    subject: str
    group: str
    name: str
    incarnation: str
    start: str
    lease_ms: int
    tags_any: list[str]
    tags_all: list[str]
    pull_bytes: int
    most_once: bool = False
    condition: str = ""


class ConsumerSession(NamedTuple):
    """A consumer on one connection. Compared by identity,
    since two brokers may give the same number.
    """

    connection: Connection
    number: int
    master: Master


@dataclass(frozen=True, slots=True)
class ConsumerCalls:
    """What an attachment tells its consumer, and asks it."""

    ready: ReadyMessages[Any]
    """Ended before anybody takes or drops messages of an attachment."""
    limit: PrefetchLimit
    """How many messages the consumer may hold."""
    answered: Callable[[int, int], None]
    """A pull for so many messages brought so many."""
    notify: Callable[[], None]
    """Something changed: wake all waiters."""
    pull_more: Callable[[], None]
    """There may be room for more messages."""
    failed: Callable[[str, QmqError], None]
    """The attachment to this broker group cannot continue: report to the application."""
    postpone: Callable[[Iterable[LongRetry]], None]
    """Send messages to a delay group, to be retried later."""
    lost: Callable[[int], None]
    """So many messages were lost before they were settled."""


log = logging.getLogger("qmq.client")

REFUSALS_MAX: Final = 3
"""A broker may learn of a new subject or group later than the client does."""


GrantedT = TypeVar("GrantedT", bound="wire.Attached | wire.LaneAttached")


class SessionUser(Protocol[GrantedT]):
    """The interface of an attachment or a lane that the loop uses."""

    @property
    def ask_again(self) -> tuple[type[QmqError], ...]:
        """Errors after which the loop tries again."""
        ...

    @property
    def wants_session(self) -> bool:
        """Whether to begin another session when one ends."""
        ...

    async def ask(self, connection: Connection) -> GrantedT:
        """Ask the broker for a session. Raises the broker's error."""
        ...

    def granted(self, answer: GrantedT) -> None:
        """The broker granted a session; some held messages may be void."""
        ...

    def attached(self, session: ConsumerSession) -> None:
        """A session has begun."""
        ...

    def lease_renewed(self) -> None:
        """The lease was renewed."""
        ...

    def detached(self) -> None:
        """The session has ended, or could not begin."""
        ...

    def lost(self, failure: LaneLost) -> None:
        """Another consumer has the lane of this session."""
        ...

    def refused(self, failure: CallerError) -> None:
        """No session is possible: report that to the application."""
        ...


class SessionLoop(Generic[GrantedT]):
    """`session` is None while no session is attached."""

    def __init__(
        self,
        links: ConnectionPool,
        user: SessionUser[GrantedT],
        *,
        subject: str,
        group: str,
        name: str,
        lease_ms: int,
    ) -> None:
        """`group` is the broker group, `name` the consumer's, `lease_ms` what the consumer asks
        for: a broker may grant less.
        """
        self.session: ConsumerSession | None = None
        self.sure_until_s = -math.inf
        """Until then the lease cannot have ended at the broker, by the event loop's clock."""
        self.is_attaching = False
        self._links, self._user = links, user
        self._subject, self._group, self._name = subject, group, name
        self._lease_ms = lease_ms
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Attach, and stay attached. Harmless to repeat."""
        if (self._runner is None or self._runner.done()) and self._user.wants_session:
            self._runner = self._loop.create_task(self._run())

    async def end(self) -> None:
        """End the loop. The session stays, for the last verdicts; then call `detach`."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])

    async def _run(self) -> None:
        tries = refusals = 0
        while self._user.wants_session:
            rest_s = None
            try:
                master, connection = await self._links.reach(self._subject, self._group)
                if await self._serve_under(master, connection):
                    tries = refusals = 0
            except self._user.ask_again as failure:
                tries, rest_s = 0, (failure.retry_after_ms or 50) / 1000 * random.uniform(0.7, 1.3)  # noqa: S311 - jitter, not a secret
            except Unavailable as failure:
                log.debug("%s: %s", self._name, failure)
                continue
            except CallerError as failure:
                refusals += 1
                self.detach()
                if (
                    isinstance(failure, ClientClosed | OrderMismatch | NeverReached)
                    or refusals > REFUSALS_MAX
                ):
                    self._user.refused(failure)
                    return
            except QmqError as failure:
                log.debug("%s: %s", self._name, failure)
            self.detach()
            await asyncio.sleep(
                pause_s(self._links.timing.session_retry_s, tries) if rest_s is None else rest_s
            )
            tries += 1

    async def _serve_under(self, master: Master, connection: Connection) -> bool:
        """One session, from asking for it to its end. Returns whether there was one. Raises the
        broker's error, unless a pause is enough.
        """
        is_attached = False
        try:
            await self._attach(master, connection)
            is_attached = True
            await self._stay_attached()
        except NotMaster:
            self._links.locator.doubt(self._group, master)
        except LaneLost as failure:
            self._user.lost(failure)
        except self._user.ask_again:
            raise
        except (Unavailable, UnknownConsumer) as failure:
            log.debug("%s: %s", self._name, failure)
        return is_attached

    async def _attach(self, master: Master, connection: Connection) -> None:
        self.is_attaching = True
        try:
            sent_s = self._loop.time()
            answer = await self._user.ask(connection)
            if not connection.is_open:
                raise NotConnected("the connection ended while attaching")
            self._links.locator.confirm(self._group)
            self._user.granted(answer)
            self.session = ConsumerSession(connection, answer.session, master)
            self._ended.clear()
            connection.on_closed[self.detach] = None
            self._lease_ms = answer.lease_ms
            self._renewed(sent_s)
        finally:
            self.is_attaching = False
        self._user.attached(self.session)

    async def _stay_attached(self) -> None:
        """Send heartbeats until the session ends. The first one comes at a random time: hundreds of
        consumers that attached together would send all of theirs at once, for ever, and delay
        everything else meanwhile.
        """
        period_s = self._lease_ms / 3000
        wait_s = period_s * random.random()  # noqa: S311 - jitter, not a secret
        while (session := self.session) is not None:
            try:
                async with asyncio.timeout(wait_s):
                    await self._ended.wait()
            except TimeoutError:
                wait_s = period_s
                sent_s = self._loop.time()
                await session.connection.call(
                    FrameKind.HEARTBEAT, wire.pack_session(session.number), timeout_s=ANSWER_S
                )
                if session is self.session:
                    self._renewed(sent_s)

    def _renewed(self, sent_s: float) -> None:
        self.sure_until_s = sent_s + self._lease_ms / 1000
        self._user.lease_renewed()

    def doubt(self) -> None:
        """Treat the lease as ended."""
        self.sure_until_s = -math.inf

    def moved(self) -> None:
        """Routes changed: if the group has another master now, attach there."""
        known = self._links.locator.book.master(self._group)
        if self.session is not None and known is not None and known != self.session.master:
            self.detach()

    def failed(self, failure: QmqError) -> None:
        """A request of this session failed: end the session, and attach again."""
        log.debug("%s: %s", self._name, failure)
        if isinstance(failure, NotMaster) and self.session is not None:
            self._links.locator.doubt(self._group, self.session.master)
        self.detach()

    def detach(self) -> None:
        """End the session on this side."""
        session, self.session = self.session, None
        if session is not None:
            session.connection.on_closed.pop(self.detach, None)
        self._user.detached()
        self._ended.set()
