"""What a master (`leader.py`) and a candidate (`election.py`) need of the replica that they are a part of. `core.py` has it.

So imports run one way: the replica knows its roles, and a role knows this.
"""

from __future__ import annotations

from typing import Protocol

from qmq_replication.history import History
from qmq_replication.ready import Log, Ready, Role, Timing
from qmq_replication.replica_membership import ReplicaMembership
from qmq_replication.replica_messages import Message


class OwnReplica(Protocol):
    name: str
    membership: ReplicaMembership
    history: History
    log: Log
    timing: Timing
    ready: Ready
    role: Role
    master: str
    now_ms: int
    promised: int
    """The highest epoch that this replica promised to any replica, including itself."""
    commit: int
    flushed_index: int
    refused_epoch: int

    def stored_index(self) -> int:
        """The log is stored durably up to this index."""
        ...

    @property
    def may_count(self) -> bool:
        """True if this replica still has every entry that it ever acknowledged."""
        ...

    def send(self, to: str, message: Message) -> None:
        """Add a message to the next `Ready`."""
        ...

    def promise(self, epoch: int) -> None:
        """Accept nothing older than `epoch` from now on."""
        ...

    def become(self, role: Role) -> None:
        """Change the role, and report the change."""
        ...

    def become_slave(self, patience_ms: int | None = None) -> None:
        """Become a slave and wait for a master for the given time."""
        ...

    def lead(self) -> None:
        """Become master: a majority has promised, and no peer is ahead."""
        ...

    def commit_to(self, index: int) -> None:
        """Entries up to `index` are committed."""
        ...
