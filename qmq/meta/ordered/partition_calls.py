"""Brokers over gRPC, as changes and rounds ask for them. Deadlines are short: who is silent is asked again, and holds nobody else up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Final, TypeVar

from qmq.errors import CallerError
from qmq.meta.broker_calls import Brokers
from qmq.proto.v1 import control_pb2 as control

SEAL_S: Final = 1.0
LANES_S: Final = 1.0
PLACE_S: Final = 2.5

_T = TypeVar("_T")


class PartitionMasters:
    """A Sealer, a LaneReader and a GroupForgetter."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def seal(self, broker_group: str, subject: str, partition: int, change_id: str, to_version: int) -> int:
        """See Sealer. Asking a second master is harmless: whoever sealed it answers the same."""
        request = control.SealRequest(subject=subject, partition=partition, change_id=change_id, to_version=to_version)
        answer: control.SealResponse = await self._brokers.ask_master(broker_group, "Seal", request, timeout_s=SEAL_S)
        return answer.sequence

    async def probe(self, broker_group: str, subject: str, partition: int) -> None:
        """See Sealer. A broker that refuses the question answers."""
        try:
            await self.describe_lanes(broker_group, control.DescribeLanesRequest(subject=subject, partitions=[partition]))
        except CallerError:
            return

    async def describe_lanes(self, broker_group: str, request: control.DescribeLanesRequest) -> control.DescribeLanesResponse:
        answer: control.DescribeLanesResponse = await self._brokers.ask_master(broker_group, "DescribeLanes", request, timeout_s=LANES_S)
        return answer

    async def place_lanes(self, broker_group: str, request: control.PlaceLanesRequest) -> None:
        """See LaneReader. To move a group is asked of a second master only if the first certainly did nothing."""
        await self._brokers.ask_master(broker_group, "PlaceLanes", request, timeout_s=PLACE_S, is_change=request.moves)

    async def inherit_parked(self, broker_group: str, request: control.InheritParkedRequest) -> None:
        """See LaneReader. Asking a second master is harmless: the same keys are parked there then."""
        await self._brokers.ask_master(broker_group, "InheritParked", request, timeout_s=LANES_S)

    async def forget_group(self, broker_group: str, request: control.DeleteGroupRequest) -> int:
        """See GroupForgetter. Asking a second master is harmless: there is nothing left to forget."""
        answer: control.DeleteGroupResponse = await self._brokers.ask_master(broker_group, "DeleteGroup", request, timeout_s=PLACE_S)
        return answer.queues


async def at_once(asked: Iterable[Awaitable[_T]]) -> list[_T]:
    """A Gather for an event loop."""
    return list(await asyncio.gather(*asked))
