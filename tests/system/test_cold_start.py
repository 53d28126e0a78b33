"""A cluster that starts again after everything stopped: what comes late is not taken for lost
(docs/ORDERING.md, "Fencing a group").
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from qmq_coordination.etcd.store import EtcdStore
from qmq_coordination.ordered_records import FENCES
from support import eventually
from system.group import OrderedCluster, Shape, running_cluster

from qmq.client.metadata.service import MetadataClient
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

pytestmark = pytest.mark.xdist_group("faults")
SHAPE = Shape(etcds=1, metas=1, groups=2, replicas=1)


@asynccontextmanager
async def metadata(it: OrderedCluster) -> AsyncIterator[MetadataClient]:
    found = MetadataClient([it.server], network=it.network)
    try:
        yield found
    finally:
        await found.close()


async def route_of(it: OrderedCluster) -> pb.DescribeRouteResponse:
    async with metadata(it) as there:
        return await there.describe_route("orders")


def places(route: pb.DescribeRouteResponse) -> list[str]:
    return [part.broker_group for part in route.route.partitions]


async def said(it: OrderedCluster, name: str, text: str, within_s: float = 120.0) -> None:
    """Wait until a server's log has a text."""
    await eventually(
        lambda: text in it.cluster.log(name).read_text(errors="replace"),
        within_s=within_s,
        look_s=0.1,
    )


async def test_a_broker_group_that_starts_late_keeps_its_partitions(tmp_path: Path) -> None:
    with running_cluster(tmp_path, SHAPE, "loopback") as it:
        async with metadata(it) as there:
            await there.create_subject(
                SubjectConfig(
                    "orders", order=Order.STRICT, logical_partitions=64, groups=("g1", "g2")
                ),
                partitions=4,
            )
        assert sorted(places(await route_of(it))) == ["g1", "g1", "g2", "g2"]
        everything = [*SHAPE.etcd_names, *SHAPE.meta_names, "g1-a", "g2-a"]
        await it.do(it.cluster.kill, *everything)
        await it.do(it.cluster.start, *SHAPE.etcd_names)
        for name in (*SHAPE.meta_names, "g1-a"):
            await it.start(name)
        await it.master("g1")
        await said(it, "meta0", "broker group g2 has had no master since this metaserver began")
        await it.start("g2-a")
        await it.master("g2")
        assert sorted(places(await route_of(it))) == ["g1", "g1", "g2", "g2"]
        await _moves_when_it_goes(it)


async def _moves_when_it_goes(it: OrderedCluster) -> None:
    """And back come only the fences."""
    async with asyncio.timeout(120):
        await it.do(it.cluster.kill, "g2-a")
        while places(await route_of(it)) != ["g1"] * 4:
            await asyncio.sleep(0.2)
        assert (await route_of(it)).route.fenced
        assert await fences_of(it) == 2
        await it.start("g2-a")
        while await fences_of(it):
            await asyncio.sleep(0.2)
        assert not (await route_of(it)).route.fenced


async def fences_of(it: OrderedCluster) -> int:
    """The keys that the alert QmqFencedPartitions counts."""
    store = EtcdStore([it.cluster.translate("etcd0:2379")])
    try:
        return len((await store.list(FENCES)).items)
    finally:
        await store.close()
