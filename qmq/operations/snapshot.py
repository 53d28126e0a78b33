"""The whole cluster at one moment, as values for `qmq doctor`, `qmq top` and the console, made from
metaservers' answers. Pure.

Rules:
* A snapshot is partial when something is unavailable. An unknown value is None or absent, never 0;
  `silent` names the broker groups that did not answer, and `missing` the questions without an
  answer.
* The moment is not exact: the parts are read one after the other, within a second or two.
* Fields are added, never renamed: programs read `as_json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from qmq.model import base_group, is_dead_letters
from qmq.operations.routes import messages_end, messages_left

if TYPE_CHECKING:
    from qmq.proto.v1 import control_pb2 as control
    from qmq.proto.v1 import delay_pb2 as delay
    from qmq.proto.v1 import meta_pb2 as pb

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
    """A member of etcd, by the address that a metaserver was given. `failure` is the reason why it
    cannot be used; empty if it can.
    """

    address: str
    version: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class MetaserverFacts:
    """A metaserver, by the address that the client was given. `failure` is the reason why it did
    not answer; empty if it did.
    """

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
    """A replica of a broker group. While it does not answer, its role and the fields after the role
    are None.
    """

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
    """False if the replica may lack entries that it acknowledged.
    It then does not count in elections.
    """
    fork: str = ""
    """What its group's master lacks although this replica knows it to be
    committed; empty if nothing.
    """
    older_store: str = ""
    """What the coordination store has forgotten; empty if nothing."""
    last_index: int = 0
    commit_index: int = 0
    lag_entries: int | None = None
    """How far the replica is behind its master's log; None if one of them does not answer."""
    silent_ms: int | None = None
    """The time since the master's last message from the replica; None for the master itself, or if
    the master does not answer.
    """
    in_step: bool | None = None
    time_ms: int = 0
    """The time of the replica's machine."""
    clock_step_ms: int = 0
    """How far that clock is ahead of the time that the replica keeps, if other machines do not
    confirm the clock.
    """
    retention_behind_ms: int = 0
    """How far retention's time is behind the time that the replica keeps."""
    storage: StorageFacts | None = None
    process: ProcessFacts | None = None


@dataclass(frozen=True, slots=True)
class BrokerGroupFacts:
    """A broker group, or a delay group. `health` is read-write, read-only or offline; `mode` what
    operators ordered.
    """

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
    """A split, merge or move that is under way.
    `phase` is prepared, sealed or published, since `since_ms`.
    """

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
    """A subject. `order` is empty, strict or best-effort. `route` is None for an unordered one, and
    while it is not known.
    """

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
    """Messages of the queue that the group has done, ever: only the difference of two snapshots
    means something.
    """
    lag_messages: int
    lag_ms: int
    """The age of the oldest message that is not done; 0 if all are done."""
    skipped_messages: int = 0
    """Messages that retention deleted before their delivery."""
    is_unheld: bool = False
    """True for a partition with waiting messages of which no consumer holds a lane."""
    is_full: bool = False
    """True if the group has parked so much of the partition that it gets no
    more of its messages.
    """


