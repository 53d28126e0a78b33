"""Interprets metaservers' answers: where a subject is, and a consumer's lanes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qmq_ordering.lane import Lane
from qmq_ordering.route import LpRange, PhysicalPartition
from qmq_ordering.route import Route as OrderedRoute

from qmq.client.ordered.lane_membership import Assigned
from qmq.client.route_book import Ordering, Placement, SubjectRoute
from qmq.errors import NotConnected
from qmq.model import Order
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.schemas.declared_schema import DeclaredSchema, compatibility_of, format_of
from qmq.server_name import ServerName


@dataclass(frozen=True, slots=True)
class FoundSubject:
    """A subject, as the broker groups that answer describe it."""

    description: pb.SubjectDescription
    silent: dict[str, str]
    """The broker groups that did not answer, with the reasons: the description lacks their queues."""

    @property
    def settings(self) -> pb.SubjectSettings:
        return self.description.settings


def placement_of(subject: str, found: pb.LocateResponse) -> Placement:
    """Convert a metaserver's answer. Raises NotConnected if an ordered subject has no route yet."""
    return Placement(routes_of(found.routes, found.cluster), _ordering(subject, found))


def routes_of(routes: Iterable[pb.QueueRoute], cluster: str) -> list[SubjectRoute]:
    """The broker groups in an answer of this cluster."""
    return [
        SubjectRoute(
            each.broker_group, each.data_address, each.epoch, each.is_writable, ServerName(cluster, each.broker_group, each.replica)
        )
        for each in routes
        if each.partition == 0
    ]


def _ordering(subject: str, found: pb.LocateResponse) -> Ordering | None:
    """The order in a metaserver's answer. Raises NotConnected if an ordered subject has no route yet."""
    if not found.settings.order:
        return None
    if not found.route.partitions:
        raise NotConnected(f"ordered subject {subject!r} has no route yet")
    parts = tuple(
        PhysicalPartition(each.number, LpRange(each.lps.first, each.lps.end), each.broker_group) for each in found.route.partitions
    )
    number = max(part.number for part in parts) + 1
    route = OrderedRoute(found.route.version, found.route.logical_partitions, number, parts)
    return Ordering(Order(found.settings.order), route, frozenset(found.route.fenced))


def schema_of(found: pb.SubjectSchema) -> DeclaredSchema:
    """Raises InvalidArgument for a format that only a newer release knows."""
    return DeclaredSchema(format_of(found.format), found.text, compatibility_of(found.compatibility), found.version, found.created_ms)


def assigned_lane(lane: Lane) -> pb.AssignedLane:
    lps = control.LpRange(first=lane.range.first, end=lane.range.end)
    return pb.AssignedLane(partition=lane.partition, lps=lps, broker_group=lane.group, version=lane.version)


def lanes_of(found: pb.SyncMemberResponse) -> Assigned:
    """The lanes that a consumer is assigned, sorted."""
    lanes = [Lane(each.partition, LpRange(each.lps.first, each.lps.end), each.broker_group, each.version) for each in found.lanes]
    return Assigned(found.generation, tuple(sorted(lanes)))
