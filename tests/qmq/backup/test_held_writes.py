"""A master holds its writes for a backup: never longer than asked, and it says whether it did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from live_cluster import PLAIN, History, LiveCluster

from qmq.errors import InvalidArgument, QmqError, Unavailable
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.channel import typed_error
from qmq.rpc.network import NETWORK
from qmq.rpc.server_name import any_server


class Master:
    def __init__(self, stub: Any) -> None:
        self._stub = stub

    async def _ask(self, answer: Any) -> Any:
        try:
            return await answer
        except grpc.RpcError as cause:
            raise typed_error(cause, "the master") from cause

    async def hold(self, token: str, hold_ms: int) -> None:
        await self._ask(self._stub.HoldWrites(pb.HoldWritesRequest(token=token, hold_ms=hold_ms)))

    async def describe(self, token: str) -> pb.HeldLogs:
        found: pb.HeldLogs = await self._ask(
            self._stub.DescribeHold(pb.DescribeHoldRequest(token=token))
        )
        return found

    async def release(self, token: str) -> None:
        await self._ask(self._stub.ReleaseWrites(pb.ReleaseWritesRequest(token=token)))


@asynccontextmanager
async def master_of(cluster: LiveCluster, name: str) -> AsyncIterator[Master]:
    async with NETWORK.channel(cluster.nodes[name].control_address, any_server) as channel:
        yield Master(control_pb2_grpc.BrokerControlStub(channel))


async def test_writes_wait_while_they_are_held_and_continue_afterwards(
    cluster: LiveCluster, history: History
) -> None:
    async with (
        cluster.client() as mq,
        master_of(cluster, "b1-a") as one,
        master_of(cluster, "b2-a") as other,
    ):
        await history.create_subjects(mq)
        await history.send(mq, 2)
        await asyncio.gather(one.hold("t", 5_000), other.hold("t", 5_000))
        before = await one.describe("t")
        sending = asyncio.ensure_future(mq.send(PLAIN, b"held"))
        with pytest.raises(Unavailable, match="another backup holds"):
            await one.hold("second", 1_000)
        assert (await one.describe("t")) == before
        assert not sending.done()
        await asyncio.gather(one.release("t"), other.release("t"))
        await sending
        with pytest.raises(Unavailable, match="does not hold"):
            await one.release("t")


async def test_a_hold_expires_and_its_caller_is_told(
    cluster: LiveCluster, history: History
) -> None:
    async with (
        cluster.client() as mq,
        master_of(cluster, "b1-a") as one,
        master_of(cluster, "b2-a") as other,
    ):
        await history.create_subjects(mq)
        await asyncio.gather(one.hold("t", 100), other.hold("t", 100))
        await mq.send(PLAIN, b"after the hold")
        with pytest.raises(QmqError):
            for master in (one, other):
                await master.describe("t")
                await master.release("t")
        with pytest.raises(InvalidArgument, match="5,000 ms"):
            await one.hold("t", 60_000)
