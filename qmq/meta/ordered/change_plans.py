"""Makes a route change from a request of an operator or a policy: chooses the cuts, and the broker groups of the parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from qmq_coordination.broker_groups import Mode
from qmq_coordination.view import ClusterView
from qmq_ordering.algebra import merge, move, split
from qmq_ordering.range_cuts import cut_by_load
from qmq_ordering.route import Change, PhysicalPartition, Route

from qmq.errors import InvalidArgument, UnknownPartition
from qmq.meta.broker_calls import PartitionMasters
from qmq.model import SubjectConfig
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

Make: TypeAlias = Callable[[Route], Change]


class Plans:
    """Makes plans, and changes nothing."""

    def __init__(self, view: ClusterView, masters: PartitionMasters) -> None:
        self._view = view
        self._masters = masters

    async def plan(self, request: pb.ChangeRouteRequest, config: SubjectConfig, route: Route, change_id: str) -> Make:
        """Return a function that makes the change from a route. `route` is the latest known one, for measuring loads.

        Raises InvalidArgument, UnknownPartition; NotConnected if the load is needed and a master does not answer.
        """
        which = request.WhichOneof("operation")
        if which == "merge":
            joined, group = tuple(request.merge.partitions), request.merge.broker_group
            return lambda found: merge(found, joined, change_id=change_id, group=group, reason=request.reason)
        if which == "move":
            number, target = request.move.partition, request.move.broker_group
            return lambda found: move(found, number, target, change_id=change_id, reason=request.reason)
        if which != "split":
            raise InvalidArgument("name the change of the route: split, merge or move")
        at = tuple(request.split.at) or await self._cut(config.name, route, request.split)
        places = tuple(request.split.broker_groups) or self.spread(config, route, request.split.partition, len(at) + 1)
        return lambda found: split(found, request.split.partition, at, change_id=change_id, groups=places, reason=request.reason)

    async def _cut(self, subject: str, route: Route, operation: pb.SplitOperation) -> tuple[int, ...]:
        """Choose cuts by the load that the partition's master has counted."""
        part = require_partition(route, operation.partition)
        request = control.DescribeLanesRequest(subject=subject, partitions=[part.number], with_load=True)
        answer = await self._masters.describe_lanes(part.group, request)
        load = next((list(each.lp_load) for each in answer.partitions if each.partition == part.number), [])
        return tuple(cut_by_load(part.range, load or [0.0] * part.range.width, operation.parts or 2))

    def spread(self, config: SubjectConfig, route: Route, number: int, parts: int) -> tuple[str, ...]:
        """The broker groups of the parts: the subject's groups with the fewest partitions first. Empty if all parts stay."""
        writable = [name for name in config.groups if self._view.group(name).mode is Mode.READ_WRITE]
        if len(writable) < 2:
            return ()
        return spread(route, require_partition(route, number), parts, writable)


def spread(route: Route, source: PhysicalPartition, parts: int, groups: Sequence[str]) -> tuple[str, ...]:
    """A group for each part: always the one with the fewest partitions; of several, the source's own, then by name. Pure."""
    counts = Counter(part.group for part in route.partitions if part.number != source.number)
    places = []
    for _ in range(parts):
        place = min(groups, key=lambda name: (counts[name], name != source.group, name))
        counts[place] += 1
        places.append(place)
    return tuple(places)


def require_partition(route: Route, number: int) -> PhysicalPartition:
    """A partition of the latest route. Raises UnknownPartition."""
    part = route.partition(number)
    if part is None:
        here = ", ".join(str(each.number) for each in route.partitions)
        raise UnknownPartition(f"version {route.version} of the route has no partition {number}: it has {here}")
    return part
