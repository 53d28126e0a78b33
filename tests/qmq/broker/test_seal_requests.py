"""A broker closes a partition only for a change of the route that the coordination store has."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from lane_support import SUBJECT, WHOLE, World, world
from qmq_coordination.ordered_records import change_key
from qmq_ordering.routes import Change, ChangeKind

from qmq.errors import InvalidArgument
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.channel import typed_error


async def seal(
    it: World, change_id: str = "split-1", to_version: int = 2, partition: int = 1
) -> int:
    """Send a Seal request to the control port, as any client can. Raises the typed error."""
    master = it.node.view.group(it.node.config.broker.name).master
    assert master is not None
    address = master.control_address
    request = pb.SealRequest(
        subject=SUBJECT, partition=partition, change_id=change_id, to_version=to_version
    )
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            answer = await control_pb2_grpc.BrokerControlStub(channel).Seal(request, timeout=10)
        except grpc.aio.AioRpcError as cause:
            raise typed_error(cause, address) from cause
    return answer.sequence


async def test_a_seal_that_no_change_asks_for_is_refused_and_the_key_continues(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as it:
        await it.produce([b"k"])
        with pytest.raises(InvalidArgument, match=r"no change 'evil'.*qmq route split"):
            await seal(it, "evil", 99)
        assert (await it.produce([b"k"], number=1)).base_sequence == 1


async def test_a_seal_is_for_the_partitions_of_its_change_only(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.produce([b"k"])
        targets = (it.part(2, 0, 8), it.part(3, 8, WHOLE.end))
        change = Change("split-1", ChangeKind.SPLIT, 2, (1,), targets)
        # The broker's view does not have it yet: the broker asks the store.
        await it.node.coordination.put(change_key(SUBJECT, 2), change.encode())
        for change_id, version, partition in (
            ("split-2", 2, 1),
            ("split-1", 3, 1),
            ("split-1", 2, 2),
        ):
            with pytest.raises(InvalidArgument, match="nothing was sealed"):
                await seal(it, change_id, version, partition)
        assert await seal(it) == 1
        assert await seal(it) == 1
