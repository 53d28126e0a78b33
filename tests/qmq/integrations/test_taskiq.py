"""Taskiq on QMQ: its own receiver works on tasks; delays, schedules, acknowledgement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated, Any
from uuid import uuid4

import pytest
from support import eventually

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
    made = QmqBroker(subject=f"taskiq-{uuid4().hex[:8]}").with_result_backend(
        taskiq.InMemoryBroker().result_backend
    )
    await made.startup()
    yield made
    await made.shutdown()


@asynccontextmanager
async def working(
    broker: QmqBroker, ack: AcknowledgeType = AcknowledgeType.WHEN_SAVED
) -> AsyncIterator[None]:
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


async def test_a_task_that_ran_is_acknowledged_and_its_result_comes_back(
    broker: QmqBroker, cluster: TestCluster
) -> None:
    add = adder(broker)
    async with working(broker):
        assert await result_of(await add.kiq(1, 2)) == 3
    async with cluster.client().consumer(broker.subject, broker.group) as consumer:
        assert not await consumer.pull(1, timedelta(milliseconds=200))


async def test_a_task_with_a_delay_waits_at_the_broker(
    broker: QmqBroker, cluster: TestCluster
) -> None:
    task, seen = counter(broker)
    await task.kicker().with_labels(delay=DAY.total_seconds()).kiq(1)
    async with working(broker):
        await cluster.clock.advance(hours=23)
        assert not seen
        await cluster.clock.advance(hours=1)
        await eventually(lambda: seen == [1], within_s=SOON_S)


async def test_a_declared_delay_is_the_pause_between_attempts_and_not_before_the_first(
    broker: QmqBroker, cluster: TestCluster
) -> None:
    broker.add_middlewares(taskiq.SmartRetryMiddleware(use_jitter=False))
    runs: list[int] = []

    async def flaky(n: int) -> None:
        runs.append(n)
        raise ValueError

    task = broker.task(
        task_name=uuid4().hex, retry_on_error=True, max_retries=2, delay=DAY.total_seconds()
    )(flaky)
    async with working(broker):
        await task.kiq(1)
        await eventually(lambda: runs == [1], within_s=SOON_S)
        await task.kicker().with_labels(delay=2 * DAY.total_seconds()).kiq(2)
        await cluster.clock.advance(hours=25)
        await eventually(lambda: runs == [1, 1], within_s=SOON_S)
        await cluster.clock.advance(hours=24)
        await eventually(lambda: runs == [1, 1, 2], within_s=SOON_S)


async def test_a_schedule_by_time_runs_without_a_scheduler_and_can_be_deleted(
    broker: QmqBroker, cluster: TestCluster
) -> None:
    source, (task, seen) = QmqScheduleSource(broker), counter(broker)
    kept, deleted = [
        await task.schedule_by_time(source, cluster.clock.now() + DAY, n) for n in (1, 2)
    ]
    assert [each.key async for each in source.pending()] == [kept.schedule_id, deleted.schedule_id]
    await deleted.unschedule()
    async with working(broker):
        await cluster.clock.advance(days=2)
        await eventually(lambda: seen == [1], within_s=SOON_S)
    assert await source.get_schedules() == []
    with pytest.raises(MessageNotFound):
        await deleted.unschedule()


async def test_a_schedule_by_cron_runs_again_and_again_until_it_is_deleted(
    broker: QmqBroker, cluster: TestCluster
) -> None:
    source, (task, seen) = QmqScheduleSource(broker), counter(broker)
    made = await task.schedule_by_cron(source, "0 9 * * *", 7)
    async with working(broker):
        await cluster.clock.advance(days=3)
        await eventually(lambda: seen == [7, 7, 7], within_s=SOON_S)
        await made.unschedule()
        await cluster.clock.advance(days=2)
    assert seen == [7, 7, 7]


async def test_each_run_of_a_cron_schedule_has_its_own_id_unless_the_schedule_has_one(
    broker: QmqBroker, cluster: TestCluster
) -> None:
    source, ids = QmqScheduleSource(broker), dict[str, list[str]]()

    async def note(name: str, context: Annotated[taskiq.Context, taskiq.TaskiqDepends()]) -> None:
        ids.setdefault(name, []).append(context.message.task_id)

    task = broker.task(task_name=uuid4().hex)(note)
    await task.kicker().schedule_by_cron(source, "0 9 * * *", "own")
    await task.kicker().with_task_id("mine").schedule_by_cron(source, "0 9 * * *", "given")
    async with working(broker):
        await cluster.clock.advance(days=3)
        await eventually(lambda: sorted(map(len, ids.values())) == [3, 3], within_s=SOON_S)
    assert len(set(ids["own"])) == 3
    assert set(ids["given"]) == {"mine"}


async def test_what_a_schedule_cannot_be_is_refused(broker: QmqBroker) -> None:
    source, (task, _) = QmqScheduleSource(broker), counter(broker)
    with pytest.raises(InvalidArgument, match="not by interval"):
        await task.schedule_by_interval(source, 10, 1)
    with pytest.raises(InvalidArgument, match="time zone"):
        await task.schedule_by_cron(source, CronSpec(offset=timedelta(hours=1)), 1)


async def test_a_task_whose_worker_vanished_runs_at_another(
    broker: QmqBroker, cluster: TestCluster
) -> None:
    task, seen = counter(broker)
    await task.kiq(1)
    gone = cluster.client(at="gone").consumer(broker.subject, broker.group, ack="explicit")
    assert len(await gone.pull(1)) == 1
    async with cluster.partition("gone"), working(broker):
        await cluster.clock.advance(seconds=60)
        await eventually(lambda: seen == [1], within_s=SOON_S)


async def test_a_message_that_is_no_task_is_set_aside_and_its_neighbours_run(
    broker: QmqBroker, cluster: TestCluster
) -> None:
    task, seen = counter(broker)
    for body in (b"", b"no task", b"[" * 5_000, b'{"task_id": 1}'):
        await cluster.client().send(broker.subject, body)
        await task.kiq(len(body))
    async with working(broker):
        await eventually(lambda: len(seen) == 4, within_s=SOON_S)
    letters = cluster.client().consumer(f"%dlq%{broker.group}", "readers")
    found = {bytes((await anext(letters)).body) for _ in range(4)}
    assert found == {b"", b"no task", b"[" * 5_000, b'{"task_id": 1}'}


async def test_a_task_that_the_worker_does_not_know_is_not_lost(
    broker: QmqBroker, cluster: TestCluster
) -> None:
    other = QmqBroker(subject=broker.subject)
    await other.startup()
    unknown, _ = counter(other)
    known, seen = counter(broker)
    async with working(broker):
        await unknown.kiq(1)
        await known.kiq(2)
        await eventually(lambda: seen == [2], within_s=SOON_S)
        broker.task(task_name=unknown.task_name)(known.original_func)
        await cluster.clock.advance(minutes=2)
        await eventually(lambda: seen == [2, 1], within_s=SOON_S)
    await other.shutdown()


async def test_a_worker_that_stops_finishes_its_task_and_takes_no_more(
    broker: QmqBroker, cluster: TestCluster
) -> None:
    begun, may_end, finish = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work(n: int) -> None:
        begun.set()
        await may_end.wait()

    task = broker.task(task_name=uuid4().hex)(work)
    broker.is_worker_process = True
    receiver = asyncio.create_task(
        Receiver(broker, run_startup=False, max_async_tasks=1).listen(finish)
    )
    running = await task.kiq(1)
    await begun.wait()
    waiting = await task.kiq(2)
    finish.set()
    async with cluster.client().consumer(broker.subject, broker.group, ack="explicit") as other:
        message = await anext(other)
        assert (message.key, message.attempt) == (waiting.task_id, 1)
        await message.ack_sync()
        await cluster.clock.advance(seconds=60)
        may_end.set()
        await receiver
        await result_of(running)
        await broker.shutdown()
        assert not await other.pull(1, timedelta(milliseconds=200))


def test_a_broker_that_was_not_started_says_so() -> None:
    with pytest.raises(qmq.errors.ClientClosed, match="startup"):
        assert QmqBroker().mq
