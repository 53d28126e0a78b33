"""Converts an ordered subject's history for Spark: partitions of all versions with their sources. Pure.

Worked example: version 1 has 1 [0, 16). A split closes 1 for 2 [0, 8) and 3 [8, 16): both have the source 1. A merge closes them for 4: its
sources are 2 and 3. A move closes 4 for 5, on another broker group: its source is 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from qmq_ordering.routes import LpRange

from qmq.columns.model import RoutePartition, Routes
from qmq.model import Order
from qmq.proto.v1 import meta_pb2 as pb

_PUBLISHED = ("published", "done")


def routes_of(first: pb.OrderedRoute, changes: Sequence[pb.RouteChangeInfo], order: str = Order.STRICT.value) -> Routes:
    """The routes made from the first route and the later changes. An unpublished change can only have closed partitions."""
    partitions = {each.number: _partition(each, 1, ()) for each in first.partitions}
    version = 1
    sealed_at: dict[int, int] = {}
    for change in sorted(changes, key=lambda each: each.to_version):
        sealed_at.update({number: sequence for number, sequence in change.sealed.items() if sequence >= 0})
        if change.phase in _PUBLISHED:
            version = change.to_version
            for target in change.targets:
                sources = tuple([source for source in sorted(change.sources) if _overlap(partitions[source], target)])
                partitions[target.number] = _partition(target, version, sources)
    return Routes(first.logical_partitions, version, partitions, sealed_at, order == Order.STRICT.value)


def _partition(found: pb.OrderedPartition, version: int, sources: tuple[int, ...]) -> RoutePartition:
    return RoutePartition(found.number, LpRange(found.lps.first, found.lps.end), found.broker_group, version, sources)


def _overlap(source: RoutePartition, target: pb.OrderedPartition) -> bool:
    return source.lps.overlaps(LpRange(target.lps.first, target.lps.end))
