"""Half messages are delivered after their commit and never before, despite any failure in the delay
group.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import qmq
from qmq.errors import InvalidArgument, TooLate
from qmq.model import Order, SubjectConfig
from qmq.testing import TestCluster, virtual

HOUR_MS = 3_600_000


@pytest.fixture
async def cluster() -> AsyncIterator[TestCluster]:
    async with TestCluster(clock=virtual()) as found:
        yield found


async def send_half(
    cluster: TestCluster,
    mq: qmq.Client,
    body: bytes,
    subject: str = "orders",
    key: str | None = None,
) -> str:
    producer = mq.delayed_producer(subject, is_half=True)
    ticket = producer.send(body, key, due_ms=cluster.clock.time_ms() + HOUR_MS)
    return str((await ticket).receipt(producer.place_of_last(ticket)).delayed_id)


async def received(mq: qmq.Client, subject: str = "orders") -> list[bytes]:
    async with mq.consumer(subject, "G") as consumer:
        found = await consumer.pull(10, timedelta(seconds=0.5))
        for each in found:
            await each.ack()
        return [each.body for each in found]


async def test_a_half_message_that_is_due_is_cancelled_and_not_delivered(
    cluster: TestCluster,
) -> None:
    mq = cluster.client()
    half = await send_half(cluster, mq, b"half")
    await mq.send("orders", b"whole", delay=timedelta(hours=1))
    await cluster.clock.advance(hours=2)
    while (await mq.delayed.show(half)).state == "half":
        await cluster.clock.advance(seconds=1)
    assert (await mq.delayed.show(half)).state == "cancelled"
    assert await received(mq) == [b"whole"]
    with pytest.raises(TooLate):
        await mq.delayed.move(half, timedelta(0))


async def test_a_committed_half_message_is_delivered_once(cluster: TestCluster) -> None:
    mq = cluster.client()
    committed, rolled_back = (
        await send_half(cluster, mq, b"commit", key="k"),
        await send_half(cluster, mq, b"rollback", key="k"),
    )
    await mq.delayed.move(committed, timedelta(0))
    await mq.delayed.cancel(rolled_back)
    await cluster.clock.advance(hours=2)
    assert await received(mq) == [b"commit"]
    assert (await mq.delayed.show(committed)).state == "delivered"


async def test_on_an_ordered_subject_an_undecided_message_holds_nothing_up(
    cluster: TestCluster,
) -> None:
    mq = cluster.client()
    await mq.metadata.create_subject(
        SubjectConfig("orders", order=Order.STRICT, logical_partitions=16)
    )
    half, committed = (
        await send_half(cluster, mq, b"half", key="k"),
        await send_half(cluster, mq, b"committed", key="k"),
    )
    await mq.delayed.move(committed, timedelta(hours=2))
    await cluster.clock.advance(hours=3)
    async with mq.ordered_consumer("orders", "G") as consumer:
        assert (await anext(aiter(consumer))).body == b"committed"
    assert (await mq.delayed.show(half)).state == "cancelled"


async def test_half_messages_are_listed_apart(cluster: TestCluster) -> None:
    mq = cluster.client()
    await mq.send("orders", b"whole", delay=timedelta(hours=1))
    half, decided = await send_half(cluster, mq, b"half"), await send_half(cluster, mq, b"decided")
    await mq.delayed.move(decided, timedelta(hours=2))
    assert [each.id async for each in mq.delayed.list(is_half=True)] == [half]
    assert [each.state async for each in mq.delayed.list("orders")] == [
        "pending",
        "half",
        "pending",
    ]


async def test_a_half_message_is_still_one_after_its_delay_group_started_over(
    cluster: TestCluster,
) -> None:
    mq = cluster.client()
    half, committed = (
        await send_half(cluster, mq, b"half"),
        await send_half(cluster, mq, b"committed"),
    )
    await mq.delayed.move(committed, timedelta(minutes=1))
    await cluster.kill("delay-1")
    await cluster.restart("delay-1")
    await cluster.clock.advance(hours=2)
    while (await mq.delayed.show(half)).state == "half":
        await cluster.clock.advance(seconds=1)
    assert (await mq.delayed.show(half)).state == "cancelled"
    assert await received(mq) == [b"committed"]


async def test_a_recurring_message_cannot_be_half(cluster: TestCluster) -> None:
    producer = cluster.client().delayed_producer("orders", is_half=True)
    with pytest.raises(InvalidArgument, match="recurring"):
        await producer.send_recurring(b"body", "0 9 * * *", "UTC")
