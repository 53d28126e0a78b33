"""The state of a replica in any role, and the work that it requests. Pure. `Replica`, `Election` and `Leader` share one object."""

from __future__ import annotations

from qmq.errors import InvariantBroken
from qmq_replication.history import History
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import DurableState, Log, Message, Ready, Request, Role, Timing


class ReplicaState:
    """`promised` is the highest epoch that this replica promised to any replica, including itself."""

    def __init__(
        self,
        name: str,
        membership: ReplicaMembership,
        durable: DurableState,
        history: History,
        log: Log,
        *,
        timing: Timing,
        now_ms: int,
        commit: int,
    ) -> None:
        self.name = name
        self.membership = membership
        self.promised, self.is_whole, self.resetting_until = durable
        self.history = history
        self.log = log
        self.timing = timing
        self.now_ms = now_ms
        self.role = Role.SLAVE
        self.commit = commit
        self.durable = history.last_index
        """Entries up to this index are as durable as the flush policy requires."""
        self.flushed_index = 0
        """Entries up to this index survive a power cut of this replica, under any flush policy."""
        self.is_verified = True
        """False while the coordination store has not said yet whether this folder is the replica's latest."""
        self.is_store_older = False
        """True while the coordination store has an older membership than this replica knows: its data was put back. The newer membership
        has another majority, so an election under the older one may miss acknowledged entries.
        """
        self.ready = Ready()

    @property
    def may_count(self) -> bool:
        """True if this replica surely has every entry that it ever acknowledged."""
        return self.is_verified and self.is_whole and not self.resetting_until

    def stored_index(self) -> int:
        """The index up to which the log is stored durably."""
        return min(self.durable, self.history.last_index)

    # --- work for the driver -------------------------------------------------------------------------------------------

    def take(self) -> Ready:
        """Take the work to be done now; each item is returned once."""
        ready, self.ready = self.ready, Ready()
        return ready

    def save(self) -> None:
        """Request that the state is saved on disk."""
        self.ready.save = DurableState(self.promised, self.is_whole, self.resetting_until)

    def send(self, to: str, message: Message) -> None:
        """Add a message to the next `Ready`."""
        self.ready.messages.append((to, message))

    def request(self, request: Request) -> None:
        """Add a request to the coordination store to the next `Ready`."""
        self.ready.requests.append(request)

    def become(self, role: Role) -> None:
        """Change the role, and report the change."""
        self.role = role
        self.ready.role = role

    def commit_to(self, index: int) -> None:
        """Entries up to `index` are committed."""
        if index > self.history.last_index:
            raise InvariantBroken(f"{self.name} commits {index}, but its log ends at {self.history.last_index}")
        if index > self.commit:
            self.commit = index
            self.ready.commit = index

    def let_go(self, index: int) -> None:
        """Entries up to `index` are committed, and flushed on a majority of the voters."""
        self.ready.flushed = index
