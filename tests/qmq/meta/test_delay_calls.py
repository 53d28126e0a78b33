"""Delayed messages as a metaserver answers for them: one by its id, lists over all delay groups,
groups that are silent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meta_support import Caller, FakeBroker, brokers, metaserver
from qmq_coordination.broker_groups import DelaySettings, MasterRecord, group_key
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.embedded import EmbeddedStore
from support import eventually

import qmq
from qmq.errors import (
    CallerError,
    DelayTooLong,
    InvalidArgument,
    InvalidName,
    NotConnected,
    NotMaster,
    Outcome,
    QmqError,
    TooLate,
)
from qmq.meta.calls import merged
from qmq.model import DelayedId, MessageId
from qmq.proto.v1 import delay_pb2 as pb
from qmq.proto.v1 import delay_pb2_grpc
from qmq.proto.v1 import meta_pb2 as meta
from qmq.rpc.channel import answering

SETTINGS = DelaySettings(3_600_000, 63_244_800_000)


def message(group: str, number: int, due_ms: int, subject: str = "s") -> pb.DelayedMessage:
    name = str(DelayedId(MessageId(7, 1, number), due_ms, 1, group))
    return pb.DelayedMessage(id=name, subject=subject, due_ms=due_ms, group=group)


class FakeDelayGroup(FakeBroker, delay_pb2_grpc.DelayControlServicer):
    """A delay group's master that has these messages, and gives so many at a time at most.
    `failure` is raised instead of any answer.
    """

    def __init__(self, group: str, replica: str) -> None:
        super().__init__(group, replica)
        self.waiting: list[pb.DelayedMessage] = []
        self.page_max = 1_000
        self.failure: QmqError | None = None
        self.requests: list[Any] = []

    async def start(self) -> None:
        self.server = grpc.aio.server()
        delay_pb2_grpc.add_DelayControlServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()

    def _take(self, method: str, request: Any) -> None:
        self._note(method)
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure

    @answering
    async def CancelDelayed(self, request: Any) -> Any:
        self._take("CancelDelayed", request)
        return pb.DelayedMessage(id=request.id, group=self.group, state="cancelled")

    @answering
    async def MoveDelayed(self, request: Any) -> Any:
        self._take("MoveDelayed", request)
        return pb.DelayedMessage(id=request.id, group=self.group, due_ms=request.due_ms)

    @answering
    async def ShowDelayed(self, request: Any) -> Any:
        self._take("ShowDelayed", request)
        return pb.DelayedMessage(id=request.id, group=self.group, state="pending")

    @answering
    async def ListDelayed(self, request: Any) -> Any:
        self._take("ListDelayed", request)
        due_ms, _, name = request.after.partition(":")
        behind = (int(due_ms), name) if request.after else (-1, "")
        found = sorted(
            (each.due_ms, each.id, each)
            for each in self.waiting
            if request.subject in ("", each.subject)
        )
        page = [each[2] for each in found if each[:2] > behind]
        most = min(request.messages_max, self.page_max)
        has_more = len(page) > most
        return pb.ListDelayedResponse(
            messages=page[:most],
            next=f"{page[most - 1].due_ms}:{page[most - 1].id}" if has_more else "",
        )

    @answering
    async def DescribeDelay(self, request: Any) -> Any:
        self._take("DescribeDelay", request)
        return pb.DelayDescription(
            group=self.group, replica=self.replica, pending=len(self.waiting)
        )


@asynccontextmanager
async def delay_groups(
    store: CoordinationStore, *names: str
) -> AsyncIterator[list[FakeDelayGroup]]:
    """One registered master for each."""
    found = [FakeDelayGroup(name, f"{name}-a") for name in names]
    registrations = []
    try:
        for each in found:
            await each.start()
            await store.put(group_key(each.group, "delay"), SETTINGS.encode())
            registrations.append(await each.register(store))
        yield found
    finally:
        for registration in registrations:
            await registration.stop()
        for each in found:
            await each.server.stop(None)


def id_of(group: str) -> str:
    return message(group, 1, 5).id


ONE = [
    ("CancelDelayed", pb.CancelDelayedRequest(id=id_of("d2"))),
    ("MoveDelayed", pb.MoveDelayedRequest(id=id_of("d2"), due_ms=9)),
    ("ShowDelayed", pb.ShowDelayedRequest(id=id_of("d2"))),
]


# --- one message ----------------------------------------------------------------------------------


async def test_the_group_that_the_id_names_is_asked_and_no_other(store: CoordinationStore) -> None:
    async with (
        brokers(store, "g1"),
        delay_groups(store, "d1", "d2") as (first, second),
        metaserver(store) as (call, _),
    ):
        for method, request in ONE:
            found = await call(method, request)
            assert (found.id, found.group) == (id_of("d2"), "d2")
        assert (first.asked, second.asked) == ([], [method for method, _ in ONE])
        assert second.requests == [request for _, request in ONE]


@pytest.mark.parametrize(
    "failure",
    [
        TooLate("on its way"),
        DelayTooLong("over a year"),
        NotMaster("lost it", outcome=Outcome.UNKNOWN),
    ],
)
async def test_what_the_group_raises_arrives_with_its_outcome(failure: QmqError) -> None:
    store = EmbeddedStore()
    async with delay_groups(store, "d2") as (only,), metaserver(store) as (call, _):
        only.failure = failure
        for method, request in ONE:
            expected = NotConnected if isinstance(failure, NotMaster) else type(failure)
            with pytest.raises(expected, match=failure.message) as caught:
                await call(method, request)
            assert caught.value.outcome is failure.outcome


async def test_the_new_master_is_asked_when_the_old_one_refuses(store: CoordinationStore) -> None:
    async with delay_groups(store, "d2") as (old,), metaserver(store) as (call, _):
        new = FakeDelayGroup("d2", "d2-b")
        await new.start()
        old.is_master = False
        await store.put(
            group_key("d2", "master"),
            MasterRecord("d2-b", 2, "x", "data-d2-b:1", new.address).encode(),
        )
        for method, request in ONE:
            assert (await call(method, request)).id == id_of("d2")
        assert new.asked == [method for method, _ in ONE]
        await new.server.stop(None)


class Deposed(FakeDelayGroup):
    """A master that starts a requested change and loses the mastership before it knows the
    outcome.
    """

    def __init__(self, store: CoordinationStore, successor: FakeDelayGroup) -> None:
        super().__init__("d2", "d2-a")
        self._store, self._successor = store, successor

    @answering
    async def MoveDelayed(self, request: Any) -> Any:
        self._note("MoveDelayed")
        await self._store.put(
            group_key("d2", "master"),
            MasterRecord("d2-b", 2, "x", "data-d2-b:1", self._successor.address).encode(),
        )
        raise NotMaster("lost it", outcome=Outcome.UNKNOWN)


async def test_a_successors_refusal_of_a_possibly_done_request_is_unknown(
    store: CoordinationStore,
) -> None:
    successor = FakeDelayGroup("d2", "d2-b")
    await successor.start()
    old = Deposed(store, successor)
    await old.start()
    await store.put(group_key("d2", "delay"), SETTINGS.encode())
    registration = await old.register(store)
    async with metaserver(store) as (call, _):
        successor.failure = TooLate("it is on its way, to the time that it was moved to")
        with pytest.raises(TooLate) as caught:
            await call("MoveDelayed", pb.MoveDelayedRequest(id=id_of("d2"), due_ms=9))
        assert caught.value.outcome is Outcome.UNKNOWN
        assert (old.asked, successor.asked) == (["MoveDelayed"], ["MoveDelayed"])
        with pytest.raises(TooLate) as caught:
            await call("MoveDelayed", pb.MoveDelayedRequest(id=id_of("d2"), due_ms=9))
        assert caught.value.outcome is Outcome.NOT_STORED, "this time nothing was begun elsewhere"
    await registration.stop()
    for each in (old, successor):
        await each.server.stop(None)


WRONG: list[tuple[Any, type[CallerError], str]] = [
    (pb.CancelDelayedRequest(id="17"), InvalidArgument, "not the id of a delayed message"),
    (pb.ShowDelayedRequest(id=id_of("d9")), InvalidArgument, "'d9', .* exist; there are d1, d2"),
    (pb.ShowDelayedRequest(id=id_of("g1")), InvalidArgument, "delay group 'g1', which does not"),
    (pb.MoveDelayedRequest(id=id_of("d1")), InvalidArgument, "give the due time"),
    (pb.ListDelayedRequest(subject="a b"), InvalidName, "subject 'a b'"),
    (pb.ListDelayedRequest(after="x"), InvalidArgument, "`next` of the previous page"),
    (pb.ListDelayedRequest(from_ms=9, to_ms=8), InvalidArgument, "not after its beginning"),
]


async def test_a_request_that_makes_no_sense_reaches_no_group(store: CoordinationStore) -> None:
    async with (
        brokers(store, "g1"),
        delay_groups(store, "d1", "d2") as groups,
        metaserver(store) as (call, _),
    ):
        for request, kind, says in WRONG:
            with pytest.raises(kind, match=says):
                await call(type(request).__name__.removesuffix("Request"), request)
        assert [each.asked for each in groups] == [[], []]


async def test_without_a_delay_group_each_call_says_how_to_start_one(
    store: CoordinationStore,
) -> None:
    async with brokers(store, "g1"), metaserver(store) as (call, _):
        for method, request in [
            *ONE,
            ("ListDelayed", pb.ListDelayedRequest()),
            ("DescribeDelays", meta.DescribeDelaysRequest()),
        ]:
            with pytest.raises(
                NotConnected, match="there is no delay group: start one with `qmq delay`"
            ):
                await call(method, request)


# --- lists ----------------------------------------------------------------------------------------


async def all_pages(call: Caller, **fields: Any) -> list[list[str]]:
    found, after = [], ""
    while True:
        page = await call("ListDelayed", pb.ListDelayedRequest(**fields, after=after))
        found.append([each.id for each in page.messages])
        after = page.next
        if not after:
            return found


def scattered(groups: list[FakeDelayGroup], count: int) -> list[str]:
    """Delayed messages spread over the groups, many with one due time; returns their ids in the
    order of a list.
    """
    random = Random(5)
    for number in range(count):
        group = random.choice(groups)
        group.waiting.append(message(group.group, number, random.randrange(count // 4)))
    return [
        each[1]
        for each in sorted((each.due_ms, each.id) for group in groups for each in group.waiting)
    ]


@pytest.mark.parametrize("page_max", [1_000, 7])
async def test_pages_over_all_groups_are_one_list_in_order_without_holes(page_max: int) -> None:
    store = EmbeddedStore()
    async with (
        brokers(store, "g1"),
        delay_groups(store, "d1", "d2", "d3") as groups,
        metaserver(store) as (call, _),
    ):
        ids = scattered(groups, 100)
        groups[1].page_max = page_max
        for most in (3, 40, 1000):
            found = await all_pages(call, messages_max=most)
            assert [name for page in found for name in page] == ids
            assert max(map(len, found)) <= most
        groups[1].page_max = 1_000
        assert [len(page) for page in await all_pages(call, messages_max=40)] == [40, 40, 20]


async def test_a_list_is_filtered_by_the_groups_and_bounded(store: CoordinationStore) -> None:
    async with delay_groups(store, "d1", "d2") as groups, metaserver(store) as (call, _):
        groups[0].waiting = [message("d1", number, 5) for number in range(150)]
        groups[1].waiting = [message("d2", 1, 5, "other")]
        assert [len(page) for page in await all_pages(call, subject="s")] == [100, 50]
        assert await all_pages(call, subject="other", from_ms=2, to_ms=9) == [
            [groups[1].waiting[0].id]
        ]
        assert await all_pages(call, subject="none") == [[]]
        asked = groups[1].requests[-2]
        assert (asked.subject, asked.from_ms, asked.to_ms, asked.messages_max) == (
            "other",
            2,
            9,
            100,
        )
        await all_pages(call, messages_max=50_000)
        assert groups[1].requests[-1].messages_max == 1_000


async def test_a_list_without_one_of_the_groups_names_it(store: CoordinationStore) -> None:
    async with delay_groups(store, "d1", "d2") as groups, metaserver(store) as (call, _):
        scattered(groups, 10)
        await groups[1].server.stop(None)
        found = await call("ListDelayed", pb.ListDelayedRequest())
        assert found.messages
        assert "'d2' does not answer" in found.silent["d2"]
        client = qmq.connect(call.address)
        try:
            with pytest.raises(
                NotConnected, match="d2 did not answer, so those messages are missing"
            ):
                [each async for each in client.delayed.list()]
        finally:
            await client.close()


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 50)), unique=True),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.integers(1, 9),
)
def test_merged_pages_show_everything_once_in_order_whatever_a_page_holds(
    groups: list[list[tuple[int, int]]], page_maxes: list[int], most: int
) -> None:
    stored = [
        sorted((due, f"{number:02}-d{place}") for due, number in group)
        for place, group in enumerate(groups)
    ]

    def page(place: int, behind: tuple[int, str]) -> pb.ListDelayedResponse:
        left = [each for each in stored[place] if each > behind]
        kept = left[: min(most, page_maxes[place])]
        name = f"{kept[-1][0]}:{kept[-1][1]}" if len(kept) < len(left) else ""
        return pb.ListDelayedResponse(
            messages=[pb.DelayedMessage(due_ms=due, id=name) for due, name in kept], next=name
        )

    found: list[tuple[int, str]] = []
    behind = (-1, "")
    while True:
        answer = merged([page(place, behind) for place in range(len(stored))], most)
        assert len(answer.messages) <= most
        found += [(each.due_ms, each.id) for each in answer.messages]
        if not answer.next:
            break
        due_ms, _, name = answer.next.partition(":")
        assert (int(due_ms), name) > behind
        behind = int(due_ms), name
    assert found == sorted(each for group in stored for each in group)


# --- how the delivery stands ----------------------------------------------------------------------


async def test_all_delay_groups_are_described_and_the_silent_ones_named(
    store: CoordinationStore,
) -> None:
    async with (
        brokers(store, "g1") as (broker,),
        delay_groups(store, "d1", "d2", "d3") as groups,
        metaserver(store) as (call, _),
    ):
        groups[0].waiting = [message("d1", 1, 5)]
        groups[1].failure = QmqError("stumbled")
        await groups[2].server.stop(None)
        found = await call("DescribeDelays", meta.DescribeDelaysRequest())
        assert [(each.group, each.replica, each.pending) for each in found.delays] == [
            ("d1", "d1-a", 1)
        ]
        assert sorted(found.silent) == ["d2", "d3"]
        assert "stumbled" in found.silent["d2"]
        assert "'d3' does not answer" in found.silent["d3"]
        assert broker.asked == []


async def test_a_delay_group_without_a_master_is_silent_and_says_so(
    store: CoordinationStore,
) -> None:
    async with delay_groups(store, "d1"), metaserver(store) as (call, view):
        await store.put(group_key("d2", "delay"), SETTINGS.encode())
        await eventually(lambda: view.group("d2").delay is not None)
        found = await call("DescribeDelays", meta.DescribeDelaysRequest())
        assert ([each.group for each in found.delays], list(found.silent)) == (["d1"], ["d2"])
        assert "has no master" in found.silent["d2"]


async def test_a_subject_is_on_broker_groups_and_its_delayed_messages_on_delay_groups(
    store: CoordinationStore,
) -> None:
    async with (
        brokers(store, "g1", "g2"),
        delay_groups(store, "d1", "d2"),
        metaserver(store) as (call, _),
    ):
        created = await call(
            "CreateSubject", meta.CreateSubjectRequest(settings=meta.SubjectSettings(name="a"))
        )
        assert created.settings.broker_groups == ["g1", "g2"]
        for delayed, groups in ((False, ["g1", "g2"]), (True, ["d1", "d2"])):
            found = await call("Locate", meta.LocateRequest(subject="a", delayed=delayed))
            assert [each.broker_group for each in found.routes] == groups
        with pytest.raises(InvalidArgument, match="d1 is a delay group"):
            await call("PlaceSubject", meta.PlaceSubjectRequest(subject="a", broker_groups=["d1"]))
