"""A group of an unordered subject can be deleted, and one that comes under its name later is new."""

from __future__ import annotations

import pytest

from qmq.errors import InvalidArgument, UnknownGroup
from qmq.model import Order, SubjectConfig
from qmq.testing import TestCluster


async def test_a_deleted_group_is_gone_also_behind_a_restart_and_begins_anew() -> None:
    async with TestCluster() as cluster:
        mq = cluster.client()
        await mq.send("s", b"1")
        async with mq.consumer("s", "g") as consumer:
            await (await consumer.pull(1)).ack()
            with pytest.raises(InvalidArgument, match="stop them first"):
                await mq.metadata.delete_group("s", "g")
        assert await mq.metadata.delete_group("s", "g") == 1
        name = cluster.master()
        await cluster.kill(name)
        await cluster.restart(name)
        await cluster.until_master()
        assert not await mq.metadata.describe_groups("s")
        with pytest.raises(UnknownGroup, match="never consumed"):
            await mq.metadata.delete_group("s", "g")
        async with mq.consumer("s", "g") as consumer:
            assert (await consumer.pull(1)).bodies == [b"1"]


async def test_a_group_of_an_ordered_subject_is_not_deleted() -> None:
    async with TestCluster() as cluster:
        mq = cluster.client()
        await mq.metadata.create_subject(SubjectConfig("o", order=Order.STRICT, logical_partitions=16))
        with pytest.raises(InvalidArgument, match="is ordered"):
            await mq.metadata.delete_group("o", "g")
