"""Describes the whole cluster for operators: groups as the store has them, replicas by their own answers.

The metaserver calls all registered replicas at the same time, with a deadline of a second, so that a stopped or unreachable replica does
not delay the answer about the others. Values that only such a replica knows are absent.
"""

from __future__ import annotations

import asyncio
from typing import Final

from qmq_coordination.broker_groups import BrokerGroupState, ReplicaRecord
from qmq_coordination.view import ClusterView

from qmq.clock import Clock
from qmq.errors import QmqError
from qmq.meta.broker_calls import Brokers
from qmq.process_description import DescribeProcess
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

REPLICA_S: Final = 1.0


class ClusterDescription:
    """`process` describes the metaserver's own process."""

    def __init__(self, view: ClusterView, brokers: Brokers, clock: Clock, process: DescribeProcess) -> None:
        self._view, self._brokers, self._clock, self._process = view, brokers, clock, process

    async def of_all(self) -> pb.DescribeClusterResponse:
        """The metaserver, and all groups with their replicas."""
        found = self.of_metaserver()
        view = self._view
        found.groups.extend(await asyncio.gather(*[_group(view, self._brokers, state) for state in view.groups()]))
        return found

    def of_metaserver(self) -> pb.DescribeClusterResponse:
        """The metaserver alone, without groups."""
        return pb.DescribeClusterResponse(store_silent_ms=self._view.silent_ms, process=self._process(), time_ms=self._clock.time_ms())


async def _group(view: ClusterView, brokers: Brokers, state: BrokerGroupState) -> pb.GroupDescription:
    present = view.present(state.name)
    places = {**view.replicas(state.name), **present}
    names = sorted({*places, *state.voters, *state.learners})
    replicas = await asyncio.gather(*[_replica(brokers, name, places.get(name), is_present=name in present) for name in names])
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


async def _replica(brokers: Brokers, name: str, place: ReplicaRecord | None, *, is_present: bool) -> pb.ReplicaDescription:
    if place is None:
        return pb.ReplicaDescription(replica=name)
    status = await _status(brokers, place) if is_present else None
    return pb.ReplicaDescription(
        replica=name, data_address=place.data_address, control_address=place.control_address, is_present=is_present, status=status
    )


async def _status(brokers: Brokers, place: ReplicaRecord) -> control.ReplicaStatus | None:
    try:
        status: control.ReplicaStatus = await brokers.ask(
            place.control_address, "DescribeReplica", control.DescribeReplicaRequest(), REPLICA_S
        )
    except QmqError:
        return None
    return status
