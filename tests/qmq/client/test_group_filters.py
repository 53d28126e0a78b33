"""All consumers of a group have the same tags and condition, because what a filter leaves out
counts as done for the whole group. One text is no list of tags.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
from qmq_coordination.ordered_records import MemberRecord

import qmq
from qmq.blocking import beside
from qmq.errors import InvalidArgument
from qmq.gateway.filters import MessageFilter
from qmq.gateway.readers import GroupReaders, ReaderKey
from qmq.meta.ordered.groups import GroupMember, require_same_condition
from qmq.testing import TestCluster
from qmq.wire.frame_payloads import UNSAID


@pytest.fixture
async def cluster() -> AsyncIterator[TestCluster]:
    async with TestCluster(delay=False) as made:
        await made.client().metadata.create_subject(qmq.SubjectConfig("s"))
        yield made


async def test_a_consumer_that_asks_for_other_tags_than_its_group_is_refused(
    cluster: TestCluster,
) -> None:
    """The error names both filters and the other consumer; the group's own messages all come."""
    mq, other = cluster.client(), cluster.client()
    consumer = mq.consumer("s", "g", name="first", tags_any=["a", "b"])
    await consumer.join()
    for options in ({"tags_any": ["c"]}, {"tags_all": ["a", "b"]}, {}):
        refused = other.consumer("s", "g", **options)
        with pytest.raises(
            InvalidArgument, match=r"(?s)any of the tags 'a', 'b'.*'first'.*asks for.*same filter"
        ):
            await refused.join()
        await refused.close()
    same = other.consumer("s", "g", tags_any=["b", "a", "b"])
    await same.join()
    await same.close()
    await mq.send_many(
        "s",
        [b"%d" % number for number in range(40)],
        tags=[["ac"[number % 2]] for number in range(40)],
    )
    found: list[bytes] = []
    async for message in consumer:
        found.append(message.body)
        if len(found) == 20:
            break
    assert found == [b"%d" % number for number in range(0, 40, 2)]


async def test_when_the_others_are_gone_a_group_may_ask_for_other_tags(
    cluster: TestCluster,
) -> None:
    mq = cluster.client()
    async with mq.consumer("s", "g", tags_any=["a"]) as consumer:
        await consumer.join()
    async with mq.consumer("s", "g", name="n", tags_any=["b"]) as consumer:
        await consumer.join()
        # the same consumer, restarted
        again = cluster.client().consumer("s", "g", name="n", tags_any=["c"])
        await again.join()


async def test_each_consumer_of_a_broadcast_group_has_its_own_tags(cluster: TestCluster) -> None:
    mq = cluster.client()
    for tag in ("a", "b"):
        await mq.consumer("s", "g", broadcast=True, tags_any=[tag]).join()


async def test_the_gateway_refuses_another_condition_for_the_same_group(
    cluster: TestCluster,
) -> None:
    now_ms = 0
    readers = GroupReaders(cluster.client(), lambda: now_ms)
    first = ReaderKey("s", "g", MessageFilter(sql="price > 5"), is_ordered=False)
    await readers.receive(first, 1, 0.0)
    for wanted in (MessageFilter(sql="price > 6"), MessageFilter(tags=("a",)), MessageFilter()):
        with pytest.raises(InvalidArgument, match="price > 5"):
            await readers.receive(first._replace(wanted=wanted), 1, 0.0)
    await readers.receive(first._replace(group="other", wanted=MessageFilter()), 1, 0.0)
    now_ms += 60_000
    readers.tidy()
    await readers.receive(first._replace(wanted=MessageFilter()), 1, 0.0)
    await readers.close()


