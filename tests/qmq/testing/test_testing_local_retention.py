"""A broker group whose old messages are in the object store only: everybody who reads them gets
them, also while masters change.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support import eventually
from support.tiered_log import (
    SOON,
    behind_damage,
    bodies,
    log_config,
    replica,
    until_cold,
    until_damage,
)

import qmq
from qmq.broker.admin import BrokerAdmin
from qmq.broker.reading.cold_reads import through_cold_reads
from qmq.client.connection.connection import TIMING
from qmq.errors import LogDamaged, NotConnected
from qmq.log.recent_writes import MESSAGES
from qmq.log.segments import segment_name
from qmq.metrics.figures import Figure
from qmq.node.metrics.broker import READ, READ_FAILURES
from qmq.node.metrics.broker import STORE_DAMAGED as DAMAGED
from qmq.node.replica.node import ReplicaNode
from qmq.operations.findings import OBJECT_DAMAGED, findings
from qmq.operations.snapshot_reading import read_snapshot
from qmq.operations.text import Thresholds
from qmq.testing import TestCluster


@pytest.fixture(autouse=True)
def nothing_unexpected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A connection that ends by an unexpected error is opened again, which would hide it."""
    yield
    assert [
        each.getMessage() for each in caplog.get_records("call") if each.levelno >= logging.ERROR
    ] == []


async def test_consumers_readers_and_queries_get_messages_from_the_store(tmp_path: Path) -> None:
    sent = bodies(40)
    async with TestCluster(delay=False, log=log_config(tmp_path)) as cluster:
        mq = cluster.client()
        receipts = [
            await mq.send("s", body, tags=["odd" if number % 2 else "even"])
            for number, body in enumerate(sent)
        ]
        await until_cold(cluster)
        assert [message.body async for message in mq.browse("s")] == sent
        consumer = mq.consumer("s", group="g", ack="explicit")
        got: list[bytes] = []
        while len(got) < len(sent):
            for message in await consumer.pull(7, SOON):
                got.append(message.body)
                await message.ack_sync()
        assert got == sent
        failing, rejected = mq.consumer("s", group="failing", ack="explicit"), 0
        while rejected < len(sent):
            for message in await failing.pull(50, SOON):
                message.reject("in this test")
                rejected += 1
        letters, copies = mq.consumer("%dlq%failing", group="letters"), list[bytes]()
        while len(copies) < len(sent):
            copies += [message.body for message in await letters.pull(50, SOON)]
        assert copies == sent
        odd = mq.consumer("s", group="odd", tags_any=["odd"])
        assert [message.body for message in await odd.pull(5, SOON)] == sent[1:10:2]
        found = await mq.metadata.find_message("s", str(receipts[3].id))
        assert found.body == sent[3]
        assert (await mq.metadata.find_every(str(receipts[4].id))).message.body == sent[4]
        trail = await mq.metadata.trace_message(found)
        assert {event.group for event in trail.events} >= {"g"}


def damage(objects: Path, *, is_gone: bool) -> str:
    """Damage an object in the middle of the log: the third segment. Returns its name."""
    chunk = sorted(objects.glob("*/message/*/000000"))[2]
    data = chunk.read_bytes()
    chunk.unlink()
    if not is_gone:
        chunk.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return str(chunk.relative_to(objects))


@pytest.mark.parametrize("tags", [[], ["all"]], ids=["untagged", "tagged"])
@pytest.mark.parametrize("is_gone", [False, True], ids=["changed", "gone"])
async def test_a_damaged_object_costs_a_consumer_only_its_messages_and_is_named(
    tmp_path: Path, is_gone: bool, tags: list[str]
) -> None:
    sent, objects = bodies(40), tmp_path / "objects"
    async with TestCluster(delay=False, log=log_config(objects)) as cluster:
        mq = cluster.client()
        for body in sent:
            await mq.send("s", body, tags=["all"])
        await until_cold(cluster)
        name = damage(objects, is_gone=is_gone)
        got, end = await until_damage(mq, name, tags)
        before = len(got)
        assert got == sent[:before]
        assert 0 < before < end < len(sent)
        with pytest.raises(LogDamaged, match=name):
            [message async for message in mq.browse("s")]
        node = running(cluster, cluster.master())
        assert reading(node, DAMAGED) == 1
        doctor = findings(await read_snapshot(mq.metadata), None, Thresholds())
        assert [name in each.what for each in doctor if each.code == OBJECT_DAMAGED.code] == [True]
        await mq.metadata.reset_group("s", "g", sequence=end)
        consumer = mq.consumer("s", group="g", tags_any=tags)
        rest: list[bytes] = []
        while len(rest) < len(sent) - end:
            rest += [message.body for message in await consumer.pull(50, SOON)]
        assert rest == sent[end:]


