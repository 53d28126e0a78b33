"""A deleted subject no longer exists, and a subject created again under its name is new. The same
holds for a dead-letter queue.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from support import eventually

from qmq.client.client import Client
from qmq.errors import InvalidArgument, NotConnected, QmqError, UnknownSubject
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb
from qmq.testing import TestCluster


async def subjects(mq: Client) -> list[str]:
    return [each.settings.name for each in await mq.metadata.list_subjects()]


async def test_a_deleted_subject_is_gone_and_a_new_one_of_its_name_is_empty() -> None:
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        await mq.send("s", b"old")
        async with mq.consumer("s", "g") as consumer:
            await (await consumer.pull(1)).ack_sync()
        await mq.send("s", b"old")
        await mq.metadata.set_group_settings("s", "g", attempts_max=3)
        assert await mq.metadata.delete_subject("s") == 1
        assert await subjects(mq) == []
        assert not await mq.metadata.describe_groups()
        with pytest.raises(UnknownSubject):
            await mq.metadata.delete_subject("s")
        assert await mq.metadata.delete_dead_letters("nobody") == 0
        with pytest.raises(QmqError):
            await mq.metadata.delete_dead_letters("no/name")
        await cluster.kill(cluster.master())
        await cluster.restart("broker-1")
        await cluster.until_master()
        await mq.send("s", b"new")
        async with mq.consumer("s", "g") as consumer:
            assert (await consumer.pull(9)).bodies == [b"new"]


async def test_a_consumer_of_a_deleted_subject_hears_so() -> None:
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        await mq.send("s", b"old")
        async with mq.consumer("s", "g") as consumer:
            await (await consumer.pull(1)).ack_sync()
            await mq.metadata.delete_subject("s")
            with pytest.raises(UnknownSubject):
                await consumer.pull(1, wait=timedelta(seconds=10))


@pytest.mark.sampled
async def test_an_ordered_subject_starts_over_after_a_split_and_a_restart_too() -> None:
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        config = SubjectConfig("o", order=Order.STRICT, logical_partitions=16)
        await mq.metadata.create_subject(config, partitions=1)
        await mq.send("o", b"old", key="k")
        async with mq.ordered_consumer("o", "g") as consumer:
            assert (await consumer.pull(9)).bodies == [b"old"]
        await mq.metadata.change_route("o", split=pb.SplitOperation(partition=1))
        await mq.send("o", b"older", key="k")
        assert await mq.metadata.delete_subject("o") >= 2
        assert await subjects(mq) == []
        await cluster.kill("broker-1")
        await cluster.restart("broker-1")
        await cluster.until_master()
        mq = cluster.client()
        await mq.metadata.create_subject(config, partitions=1)
        assert (await mq.metadata.describe_route("o")).route.version == 1
        await mq.send("o", b"new", key="k")
        async with mq.ordered_consumer("o", "g") as consumer:
            assert (await consumer.pull(9)).bodies == [b"new"]


@pytest.mark.sampled
async def test_deletion_waits_for_a_lost_broker_group_and_continues_when_it_is_back() -> None:
    async with TestCluster(groups=2, delay=False) as cluster:
        mq = cluster.client()
        await mq.metadata.create_subject(SubjectConfig("s", groups=("group-1", "group-2")))
        for _ in range(4):
            await mq.send("s", b"old")
        await cluster.kill("broker-2")
        with pytest.raises(NotConnected, match="not completely deleted yet"):
            await mq.metadata.delete_subject("s")
        assert await subjects(mq) == []
        with pytest.raises(UnknownSubject):
            await mq.metadata.create_subject(SubjectConfig("s"))
        await cluster.restart("broker-2")
        await cluster.until_master("group-2")
        await mq.metadata.delete_subject("s")
        await mq.metadata.create_subject(SubjectConfig("s", groups=("group-1", "group-2")))
        (found,) = await mq.metadata.list_subjects("s")
        assert all(queue.start_sequence == queue.next_sequence for queue in found.queues)


async def test_a_new_master_has_the_subject_dropped_too() -> None:
    async with TestCluster(brokers=3, delay=False) as cluster:
        mq = cluster.client()
        await mq.send("s", b"old")
        await mq.metadata.delete_subject("s")
        await cluster.kill(cluster.master())
        await cluster.until_master()
        await mq.send("s", b"new")
        async with mq.consumer("s", "g") as consumer:
            assert (await consumer.pull(9)).bodies == [b"new"]


async def test_a_dead_letter_queue_is_deleted_and_takes_what_dies_later() -> None:
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        await mq.metadata.create_subject(SubjectConfig("s"))
        await mq.metadata.set_group_settings("s", "g", attempts_max=1)
        for body in (b"first", b"second"):
            await mq.send("s", body)
            async with mq.consumer("s", "g") as consumer:
                for message in await consumer.pull(1):
                    message.reject("no")
            await eventually(lambda: mq.metadata.dead_letter_queues("g"))
            assert await mq.metadata.delete_dead_letters("g") == 1
            assert await mq.metadata.dead_letter_queues("g") == []
        with pytest.raises(InvalidArgument, match="qmq dlq delete"):
            await mq.metadata.delete_subject("%dlq%g")
