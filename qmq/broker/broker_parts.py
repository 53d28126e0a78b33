"""The parts of a broker besides its store. All are passed when the broker is made; none is set later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from qmq.broker.committer import Committer
from qmq.broker.destinations import Destinations
from qmq.broker.group_rules import GroupRules, NoGroupRules
from qmq.broker.ordered_writes import NoRouting, Routing
from qmq.broker.peers import ReplicaConnection, ReplicaPeer
from qmq.errors import LogDamaged
from qmq.log.actions import ScheduleAction
from qmq.log.store import Intake, Store
from qmq.security.access_control import OpenAccess
from qmq.wire.frame import Frame


def _raise(cause: BaseException) -> None:
    raise cause


Admit = Callable[[list[Intake]], None]
"""Checks the batches of one request of a write, after those of earlier requests. Raises a QmqError, and then none of them is stored."""


class ServingBroker(Protocol):
    """The broker, for the work that it does while it serves."""

    def require_serving(self) -> None:
        """Raises NotMaster."""
        ...

    def act(self, action: ScheduleAction) -> None:
        """Write the action with the next turn, after earlier ones. The actions of one turn are one entry: all or none. Raises NotMaster."""
        ...

    async def committed(self) -> None:
        """Returns when everything written so far is committed. Raises NotMaster if this replica will not learn that."""
        ...


class MasterWork(Protocol):
    """What a broker does while it serves, besides answering requests."""

    def begin(self, store: Store, broker: ServingBroker) -> None:
        """The broker serves from this store, in which everything is committed."""
        ...

    def end(self) -> None:
        """The broker is about to stop serving. `begin` may follow."""
        ...


@dataclass(frozen=True, slots=True)
class KindParts:
    """The parts in which a broker of a broker group and one of a delay group differ. The defaults are those of a broker group."""

    destinations: Destinations | None = None
    """None: the queues, by `BrokerParts.routing`."""
    admission: Callable[[Store], Admit | None] | None = None
    """A check for each write to this store, before the one of ordered messages."""
    work: MasterWork | None = None
    has_consumers: bool = True


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """The parts of one broker. The defaults are those of a broker that belongs to no group."""

    committer: Committer
    fatal: Callable[[BaseException], None] = _raise
    """Stops the process: an invariant is broken, or storage failed in a way that must not be worked around."""
    on_turn_end: Callable[[], None] = lambda: None
    """Called at the end of each turn."""
    report_damage: Callable[[LogDamaged], bool] = lambda _: False
    """Reports damage. Returns True if it is being repaired, and the broker will be woken."""
    accept_replica: Callable[[Frame, ReplicaConnection], ReplicaPeer] | None = None
    """Takes the first frame of another replica's connection, and returns the object that takes the rest. Raises ProtocolViolation,
    Unavailable.
    """
    may_write: Callable[[], bool] = lambda: True
    """Whether this master's lease in the coordination store holds, by its own clock."""
    routing: Routing = field(default_factory=NoRouting)
    """The partitions of ordered subjects on this broker."""
    access: OpenAccess = field(default_factory=OpenAccess)
    """Decides who may do what."""
    kind: KindParts = field(default_factory=KindParts)
    rules: GroupRules = field(default_factory=NoGroupRules)
    """Operators' settings of consumer groups; `look_again` is called after changes."""