def consumer(mq: qmq.Client, subject: str, condition: str | None) -> Any:
    options = {} if condition is None else {"condition": condition}
    return (
        mq.consumer("s", "g", **options)
        if subject == "s"
        else mq.ordered_consumer("o", "g", lease_ms=2_000, **options)
    )


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize(
    "wanted", [MessageFilter(sql="price > 6"), MessageFilter(tags=("a",)), MessageFilter()]
)
async def test_another_gateway_is_refused_another_filter_for_the_group(
    cluster: TestCluster, is_ordered: bool, wanted: MessageFilter
) -> None:
    """Two gateways with a client each: they share nothing but the cluster. The error names both
    filters.
    """
    subject = "o" if is_ordered else "s"
    if is_ordered:
        await cluster.client().metadata.create_subject(
            qmq.SubjectConfig("o", order=qmq.Order.STRICT, logical_partitions=8), partitions=1
        )
    one, other = GroupReaders(cluster.client()), GroupReaders(cluster.client())
    first = ReaderKey(subject, "g", MessageFilter(sql="price > 5"), is_ordered=is_ordered)
    await one.receive(first, 1, 1.0)
    with pytest.raises(
        InvalidArgument, match=r"price > 5.*asks for.*(price > 6|'?a'?|all messages)"
    ):
        await other.receive(first._replace(wanted=wanted), 1, 60.0)
    await other.close()
    same = GroupReaders(cluster.client())
    await same.receive(first, 1, 1.0)
    await one.close()
    await same.close()
    # nobody has the first condition any more
    await other.receive(first._replace(wanted=wanted), 1, 1.0)
    await other.close()


@pytest.mark.parametrize("subject", ["s", "o"])
async def test_a_client_is_refused_in_a_group_whose_gateway_has_a_condition(
    cluster: TestCluster, subject: str
) -> None:
    if subject == "o":
        await cluster.client().metadata.create_subject(
            qmq.SubjectConfig("o", order=qmq.Order.STRICT, logical_partitions=8), partitions=1
        )
    readers = GroupReaders(cluster.client())
    await readers.receive(
        ReaderKey(subject, "g", MessageFilter(sql="price > 5"), is_ordered=subject == "o"), 1, 1.0
    )
    async with asyncio.timeout(60), consumer(cluster.client(), subject, None) as refused:
        with pytest.raises(InvalidArgument, match=r"price > 5.*asks for all messages"):
            await anext(refused)
    await readers.close()


@pytest.mark.parametrize("first", ["price > 5", UNSAID])
async def test_a_consumer_of_a_release_without_conditions_may_have_any(
    cluster: TestCluster, first: str
) -> None:
    """A gateway of release 0.2 does not say its condition: during an upgrade, both serve the
    group.
    """
    conditions = {"price > 5", UNSAID}
    async with (
        consumer(cluster.client(), "s", first) as one,
        consumer(cluster.client(), "s", (conditions - {first}).pop()) as other,
    ):
        await one.join()
        await other.join()
        async with consumer(cluster.client(), "s", "price > 6") as refused:
            with pytest.raises(InvalidArgument, match=r"price > 5.*asks for.*price > 6"):
                await refused.join()


@pytest.mark.parametrize(
    "mine",
    [None, MemberRecord("b", "2", since_ms=5, condition="x"), MemberRecord("b", "1", since_ms=5)],
)
def test_of_two_members_that_joined_at_once_the_later_one_is_refused(
    mine: MemberRecord | None,
) -> None:
    there = {"a": MemberRecord("a", "1", since_ms=5, condition="y")} | (
        {} if mine is None else {"b": mine}
    )
    with pytest.raises(InvalidArgument, match=r"reads y.*'a'.*'b' asks for x"):
        require_same_condition(GroupMember("o", "g", "b"), "2", "x", there)
    require_same_condition(GroupMember("o", "g", "b"), "2", None, there)
    require_same_condition(GroupMember("o", "g", "b"), "2", "y", there)
    later = {
        "a": MemberRecord("a", "1", since_ms=6, condition="y"),
        "b": MemberRecord("b", "2", since_ms=5, condition="x"),
    }
    require_same_condition(GroupMember("o", "g", "b"), "2", "x", later)
    require_same_condition(GroupMember("o", "g", "b"), "2", "x", {"a": MemberRecord("a", "1")})


