"""The parts of a broker besides its store, and their interfaces.

    BrokerParts         passed when the broker is made; none is set later
    ServingBroker       the broker, as its parts see it
    Committer           when an entry is committed: on a single node the node itself decides, on a
                        replica qmq_replication/driver.py
    ReplicaConnection   what replication needs of a connection from another replica
    ReplicaPeer         what such a connection needs of replication
    GroupRules          the operators' settings for consumer groups: retries and pauses
    PendingResponses    answers that wait for their index, and coroutines of this process that wait
                        for a commit

Group rules are in the coordination store (docs/DELIVERY.md); a broker reads them from its view,
which may lag a moment. Replicas need not agree on them: the master decides by them, and writes its
decision to the log.

Answers wait in one of three ways:

    unwritten           the index is not known yet: the entry is written at the end of the turn
    held for a commit   answered when their index is committed
    held for a flush    answered when their index is flushed on a majority
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from qmq.broker.config import BrokerConfig
from qmq.broker.dispatch.sessions import HeldAnswer, Peer
from qmq.broker.metrics import BrokerCounters, LoadMeters
from qmq.broker.produce_checks import BrokerSubjects, FindDestination, Routing
from qmq.errors import LogDamaged, QmqError
from qmq.log.actions import ScheduleAction
from qmq.log.log_config import Flush
from qmq.log.queue import Queue
from qmq.log.store import Intake, Store
from qmq.model import GroupSettings
from qmq.process.event_loop import Clock
from qmq.security.access import OpenAccess
from qmq.wire.frame import Frame
from qmq.wire.frame_payloads import Produced


class ServingBroker(Protocol):
    """The broker, as its parts see it. Requests of one round of the event loop are written and
    answered together, in one turn.
    """

    clock: Clock
    config: BrokerConfig
    loop: asyncio.AbstractEventLoop
    counters: BrokerCounters
    responses: PendingResponses
    committer: Committer
    subjects: BrokerSubjects
    """Of the store that is served from now on."""
    loads: LoadMeters
    """The loads of the partitions of ordered subjects."""
    routing: Routing
    rules: GroupRules
    report_damage: Callable[[LogDamaged], bool]
    """Reports damage. Returns True if it is being repaired, and waiting pulls will be woken."""

    @property
    def store(self) -> Store:
        """The store that is served from now on."""
        ...

    @property
    def is_serving(self) -> bool: ...

    @property
    def is_paused(self) -> bool:
        """The mastership is being handed over: no message is handed out."""
        ...

    @property
    def fatal(self) -> Callable[[BaseException], None]:
        """Stops the process."""
        ...

    def require_serving(self) -> None:
        """Raises NotMaster."""
        ...

    def schedule(self) -> None:
        """Schedule a turn for the end of this round of the event loop."""
        ...

    def turn(self) -> None:
        """Write what was staged and done, wake consumers, send answers."""
        ...

    def written(self, queues: list[Queue]) -> None:
        """Messages to these queues, or actions, are in the log."""
        ...

    def append_own(self, batches: list[Intake]) -> list[Produced]:
        """Store batches that the broker itself makes; stored ones are recognised by their numbers.
        Raises DiskFull.
        """
        ...

    def act(self, action: ScheduleAction) -> None:
        """Write the action with the next turn, after earlier ones. The actions of one turn are one
        entry: all or none. Raises NotMaster.
        """
        ...

    async def committed(self) -> None:
        """Returns when everything written so far is committed. Raises NotMaster if this replica
        will not learn that.
        """
        ...

    def commit(self, index: int) -> None:
        """Everything up to `index` is committed."""
        ...

    def flushed(self, index: int) -> None:
        """Everything up to `index` is committed, and flushed on a majority."""
        ...

    def answer_error(self, peer: Peer, request_id: int, failure: QmqError) -> None:
        """Answer a request with an error."""
        ...


class Committer(Protocol):
    """Decides when an entry is committed, and calls `Broker.commit`."""

    def written(self, index: int) -> None:
        """Everything up to `index` is written on this replica."""
        ...

    def stored(self, index: int) -> None:
        """Everything up to `index` survives a power cut of this replica."""
        ...

    def flush_wanted(self, index: int) -> None:
        """A request will wait for `Broker.flushed(index)`; called before `written`."""
        ...


class Alone:
    """The committer of a single node."""

    def __init__(self, broker: ServingBroker) -> None:
        self._broker = broker

    def written(self, index: int) -> None:
        """With `Flush.ASYNC` a written entry is committed."""
        if self._broker.store.config.flush is Flush.ASYNC:
            self._broker.commit(index)

    def stored(self, index: int) -> None:
        """A flushed entry is committed in any case."""
        self._broker.commit(index)
        self._broker.flushed(index)

    def flush_wanted(self, index: int) -> None:
        """Does nothing on a single node."""


class ReplicaConnection(Protocol):
    """The connection."""

    def may_be(self, replica: str) -> bool:
        """Whether the peer's certificate is for this replica; without TLS always."""
        ...

    def answer_peer(self, payload: bytes) -> None: ...

    def trust_peer(self) -> None:
        """The other end has proved its identity: accept frames as large as replicas send."""
        ...

    def close_peer(self) -> None: ...


