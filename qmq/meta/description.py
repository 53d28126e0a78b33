"""Describes the whole cluster for operators: groups as the store has them, replicas by their own
answers; and routes, lanes and changes of ordered subjects as protobuf messages.

The metaserver calls all registered replicas at the same time, with a deadline of a second, so that
a stopped or unreachable replica does not delay the answer about the others. Values that only such a
replica knows are absent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from qmq_coordination.broker_groups import BrokerGroupState, ReplicaRecord
from qmq_coordination.view import ClusterView
from qmq_ordering.lanes import Lane
from qmq_ordering.routes import Change, LpRange, PhysicalPartition, Route

from qmq.errors import QmqError
from qmq.meta.calls import Brokers
from qmq.process.description import DescribeProcess
from qmq.process.event_loop import Clock
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

if TYPE_CHECKING:
    from qmq_coordination.etcd.store import EtcdMember

REPLICA_S: Final = 1.0
MEMBERS_MS: Final = 5_000
"""For so long the answers of the coordination store's members hold: consoles ask every few seconds,
and a dead member answers late.
"""

AskMembers = Callable[[], Awaitable["Sequence[EtcdMember]"]]


async def no_members() -> Sequence[EtcdMember]:
    """The members of a store that is a file."""
    return ()


class ClusterDescription:
    """`process` describes the metaserver's own process, `members` asks the members of the
    coordination store.
    """

    def __init__(
        self,
        view: ClusterView,
        brokers: Brokers,
        clock: Clock,
        process: DescribeProcess,
        members: AskMembers = no_members,
    ) -> None:
        self._view, self._brokers, self._clock, self._process, self._members = (
            view,
            brokers,
            clock,
            process,
            members,
        )
        self._asked: asyncio.Future[Sequence[EtcdMember]] | None = None
        self._asked_ms = 0

    async def of_all(self) -> pb.DescribeClusterResponse:
        """The metaserver, and all groups with their replicas."""
        view = self._view
        groups = asyncio.gather(*[_group(view, self._brokers, state) for state in view.groups()])
        found, described = await asyncio.gather(self.of_metaserver(), groups)
        found.groups.extend(described)
        return found

    async def of_metaserver(self) -> pb.DescribeClusterResponse:
        """The metaserver and its coordination store, without groups."""
        statuses = await self._ask_members()
        members = [
            pb.StoreMember(address=each.address, version=each.version, failure=each.failure)
            for each in statuses
        ]
        return pb.DescribeClusterResponse(
            store_silent_ms=self._view.silent_ms,
            process=self._process(),
            time_ms=self._clock.time_ms(),
            cluster=self._view.cluster,
            store_members=members,
        )

    async def _ask_members(self) -> Sequence[EtcdMember]:
        now_ms, asked = self._clock.monotonic_ms(), self._asked
        is_old = now_ms - self._asked_ms >= MEMBERS_MS
        if asked is None or (
            asked.done() and (is_old or asked.cancelled() or asked.exception() is not None)
        ):
            asked = self._asked = asyncio.ensure_future(self._members())
            self._asked_ms = now_ms
        return await asyncio.shield(asked)


async def _group(
    view: ClusterView, brokers: Brokers, state: BrokerGroupState
) -> pb.GroupDescription:
    present = view.present(state.name)
    places = {**view.replicas(state.name), **present}
    names = sorted({*places, *state.voters, *state.learners})
    replicas = await asyncio.gather(
        *[
            _replica(brokers, state.name, name, places.get(name), is_present=name in present)
            for name in names
        ]
    )
    master = state.master
    return pb.GroupDescription(
        broker_group=state.name,
        health=state.health.value,
        mode=state.mode.value,
        master=master.replica if master else "",
        epoch=state.claim.epoch if master is None else master.epoch,
        voters=state.voters,
        learners=state.learners,
        replicas=replicas,
        is_delay=state.delay is not None,
    )


async def _replica(
    brokers: Brokers, group: str, name: str, place: ReplicaRecord | None, *, is_present: bool
) -> pb.ReplicaDescription:
    if place is None:
        return pb.ReplicaDescription(replica=name)
    status = await _status(brokers, group, place) if is_present else None
    return pb.ReplicaDescription(
        replica=name,
        data_address=place.data_address,
        control_address=place.control_address,
        is_present=is_present,
        status=status,
    )


async def _status(
    brokers: Brokers, group: str, place: ReplicaRecord
) -> control.ReplicaStatus | None:
    try:
        status: control.ReplicaStatus = await brokers.ask(
            group, place, "DescribeReplica", control.DescribeReplicaRequest(), REPLICA_S
        )
    except QmqError:
        return None
    # A replica of release 0.2.0 answers calls that mean another one.
    return status if status.replica == place.replica else None


def range_of(lps: LpRange) -> control.LpRange:
    """A range of logical partitions."""
    return control.LpRange(first=lps.first, end=lps.end)


def partition_of(part: PhysicalPartition) -> pb.OrderedPartition:
    return pb.OrderedPartition(
        number=part.number, lps=range_of(part.range), broker_group=part.group
    )


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
        partition=lane.partition,
        lps=range_of(lane.range),
        broker_group=lane.group,
        version=lane.version,
        consumer=consumer,
    )
