"""The whole cluster at one moment, as values for `qmq doctor`, `qmq top` and the console.

Rules:
* A snapshot is partial when something is unavailable. An unknown value is None or absent, never 0; `silent` names the broker groups that
  did not answer, and `missing` the questions without an answer.
* The moment is not exact: the parts are read one after the other, within a second or two.
* Fields are added, never renamed: programs read `as_json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

OFFLINE: Final = "offline"
"""The health of a broker group without a master."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A server process's own facts. `version` is empty for servers too old to report it."""

    version: str = ""
    is_insecure: bool = False
    certificate_left_ms: int | None = None
    """The time until the process's certificate expires; negative after that; None without TLS."""


@dataclass(frozen=True, slots=True)
class StoreMemberFacts:
    """A member of etcd, by the address that a metaserver was given. `failure` is the reason why it cannot be used; empty if it can."""

    address: str
    version: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class MetaserverFacts:
    """A metaserver, by the address that the client was given. `failure` is the reason why it did not answer; empty if it did."""

    address: str
    failure: str = ""
    process: ProcessFacts | None = None
    store_silent_ms: int = 0
    """The time since the last answer of the coordination store to the metaserver."""
    time_ms: int = 0
    store_members: tuple[StoreMemberFacts, ...] = ()
    """What the members of the coordination store answered to the metaserver."""


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """A replica's disk, and the entries that a power cut would lose there."""

    disk_free_bytes: int
    disk_reserved_bytes: int
    """The reserve: messages are refused when less space is free."""
    log_bytes: int
    unflushed_bytes: int
    unflushed_age_ms: int
    damaged_objects: tuple[str, ...] = ()
    """Names of objects of the log that the object store has lost or changed."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """A replica of a broker group. While it does not answer, its role and the fields after the role are None."""

    replica: str
    vote: str
    """voter, learner or none."""
    is_present: bool
    """True if the replica's process keeps its presence key in the coordination store."""
    data_address: str = ""
    control_address: str = ""
    role: str | None = None
    epoch: int = 0
    is_serving: bool = False
    is_whole: bool = True
    """False if the replica may lack entries that it acknowledged. It then does not count in elections."""
    fork: str = ""
    """What its group's master lacks although this replica knows it to be committed; empty if nothing."""
    older_store: str = ""
    """What the coordination store has forgotten; empty if nothing."""
    last_index: int = 0
    commit_index: int = 0
    lag_entries: int | None = None
    """How far the replica is behind its master's log; None if one of them does not answer."""
    silent_ms: int | None = None
    """The time since the master's last message from the replica; None for the master itself, or if the master does not answer."""
    in_step: bool | None = None
    time_ms: int = 0
    """The time of the replica's machine."""
    clock_step_ms: int = 0
    """How far that clock is ahead of the time that the replica keeps, if other machines do not confirm the clock."""
    retention_behind_ms: int = 0
    """How far retention's time is behind the time that the replica keeps."""
    storage: StorageFacts | None = None
    process: ProcessFacts | None = None


@dataclass(frozen=True, slots=True)
class BrokerGroupFacts:
    """A broker group, or a delay group. `health` is read-write, read-only or offline; `mode` what operators ordered."""

    broker_group: str
    health: str
    mode: str
    master: str
    epoch: int
    voters: tuple[str, ...]
    learners: tuple[str, ...]
    is_delay: bool
    replicas: tuple[ReplicaFacts, ...]


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """The stored messages of a subject, or of a partition, on one broker group."""

    partition: int
    broker_group: str
    start_sequence: int
    next_sequence: int
    stored_bytes: int
    last_append_ms: int


@dataclass(frozen=True, slots=True)
class RouteChangeFacts:
    """A split, merge or move that is under way. `phase` is prepared, sealed or published, since `since_ms`."""

    kind: str
    to_version: int
    phase: str
    since_ms: int
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """An ordered subject's latest route."""

    version: int
    logical_partitions: int
    broker_groups: tuple[str, ...]
    """The broker groups of its partitions, each once."""
    partitions: int
    change: RouteChangeFacts | None = None


