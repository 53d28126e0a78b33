"""The parts of a broker besides its store. All are passed when the broker is made; none is set later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qmq.broker.committer import Committer
from qmq.broker.group_rules import GroupRules, NoGroupRules
from qmq.broker.ordered_writes import NoRouting, Routing
from qmq.broker.peers import ReplicaConnection, ReplicaPeer
from qmq.errors import LogDamaged
from qmq.security.access_control import OpenAccess
from qmq.wire.frame import Frame


def _raise(cause: BaseException) -> None:
    raise cause


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
    rules: GroupRules = field(default_factory=NoGroupRules)
    """Operators' settings of consumer groups; `look_again` is called after changes."""
