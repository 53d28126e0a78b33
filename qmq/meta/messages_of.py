"""Routes, lanes and changes of ordered subjects as protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable

from qmq_ordering.lane import Lane
from qmq_ordering.route import Change, LpRange, PhysicalPartition, Route

from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


def range_of(lps: LpRange) -> control.LpRange:
    """A range of logical partitions."""
    return control.LpRange(first=lps.first, end=lps.end)


def partition_of(part: PhysicalPartition) -> pb.OrderedPartition:
    return pb.OrderedPartition(number=part.number, lps=range_of(part.range), broker_group=part.group)


def route_of(route: Route, fenced: Iterable[int] = ()) -> pb.OrderedRoute:
    return pb.OrderedRoute(
        version=route.version,
        logical_partitions=route.logical_partitions,
        fenced=fenced,
        partitions=[partition_of(part) for part in route.partitions],
    )


def change_of(change: Change) -> pb.RouteChangeInfo:
    return pb.RouteChangeInfo(
        id=change.id,
        kind=change.kind.value,
        to_version=change.to_version,
        sources=change.sources,
        phase=change.phase.value,
        targets=[partition_of(part) for part in change.targets],
        reason=change.reason,
        times_ms=change.times_ms,
        sealed=change.sealed,
    )


def lane_of(lane: Lane, consumer: str = "") -> pb.AssignedLane:
    """A lane and its consumer."""
    return pb.AssignedLane(
        partition=lane.partition, lps=range_of(lane.range), broker_group=lane.group, version=lane.version, consumer=consumer
    )
