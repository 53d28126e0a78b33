"""Reading without a group: docs/BROWSE.md."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from support import eventually

import qmq
from qmq.client import browsing
from qmq.client.browsing import BrowsedMessage
from qmq.client.connection.connection import TIMING
from qmq.errors import InvalidArgument, NotConnected, UnknownSubject
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.proto.v1 import meta_pb2 as pb
from qmq.testing import TestCluster, virtual


async def bodies(messages: AsyncIterator[BrowsedMessage]) -> list[bytes]:
    return [message.body async for message in messages]


def fetching_tasks() -> list[asyncio.Task[object]]:
    """The tasks of this loop that fetch a page for a browse."""
    return [
        each for each in asyncio.all_tasks() if getattr(each.get_coro(), "__name__", "") == "_fetch"
    ]


async def test_every_stored_message_is_shown_once_and_no_group_is_affected(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browsing, "PAGE_BYTES", 2_000)  # many pages
    sent = [b"%03d" % number for number in range(300)]
    async with qmq.connect(node.address) as mq:
        async with mq.producer("s", batch_messages=7) as producer:
            await producer.send_many(
                sent[:100], tags=[["odd"] if number % 2 else ["even"] for number in range(100)]
            )
            await producer.send_many(sent[100:], keys=[f"k{number % 10}" for number in range(200)])
        found = [message async for message in mq.browse("s")]
        assert [message.body for message in found] == sent
        assert [message.sequence for message in found] == list(range(300))
        assert {
            (message.subject, message.broker_group, message.partition) for message in found
        } == {("s", "broker-0", 0)}
        assert await bodies(mq.browse("s", last=5)) == sent[-5:]
        assert await bodies(mq.browse("s", tags_any=["odd"])) == sent[1:100:2]
        assert await bodies(mq.browse("s", key="k3")) == sent[103::10]
        assert not await mq.metadata.describe_groups("s")


async def test_times_of_storing_bound_what_is_shown() -> None:
    async with TestCluster(clock=virtual()) as cluster:
        mq = cluster.client()
        for body in (b"0", b"1", b"2"):
            await mq.send("s", body)
            await cluster.clock.advance(hours=1)
        first, second, third = [message.append_time_ms async for message in mq.browse("s")]
        assert first < second < third

        def at(time_ms: int) -> datetime:
            return datetime.fromtimestamp(time_ms / 1000, UTC)

        assert await bodies(mq.browse("s", start=at(second))) == [b"1", b"2"]
        assert await bodies(mq.browse("s", end=at(second))) == [b"0"]
        assert await bodies(mq.browse("s", start=at(first + 1), end=at(third))) == [b"1"]


async def test_messages_stored_later_follow(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("s", b"0")
        following = mq.browse("s", last=1, follow=True)
        assert (await anext(following)).body == b"0"
        waiting = asyncio.ensure_future(anext(following))
        await mq.send("s", b"1")
        assert (await waiting).body == b"1"


async def test_partitions_of_all_route_versions_are_read_in_the_order_of_storing(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("o", order=Order.STRICT, logical_partitions=16), partitions=1
        )
        for number in range(40):
            if number == 20:
                await mq.metadata.change_route("o", split=pb.SplitOperation(partition=1))
            await mq.send("o", b"%d" % number, key=f"k{number % 4}")
        found = [message async for message in mq.browse("o")]
        assert sorted(int(message.body) for message in found) == list(range(40))
        assert {message.partition for message in found if int(message.body) < 20} == {1}
        assert {message.partition for message in found if int(message.body) >= 20} == {2, 3}
        assert [int(body) for body in await bodies(mq.browse("o", key="k1"))] == list(
            range(1, 40, 4)
        )


async def test_a_master_that_is_killed_is_followed_by_the_next_one() -> None:
    async with TestCluster(brokers=3) as cluster:
        mq = cluster.client()
        for number in range(30):
            await mq.send("s", b"%d" % number)
        following = mq.browse("s", follow=True)
        assert (await anext(following)).body == b"0"
        master = cluster.master()
        await cluster.kill(master)
        await cluster.until_master(other_than=master)
        await mq.send("s", b"30")
        assert [int((await anext(following)).body) for _ in range(30)] == list(range(1, 31))


async def test_a_browse_that_begins_without_a_master_waits_for_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "qmq.client")
    async with TestCluster(delay=False) as cluster:
        mq = cluster.client()
        await mq.send("s", b"0")
        master = cluster.master()
        await cluster.kill(master)
        found, ends = (
            asyncio.create_task(bodies(mq.browse("s"))),
            asyncio.create_task(mq.queue_ends("s")),
        )
        await eventually(
            lambda: found.done() or caplog.text.count("messages of group-1 are missing") >= 2
        )
        await cluster.restart(master)
        assert await found == [b"0"]
        assert await ends == {("group-1", 0): 1}


async def test_a_browse_names_the_broker_group_that_gets_no_master_in_time() -> None:
    async with TestCluster(delay=False) as cluster:
        await cluster.client().send("s", b"0")
        await cluster.kill(cluster.master())
        mq = cluster.client(timing=replace(TIMING, delivery_timeout_s=0.1))
        with pytest.raises(NotConnected, match="messages of group-1 are missing"):
            await bodies(mq.browse("s"))
        assert await bodies(mq.browse("s", partial=True)) == []


async def test_what_cannot_be_meant_is_refused(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        with pytest.raises(UnknownSubject, match="qmq subject list"):
            await bodies(mq.browse("nowhere"))
        with pytest.raises(InvalidArgument, match="start"):
            mq.browse("s", last=3, start=datetime.now(UTC))
        with pytest.raises(InvalidArgument, match="time zone"):
            mq.browse("s", start=datetime(2026, 11, 1))


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_a_search_for_content_finds_it_and_tells_how_far_it_looked(
    compression: str | None, node: Node
) -> None:
    async with qmq.connect(node.address) as mq:
        async with mq.producer("s", batch_messages=10, compression=compression) as producer:
            await producer.send_many(
                [b"hay %d" % number for number in range(100)] + [b"the needle"] + [b"hay"] * 9
            )
        progress = browsing.BrowseProgress()
        assert await bodies(mq.browse("s", content=b"needle", progress=progress)) == [b"the needle"]
        assert progress.looked == 110


async def test_a_batch_that_cannot_hold_the_content_is_not_taken_apart(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = browsing.BrowsedMessage

    def counted(*arguments: object) -> BrowsedMessage:
        made.append(1)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(browsing, "BrowsedMessage", counted)
    async with qmq.connect(node.address) as mq:
        async with mq.producer("s", batch_messages=10) as producer:
            await producer.send_many([b"hay"] * 1_000 + [b"the needle"] * 10)
        assert len(await bodies(mq.browse("s", content=b"needle"))) == 10
    assert len(made) <= 20


async def test_a_search_that_ends_early_gives_up_the_page_it_asked_for_ahead(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browsing, "PAGE_BYTES", 1_000)
    async with qmq.connect(node.address) as mq:
        async with mq.producer("s", batch_messages=10) as producer:
            await producer.send_many(
                [b"hay " * 20] * 500 + [b"the needle"] * 10 + [b"hay " * 20] * 500
            )
        assert len(await bodies(mq.browse("s", content=b"needle"))) == 10
        async with contextlib.aclosing(mq.browse("s", content=b"needle")) as messages:  # type: ignore[type-var]
            assert (await anext(messages)).body == b"the needle"
            (ahead,) = fetching_tasks()
        assert ahead.cancelling()
