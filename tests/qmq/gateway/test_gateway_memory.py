"""The gateway holds a bounded part of bodies that are small on disk and large when they are
decompressed.
"""

from __future__ import annotations

from gateway_stub import gateway_on, receive_request
from support import memory_at_most

from qmq.limits import MIB
from qmq.testing import TestCluster

COUNT = 120


async def test_receives_without_a_verdict_hold_a_bounded_part_and_lose_nothing() -> None:
    async with TestCluster() as cluster, gateway_on(cluster) as gateway:
        async with gateway.mq.producer("zeros", compression="zstd") as producer:
            for _ in range(COUNT):
                await producer.send(bytes(MIB))
        attempts: list[int] = []
        with memory_at_most(48 * MIB):
            while len(attempts) < COUNT:
                request = receive_request("zeros", batch=1000)
                answers = gateway.stub.ReceiveMessage(request, metadata=gateway.headers, timeout=30)
                attempts += [
                    each.message.system_properties.delivery_attempt
                    async for each in answers
                    if each.HasField("message")
                ]
    assert attempts == [1] * COUNT
