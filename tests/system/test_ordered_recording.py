"""The recorded history says what happened: each message's place and fate, each acknowledgement's
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from history.events import Recorder, load
from history.ordered.events import Deliver, Keyed, Part, Put, Rerouted, Sealed, Settle, Stored
from system.ordered_workload import (
    DeliveryRecorder,
    Item,
    PutRecorder,
    RouteRecorder,
    body_of,
    id_of,
    is_drained,
)

from qmq.client.consuming.ordered.lane import LaneState
from qmq.client.producing.receipts import BatchReceipt, CutReceipt, Ticket
from qmq.errors import DeadlineExceeded, LaneLost, NotConnected, Outcome, QmqError
from qmq.model import MessageId
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


class FakeProducer:
    """Gives tickets out: the first so many messages share one, and so on."""

    def __init__(self, *counts: int) -> None:
        self.tickets = [Ticket() for _ in counts]
        self.bodies: list[bytes] = []
        self._places = [
            (ticket, place)
            for ticket, count in zip(self.tickets, counts, strict=True)
            for place in range(count)
        ]

    def send(self, body: bytes, key: str) -> Ticket:
        self.bodies.append(body)
        return self._places[len(self.bodies) - 1][0]

    def place_of_last(self, ticket: Ticket) -> int:
        return self._places[len(self.bodies) - 1][1]


def stored(
    partition: int, base: int, count: int, *, ids: Sequence[bytes] | None = None
) -> BatchReceipt:
    return BatchReceipt("orders", partition, base, count, 7, base, 0, "g1", ids)


def items(text: str) -> list[Item]:
    return [Item(key, b"x") for key in text.split()]


async def puts(
    tmp_path: Path, producer: FakeProducer, keys: str, *ends: BatchReceipt | QmqError
) -> tuple[list[Put], PutRecorder]:
    with Recorder(tmp_path / "h.jsonl") as recorder:
        put = PutRecorder(recorder, "p0", "orders")
        task = asyncio.create_task(put.send(producer, items(keys)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for ticket, end in zip(producer.tickets, ends, strict=True):
            ticket.fail(end) if isinstance(end, QmqError) else ticket.resolve(end)
        await task
    return load(tmp_path / "h.jsonl"), put


async def test_a_put_returns_the_place_of_each_message(tmp_path: Path) -> None:
    producer = FakeProducer(2, 1)
    (begun, one, two), put = await puts(
        tmp_path, producer, "a b a", stored(1, 40, 2), stored(2, 9, 1)
    )
    assert begun.messages == (Keyed("a", 1), Keyed("b", 1), Keyed("a", 2))
    assert one.messages + two.messages == begun.messages
    assert [place[:2] for place in one.places + two.places] == [(1, 40), (1, 41), (2, 9)]
    assert one.places[1].id == id_of(MessageId(7, 40, 1))
    assert producer.bodies == [
        body_of("p0", 1, b"x"),
        body_of("p0", 1, b"x"),
        body_of("p0", 2, b"x"),
    ]
    assert (put.acked.total(), put.failures) == (3, {})


async def test_messages_of_a_cut_batch_are_told_from_those_sent_again(tmp_path: Path) -> None:
    again = MessageId(3, 0, 5)
    cut = CutReceipt.join(
        [((0, 2), stored(2, 0, 2)), ((1,), stored(3, 8, 1, ids=[again.to_bytes()]))], 3
    )
    (_, one, two), _ = await puts(tmp_path, FakeProducer(3), "a b c", cut)
    assert (one.messages, [place[:2] for place in one.places], one.resent) == (
        (Keyed("a", 1), Keyed("c", 1)),
        [(2, 0), (2, 1)],
        None,
    )
    assert (two.messages, two.places, two.resent) == (
        (Keyed("b", 1),),
        (Stored(3, 8, id_of(again)),),
        True,
    )


async def test_a_failure_says_whether_anything_may_be_stored(tmp_path: Path) -> None:
    producer = FakeProducer(1, 1)
    unknown, refused = DeadlineExceeded("late", outcome=Outcome.UNKNOWN), NotConnected("away")
    (_, one, two), put = await puts(tmp_path, producer, "a b", unknown, refused)
    assert [(each.type, each.messages) for each in (one, two)] == [
        ("info", (Keyed("a", 1),)),
        ("fail", (Keyed("b", 1),)),
    ]
    assert put.failures == {"unknown E305": 1, "not_stored E301": 1}


class FakeMessage:
    """A message of lane [0, 512) of partition 4."""

    partition, token, route_version, attempt, key = 4, 6, 2, 1, "a"
    lane = SimpleNamespace(lane=SimpleNamespace(range=SimpleNamespace(first=0, end=512)))

    def __init__(
        self, sequence: int, failure: QmqError | None = None, state: LaneState = LaneState.WORKING
    ) -> None:
        self.sequence = sequence
        self.body = body_of("p0", sequence, b"x")
        self.id = MessageId(1, 0, sequence)
        self.lane_run = SimpleNamespace(working={sequence: SimpleNamespace(state=state)})
        self._failure = failure

    async def ack_sync(self) -> None:
        if self._failure is not None:
            raise self._failure


class FakeMessages(list[FakeMessage]):
    """Many of that lane, in two cells."""

    partition, token = 4, 6
    runs = (
        SimpleNamespace(cell=SimpleNamespace(state=LaneState.WORKING)),
        SimpleNamespace(cell=SimpleNamespace(state=LaneState.VOID)),
    )

    async def ack_sync(self) -> None:
        raise LaneLost("lost")


async def test_a_delivery_is_written_at_once_and_acknowledgements_by_their_answers(
    tmp_path: Path,
) -> None:
    path, lost = tmp_path / "h.jsonl", LaneLost("lost")
    with Recorder(path) as recorder:
        log = DeliveryRecorder(recorder, "c.1", "g")
        messages: list[Any] = [
            FakeMessage(0),
            FakeMessage(1),
            FakeMessage(2, lost, LaneState.VOID),
            FakeMessage(3, NotConnected("away")),
        ]
        for at, message in enumerate(messages, 1):
            assert log.delivered(message) == b"x"
            assert len(load(path)) == at
        for message in messages:
            await log.ack(message)
        log.flush()
    events = load(path)
    given = [event for event in events if isinstance(event, Deliver)]
    assert {
        (each.process, each.group, each.partition, each.first, each.end, each.token, each.version)
        for each in given
    } == {("c.1", "g", 4, 0, 512, 6, 2)}
    assert given[1].handed[0] == (1, "a", "p0", 1, 1, id_of(MessageId(1, 0, 1)))
    ends = {event.type: event.sequences for event in events if isinstance(event, Settle)}
    assert ends == {"ok": (0, 1), "fail": (2,), "info": (3,)}
    assert all(
        event.began_ns and event.began_ns <= event.t_ns
        for event in events
        if isinstance(event, Settle)
    )


async def test_a_lane_lost_after_an_acknowledgement_leaves_the_outcome_unknown(
    tmp_path: Path,
) -> None:
    """The acknowledgement may have been committed before the lane was lost: a single one, and a
    bulk one if part of its messages was still held.
    """
    with Recorder(tmp_path / "h.jsonl") as recorder:
        log = DeliveryRecorder(recorder, "c.1", "g")
        one: Any = FakeMessage(0, LaneLost("lost"))
        many: Any = FakeMessages([FakeMessage(1), FakeMessage(2)])
        log.delivered(one)
        assert log.delivered_in_bulk(many) == [b"x", b"x"]
        await log.ack(one)
        await log.ack_in_bulk(many)
        log.flush()
    _, given, settled = load(tmp_path / "h.jsonl")
    assert [row.sequence for row in given.handed] == [1, 2]
    assert (settled.type, settled.sequences) == ("info", (0, 1, 2))


class FakeMetadata:
    """A route that was split once; the fence's command message is not known at first."""

    def __init__(self) -> None:
        self.latest = 1
        self.sealed = -1
        self.backlog = 0

    async def describe_route(self, subject: str, version: int = 0) -> pb.DescribeRouteResponse:
        number = (version or self.latest) * 10
        part = pb.OrderedPartition(
            number=number, lps=control.LpRange(first=0, end=8), broker_group="g1"
        )
        fenced = [10] if self.latest > 1 and self.sealed < 0 else []
        route = pb.OrderedRoute(
            version=version or self.latest, logical_partitions=8, partitions=[part], fenced=fenced
        )
        groups = [pb.OrderedGroup(group="g", backlog=self.backlog)]
        return pb.DescribeRouteResponse(route=route, latest_version=self.latest, groups=groups)

    async def route_history(self, subject: str) -> list[pb.RouteChangeInfo]:
        times = {"prepared": 1_000, "published": 1_005}
        return (
            [
                pb.RouteChangeInfo(
                    to_version=2, sources=[10], sealed={10: self.sealed}, times_ms=times
                )
            ]
            if self.latest > 1
            else []
        )