DOORS: dict[str, Callable[[Any], Any]] = {
    "consumer, any": lambda mq: mq.consumer("s", "g", tags_any="error"),
    "consumer, all": lambda mq: mq.consumer("s", "g", tags_all="error"),
    "consumer, bytes": lambda mq: mq.consumer("s", "g", tags_any=b"error"),
    "consumer, numbers": lambda mq: mq.consumer("s", "g", tags_any=[1]),
    "consumer, half a character": lambda mq: mq.consumer("s", "g", tags_any=["\ud800"]),
    "browse, any": lambda mq: mq.browse("s", tags_any="error"),
    "browse, all": lambda mq: mq.browse("s", tags_all="error"),
    "listener, any": lambda mq: mq.listen("s", print, "g", tags_any="error"),
    "listener, all": lambda mq: mq.listen("s", print, "g", tags_all="error"),
    "tags": lambda mq: mq.producer("s").send(b"x", tags="error"),
    "tags of many": lambda mq: mq.producer("s").send_many([b"x"] * 5, tags="error"),
    "keys of many": lambda mq: mq.producer("s").send_many([b"x"] * 5, keys="error"),
    "a key of half a character": lambda mq: mq.producer("s").send(b"x", key="\ud800"),
    "a tag of half a character": lambda mq: mq.producer("s").send(b"x", tags=["\ud800"]),
    "a header of half a character": lambda mq: mq.producer("s").send(b"x", headers={"h": "\ud800"}),
    "a header's name of half a character": lambda mq: mq.producer("s").send(
        b"x", headers={"\ud800": "h"}
    ),
    "operations": lambda mq: mq.access.put_rule("app:shop", "produce", "subject"),
    "principals to add": lambda mq: mq.access.change_role("r", add="app:shop"),
    "principals to remove": lambda mq: mq.access.change_role("r", remove="app:shop"),
    "broker groups": lambda mq: mq.metadata.place_subject("s", "group-1"),
    "tables": lambda mq: mq.outbox_watchdog(None, tables="qmq_outbox"),
}


async def test_one_text_is_no_list_of_texts_at_any_door(cluster: TestCluster) -> None:
    mq = cluster.client()
    for door, call in DOORS.items():
        print(door)  # shown if it fails
        with pytest.raises(InvalidArgument, match=r"list|surrogate"):
            made = call(mq)
            if asyncio.iscoroutine(made):
                await made
    blocking = beside(cluster.client(), asyncio.get_running_loop())
    with pytest.raises(InvalidArgument, match="tags_any are a list of str"):
        await asyncio.to_thread(blocking.consumer, "s", "g", tags_any="error")


async def filtered(cluster: TestCluster, group: str) -> int:
    (found,) = await cluster.client().metadata.describe_groups("s", group)
    return found.filtered


LEFT_OUT: dict[str, tuple[dict[str, Any], int]] = {
    "any": ({"tags_any": ["a", "b"]}, 20),
    "all": ({"tags_all": ["a", "x"]}, 35),
    "none": ({"tags_any": ["z"]}, 40),
    "everything": ({}, 0),
}
"""By group: its filter, and how many of 40 messages it leaves out."""


@pytest.mark.parametrize("batch_messages", [1, 4, 40])
async def test_what_the_tags_leave_out_is_counted_however_it_was_batched(
    cluster: TestCluster, batch_messages: int
) -> None:
    """In batches that the broker skips, and in batches that it hands out for their other
    messages.
    """
    mq = cluster.client()
    kinds = (("a", "x"), ("b",), ("c",), (), ("a",), ("b", "x"), ("c", "x"), ("c",))
    for first in range(0, 40, batch_messages):
        numbers = range(first, first + batch_messages)
        await mq.send_many(
            "s",
            [b"%d" % number for number in numbers],
            tags=[kinds[number % 8] for number in numbers],
        )
    for group, (options, count) in LEFT_OUT.items():
        async with mq.consumer("s", group, **options) as consumer:
            await consumer.join()
            received = 0
            while received < 40 - count:
                received += len(await consumer.pull(7))
            while (await mq.metadata.describe_groups("s", group))[0].next_sequence < 40:
                await consumer.pull(1, timedelta(milliseconds=1))
            assert await filtered(cluster, group) == count
        async with mq.consumer("s", group, **options) as consumer:  # nothing is counted twice
            await consumer.pull(1, timedelta(milliseconds=1))
        assert await filtered(cluster, group) == count
