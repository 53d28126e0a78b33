"""Three replicas in one event loop, on one coordination store in memory: what the node puts
together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from qmq_coordination.view import ROOT, ClusterView
from support import cli_process, eventually
from support.clusters import NAMES, ThreeReplicas
from support.stores import FaultyStore

import qmq
from qmq.errors import CoordinationError, FolderInUse, InvalidArgument, LogDamaged, NotMaster
from qmq.node.broker import broker_node
from qmq.node.replica.node import ReplicaNode


class Cluster(ThreeReplicas):
    async def serving(self) -> ReplicaNode:
        return self.nodes[await self.master()]


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Cluster, str]]:
    cluster = Cluster(folder)
    async with cluster.running() as address:
        yield cluster, address


async def test_every_replica_comes_to_hold_what_the_master_acknowledged(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, address), qmq.connect(address) as mq:
        await cluster.master()
        await mq.send_many("s", [b"%d" % number for number in range(5_000)])
        await eventually(
            lambda: all(
                each.broker.store.queue("s", 0)
                and each.broker.store.queue("s", 0).next_sequence == 5_000
                for each in cluster.nodes.values()
            )
        )
        logs = {
            (tmp_path / name / "broker" / "message" / f"{0:020d}.log").read_bytes()
            for name in NAMES
        }
        assert len(logs) == 1


async def test_a_master_that_stops_hands_over_first_and_messages_and_progress_are_there(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (cluster, address), qmq.connect(address) as mq:
        first = await cluster.serving()
        await mq.send_many("s", [b"%d" % number for number in range(100)])
        async with mq.consumer("s", "g") as consumer:
            found = await consumer.pull(60, timedelta(seconds=10))
            await found.ack_sync()
            epoch = first.driver.core.state.promised
            await cluster.stop(first.config.replica)
            second = await cluster.serving()
            assert second.driver.core.state.promised > epoch
            await mq.send("s", b"more")
            left: list[bytes] = []
            while len(left) < 101 - len(found):
                got = await consumer.pull(100, timedelta(seconds=10))
                left += [message.body for message in got]
                await got.ack_sync()
        assert left == [*[b"%d" % number for number in range(len(found), 100)], b"more"]


async def test_a_replica_that_comes_back_catches_up_and_serves_what_it_missed(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (cluster, address), qmq.connect(address) as mq:
        master = await cluster.serving()
        slave = next(name for name in NAMES if name != master.config.replica)
        await mq.send("s", b"0")
        await cluster.stop(slave)
        for number in range(1, 50):
            await mq.send("s", b"%d" % number)
        await cluster.start(slave)
        node = cluster.nodes[slave]
        await eventually(
            lambda: node.driver.core.state.commit >= master.driver.core.state.commit - 1
        )
        done = await mq.metadata.transfer("g", slave)
        assert done.master == slave
        async with mq.consumer("s", "g") as consumer:
            assert [message.body for message in await consumer.pull(50, timedelta(seconds=10))] == [
                b"%d" % each for each in range(50)
            ]


async def test_what_a_slave_or_a_master_cannot_do_is_refused_and_changes_nothing(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (cluster, _):
        master = await cluster.serving()
        slave = next(node for node in cluster.nodes.values() if node is not master)
        with pytest.raises(NotMaster):
            await slave.status.transfer("a")
        await eventually(lambda: slave.broker.master_address == master.address)
        with pytest.raises(NotMaster, match=f"the master is at {master.address}"):
            slave.broker.require_serving()
        assert master.broker.master_address != master.address, (
            "a master names itself to nobody as another place to ask"
        )
        with pytest.raises(InvalidArgument, match="is the master"):
            await master.status.change(remove=master.config.replica)
        with pytest.raises(InvalidArgument, match="no voter of this group"):
            await master.status.transfer("nobody")
        with pytest.raises(InvalidArgument, match="is the master already"):
            await master.status.transfer(master.config.replica)
        assert master.broker.is_serving
        # A campaign that was asked for while an earlier one ran takes no claim of its epoch.
        driver = master.driver
        epoch = driver.core.state.promised
        await driver.requests.campaign()
        assert (await driver.coordinator.look_up())[0] == epoch
        assert (await driver.coordinator.renew_key()).epoch == epoch


async def test_a_folder_of_another_replica_or_in_use_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, _):
        with pytest.raises((FolderInUse, LogDamaged)):
            await broker_node(cluster.config("a"), cluster.store).start()
        await cluster.stop("b")
        (tmp_path / "b").rename(tmp_path / "d")
        stranger = cluster.config("d")
        with pytest.raises(LogDamaged, match="belongs to replica b"):
            await broker_node(stranger, cluster.store).start()


async def test_a_pause_outlives_the_master_and_what_is_held_is_settled_at_the_next_one(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path) as (cluster, address),
        qmq.connect(address) as mq,
        mq.consumer("s", "g", prefetch=2) as consumer,
    ):
        await cluster.master()
        await mq.send_many("s", [b"%d" % number for number in range(4)])
        held = await consumer.pull(2, timedelta(seconds=10))
        await mq.metadata.pause_group("s", "g", reason="while the master changes")
        await mq.metadata.transfer("g")
        await held.ack_sync()
        assert not await consumer.pull(2, timedelta(seconds=0.2))
        (group,) = await mq.metadata.describe_groups("s", "g")
        assert (len(held), group.is_paused, group.waiting, group.unacked) == (2, True, 2, 0)
        assert await mq.metadata.resume_group("s", "g")
        assert [message.body for message in await consumer.pull(2, timedelta(seconds=10))] == [
            b"2",
            b"3",
        ]


async def test_a_replica_whose_first_listing_is_refused_lists_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, address), qmq.connect(address) as mq:
        await cluster.master()
        await mq.send("s", b"first")
        await cluster.stop("a")
        refusing = FaultyStore(cluster.store)
        refusing.cut(
            "list",
            key=ROOT,
            times=2,
            failure=CoordinationError("etcd denies the user this (permission denied)"),
        )
        await cluster.start("a", store=refusing)
        await eventually(lambda: cluster.nodes["a"].view.subject("s") is not None)


async def _control_of_master(cluster: Cluster) -> tuple[str, str]:
    view = ClusterView(cluster.store)
    await view.start()
    record = view.group("g").master
    await view.stop()
    assert record is not None
    return record.replica, record.control_address


async def test_a_master_hands_over_before_its_process_is_stopped_and_still_answers(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (cluster, server), qmq.connect(server) as mq:
        await cluster.master()
        await mq.send("orders", b"before")
        former, control = await _control_of_master(cluster)
        done = await asyncio.to_thread(cli_process.hand_over, former, control)
        assert done.returncode == 0, done.stderr
        (said,) = json.loads(done.stdout)
        assert said["master"] not in ("", former)
        await eventually(lambda: cluster.nodes[said["master"]].broker.is_serving)
        assert not cluster.nodes[former].broker.is_serving, (
            "it follows, and sends clients to the new master"
        )
        await mq.send("orders", b"after")
        again = await asyncio.to_thread(cli_process.hand_over, former, control)
        assert json.loads(again.stdout) == [said], "who is no master has nothing to hand over"


async def test_a_hand_over_is_tried_until_another_replica_can_take_over(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, server), qmq.connect(server) as mq:
        await cluster.master()
        await mq.send("orders", b"before")
        former, control = await _control_of_master(cluster)
        others = [name for name in NAMES if name != former]
        for name in others:
            await cluster.stop(name)
        failed = await asyncio.to_thread(cli_process.hand_over, former, control, "0")
        assert (
            failed.returncode,
            b"took over" in failed.stderr or b"take over" in failed.stderr,
        ) == (3, True), failed.stderr
        handing = asyncio.create_task(
            asyncio.to_thread(cli_process.hand_over, former, control, "60")
        )
        for name in others:
            await cluster.start(name)
        done = await handing
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[0]["master"] in others
