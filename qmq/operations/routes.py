"""The state of an ordered subject's route, partitions and groups, with their progress, read over
the public admin API; and the facts that `qmq route` prints of it, as JSON values.

Rules:
* Programs read these names: fields are added, never renamed.
* An unknown value is None, never 0: a partition whose broker group is silent has the state
  "unknown" and no figures. A partition that is missing in its broker group's answer is empty: the
  broker makes it with its first message.
* A closed partition's command message is no message: it counts neither as kept nor as left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from qmq.client.metadata.service import MetadataClient
    from qmq.proto.v1 import control_pb2 as control
    from qmq.proto.v1 import meta_pb2 as pb


def messages_end(status: control.PartitionStatus) -> int:
    """The end of a partition's messages.
    The last entry of a closed partition is its command message.
    """
    return status.sealed_at if status.HasField("sealed_at") else status.next_sequence


def messages_left(status: control.PartitionStatus) -> int:
    """The messages of a partition that the group has not done, from its progress.

    Exact while the group is equally far in all ranges; otherwise each range counts by its width,
    since messages are not counted by range.
    """
    end = messages_end(status)
    if not status.progress:
        return end - min(end, status.start_sequence)
    whole = sum(each.lps.end - each.lps.first for each in status.progress)
    left = 0.0
    for each in status.progress:
        rest = 0 if each.is_finished else max(0, end - max(each.done_before, status.start_sequence))
        left += rest * (each.lps.end - each.lps.first) / whole
    return ceil(left - 1e-9)


FENCED: Final = -1
"""The value in `RouteChangeInfo.sealed` of a partition that a fence closed."""


def facts(
    described: pb.DescribeRouteResponse, places: Mapping[int, pb.OrderedPartition]
) -> dict[str, Any]:
    """All facts of a subject. `places`:
    the broker groups of partitions of other versions, if known.
    """
    settings, route = described.settings, described.route
    statuses = _statuses(described, [*route.partitions, *places.values()])
    fenced = set(route.fenced)
    if described.HasField("change"):
        fenced |= {
            number for number, sequence in described.change.sealed.items() if sequence == FENCED
        }
    silent = set(described.silent_groups)
    missing = {
        number
        for number in route.fenced
        if number in places and places[number].broker_group in silent
    }
    older = sorted(
        (read_partitions(described) | missing) - {each.number for each in route.partitions}
    )
    count = route.logical_partitions
    return {
        "subject": settings.name,
        "order": settings.order,
        "fencing": settings.fencing,
        "logical_partitions": count,
        "version": route.version,
        "latest_version": described.latest_version,
        "partitions": [
            partition_facts(each.number, each, statuses.get(each.number), fenced, count)
            for each in route.partitions
        ],
        "older_partitions": [
            partition_facts(each, places.get(each), statuses.get(each), fenced, count)
            for each in older
        ],
        "groups": [
            group_facts(group, {**places, **{each.number: each for each in route.partitions}})
            for group in described.groups
        ],
        "change": change_facts(described.change) if described.HasField("change") else None,
        "silent_groups": list(described.silent_groups),
    }


def read_partitions(described: pb.DescribeRouteResponse) -> set[int]:
    """The partitions that a group reads, now or next."""
    return {each.partition for group in described.groups for each in group.partitions}


def _statuses(
    described: pb.DescribeRouteResponse, places: Iterable[pb.OrderedPartition]
) -> dict[int, control.PartitionStatus]:
    """The status of each partition. The figures of a partition are the same in
    every group's list.
    """
    from qmq.proto.v1 import control_pb2 as control

    silent = set(described.silent_groups)
    empty = {
        each.number: control.PartitionStatus(partition=each.number)
        for each in places
        if each.broker_group not in silent
    }
    found = {each.partition: each for group in described.groups for each in group.partitions}
    return empty | found | {each.partition: each for each in described.partitions}


def partition_facts(
    number: int,
    place: pb.OrderedPartition | None,
    status: control.PartitionStatus | None,
    fenced: set[int],
    count: int,
) -> dict[str, Any]:
    """The facts of a partition: its place, its state and its stored messages."""
    group = (
        place.broker_group
        if place is not None
        else status.broker_group
        if status is not None
        else None
    )
    width = None if place is None else round(100 * (place.lps.end - place.lps.first) / count, 2)
    found = {
        "partition": number,
        "first": None if place is None else place.lps.first,
        "end": None if place is None else place.lps.end,
        "width_percent": width,
        "broker_group": group,
        "state": _state(number, status, fenced),
        "sealed_at": status.sealed_at
        if status is not None and status.HasField("sealed_at")
        else None,
    }
    if status is None:
        return found | dict.fromkeys(
            ("messages", "bytes", "messages_per_s", "bytes_per_s", "bent_messages")
        )
    return found | {
        "messages": messages_end(status) - min(messages_end(status), status.start_sequence),
        "bytes": status.stored_bytes,
        "messages_per_s": round(status.messages_per_s, 1),
        "bytes_per_s": round(status.bytes_per_s, 1),
        "bent_messages": status.bent_messages,
    }


def _state(number: int, status: control.PartitionStatus | None, fenced: set[int]) -> str:
    if status is not None and status.HasField("sealed_at"):
        return "sealed"
    if number in fenced:
        return "fenced"
    return "open" if status is not None else "unknown"


# --- groups ---------------------------------------------------------------------------------------


def group_facts(
    group: pb.OrderedGroup, places: Mapping[int, pb.OrderedPartition]
) -> dict[str, Any]:
    """The facts of a consumer group: its versions, and its progress."""
    return {
        "group": group.group,
        "version": group.version,
        "gate": group.gate,
        "is_ready": group.is_ready,
        "is_paused": group.is_paused,
        "frontier": [
            {"first": each.lps.first, "end": each.lps.end, "version": each.version}
            for each in group.frontier
        ],
        "consumers": list(group.consumers),
        "left": sum(messages_left(each) for each in group.partitions),
        "parked_keys": group.parked_keys,
        "lag_ms": max((each.lag_ms for each in group.partitions), default=0),
        "lanes": [_lane(each) for each in group.lanes],
        "partitions": [_reading(each, places.get(each.partition)) for each in group.partitions],
    }


def _lane(lane: pb.AssignedLane) -> dict[str, Any]:
    return {
        "partition": lane.partition,
        "first": lane.lps.first,
        "end": lane.lps.end,
        "broker_group": lane.broker_group,
        "version": lane.version,
        "consumer": lane.consumer,
    }


def _reading(status: control.PartitionStatus, place: pb.OrderedPartition | None) -> dict[str, Any]:
    return {
        "partition": status.partition,
        "first": None if place is None else place.lps.first,
        "end": None if place is None else place.lps.end,
        "broker_group": status.broker_group,
        "left": messages_left(status),
        "lag_ms": status.lag_ms,
        "is_finished": bool(status.progress) and all(each.is_finished for each in status.progress),
        "parked_keys": status.parked_keys,
        "parked_messages": status.parked_messages,
        "is_full": status.is_full,
        "holders": [
            {
                "consumer": each.consumer,
                "first": each.lps.first,
                "end": each.lps.end,
                "seen_ms_ago": each.seen_ms_ago,
                "client": each.client,
                "is_paused": each.is_paused,
            }
            for each in status.holders
        ],
    }


def left_in(group: pb.OrderedGroup, numbers: Iterable[int]) -> int:
    """The messages that a group has not done in some partitions. A partition that the group no
    longer reads, or does not read yet, counts as 0.
    """
    wanted = set(numbers)
    return sum(messages_left(each) for each in group.partitions if each.partition in wanted)


# --- changes --------------------------------------------------------------------------------------


def change_facts(change: pb.RouteChangeInfo) -> dict[str, Any]:
    """The facts of a route change. Writers were refused from a moment between prepared and sealed
    until published, so the facts have the shortest and the longest possible time.
    """
    times = dict(change.times_ms)
    return {
        "id": change.id,
        "kind": change.kind,
        "to_version": change.to_version,
        "sources": list(change.sources),
        "targets": [place_facts(each) for each in change.targets],
        "phase": change.phase,
        "reason": change.reason,
        "times_ms": times,
        "sealed": {str(number): sequence for number, sequence in sorted(change.sealed.items())},
        "refused_ms": _between(times, "sealed", "published"),
        "refused_ms_max": _between(times, "prepared", "published"),
    }


def _between(times: Mapping[str, int], first: str, last: str) -> int | None:
    return max(0, times[last] - times[first]) if first in times and last in times else None


def place_facts(place: pb.OrderedPartition) -> dict[str, Any]:
    """The place of a partition."""
    return {
        "partition": place.number,
        "first": place.lps.first,
        "end": place.lps.end,
        "broker_group": place.broker_group,
    }


def undo_command(
    subject: str, change: pb.RouteChangeInfo, before: Iterable[pb.OrderedPartition]
) -> str:
    """The command that restores the ranges and broker groups of `before`;
    the partitions get new numbers.
    """
    targets = [str(each.number) for each in change.targets]
    sources = sorted(
        (each for each in before if each.number in set(change.sources)),
        key=lambda each: each.lps.first,
    )
    groups = [each.broker_group for each in sources]
    if change.kind == "split":
        return f"qmq route merge {subject} {' '.join(targets)} --to {groups[0]}"
    if change.kind == "merge":
        cuts = " ".join(f"--at {each.lps.first}" for each in sources[1:])
        return (
            f"qmq route split {subject} {targets[0]} {cuts} "
            f"{' '.join(f'--to {group}' for group in groups)}"
        )
    return f"qmq route move {subject} {targets[0]} --to {groups[0]}"


def plan_facts(
    now: pb.DescribeRouteResponse, found: pb.ChangeRouteResponse, history: list[pb.RouteChangeInfo]
) -> dict[str, Any]:
    """The plan of a change as JSON values. Pure."""
    subject, sources = now.settings.name, list(found.change.sources)
    width = sum(
        each.lps.end - each.lps.first for each in now.route.partitions if each.number in sources
    )
    refused = [
        each["refused_ms_max"]
        for each in map(change_facts, history)
        if each["refused_ms_max"] is not None
    ]
    return {
        "subject": subject,
        "from_version": now.route.version,
        "change": change_facts(found.change),
        "before": [place_facts(each) for each in now.route.partitions],
        "after": [place_facts(each) for each in found.route.partitions],
        "refused_percent": round(100 * width / now.route.logical_partitions, 2),
        "last_refused_ms_max": refused[-1] if refused else None,
        "groups": [
            {"group": each.group, "version": each.version, "left": left_in(each, sources)}
            for each in now.groups
        ],
        "undo": undo_command(subject, found.change, now.route.partitions),
    }


async def described(metadata: MetadataClient, subject: str, version: int = 0) -> dict[str, Any]:
    """A subject's facts. The broker groups of partitions of other versions come from the history
    and the first route.
    """
    found = await metadata.describe_route(subject, version)
    places = {each.number: each for each in found.route.partitions}
    wanted = read_partitions(found) | set(found.route.fenced)
    if wanted - places.keys():
        places |= {
            each.number: each
            for change in await metadata.route_history(subject)
            for each in change.targets
        }
    if wanted - places.keys():
        places |= {
            each.number: each
            for each in (await metadata.describe_route(subject, 1)).route.partitions
        }
    return facts(found, places)