@dataclass(frozen=True, slots=True)
class ConsumerGroupFacts:
    """A consumer group of one subject, over all its queues."""

    subject: str
    group: str
    progress: tuple[GroupProgress, ...]
    consumers: int
    is_paused: bool = False
    unacked_messages: int = 0
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
class ReaderFacts:
    """A reader without a group, such as a streaming query of Spark, on one subject, as it reports
    itself (docs/SPARK.md).
    """

    subject: str
    reader: str
    progress: tuple[GroupProgress, ...]
    messages_per_s: float
    """By its reports, over the last one to two minutes."""
    committed_ms_ago: int
    seen_ms_ago: int
    is_silent: bool
    """True if its report is overdue."""
    lost_messages: int = 0
    """Messages that were deleted before it read them."""
    loss_in_ms: int | None = None
    """How long the oldest message that it has not read is still kept; None if it has read all."""
    is_near_loss: bool = False
    """True if unread messages are deleted, or soon will be."""

    @property
    def lag_messages(self) -> int:
        """Messages that the reader has not read."""
        return sum(each.lag_messages for each in self.progress)

    @property
    def lag_ms(self) -> int:
        """The age of the oldest message that it has not read."""
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
    """The cluster. `time_ms` is the reader's clock; `monotonic_ms` is for the time between two
    snapshots of one process.
    """

    time_ms: int
    monotonic_ms: int
    metaservers: tuple[MetaserverFacts, ...] = ()
    broker_groups: tuple[BrokerGroupFacts, ...] = ()
    subjects: tuple[SubjectFacts, ...] = ()
    groups: tuple[ConsumerGroupFacts, ...] = ()
    readers: tuple[ReaderFacts, ...] = ()
    dead_letters: tuple[DeadLetterFacts, ...] = ()
    pauses: tuple[PauseFacts, ...] = ()
    delay_groups: tuple[DelayGroupFacts, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    """Broker groups and delay groups that did not answer, with the reasons. Their data is missing
    in the other fields.
    """
    missing: Mapping[str, str] = field(default_factory=dict)
    """Questions without an answer, and the reasons: cluster, subjects, groups, dead_letters,
    pauses, delays, route of a subject.
    """

    @property
    def is_reachable(self) -> bool:
        """True if any metaserver answered."""
        return any(not each.failure for each in self.metaservers)

    @property
    def is_complete(self) -> bool:
        """True if every question was answered."""
        return (
            not self.silent
            and not self.missing
            and all(not each.failure for each in self.metaservers)
        )

    def as_json(self) -> dict[str, Any]:
        """The snapshot as a JSON value."""
        return asdict(self)


# --- servers --------------------------------------------------------------------------------------


def metaserver_facts(address: str, told: pb.DescribeClusterResponse) -> MetaserverFacts:
    """A metaserver that answered."""
    process = process_facts(told.process) if told.HasField("process") else None
    members = tuple(
        [StoreMemberFacts(each.address, each.version, each.failure) for each in told.store_members]
    )
    return MetaserverFacts(address, "", process, told.store_silent_ms, told.time_ms, members)


def process_facts(told: control.ProcessStatus) -> ProcessFacts:
    """A server's process."""
    left_ms = told.certificate_left_ms if told.HasField("certificate_left_ms") else None
    return ProcessFacts(told.version, told.is_insecure, left_ms)


def broker_group_facts(told: pb.GroupDescription) -> BrokerGroupFacts:
    """A broker group. The lag of replicas is computed from the master's answer."""
    master = next(
        (
            each.status
            for each in told.replicas
            if each.replica == told.master and each.HasField("status")
        ),
        None,
    )
    return BrokerGroupFacts(
        broker_group=told.broker_group,
        health=told.health,
        mode=told.mode,
        master=told.master,
        epoch=told.epoch,
        voters=tuple(told.voters),
        learners=tuple(told.learners),
        is_delay=told.is_delay,
        replicas=tuple([_replica_facts(told, each, master) for each in told.replicas]),
    )


def _replica_facts(
    group: pb.GroupDescription, told: pb.ReplicaDescription, master: control.ReplicaStatus | None
) -> ReplicaFacts:
    name = told.replica
    vote = "voter" if name in group.voters else "learner" if name in group.learners else "none"
    peer = (
        next((each for each in master.peers if each.replica == name), None)
        if master is not None
        else None
    )
    silent_ms = peer.silent_ms if peer is not None else None
    in_step = peer.in_step if peer is not None else None
    if not told.HasField("status"):
        return ReplicaFacts(
            name,
            vote,
            told.is_present,
            told.data_address,
            told.control_address,
            silent_ms=silent_ms,
            in_step=in_step,
        )
    status = told.status
    return ReplicaFacts(
        replica=name,
        vote=vote,
        is_present=told.is_present,
        data_address=told.data_address,
        control_address=told.control_address,
        role=status.role,
        epoch=status.epoch,
        is_serving=status.is_serving,
        is_whole=status.is_whole,
        fork=status.fork,
        older_store=status.older_store,
        last_index=status.last_index,
        commit_index=status.commit_index,
        lag_entries=None if master is None else max(0, master.last_index - status.last_index),
        silent_ms=silent_ms,
        in_step=in_step,
        time_ms=status.time_ms,
        clock_step_ms=status.clock_step_ms,
        retention_behind_ms=status.retention_behind_ms,
        storage=_storage_facts(status.storage) if status.HasField("storage") else None,
        process=process_facts(status.process) if status.HasField("process") else None,
    )


def _storage_facts(told: control.StorageStatus) -> StorageFacts:
    return StorageFacts(
        told.disk_free_bytes,
        told.disk_reserved_bytes,
        told.log_bytes,
        told.unflushed_bytes,
        told.unflushed_age_ms,
        tuple(told.damaged_objects),
    )


# --- subjects -------------------------------------------------------------------------------------


def subject_facts(
    told: pb.SubjectDescription, route: pb.DescribeRouteResponse | None
) -> SubjectFacts:
    """A subject; an ordered one with its route, if that is known."""
    settings = told.settings
    queues = tuple(
        [
            QueueFacts(
                each.partition,
                each.broker_group,
                each.start_sequence,
                each.next_sequence,
                each.stored_bytes,
                each.last_append_ms,
            )
            for each in told.queues
        ]
    )
    found = None if route is None else route_facts(route)
    return SubjectFacts(
        settings.name, settings.order, tuple(settings.broker_groups), queues, found, settings.flush
    )


def route_facts(told: pb.DescribeRouteResponse) -> RouteFacts:
    """An ordered subject's route, and the change in progress."""
    places = [each.broker_group for each in told.route.partitions]
    change = _change_facts(told.change) if told.HasField("change") else None
    return RouteFacts(
        told.route.version,
        told.route.logical_partitions,
        tuple(dict.fromkeys(places)),
        len(places),
        change,
    )


def _change_facts(told: pb.RouteChangeInfo) -> RouteChangeFacts:
    since_ms = (
        told.times_ms[told.phase]
        if told.phase in told.times_ms
        else max(told.times_ms.values(), default=0)
    )
    targets = tuple([each.number for each in told.targets])
    return RouteChangeFacts(
        told.kind, told.to_version, told.phase, since_ms, tuple(told.sources), targets, told.reason
    )


# --- consumer groups ------------------------------------------------------------------------------


def unordered_groups(
    told: Iterable[control.Group], queues: Mapping[tuple[str, int, str], int]
) -> list[ConsumerGroupFacts]:
    """The groups of unordered subjects; `queues` are the first kept sequences, by subject,
    partition and broker group.

    Each consumer of a broadcast group is a group at the broker; here they are one group. Groups of
    dead-letter queues are left out: `DeadLetterFacts` says what waits there.
    """
    found: dict[tuple[str, str], list[control.Group]] = {}
    for each in told:
        if not is_dead_letters(each.subject):
            found.setdefault((each.subject, base_group(each.group)), []).append(each)
    return [
        _unordered(subject, group, parts, queues)
        for (subject, group), parts in sorted(found.items())
    ]


def _unordered(
    subject: str, group: str, parts: list[control.Group], starts: Mapping[tuple[str, int, str], int]
) -> ConsumerGroupFacts:
    return ConsumerGroupFacts(
        subject=subject,
        group=group,
        progress=tuple(
            [
                _progress(each, starts.get((subject, each.partition, each.broker_group), 0))
                for each in parts
            ]
        ),
        consumers=len({consumer.name for each in parts for consumer in each.consumers}),
        is_paused=any(each.is_paused for each in parts),
        unacked_messages=sum(each.unacked for each in parts),
        dying_messages=sum(each.dying for each in parts),
        expired_messages=sum(each.expired for each in parts),
    )


def _progress(each: control.Group, start: int) -> GroupProgress:
    held = each.unacked + each.requeued
    return GroupProgress(
        partition=each.partition,
        broker_group=each.broker_group,
        done_messages=max(0, each.next_sequence - held - each.dying),
        lag_messages=each.waiting + held,
        lag_ms=each.lag_ms,
        skipped_messages=max(0, start - each.next_sequence),
    )


def ordered_groups(told: pb.DescribeRouteResponse) -> list[ConsumerGroupFacts]:
    """The groups of an ordered subject."""
    return [_ordered(told.settings.name, each) for each in told.groups]


def _ordered(subject: str, group: pb.OrderedGroup) -> ConsumerGroupFacts:
    return ConsumerGroupFacts(
        subject=subject,
        group=group.group,
        progress=tuple([_partition_progress(each) for each in group.partitions]),
        consumers=len(group.consumers),
        is_paused=group.is_paused,
        parked_keys=group.parked_keys,
        parked_messages=sum(each.parked_messages for each in group.partitions),
        route_version=group.version,
    )


def _partition_progress(status: control.PartitionStatus) -> GroupProgress:
    left = messages_left(status)
    return GroupProgress(
        partition=status.partition,
        broker_group=status.broker_group,
        done_messages=messages_end(status) - left,
        lag_messages=left,
        lag_ms=status.lag_ms,
        is_unheld=left > 0 and not status.holders,
        is_full=status.is_full,
    )


# --- the rest -------------------------------------------------------------------------------------


def reader_facts(told: Iterable[control.Reader]) -> tuple[ReaderFacts, ...]:
    """The readers without a group, one for each subject and name."""
    found: dict[tuple[str, str], list[control.Reader]] = {}
    for each in told:
        found.setdefault((each.subject, each.reader), []).append(each)
    return tuple([_reader(*names, parts) for names, parts in sorted(found.items())])


def _reader(subject: str, reader: str, parts: list[control.Reader]) -> ReaderFacts:
    return ReaderFacts(
        subject,
        reader,
        tuple(
            [
                GroupProgress(
                    each.partition, each.broker_group, each.done_before, each.waiting, each.lag_ms
                )
                for each in parts
            ]
        ),
        sum(each.messages_per_s for each in parts),
        min(each.committed_ms_ago for each in parts),
        max(each.seen_ms_ago for each in parts),
        any(each.is_silent for each in parts),
        sum(each.lost for each in parts),
        min([each.loss_in_ms for each in parts if each.HasField("loss_in_ms")], default=None),
        any(each.is_near_loss for each in parts),
    )


def dead_letter_facts(told: Iterable[pb.DeadLetterQueue]) -> tuple[DeadLetterFacts, ...]:
    """Dead-letter queues, one for each consumer group."""
    found: dict[str, list[pb.DeadLetterQueue]] = {}
    for each in told:
        found.setdefault(each.group, []).append(each)
    return tuple(
        [
            DeadLetterFacts(
                group,
                sum(each.messages for each in parts),
                sum(each.waiting for each in parts),
                max(each.newest_ms for each in parts),
                max(each.oldest_ago_ms for each in parts),
            )
            for group, parts in sorted(found.items())
        ]
    )


def pause_facts(told: pb.Pause) -> PauseFacts:
    """The paused groups, consumers and clients."""
    return PauseFacts(told.kind, told.subject, told.group, told.name, told.since_ms, told.reason)


def delay_group_facts(told: delay.DelayDescription) -> DelayGroupFacts:
    """A delay group that answered."""
    return DelayGroupFacts(
        group=told.group,
        pending=told.pending,
        waiting=told.waiting,
        planned=told.planned,
        lateness_p99_ms=told.lateness_p99_ms,
        horizon_ms=told.horizon_ms,
        time_ms=told.time_ms,
        clock_step_ms=told.clock_step_ms,
        delivered=told.delivered,
        troubles=tuple(
            [DelayTroubleFacts(each.subject, each.waiting, each.reason) for each in told.troubles]
        ),
    )
