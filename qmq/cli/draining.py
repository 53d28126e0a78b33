"""Emptying a broker group of ordered subjects' partitions: a series of moves, one after another, to the least loaded other groups.

Nothing is remembered between two runs: what is still on the group is what is left to do, so a drain that broke off goes on when it is
started again. A move is done when its route is published: from then on the group takes no messages of it. What it keeps is consumed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from qmq.errors import InvalidArgument, RouteConflict

if TYPE_CHECKING:
    from qmq.client.metadata import MetadataClient
    from qmq.proto.v1 import meta_pb2 as pb

CONFLICTS_MAX: Final = 20
"""Tries while another change of the subject is under way: with the pauses between them they outlast the lease of a lost broker group."""


class Move(NamedTuple):
    """A partition that shall leave the group."""

    subject: str
    partition: int
    target: str


@dataclass(slots=True)
class DrainLoad:
    """What a broker group takes of ordered subjects."""

    partitions: int = 0
    messages_per_s: float = 0.0


def targets(cluster: pb.DescribeClusterResponse, drained: str) -> list[str]:
    """Where partitions may go: groups that take messages now. Pure."""
    found = [each for each in cluster.groups if each.broker_group != drained and not each.is_delay]
    return sorted(each.broker_group for each in found if each.health == "read-write")


def plan(subjects: Iterable[pb.DescribeRouteResponse], drained: str, candidates: Iterable[str]) -> list[Move]:
    """All moves: each to the group with the fewest partitions, then the fewest messages a second, then by name. Pure.

    Raises InvalidArgument if something is to move and there is nowhere to move it.
    """
    known = list(subjects)
    loads = {name: DrainLoad() for name in candidates}
    leaving: list[tuple[str, int, float]] = []
    for subject in known:
        rates = {each.partition: each.messages_per_s for each in subject.partitions}
        for each in subject.route.partitions:
            rate = rates.get(each.number, 0.0)
            if each.broker_group == drained:
                leaving.append((subject.settings.name, each.number, rate))
            elif each.broker_group in loads:
                _add(loads[each.broker_group], rate)
    if leaving and not loads:
        raise InvalidArgument(
            f"{len(leaving)} partitions of ordered subjects live on {drained}, and no other broker group takes messages just now: "
            "add or resume one; --no-move drains without moving them, and they go on taking messages"
        )
    moves = []
    for name, number, rate in sorted(leaving):
        target = _least(loads)
        _add(loads[target], rate)
        moves.append(Move(name, number, target))
    return moves


def _add(load: DrainLoad, rate: float) -> None:
    load.partitions += 1
    load.messages_per_s += rate


def _least(loads: Mapping[str, DrainLoad]) -> str:
    return min(loads, key=lambda name: (loads[name].partitions, loads[name].messages_per_s, name))


def warning(cluster: pb.DescribeClusterResponse, drained: str, moves: Iterable[Move]) -> str:
    """What will become of a group that is lost; empty if it has a master. Pure."""
    if any(each.broker_group == drained and each.master for each in cluster.groups):
        return ""
    said = f"broker group {drained} has no master: producers go elsewhere, and what only it keeps is not consumed until it is back"
    if list(moves):
        said += (
            "; its partitions are fenced, which takes until its right to write has surely lapsed (some seconds); a partition of a subject "
            "with fencing 'majority' cannot leave a lost group: its move waits until the group is back"
        )
    return said


async def find(metadata: MetadataClient, drained: str, *, leaving: Sequence[str] = ()) -> list[Move]:
    """The plan for the cluster as it is now; nothing is moved to the groups `leaving`. Raises InvalidArgument, Unavailable."""
    ordered = [each.settings.name for each in await metadata.list_subjects() if each.settings.order]
    described = [await metadata.describe_route(name) for name in ordered]
    return plan(described, drained, [each for each in targets(await metadata.cluster(), drained) if each not in leaving])


async def carry_out(
    metadata: MetadataClient, drained: str, moves: Iterable[Move], moved: Callable[[Move], None], conflict_s: float
) -> None:
    """One after another; `moved` is told of each, `conflict_s` is the pause while another change of the subject is under way.

    A partition that left meanwhile is passed over. Raises what ChangeRoute raises.
    """
    for each in moves:
        await _move(metadata, drained, each, conflict_s)
        moved(each)


async def _move(metadata: MetadataClient, drained: str, wanted: Move, conflict_s: float) -> None:
    from qmq.proto.v1 import meta_pb2 as pb

    operation = pb.MoveOperation(partition=wanted.partition, broker_group=wanted.target)
    for left in range(CONFLICTS_MAX, -1, -1):
        route = (await metadata.describe_route(wanted.subject)).route
        if not any(each.number == wanted.partition and each.broker_group == drained for each in route.partitions):
            return
        try:
            await metadata.change_route(wanted.subject, move=operation, from_version=route.version, reason=f"drain {drained}")
        except RouteConflict:
            if not left:
                raise
            await asyncio.sleep(conflict_s)
        else:
            return
