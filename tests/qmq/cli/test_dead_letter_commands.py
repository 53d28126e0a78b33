"""`qmq dlq` on messages, against a real node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
from support import eventually
from typer.testing import CliRunner

import qmq
from qmq.cli.app import app
from qmq.cli.dlq import chosen_by
from qmq.client.dead_letters import DeadLetter, columns_of, parts_of
from qmq.errors import InvalidArgument, UnknownSubject
from qmq.model import MessageId
from qmq.node.dev_node import Node
from qmq.testing import TestCluster, virtual


async def said(node: Node, *words: str) -> Any:
    """The JSON that a command prints. The command runs in another event loop."""
    result = await asyncio.to_thread(
        CliRunner().invoke, app, [*words, "--json", "--server", node.address]
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def die(mq: qmq.Client, subject: str, bodies: Sequence[bytes], error: str) -> list[str]:
    ids = [
        str((await mq.send(subject, body, key="k", headers={"trace": "t"})).id) for body in bodies
    ]
    async with mq.consumer(subject, "billing", ack="explicit") as consumer:
        for _ in bodies:
            (await anext(consumer)).reject(error)
    return ids


async def test_dead_letters_are_listed_shown_replayed_and_purged_as_they_are_chosen(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        assert await said(node, "dlq", "list") == []
        first = await die(mq, "orders", [b"a", b"b"], "no such customer")
        await die(mq, "payments", [b"c"], "card expired")

        async def dead_letters() -> int:
            return sum(each.waiting for each in await mq.metadata.dead_letter_queues("billing"))

        while await dead_letters() < 3:
            pass
        (queue,) = await said(node, "dlq", "list")
        assert (queue["group"], queue["messages"], queue["waiting"]) == ("billing", 3, 3)
        shown = await said(node, "dlq", "show", "billing")
        assert [
            (each["body"], each["subject"], each["error"], each["attempts"]) for each in shown
        ] == [
            ("a", "orders", "no such customer", 1),
            ("b", "orders", "no such customer", 1),
            ("c", "payments", "card expired", 1),
        ]
        assert shown[0]["id"] == first[0]
        assert shown[0]["key"] == "k"
        assert shown[0]["headers"] == {"trace": "t"}
        assert [
            each["body"]
            for each in await said(node, "dlq", "show", "billing", "--subject", "payments")
        ] == ["c"]
        assert await said(node, "dlq", "replay", "billing", "--id", first[1], "--dry-run") == [
            {"group": "billing", "messages": 1}
        ]
        assert await said(node, "dlq", "replay", "billing", "--id", first[1]) == [
            {"group": "billing", "messages": 1}
        ]
        async with mq.consumer("orders", "billing", ack="explicit") as consumer:
            again = await anext(consumer)
            assert again.body == b"b"
            assert str(again.id) == first[1]
            assert again.attempt == 1
            assert again.headers["trace"] == b"t"
            await again.ack_sync()
        assert await said(node, "dlq", "purge", "billing", "--error", "expired") == [
            {"group": "billing", "messages": 1}
        ]
        assert [each["body"] for each in await said(node, "dlq", "show", "billing")] == ["a"]
        assert await said(node, "dlq", "purge", "billing") == [{"group": "billing", "messages": 1}]
        assert await said(node, "dlq", "show", "billing") == []
        (queue,) = await said(node, "dlq", "list", "billing")
        assert (queue["messages"], queue["waiting"]) == (3, 0)


async def test_the_oldest_letter_has_an_age_before_anybody_has_read_the_queue() -> None:
    async with TestCluster(clock=virtual()) as cluster:
        mq = cluster.client()
        await die(mq, "orders", [b"1"], "no")
        await eventually(lambda: mq.metadata.dead_letter_queues("billing"))
        await cluster.clock.advance(hours=1)
        (found,) = await mq.metadata.dead_letter_queues("billing")
        assert found.oldest_ago_ms >= 3_600_000


async def test_no_other_group_sees_a_replayed_message(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await die(mq, "orders", [b"a"], "no")
        async with mq.consumer("orders", "audit", ack="explicit") as audit:
            await (await anext(audit)).ack_sync()
            while not await mq.dead_letters("billing").replay():
                pass
            await mq.send("orders", b"next")
            assert (await anext(audit)).body == b"next"


def letter(**given: Any) -> DeadLetter:
    found = {
        "group": "g",
        "subject": "s",
        "broker_group": "b",
        "sequence": 1,
        "id": MessageId(1, 2, 3),
        "attempts": 5,
        "error": "boom",
        "dead_ms": 1_000,
        "create_time_ms": 1,
        "key": None,
        "tags": (),
        "headers": {},
        "body": b"",
        "letter_sequence": 0,
    }
    return DeadLetter(**{**found, **given})


def test_all_that_is_given_must_hold_for_a_letter_to_be_chosen() -> None:
    chosen = chosen_by("s", [str(MessageId(1, 2, 3))], "oo", datetime(1970, 1, 1, 0, 0, 1))
    assert chosen(letter())
    others = ({"subject": "t"}, {"id": MessageId(1, 2, 4)}, {"error": "none"}, {"dead_ms": 999})
    assert not any(chosen(letter(**each)) for each in others)


def test_an_invalid_message_id_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="32 hexadecimal digits"):
        chosen_by("", ["abc"], "", None)


async def test_a_subject_that_takes_no_messages_does_not_double_the_letters_of_others(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await die(mq, "good", [b"a"], "no")
        await die(mq, "gone", [b"b"], "no")
        letters = mq.dead_letters("billing")
        send = letters.send_directed

        async def refused(subject: str, columns: Any, create_time_ms: int) -> None:
            if subject == "gone":
                raise UnknownSubject("it was deleted (in this test)")
            await send(subject, columns, create_time_ms)

        letters.send_directed = refused
        while sum(each.waiting for each in await letters.describe()) < 2:
            pass
        for _ in range(3):
            with pytest.raises(UnknownSubject):
                await letters.replay()
        async with mq.consumer("good", "billing", ack="explicit") as consumer:
            assert [message.body for message in await consumer.pull(10)] == [b"a"]
        assert [each.subject for each in await letters.show()] == ["gone"]


def test_letters_are_sent_with_the_time_at_which_each_was_created() -> None:
    columns, first = columns_of([letter(create_time_ms=2_000), letter(create_time_ms=1_000)], "g")
    assert (first, columns.create_deltas) == (1_000, [1_000, 0])
    apart = [
        (number, letter(create_time_ms=created)) for number, created in enumerate((1, 1 << 40, 2))
    ]
    assert [[number for number, _ in part] for part in parts_of(apart)] == [[0, 2], [1]]
