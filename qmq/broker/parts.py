"""The parts of a broker besides its store: their interfaces, and the defaults.

    BrokerParts         passed when the broker is made; none is set later
    ServingBroker       the broker, as its parts see it
    Committer           when an entry is committed: on a single node `Alone` (qmq/broker/broker.py)
                        decides, on a replica qmq_replication/driver.py
    ReplicaConnection   what replication needs of a connection from another replica
    ReplicaPeer         what such a connection needs of replication
    GroupRules          the operators' settings for consumer groups: retries and pauses

Group rules are in the coordination store (docs/DELIVERY.md); a broker reads them from its view,
which may lag a moment. Replicas need not agree on them: the master decides by them, and writes its
decision to the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from qmq.broker.config import BrokerConfig
from qmq.broker.dispatch.sessions import Peer, PendingResponses
from qmq.broker.metrics import BrokerCounters, LoadMeters
from qmq.broker.produce_checks import BrokerSubjects, FindDestination, Routing
from qmq.errors import LogDamaged, QmqError
from qmq.log.actions import ScheduleAction, StepAction
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

    def act(self, action: ScheduleAction | StepAction) -> None:
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
    """Operators' settings of consumer groups; `serve_waiting` is called after changes."""