@pytest.mark.parametrize("keys", [1, 3])
async def test_a_damaged_object_costs_an_ordered_consumer_only_its_messages_and_is_named(
    tmp_path: Path, keys: int
) -> None:
    sent, objects = bodies(40), tmp_path / "objects"
    async with TestCluster(delay=False, log=log_config(objects)) as cluster:
        mq = cluster.client()
        await mq.metadata.create_subject(
            qmq.SubjectConfig("o", order=qmq.Order.STRICT, logical_partitions=16), partitions=1
        )
        for number, body in enumerate(sent):
            await mq.send("o", body, key=f"k{number % keys}")
        await until_cold(cluster)
        name, got = damage(objects, is_gone=True), list[bytes]()
        with pytest.raises(LogDamaged) as failure:
            async for message in mq.ordered_consumer("o", group="g"):
                got.append(message.body)
        end = behind_damage(failure.value, name)
        assert sorted(got) == sent[: len(got)]
        assert 0 < len(got) < end < len(sent)


async def test_a_consumer_of_lanes_gets_old_keys_in_order(tmp_path: Path) -> None:
    sent = bodies(30)
    async with TestCluster(delay=False, log=log_config(tmp_path)) as cluster:
        mq = cluster.client()
        await mq.metadata.create_subject(
            qmq.SubjectConfig("o", order=qmq.Order.STRICT, logical_partitions=16), partitions=1
        )
        for number, body in enumerate(sent):
            await mq.send("o", body, key=f"k{number % 3}")
        await until_cold(cluster)
        consumer = aiter(mq.ordered_consumer("o", group="g"))
        got = [(await anext(consumer)).body for _ in sent]
        assert [each for key in range(3) for each in got if int(each[:3]) % 3 == key] == [
            each for key in range(3) for each in sent[key::3]
        ]


@pytest.mark.parametrize("tail_bytes", [0, 64 << 20], ids=["from-files", "from-memory"])
async def test_a_replica_on_a_new_disk_takes_the_stored_part_from_the_store(
    tmp_path: Path, tail_bytes: int
) -> None:
    """The master reads nothing from the store for the replica, and has no file of the stored part.
    The replica can become master.
    """
    sent = bodies(40)
    async with TestCluster(
        brokers=3, delay=False, log=replace(log_config(tmp_path), tail_bytes=tail_bytes)
    ) as cluster:
        mq = cluster.client()
        for body in sent:
            await mq.send("s", body)
        await acknowledge(mq, 20)
        await until_cold(cluster)
        before, lost = cluster.master(), slave_of(cluster)
        data = running(cluster, lost).config.data
        await cluster.kill(lost)
        shutil.rmtree(data)
        await cluster.restart(lost)
        master, new = running(cluster, before), running(cluster, lost)
        end = master.broker.store.messages.bases[-1]
        await eventually(
            lambda: (
                new.broker.store.messages.end == master.broker.store.messages.end
                and new.status.describe().is_whole
            )
        )
        assert new.broker.store.messages.bases == master.broker.store.messages.bases
        assert [path.name for path in new.broker.store.messages.folder.glob("*.log")] == [
            segment_name(end)
        ]
        assert reading(master, READ) == 0
        assert new.broker.store.epochs == master.broker.store.epochs
        for body in (more := bodies(3)):
            await mq.send("s", body)
        await mq.metadata.transfer(next(iter(cluster.groups)), lost)
        assert await cluster.until_master(other_than=before) == lost
        assert [message.body async for message in mq.browse("s")] == sent + more
        assert await acknowledge(mq, 23) == sent[20:] + more
        await cluster.kill(lost)
        await cluster.restart(lost)
        await cluster.until_master()
        assert [message.body async for message in mq.browse("s")] == sent + more


async def test_a_replica_that_dies_while_it_begins_with_the_store_begins_again(
    tmp_path: Path,
) -> None:
    sent = bodies(40)
    async with TestCluster(brokers=3, delay=False, log=log_config(tmp_path)) as cluster:
        mq = cluster.client()
        for body in sent:
            await mq.send("s", body)
        await until_cold(cluster)
        before, lost = cluster.master(), slave_of(cluster)
        data = running(cluster, lost).config.data
        await cluster.kill(lost)
        shutil.rmtree(data)
        for _ in range(3):
            await cluster.restart(lost)
            await eventually(
                lambda: (
                    running(cluster, lost).driver.is_opening
                    or running(cluster, lost).status.describe().is_whole
                )
            )
            await cluster.kill(lost)
        await cluster.restart(lost)
        master, new = running(cluster, cluster.master()), running(cluster, lost)
        await eventually(
            lambda: (
                new.broker.store.messages.end == master.broker.store.messages.end
                and new.status.describe().is_whole
            )
        )
        await mq.metadata.transfer(next(iter(cluster.groups)), lost)
        assert await cluster.until_master(other_than=before) == lost
        assert [message.body async for message in mq.browse("s")] == sent


