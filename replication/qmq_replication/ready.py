"""The core's instructions, and their order: the caller's part of the contract, like etcd-io/raft's Ready.

    1. `save`        on disk, synced, before anything below
    2. `reset`, or `truncate`, then `append`   in this order, on the log; a `reset` is synced before anything else is done
    3. `messages`    to peers: only now, because they report 1 (an Ack reports 2 later); the `place` in an Ack or a
                     Mismatch is where the log ends after 2, so the caller sets it here
    4. `commit`      apply entries up to it; send the answers that wait for it
    5. `flushed`, `flush`   send the answers that wait for a flush up to `flushed`; flush soon up to `flush`, a client waits for it
    6. `role`, `lead`, `requests`   the role has changed; append a barrier entry of epoch `lead`; send requests to the coordination store

When entries have been written, and are as durable as the group's flush policy asks, call `Replica.stored(index)`; when they have been
flushed, with every flush policy, call `Replica.flushed(index)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from qmq_replication.replica_membership import ReplicaMembership
from qmq_replication.replica_messages import Append, LogReset, Message, Place


class Role(Enum):
    """The role of a replica in its group."""

    SLAVE = "slave"
    POLLING = "polling"
    """The replica suspects that there is no master, and asks the others before it campaigns."""
    CAMPAIGNING = "campaigning"
    """The replica asks the coordination store for a new epoch."""
    FENCING = "fencing"
    """The replica has won an epoch, and gathers promises of a majority."""
    MASTER = "master"


class DurableState(NamedTuple):
    """The state that must survive a crash: the promise, and whether the log may lack entries that this replica acknowledged."""

    promised: int = 0
    is_whole: bool = True
    resetting_until: int = 0
    """While the log is being rebuilt: the index that it must reach before it is used; otherwise 0."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """Win a new epoch: compare-and-swap against the one last seen."""


@dataclass(frozen=True, slots=True)
class Resign:
    """Give up the mastership of `epoch`, if it is still ours."""

    epoch: int


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """Replace the membership, if we are still master of `epoch` and it is still `before`."""

    epoch: int
    before: ReplicaMembership
    after: ReplicaMembership


@dataclass(frozen=True, slots=True)
class LookUp:
    """Read the group's highest epoch and its membership, and call `looked_up`; no call follows if the store is unreachable."""


Request = Campaign | Resign | MembershipChange | LookUp


@dataclass(slots=True)
class Ready:
    """The work since the last `take`. The module's docstring has the contract."""

    save: DurableState | None = None
    reset: LogReset | None = None
    truncate: int | None = None
    append: list[Append] = field(default_factory=list)
    messages: list[tuple[str, Message]] = field(default_factory=list)
    commit: int | None = None
    flushed: int | None = None
    """Entries up to this index are committed, and flushed on a majority of the voters: they survive a power cut of all voters."""
    flush: int | None = None
    role: Role | None = None
    lead: int | None = None
    requests: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        """True if there is work to do."""
        return bool(
            self.messages
            or self.append
            or self.requests
            or self.save is not None
            or self.commit is not None
            or self.role is not None
            or self.truncate is not None
            or self.reset is not None
            or self.lead is not None
            or self.flushed is not None
            or self.flush is not None
        )


class LogChunk(NamedTuple):
    """Entries for a peer: from where reading began, up to `last_index`. They end at `place`."""

    last_index: int
    payload: object
    place: Place
    bytes: int


class Log(Protocol):
    """The local log, as the core reads it for its peers."""

    def place(self) -> Place:
        """The place of the log's end."""
        ...

    def read(self, place: Place, after: int, bytes_max: int) -> LogChunk | None:
        """The entries behind index `after`, which lies at `place`; None if this log no longer has them.

        A chunk without entries, whose `last_index` is `after`, means that the entries are being read from slow storage. Ask again at the
        next heartbeat.
        """
        ...

    def start(self) -> tuple[int, int, Place]:
        """The (epoch, index, place) behind which this log still has all entries."""
        ...


class Timing(NamedTuple):
    """The core's times in milliseconds. Safety depends on none of them."""

    heartbeat_ms: int = 100
    suspect_ms: int = 1_000
    """A slave polls the others after this silence of the master."""
    lost_ms: int = 150
    """A slave polls the others this long after the connection to the master ended."""
    poll_ms: int = 150
    fence_ms: int = 2_000
    quorum_ms: int = 2_000
    """A master that does not hear a majority for this time steps down."""
    late_ms: int = 300
    """A slave whose own clock tick came later than this was not scheduled: it waits for the master again before it suspects it."""
    inflight_bytes_max: int = 16 << 20
    chunk_bytes_max: int = 1 << 20
