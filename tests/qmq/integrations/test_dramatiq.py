"""Dramatiq on QMQ: the tests of Dramatiq's brokers for Redis and RabbitMQ, adapted to QMQ, with
Dramatiq's worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

dramatiq = pytest.importorskip("dramatiq", reason="needs Dramatiq: pip install 'qmq[dramatiq]'")
from dramatiq import errors  # noqa: E402
from dramatiq.middleware import Middleware, default_middleware  # noqa: E402

import qmq.blocking  # noqa: E402
from qmq.integrations.dramatiq import DramatiqBroker  # noqa: E402

SOON_MS = 30_000
HOUR_MS = 3_600_000


@pytest.fixture
def broker(address: str) -> Iterator[DramatiqBroker]:
    """A broker with its own queues and group, and Dramatiq's middleware except Prometheus."""
    name = uuid4().hex[:8]
    kinds = [each for each in default_middleware if each.__name__ != "Prometheus"]
    made = DramatiqBroker(
        address, group=name, prefix=f"{name}.", middleware=[each() for each in kinds]
    )
    yield made
    made.close()


@contextmanager
def working(broker: DramatiqBroker, threads: int = 4) -> Iterator[Any]:
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=threads)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def actor(broker: DramatiqBroker, function: Callable[..., Any], **options: Any) -> Any:
    return dramatiq.actor(function, broker=broker, actor_name=uuid4().hex, **options)


def join(broker: DramatiqBroker, timeout: int = SOON_MS) -> None:
    broker.join("default", timeout=timeout)


def dead(address: str, broker: DramatiqBroker) -> list[Any]:
    with (
        qmq.blocking.connect(address) as mq,
        mq.consumer(f"%dlq%{broker.group}", "judge", ack="explicit") as consumer,
    ):
        return list(consumer.pull(10))


def test_actors_can_be_sent_messages(broker: DramatiqBroker) -> None:
    database: dict[str, int] = {}
    put = actor(broker, lambda key, value: database.update({key: value}))
    with working(broker):
        for number in range(100):
            put.send(f"key-{number}", number)
        join(broker)
    assert len(database) == 100


def test_actors_retry_until_they_succeed(broker: DramatiqBroker) -> None:
    attempts: list[int] = []

    def work() -> None:
        attempts.append(1)
        if len(attempts) < 4:
            raise RuntimeError(f"failure {len(attempts)}")

    failing = actor(broker, work, min_backoff=10, max_backoff=20)
    with working(broker):
        failing.send()
        join(broker)
    assert len(attempts) == 4


def test_a_worker_that_stops_finishes_its_task_and_leaves_the_rest_to_others(
    broker: DramatiqBroker, address: str
) -> None:
    runs: list[int] = []
    begun, may_end = threading.Event(), threading.Event()

    def work(number: int) -> None:
        runs.append(number)
        begun.set()
        assert may_end.wait(SOON_MS / 1000)

    task = actor(broker, work)
    for number in range(3):
        task.send(number)
    with working(broker, threads=1) as worker:
        assert begun.wait(SOON_MS / 1000)
        stopping = threading.Thread(target=worker.stop)
        stopping.start()
        try:
            with qmq.blocking.connect(address, state_dir=False) as mq:
                other = mq.consumer(broker.subject("default"), broker.group, ack="explicit")
                found: list[Any] = []
                while len(found) < 2:
                    found += other.pull(10, timedelta(milliseconds=100))
                assert sorted(
                    (dramatiq.Message.decode(each.body).args, each.attempt) for each in found
                ) == [((1,), 1), ((2,), 1)]
                task.send(3)
                assert [dramatiq.Message.decode(each.body).args for each in other.pull(1)] == [(3,)]
        finally:
            may_end.set()
            stopping.join()
    assert runs == [0]


def test_delayed_messages_run_when_each_is_due(broker: DramatiqBroker) -> None:
    results: list[int] = []
    append = actor(broker, results.append)
    append.send_with_options(args=(1,), delay=900)
    append.send_with_options(args=(2,), delay=300)
    with working(broker, threads=1):
        join(broker)
    assert results == [2, 1]


def test_a_delayed_message_waits_at_the_broker_and_not_in_a_worker(broker: DramatiqBroker) -> None:
    results: list[int] = []
    append = actor(broker, results.append)
    sent = append.send_with_options(args=(1,), delay=365 * 24 * HOUR_MS)
    with working(broker):
        append.send(2)
        with pytest.raises(errors.QueueJoinTimeout):
            join(broker, 500)
    assert results == [2]
    assert broker.get_declared_delay_queues() == set()
    link = broker.link

    async def waiting() -> list[str | None]:
        return [each.key async for each in link.client.delayed.list(broker.subject("default"))]

    assert link.run(waiting()) == [sent.message_id]


