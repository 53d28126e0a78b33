"""Operators at work while messages flow: handing over, adding, removing and replacing replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from system.group import REPLICAS, Group
from system.workload import under_load

import qmq

pytestmark = pytest.mark.xdist_group("faults")


async def test_mastership_is_handed_over_without_losing_or_doubling_a_message(
    group: Group, tmp_path: Path
) -> None:
    async with under_load(group, "transfer", tmp_path) as work, qmq.connect(group.server) as mq:
        for _ in range(3):
            master = await group.master()
            target = next(name for name in REPLICAS if name != master)
            done = await mq.metadata.transfer("g1", target)
            assert done.master == target
            assert await group.master(other_than=master) == target
            await work.wait_for_acks(200)


async def test_a_replica_is_removed_and_joins_again_while_messages_flow(
    group: Group, tmp_path: Path
) -> None:
    async with under_load(group, "membership", tmp_path) as work, qmq.connect(group.server) as mq:
        slave = await group.slave()
        left = await mq.metadata.remove_replica("g1", slave)
        assert slave not in (*left.voters, *left.learners)
        await work.wait_for_acks(300)
        joined = await mq.metadata.add_replica("g1", slave)
        assert slave in (*joined.voters, *joined.learners)
        async with asyncio.timeout(30):
            while slave not in (await group.status(await group.master())).voters:
                await asyncio.sleep(0.05)


async def test_a_replica_with_a_new_disk_takes_the_place_of_the_old_one(
    group: Group, tmp_path: Path
) -> None:
    async with under_load(group, "new-disk", tmp_path) as work:
        slave = await group.slave()
        data = group.store(slave).parent
        await asyncio.to_thread(group.cluster.kill, slave)
        data.rename(data.with_name(data.name + ".lost"))
        data.mkdir()
        await work.wait_for_acks(300)
        await asyncio.to_thread(group.cluster.start, slave)
        await group.settled_peer(slave)
        async with asyncio.timeout(30):
            while not (await group.status(slave)).is_whole:
                await asyncio.sleep(0.05)


async def test_a_drained_group_takes_no_messages_until_it_is_resumed(group: Group) -> None:
    async with qmq.connect(group.server) as mq:
        await mq.send("ops.drain", b"before")
        await mq.metadata.set_group_mode("g1", "read-only")
        sending = asyncio.create_task(mq.send("ops.drain", b"meanwhile"))
        async with mq.consumer("ops.drain", "g") as consumer:
            assert (await anext(consumer)).body == b"before"
            assert not sending.done()
            await mq.metadata.set_group_mode("g1", "read-write")
            await sending
            assert (await anext(consumer)).body == b"meanwhile"
