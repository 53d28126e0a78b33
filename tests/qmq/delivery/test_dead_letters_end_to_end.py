"""Failing messages against a real node, over TCP: retried, and in the group's dead-letter queue in
the end.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest

import qmq
from qmq.errors import InvalidArgument
from qmq.model import dead_letter_subject
from qmq.node.dev_node import Node

NOW = timedelta(0)
SOON = timedelta(seconds=10)


async def letters(mq: qmq.Client, group: str, count: int) -> list[qmq.Message]:
    """The first ones of a group's dead-letter queue."""
    found: list[qmq.Message] = []
    async with mq.consumer(
        dead_letter_subject(group), "looks", ack="explicit", prefetch=10_000
    ) as consumer:
        while len(found) < count:
            got = list(await consumer.pull(count, wait=SOON))
            assert got, f"{len(found)} of {count} dead letters came"
            found += got
    return found


async def test_a_message_that_fails_five_times_becomes_a_complete_dead_letter(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        receipt = await mq.send("orders", b"bad", key="k1", tags=["eu"], headers={"trace": "t"})
        await mq.send("orders", b"good")
        seen = Counter[bytes]()
        async with mq.consumer("orders", "billing", ack="explicit") as consumer:
            while seen[b"bad"] < 5 or not seen[b"good"]:
                message = await anext(consumer)
                seen[message.body] += 1
                assert message.attempt == seen[message.body]
                if message.body == b"bad":
                    message.nack(NOW, error=f"failed {message.attempt} times")
                else:
                    await message.ack_sync()
            (letter,) = await letters(mq, "billing", 1)
            assert len(await consumer.pull(wait=timedelta(milliseconds=100))) == 0
        assert (letter.body, letter.key, letter.tags) == (b"bad", "k1", ("eu",))
        assert letter.id == receipt.id
        own = dict(letter.headers)
        assert int(own.pop("qmq-dead-ms")) >= letter.create_time_ms
        assert own == {
            "trace": b"t",
            "qmq-subject": b"orders",
            "qmq-sequence": b"0",
            "qmq-group": b"billing",
            "qmq-attempt": b"5",
            "qmq-error": b"failed 5 times",
        }


async def test_a_rejected_message_is_dead_at_once_and_other_groups_still_get_it(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("orders", b"poison")
        async with mq.consumer("orders", "billing", ack="explicit") as consumer:
            (await anext(consumer)).reject("no JSON")
            (letter,) = await letters(mq, "billing", 1)
        assert (letter.headers["qmq-error"], letter.headers["qmq-attempt"]) == (b"no JSON", b"1")
        async with mq.consumer("orders", "audit", ack="explicit") as other:
            assert (await anext(other)).body == b"poison"


async def test_thousands_of_dead_messages_are_each_copied_once_in_order_of_death(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send_many("orders", [b"%d" % number for number in range(3_000)])
        async with mq.consumer("orders", "billing", ack="explicit", prefetch=5_000) as consumer:
            left = 3_000
            while left:
                found = await consumer.pull(700)
                left -= len(found)
                found.reject("all of them")
            found = await letters(mq, "billing", 3_000)
        assert [letter.body for letter in found] == [b"%d" % number for number in range(3_000)]
        assert len({letter.id for letter in found}) == 3_000


async def test_messages_of_a_dead_letter_queue_never_die_again(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.set_group_settings("*", "alerts", retry_delays_ms=[0])
        await mq.send("orders", b"poison")
        async with mq.consumer("orders", "billing", ack="explicit") as consumer:
            (await anext(consumer)).reject("first death")
            async with mq.consumer(
                dead_letter_subject("billing"), "alerts", ack="explicit"
            ) as alerts:
                for attempt in range(1, 9):
                    letter = await anext(alerts)
                    assert letter.attempt == attempt
                    letter.nack(NOW, error="cannot mail")
                (await anext(alerts)).reject("never mind")
                assert (await anext(alerts)).attempt == 10
        assert [queue.group for queue in await mq.metadata.dead_letter_queues()] == ["billing"]


async def test_applications_cannot_write_to_a_dead_letter_queue_or_create_one(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        with pytest.raises(InvalidArgument, match="only brokers write to dead-letter queues"):
            await mq.send(dead_letter_subject("billing"), b"x")
        assert not node.broker.store.queues
        with pytest.raises(InvalidArgument, match="brokers create it"):
            await mq.metadata.create_subject(qmq.SubjectConfig(dead_letter_subject("billing")))
