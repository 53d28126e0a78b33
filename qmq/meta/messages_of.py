"""Subjects, routes and changes as protobuf messages, and back."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

from qmq_ordering.hashing import LOGICAL_PARTITIONS
from qmq_ordering.lane import Lane
from qmq_ordering.route import Change, LpRange, PhysicalPartition, Route

from qmq.errors import InvalidArgument
from qmq.limits import BODY_BYTES_MAX
from qmq.model import Fencing, Order, SubjectConfig, SubjectFlush
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

_E = TypeVar("_E", bound=Enum)


def settings_of(config: SubjectConfig) -> pb.SubjectSettings:
    """A subject's settings as a protobuf message."""
    return pb.SubjectSettings(
        name=config.name,
        retention_ms=config.retention_ms,
        retention_bytes=config.retention_bytes,
        body_bytes_max=config.body_bytes_max,
        broker_groups=config.groups,
        order=config.order.value,
        logical_partitions=config.logical_partitions,
        fencing=config.fencing.value if config.order is not Order.NONE else "",
        flush=config.flush.value,
    )


def config_of(settings: pb.SubjectSettings) -> SubjectConfig:
    """Decode a subject's settings. Raises InvalidName, InvalidArgument."""
    order = _one_of(Order, settings.order, "order")
    lps = (settings.logical_partitions or LOGICAL_PARTITIONS) if order is not Order.NONE else 0
    return SubjectConfig(
        settings.name,
        settings.retention_ms if settings.HasField("retention_ms") else None,
        settings.retention_bytes if settings.HasField("retention_bytes") else None,
        settings.body_bytes_max or BODY_BYTES_MAX,
        tuple(settings.broker_groups),
        order=order,
        logical_partitions=lps,
        fencing=_one_of(Fencing, settings.fencing or Fencing.LEASE.value, "fencing"),
        flush=flush_of(settings.flush),
    )


def flush_of(text: str) -> SubjectFlush:
    """Decode when a subject's producers are answered. Raises InvalidArgument."""
    return _one_of(SubjectFlush, text or SubjectFlush.DEFAULT.value, "flush")


def _one_of(kind: type[_E], text: str, name: str) -> _E:
    try:
        return kind(text)
    except ValueError:
        known = ", ".join(repr(each.value) for each in kind)
        raise InvalidArgument(f"a subject's {name} is one of {known}, not {text!r}") from None


# --- ordered subjects ---------------------------------------------------------------------------------------------------


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
