"""The client's connections, one for each broker, and the way to a broker group's current master;
and what all of a client counts and reports.

Counters are plain integers, incremented once for each batch, delivery or request;
`qmq/client/metrics.py` reads them. The outcomes of verdicts are reported to interceptors: one
report for each request that took verdicts to a broker. A client without interceptors has no
reporter, and makes its requests without one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from qmq.client.connection.connection import (
    TIMING,
    AnswerWatch,
    ClientTiming,
    Connection,
    OnAnswer,
    ReachPatience,
    connect,
)
from qmq.client.consuming.message import ArrivedBatches
from qmq.client.metadata.cache import Master, MetadataCache, shared
from qmq.errors import ClientClosed, NameUnresolved, NotConnected, PeerError, QmqError, Unavailable
from qmq.metrics.figures import Durations
from qmq.model import base_group
from qmq.process.event_loop import EventLoopTick
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.server_name import ServerName
from qmq.wire.frame import Frame
from qmq.wire.frame_payloads import LaneVerdict, Settlement, Verdict

if TYPE_CHECKING:
    from qmq.client.consuming.ack_spool import AckSpool


VERDICTS: Final = {
    Verdict.ACK: "ack",
    Verdict.NACK: "nack",
    Verdict.RELEASE: "release",
    Verdict.DEAD: "reject",
}
LANE_VERDICTS: Final = {
    LaneVerdict.DONE: "ack",
    LaneVerdict.FAILED: "fail",
    LaneVerdict.PARKED: "park",
}


@dataclass(frozen=True, slots=True)
class SettleReport:
    """One request with verdicts, and its answer. Times are nanoseconds since 1970."""

    subject: str
    group: str
    broker_group: str
    server: str
    """The address of the master that was asked."""
    verdicts: Mapping[str, int]
    """How many messages got each verdict: `ack`, `nack`, `release` and `reject`; of an ordered
    subject `ack`, `fail` and `park`.
    """
    began_ns: int
    ended_ns: int
    error: QmqError | None
    """Why the broker refused the request, or has not answered; then the verdicts are sent again
    while the messages are held.
    """


SETTLE_DELAY_S: Final = 0.005
"""Verdicts wait this long, to be sent together with others."""

Send = Callable[[], None]


class SettleClock:
    """Lets all consumers and lanes of a client send their verdicts at one time: the broker gets one
    write for all, handles it in one turn, and writes one entry to its log.
    """

    def __init__(self, loop_round: EventLoopTick) -> None:
        self._round = loop_round
        self._waiting: dict[Send, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, send: Send) -> None:
        """Call `send` with the others, `SETTLE_DELAY_S` after the first of them was added."""
        self._waiting[send] = None
        if self._timer is None:
            self._timer = self._round.own_loop().call_later(SETTLE_DELAY_S, self._fire)

    def discard(self, send: Send) -> None:
        """Do not call `send`, if it waits."""
        self._waiting.pop(send, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        sends = iter(waiting)
        try:
            for send in sends:
                send()
        finally:  # one that fails must not keep the others from being sent
            for send in sends:
                self.add(send)


class SettleReporter:
    """Watches the requests of one consumer to one broker group. `on_report` gets a report when a
    request is answered or has failed.
    """

    def __init__(
        self,
        on_report: Callable[[SettleReport], None],
        subject: str,
        group: str,
        broker_group: str,
        now_ns: Callable[[], int],
    ) -> None:
        self._on_report = on_report
        self._place = subject, group, broker_group
        self._now_ns = now_ns

    def watch(self, server: str, verdicts: Mapping[str, int], on_answer: OnAnswer) -> OnAnswer:
        """A request begins. Returns what to call with its answer, in place of `on_answer`."""
        began_ns = self._now_ns()

        def answered(answer: Frame | QmqError) -> None:
            error = answer if isinstance(answer, QmqError) else None
            self._on_report(
                SettleReport(*self._place, server, verdicts, began_ns, self._now_ns(), error)
            )
            on_answer(answer)

        return answered


def counted(settlements: Iterable[Settlement]) -> Mapping[str, int]:
    """How many messages get each verdict."""
    found: Counter[str] = Counter()
    for each in settlements:
        found[VERDICTS[Verdict(each.verdict)]] += each.last - each.first + 1
    return found


@dataclass(slots=True)
class SendCounters:
    """Counters of all producers of one subject."""

    seconds: Durations
    """From closing a batch to its receipt; shared by the whole client."""
    messages: int = 0
    bytes: int = 0
    batches: int = 0
    resent: int = 0
    """Sends of a batch after its first."""
    failed: int = 0
    """Messages that failed for good."""


@dataclass(slots=True)
class ReceiveCounters:
    """Counters of all consumers of one group on one subject."""

    received: int = 0
    acked: int = 0
    nacked: int = 0
    released: int = 0
    rejected: int = 0
    stale: int = 0
    """Stale messages of closed consumers; open consumers count their own."""


class ClientCounters:
    """All counters of a client."""

    def __init__(self) -> None:
        self.seconds = Durations()
        self.sends: dict[str, SendCounters] = {}
        self.takes: dict[tuple[str, str], ReceiveCounters] = {}

    def sending(self, subject: str) -> SendCounters:
        """The counters of a subject; made if absent."""
        return self.sends.setdefault(subject, SendCounters(self.seconds))

    def taking(self, subject: str, group: str) -> ReceiveCounters:
        """The counters of a group on a subject,
        where a broadcast group counts as one; made if absent.
        """
        return self.takes.setdefault((subject, base_group(group)), ReceiveCounters())


_Place = tuple[str, ServerName]
"""Where a server listens, and its name."""

REACH_S: Final = 1.0
"""If a broker has not answered the HELLO after this time, the client asks the metaserver for the
master; the attempt continues.
"""


class ConnectionPool:
    """The client's connections, by address and the server's name.
    Concurrent callers share one attempt.
    """

    def __init__(
        self,
        locator: MetadataCache,
        client: str,
        *,
        now_ns: Callable[[], int] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        network: Network = NETWORK,
        store: AckSpool | None = None,
        timing: ClientTiming = TIMING,
        on_settled: Callable[[SettleReport], None] | None = None,
    ) -> None:
        """`now_s` is a monotonic clock. `on_settled` is called with every request
        that has verdicts.
        """
        self.locator = locator
        self.timing = timing
        self.now_ns = now_ns or time.time_ns
        """Nanoseconds since 1970, for all who use these links."""
        self.round = EventLoopTick()
        """The work of producers, consumers and connections at the end of a round
        of the event loop.
        """
        self.settle_clock = SettleClock(self.round)
        self.arrived = ArrivedBatches(self.round.at_end)
        self.answer_watch = AnswerWatch(timing.stall_s)
        self.store = store
        """The spool of verdicts that no broker has answered yet; None:
        they are kept in memory only.
        """
        self._on_settled = on_settled
        self._client = client
        self._network = network
        self._connections: dict[_Place, Connection] = {}
        """The open ones."""
        self._patience = ReachPatience(now_s, timing.mistake_s)
        self._attempts: dict[_Place, asyncio.Task[Connection]] = {}
        self.counters = ClientCounters()
        self.is_closed = False
        self.is_paused = False
        """Whether all consumers of this client are paused."""

    @property
    def connections(self) -> int:
        return sum([each.is_open for each in list(self._connections.values())])

    async def reach(self, subject: str, group: str) -> tuple[Master, Connection]:
        """The group's master and an open connection to it. Tries once: call again after
        Unavailable; `reach` keeps the pauses.

        Raises UnknownHost or TlsRefused if that is a mistake, and the client never reached a
        broker.
        """
        self.check_usable()
        master = await self.locator.master(subject, group)
        self._patience.tries(master.address)
        try:
            async with asyncio.timeout(REACH_S):
                return master, await self._open((master.address, master.server))
        except NameUnresolved as failure:
            self.locator.doubt(group, master)
            told = (
                f"where broker group {group} says it is: give its broker a name that clients can "
                "resolve (QMQ_ADVERTISE)"
            )
            raise self._patience.error_for(
                NameUnresolved(f"{failure.message}, {told}"), [master.address]
            ) from failure
        except (Unavailable, PeerError) as failure:
            self.locator.doubt(group, master)
            raise self._patience.error_for(failure, [master.address]) from failure.__cause__
        except TimeoutError:
            self.locator.doubt(group, master)
            raise NotConnected(f"no broker has answered at {master.address} yet") from None

    def server(self, group: str) -> str | None:
        """The address of a broker group's master, if it is known and not in doubt."""
        master = self.locator.book.master(group)
        return master.address if master is not None else None

    def settle_reporter(self, subject: str, group: str, broker_group: str) -> SettleReporter | None:
        """Reports a consumer's requests with verdicts to interceptors;
        None without interceptors.
        """
        if self._on_settled is None:
            return None
        return SettleReporter(
            self._on_settled, subject, base_group(group), broker_group, self.now_ns
        )

    async def _open(self, place: _Place) -> Connection:
        found = self._connections.get(place)
        if found is not None and found.is_open:
            return found
        self.check_usable()  # the client may have been closed while the master was looked up
        attempt = self._attempts.get(place)
        if attempt is None:
            address, server = place
            attempt = self._attempts[place] = asyncio.create_task(
                connect(
                    address,
                    self._client,
                    self._network,
                    reauth_s=self.timing.reauth_s,
                    loop_round=self.round,
                    server=server,
                )
            )
            attempt.add_done_callback(lambda done: self._attempted(place, done))
        return await shared(attempt)

    def check_open(self) -> None:
        """Raises ClientClosed if the client was closed."""
        if self.is_closed:
            raise ClientClosed("the client is closed: make a new one with qmq.connect()")

    def check_usable(self) -> None:
        """Raises ClientClosed if the client was closed, or as `EventLoopTick.own_loop`."""
        self.check_open()
        self.round.own_loop()

    def _attempted(self, place: _Place, done: asyncio.Task[Connection]) -> None:
        self._attempts.pop(place, None)
        if done.cancelled():
            return
        if (failure := done.exception()) is not None:
            self._patience.failed(place[0], failure)
            return
        found = done.result()
        self._patience.reached(found.address)
        if not found.ended.is_set():
            self._connections[place] = found
            found.on_closed[lambda: self._ended(place, found)] = None

    def _ended(self, place: _Place, connection: Connection) -> None:
        if self._connections.get(place) is connection:
            del self._connections[place]

    def abandon(self) -> None:
        """Disconnect when the event loop has ended."""
        self.is_closed = True
        for each in self._connections.values():
            each.stream.shut_down()

    async def close(self) -> None:
        self.is_closed = True
        self.answer_watch.close()
        await self.locator.close()
        attempts = list(self._attempts.values())
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(
            *attempts, return_exceptions=True
        )  # one may have connected: afterwards it is among the connections
        connections = list(self._connections.values())
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.wait_closed()
