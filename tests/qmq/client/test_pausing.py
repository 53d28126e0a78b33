"""An application pauses consumers or clients: they hand out and pull no messages, and keep the
messages that they hold.
"""

from __future__ import annotations

import asyncio
import os
import threading
from datetime import timedelta
from typing import Any

import pytest
from support import eventually

import qmq
import qmq.blocking
from qmq.errors import InvalidName
from qmq.model import Order, SubjectConfig, check_name
from qmq.node.dev_node import Node

SHORT = timedelta(seconds=0.05)


def handed_out(node: Node, consumer: qmq.Consumer) -> int:
    """How many messages the broker has handed to a consumer since it attached; -1 if it is not
    attached.
    """
    (state,) = [each for each in node.broker.dispatch.groups if each.name == consumer.group]
    holder = state.share.holders.get(consumer.name)
    return -1 if holder is None else holder.next_pull


async def drained(consumer: qmq.Consumer, count: int) -> list[bytes]:
    """Receive `count` messages and acknowledge each."""
    found: list[bytes] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            for message in await consumer.pull(count):
                found.append(message.body)
                await message.ack_sync()
    return found


async def test_a_paused_consumer_hands_out_nothing_and_pulls_nothing_until_it_is_resumed(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq, mq.consumer("s", "g", prefetch=10) as consumer:
        await mq.send_many("s", [b"%02d" % number for number in range(50)])
        seen = list(await consumer.pull(3))
        await eventually(lambda: handed_out(node, consumer) == 10)
        consumer.pause()
        assert consumer.is_paused
        assert not await consumer.pull(50, SHORT)
        for message in seen:
            await message.ack_sync()
        # there was room for three more
        assert (list(await consumer.pull(50, SHORT)), handed_out(node, consumer)) == (
            [],
            10,
        )
        draining = asyncio.create_task(drained(consumer, 47))
        await asyncio.sleep(0)
        consumer.resume()
        assert not consumer.is_paused
        assert [*[message.body for message in seen], *await draining] == [
            b"%02d" % number for number in range(50)
        ]


async def test_a_drained_consumer_does_not_hand_out_what_was_on_its_way(node: Node) -> None:
    async with (
        qmq.connect(node.address) as mq,
        mq.consumer("s", "g") as stopping,
        mq.consumer("s", "g") as other,
    ):
        waiting = asyncio.create_task(stopping.pull(1))
        await eventually(lambda: bool(list(node.broker.dispatch.groups)))
        await eventually(lambda: handed_out(node, stopping) == 0)
        stopping.drain()
        await mq.send("s", b"0")
        (message,) = await other.pull(1)
        assert (message.body, message.attempt, waiting.done()) == (b"0", 1, False)
        waiting.cancel()


async def test_a_paused_loop_finishes_its_current_messages(node: Node) -> None:
    async with qmq.connect(node.address) as mq, mq.consumer("s", "g") as consumer:
        await mq.send_many("s", [b"0", b"1"])
        assert (await anext(consumer)).body == b"0"
        consumer.pause()
        waiting = asyncio.create_task(anext(consumer))
        (state,) = node.broker.dispatch.groups
        await eventually(lambda: state.share.settled_before() == 1)
        assert not waiting.done()
        consumer.resume()
        assert (await waiting).body == b"1"


@pytest.mark.parametrize("what", ["consumer", "client"])
async def test_a_pause_between_two_messages_of_a_batch_stops_the_loop(
    node: Node, what: str
) -> None:
    async with qmq.connect(node.address) as mq, mq.consumer("s", "g") as consumer:
        await mq.send_many("s", [b"%d" % number for number in range(100)])
        found = []
        async for message in consumer:
            found.append(message.body)
            if len(found) == 10:
                (mq if what == "client" else consumer).pause()
                break
        stopped = asyncio.ensure_future(anext(aiter(consumer)))
        await asyncio.sleep(0)
        assert not stopped.done()
        (mq if what == "client" else consumer).resume()
        found.append((await stopped).body)
        found += (await consumer.pull(5)).bodies
        found += [(await anext(consumer)).body for _ in range(84)]
    assert found == [b"%d" % number for number in range(100)]


async def test_a_paused_client_pauses_all_its_consumers_and_can_still_send(node: Node) -> None:
    async with qmq.connect(node.address) as mq, mq.consumer("s", "g") as one:
        mq.pause()
        assert mq.is_paused
        async with mq.consumer("s", "h") as later, mq.consumer("s", "i") as own:
            own.pause()
            await mq.send("s", b"0")
            consumers = (one, later, own)
            assert all(each.is_paused for each in consumers)
            waiting = [asyncio.create_task(anext(each)) for each in consumers]
            await eventually(lambda: len(list(node.broker.dispatch.groups)) == 3)
            await eventually(lambda: all(handed_out(node, each) == 0 for each in consumers))
            mq.resume()
            assert [each.is_paused for each in consumers] == [False, False, True]
            assert [(await each).body for each in waiting[:2]] == [b"0", b"0"]
            assert not waiting[2].done()
            own.resume()
            assert (await waiting[2]).body == b"0"


@pytest.mark.parametrize("in_bulk", [False, True])
async def test_a_paused_ordered_consumer_keeps_its_lanes_and_continues_in_order(
    node: Node, in_bulk: bool
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("o", order=Order.STRICT, logical_partitions=8)
        )
        async with mq.ordered_consumer("o", "g") as consumer:
            seen: list[bytes] = []

            async def handle(message: Any) -> None:
                seen.append(message.body)

            async def handle_all() -> None:
                async for messages in consumer.batches():
                    seen.extend(messages.bodies)

            running = asyncio.create_task(handle_all() if in_bulk else consumer.run(handle))
            await mq.send("o", b"0", key="k")
            await eventually(lambda: len(seen) == 1)
            consumer.pause()
            for number in range(1, 20):
                await mq.send("o", b"%d" % number, key="k")
            (reader,), lanes = consumer.readers, consumer.lanes
            # the pull that was under way brought something, and it waits here
            await eventually(lambda: reader.core.open > 0)
            assert (len(seen), len(lanes), consumer.is_paused) == (1, 1, True)
            consumer.resume()
            await eventually(lambda: len(seen) == 20)
            assert (seen, consumer.lanes) == ([b"%d" % number for number in range(20)], lanes)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_loop_over_an_ordered_subject_gets_nothing_while_it_is_paused(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("o", order=Order.STRICT, logical_partitions=8)
        )
        await mq.send_many("o", [b"%d" % number for number in range(9)], keys=["k"] * 9)
        async with mq.ordered_consumer("o", "g") as consumer:
            assert (await anext(consumer)).body == b"0"
            consumer.pause()
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(consumer), SHORT.total_seconds())
            consumer.resume()
            assert [(await anext(consumer)).body for _ in range(8)] == [
                b"%d" % number for number in range(1, 9)
            ]