@dataclass(frozen=True, slots=True)
class SubjectFacts:
    """A subject. `order` is empty, strict or best-effort. `route` is None for an unordered one, and while it is not known."""

    subject: str
    order: str
    broker_groups: tuple[str, ...]
    """The broker groups that take its messages."""
    queues: tuple[QueueFacts, ...]
    route: RouteFacts | None = None
    flush: str = ""

    @property
    def stored_messages(self) -> int:
        """The number of stored messages."""
        return sum(each.next_sequence - each.start_sequence for each in self.queues)

    @property
    def stored_bytes(self) -> int:
        """The bytes of those messages in the message log."""
        return sum(each.stored_bytes for each in self.queues)


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A consumer group on one queue."""

    partition: int
    broker_group: str
    done_messages: int
    """Messages of the queue that the group has done, ever: only the difference of two snapshots means something."""
    lag_messages: int
    lag_ms: int
    """The age of the oldest message that is not done; 0 if all are done."""
    skipped_messages: int = 0
    """Messages that retention deleted before their delivery."""
    is_unheld: bool = False
    """True for a partition with waiting messages of which no consumer holds a lane."""
    is_full: bool = False
    """True if the group has parked so much of the partition that it gets no more of its messages."""


@dataclass(frozen=True, slots=True)
class ConsumerGroupFacts:
    """A consumer group of one subject, over all its queues."""

    subject: str
    group: str
    progress: tuple[GroupProgress, ...]
    consumers: int
    is_paused: bool = False
    unacked_messages: int = 0
    requeued_messages: int = 0
    dying_messages: int = 0
    """Messages that failed for good and are not in the dead-letter queue yet."""
    expired_messages: int = 0
    """Messages that came back, and that retention deleted before their redelivery."""
    parked_keys: int = 0
    parked_messages: int = 0
    route_version: int = 0
    """For an ordered subject: the oldest route version that the group still reads."""

    @property
    def lag_messages(self) -> int:
        """Messages that the group has not done."""
        return sum(each.lag_messages for each in self.progress)

    @property
    def lag_ms(self) -> int:
        """The age of the oldest message that the group has not done."""
        return max((each.lag_ms for each in self.progress), default=0)


@dataclass(frozen=True, slots=True)
class DeadLetterFacts:
    """The dead-letter queue of a consumer group, over all broker groups."""

    group: str
    messages: int
    waiting: int
    """Dead letters that were neither replayed nor purged."""
    newest_ms: int
    oldest_ago_ms: int


@dataclass(frozen=True, slots=True)
class PauseFacts:
    """A paused group, consumer or client, as given by `kind`."""

    kind: str
    subject: str
    group: str
    name: str
    since_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class DelayTroubleFacts:
    """Due messages of a subject that cannot be delivered now."""

    subject: str
    waiting: int
    reason: str


@dataclass(frozen=True, slots=True)
class DelayGroupFacts:
    """A delay group's delivery statistics, from its master."""

    group: str
    pending: int
    waiting: int
    """Messages that are due and not on their way."""
    planned: int
    lateness_p99_ms: int
    """The time from due to stored at the brokers, for the last minute's deliveries."""
    horizon_ms: int
    """Messages due before this time are in memory."""
    time_ms: int
    clock_step_ms: int
    """The time by which the machine's clock is ahead of the group's time."""
    delivered: int = 0
    troubles: tuple[DelayTroubleFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster. `time_ms` is the reader's clock; `monotonic_ms` is for the time between two snapshots of one process."""

    time_ms: int
    monotonic_ms: int
    metaservers: tuple[MetaserverFacts, ...] = ()
    broker_groups: tuple[BrokerGroupFacts, ...] = ()
    subjects: tuple[SubjectFacts, ...] = ()
    groups: tuple[ConsumerGroupFacts, ...] = ()
    dead_letters: tuple[DeadLetterFacts, ...] = ()
    pauses: tuple[PauseFacts, ...] = ()
    delay_groups: tuple[DelayGroupFacts, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    """Broker groups and delay groups that did not answer, with the reasons. Their data is missing in the other fields."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Questions without an answer, and the reasons: cluster, subjects, groups, dead_letters, pauses, delays, route of a subject."""

    @property
    def is_reachable(self) -> bool:
        """True if any metaserver answered."""
        return any(not each.failure for each in self.metaservers)

    @property
    def is_complete(self) -> bool:
        """True if every question was answered."""
        return not self.silent and not self.missing and all(not each.failure for each in self.metaservers)

    def as_json(self) -> dict[str, Any]:
        """The snapshot as a JSON value."""
        return asdict(self)
