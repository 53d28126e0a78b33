"""A client forgets finished waits, closed consumers and producers, and expired leases."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import qmq
from qmq.client.client import Client
from qmq.testing import TestCluster, virtual

NOW = timedelta(0)
SOON = timedelta(seconds=10)


@pytest.fixture
async def cluster() -> AsyncIterator[TestCluster]:
    async with TestCluster(delay=False, clock=virtual()) as found:
        yield found


def futures() -> int:
    gc.collect()
    # by type: isinstance would ask each lazy object of other libraries for its class, which makes
    # it
    kinds = [type(each) for each in gc.get_objects()]
    return sum(
        issubclass(each, asyncio.Future) and not issubclass(each, asyncio.Task) for each in kinds
    )


async def ordered(mq: Client) -> None:
    await mq.metadata.create_subject(
        qmq.SubjectConfig("o", order=qmq.Order.STRICT, logical_partitions=16), partitions=1
    )
    await mq.ordered_producer("o").send(b"1", "k")


@pytest.mark.sampled
async def test_pulls_of_an_idle_subject_leave_nothing_behind(cluster: TestCluster) -> None:
    mq = cluster.client()
    await mq.send("s", b"1")
    await ordered(mq)
    for consumer in (mq.consumer("s", group="g"), mq.ordered_consumer("o", "g")):
        assert (await consumer.pull(1, SOON)).bodies == [b"1"]
        await consumer.pull(1, NOW)
        before = futures()
        for _ in range(200):
            assert not len(await consumer.pull(1, NOW))
        assert futures() < before + 100


async def test_a_client_forgets_consumers_and_producers_that_were_closed(
    cluster: TestCluster,
) -> None:
    mq = cluster.client()
    await ordered(mq)
    kept = mq.producer("s"), mq.consumer("s", group="g")
    for made in (
        mq.producer("s"),
        mq.delayed_producer("s"),
        mq.ordered_producer("o"),
        mq.consumer("s", group="h"),
        mq.ordered_consumer("o", "h"),
    ):
        assert made in (*mq.producers, *mq.consumers)
        await made.close()
        assert made not in (*mq.producers, *mq.consumers)
    mq.producer("s").abort()
    assert kept[0] in mq.producers
    assert mq.consumers == (kept[1],)
    mq.resume()


async def test_what_was_buffered_is_not_handed_out_when_the_lease_has_run_out(
    cluster: TestCluster,
) -> None:
    mq = cluster.client(at="app")
    await cluster.client().send("s", b"0")
    for body in (b"1", b"2"):
        await cluster.client().send("s", body)
    cut_off, other = (
        mq.consumer("s", group="g", lease_ms=5_000),
        cluster.client().consumer("s", group="g", lease_ms=5_000),
    )
    first = await cut_off.pull(1, SOON)
    assert first.bodies == [b"0"]
    async with cluster.partition("app"):
        assert (await cut_off.pull(1, NOW)).bodies == [b"1"], "its lease runs still"
        await cluster.clock.advance(seconds=20)
        seen = [body for _ in range(3) for body in (await other.pull(1, SOON)).bodies]
        assert seen == [b"0", b"1", b"2"]
        assert (await cut_off.pull(1, NOW)).bodies == []
    await cluster.clock.advance(seconds=5)
    assert (await cut_off.pull(10, NOW)).bodies == []
