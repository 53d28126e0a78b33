"""Rules in a cluster without TLS, on one machine: servers authenticate to each other by the
cluster's token, for every request.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

import qmq
from qmq.errors import AccessDenied
from qmq.proto.v1 import meta_pb2 as pb
from qmq.testing import TestCluster, virtual


async def test_a_cluster_continues_under_rules_through_fail_over_split_and_delay() -> None:
    async with TestCluster(brokers=3, groups=2, clock=virtual()) as cluster:
        first = cluster.client()
        token = (await first.access.create_token("op:admin")).token
        for kind in ("cluster", "subject", "group"):
            await first.access.put_rule("op:admin", [], kind)
        admin = cluster.client(token=token)
        await admin.access.set_mode("enforce")
        with pytest.raises(AccessDenied):
            await first.send("orders", b"1")

        await admin.metadata.create_subject(
            qmq.SubjectConfig("keys", order=qmq.Order.STRICT, logical_partitions=64), partitions=1
        )
        await admin.send("keys", b"1", key="k")
        await admin.send("orders", b"1")
        await admin.send("orders", b"2", delay=timedelta(hours=1))
        group = next(iter(cluster.groups))
        before = cluster.master(group)
        await cluster.kill(before)
        await cluster.until_master(group, other_than=before)
        await admin.metadata.change_route("keys", split=pb.SplitOperation(partition=1))
        await admin.send("keys", b"2", key="k")
        await cluster.clock.advance(hours=2)
        orders = admin.consumer("orders", group="g")
        assert {(await anext(orders)).body for _ in range(2)} == {b"1", b"2"}
        keys = admin.ordered_consumer("keys", group="g")
        found = []
        async for message in keys:
            found.append(message.body)
            await message.ack_sync()
            if len(found) == 2:
                break
        assert found == [b"1", b"2"]
