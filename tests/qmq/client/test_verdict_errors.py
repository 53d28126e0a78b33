"""A failure is reported with its reason. The broker, not the client, knows delays and limits. The
client tells it that work on a failed message has started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from fake_cluster import DelayCluster, FakeQueue, delay_cluster
from support import eventually

import qmq
from qmq import blocking
from qmq.client.consuming.acks import AckBatch, in_frames
from qmq.errors import InvalidArgument
from qmq.limits import REQUEUE_MS_MAX
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import (
    BY_GROUP_MS,
    ERROR_CHARS_MAX,
    Settlement,
    Verdict,
    pack_settle,
    unpack_settle,
)

NACK, DEAD, ACK = Verdict.NACK, Verdict.DEAD, Verdict.ACK
LONG = timedelta(days=3)


@pytest.fixture
async def it() -> AsyncIterator[DelayCluster]:
    async with delay_cluster() as found:
        yield found


@pytest.fixture
def queue(it: DelayCluster) -> FakeQueue:
    return FakeQueue(it.groups[0], attempts_max=3)


async def taken(
    it: DelayCluster, queue: FakeQueue, bodies: list[bytes], *attempts: int
) -> qmq.Messages:
    consumer = it.mq.consumer("s", "g", ack="explicit")
    pulling = asyncio.create_task(consumer.pull(100))
    await queue.deliver(bodies, *attempts)
    return await pulling


# --- errors ---------------------------------------------------------------------------------------


async def test_failed_and_rejected_messages_carry_their_reason(
    it: DelayCluster, queue: FakeQueue
) -> None:
    found = await taken(it, queue, [b"0", b"1", b"2", b"3"])
    found[0].nack(error="no seat")
    found[1].nack(timedelta(seconds=2), ValueError("no such flight"))
    found[2].reject(KeyError())
    found[3].reject("spam")
    await eventually(lambda: len(queue.settled) == 4)
    assert queue.settled == [
        Settlement(0, 0, NACK, BY_GROUP_MS, "no seat"),
        Settlement(1, 1, NACK, 2000, "ValueError: no such flight"),
        Settlement(2, 2, DEAD, 0, "KeyError"),
        Settlement(3, 3, DEAD, 0, "spam"),
    ]


async def test_messages_that_fail_together_share_one_reason(
    it: DelayCluster, queue: FakeQueue
) -> None:
    consumer = it.mq.consumer("s", "g", ack="explicit")
    pulling = asyncio.create_task(consumer.pull(2))
    await queue.deliver([b"0", b"1", b"2", b"3"], 1, 2, 1, 2)
    (await pulling).nack(error="down")
    (await consumer.pull(2)).reject(OSError("gone"))
    await eventually(lambda: len(queue.settled) == 2)
    assert queue.settled == [
        Settlement(0, 1, NACK, BY_GROUP_MS, "down"),
        Settlement(2, 3, DEAD, 0, "OSError: gone"),
    ]


@pytest.mark.parametrize("error", ["x" * 5000, "\udcff" * 1001, "\N{SNOWMAN}" * 1000])
async def test_any_text_can_be_sent(it: DelayCluster, queue: FakeQueue, error: str) -> None:
    (message,) = await taken(it, queue, [b"0"])
    message.nack(error=error)
    await eventually(lambda: bool(queue.settled))
    (settled,) = queue.settled
    assert len(settled.error) == ERROR_CHARS_MAX
    assert settled.error[0] == {"x": "x", "\udcff": "?"}.get(error[0], "\N{SNOWMAN}")


async def test_an_invalid_error_text_is_refused_and_the_message_stays(
    it: DelayCluster, queue: FakeQueue
) -> None:
    found = await taken(it, queue, [b"0"])
    with pytest.raises(InvalidArgument, match="str or an exception"):
        found.nack(error=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="str or an exception"):
        found[0].reject(None)  # type: ignore[arg-type]
    await found.ack_sync()
    assert queue.settled == [Settlement(0, 0, ACK, 0)]


async def test_an_exception_that_ends_the_loop_is_why_its_message_failed(
    it: DelayCluster, queue: FakeQueue
) -> None:
    async def work() -> None:
        async with it.mq.consumer("s", "g") as consumer:
            async for message in consumer:
                if message.body == b"1":
                    raise RuntimeError("broken engine")

    working = asyncio.create_task(work())
    await queue.deliver([b"0", b"1", b"2"])
    with pytest.raises(RuntimeError):
        await working
    assert queue.settled == [
        Settlement(0, 0, ACK, 0),
        Settlement(1, 1, NACK, BY_GROUP_MS, "RuntimeError: broken engine"),
        Settlement(2, 2, Verdict.RELEASE, 0),
    ]


async def test_a_loop_that_is_left_or_cancelled_hands_its_message_back_at_once(
    it: DelayCluster, queue: FakeQueue
) -> None:
    async with it.mq.consumer("s", "g") as consumer:
        following = asyncio.create_task(anext(consumer))
        await queue.deliver([b"0"])
        await following
    async with it.mq.consumer("s", "g") as consumer:
        following = asyncio.create_task(anext(consumer))
        await queue.deliver([b"1"])
        await following
        await consumer.close(asyncio.CancelledError())
    assert [each[:4] for each in queue.settled] == [(0, 0, NACK, 0), (1, 1, NACK, 0)]
    assert [each.error for each in queue.settled] == ["the consumer was closed", "CancelledError"]


async def test_scripts_say_why_too(it: DelayCluster, queue: FakeQueue) -> None:
    def work() -> None:
        with blocking.connect(it.meta.address) as mq:
            with mq.consumer("s", "g", ack="explicit") as consumer:
                found = consumer.pull(10)
                consumer.nack(found[0], error="late")
                consumer.reject(found[1], ValueError("bad"))
            with pytest.raises(RuntimeError), mq.consumer("s", "g") as consumer:
                for _ in consumer:
                    raise RuntimeError("out of paper")

    working = asyncio.create_task(asyncio.to_thread(work))
    await queue.deliver([b"0", b"1"])
    await eventually(lambda: queue.detached == 1)
    await queue.deliver([b"2"])
    await working
    assert queue.settled == [
        Settlement(0, 0, NACK, BY_GROUP_MS, "late"),
        Settlement(1, 1, DEAD, 0, "ValueError: bad"),
        Settlement(2, 2, NACK, BY_GROUP_MS, "RuntimeError: out of paper"),
    ]


def test_verdicts_are_joined_only_if_they_say_the_same() -> None:
    collected = AckBatch()
    for pull, error in enumerate(("a", "a", "b", "", "")):
        collected.add(pull, pull, NACK, 5, error)
    assert collected.take() == [
        Settlement(0, 1, NACK, 5, "a"),
        Settlement(2, 2, NACK, 5, "b"),
        Settlement(3, 4, NACK, 5),
    ]


def test_many_long_errors_leave_in_frames_of_bounded_size() -> None:
    settlements = [
        Settlement(pull, pull, NACK, 0, "\N{SNOWMAN}" * (pull % 1001)) for pull in range(50_000)
    ]
    parts = list(in_frames(settlements))
    assert [each for part in parts for each in part] == settlements
    assert max(len(pack_settle(1, part)) for part in parts) < 2 << 20
    assert unpack_settle(pack_settle(1, parts[0])) == (1, parts[0])
    assert list(in_frames([])) == []


# --- the last attempt -----------------------------------------------------------------------------


async def test_what_failed_for_the_last_time_is_not_delayed_for_days(
    it: DelayCluster, queue: FakeQueue
) -> None:
    found = await taken(it, queue, [b"0", b"1", b"2"], 2, 3, 4)
    found.nack(LONG, "no")
    await eventually(lambda: len(queue.settled) == 2)
    dies, comes_again = sorted(queue.settled, reverse=True)
    assert dies == Settlement(1, 2, NACK, REQUEUE_MS_MAX, "no"), "the broker sees to it"
    assert comes_again == Settlement(0, 0, ACK, 0)
    assert [each.body for each in it.kept] == [b"0"]


async def test_without_a_limit_everything_may_be_delayed_for_days(it: DelayCluster) -> None:
    queue = FakeQueue(it.groups[0])
    found = await taken(it, queue, [b"0"], 99)
    found.nack(LONG)
    await eventually(lambda: bool(queue.settled))
    assert queue.settled == [Settlement(0, 0, ACK, 0)]


# --- work that begins -----------------------------------------------------------------------------


async def test_the_broker_learns_which_failed_messages_are_worked_on_and_no_others(
    it: DelayCluster, queue: FakeQueue
) -> None:
    consumer = it.mq.consumer("s", "g", ack="explicit")
    pulling = asyncio.create_task(consumer.pull(2))
    await queue.deliver([b"0", b"1", b"2", b"3"], 1, 2, 3, 2)
    assert (await pulling).bodies == [b"0", b"1"]
    await eventually(lambda: bool(queue.begun))
    assert queue.begun == [(1, 1, 1)], "2 and 3 were prefetched, nobody saw them"
    await consumer.pull(1)
    await eventually(lambda: len(queue.begun) == 2)
    assert queue.begun[1] == (1, 2, 2)


async def test_the_broker_hears_begun_before_the_verdict(
    it: DelayCluster, queue: FakeQueue
) -> None:
    found = await taken(it, queue, [b"0"], 2)
    await found.ack_sync()
    assert [kind for kind in queue.frames if kind != FrameKind.PULL] == [
        FrameKind.ATTACH,
        FrameKind.BEGUN,
        FrameKind.SETTLE,
    ]


async def test_begun_is_on_its_way_before_the_application_runs_on(
    it: DelayCluster, queue: FakeQueue
) -> None:
    consumer = it.mq.consumer("s", "g", ack="explicit")
    heard: list[int] = []

    async def handler() -> None:
        await consumer.pull(1)
        (attachment,) = consumer.attachments
        assert attachment.session is not None
        stream = attachment.session.connection.stream
        before = stream.taken_bytes
        stream.flush()
        heard.append(stream.taken_bytes - before)

    working = asyncio.create_task(handler())
    await queue.deliver([b"0"], 2)
    await working
    await eventually(lambda: bool(queue.begun))
    assert heard == [0], (
        "written, and not kept for the end of the loop's round: the handler may end the process"
    )


async def test_at_most_once_nothing_is_begun(it: DelayCluster, queue: FakeQueue) -> None:
    consumer = it.mq.consumer("s", "g", consume_most_once=True)
    following = asyncio.create_task(anext(consumer))
    await queue.deliver([b"0"], 2)
    await following
    assert FrameKind.BEGUN not in queue.frames


async def test_without_a_session_the_application_gets_its_messages_all_the_same(
    it: DelayCluster, queue: FakeQueue
) -> None:
    consumer = it.mq.consumer("s", "g", ack="explicit")
    pulling = asyncio.create_task(consumer.pull(1))
    await queue.deliver([b"0", b"1"], 2, 2)
    await pulling
    (group,) = it.groups
    for replica in group.replicas:
        await replica.stop()
    await eventually(lambda: consumer.attachments[0].session is None)
    assert (await consumer.pull(1)).bodies == [b"1"]
    assert len(queue.begun) <= 1
