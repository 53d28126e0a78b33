"""Converts the metaservers' answers to the values of a snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from qmq.model import base_group, is_dead_letters
from qmq.operations.cluster_snapshot import (
    BrokerGroupFacts,
    ConsumerGroupFacts,
    DeadLetterFacts,
    DelayGroupFacts,
    DelayTroubleFacts,
    GroupProgress,
    MetaserverFacts,
    PauseFacts,
    ProcessFacts,
    QueueFacts,
    ReplicaFacts,
    RouteChangeFacts,
    RouteFacts,
    StorageFacts,
    StoreMemberFacts,
    SubjectFacts,
)
from qmq.operations.partition_progress import messages_end, messages_left

if TYPE_CHECKING:
    from qmq.proto.v1 import control_pb2 as control
    from qmq.proto.v1 import delay_pb2 as delay
    from qmq.proto.v1 import meta_pb2 as pb


# --- servers -----------------------------------------------------------------------------------------------------------


def metaserver_facts(address: str, told: pb.DescribeClusterResponse) -> MetaserverFacts:
    """A metaserver that answered."""
    process = process_facts(told.process) if told.HasField("process") else None
    members = tuple([StoreMemberFacts(each.address, each.version, each.failure) for each in told.store_members])
    return MetaserverFacts(address, "", process, told.store_silent_ms, told.time_ms, members)


def process_facts(told: control.ProcessStatus) -> ProcessFacts:
    """A server's process."""
    left_ms = told.certificate_left_ms if told.HasField("certificate_left_ms") else None
    return ProcessFacts(told.version, told.is_insecure, left_ms)


def broker_group_facts(told: pb.GroupDescription) -> BrokerGroupFacts:
    """A broker group. The lag of replicas is computed from the master's answer."""
    master = next((each.status for each in told.replicas if each.replica == told.master and each.HasField("status")), None)
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


def _replica_facts(group: pb.GroupDescription, told: pb.ReplicaDescription, master: control.ReplicaStatus | None) -> ReplicaFacts:
    name = told.replica
    vote = "voter" if name in group.voters else "learner" if name in group.learners else "none"
    peer = next((each for each in master.peers if each.replica == name), None) if master is not None else None
    silent_ms = peer.silent_ms if peer is not None else None
    in_step = peer.in_step if peer is not None else None
    if not told.HasField("status"):
        return ReplicaFacts(name, vote, told.is_present, told.data_address, told.control_address, silent_ms=silent_ms, in_step=in_step)
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


# --- subjects ----------------------------------------------------------------------------------------------------------


def subject_facts(told: pb.SubjectDescription, route: pb.DescribeRouteResponse | None) -> SubjectFacts:
    """A subject; an ordered one with its route, if that is known."""
    settings = told.settings
    queues = tuple(
        [
            QueueFacts(each.partition, each.broker_group, each.start_sequence, each.next_sequence, each.stored_bytes, each.last_append_ms)
            for each in told.queues
        ]
    )
    found = None if route is None else route_facts(route)
    return SubjectFacts(settings.name, settings.order, tuple(settings.broker_groups), queues, found, settings.flush)


def route_facts(told: pb.DescribeRouteResponse) -> RouteFacts:
    """An ordered subject's route, and the change in progress."""
    places = [each.broker_group for each in told.route.partitions]
    change = _change_facts(told.change) if told.HasField("change") else None
    return RouteFacts(told.route.version, told.route.logical_partitions, tuple(dict.fromkeys(places)), len(places), change)


def _change_facts(told: pb.RouteChangeInfo) -> RouteChangeFacts:
    since_ms = told.times_ms[told.phase] if told.phase in told.times_ms else max(told.times_ms.values(), default=0)
    targets = tuple([each.number for each in told.targets])
    return RouteChangeFacts(told.kind, told.to_version, told.phase, since_ms, tuple(told.sources), targets, told.reason)


# --- consumer groups ---------------------------------------------------------------------------------------------------


def unordered_groups(told: Iterable[control.Group], queues: Mapping[tuple[str, int, str], int]) -> list[ConsumerGroupFacts]:
    """The groups of unordered subjects; `queues` are the first kept sequences, by subject, partition and broker group.

    Each consumer of a broadcast group is a group at the broker; here they are one group. Groups of dead-letter queues are left out:
    `DeadLetterFacts` says what waits there.
    """
    found: dict[tuple[str, str], list[control.Group]] = {}
    for each in told:
        if not is_dead_letters(each.subject):
            found.setdefault((each.subject, base_group(each.group)), []).append(each)
    return [_unordered(subject, group, parts, queues) for (subject, group), parts in sorted(found.items())]


def _unordered(subject: str, group: str, parts: list[control.Group], starts: Mapping[tuple[str, int, str], int]) -> ConsumerGroupFacts:
    return ConsumerGroupFacts(
        subject=subject,
        group=group,
        progress=tuple([_progress(each, starts.get((subject, each.partition, each.broker_group), 0)) for each in parts]),
        consumers=len({consumer.name for each in parts for consumer in each.consumers}),
        is_paused=any(each.is_paused for each in parts),
        unacked_messages=sum(each.unacked for each in parts),
        requeued_messages=sum(each.requeued for each in parts),
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


# --- the rest ----------------------------------------------------------------------------------------------------------


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
        troubles=tuple([DelayTroubleFacts(each.subject, each.waiting, each.reason) for each in told.troubles]),
    )
