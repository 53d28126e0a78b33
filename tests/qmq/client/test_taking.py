"""Consumers for who asks now and then: `OrderedConsumer.take`, `OrderedMessage.reject`,
`Consumer.pause_and_return`, and `GroupReading` over both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import qmq
from qmq.client.group_reading import reading_of
from qmq.errors import InvalidArgument
from qmq.testing import TestCluster

AT_ONCE = timedelta(0)


@pytest.fixture
async def mq() -> AsyncIterator[qmq.Client]:
    async with TestCluster(delay=False) as cluster:
        found = cluster.client()
        await found.metadata.create_subject(
            qmq.SubjectConfig("s", order=qmq.Order.STRICT, logical_partitions=16)
        )
        yield found


@pytest.mark.sampled
async def test_one_message_of_each_key_is_taken_until_it_is_settled(mq: qmq.Client) -> None:
    await mq.send_many("s", [b"a1", b"a2", b"b1"], keys=["a", "a", "b"])
    async with mq.ordered_consumer("s", "g", ack="explicit") as consumer:
        taken = await consumer.take(10)
        while len(taken) < 2:
            taken += await consumer.take(10)
        assert sorted(each.body for each in taken) == [b"a1", b"b1"]
        assert await consumer.take(10, AT_ONCE) == []
        for each in taken:
            await each.ack()
        assert [each.body for each in await consumer.take(10)] == [b"a2"]
        with pytest.raises(InvalidArgument):
            await consumer.take(0)


async def test_a_rejected_message_is_a_parked_key_and_not_tried_again(mq: qmq.Client) -> None:
    await mq.send_many("s", [b"a1", b"a2", b"b1"], keys=["a", "a", "b"])
    async with mq.ordered_consumer("s", "g", ack="explicit") as consumer:
        bodies = []
        while b"b1" not in bodies or b"a1" not in bodies:
            for each in await consumer.take(10):
                bodies.append(each.body)
                if each.key == "a":
                    each.reject("no use")
                else:
                    await each.ack()
        assert sorted(bodies) == [b"a1", b"b1"]
        while not (parked := list(await mq.metadata.parked("s", "g"))):
            pass
        assert [each.key for each in parked] == [b"a"]
        assert await consumer.take(10, AT_ONCE) == []


async def test_a_released_message_comes_again_with_the_same_attempt_before_later_ones(
    mq: qmq.Client,
) -> None:
    await mq.send_many("s", [b"a1", b"a2"], keys=["a", "a"])
    async with mq.ordered_consumer("s", "g", ack="explicit") as consumer:
        (message,) = await consumer.take(10)
        message.release()
        (again,) = await consumer.take(10)
        assert (again.body, again.attempt) == (b"a1", 1)
        again.fail(AT_ONCE)
        (failed,) = await consumer.take(10)
        failed.release()
    async with mq.ordered_consumer("s", "g", ack="explicit") as other:
        (last,) = await other.take(10)
        assert (last.body, last.attempt) == (b"a1", 2)
        await last.ack()


@pytest.mark.sampled
async def test_who_rests_leaves_unseen_messages_to_others_and_keeps_what_it_has(
    mq: qmq.Client,
) -> None:
    await mq.send_many("u", [b"%d" % number for number in range(100)])
    async with (
        mq.consumer("u", "g", ack="explicit") as resting,
        mq.consumer("u", "g", ack="explicit") as other,
    ):
        mine = await resting.pull(1)
        resting.pause_and_return()
        seen: list[bytes] = []
        while len(seen) < 99:
            found = await other.pull(100)
            seen += found.bodies
            assert all(each.attempt == 1 for each in found)
            await found.ack()
        assert {*seen, *mine.bodies} == {b"%d" % number for number in range(100)}
        await mine.ack_sync()
        resting.resume()
        await mq.send("u", b"more")
        assert (await resting.pull(1)).bodies == [b"more"] or (
            await other.pull(1, AT_ONCE)
        ).bodies == [b"more"]


async def test_a_group_that_begins_at_latest_gets_what_is_sent_after_it_joined(
    mq: qmq.Client,
) -> None:
    await mq.send("s", b"before", key="k")
    async with mq.ordered_consumer("s", "g", ack="explicit", start="latest") as consumer:
        await consumer.join()
        await consumer.join()
        await mq.send("s", b"after", key="k")
        (found,) = await consumer.take(10)
        assert found.body == b"after"
        await found.ack()


@pytest.mark.parametrize("subject", ["plain", "s"], ids=["unordered", "ordered"])
async def test_a_reading_hands_out_messages_of_either_kind_and_gives_them_back(
    mq: qmq.Client, subject: str
) -> None:
    await mq.send_many(subject, [b"1", b"2"], keys=["a", "b"])
    reading = await reading_of(mq, subject, "g")
    taken = list(await reading.receive(10, 20))
    while len(taken) < 2:
        taken += await reading.receive(10, 20)
    assert (sorted(each.body for each in taken), reading.unsettled) == ([b"1", b"2"], 2)
    for each in taken:
        each.release()
        reading.settled()
    again = list(await reading.receive(10, 20))
    while len(again) < 2:
        again += await reading.receive(10, 20)
    assert [each.attempt for each in again] == [1, 1]
    for each in again:
        await each.ack_sync()
        reading.settled()
    reading.idle()
    assert (list(await reading.receive(10, 0)), reading.unsettled) == ([], 0)
    await reading.close()


async def test_a_reading_has_more_in_hand_than_a_consumer_prefetches(mq: qmq.Client) -> None:
    count = 2_500
    await mq.send_many("plain", [b"x"] * count)
    reading = await reading_of(mq, "plain", "g")
    taken: list[object] = []
    while len(taken) < count:
        found = await reading.receive(1_000, 20)
        assert found, f"{len(taken)} of {count} came"
        taken += found
    assert reading.unsettled == count
    await reading.close()
