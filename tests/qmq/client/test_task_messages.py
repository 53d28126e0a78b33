"""Several tasks or threads over one consumer: an automatic acknowledgement belongs to the one that
got the message. `close`, cancelled.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

import qmq
from qmq.blocking import beside
from qmq.client.interceptors import BaseInterceptor
from qmq.testing import TestCluster

LONG_LEASE_MS = 120_000


class Unavailable(Exception):
    """A handler's."""


@pytest.fixture
async def cluster() -> AsyncIterator[TestCluster]:
    async with TestCluster(delay=False) as made:
        mq = made.client()
        await mq.metadata.create_subject(
            qmq.SubjectConfig("ordered", order=qmq.Order.STRICT, logical_partitions=8), partitions=1
        )
        await mq.metadata.create_subject(qmq.SubjectConfig("plain"))
        yield made


def plain(mq: qmq.Client, **options: Any) -> Any:
    return mq.consumer("plain", "g", **options)


def ordered(mq: qmq.Client, **options: Any) -> Any:
    return mq.ordered_consumer(
        "ordered", "g", retry_delays_s=(0.01,), on_failure="park", attempts_max=3, **options
    )


async def send(mq: qmq.Client, count: int) -> None:
    for number in range(count):
        await mq.send("plain", b"%d" % number)
        await mq.send("ordered", b"%d" % number, key=f"key {number}")


def body_of(found: Any) -> bytes:
    return bytes(b" ".join(found.bodies) if hasattr(found, "bodies") else found.body)


Made = Callable[..., Any]
WAYS: list[Any] = [
    pytest.param(plain, aiter, id="plain"),
    pytest.param(ordered, aiter, id="ordered"),
    pytest.param(plain, lambda consumer: consumer.batches(1), id="plain batches"),
    pytest.param(
        lambda mq: mq.ordered_consumer("ordered", "g"),
        lambda consumer: consumer.batches(1),
        id="ordered batches",
    ),
]


@pytest.mark.parametrize(("make", "iterate"), WAYS)
@pytest.mark.parametrize("interceptors", [(), (BaseInterceptor(),)], ids=["", "intercepted"])
async def test_no_task_acknowledges_another_ones_message(
    cluster: TestCluster, make: Made, iterate: Made, interceptors: tuple[BaseInterceptor, ...]
) -> None:
    """One task holds a message while the other reads on, over the same iterator. The consumer
    closes: the held message comes again.
    """
    mq = cluster.client(interceptors=interceptors)
    await mq.send_many("plain", [b"%d" % number for number in range(6)])
    await mq.send_many(
        "ordered",
        [b"%d" % number for number in range(6)],
        keys=[f"key {number % 2}" for number in range(6)],
    )
    consumer = make(mq)
    messages = iterate(consumer)
    first = await anext(messages)

    async def read_on() -> None:
        for _ in range(2):
            assert body_of(await anext(messages)) != body_of(first)

    if hasattr(first, "runs"):  # an ordered batch blocks its lane
        asking = asyncio.create_task(read_on())
        await asyncio.sleep(0)
        asking.cancel()
    else:
        await asyncio.wait_for(asyncio.create_task(read_on()), 60)
    await consumer.close(Unavailable())
    await bodies_until(make(mq), iterate, {body_of(first)})


async def bodies_until(consumer: Any, iterate: Made, wanted: set[bytes]) -> list[bytes]:
    """What the group gets, until it has got all that is wanted."""
    messages, found = iterate(consumer), list[bytes]()
    async with asyncio.timeout(60), consumer:
        while not wanted <= set(found):
            found.append(body_of(await anext(messages)))
    return found


@pytest.mark.parametrize("make", [plain, ordered])
async def test_the_message_of_a_task_that_fails_comes_again_at_once(
    cluster: TestCluster, make: Made
) -> None:
    mq = cluster.client()
    await send(mq, 1)
    consumer = make(mq, lease_ms=LONG_LEASE_MS)

    async def work() -> None:
        async for _ in consumer:
            raise Unavailable

    with pytest.raises(Unavailable):
        await asyncio.create_task(work())
    async with asyncio.timeout(30):
        assert (await anext(consumer)).attempt == 2


@pytest.mark.parametrize("make", [plain, ordered])
async def test_the_message_of_a_cancelled_task_comes_again_without_an_attempt(
    cluster: TestCluster, make: Made
) -> None:
    mq = cluster.client()
    await send(mq, 1)
    consumer = make(mq, lease_ms=LONG_LEASE_MS)
    has_it = asyncio.Event()

    async def work() -> None:
        async for _ in consumer:
            has_it.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await has_it.wait()
    task.cancel()
    async with asyncio.timeout(30):
        assert (await anext(consumer)).attempt == 1


@pytest.mark.parametrize("make", [plain, ordered])
async def test_a_task_may_pass_its_message_on(cluster: TestCluster, make: Made) -> None:
    """What a task returned is settled by another one; what nobody settles comes again after a
    lease.
    """
    mq = cluster.client()
    await send(mq, 2)
    consumer = make(mq, lease_ms=1_000)

    async def one() -> Any:
        async for message in consumer:
            return message

    first, second = await asyncio.create_task(one()), await asyncio.create_task(one())
    await first.ack()
    async with asyncio.timeout(30):
        again = await anext(consumer)
    assert (again.body, again.attempt) == (second.body, 1)


