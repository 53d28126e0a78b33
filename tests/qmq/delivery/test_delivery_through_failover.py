"""The promises of delivery, on a group of three replicas over TCP whose master is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.clusters import REPLICATED, ServerCluster, cluster

import qmq
from qmq.errors import StaleDelivery
from qmq.model import dead_letter_subject

NOW = timedelta(0)
SOON = timedelta(seconds=20)


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[ServerCluster]:
    async with cluster(tmp_path, REPLICATED) as found:
        yield found


async def kill_master(three: ServerCluster) -> None:
    """Kill the master and wait for the next one."""
    master = await three.master("g1")
    name = next(name for name, node in three.nodes.items() if node is master)
    await three.crash(name)
    await three.master("g1")


async def everything(mq: qmq.Client, subject: str, group: str, count: int) -> list[qmq.Message]:
    """All messages of a queue that no other consumer reads."""
    found: list[qmq.Message] = []
    async with mq.consumer(subject, group, ack="explicit", prefetch=10_000) as consumer:
        while len(found) < count:
            got = list(await consumer.pull(count, wait=SOON))
            assert got, f"{len(found)} of {count} came"
            found += got
    return found


@pytest.mark.sampled
async def test_each_dead_message_is_in_the_queue_once_although_the_master_was_killed(
    three: ServerCluster,
) -> None:
    async with qmq.connect(three.servers) as mq:
        await mq.send_many("orders", [b"%d" % number for number in range(2_000)])
        rejected, killed = 0, False
        async with mq.consumer("orders", "billing", ack="explicit") as consumer:
            while found := await consumer.pull(100, wait=timedelta(seconds=4)):
                found.reject("all of them")
                rejected += len(found)
                if rejected > 1_000 and not killed:
                    await kill_master(three)
                    killed = True
        letters = await everything(mq, dead_letter_subject("billing"), "looks", 2_000)
        assert Counter(letter.body for letter in letters) == Counter(
            b"%d" % number for number in range(2_000)
        )
        (queue,) = await mq.metadata.dead_letter_queues("billing")
        assert queue.messages == 2_000


async def test_attempts_and_errors_survive_the_kill_of_the_master(three: ServerCluster) -> None:
    async with qmq.connect(three.servers) as mq:
        await mq.send("orders", b"bad")
        attempts: list[int] = []
        async with mq.consumer("orders", "billing", ack="explicit") as consumer:
            while not attempts or attempts[-1] < 5:
                message = await anext(consumer)
                attempts.append(message.attempt)
                message.nack(NOW, error=f"attempt {message.attempt}")
                if message.attempt == 3 and attempts.count(3) == 1:
                    await kill_master(three)
            (letter,) = await everything(mq, dead_letter_subject("billing"), "looks", 1)
        assert attempts == sorted(attempts)
        assert {1, 2, 3, 5} <= set(attempts)
        assert (letter.headers["qmq-error"], letter.headers["qmq-attempt"]) == (b"attempt 5", b"5")


async def test_acknowledged_tags_never_return_after_a_killed_master_and_the_rest_comes(
    three: ServerCluster,
) -> None:
    async with qmq.connect(three.servers) as mq:
        tags = [
            ("eu", "paid") if number % 3 == 0 else ("eu",) if number % 3 == 1 else ()
            for number in range(600)
        ]
        await mq.send_many("orders", [b"%d" % number for number in range(600)], tags=tags)
        wanted = {b"%d" % number for number in range(0, 600, 3)}
        acked = set[bytes]()
        async with mq.consumer(
            "orders", "paid", tags_all=["eu", "paid"], ack="explicit"
        ) as consumer:
            while acked < wanted:
                found = await consumer.pull(50, wait=SOON)
                assert found
                assert set(found.bodies) <= wanted - acked
                try:
                    await found.ack_sync()
                except StaleDelivery:
                    continue
                acked |= set(found.bodies)
                if len(acked) == 100:
                    await kill_master(three)
        async with mq.consumer("orders", "any", tags_any=["paid", "eu"]) as consumer:
            seen = set[bytes]()
            while len(seen) < 400:
                seen |= set((await consumer.pull(1_000, wait=SOON)).bodies)
        assert seen == {b"%d" % number for number in range(600) if number % 3 < 2}, (
            "untagged messages never match"
        )


async def test_broadcast_and_at_most_once_groups_survive_a_killed_master(
    three: ServerCluster,
) -> None:
    async with qmq.connect(three.servers) as mq:
        await mq.send_many("prices", [b"%d" % number for number in range(200)])
        first = mq.consumer(
            "prices", "caches", name="a", broadcast=True, start="earliest", ack="explicit"
        )
        second = mq.consumer(
            "prices", "caches", name="b", broadcast=True, start="earliest", ack="explicit"
        )
        once = mq.consumer("prices", "once", consume_most_once=True)
        seen: dict[str, Counter[bytes]] = {"a": Counter(), "b": Counter(), "once": Counter()}

        async def take(name: str, consumer: qmq.Consumer, until: int) -> None:
            while len(seen[name]) < until:
                found = await consumer.pull(until, wait=timedelta(seconds=3))
                if not found:
                    break
                if name != "once":
                    await found.ack_sync()
                seen[name].update(found.bodies)

        for name, consumer in (("a", first), ("b", second), ("once", once)):
            await take(name, consumer, 100)
        await kill_master(three)
        for name, consumer in (("a", first), ("b", second), ("once", once)):
            await take(name, consumer, 200)
        assert len(seen["a"]) == len(seen["b"]) == 200
        assert max(seen["once"].values()) == 1
