"""Finding messages and following them, through a real node: however many pages, from whichever
segment, wherever copies went.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from support import eventually, node_config, running

import qmq
from qmq.broker.reading import history
from qmq.errors import InvalidArgument, MessageNotFound, UnknownSubject
from qmq.model import MessageId
from qmq.node.dev_node import Node
from qmq.operations.messages import inquire, why
from qmq.proto.v1 import control_pb2 as control
from qmq.testing import TestCluster


@pytest.fixture
async def mq(node: Node) -> AsyncIterator[qmq.Client]:
    async with qmq.connect(node.address) as found:
        yield found


async def take(consumer: qmq.Consumer) -> qmq.Message:
    async with asyncio.timeout(20):
        (message,) = await consumer.pull(1)
        return message


async def place_of(mq: qmq.Client, receipt: qmq.Receipt) -> control.StoredMessage:
    return (await mq.metadata.find_every(str(receipt.id))).message


async def pages(
    mq: qmq.Client, place: control.StoredMessage, cursor: bytes = b""
) -> list[control.TraceMessageResponse]:
    found = [await mq.metadata.trace_message(place, "", cursor)]
    while found[-1].cursor:
        found.append(await mq.metadata.trace_message(place, "", found[-1].cursor))
    return found


def kinds(found: list[control.TraceMessageResponse]) -> list[tuple[str, str, int]]:
    return [(event.kind, event.consumer, event.attempt) for page in found for event in page.events]


async def failed_twice(mq: qmq.Client, *, others: int = 0) -> qmq.Receipt:
    """A message that failed, was given to another consumer, failed for good; others were consumed
    meanwhile.
    """
    receipt = await mq.send("s", b"x")
    for name in ("a", "b"):
        async with mq.consumer("s", "g", name=name) as consumer:
            message = await take(consumer)
            for number in range(others):
                await mq.send("s", b"%d" % number)
                await (await take(consumer)).ack_sync()
            if name == "a":
                # it goes before the message may come again
                message.nack(timedelta(seconds=0.5), "once")
            else:
                message.reject("no stock")
    return receipt


STORY = [("pull", "a", 1), ("nack", "a", 1), ("pull", "b", 2), ("dead", "b", 2)]


async def test_a_story_is_the_same_in_one_page_and_in_many(
    node: Node, mq: qmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = await failed_twice(mq, others=5)
    place = await place_of(mq, receipt)
    share = node.store.open_queue("s", 0).share("g")
    await eventually(lambda: share.deaths and not share.dying)
    every = await mq.metadata.find_every(str(receipt.id))
    assert [each.subject for each in (every.message, *every.others)] == ["s", "%dlq%g"]
    (whole,) = await pages(mq, place)
    assert kinds([whole]) == STORY
    monkeypatch.setattr(history, "SCAN_BYTES_MAX", 1)
    monkeypatch.setattr(history, "TURN_BYTES", 1)
    found = await pages(mq, place)
    assert len(found) > 5
    assert kinds(found) == STORY
    (state,) = found[-1].states
    assert (state.state, state.dead_letter.subject, state.last.error) == (
        "dead",
        "%dlq%g",
        "no stock",
    )
    assert not found[-1].known_since_ms


async def test_the_next_master_continues_the_story_of_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "SCAN_BYTES_MAX", 1)
    monkeypatch.setattr(history, "TURN_BYTES", 1)
    async with TestCluster(brokers=3, delay=False) as cluster:
        mq, before = cluster.client(), cluster.master()
        place = await place_of(mq, await failed_twice(mq))
        first = await mq.metadata.trace_message(place)
        assert first.cursor
        await cluster.kill(before)
        await cluster.until_master(other_than=before)
        rest = await pages(mq, place, first.cursor)
        assert kinds([first, *rest]) == STORY
        assert rest[-1].states[0].state in ("dying", "dead")


async def test_a_story_begins_in_the_segment_that_was_begun_before_its_message(
    node: Node, mq: qmq.Client
) -> None:
    node.store.actions.segment_bytes = 600
    await failed_twice(mq, others=10)
    receipt = await mq.send("s", b"held")
    consumer = mq.consumer("s", "g", name="c")
    message = await take(consumer)
    assert len(node.store.actions.bases) > 3
    begin, _ = history.segment_before(node.store.actions, node.store.index)
    assert begin == node.store.actions.bases[-1]
    (page,) = await pages(mq, await place_of(mq, receipt))
    assert kinds([page]) == [("pull", "c", 1)]
    assert (page.states[0].state, page.states[0].consumer, page.states[0].attempts_max) == (
        "held",
        "c",
        5,
    )
    assert 0 < page.states[0].lease_left_ms <= 30_000
    await message.ack_sync()


async def test_deleted_segments_of_the_action_log_are_reported_as_missing(
    node: Node, mq: qmq.Client
) -> None:
    actions, queue = node.store.actions, node.store.open_queue("s", 0)
    actions.segment_bytes = 600
    receipt = await failed_twice(mq)
    await eventually(lambda: queue.share("g").deaths and not queue.share("g").dying)
    begun = len(actions.bases)
    async with mq.consumer("s", "g") as consumer:
        # so that the last one begins with a group that is done with it
        while len(actions.bases) < begun + 3:
            await mq.send("s", b"other")
            await (await take(consumer)).ack_sync()
    second = await mq.send("s", b"last")
    for path in actions.drop_before(actions.bases[-1]):
        path.unlink()
    (page,) = await pages(mq, await place_of(mq, receipt))
    assert kinds([page]) == []
    assert page.known_since_ms
    assert page.states[0].state == "done"
    texts = [each["text"] for each in why(await inquire(mq, str(receipt.id), "s"), 0)]
    assert any("the logs do not tell any more" in text for text in texts)
    (page,) = await pages(mq, await place_of(mq, second))
    assert not page.known_since_ms


async def test_an_invalid_cursor_and_a_missing_message_are_refused(mq: qmq.Client) -> None:
    place = await place_of(mq, await mq.send("s", b"x"))
    with pytest.raises(InvalidArgument, match="cursor"):
        await mq.metadata.trace_message(place, "", b"\x93\x01")
    trail = ["g", "waiting", "", 2, 0, 5, 6, {"a": 6}, None]
    of_the_release_before = msgspec.msgpack.encode([[0, 0, -1, 0, b""], [trail], []])
    with pytest.raises(InvalidArgument, match="begin without a cursor"):
        await mq.metadata.trace_message(place, "", of_the_release_before)
    page = await mq.metadata.trace_message(place)
    assert (page.cursor, list(page.events), list(page.states)) == (b"", [], [])
    place.sequence = 7
    with pytest.raises(MessageNotFound, match="holds 0 to 0"):
        await mq.metadata.trace_message(place)
    place.partition = 3
    with pytest.raises(MessageNotFound):
        await mq.metadata.trace_message(place)
    place.subject = "unknown"
    with pytest.raises(UnknownSubject):
        await mq.metadata.trace_message(place)


async def test_a_message_is_found_without_its_subject_and_a_missing_one_is_not(
    mq: qmq.Client,
) -> None:
    for subject in ("a", "b", "c"):
        await mq.send(subject, b"other")
    receipt = (await mq.send_many("b", [b"0", b"1", b"2"]))[1]
    found = await mq.metadata.find_every(str(receipt.id))
    assert (found.message.subject, found.message.body, len(found.others), found.is_incomplete) == (
        "b",
        b"1",
        0,
        False,
    )
    with pytest.raises(MessageNotFound, match=r"whose producer began at 20.* Retention may"):
        await mq.metadata.find_every(str(MessageId(receipt.id.producer_id, 99, 0)))
    with pytest.raises(MessageNotFound):
        await mq.metadata.find_every(str(receipt.id), "a")
    with pytest.raises(UnknownSubject):
        await mq.metadata.find_every(str(receipt.id), "unknown")


async def test_a_delayed_message_is_followed_from_the_delay_group_to_its_consumer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(node_config(tmp_path, delay=True)) as node, qmq.connect(node.address) as mq:
        waiting = await mq.send("s", b"later", delay=timedelta(days=3))
        for text in (str(waiting.id), str(waiting.delayed_id)):
            inquiry = await inquire(mq, text)
            assert (inquiry.followed, [each.state for each in inquiry.delayed]) == ([], ["pending"])
        soon = await mq.send("s", b"soon", delay=timedelta(milliseconds=1))
        message = await take(mq.consumer("s", "g", name="a"))
        inquiry = await inquire(mq, str(soon.id))
        assert [each.place.body for each in inquiry.followed] == [b"soon"]
        assert [event.kind for event in inquiry.followed[0].events] == ["pull"]
        message.nack(timedelta(days=2), "not now")
        inquiry = await inquire(mq, str(soon.id))
        async with asyncio.timeout(20):
            while inquiry.followed[0].states[0].state != "done":
                await asyncio.sleep(0.05)
                inquiry = await inquire(mq, str(soon.id))
        assert sorted(each.state for each in inquiry.delayed) == ["delivered", "pending"]
        texts = [each["text"] for each in why(inquiry, 0)]
        assert any(
            text.startswith("A copy for group g, which asked for a later retry, is delayed: due in")
            for text in texts
        )
        assert not inquiry.is_incomplete

        # a look that is cut short finds what the delay group has, and says so
        monkeypatch.setattr(history, "HEADS_MAX", 0)
        found = await mq.metadata.find_every(str(soon.id))
        assert (
            [each.due_ms > 0 for each in (found.message, *found.others)],
            found.is_incomplete,
        ) == ([True], True)
        assert (
            "not everything could be looked through"
            in why(await inquire(mq, str(soon.id)), 0)[-1]["text"]
        )
        with pytest.raises(MessageNotFound, match="Not everything was looked through"):
            await mq.metadata.find_every(str(MessageId(soon.id.producer_id, 99, 0)))


async def test_pauses_and_backlogs_are_reported(node: Node, mq: qmq.Client) -> None:
    receipts = [await mq.send("s", b"%d" % number) for number in range(3)]
    consumer = mq.consumer("s", "g", name="a", prefetch=1)
    message = await take(consumer)
    await mq.metadata.pause_group("s", "g", reason="deploying")
    await eventually(lambda: node.broker.rules.is_paused("s", "g", "", ""))
    texts = [each["text"] for each in why(await inquire(mq, str(receipts[2].id)), 0)]
    assert texts[1].startswith(
        "Group g: waits behind 1 older message; the group is paused since 20"
    )
    assert texts[1].endswith("(deploying).")
    await message.ack_sync()