class ReplicaPeer(Protocol):
    """Takes the frames of another replica."""

    def take(self, frame: Frame) -> None:
        """Handle a frame. Raises ProtocolViolation."""
        ...

    def ended(self) -> None:
        """The connection has ended."""
        ...


DEFAULT: Final = GroupSettings()


class GroupRules:
    """These are the default settings, without pauses."""

    def settings(self, subject: str, group: str) -> GroupSettings:
        """The most specific settings: of the group on this subject, of the group on all subjects,
        or the default.
        """
        return DEFAULT

    def is_paused(self, subject: str, group: str, consumer: str, client: str) -> bool:
        """Whether the group, the consumer or the client is paused."""
        return False


def _raise(cause: BaseException) -> None:
    raise cause


Admit = Callable[[list[Intake]], None]
"""Checks the batches of one request of a write, after those of earlier requests. Raises a QmqError,
and then none of them is stored.
"""


@dataclass(frozen=True, slots=True)
class KindParts:
    """The parts in which a broker of a broker group and one of a delay group differ. The defaults
    are those of a broker group.
    """

    find_destination: FindDestination | None = None
    """None: the queues, by `BrokerParts.routing`."""
    admission: Callable[[Store], Admit | None] | None = None
    """A check for each write to this store, before the one of ordered messages."""
    begin_work: Callable[[Store, ServingBroker], None] = lambda store, broker: None
    """Begins what the broker does while it serves, besides answering requests. The broker serves
    from this store, in which everything is committed.
    """
    end_work: Callable[[], None] = lambda: None
    """The broker is about to stop serving. `begin_work` may follow."""
    has_consumers: bool = True


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """The parts of one broker. The defaults are those of a broker that belongs to no group."""

    committer: Committer
    fatal: Callable[[BaseException], None] = _raise
    """Stops the process: an invariant is broken,
    or storage failed in a way that must not be worked around.
    """
    on_turn_end: Callable[[], None] = lambda: None
    """Called at the end of each turn."""
    report_damage: Callable[[LogDamaged], bool] = lambda _: False
    """Reports damage. Returns True if it is being repaired, and the broker will be woken."""
    accept_replica: Callable[[Frame, ReplicaConnection], ReplicaPeer] | None = None
    """Takes the first frame of another replica's connection, and returns the object that takes the
    rest. Raises ProtocolViolation, Unavailable.
    """
    may_write: Callable[[], bool] = lambda: True
    """Whether this master's lease in the coordination store holds, by its own clock."""
    routing: Routing = field(default_factory=Routing)
    """The partitions of ordered subjects on this broker."""
    access: OpenAccess = field(default_factory=OpenAccess)
    """Decides who may do what."""
    kind: KindParts = field(default_factory=KindParts)
    rules: GroupRules = field(default_factory=GroupRules)
    """Operators' settings of consumer groups; `look_again` is called after changes."""


class PendingResponses:
    """Answers in the order of their indexes;
    one that waits for a flush does not delay the others.
    """

    def __init__(self) -> None:
        self.unwritten: list[HeldAnswer] = []
        """Answers to entries that are not written yet; they get their index then."""
        self._unwritten_waiters: list[asyncio.Future[None]] = []
        self._for_commit: deque[HeldAnswer] = deque()
        self._for_flush: deque[HeldAnswer] = deque()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def hold(self, held: HeldAnswer, *, for_flush: bool = False) -> None:
        """Send the answer when its index is committed, or flushed."""
        (self._for_flush if for_flush else self._for_commit).append(held)

    def wait(self, waiter: asyncio.Future[None], index: int | None) -> None:
        """Set the future when `index` is committed; None: the index of the unwritten entries."""
        if index is None:
            self._unwritten_waiters.append(waiter)
        else:
            self._waiters.append((index, waiter))

    @property
    def has_unwritten(self) -> bool:
        """Whether an answer waits for an unwritten entry."""
        return bool(self.unwritten or self._unwritten_waiters)

    def written(self, index: int) -> None:
        """All entries are in the log, up to `index`."""
        unwritten, self.unwritten = self.unwritten, []
        for held in unwritten:
            held.index = index
        self._for_commit.extend(unwritten)
        if self._unwritten_waiters:
            self._waiters.extend([(index, waiter) for waiter in self._unwritten_waiters])
            self._unwritten_waiters.clear()

    def release(self, committed_index: int, flushed_index: int) -> None:
        """Send the answers that are due."""
        if self._for_commit:
            self._answer(self._for_commit, committed_index)
        if self._for_flush:
            self._answer(self._for_flush, flushed_index)
        while self._waiters and self._waiters[0][0] <= committed_index:
            waiter = self._waiters.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)

    @staticmethod
    def _answer(waiting: deque[HeldAnswer], index: int) -> None:
        while waiting and waiting[0].index <= index:
            held = waiting.popleft()
            held.peer.send(held.answer)

    def abandon(self, failure: Callable[[], QmqError]) -> list[HeldAnswer]:
        """Drop everything: waiting coroutines get the failure,
        and the waiting answers are returned.
        """
        for waiter in (*self._unwritten_waiters, *[waiter for _, waiter in self._waiters]):
            if not waiter.done():
                waiter.set_exception(failure())
        left = [*self._for_commit, *self._for_flush, *self.unwritten]
        for held in (
            self._unwritten_waiters,
            self._waiters,
            self._for_commit,
            self._for_flush,
            self.unwritten,
        ):
            held.clear()
        return left
