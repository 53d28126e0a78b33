"""Faults on request: machines that are killed, and machines that are cut off."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from support import eventually

import qmq
from qmq.errors import InvalidArgument, NotConnected, QmqError
from qmq.log.checkpoint import begin_checkpoint
from qmq.testing import TestCluster
from qmq.testing.machine import ReplicaMachine
from qmq.testing.parties import Parties

SOON = timedelta(seconds=20)


async def received(consumer: qmq.Consumer, count: int) -> list[bytes]:
    """The bodies of so many messages, acknowledged."""
    found: list[bytes] = []
    while len(found) < count:
        got = await consumer.pull(1_000, SOON)
        assert got, f"only {len(found)} of {count} messages came"
        found += [message.body for message in got]
        await got.ack_sync()
    return found


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_a_kill_of_the_master_loses_nothing_that_was_acknowledged(
    qmq_cluster: TestCluster,
) -> None:
    mq, before = qmq_cluster.client(), qmq_cluster.master()
    sent: list[bytes] = []

    async def send(first: int) -> None:
        for number in range(first, 400, 4):
            await mq.send("orders", b"%d" % number)
            sent.append(b"%d" % number)

    sending = asyncio.gather(*[send(first) for first in range(4)])
    await eventually(lambda: len(sent) >= 50)
    await qmq_cluster.kill(before)
    assert await qmq_cluster.until_master(other_than=before) != before
    await sending
    found = await received(mq.consumer("orders", group="g", ack="explicit"), 400)
    assert set(found) == set(sent)
    await qmq_cluster.restart(before)
    assert await qmq_cluster.until_master() != before


@pytest.mark.qmq_cluster(brokers=3, delay=False)
async def test_a_master_that_is_cut_off_commits_nothing_and_is_replaced(
    qmq_cluster: TestCluster,
) -> None:
    mq, old = qmq_cluster.client(), qmq_cluster.master()
    beside = qmq_cluster.client(at=old)
    for client in (mq, beside):
        await client.send("orders", b"before")
    async with qmq_cluster.partition(old):
        lost = beside.producer("orders", delivery_timeout_s=1.5)
        ticket = lost.send(b"nobody else saw it")
        new = await qmq_cluster.until_master(other_than=old)
        await mq.send("orders", b"meanwhile")
        with pytest.raises(QmqError):
            await ticket
    await mq.send("orders", b"after")
    assert await received(mq.consumer("orders", group="g", ack="explicit"), 4) == [
        b"before",
        b"before",
        b"meanwhile",
        b"after",
    ]
    await qmq_cluster.kill(new)  # the old one is needed for a majority now
    assert await received(mq.consumer("orders", group="late", ack="explicit"), 4)


@pytest.mark.qmq_cluster(brokers=3, delay=3)
async def test_reminders_survive_the_kill_of_a_delay_server(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    await mq.send("reminder", b"1", delay=timedelta(days=3))
    await qmq_cluster.kill(qmq_cluster.master("delay"))
    await qmq_cluster.clock.advance(days=2)
    await qmq_cluster.until_master("delay")
    await mq.send("reminder", b"2", delay=timedelta(days=1))
    await qmq_cluster.clock.advance(days=1)
    assert await received(mq.consumer("reminder", group="g", ack="explicit"), 2) == [b"1", b"2"]


async def test_a_killed_machine_writes_nothing_more(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    consumer = mq.consumer("orders", group="g", ack="explicit")
    sending = asyncio.gather(
        *[mq.send("orders", b"%d" % number) for number in range(300)],
        *[
            mq.send("orders", b"%d" % number, delay=timedelta(seconds=number))
            for number in range(300)
        ],
    )
    await (await consumer.pull(10, SOON)).ack_sync()
    await qmq_cluster.clock.advance(seconds=20)
    for name in ("broker-1", "delay-1"):
        machine = qmq_cluster.machine(name)
        assert isinstance(machine, ReplicaMachine)
        assert machine.node is not None
        folder = machine.node.config.data
        machine.shut()  # from here on it is dead, and `kill` clears away what is left
        before = contents(folder)
        with pytest.raises(OSError, match="was killed"):
            begin_checkpoint(machine.node.broker.store).run()
        await machine.kill()
        assert contents(folder) == before
        await qmq_cluster.restart(name)
    await sending


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_cut_that_is_made_twice_is_healed_twice() -> None:
    parties = Parties()
    parties.cut("a", "b")
    parties.cut("b", "a")
    parties.heal("a", "b")
    assert parties.are_cut("a", "b")
    assert not parties.network("a").reaches("b")
    parties.heal("b", "a")
    assert parties.network("a").reaches("b")


async def test_a_broker_that_is_killed_and_restarted_has_each_message_once(
    qmq_cluster: TestCluster,
) -> None:
    mq = qmq_cluster.client()
    await mq.send_many("orders", [b"%d" % number for number in range(100)])
    consumer = mq.consumer("orders", group="g", ack="explicit")
    first = await received(consumer, 1)
    await qmq_cluster.kill("broker-1")
    waiting = asyncio.create_task(mq.send("orders", b"100"))
    with pytest.raises(NotConnected, match="no master"):
        qmq_cluster.master()
    await qmq_cluster.restart("broker-1")
    await waiting
    assert sorted(first + await received(consumer, 101 - len(first))) == sorted(
        b"%d" % number for number in range(101)
    )


async def test_one_broker_that_is_cut_off_is_found_again(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    await mq.send("orders", b"1")
    async with qmq_cluster.partition("broker-1", "clients"):
        waiting = asyncio.create_task(mq.send("orders", b"2"))
        assert not (await asyncio.wait([waiting], timeout=0.3))[0]
    await waiting
    assert await received(mq.consumer("orders", group="g", ack="explicit"), 2) == [b"1", b"2"]


async def test_without_a_metaserver_what_is_known_continues(qmq_cluster: TestCluster) -> None:
    mq = qmq_cluster.client()
    await mq.send("orders", b"1")
    await qmq_cluster.kill("meta")
    await mq.send("orders", b"2")
    await qmq_cluster.restart("meta")
    assert await received(
        qmq_cluster.client().consumer("orders", group="g", ack="explicit"), 2
    ) == [b"1", b"2"]


@pytest.mark.qmq_cluster(groups=2, delay=False)
async def test_a_broker_group_that_is_away_leaves_the_others_to_take_messages(
    qmq_cluster: TestCluster,
) -> None:
    mq = qmq_cluster.client()
    await mq.send("orders", b"1")
    await qmq_cluster.kill("broker-2")
    for number in range(10):
        await mq.send("orders", b"%d" % number)
    assert qmq_cluster.master("group-1") == "broker-1"
    with pytest.raises(InvalidArgument, match="name the group"):
        qmq_cluster.master()


async def test_what_cannot_be_asked_for_is_refused_with_a_reason(qmq_cluster: TestCluster) -> None:
    with pytest.raises(InvalidArgument, match="no machine 'broker-9'"):
        await qmq_cluster.kill("broker-9")
    with pytest.raises(InvalidArgument, match="to be cut off"):
        qmq_cluster.cut("broker-1", "nobody")
    with pytest.raises(InvalidArgument, match="from itself"):
        qmq_cluster.cut("broker-1", "broker-1")
    with pytest.raises(InvalidArgument, match="no group 'delays'"):
        qmq_cluster.master("delays")
    await qmq_cluster.kill("broker-1")
    with pytest.raises(InvalidArgument, match="is not running"):
        await qmq_cluster.kill("broker-1")
    with pytest.raises(InvalidArgument, match="is not started"):
        TestCluster().client()
    with pytest.raises(InvalidArgument, match="brokers must be 1 to"):
        TestCluster(brokers=0)
    with pytest.raises(InvalidArgument, match="entered only once"):
        await qmq_cluster.__aenter__()
