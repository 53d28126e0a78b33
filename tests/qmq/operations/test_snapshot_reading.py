"""A snapshot read from a real cluster: complete while all is well, and partial, saying so, while
something is away.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

import qmq
from qmq.model import Order, SubjectConfig
from qmq.operations.findings import findings
from qmq.operations.snapshot import OFFLINE, ClusterSnapshot
from qmq.operations.snapshot_reading import CLUSTER, read_snapshot
from qmq.operations.text import Severity, worst
from qmq.testing import TestCluster

SOON = timedelta(seconds=20)


async def look(cluster: TestCluster) -> ClusterSnapshot:
    return await read_snapshot(cluster.client().metadata, cluster.clock)


def codes(snapshot: ClusterSnapshot, previous: ClusterSnapshot | None = None) -> set[str]:
    return {each.code for each in findings(snapshot, previous) if each.severity > Severity.NOTICE}


@pytest.mark.qmq_cluster(brokers=3, groups=2, delay=3)
async def test_a_whole_cluster_is_read_and_all_is_well(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    await mq.metadata.create_subject(
        SubjectConfig("orders", order=Order.STRICT, logical_partitions=64), partitions=2
    )
    await mq.send_many("orders", [b"1", b"2"], keys=["a", "b"])
    await mq.send_many("flights", [b"1", b"2", b"3"])
    await mq.send("flights", b"later", delay=timedelta(days=1))
    consumer = mq.consumer("flights", group="ops", ack="explicit")
    await (await consumer.pull(2, SOON)).ack_sync()
    found = await look(qmq_cluster)
    assert found.is_complete
    assert [(each.failure, each.process is not None) for each in found.metaservers] == [("", True)]
    assert {
        each.broker_group: (each.health, len(each.replicas)) for each in found.broker_groups
    } == {"group-1": ("read-write", 3), "group-2": ("read-write", 3), "delay": ("read-write", 3)}
    for replica in (replica for group in found.broker_groups for replica in group.replicas):
        assert replica.process is not None
        assert replica.process.version == qmq.__version__
        assert replica.storage is not None
        assert replica.storage.disk_free_bytes > 0
    subjects = {each.subject: each for each in found.subjects}
    assert subjects["flights"].stored_messages == 3
    route = subjects["orders"].route
    assert route is not None
    assert (route.version, route.partitions, route.change) == (1, 2, None)
    (group,) = found.groups
    assert (group.subject, group.group, group.consumers) == ("flights", "ops", 1)
    assert sum(each.done_messages for each in group.progress) + group.lag_messages == 3
    assert [(each.group, each.pending) for each in found.delay_groups] == [("delay", 1)]
    assert codes(found, await look(qmq_cluster)) == set()


@pytest.mark.qmq_cluster(brokers=3, groups=2, delay=False)
async def test_a_lost_broker_group_is_named_and_the_rest_is_read(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    await mq.send("flights", b"1")
    master = qmq_cluster.master("group-2")
    slave = next(name for name in ("broker-4", "broker-5") if name != master)
    for name in (slave, master):  # who is left is no master, and cannot become one
        await qmq_cluster.kill(name)
    await qmq_cluster.clock.advance(seconds=60)
    async with asyncio.timeout(30):
        while True:
            found = await look(qmq_cluster)
            health = {each.broker_group: each.health for each in found.broker_groups}
            if health["group-2"] == OFFLINE:
                break
    assert health["group-1"] == "read-write"
    assert "group-2" in found.silent
    assert {"no-master", "replica-away"} <= codes(found)
    assert worst(findings(found)) is Severity.CRITICAL


@pytest.mark.qmq_cluster(delay=False)
async def test_a_cluster_without_a_metaserver_is_one_critical_finding(
    qmq_cluster: TestCluster,
) -> None:
    mq = qmq_cluster.client()
    await qmq_cluster.kill("meta")
    found = await read_snapshot(mq.metadata, qmq_cluster.clock)
    assert not found.is_reachable
    assert [(each.code, each.severity) for each in findings(found)] == [
        ("metaserver-away", Severity.CRITICAL)
    ]


@pytest.mark.qmq_cluster(delay=False)
async def test_only_the_requested_parts_are_read(qmq_cluster: TestCluster) -> None:
    await qmq_cluster.client().send("flights", b"1")
    found = await read_snapshot(qmq_cluster.client().metadata, qmq_cluster.clock, parts={CLUSTER})
    assert found.broker_groups
    assert not found.subjects
    assert found.is_complete
