"""How many of the client's functions run for a message, by path. Ceilings, so that the numbers grow
only on purpose: unlike times, they are the same on every machine. The two ceilings of a path are
for the compiled part and for the Python form.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from support import node_config, running

import qmq
from qmq.client.consuming import IS_COMPILED

CLIENT = str(Path(qmq.__file__).parent / "client") + "/"
TASKS, SENDS = 100, 20
MESSAGES = 2_000


@contextmanager
def calls_of_the_client() -> Iterator[Counter[str]]:
    """The client's functions that are called in this thread, by qualified name. A generator counts
    each time it is resumed.
    """
    found: Counter[str] = Counter()

    def called(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(CLIENT):
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


def per_message(calls: Counter[str], messages: int) -> str:
    """For a reader of a failure."""
    return ", ".join(f"{name} {count / messages:.1f}" for name, count in calls.most_common(25))


@pytest.fixture
async def mq(tmp_path: Path) -> AsyncIterator[qmq.Client]:
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as client:
        await client.send_many("s", [b"x"] * MESSAGES)
        yield client


async def test_an_awaited_send_of_many_tasks_takes_at_most_15_calls(mq: qmq.Client) -> None:
    async def send(messages: int) -> None:
        for _ in range(messages):
            await mq.send("s", b"x")

    await asyncio.gather(*[send(2) for _ in range(TASKS)])
    with calls_of_the_client() as calls:
        await asyncio.gather(*[send(SENDS) for _ in range(TASKS)])
    messages = TASKS * SENDS
    assert calls.total() <= 15 * messages, per_message(calls, messages)


async def test_an_awaited_send_of_one_task_takes_at_most_36_calls(mq: qmq.Client) -> None:
    async def send(messages: int) -> None:
        for _ in range(messages):
            await mq.send("s", b"x")

    await send(50)
    with calls_of_the_client() as calls:
        await send(MESSAGES)
    assert calls.total() <= 36 * MESSAGES, per_message(calls, MESSAGES)


async def test_a_message_of_a_loop_with_automatic_ack_takes_half_a_call_or_five(
    mq: qmq.Client,
) -> None:
    left = MESSAGES
    async with mq.consumer("s", "g") as consumer:
        await anext(consumer)
        with calls_of_the_client() as calls:
            async for _ in consumer:
                left -= 1
                if left == 1:
                    break
    assert calls.total() <= (0.5 if IS_COMPILED else 5) * MESSAGES, per_message(calls, MESSAGES)


async def test_an_explicit_ack_takes_one_more_call(mq: qmq.Client) -> None:
    left = MESSAGES
    async with mq.consumer("s", "g", ack="explicit") as consumer:
        await anext(consumer)
        with calls_of_the_client() as calls:
            async for message in consumer:
                await message.ack()
                left -= 1
                if left == 1:
                    break
    assert calls.total() <= (1.5 if IS_COMPILED else 6) * MESSAGES, per_message(calls, MESSAGES)


async def test_a_message_of_a_batch_takes_one_call(mq: qmq.Client) -> None:
    async with mq.consumer("s", "g") as consumer:
        found = await consumer.pull(MESSAGES)
        with calls_of_the_client() as calls:
            bodies = [message.body for message in found]
    assert bodies == found.bodies
    assert calls.total() <= len(bodies) + 10, per_message(calls, len(bodies))


async def test_a_message_of_a_listener_takes_at_most_3_calls_or_6(mq: qmq.Client) -> None:
    left = MESSAGES

    async def handle(body: bytes) -> None:
        nonlocal left
        left -= 1
        if not left:
            mq.stop()

    mq.listen("s", handle, "g")
    with calls_of_the_client() as calls:
        await mq.run()
    assert calls.total() <= (3 if IS_COMPILED else 6) * MESSAGES, per_message(calls, MESSAGES)


async def test_senders_that_wait_for_room_do_not_cost_more_the_more_they_are(
    mq: qmq.Client,
) -> None:
    async def calls_a_message(senders: int) -> float:
        with calls_of_the_client() as calls:
            await asyncio.gather(*[mq.send("s", bytes(20_000)) for _ in range(senders)])
        return calls.total() / senders

    await calls_a_message(300)
    few, many = await calls_a_message(300), await calls_a_message(2_400)
    assert many < 2.5 * few, (
        f"{few:.0f} calls a message with 300 senders, and {many:.0f} with eight times as many"
    )