async def test_a_version_is_written_again_when_more_is_known_of_it(tmp_path: Path) -> None:
    metadata: Any = FakeMetadata()
    with Recorder(tmp_path / "h.jsonl") as recorder:
        routes = RouteRecorder(recorder, metadata, "orders")
        await routes.look()
        metadata.latest = 2
        await routes.look()
        await routes.look()
        metadata.sealed = 77
        await routes.look()
    one, two, again = load(tmp_path / "h.jsonl")
    assert isinstance(two, Rerouted)
    assert (one.version, one.partitions, one.logical_partitions) == (1, (Part(10, 0, 8, "g1"),), 8)
    assert (two.version, two.sources, two.sealed, two.fenced) == (
        2,
        (10,),
        (Sealed(10, -1),),
        (10,),
    )
    assert (again.version, again.sealed, again.fenced) == (2, (Sealed(10, 77),), (10,))
    assert two.began_ns is not None
    assert two.published_ns is not None
    assert two.published_ns - two.began_ns == pytest.approx(6_000_000, abs=1_000_000), (
        "rounded up, and on the history's clock"
    )


async def test_a_subject_is_drained_when_no_group_has_messages_left_in_any_partition() -> None:
    metadata: Any = FakeMetadata()
    assert await is_drained(metadata, "orders", ["g"])
    assert not await is_drained(metadata, "orders", ["g", "h"])
    metadata.backlog = 1
    assert not await is_drained(metadata, "orders", ["g"])
    metadata.backlog, metadata.latest = 0, 2
    assert not await is_drained(metadata, "orders", ["g"]), "a fenced partition may hold more"
