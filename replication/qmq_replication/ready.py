"""What the core says: its instructions to the caller, the messages between the replicas of a group,
and the state that asks for them. Pure.

The instructions are carried out in this order, as with etcd-io/raft's Ready:

    1. `save`        on disk, synced, before anything below
    2. `reset`, or `truncate`, then `append`   in this order, on the log; a `reset` is synced before
                                               anything else is done
    3. `messages`    to peers: only now, because they report 1 (an Ack reports 2 later); the `place`
                     in an Ack or a Mismatch is where the log ends after 2, so the caller sets it
                     here
    4. `commit`      apply entries up to it; send the answers that wait for it
    5. `flushed`, `flush`   send the answers that wait for a flush up to `flushed`; flush soon up to
                            `flush`, a client waits for it
    6. `role`, `lead`, `requests`   the role has changed; append a barrier entry of epoch `lead`;
                                    send requests to the coordination store

When entries have been written, and are as durable as the group's flush policy asks, call
`Replica.stored(index)`; when they have been flushed, with every flush policy, call
`Replica.flushed(index)`.

The messages are plain values; the driver encodes them (wire.py).

    sender         message          answer
    any            Probe            ProbeReply     before an election: who is ahead, who still hears
                                                   the master
    a candidate    PromiseRequest   Promise        fencing: from now on accept nothing from an older
                                                   epoch
    the master     Append           Ack            entries, or none (a heartbeat); the answer says
                                                   what is stored
                                    Mismatch       "my log does not match there; this is its
                                                   history"
    the master     Reset            Ack            "the entries that you lack are deleted here:
                                                   start over from my oldest entry"
    any            Refusal                         "I promised a higher epoch than yours"
    the master     TakeOver                        "you are up to date: campaign now"

Any message may be lost, late, repeated or out of order; the core tolerates that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from qmq.errors import InvariantBroken
from qmq_replication.history import EpochRun, History
from qmq_replication.membership import ReplicaMembership

Place = Any
"""The position of an index in the logs' files; opaque to the core."""
EPOCH_MAX: Final = 1 << 52
"""No group reaches this by winning epochs.
A higher promise cannot have been requested by a member.
"""


class Probe(NamedTuple):
    """Asks a replica for its state. It changes nothing in the receiver."""

    epoch: int


class ProbeReply(NamedTuple):
    """The state of a replica. `epoch` is the highest promised epoch. `hears_master`: the replica
    would not campaign now.
    """

    epoch: int
    master: str
    hears_master: bool
    last_epoch: int
    last_index: int
    is_whole: bool


class PromiseRequest(NamedTuple):
    """Asks for a promise: the sender won `epoch` in the coordination store."""

    epoch: int


class Promise(NamedTuple):
    """The sender accepts nothing older than `epoch` from now on, and holds its log up to
    (last_epoch, last_index).
    """

    epoch: int
    last_epoch: int
    last_index: int
    is_whole: bool


class Append(NamedTuple):
    """Entries (prev_index, last_index], or none. `cut`: what the receiver holds behind prev_index
    is not in the master's log.

    `round` numbers the master's attempts to get in step with this peer; a Mismatch of an earlier
    round says nothing new. `flush_wanted`: a client waits until everything up to that index is
    flushed; the receiver flushes immediately and then reports it.
    """

    epoch: int
    round: int
    prev_epoch: int
    prev_index: int
    runs: tuple[EpochRun, ...]
    last_index: int
    commit: int
    cut: bool
    payload: Any
    flush_wanted: int = 0


class Ack(NamedTuple):
    """The sender holds the entries up to `stored` durably, and they equal those of the master of
    `epoch`. Its log ends at `last_index`, which lies at `place`.

    `stored` is as durable as the sender's flush policy asks; up to `flushed` the log survives a
    power cut, with every policy. `round` is the latest that the sender received. An Ack of an
    earlier round may report entries that were lost since.
    """

    epoch: int
    round: int
    stored: int
    last_index: int
    place: Place
    flushed: int = 0


class Mismatch(NamedTuple):
    """The sender's log does not continue at the Append's prev_index. The message contains the shape
    of that log, so that the master needs one answer only to get in step.
    """

    epoch: int
    round: int
    last_index: int
    start_index: int
    start_epoch: int
    runs: tuple[EpochRun, ...]
    place: Place


class LogReset(NamedTuple):
    """The receiver must delete its log and start over after (start_epoch, start_index) at `place`.
    It is whole again at `until_index`.
    """

    epoch: int
    round: int
    start_epoch: int
    start_index: int
    place: Place
    until_index: int


class Refusal(NamedTuple):
    """The sender promised `epoch`, which is higher than the epoch of the
    message that it refuses.
    """

    epoch: int


class TakeOver(NamedTuple):
    """The receiver may campaign immediately."""

    epoch: int


Message = (
    Probe
    | ProbeReply
    | PromiseRequest
    | Promise
    | Append
    | Ack
    | Mismatch
    | LogReset
    | Refusal
    | TakeOver
)


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
    """The state that must survive a crash: the promise, and whether the log may lack entries that
    this replica acknowledged.
    """

    promised: int = 0
    is_whole: bool = True
    resetting_until: int = 0
    """While the log is being rebuilt: the index that it must reach before it is
    used; otherwise 0.
    """


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
    """Read the group's highest epoch and its membership, and call `on_lookup`; no call follows if
    the store is unreachable.
    """


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
    """Entries up to this index are committed, and flushed on a majority of the voters: they survive
    a power cut of all voters.
    """
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
        """The entries behind index `after`, which lies at `place`; None if this log no longer has
        them.

        A chunk without entries, whose `last_index` is `after`, means that the entries are being
        read from slow storage. Ask again at the next heartbeat.
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
    """A slave whose own clock tick came later than this was not scheduled: it waits for the master
    again before it suspects it.
    """
    inflight_bytes_max: int = 16 << 20
    chunk_bytes_max: int = 1 << 20


class ReplicaState:
    """`promised` is the highest epoch that this replica promised to any
    replica, including itself.
    """

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
        commit: int = 0,
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
        self.stored_index = history.last_index
        """Entries up to this index are as durable as the flush policy requires. It is at most
        `history.last_index`.
        """
        self.flushed_index = 0
        """Entries up to this index survive a power cut of this replica, under any flush policy."""
        self.is_verified = True
        """False while the coordination store has not said yet whether this folder is
        the replica's latest.
        """
        self.is_store_older = False
        """True while the coordination store has an older membership than this replica knows: its
        data was put back. The newer membership has another majority, so an election under the older
        one may miss acknowledged entries.
        """
        self.ready = Ready()

    @property
    def may_count(self) -> bool:
        """True if this replica surely has every entry that it ever acknowledged."""
        return self.is_verified and self.is_whole and not self.resetting_until

    # --- work for the driver ----------------------------------------------------------------------

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
            raise InvariantBroken(
                f"{self.name} commits {index}, but its log ends at {self.history.last_index}"
            )
        if index > self.commit:
            self.commit = index
            self.ready.commit = index

    def flushed_to(self, index: int) -> None:
        """Entries up to `index` are committed, and flushed on a majority of the voters."""
        self.ready.flushed = index
