"""Each dead letter is replayed once, wherever earlier replays ended (docs/DELIVERY.md)."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from support import forms

import qmq
from qmq.client.dead_letters import DeadLetter
from qmq.errors import InvalidArgument, NotConnected
from qmq.model import MessageId
from qmq.node.dev_node import Node
from qmq.operations.letters import LetterEdit

REPLAYING = """
import asyncio, sys, qmq

async def main(address, group):
    async with qmq.connect(address, state_dir=False) as mq:
        count = await mq.dead_letters(group).replay(progress=lambda done: print(done, flush=True), per_second=0)
    print("end", count, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""  # noqa: E501
"""Replays the dead letters of a group until it is killed, and prints how many are done."""


async def died(
    mq: qmq.Client, bodies: list[bytes], subject: str = "orders", error: str = "no"
) -> None:
    """Messages that group billing gave up."""
    await mq.send_many(subject, bodies)
    async with mq.consumer(subject, "billing", ack="explicit", prefetch=20_000) as consumer:
        left = len(bodies)
        while left:
            found = await consumer.pull(1_000)
            found.reject(error)
            left -= len(found)
    await until_waiting(mq, len(bodies))


async def until_waiting(mq: qmq.Client, count: int) -> None:
    while await waiting(mq) != count:
        await asyncio.sleep(0.01)


async def waiting(mq: qmq.Client) -> int:
    return sum(each.waiting for each in await mq.dead_letters("billing").describe())


async def copies(mq: qmq.Client, subject: str = "orders") -> Counter[bytes]:
    """How often each message was sent to the group again."""
    return Counter(
        [message.body async for message in mq.dead_letters("billing").read_directed(subject, 0, {})]
    )


def killed_at(address: str, done: int) -> None:
    """A replay in a separate process, killed with SIGKILL as soon as it has reported so many
    letters.
    """
    command = [sys.executable, "-c", REPLAYING, address, "billing"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("end") or int(line) >= done:
                break
        process.kill()


@pytest.mark.sampled  # each kill waits for the lease of the process that was killed
async def test_letters_are_replayed_each_once_by_processes_that_are_killed(node: Node) -> None:
    bodies = [b"%05d" % number for number in range(5_000)]
    chance = random.Random(forms.SEED)
    async with qmq.connect(node.address) as mq:
        await died(mq, bodies)
        for _ in range(2):
            await asyncio.to_thread(killed_at, node.address, chance.randrange(1, 1_500))
        while await waiting(mq):
            await mq.dead_letters("billing").replay()
        assert await copies(mq) == Counter(bodies)
        async with mq.consumer("orders", "billing") as consumer:
            handled = [(await anext(consumer)).body for _ in bodies]
        assert sorted(handled) == bodies


async def test_a_letter_that_was_sent_and_not_settled_is_settled_and_not_sent_again(
    node: Node,
) -> None:
    """The replay ends between sending and settling: the message is stored, and the dead-letter
    queue has no verdict.
    """
    async with qmq.connect(node.address) as mq:
        await died(mq, [b"a", b"b", b"c"])
        letters = mq.dead_letters("billing")
        send = letters.send_directed

        async def cut_off(*batch: object) -> None:
            await send(*batch)  # type: ignore[arg-type]
            raise NotConnected("the answer was lost (in this test)")

        letters.send_directed = cut_off
        with pytest.raises(NotConnected):
            await letters.replay(messages_max=2)
        assert await waiting(mq) == 3
        assert await mq.dead_letters("billing").replay() == 1
        assert await copies(mq) == Counter([b"a", b"b", b"c"])
        assert await waiting(mq) == 0


async def test_a_message_that_dies_again_after_its_replay_is_another_letter(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await died(mq, [b"a"])
        for times in (1, 2):
            assert await mq.dead_letters("billing").replay() == 1
            async with mq.consumer("orders", "billing", ack="explicit") as consumer:
                (await anext(consumer)).reject("again")
            await until_waiting(mq, 1)
            assert await copies(mq) == Counter({b"a": times})


async def test_dead_letters_of_two_groups_with_the_same_messages_differ(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await died(mq, [b"a"])
        async with mq.consumer("orders", "shipping", ack="explicit") as consumer:
            (await anext(consumer)).reject("no")
        while not await mq.dead_letters("shipping").replay():
            pass
        assert await mq.dead_letters("billing").replay() == 1


async def test_letters_are_sent_as_they_were_edited_and_stay_the_same_messages(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await died(mq, [b'{"card": "expired", "total": 5}'])
        (letter,) = await mq.dead_letters("billing").show()
        edit = LetterEdit.parse(["card=renewed"])
        assert await mq.dead_letters("billing").replay(edit=edit.of) == 1
        async with mq.consumer("orders", "billing") as consumer:
            message = await anext(consumer)
        assert (message.json(), message.id) == ({"card": "renewed", "total": 5}, letter.id)


# --- edits ----------------------------------------------------------------------------------------

LETTER = DeadLetter(
    "billing",
    "orders",
    "b",
    1,
    MessageId(1, 2, 3),
    5,
    "no",
    1,
    1,
    b"k",
    (),
    {},
    b'{"a": {"b": 1}, "list": [1], "card": "4111"}',
    7,
)


@pytest.mark.parametrize(
    ("fields", "removed", "body"),
    [
        (["a.b=2"], [], {"a": {"b": 2}, "list": [1], "card": "4111"}),
        (
            ["a.c.d=text with spaces"],
            ["card"],
            {"a": {"b": 1, "c": {"d": "text with spaces"}}, "list": [1]},
        ),
        (
            ['list=["x", null]', "card="],
            ["none.at.all"],
            {"a": {"b": 1}, "list": ["x", None], "card": ""},
        ),
    ],
)
def test_fields_of_a_body_are_set_and_taken_out(
    fields: list[str], removed: list[str], body: object
) -> None:
    import json

    edit = LetterEdit.parse(fields, removed)
    assert json.loads(edit.of(LETTER).body) == body
    assert LetterEdit.parse(edit.options()["set"], edit.options()["unset"]) == edit


def test_a_letter_without_fields_is_not_edited_by_fields_but_as_a_whole() -> None:
    for body in (b"no json", b"[1]", b""):
        with pytest.raises(InvalidArgument, match=str(LETTER.id)):
            LetterEdit.parse(["a=1"]).of(replace(LETTER, body=body))
        assert LetterEdit.parse(body="new").of(replace(LETTER, body=body)).body == b"new"
    with pytest.raises(InvalidArgument, match="not an object"):
        LetterEdit.parse(["card.number=1"]).of(LETTER)


@pytest.mark.parametrize(
    "wrong",
    [
        {"fields": ["a"]},
        {"fields": ["a..b=1"]},
        {"removed": [""]},
        {"fields": ["a=1"], "body": "x"},
    ],
)
def test_an_edit_that_says_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        LetterEdit.parse(**wrong)  # type: ignore[arg-type]
