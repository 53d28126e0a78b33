"""A client that sends to many subjects holds memory for the busy ones only."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cluster import FakeBroker, Peer, Sent, cluster
from support import eventually

import qmq
from qmq.client.connection.connection import ClientTiming
from qmq.client.connection.pool import ClientCounters
from qmq.client.producing.producer import ProducerBase, ProducerOptions
from qmq.errors import NotConnected
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.process.event_loop import EventLoopTick
from qmq.testing import TestCluster
from qmq.wire.frame import Frame

QUICK = ClientTiming(idle_producer_s=0.5)


async def send_to_all(mq: qmq.Client, subjects: int) -> None:
    for at in range(0, subjects, 100):
        await asyncio.gather(*[mq.send(f"s-{number}", b"x") for number in range(at, at + 100)])


async def test_what_an_idle_subject_needs_is_given_up_and_what_a_busy_one_needs_is_kept(
    node: Node,
) -> None:
    async with qmq.Client(node.address, timing=QUICK) as mq:
        await send_to_all(mq, 100)
        receipt = await mq.send("s-7", b"busy")
        (busy,) = [each for each in mq.producers if each.subject == "s-7"]
        while mq.producers != [busy]:
            receipt = await mq.send("s-7", b"busy")
        await eventually(lambda: not mq.producers)
        again = await mq.send("s-7", b"again")
        assert (again.sequence, again.id.producer_id) == (
            receipt.sequence + 1,
            receipt.id.producer_id,
        )
        assert [each.subject for each in mq.producers] == ["s-7"]


async def test_a_producer_with_an_undecided_message_is_kept() -> None:
    async with cluster(1, timing=QUICK) as it:
        (group,) = it.groups
        held: list[Callable[[], None]] = []

        def hold(broker: FakeBroker, peer: Peer, request: Frame, sent: Sent) -> None:
            if sent.bodies == [b"held"]:
                held.append(lambda: group.serve(broker, peer, request, sent))
            else:
                group.serve(broker, peer, request, sent)

        group.on_produce = hold
        sending = asyncio.create_task(it.mq.send("s", b"held"))
        await eventually(lambda: bool(held))
        (kept,) = it.mq.producers
        for number in range(3):
            await it.mq.send(f"other-{number}", b"x")
            await eventually(lambda: it.mq.producers == [kept])
        held[0]()
        await sending


async def test_an_ordered_subject_is_given_up_too_and_its_order_continues(node: Node) -> None:
    async with qmq.Client(node.address, timing=QUICK) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("o", order=Order.STRICT, logical_partitions=16), partitions=2
        )
        for number in range(5):
            await mq.send("o", b"%d" % number, key="k")
            await eventually(lambda: not mq.producers)
        async with mq.ordered_consumer("o", "g") as consumer:
            assert [(await anext(consumer)).body for _ in range(5)] == [
                b"0",
                b"1",
                b"2",
                b"3",
                b"4",
            ]


async def test_nothing_refers_to_what_was_given_up(node: Node) -> None:
    async with qmq.Client(node.address, timing=QUICK) as mq:
        sending = asyncio.create_task(send_to_all(mq, 300))
        made: list[weakref.ref[object]] = []
        while not made:  # those that wait for answers are not given up, however slow the machine is
            await asyncio.sleep(0)
            made = [weakref.ref(each) for each in mq.producers]
        await sending

        def are_freed() -> bool:
            gc.collect()
            return not any(each() is not None for each in made)

        await eventually(lambda: not mq.producers)
        await eventually(are_freed)


async def test_producers_of_every_kind_are_given_up() -> None:
    async with TestCluster() as cluster:
        mq = cluster.client(timing=ClientTiming(idle_producer_s=0.06))
        for number in range(10):
            await mq.send(f"s-{number}", b"x", acks="master")
            await mq.send(f"s-{number}", b"x", delay=timedelta(hours=1))
        await eventually(lambda: not mq.producers)
        await mq.send("s-1", b"x", acks="master")
        await mq.send("s-1", b"x", delay=timedelta(hours=1))


class Failing(ProducerBase):
    """A producer all of whose messages fail."""

    def fail(self, ticket: Any) -> None:
        self._taken(1)
        self._decided(ticket, 1, NotConnected(ticket.name))

    @property
    def is_idle(self) -> bool:
        return True

    def _close_all(self) -> None: ...

    def _abandon_all(self) -> None: ...


class Told:
    """A ticket."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, False


async def test_a_producer_that_is_never_flushed_keeps_few_of_its_failures() -> None:
    links: Any = SimpleNamespace(is_closed=False, round=EventLoopTick(), counters=ClientCounters())
    producer = Failing(links, "s", ProducerOptions())
    tickets = [Told(f"{number}") for number in range(5_000)]
    kept = [weakref.ref(each) for each in tickets]
    for each in tickets:
        producer.fail(each)
        each.seen = each.name == "0"
    del tickets, each
    gc.collect()
    assert sum(each() is not None for each in kept) <= 1_000
    with pytest.raises(NotConnected, match="1"):
        await producer.flush()
