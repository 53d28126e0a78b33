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
    """The highest epoch that was promised to anybody, itself included."""
    commit: int
    flushed_index: int
    refused_epoch: int

    def stored_index(self) -> int:
        """Up to where the log is stored durably."""
        ...

    @property
    def may_count(self) -> bool:
        """Whether everything this replica ever acknowledged is here."""
        ...

    def send(self, to: str, message: Message) -> None:
        """Have a message sent."""
        ...

    def promise(self, epoch: int) -> None:
        """Take nothing older than `epoch` from now on."""
        ...

    def become(self, role: Role) -> None:
        """Change the role, and have it known."""
        ...

    def become_slave(self, patience_ms: int | None = None) -> None:
        """Become a slave and wait for a master for the given time."""
        ...

    def lead(self) -> None:
        """A majority has promised, and nobody is ahead."""
        ...

    def commit_to(self, index: int) -> None:
        """Entries up to `index` are committed."""
        ...
