"""A broker group whose old messages are in the object store only: everybody who reads them gets them, also while masters change."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from support import eventually

import qmq
from qmq.client.client_timing import TIMING
from qmq.errors import NotConnected
from qmq.limits import KIB
from qmq.log.log_config import LogConfig
from qmq.log.retention import begin_retention, end_retention
from qmq.testing import TestCluster
from qmq.testing.machine import ReplicaMachine

SOON = timedelta(seconds=20)


def log_config(objects: Path) -> LogConfig:
    """Nothing of the message log stays in memory, and only the last segment on the disk."""
    url = f"file://{objects}"
    return LogConfig(segment_bytes=64 * KIB, cache_bytes=0, tail_bytes=0, object_store_url=url, local_retention_bytes=0)


def replica(cluster: TestCluster, name: str = "") -> ReplicaMachine:
    machine = cluster.machine(name or cluster.master())
    assert isinstance(machine, ReplicaMachine)
    return machine


async def until_cold(cluster: TestCluster) -> None:
    """Wait until the store has every sealed segment of the master; then let its local retention delete their files."""
    node = replica(cluster).node
    assert node is not None
    log = node.broker.store.messages
    await eventually(lambda: all(log.has_index(base) for base in log.bases[:-1]))
    end_retention(begin_retention(node.broker.store, node.broker.subject_or_none))
    assert len(log.bases) > 2
    assert (log.start, log.local_start) == (0, log.bases[-1])
    assert len(list(log.folder.glob("*.log"))) == 1


def bodies(count: int) -> list[bytes]:
    random = Random(1)
    return [b"%03d" % number + random.randbytes(8 * KIB) for number in range(count)]


async def test_consumers_readers_and_queries_get_messages_from_the_store(tmp_path: Path) -> None:
    sent = bodies(40)
    async with TestCluster(delay=False, log=log_config(tmp_path)) as cluster:
        mq = cluster.client()
        receipts = [await mq.send("s", body, tags=["odd" if number % 2 else "even"]) for number, body in enumerate(sent)]
        await until_cold(cluster)
        assert [message.body async for message in mq.browse("s")] == sent
        consumer = mq.consumer("s", group="g", ack="explicit")
        got: list[bytes] = []
        while len(got) < len(sent):
            for message in await consumer.pull(7, SOON):
                got.append(message.body)
                await message.ack_sync()
        assert got == sent
        odd = mq.consumer("s", group="odd", tags_any=["odd"])
        assert [message.body for message in await odd.pull(5, SOON)] == sent[1:10:2]
        found = await mq.metadata.find_message("s", str(receipts[3].id))
        assert found.body == sent[3]
        assert (await mq.metadata.find_every(str(receipts[4].id))).message.body == sent[4]
        trail = await mq.metadata.trace_message(found)
        assert {event.group for event in trail.events} >= {"g"}


async def test_a_consumer_of_lanes_gets_old_keys_in_order(tmp_path: Path) -> None:
    sent = bodies(30)
    async with TestCluster(delay=False, log=log_config(tmp_path)) as cluster:
        mq = cluster.client()
        await mq.metadata.create_subject(qmq.SubjectConfig("o", order=qmq.Order.STRICT, logical_partitions=16), partitions=1)
        for number, body in enumerate(sent):
            await mq.send("o", body, key=f"k{number % 3}")
        await until_cold(cluster)
        consumer = aiter(mq.ordered_consumer("o", group="g"))
        got = [(await anext(consumer)).body for _ in sent]
        assert [each for key in range(3) for each in got if int(each[:3]) % 3 == key] == [each for key in range(3) for each in sent[key::3]]


async def test_a_replica_on_a_new_disk_gets_the_log_from_a_master_that_reads_the_store(tmp_path: Path) -> None:
    sent = bodies(40)
    async with TestCluster(brokers=3, delay=False, log=log_config(tmp_path)) as cluster:
        mq = cluster.client()
        for body in sent:
            await mq.send("s", body)
        await until_cold(cluster)
        lost = next(name for name in next(iter(cluster.groups.values())) if name != cluster.master())
        old = replica(cluster, lost).node
        assert old is not None
        data = old.config.data
        await cluster.kill(lost)
        shutil.rmtree(data)
        await cluster.restart(lost)
        for body in (more := bodies(3)):
            await mq.send("s", body)
        master, new = replica(cluster).node, replica(cluster, lost).node
        assert master is not None
        assert new is not None
        await eventually(lambda: new.broker.store.messages.end == master.broker.store.messages.end and new.standing.describe().is_whole)
        assert new.broker.store.messages.start == 0
        before = cluster.master()
        await cluster.kill(before)
        await cluster.until_master(other_than=before)
        assert [message.body async for message in mq.browse("s")] == sent + more


async def test_a_store_that_is_away_fails_only_reads_of_what_it_has_and_they_go_on_later(tmp_path: Path) -> None:
    sent = bodies(40)
    async with TestCluster(delay=False, log=log_config(tmp_path / "objects")) as cluster:
        mq = cluster.client(timing=replace(TIMING, delivery_timeout_s=1.0))
        for body in sent:
            await mq.send("s", body)
        await until_cold(cluster)
        late = mq.consumer("s", group="late", start="latest")
        assert not await late.pull(1, timedelta(milliseconds=100)), "its group begins here"
        (tmp_path / "objects").rename(tmp_path / "away")
        consumer = mq.consumer("s", group="g")
        with pytest.raises(NotConnected, match="object store"):
            [message async for message in mq.browse("s")]
        await mq.send("s", b"new")
        assert [message.body for message in await late.pull(1, SOON)] == [b"new"], "producers and other consumers go on"
        shutil.rmtree(tmp_path / "objects", ignore_errors=True)
        (tmp_path / "away").rename(tmp_path / "objects")
        got: list[bytes] = []
        while len(got) < len(sent):
            got += [message.body for message in await consumer.pull(50, SOON)]
        assert got[: len(sent)] == sent
