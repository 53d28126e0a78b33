"""A new replica of a delay group whose log starts in the middle, since the other replicas' logs
have lost their beginning: it fetches the schedule.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from qmq_replication.ready import Role
from support import eventually
from support.clusters import SHORT, DelayCluster, delay_config, running_delay

import qmq
from qmq.delay.files import ReplicaScheduleFiles
from qmq.errors import QmqError
from qmq.log.recovery import whole_from
from qmq.node import delay
from qmq.node.delay import ScheduleTransfer, delay_node
from qmq.node.process import NodeTiming
from qmq.node.replica.broker import ReplicaBroker
from qmq.node.replica.node import ReplicaNode

pytestmark = pytest.mark.sampled

LATER = timedelta(hours=30)
BODY = b"x" * 1_000
SENT = 600


@asynccontextmanager
async def without_a_beginning(
    tmp_path: Path,
) -> AsyncIterator[tuple[DelayCluster, qmq.Client, str]]:
    """A delay group whose logs have lost their beginning. Returns the name of the replica that lost
    all its data.
    """
    async with (
        running_delay(tmp_path, SHORT, NodeTiming(schedule_retry_s=0.05)) as (cluster, address),
        qmq.connect(address) as mq,
    ):
        victim = await cluster.slave()
        for number in range(6):
            await mq.send_many(
                "s", [b"%d:%d:" % (number, each) + BODY for each in range(SENT // 6)], delays=LATER
            )
        await cluster.stop(victim)
        await eventually(
            lambda: all((whole_from(node.broker.store) or 0) > 1 for node in cluster.nodes.values())
        )
        shutil.rmtree(tmp_path / victim)
        yield cluster, mq, victim


def has_schedule(node: ReplicaNode) -> bool:
    """Whether the node's schedule is complete."""
    return node.broker.store.projection.is_whole


def is_complete(cluster: DelayCluster, name: str) -> bool:
    """Whether a replica's counts equal those of the master's schedule. Another slave may be behind,
    too.
    """
    others = [cluster.pending(each) for each in cluster.nodes if each != name]
    return has_schedule(cluster.nodes[name]) and cluster.pending(name) == max(
        others, key=lambda each: sum(each.values())
    )


async def make_master(cluster: DelayCluster, mq: qmq.Client, name: str) -> None:
    """Hand the mastership over, however often it takes."""
    async with asyncio.timeout(20):
        while not cluster.nodes[name].broker.is_serving:
            with suppress(QmqError):
                await mq.metadata.transfer("d", name)


async def test_a_replica_with_an_empty_folder_fetches_the_schedule_and_can_lead(
    tmp_path: Path,
) -> None:
    async with without_a_beginning(tmp_path) as (cluster, mq, victim):
        await mq.send_many(
            "s", [b"%d" % number for number in range(30)], delays=timedelta(seconds=4)
        )
        node = await cluster.start(victim)
        await eventually(lambda: is_complete(cluster, victim))
        assert sum(cluster.pending(victim).values()) == SENT + 30
        assert not (tmp_path / victim / "broker" / delay.ASIDE).exists()
        assert (whole_from(node.broker.store) or 0) > 1
        await make_master(cluster, mq, victim)
        await eventually(lambda: cluster.delivered("s") == 30)
        receipt = await mq.send("s", b"one more", delay=LATER)
        assert receipt.delayed_id is not None
        assert (await mq.delayed.cancel(receipt.delayed_id)).state == "cancelled"
        cluster.schedule(victim).check()


async def test_what_was_fetched_is_there_after_a_restart_without_fetching_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with without_a_beginning(tmp_path) as (cluster, _, victim):
        await cluster.start(victim)
        await eventually(lambda: is_complete(cluster, victim))
        await cluster.stop(victim)
        monkeypatch.setattr(ReplicaScheduleFiles, "read", _refuse)
        await cluster.start(victim)
        assert has_schedule(cluster.nodes[victim])
        await eventually(lambda: is_complete(cluster, victim))


def _refuse(*_: Any) -> bytes:
    raise FileNotFoundError


