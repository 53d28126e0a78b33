"""A purged subject is empty on all broker groups, and its groups continue with later messages."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from support import ManualClock, node_config, running

import qmq
from qmq.client.client import Client
from qmq.errors import InvalidArgument, MessagesExpired, NotConnected, UnknownSubject
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.retention import purge
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb
from qmq.testing import TestCluster

SOON = timedelta(seconds=20)


async def test_consumers_of_a_purged_subject_continue_with_what_comes_after() -> None:
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        for _ in range(3):
            await mq.send("s", b"old")
        async with mq.consumer("s", "g", prefetch=1) as consumer, mq.consumer("s", "late") as late:
            held = await consumer.pull(1)
            assert await mq.metadata.purge_subject("s") == 3
            assert [each async for each in mq.browse("s")] == []
            await held.ack()
            await mq.send("s", b"new")
            assert (await late.pull(9, SOON)).bodies == [b"new"]
            found: list[bytes] = []
            while not found or found[-1] != b"new":
                found += (await consumer.pull(9, SOON)).bodies
            assert found.count(b"new") == 1
        assert await mq.metadata.purge_subject("s") == 1
        assert await mq.metadata.purge_subject("s") == 0
        with pytest.raises(UnknownSubject):
            await mq.metadata.purge_subject("never")
        with pytest.raises(InvalidArgument, match="qmq dlq purge g"):
            await mq.metadata.purge_subject("%dlq%g")


async def test_a_purge_is_on_every_replica() -> None:
    async with TestCluster(brokers=3, delay=False) as cluster:
        mq = cluster.client()
        await mq.send("s", b"old")
        assert await mq.metadata.purge_subject("s") == 1
        master = cluster.master()
        await cluster.kill(master)
        await cluster.until_master(other_than=master)
        await mq.send("s", b"new")
        assert [each.body async for each in mq.browse("s")] == [b"new"]
        async with mq.consumer("s", "g") as consumer:
            assert (await consumer.pull(9, SOON)).bodies == [b"new"]


@pytest.mark.sampled
async def test_an_ordered_subject_is_purged_in_all_partitions_of_its_route() -> None:
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        await mq.metadata.create_subject(
            SubjectConfig("o", order=Order.STRICT, logical_partitions=16), partitions=1
        )
        await mq.send("o", b"old", key="k")
        async with mq.ordered_consumer("o", "g") as consumer:
            assert (await consumer.pull(1)).bodies == [b"old"]
        await mq.send("o", b"older", key="k")
        await mq.metadata.change_route("o", split=pb.SplitOperation(partition=1))
        for number in range(4):
            await mq.send("o", b"old", key=f"k{number}")
        assert await mq.metadata.purge_subject("o") >= 5
        assert [each async for each in mq.browse("o")] == []
        await mq.send("o", b"new", key="k")
        async with mq.ordered_consumer("o", "g") as consumer:
            assert (await consumer.pull(9)).bodies == [b"new"]
        await cluster.kill("broker-1")
        await cluster.restart("broker-1")
        await cluster.until_master()
        assert [each.body async for each in cluster.client().browse("o")] == [b"new"]


async def test_a_purge_names_the_broker_groups_that_are_to_be_asked_again() -> None:
    async with TestCluster(groups=2, delay=False) as cluster:
        mq = cluster.client()
        await mq.metadata.create_subject(SubjectConfig("s", groups=("group-1", "group-2")))
        for _ in range(8):
            await mq.send("s", b"old")
        await cluster.kill("broker-2")
        with pytest.raises(NotConnected, match="not completely purged; purge it again"):
            await mq.metadata.purge_subject("s")
        await cluster.restart("broker-2")
        await cluster.until_master("group-2")
        await purged_again(mq, "s")
        assert [each async for each in mq.browse("s")] == []


async def purged_again(mq: Client, subject: str) -> None:
    """Purge until every group has answered: on a loaded machine an answer may come too late for the
    first call.
    """
    while True:
        with suppress(NotConnected):
            await mq.metadata.purge_subject(subject)
            return


async def test_a_purge_that_a_crash_cut_in_two_is_finished_by_the_next_one(tmp_path: Path) -> None:
    config = node_config(tmp_path)
    async with running(config) as node, qmq.connect(node.address) as mq:
        for _ in range(3):
            await mq.send("s", b"old")
        async with mq.consumer("s", "g") as consumer:
            await (await consumer.pull(1)).ack_sync()
    store = open_store(tmp_path / "broker", LogConfig(), ManualClock())
    queue = store.queue("s", 0)
    assert queue is not None
    purge(store, queue)
    store.close()  # no group was moved
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        async with mq.consumer("s", "g") as consumer:
            with pytest.raises(MessagesExpired):
                await consumer.pull(1, SOON)
        assert await mq.metadata.purge_subject("s") == 0
        await mq.send("s", b"new")
        async with mq.consumer("s", "g") as consumer:
            assert (await consumer.pull(1, SOON)).bodies == [b"new"]