async def test_a_thread_acknowledges_only_its_own_messages(cluster: TestCluster) -> None:
    """Of two threads over one blocking consumer, one holds its message. The consumer closes with an
    error: the message comes again.
    """
    mq = cluster.client()
    await send(mq, 4)

    blocking = beside(cluster.client(), asyncio.get_running_loop())

    def run() -> tuple[bytes, list[bytes]]:
        consumer = blocking.consumer("plain", "g")
        seen: list[bytes] = []

        def read_on() -> None:
            for message in consumer:
                seen.append(message.body)
                if len(seen) == 3:
                    break

        with suppress(Unavailable), consumer:
            held = next(iter(consumer)).body
            thread = threading.Thread(target=read_on)
            thread.start()
            thread.join()
            raise Unavailable
        return held, seen

    held, seen = await asyncio.to_thread(run)
    assert len({held, *seen}) == 4
    # the thread that ended did not ask for another message
    again = await bodies_until(plain(mq), aiter, {held, seen[-1]})
    assert not {*seen[:2]} & {*again}


async def test_the_message_of_a_thread_that_ended_comes_again_after_a_lease(
    cluster: TestCluster,
) -> None:
    mq = cluster.client()
    await send(mq, 1)

    blocking = beside(cluster.client(), asyncio.get_running_loop())

    def run() -> list[bytes]:
        consumer = blocking.consumer("plain", "g", lease_ms=1_000)
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(next(iter(consumer)).body))
        thread.start()
        thread.join()
        found.append(next(iter(consumer)).body)
        return found

    assert await asyncio.wait_for(asyncio.to_thread(run), 60) == [b"0", b"0"]


@pytest.mark.parametrize("make", [plain, ordered])
async def test_a_close_that_is_cancelled_gives_everything_back(
    cluster: TestCluster, make: Made
) -> None:
    """The lease is long, so only a consumer that has left gives its messages to the next one."""
    mq = cluster.client()
    await send(mq, 20)
    consumer = make(mq, lease_ms=LONG_LEASE_MS)
    await anext(consumer)
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await consumer.close()
    await bodies_until(make(mq), aiter, {b"%d" % number for number in range(20)})


async def test_a_cancelled_close_does_not_wait_for_a_retry_that_no_delay_group_takes() -> None:
    async with TestCluster(delay=True) as cluster:
        mq = cluster.client()
        for number in range(20):
            await mq.send("plain", b"%d" % number)
        consumer = mq.consumer("plain", "g", lease_ms=LONG_LEASE_MS)
        message = await anext(consumer)
        await cluster.kill("delay-1")
        message.nack(timedelta(hours=2))
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await asyncio.wait_for(consumer.close(), 30)
        assert message.body not in await bodies_until(
            plain(mq), aiter, {b"%d" % number for number in range(20)} - {message.body}
        )


async def run(consumer: Any, seen: Callable[[], object]) -> None:
    async def handler(_: Any) -> None:
        seen()

    await consumer.run(handler)


async def iterate(consumer: Any, seen: Callable[[], object]) -> None:
    async for _ in consumer:
        seen()


async def iterate_batches(consumer: Any, seen: Callable[[], object]) -> None:
    async for _ in consumer.batches(1):
        seen()


async def pull(consumer: Any, seen: Callable[[], object]) -> None:
    while True:
        (await consumer.pull(1)).ack_later()
        seen()


async def take(consumer: Any, seen: Callable[[], object]) -> None:
    while True:
        for message in await consumer.take(1):
            message.ack_later()
            seen()


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (plain, iterate),
        (plain, iterate_batches),
        (plain, pull),
        (ordered, iterate),
        (ordered, run),
        (ordered, take),
    ]
    + [(lambda mq: mq.ordered_consumer("ordered", "g"), read) for read in (iterate_batches, pull)],
)
async def test_an_application_that_never_waits_lets_other_tasks_run(
    cluster: TestCluster, make: Made, read: Made
) -> None:
    """All messages arrive in one batch. Each takes the event loop's thread for 10 ms, as a
    computation does.
    """
    mq = cluster.client()
    await mq.send_many("plain", [b""] * 60)
    await mq.send_many("ordered", [b""] * 60, keys=["key"] * 60)
    turns: list[int] = []
    handled = 0

    async def other() -> None:
        while True:
            turns.append(handled)
            await asyncio.sleep(0)

    def seen() -> None:
        nonlocal handled
        handled += 1
        time.sleep(0.01)  # a message is handled without any wait
        if handled == 60:
            done.set()

    done = asyncio.Event()
    async with asyncio.timeout(60), make(mq) as consumer, asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(consumer, seen)), group.create_task(other())]
        await done.wait()
        for task in tasks:
            task.cancel()
    assert max(after - before for before, after in pairwise(turns)) < 30, "a turn is 50 ms long"
