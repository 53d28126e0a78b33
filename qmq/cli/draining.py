"""Moves all partitions of ordered subjects away from a broker group, one after another, to the least loaded other groups.

A drain keeps no state between runs: the partitions still on the group are the work left, so an interrupted drain continues when it is
started again. A move is done when its route is published: from then on the group takes no messages for the partition. Messages already
stored are consumed from the old group.
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
"""Attempts while another change of the subject is in progress. With their pauses they last longer than the lease of a lost broker group."""


class Move(NamedTuple):
    """A partition to move, and its target group."""

    subject: str
    partition: int
    target: str


@dataclass(slots=True)
class DrainLoad:
    """The load of a broker group from ordered subjects."""

    partitions: int = 0
    messages_per_s: float = 0.0


def targets(cluster: pb.DescribeClusterResponse, drained: str) -> list[str]:
    """Possible targets: broker groups that accept messages now. Pure."""
    found = [each for each in cluster.groups if each.broker_group != drained and not each.is_delay]
    return sorted(each.broker_group for each in found if each.health == "read-write")


def plan(subjects: Iterable[pb.DescribeRouteResponse], drained: str, candidates: Iterable[str]) -> list[Move]:
    """All moves: each to the group with the fewest partitions, then the fewest messages a second, then by name. Pure.

    Raises InvalidArgument if there are partitions to move but no target.
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
            f"{len(leaving)} partitions of ordered subjects are on {drained}, and no other broker group accepts messages: "
            "add or resume a group, or use --no-move to leave the partitions there, where they keep taking messages"
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
    """A warning about draining a group without a master; empty if the group has one. Pure."""
    if any(each.broker_group == drained and each.master for each in cluster.groups):
        return ""
    said = (
        f"broker group {drained} has no master: producers use other groups, and messages that only it has are not consumed until it is back"
    )
    if list(moves):
        said += (
            "; its partitions are fenced, which takes some seconds, until its write lease has expired; a partition of a subject "
            "with fencing 'majority' cannot leave a lost group: its move waits until the group is back"
        )
    return said


async def find(metadata: MetadataClient, drained: str, *, leaving: Sequence[str] = ()) -> list[Move]:
    """The plan for the current cluster. The groups `leaving` are no targets. Raises InvalidArgument, Unavailable."""
    ordered = [each.settings.name for each in await metadata.list_subjects() if each.settings.order]
    described = [await metadata.describe_route(name) for name in ordered]
    return plan(described, drained, [each for each in targets(await metadata.cluster(), drained) if each not in leaving])


async def carry_out(
    metadata: MetadataClient, drained: str, moves: Iterable[Move], moved: Callable[[Move], None], conflict_s: float
) -> None:
    """Make the moves one after another. `moved` is called after each; `conflict_s` is the pause while another change of the subject runs.

    A partition that has left the group meanwhile is skipped. Raises what ChangeRoute raises.
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
