"""Time that the test moves: timers end exactly when the time is moved past them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import uvloop

import qmq
from qmq.errors import InvalidArgument, StaleDelivery
from qmq.testing import TestCluster, virtual

SOON = timedelta(seconds=10)
NOT_YET = timedelta(milliseconds=50)


async def one(consumer: qmq.Consumer) -> qmq.Message:
    """The next message."""
    return await anext(aiter(consumer))


async def test_a_message_due_in_700_days_comes_then_even_if_the_master_is_killed() -> None:
    async with TestCluster(brokers=3, clock=virtual()) as cluster:
        mq = cluster.client()
        receipt = await mq.send("reminder", b"...", delay=timedelta(days=700))
        await cluster.clock.advance(days=700)
        message = await anext(aiter(mq.consumer("reminder", group="g")))
        assert message.body == b"..."
        assert receipt.due_ms <= message.append_time_ms <= cluster.clock.time_ms()
        await cluster.kill(cluster.master())
        async with cluster.partition("broker-1", "broker-2"):
            pass
        await cluster.until_master()
        await mq.send("reminder", b"after")


async def test_nothing_comes_before_it_is_due_however_much_real_time_passes(
    qmq_cluster: TestCluster,
) -> None:
    mq, clock = qmq_cluster.client(), qmq_cluster.clock
    consumer = mq.consumer("reminder", group="g", ack="explicit")
    await mq.send("reminder", b"later", delay=timedelta(milliseconds=1_234))
    await clock.advance(milliseconds=1_233)
    assert len(await consumer.pull(1, timedelta(milliseconds=200))) == 0
    await clock.advance(milliseconds=1)
    assert [message.body for message in await consumer.pull(1, SOON)] == [b"later"]


async def test_a_cancelled_message_never_comes_and_a_moved_one_comes_at_its_new_time(
    qmq_cluster: TestCluster,
) -> None:
    mq, clock = qmq_cluster.client(), qmq_cluster.clock
    cancelled = await mq.send("reminder", b"cancelled", delay=timedelta(days=30))
    moved = await mq.send("reminder", b"moved", delay=timedelta(days=30))
    await mq.delayed.cancel(cancelled.delayed_id)
    await mq.delayed.move(moved.delayed_id, clock.now() + timedelta(days=60))
    consumer = mq.consumer("reminder", group="g", ack="explicit")
    await clock.advance(days=59)
    assert len(await consumer.pull(1, NOT_YET)) == 0
    await clock.advance(days=1)
    assert [message.body for message in await consumer.pull(5, SOON)] == [b"moved"]


async def test_a_recurring_message_has_each_of_its_runs_over_weeks() -> None:
    async with TestCluster(clock=virtual(datetime(2030, 1, 1, tzinfo=UTC))) as cluster:
        mq = cluster.client()
        await mq.send("report", b"weekly", cron="0 9 * * MON", zone="Europe/Berlin")
        await cluster.clock.advance(timedelta(weeks=4), hours=-1)
        consumer = mq.consumer("report", group="g")
        runs = [
            datetime.fromtimestamp((await one(consumer)).append_time_ms / 1000, UTC)
            for _ in range(4)
        ]
        assert len(await consumer.pull(1, NOT_YET)) == 0
        assert runs[0] >= datetime(2030, 1, 7, 8, tzinfo=UTC)
        assert runs == sorted(runs)


@pytest.mark.parametrize(
    "by", [timedelta(weeks=2, days=1), timedelta(days=-3)], ids=["later", "earlier"]
)
async def test_a_move_of_a_run_loses_and_repeats_no_other_run(by: timedelta) -> None:
    start = datetime(2030, 1, 1, tzinfo=UTC)
    first = datetime(2030, 1, 7, 8, tzinfo=UTC)
    async with TestCluster(clock=virtual(start)) as cluster:
        mq = cluster.client()
        receipt = await mq.send("report", b"weekly", cron="0 9 * * MON", zone="Europe/Berlin")
        await cluster.clock.advance(hours=1)
        assert (await mq.delayed.show(receipt.delayed_id)).due == first
        await mq.delayed.move(receipt.delayed_id, first + timedelta(hours=2))
        await mq.delayed.move(receipt.delayed_id, first + by)
        consumer = mq.consumer("report", group="g")
        await cluster.clock.advance(timedelta(weeks=5))
        runs = [await one(consumer) for _ in range(5)]
        assert len(await consumer.pull(1, NOT_YET)) == 0
        assert len({each.id for each in runs}) == 5
        came = [datetime.fromtimestamp(each.append_time_ms / 1000, UTC) for each in runs]
        due = [
            first + by,
            *[max(first + timedelta(weeks=week), first + by) for week in range(1, 5)],
        ]
        assert all(at <= when for at, when in zip(due, came, strict=True)), came


@pytest.mark.parametrize(
    "pause",
    [timedelta(seconds=20), timedelta(minutes=3), timedelta(hours=5)],
    ids=["20s", "3m", "5h"],
)
async def test_a_message_that_was_given_back_comes_again_after_its_pause_and_not_before(
    qmq_cluster: TestCluster, pause: timedelta
) -> None:
    mq, clock = qmq_cluster.client(), qmq_cluster.clock
    await mq.send("work", b"hard")
    consumer = mq.consumer("work", group="g", ack="explicit")
    (message,) = await consumer.pull(1, SOON)
    message.nack(delay=pause)
    await asyncio.sleep(0.1)
    await clock.advance(pause - timedelta(seconds=1))
    assert len(await consumer.pull(1, NOT_YET)) == 0
    await clock.advance(seconds=1)
    (again,) = await consumer.pull(1, SOON)
    assert (again.body, again.attempt) == (b"hard", 2)


async def test_a_consumer_that_hangs_loses_its_lease_and_one_that_lives_keeps_it(
    qmq_cluster: TestCluster,
) -> None:
    mq, clock = qmq_cluster.client(), qmq_cluster.clock
    await mq.send_many("work", [b"a", b"b"])
    living = mq.consumer("work", group="g", name="living", ack="explicit", prefetch=1)
    hanging = qmq_cluster.client(at="elsewhere").consumer(
        "work", group="g", name="hanging", ack="explicit", prefetch=1
    )
    (held,) = await living.pull(1, SOON)
    (lost,) = await hanging.pull(1, SOON)
    async with qmq_cluster.partition("elsewhere"):
        await clock.advance(seconds=29)
        other = qmq_cluster.client().consumer("work", group="g", name="other", ack="explicit")
        assert len(await other.pull(1, NOT_YET)) == 0
        await clock.advance(seconds=90)
        (again,) = await other.pull(1, SOON)
        assert again.body == lost.body
        await again.ack_sync()
        await held.ack_sync()
    with pytest.raises(StaleDelivery):
        await lost.ack_sync()


async def test_an_ordered_consumer_that_hangs_leaves_its_lanes_to_others(
    qmq_cluster: TestCluster,
) -> None:
    mq, clock = qmq_cluster.client(), qmq_cluster.clock
    await mq.metadata.create_subject(
        qmq.SubjectConfig("orders", order=qmq.Order.STRICT, logical_partitions=16), partitions=2
    )
    hanging = qmq_cluster.client(at="elsewhere").ordered_consumer(
        "orders", group="g", name="hanging"
    )
    await mq.send("orders", b"1", key="k")
    assert (await anext(aiter(hanging))).body == b"1"
    async with qmq_cluster.partition("elsewhere"):
        await clock.advance(seconds=30)
        other = mq.ordered_consumer("orders", group="g", name="other")
        assert (await anext(aiter(other))).body == b"1"
        await clock.advance(days=1)
        # the master's lease, and with it its right to take this, was kept
        await mq.send("orders", b"2", key="k")


async def test_time_passes_for_every_sleeper_of_the_loop(qmq_cluster: TestCluster) -> None:
    begun = time.monotonic()
    sleeper = asyncio.create_task(asyncio.sleep(100))
    with pytest.raises(TimeoutError):
        await asyncio.gather(qmq_cluster.clock.advance(seconds=100), _late(asyncio.sleep(1_000)))
    await sleeper
    assert time.monotonic() - begun < 60


async def _late(what: Awaitable[Any]) -> None:
    async with asyncio.timeout(50):
        await what


async def test_a_subject_that_forgets_does_so_by_the_time_that_is_moved(
    qmq_cluster: TestCluster,
) -> None:
    mq = qmq_cluster.client()
    (before, after) = (await mq.send("s", b"1")).append_time_ms, qmq_cluster.clock
    await after.advance(hours=3)
    assert (await mq.send("s", b"2")).append_time_ms == before + 3 * 3_600_000
    message = await one(mq.consumer("s", group="g"))
    assert message.create_time_ms == before == message.append_time_ms


async def test_an_unsupported_use_of_a_clock_is_an_error() -> None:
    clock = virtual(datetime(2030, 1, 1, tzinfo=UTC))
    assert clock.now() == datetime(2030, 1, 1, tzinfo=UTC)
    with pytest.raises(InvalidArgument, match="no cluster yet"):
        await clock.advance(days=1)
    with pytest.raises(InvalidArgument, match="cannot go back"):
        await clock.advance(days=-1)
    with pytest.raises(InvalidArgument, match="no time zone"):
        virtual(datetime(2030, 1, 1))
    async with TestCluster(delay=False) as cluster:
        with pytest.raises(InvalidArgument, match="clock=virtual"):
            await cluster.clock.advance(days=1)


def test_a_loop_whose_time_cannot_be_moved_is_refused() -> None:
    async def begin() -> None:
        async with TestCluster(clock=virtual()):
            pass

    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        pytest.raises(InvalidArgument, match="uvloop"),
    ):
        runner.run(begin())
