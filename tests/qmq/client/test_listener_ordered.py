"""Listeners of ordered subjects: they find out by themselves, and keep the order of each key."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from datetime import timedelta

import pytest
from support import eventually

import qmq
from qmq.errors import InvalidArgument
from qmq.node.dev_node import Node

NOW = timedelta(0)
TINY = timedelta(milliseconds=20)


async def ordered(mq: qmq.Client, name: str = "s") -> None:
    await mq.metadata.create_subject(
        qmq.SubjectConfig(name, order=qmq.Order.STRICT, logical_partitions=64), partitions=2
    )


async def send(mq: qmq.Client, keys: int, each: int) -> None:
    for number in range(each):
        await mq.send_many("s", [b"%d" % number] * keys, keys=[f"k{key}" for key in range(keys)])


async def test_keys_are_handled_in_parallel_and_each_in_its_order_also_after_failures(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await ordered(mq)
        await send(mq, 20, 10)
        seen: dict[str | None, list[int]] = defaultdict(list)
        failed: set[object] = set()
        at_once = most = 0

        @mq.listener(
            "s", group="g", concurrency=8, retry_delays=[NOW], on_failure="park", attempts_max=9
        )
        async def handler(number: int, context: qmq.Context) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1
            if number == 4 and context.message.key not in failed:
                failed.add(context.message.key)
                raise ValueError
            if number == 5 and context.attempt == 1:
                raise qmq.Retry(after=NOW)
            seen[context.message.key].append(number)

        async with mq.listening():
            await eventually(lambda: sum(map(len, seen.values())) == 200)
        assert all(numbers == list(range(10)) for numbers in seen.values())
        assert len(seen) == len(failed) == 20
        assert most > 1


async def test_a_plain_function_keeps_the_order_of_a_key_too(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await ordered(mq)
        await send(mq, 5, 10)
        seen: dict[str | None, list[int]] = defaultdict(list)
        threads: set[int] = set()

        @mq.listener("s", group="g", concurrency=4, retry_delays=[NOW])
        def handler(message: qmq.OrderedMessage) -> None:
            threads.add(threading.get_ident())
            if message.attempt == 1 and message.body == b"3":
                message.fail(NOW)
                return
            seen[message.key].append(int(message.body))

        async with mq.listening():
            await eventually(lambda: sum(map(len, seen.values())) == 50)
        assert all(numbers == list(range(10)) for numbers in seen.values())
        assert threading.get_ident() not in threads


async def test_a_stop_finishes_messages_in_progress_and_the_next_consumer_continues(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await ordered(mq)
        await send(mq, 4, 10)
        began, go_on = asyncio.Event(), asyncio.Event()
        done: dict[str | None, list[int]] = defaultdict(list)

        @mq.listener("s", group="g", concurrency=4)
        async def handler(number: int, context: qmq.Context) -> None:
            if number == 5:
                began.set()
                await go_on.wait()
            done[context.message.key].append(number)

        running = asyncio.create_task(mq.run())
        await began.wait()
        mq.stop()
        await asyncio.sleep(0)
        assert not running.done()
        go_on.set()
        await running
        assert all(numbers == list(range(len(numbers))) for numbers in done.values())
        assert any(len(numbers) == 6 for numbers in done.values())
        assert all(len(numbers) <= 6 for numbers in done.values())
        async with mq.ordered_consumer("s", "g") as rest:
            async for message in rest:
                assert message.attempt == 1
                done[message.key].append(int(message.body))
                if sum(map(len, done.values())) == 40:
                    break
        assert all(numbers == list(range(10)) for numbers in done.values())


async def test_after_the_grace_handlers_are_cancelled_and_their_messages_wait_for_the_next(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await ordered(mq)
        await send(mq, 1, 3)
        began = asyncio.Event()

        @mq.listener("s", group="g")
        async def hangs(body: bytes) -> None:
            began.set()
            await asyncio.Event().wait()

        async with mq.listening(grace=TINY):
            await began.wait()
        async with asyncio.timeout(20), mq.ordered_consumer("s", "g") as rest:
            assert [(await anext(rest)).body for _ in range(3)] == [b"0", b"1", b"2"]


async def test_what_does_not_decode_is_set_aside_with_its_key_or_skipped(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await ordered(mq)
        for body in ("1", "poison", "2"):
            await mq.send("s", body, key="bad")
        await mq.send("s", "3", key="good")
        parked: list[int] = []
        skipped: list[int] = []

        @mq.listener("s", group="parks", on_failure="park", attempts_max=1)
        async def parks(number: int) -> None:
            parked.append(number)

        @mq.listener("s", group="skips", on_undecodable="skip")
        async def skips(number: int) -> None:
            skipped.append(number)

        async with mq.listening():
            await eventually(lambda: len(parked) == 2 and len(skipped) == 3)
            async with asyncio.timeout(20):
                while not (found := await mq.metadata.parked("s", "parks")):
                    await asyncio.sleep(0.01)
        assert [each.key for each in found] == [b"bad"]
        assert sorted(parked) == [1, 3]
        assert sorted(skipped) == [1, 2, 3]
        assert [number for number in skipped if number < 3] == [1, 2]


async def test_batches_are_of_one_lane_and_fail_as_a_whole(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await ordered(mq)
        await send(mq, 10, 20)
        seen: dict[str | None, list[int]] = defaultdict(list)
        failed: set[int] = set()
        said: list[int] = []

        @mq.listener("s", group="g", concurrency=2, batch=(50, NOW), retry_delays=[NOW])
        async def handler(numbers: list[int], context: qmq.Context) -> None:
            (partition,) = {
                each.partition for each in context.messages if not isinstance(each, qmq.Message)
            }
            if partition not in failed:
                failed.add(partition)
                raise ValueError
            if len(failed) == 2 and len(said) < 2:
                said.append(partition)
                context.nack(NOW)
                return
            for number, message in zip(numbers, context.messages, strict=True):
                seen[message.key].append(number)

        async with mq.listening():
            await eventually(lambda: sum(map(len, seen.values())) == 200)
        assert len(failed) == len(said) == 2
        assert all(numbers == list(range(20)) for numbers in seen.values())


async def test_what_would_break_the_order_ends_the_listener(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await ordered(mq)

        def plain(body: bytes) -> None: ...

        mq.listen("s", plain, "g", timeout=TINY)
        with pytest.raises(InvalidArgument, match="a thread cannot be cancelled"):
            await mq.run()
