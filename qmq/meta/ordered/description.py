"""A subject's routes, partitions and groups for operators: from the store and the brokers. Brokers that do not answer are named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from qmq_coordination.ordered_records import OrderedState
from qmq_coordination.view import ClusterView
from qmq_ordering.lanes import GroupRecord
from qmq_ordering.routes import Route

from qmq.errors import InvalidArgument, QmqError
from qmq.meta.calls import PartitionMasters
from qmq.meta.description import change_of, lane_of, range_of, route_of
from qmq.meta.ordered.rounds import EVERYTHING, GroupLaneProgress, with_unwritten
from qmq.model import SubjectConfig
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire.subject_settings import settings_of


class Descriptions:
    """Describes routes, and changes nothing."""

    def __init__(self, view: ClusterView, masters: PartitionMasters) -> None:
        self._view = view
        self._masters = masters

    async def route(self, config: SubjectConfig, state: OrderedState, version: int) -> pb.DescribeRouteResponse:
        """One version of the route (0: the latest), its partitions, and all groups. Raises InvalidArgument."""
        route = state.routes.get(version or state.latest)
        if route is None:
            raise InvalidArgument(f"subject {config.name!r} has no route version {version}: the latest is {state.latest}")
        silent: set[str] = set()
        names = sorted(state.groups)
        answers = await asyncio.gather(*[self._ask(config.name, state, group, silent) for group in ("", *names)])
        groups = [
            self._group(state, name, state.groups[name], answer, is_all=not version)
            for name, answer in zip(names, answers[1:], strict=True)
        ]
        here = {part.number for part in route.partitions}
        return pb.DescribeRouteResponse(
            settings=settings_of(config),
            route=route_of(route, state.fenced),
            latest_version=state.latest,
            partitions=[each for each in answers[0] if each.partition in here],
            groups=groups,
            change=None if state.pending is None else change_of(state.pending),
            silent_groups=sorted(silent),
        )

    async def _ask(self, subject: str, state: OrderedState, group: str, silent: set[str]) -> list[control.PartitionStatus]:
        """Ask for all partitions of all versions, with the progress of a group."""
        numbers: dict[str, set[int]] = {}
        for part in (part for route in state.routes.values() for part in route.partitions):
            numbers.setdefault(part.group, set()).add(part.number)
        requests = {
            name: control.DescribeLanesRequest(subject=subject, partitions=sorted(here), group=group, with_parked=True)
            for name, here in numbers.items()
        }
        answers = await asyncio.gather(*[self._ask_one(name, request, silent) for name, request in requests.items()])
        return sorted((each for answer in answers for each in answer.partitions), key=lambda each: each.partition)

    async def _ask_one(self, name: str, request: control.DescribeLanesRequest, silent: set[str]) -> control.DescribeLanesResponse:
        try:
            return with_unwritten(await self._masters.describe_lanes(name, request), request, name)
        except QmqError:
            silent.add(name)
            return control.DescribeLanesResponse()

    def _group(
        self, state: OrderedState, name: str, record: GroupRecord, statuses: Iterable[control.PartitionStatus], *, is_all: bool
    ) -> pb.OrderedGroup:
        frontier, found = record.frontier, list(statuses)
        progress = GroupLaneProgress()
        progress.add(control.DescribeLanesResponse(partitions=found))
        newest = state.latest if is_all else frontier.newest
        wanted = _numbers(state.routes[version] for version in range(frontier.version, newest + 1) if version in state.routes)
        members = self._view.members(state.subject, name)
        lanes = self._view.assignment(state.subject, name).lanes
        ahead = _numbers(route for version, route in state.routes.items() if version >= frontier.version)
        parked_keys = len({key.key for each in found for key in each.parked})  # a key may be parked in several partitions
        for each in found:
            each.ClearField("parked")
        return pb.OrderedGroup(
            group=name,
            version=frontier.version,
            gate=record.gate.value,
            is_ready=record.is_ready,
            consumers=list(members),
            frontier=[pb.GroupRange(lps=range_of(piece.range), version=piece.version) for piece in frontier.pieces],
            partitions=[each for each in found if each.partition in wanted],
            backlog=round(sum(progress.backlog(each.partition, EVERYTHING) for each in found if each.partition in ahead)),
            parked_keys=parked_keys,
            lanes=[lane_of(lane, owner) for lane, owner in lanes if owner in members],
            is_paused=self._view.delivery.is_paused(state.subject, name, "", ""),
        )


def _numbers(routes: Iterable[Route]) -> set[int]:
    return {part.number for route in routes for part in route.partitions}