async def test_an_ordered_subject_is_paused_and_resumed_by_operators(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("o", order=Order.STRICT, logical_partitions=8)
        )
        await mq.metadata.pause_group("o", "g", reason="before it ever came")
        async with mq.ordered_consumer("o", "g") as consumer:
            await mq.send("o", b"0", key="k")
            waiting = asyncio.create_task(consumer.pull(1))
            await eventually(lambda: len(consumer.lanes) == 1)
            (group,) = (await mq.metadata.describe_route("o")).groups
            (holder,) = group.partitions[0].holders
            assert (group.is_paused, holder.is_paused, holder.client, waiting.done()) == (
                True,
                True,
                mq.name,
                False,
            )
            await mq.metadata.resume_group("o", "g")
            found = await waiting
            assert found.bodies == [b"0"]
            await found.ack_sync()
            (group,) = (await mq.metadata.describe_route("o")).groups
            assert not group.is_paused


def _consume(
    address: str, seen: list[bytes], paused: threading.Event, resumed: threading.Event
) -> None:
    with qmq.blocking.connect(address, name="box") as mq, mq.consumer("s", "g") as consumer:
        consumer.pause()
        mq.pause()
        mq.resume()
        assert (mq.is_paused, consumer.is_paused) == (False, True)
        assert not consumer.pull(1, SHORT)
        paused.set()
        assert resumed.wait(30)
        consumer.resume()
        seen += [message.body for message in consumer.pull(1)]


async def test_the_client_without_asyncio_pauses_and_resumes_too(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("s", b"0")
    seen, paused, resumed = list[bytes](), threading.Event(), threading.Event()
    consuming = asyncio.create_task(
        asyncio.to_thread(_consume, node.address, seen, paused, resumed)
    )
    await eventually(lambda: paused.is_set() or consuming.done())
    assert seen == []
    resumed.set()
    await consuming
    assert seen == [b"0"]


async def test_a_client_has_the_name_it_was_given_or_that_of_its_process() -> None:
    async with (
        qmq.connect("localhost:1", name="billing-7") as given,
        qmq.connect("localhost:1") as one,
    ):
        assert given.name == "billing-7"
        assert check_name("client", one.name).endswith(f"-{os.getpid()}")
    for name in ("a/b", "x" * 200):
        with pytest.raises(InvalidName):
            qmq.connect("localhost:1", name=name)
