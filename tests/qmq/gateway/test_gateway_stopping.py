"""How a gateway ends: a cluster that is gone does not keep it."""

from __future__ import annotations

import asyncio

import pytest
from gateway_stub import gateway_on, message

from qmq.errors import QmqError
from qmq.gateway import server
from qmq.gateway.server import leave
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.testing import TestCluster

STOPS_S = 60
"""Far more than it takes, and less than a client tries to send a message."""


async def test_a_gateway_stops_when_its_cluster_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEAVE_S", 0.1)
    async with TestCluster() as cluster, gateway_on(cluster) as gateway:
        assert (await gateway.send(message("orders"), message("orders"))).status.code == api.OK
        assert await gateway.receive("orders", invisible_s=600, batch=1, wait_s=20)
        for name in [each for replicas in cluster.groups.values() for each in replicas]:
            await cluster.kill(name)
        unanswered = asyncio.ensure_future(gateway.mq.send("orders", b"unanswered"))
        await asyncio.sleep(0)
        async with asyncio.timeout(STOPS_S):
            await gateway.gateway.stop()
            await leave(gateway.mq.close())
        with pytest.raises(QmqError):
            await unanswered