async def test_a_replica_that_is_killed_in_the_middle_of_the_transfer_begins_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, begun = ReplicaScheduleFiles.read, []

    def half(self: ReplicaScheduleFiles, file: str, offset: int, bytes_max: int) -> bytes:
        begun.append(offset)
        if offset:
            raise OSError("interrupted (in this test)")
        return read(self, file, offset, min(bytes_max, 1_000))

    async with without_a_beginning(tmp_path) as (cluster, _, victim):
        monkeypatch.setattr(ReplicaScheduleFiles, "read", half)
        await cluster.start(victim)
        await eventually(lambda: any(begun))
        assert not has_schedule(cluster.nodes[victim])
        await cluster.crash(victim)
        assert list((tmp_path / victim / "broker").glob("checkpoint/*")) == []
        await cluster.start(victim)
        await eventually(lambda: not has_schedule(cluster.nodes[victim]))
        await cluster.stop(victim)
        assert list((tmp_path / victim / "broker").glob("checkpoint/*")) == []
        await cluster.start(victim)
        await eventually(lambda: not has_schedule(cluster.nodes[victim]))
        monkeypatch.setattr(ReplicaScheduleFiles, "read", read)
        await eventually(lambda: is_complete(cluster, victim))
        assert sum(cluster.pending(victim).values()) == SENT


@pytest.mark.parametrize("is_before", [True, False])
async def test_a_replica_that_is_killed_when_it_takes_the_schedule_over_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    """The files are in place, but the store was not opened with them yet, or only just: no
    checkpoint of the replica has them.
    """
    async with without_a_beginning(tmp_path) as (cluster, _, victim):
        adopt = ReplicaBroker.reopen_now
        images: list[Path] = []

        def copied(replica: ReplicaBroker) -> None:
            if not is_before:
                adopt(replica)
            images.append(Path(shutil.copytree(tmp_path / victim, tmp_path / "image")))
            if is_before:
                adopt(replica)

        monkeypatch.setattr(ReplicaBroker, "reopen_now", copied)
        await cluster.start(victim)
        await eventually(lambda: bool(images))
        await cluster.stop(victim)
        shutil.rmtree(tmp_path / victim)
        images[0].rename(tmp_path / victim)
        monkeypatch.setattr(ReplicaScheduleFiles, "read", _refuse)
        await cluster.start(victim)
        await eventually(lambda: is_complete(cluster, victim))
        assert sum(cluster.pending(victim).values()) == SENT
        cluster.schedule(victim).check()


async def test_a_replica_without_its_schedule_gives_the_mastership_to_one_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with without_a_beginning(tmp_path) as (cluster, mq, victim):
        node = delay_node(delay_config(tmp_path, victim, SHORT), cluster.store)
        monkeypatch.setattr(ScheduleTransfer, "fetch_from_any", _never)
        cluster.nodes[victim] = node
        await node.start()
        before = (await cluster.master()).driver
        await eventually(lambda: node.driver.core.state.may_count and node.driver.core.in_step)
        epoch = before.core.state.promised
        with suppress(QmqError):
            await mq.metadata.transfer("d", victim)
        await eventually(
            lambda: (
                max(each.driver.core.state.promised for each in cluster.nodes.values()) >= epoch + 2
            )
        )
        master = await cluster.master()
        assert master.config.replica != victim
        await mq.send("s", b"soon", delay=timedelta(milliseconds=100))
        await eventually(lambda: cluster.delivered("s") == 1)
        assert not has_schedule(node)


async def _never(_: ScheduleTransfer) -> bool:
    return False


async def test_it_leads_without_serving_until_it_has_the_schedule_and_serves_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with without_a_beginning(tmp_path) as (cluster, mq, victim):
        node = delay_node(delay_config(tmp_path, victim, SHORT), cluster.store)
        fetch = ScheduleTransfer.fetch_from_any
        monkeypatch.setattr(ScheduleTransfer, "fetch_from_any", _never)
        monkeypatch.setattr(ScheduleTransfer, "role_changed", lambda _: None)
        cluster.nodes[victim] = node
        await node.start()
        await eventually(lambda: node.driver.core.state.may_count and node.driver.core.in_step)
        with suppress(QmqError):
            await mq.metadata.transfer("d", victim)
        await eventually(
            lambda: (
                node.driver.core.state.role is Role.MASTER
                and node.driver.core.leader is not None
                and node.driver.core.leader.is_serving
            )
        )
        assert not node.broker.is_serving
        monkeypatch.setattr(ScheduleTransfer, "fetch_from_any", fetch)
        await eventually(lambda: node.broker.is_serving)
        assert sum(cluster.pending(victim).values()) == SENT
        await mq.send("s", b"soon", delay=timedelta(milliseconds=100))
        await eventually(lambda: cluster.delivered("s") == 1)


async def test_a_replica_whose_log_the_master_has_needs_no_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplicaScheduleFiles, "read", _refuse)
    async with running_delay(tmp_path) as (cluster, address), qmq.connect(address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(300)], delays=LATER)
        victim = await cluster.slave()
        await cluster.stop(victim)
        shutil.rmtree(tmp_path / victim)
        await cluster.start(victim)
        await eventually(lambda: is_complete(cluster, victim))
        assert sum(cluster.pending(victim).values()) == 300