def test_messages_that_fail_or_have_no_actor_are_dead_lettered(
    broker: DramatiqBroker, address: str
) -> None:
    def work() -> None:
        raise RuntimeError("no use")

    failing = actor(broker, work, max_retries=0)
    sent = [failing.send(), broker.enqueue(dramatiq.Message("default", "nobody", (), {}, {}))]
    with working(broker):
        join(broker)
    assert {dramatiq.Message.decode(each.body).message_id for each in dead(address, broker)} == {
        each.message_id for each in sent
    }


def test_messages_that_cannot_be_decoded_are_dead_lettered(
    broker: DramatiqBroker, address: str
) -> None:
    results: list[int] = []
    append = actor(broker, results.append)
    odd = [
        b"no JSON",
        b"[]",
        b"5",
        b"[" * 3_000,
        append.message(1).encode().replace(b'"default"', b"[]"),
    ]
    with qmq.blocking.connect(address) as mq:
        for each in odd:
            mq.send(broker.subject("default"), each)
    append.send(1)
    with working(broker):
        join(broker)
    assert results == [1]
    assert sorted(each.body for each in dead(address, broker)) == sorted(odd)


def test_messages_that_would_end_the_threads_of_a_worker_are_dead_lettered(
    broker: DramatiqBroker, address: str
) -> None:
    """A thread looks for the consumer of the message's queue, and compares a task's error with
    `throws`, where nothing catches an error.
    """

    def work() -> None:
        raise RuntimeError("no use")

    failing, results = actor(broker, work, max_retries=0), list[int]()
    append = actor(broker, results.append)
    odd = [
        *[failing.message().copy(queue_name=name).encode() for name in ("other", "default.DQ")],
        *[failing.message_with_options(throws=each).encode() for each in ("x", 5)],
    ]
    with qmq.blocking.connect(address) as mq:
        for each in odd:
            mq.send(broker.subject("default"), each)
    append.send(1)
    with working(broker, threads=1):
        join(broker)
    assert results == [1]
    assert sorted(each.body for each in dead(address, broker)) == sorted(odd)


def test_join_gives_up_in_time(broker: DramatiqBroker) -> None:
    go_on = threading.Event()
    slow = actor(broker, lambda: go_on.wait(SOON_MS / 1000))
    slow.send()
    with working(broker):
        with pytest.raises(errors.QueueJoinTimeout):
            join(broker, 100)
        go_on.set()
        join(broker)


def test_queues_can_be_flushed_with_their_delayed_messages(broker: DramatiqBroker) -> None:
    results: list[int] = []
    append = actor(broker, results.append)
    append.send(1)
    append.send_with_options(args=(2,), delay=HOUR_MS)
    broker.flush_all()
    join(broker)  # nothing is left, though no worker ever took part in the group
    with working(broker):
        join(broker)
    assert results == []


def test_a_queue_that_was_not_declared_is_not_found(broker: DramatiqBroker) -> None:
    for call in (broker.consume, broker.flush, broker.join):
        with pytest.raises(errors.QueueNotFound):
            call("nowhere")


def test_a_cluster_that_cannot_be_reached_is_a_closed_connection() -> None:
    broker = DramatiqBroker("127.0.0.1:1", middleware=[])
    append = actor(broker, print)
    with pytest.raises(errors.ConnectionClosed):
        append.send()


def test_middleware_sees_each_message_with_its_delay(broker: DramatiqBroker) -> None:
    seen: list[tuple[str, int | None]] = []

    class Watch(Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            seen.append(("before", delay))

        def after_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            seen.append(("after", delay))

        def after_ack(self, broker: Any, message: Any) -> None:
            seen.append(("ack", None))

    broker.add_middleware(Watch())
    with working(broker):
        actor(broker, print).send_with_options(delay=50)
        join(broker)
    assert seen == [("before", 50), ("after", 50), ("ack", None)]


def test_a_broker_made_before_a_fork_works_in_the_child(broker: DramatiqBroker) -> None:
    append = actor(broker, print)
    append.send()
    before = broker.link
    broker.link.process = os.getpid() + 1  # as a child sees what its parent opened
    append.send()
    assert broker.link is not before
    before.process = os.getpid()
    before.close()
