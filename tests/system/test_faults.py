"""Real processes, real faults: nothing acknowledged is lost, nothing is stored twice, positions
agree, replicas end equal.

One group of three replicas with three etcd members and two metaservers, the services of
docker-compose.yml, each in a separate network namespace where that is possible. Every test has its
own subject and history, heals what it broke, and compares the replicas' files at the end.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from support import needs
from system.group import ETCD, REPLICAS, Group
from system.workload import under_load

ETCD_AWAY_S = int(os.environ.get("QMQ_ETCD_AWAY_S", "8"))

pytestmark = pytest.mark.xdist_group("faults")


@pytest.mark.smoke
async def test_acked_messages_survive_kills_of_the_master(group: Group, tmp_path: Path) -> None:
    async with under_load(group, "master", tmp_path) as work:
        for _ in range(3):
            master = await group.master()
            work.note(f"kill {master}")
            await asyncio.to_thread(group.cluster.kill, master)
            await group.master(other_than=master)
            await work.wait_for_acks(200)
            await asyncio.to_thread(group.cluster.start, master)
            await group.settled_peer(master)


async def test_writes_continue_while_a_slave_is_killed_and_comes_back(
    group: Group, tmp_path: Path
) -> None:
    async with under_load(group, "slave", tmp_path) as work:
        slave = await group.slave()
        await asyncio.to_thread(group.cluster.kill, slave)
        await work.wait_for_acks(500)
        await asyncio.to_thread(group.cluster.start, slave)
        await group.settled_peer(slave)


async def test_acked_messages_survive_a_kill_of_all(group: Group, tmp_path: Path) -> None:
    async with under_load(group, "all", tmp_path) as work:
        work.note("kill all")
        await asyncio.to_thread(group.cluster.kill, *REPLICAS)
        await asyncio.to_thread(group.cluster.start, *REPLICAS)
        await group.master()


async def test_a_master_stopped_past_its_lease_cannot_write_when_it_wakes(
    group: Group, tmp_path: Path
) -> None:
    async with under_load(group, "stopped", tmp_path) as work:
        master = await group.master()
        epoch = (await group.status(master)).epoch
        await asyncio.to_thread(group.cluster.pause, master)
        other = await group.master(other_than=master)
        await work.wait_for_acks(500)
        await asyncio.to_thread(group.cluster.resume, master)
        await group.settled_peer(master)
        found = await group.describe_all()
        assert found[other].epoch > epoch
        assert not found[master].is_serving


@needs.namespaces
@pytest.mark.parametrize("how", ["both ways", "inward", "outward"])
async def test_a_master_cut_off_from_its_slaves_commits_nothing_and_is_replaced(
    group: Group, tmp_path: Path, how: str
) -> None:
    async with under_load(group, f"cut-{how.split()[0]}", tmp_path) as work:
        master = await group.master()
        for other in [name for name in REPLICAS if name != master]:
            ends = (master, other) if how == "outward" else (other, master)
            await asyncio.to_thread(group.cluster.partition, *ends, one_way=how != "both ways")
        work.note(f"cut {master} {how}")
        await group.master(other_than=master)
        await work.wait_for_acks(300)
        await asyncio.to_thread(group.cluster.heal)
        await group.settled_peer(master)


async def test_a_killed_leader_of_etcd_does_not_stop_the_data_path(
    group: Group, tmp_path: Path
) -> None:
    async with under_load(group, "etcd-one", tmp_path) as work:
        for name in ETCD:
            await asyncio.to_thread(group.cluster.kill, name)
            await work.wait_for_acks(300)
            await asyncio.to_thread(group.cluster.start, name)


async def test_the_data_path_continues_while_etcd_has_no_quorum(
    group: Group, tmp_path: Path
) -> None:
    async with under_load(group, "etcd-none", tmp_path) as work:
        master = await group.master()
        await asyncio.to_thread(group.cluster.pause, *ETCD)
        try:
            for _ in range(ETCD_AWAY_S):  # longer than the master's lease
                await work.wait_for_acks(100)
                await asyncio.sleep(1)
        finally:
            await asyncio.to_thread(group.cluster.resume, *ETCD)
        assert await group.master() == master
