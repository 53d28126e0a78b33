"""The interface through which a master (`leader.py`) and a candidate (`election.py`) use their replica. `core.py` implements it.

It makes imports run one way: the replica knows its roles, and a role knows only this interface.
"""

from __future__ import annotations

from typing import Protocol

from qmq_replication.history import History
from qmq_replication.ready import Log, Request, Role, Timing
from qmq_replication.replica_membership import ReplicaMembership
from qmq_replication.replica_messages import Message


class OwnReplica(Protocol):
    """A role reads the replica's state by these properties, and changes it only by these methods."""

    @property
    def name(self) -> str: ...

    @property
    def membership(self) -> ReplicaMembership: ...

    @property
    def history(self) -> History: ...

    @property
    def log(self) -> Log: ...

    @property
    def timing(self) -> Timing: ...

    @property
    def role(self) -> Role: ...

    @property
    def now_ms(self) -> int: ...

    @property
    def promised(self) -> int:
        """The highest epoch that this replica promised to any replica, including itself."""
        ...

    @property
    def commit(self) -> int: ...

    @property
    def flushed_index(self) -> int: ...

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

    def request(self, request: Request) -> None:
        """Add a request to the coordination store to the next `Ready`."""
        ...

    def fence(self, epoch: int, membership: ReplicaMembership) -> None:
        """The coordination store gave this replica `epoch` under `membership`: promise it, and have the others promise it."""
        ...

    def members_changed(self, membership: ReplicaMembership) -> None:
        """The master's own change of the membership is in the coordination store."""
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

    def let_go(self, index: int) -> None:
        """Entries up to `index` are committed, and flushed on a majority of the voters."""
        ...
