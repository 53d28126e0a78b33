"""Broadcast groups against a real node, over TCP."""

from __future__ import annotations

from datetime import timedelta

import pytest
from support import node_config, running

import qmq
from qmq.broker.config import BrokerConfig
from qmq.model import dead_letter_subject
from qmq.node.dev_node import Node

NOW = timedelta(0)


async def take(consumer: qmq.Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        got = await consumer.pull(count - len(found), wait=timedelta(seconds=10))
        assert got, f"{len(found)} of {count} came"
        found += got.bodies
        await got.ack_sync()
    return found


async def attached(mq: qmq.Client, name: str) -> qmq.Consumer:
    """A consumer that has begun: "latest" means from here on."""
    consumer = mq.consumer("prices", "caches", name=name, broadcast=True, ack="explicit")
    assert not await consumer.pull(1, wait=timedelta(milliseconds=50))
    async with mq.consumer("prices", f"probe-{name}") as probe:
        await probe.pull(1, wait=timedelta(milliseconds=50))
    for each in await mq.metadata.describe_groups("prices"):
        if each.group == f"caches%{name}":
            return consumer
    raise AssertionError("it has not begun")


async def test_every_consumer_of_a_broadcast_group_gets_every_message_sent_since_it_came(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("prices", b"before")
        first, second = await attached(mq, "a"), await attached(mq, "b")
        await mq.send_many("prices", [b"1", b"2", b"3"])
        assert await take(first, 3) == [b"1", b"2", b"3"] == await take(second, 3)


async def test_a_consumer_that_comes_back_under_its_name_continues_where_it_was(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("prices", b"before")
        async with await attached(mq, "a") as first:
            await mq.send("prices", b"1")
            assert await take(first, 1) == [b"1"]
        await mq.send("prices", b"2")
        async with mq.consumer(
            "prices", "caches", name="a", broadcast=True, ack="explicit"
        ) as again:
            assert await take(again, 1) == [b"2"]


async def test_a_broadcast_failure_returns_to_its_consumer_and_then_to_the_groups_queue(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("prices", b"before")
        first, second = await attached(mq, "a"), await attached(mq, "b")
        await mq.send("prices", b"bad")
        for attempt in range(1, 6):
            message = await anext(first)
            assert (message.body, message.attempt) == (b"bad", attempt)
            message.nack(NOW, error="no")
        assert await take(second, 1) == [b"bad"]
        assert not await second.pull(1, wait=timedelta(milliseconds=50))
        async with mq.consumer(dead_letter_subject("caches"), "looks") as letters:
            assert (await anext(letters)).headers["qmq-group"] == b"caches%a"
        (letter,) = await mq.dead_letters("caches").show()
        assert (letter.group, letter.body, letter.attempts, letter.error) == (
            "caches%a",
            b"bad",
            5,
            "no",
        )
        assert await mq.dead_letters("caches").replay() == 1
        again = await anext(first)
        assert (again.body, again.attempt) == (b"bad", 1)
        assert not await second.pull(1, wait=timedelta(milliseconds=50))


async def test_only_the_absent_consumer_of_a_broadcast_group_is_forgotten(tmp_path: object) -> None:
    config = node_config(tmp_path / "node", broker=BrokerConfig(broadcast_idle_ms=100))  # type: ignore[operator]
    async with running(config) as node, qmq.connect(node.address) as mq:
        await mq.send("prices", b"before")
        stays, goes = await attached(mq, "stays"), await attached(mq, "goes")
        async with mq.consumer("prices", "shared") as shared:
            await anext(shared)
        await goes.close()
        while {each.group for each in await mq.metadata.describe_groups("prices")} & {
            "caches%goes"
        }:
            pass
        left = {each.group for each in await mq.metadata.describe_groups("prices")}
        assert {"caches%stays", "shared"} <= left
        await mq.send("prices", b"1")
        assert await take(stays, 1) == [b"1"]
        async with mq.consumer(
            "prices", "caches", name="goes", broadcast=True, start="earliest", ack="explicit"
        ) as caches:
            assert await take(caches, 2) == [b"before", b"1"]


async def test_no_stranger_can_consume_as_a_consumer_of_a_broadcast_group(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        with pytest.raises(qmq.errors.InvalidName):
            mq.consumer("prices", "caches%a", name="b")