async def acknowledge(mq: qmq.Client, count: int) -> list[bytes]:
    """The next messages of group `g`, acknowledged."""
    consumer = mq.consumer("s", group="g", ack="explicit")
    got: list[bytes] = []
    while len(got) < count:
        for message in await consumer.pull(count - len(got), SOON):
            got.append(message.body)
            await message.ack_sync()
    await consumer.close()
    return got


def slave_of(cluster: TestCluster) -> str:
    return next(name for name in next(iter(cluster.groups.values())) if name != cluster.master())


def running(cluster: TestCluster, name: str) -> ReplicaNode[Any]:
    found = replica(cluster, name).node
    assert found is not None
    return found


async def test_a_replica_on_a_new_disk_gets_the_log_from_a_master_that_reads_the_store(
    tmp_path: Path,
) -> None:
    """While the store is away it waits, and the master continues with the other replica."""
    sent, objects = bodies(40), tmp_path / "objects"
    async with TestCluster(brokers=3, delay=False, log=log_config(objects)) as cluster:
        mq = cluster.client()
        for body in sent:
            await mq.send("s", body)
        await until_cold(cluster)
        objects.rename(tmp_path / "away")
        lost = slave_of(cluster)
        data = running(cluster, lost).config.data
        await cluster.kill(lost)
        shutil.rmtree(data)
        await cluster.restart(lost)
        master, new = running(cluster, cluster.master()), running(cluster, lost)
        epoch, failures = master.status.describe().epoch, failed_reads(master)
        await eventually(lambda: failed_reads(master) > failures + 20)
        for body in (more := bodies(3)):
            await mq.send("s", body)
        assert (master.status.describe().epoch, master.broker.is_serving) == (epoch, True)
        assert new.broker.store.messages.end < master.broker.store.messages.end
        shutil.rmtree(objects, ignore_errors=True)
        (tmp_path / "away").rename(objects)
        await eventually(
            lambda: (
                new.broker.store.messages.end == master.broker.store.messages.end
                and new.status.describe().is_whole
            )
        )
        assert new.broker.store.messages.start == 0
        before = cluster.master()
        await cluster.kill(before)
        await cluster.until_master(other_than=before)
        assert [message.body async for message in mq.browse("s")] == sent + more


def failed_reads(node: ReplicaNode[Any]) -> float:
    return reading(node, READ_FAILURES)


def reading(node: ReplicaNode[Any], figure: Figure) -> float:
    """The replica's metric."""
    readings = [
        reading for source in node.sources() for reading in source.read() if reading is not None
    ]
    return sum(
        float(value)
        for reading in readings
        if reading.figure is figure
        for _, value in reading.rows
    )  # type: ignore[arg-type]


async def test_readers_of_the_log_itself_get_every_entry(tmp_path: Path) -> None:
    """Spark's reader and the lake's ask for entries by their positions."""
    async with TestCluster(delay=False, log=log_config(tmp_path)) as cluster:
        mq = cluster.client()
        for body in bodies(40):
            await mq.send("s", body)
        node = running(cluster, cluster.master())
        log, admin = node.broker.store.messages, BrokerAdmin(node.broker, "g")
        whole = b"".join([(log.folder / segment_name(base)).read_bytes() for base in log.bases])
        await until_cold(cluster)
        position, got = 0, b""
        while position < len(whole):
            position, data = await through_cold_reads(
                admin.read_committed, MESSAGES, position, 1 << 20
            )
            got += data
            position += len(data)
        assert got == whole


async def test_a_store_that_is_away_fails_only_reads_of_its_segments_until_it_is_back(
    tmp_path: Path,
) -> None:
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
        assert [message.body for message in await late.pull(1, SOON)] == [b"new"], (
            "producers and other consumers continue"
        )
        shutil.rmtree(tmp_path / "objects", ignore_errors=True)
        (tmp_path / "away").rename(tmp_path / "objects")
        got: list[bytes] = []
        while len(got) < len(sent):
            got += [message.body for message in await consumer.pull(50, SOON)]
        assert got[: len(sent)] == sent
