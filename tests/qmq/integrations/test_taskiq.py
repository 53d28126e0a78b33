"""Taskiq on QMQ: its own receiver works on tasks; delays, schedules, acknowledgement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

taskiq = pytest.importorskip("taskiq", reason="needs Taskiq: pip install 'qmq[taskiq]'")
from taskiq.acks import AcknowledgeType  # noqa: E402
from taskiq.receiver import Receiver  # noqa: E402
from taskiq.scheduler.scheduled_task import CronSpec  # noqa: E402

import qmq  # noqa: E402
from qmq.errors import InvalidArgument, MessageNotFound  # noqa: E402
from qmq.integrations.taskiq import QmqBroker, QmqScheduleSource  # noqa: E402
from qmq.testing import TestCluster, virtual  # noqa: E402

SOON_S = 30
DAY = timedelta(days=1)


@pytest.fixture
async def cluster() -> AsyncIterator[TestCluster]:
    async with TestCluster(clock=virtual()) as made:
        yield made


@pytest.fixture
async def broker(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[QmqBroker]:
    """A broker whose client is on the test's clock."""
    monkeypatch.setattr(qmq, "connect", lambda _addresses, **options: cluster.client(**options))
    made = QmqBroker(subject=f"taskiq-{uuid4().hex[:8]}").with_result_backend(taskiq.InMemoryBroker().result_backend)
    await made.startup()
    yield made
    await made.shutdown()


@asynccontextmanager
async def working(broker: QmqBroker, ack: AcknowledgeType = AcknowledgeType.WHEN_SAVED) -> AsyncIterator[None]:
    """Taskiq's receiver, as its workers have it."""
    finish = asyncio.Event()
    broker.is_worker_process = True
    receiver = asyncio.create_task(Receiver(broker, run_startup=False, ack_type=ack).listen(finish))
    yield
    finish.set()
    await receiver


async def result_of(task: Any) -> Any:
    return (await task.wait_result(timeout=SOON_S, check_interval=0.01)).return_value


def adder(broker: QmqBroker) -> Any:
    async def add(x: int, y: int) -> int:
        return x + y

    return broker.task(task_name=uuid4().hex)(add)


def counter(broker: QmqBroker) -> tuple[Any, list[int]]:
    seen: list[int] = []

    async def count(n: int) -> None:
        seen.append(n)

    return broker.task(task_name=uuid4().hex)(count), seen


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_task_runs_and_its_result_comes_back(broker: QmqBroker) -> None:
    async with working(broker):
        assert await result_of(await adder(broker).kiq(1, 2)) == 3


async def test_a_task_is_acknowledged_after_it_ran(broker: QmqBroker, cluster: TestCluster) -> None:
    add = adder(broker)
    async with working(broker):
        await result_of(await add.kiq(1, 2))
    async with cluster.client().consumer(broker.subject, broker.group) as consumer:
        assert not await consumer.pull(1, timedelta(milliseconds=200))


async def test_a_task_with_a_delay_waits_at_the_broker(broker: QmqBroker, cluster: TestCluster) -> None:
    task, seen = counter(broker)
    await task.kicker().with_labels(delay=DAY.total_seconds()).kiq(1)
    async with working(broker):
        await cluster.clock.advance(hours=23)
        assert not seen
        await cluster.clock.advance(hours=1)
        await until(lambda: seen == [1])


async def test_a_schedule_by_time_runs_without_a_scheduler_and_can_be_deleted(broker: QmqBroker, cluster: TestCluster) -> None:
    source, (task, seen) = QmqScheduleSource(broker), counter(broker)
    kept, deleted = [await task.schedule_by_time(source, cluster.clock.now() + DAY, n) for n in (1, 2)]
    assert [each.key async for each in source.pending()] == [kept.schedule_id, deleted.schedule_id]
    await deleted.unschedule()
    async with working(broker):
        await cluster.clock.advance(days=2)
        await until(lambda: seen == [1])
    assert await source.get_schedules() == []
    with pytest.raises(MessageNotFound):
        await deleted.unschedule()


async def test_a_schedule_by_cron_runs_again_and_again_until_it_is_deleted(broker: QmqBroker, cluster: TestCluster) -> None:
    source, (task, seen) = QmqScheduleSource(broker), counter(broker)
    made = await task.schedule_by_cron(source, "0 9 * * *", 7)
    async with working(broker):
        await cluster.clock.advance(days=3)
        await until(lambda: seen == [7, 7, 7])
        await made.unschedule()
        await cluster.clock.advance(days=2)
    assert seen == [7, 7, 7]


async def test_what_a_schedule_cannot_be_is_refused(broker: QmqBroker) -> None:
    source, (task, _) = QmqScheduleSource(broker), counter(broker)
    with pytest.raises(InvalidArgument, match="not by interval"):
        await task.schedule_by_interval(source, 10, 1)
    with pytest.raises(InvalidArgument, match="time zone"):
        await task.schedule_by_cron(source, CronSpec(offset=timedelta(hours=1)), 1)


async def test_a_task_whose_worker_vanished_runs_at_another(broker: QmqBroker, cluster: TestCluster) -> None:
    task, seen = counter(broker)
    await task.kiq(1)
    gone = cluster.client(at="gone").consumer(broker.subject, broker.group, ack="explicit")
    assert len(await gone.pull(1)) == 1
    async with cluster.partition("gone"), working(broker):
        await cluster.clock.advance(seconds=60)
        await until(lambda: seen == [1])


def test_a_broker_that_was_not_started_says_so() -> None:
    with pytest.raises(qmq.errors.ClientClosed, match="startup"):
        assert QmqBroker().mq
