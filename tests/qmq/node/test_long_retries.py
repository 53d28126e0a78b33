"""Retries by way of the delay group, through a real node: they return to the group that failed, and
to no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from support import eventually, node_config, running

import qmq
from qmq import limits, model
from qmq.node.dev_node import Node

pytestmark = pytest.mark.sampled

LONG = timedelta(seconds=1)
"""More than brokers keep themselves, in these tests."""


@pytest.fixture(autouse=True)
def _brokers_keep_retries_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEUE_MS_MAX", 100)


@pytest.fixture
async def delayed_node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(node_config(tmp_path, delay=True)) as node:
        yield node


async def pulled(consumer: qmq.Consumer, count: int) -> list[qmq.Message]:
    found: list[qmq.Message] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await consumer.pull(count - len(found), timedelta(seconds=1))
    return found


async def test_a_message_that_fails_for_long_comes_back_once_to_its_group_and_to_no_other(
    delayed_node: Node,
) -> None:
    async with qmq.connect(delayed_node.address) as mq:
        a, b = mq.consumer("s", "a", ack="explicit"), mq.consumer("s", "b", ack="explicit")
        await mq.send("s", b"x", key="k", tags=["t"], headers={"h": "v"})
        (first,), (other,) = await pulled(a, 1), await pulled(b, 1)
        await other.ack_sync()
        first.nack(LONG)
        (again,) = await pulled(a, 1)
        assert again.append_time_ms >= first.append_time_ms + 1000
        assert (again.attempt, again.id, again.body, again.key, again.tags) == (
            2,
            first.id,
            b"x",
            "k",
            ("t",),
        )
        assert dict(again.headers) == {"h": b"v", model.GROUP: b"a", model.ATTEMPT: b"1"}
        assert again.create_time_ms == first.create_time_ms
        await again.ack_sync()
        await mq.send("s", b"y")
        assert [message.body for message in await pulled(a, 1)] == [b"y"], "once"
        assert [message.body for message in await pulled(b, 1)] == [b"y"], "to group a alone"


async def test_attempts_continue_over_long_and_short_retries(delayed_node: Node) -> None:
    async with qmq.connect(delayed_node.address) as mq:
        consumer = mq.consumer("s", "a", ack="explicit")
        await mq.send("s", b"x")
        attempts: list[int] = []
        for delay in (LONG, timedelta(0), LONG, timedelta(0), None):
            (message,) = await pulled(consumer, 1)
            attempts.append(message.attempt)
            if delay is not None:
                message.nack(delay)
        assert attempts == [1, 2, 3, 4, 5]


async def test_many_that_fail_for_long_all_come_back_once(delayed_node: Node) -> None:
    async with qmq.connect(delayed_node.address) as mq:
        bodies = [b"%d" % number for number in range(3_000)]
        async with mq.consumer("s", "a", ack="explicit", prefetch=5_000) as consumer:
            await mq.send_many("s", bodies)
            found = await pulled(consumer, 2_000)
            for message in found:
                message.nack(LONG)
            together = await consumer.pull(1_000)
            found += together
            together.nack(LONG)
            again = await pulled(consumer, 3_000)
            assert sorted(message.body for message in again) == sorted(bodies)
            assert {message.attempt for message in again} == {2}
            assert {message.id for message in again} == {message.id for message in found}
            for message in again:
                message.ack_later()
        other = mq.consumer("s", "b", prefetch=5_000)
        assert sorted(message.body for message in await pulled(other, 3_000)) == sorted(bodies)
        queue = delayed_node.store.queue("s", 0)
        assert queue is not None
        await eventually(lambda: queue.shares["b"].next_sequence == queue.next_sequence == 6_000)
        assert queue.shares["a"].settled_before() == 6_000


async def test_a_consumer_that_closes_leaves_its_long_retries_behind(delayed_node: Node) -> None:
    async with qmq.connect(delayed_node.address) as mq:
        async with mq.consumer("s", "a", ack="explicit") as consumer:
            await mq.send("s", b"x")
            (message,) = await pulled(consumer, 1)
            message.nack(LONG)
        (again,) = await pulled(mq.consumer("s", "a"), 1)
        assert (again.attempt, again.id) == (2, message.id)


async def test_a_directed_message_is_found_by_its_id_like_any_other(delayed_node: Node) -> None:
    async with qmq.connect(delayed_node.address) as mq:
        async with mq.consumer("s", "a", ack="explicit") as consumer:
            receipt = await mq.send("s", b"x")
            (message,) = await pulled(consumer, 1)
            message.nack(LONG)
            await pulled(consumer, 1)
        assert (await mq.metadata.find_message("s", str(receipt.id))).body == b"x"
