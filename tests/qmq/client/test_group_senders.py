"""Sending to several broker groups: spread, refused, stalled, uncertain. No message is stored
twice, and every error says the outcome.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from fake_cluster import NOT_STORED, UNKNOWN, FakeBroker, FakeGroup, Peer, Sent, cluster, route
from support import eventually

from qmq.client.connection.connection import ClientTiming
from qmq.errors import (
    ClientClosed,
    DeadlineExceeded,
    DiskFull,
    InvalidArgument,
    NoQuorum,
    NotMaster,
    Overloaded,
    QmqError,
    ReadOnly,
    UnknownSubject,
)
from qmq.wire.frame import Frame, FrameKind


def numbers(group: FakeGroup) -> list[int]:
    """Numbers of the batches as they were stored."""
    return [
        number for _, (_, number) in sorted((base, key) for key, (base, _) in group.stored.items())
    ]


async def test_batches_are_spread_over_the_groups_and_receipts_say_where() -> None:
    async with cluster(3) as it:
        for number in range(300):
            receipt = await it.mq.send("s", b"%d" % number)
            assert (
                b"%d" % number
                in next(group for group in it.groups if group.name == receipt.broker_group).bodies
            )
        assert sorted(it.bodies) == sorted(b"%d" % number for number in range(300))
        assert all(len(group.bodies) >= 60 for group in it.groups)
        for group in it.groups:
            assert numbers(group) == sorted(numbers(group))


async def test_lone_messages_gather_in_batches_while_one_is_on_its_way() -> None:
    async with cluster(3) as it:
        producer = it.mq.producer("s")
        await producer.send(b"first")
        for number in range(2000):
            producer.send(b"%d" % number)
            if number % 10 == 9:
                await asyncio.sleep(0)
        await producer.flush()
        arrived = sum(len(group.arrived) for group in it.groups)
        assert len(it.bodies) == 2001
        assert arrived < 150, "several groups must not mean many small batches"
        assert producer.stored_by_group == {
            group.name: len(group.bodies) for group in it.groups if group.bodies
        }


@pytest.mark.parametrize(
    "failure",
    [
        ReadOnly("drained"),
        NoQuorum("alone"),
        DiskFull("full"),
        Overloaded("busy"),
        NotMaster("gone"),
    ],
)
async def test_what_one_group_certainly_refuses_goes_to_another_at_once(failure: QmqError) -> None:
    async with cluster(2) as it:
        it.groups[0].refuse(failure)
        for number in range(50):
            assert (await it.mq.send("s", b"%d" % number)).broker_group == "g1"
        assert Counter(it.bodies) == Counter(b"%d" % number for number in range(50))


async def test_a_stalled_broker_group_holds_up_only_its_own_batches() -> None:
    async with cluster(2, timing=ClientTiming(stall_s=0.05)) as it:
        stalled, _ = it.groups
        stalled.on_produce = stalled.store_silently
        producer = it.mq.producer("s", batch_messages=1, delivery_timeout_s=1.5)
        tickets = []
        for number in range(200):
            tickets.append(producer.send(b"%d" % number))
            await asyncio.sleep(0.001)
        outcomes = Counter[str]()
        for ticket in tickets:
            try:
                outcomes[(await ticket).broker_group] += 1
            except DeadlineExceeded as failure:
                outcomes[failure.outcome.name] += 1
        assert 0 < outcomes["UNKNOWN"] == len(stalled.stored) <= 64
        assert outcomes["g1"] == 200 - outcomes["UNKNOWN"]
        assert len(it.bodies) == 200


async def test_a_lone_open_batch_does_not_wait_for_a_stalled_group() -> None:
    async with cluster(2, timing=ClientTiming(stall_s=0.05, answer_s=1000.0)) as it:
        for group in it.groups:
            group.on_produce = group.store_silently
        producer = it.mq.producer("s", delivery_timeout_s=30)
        producer.send(b"stuck")
        await eventually(lambda: any(group.arrived for group in it.groups))
        free = next(group for group in it.groups if not group.arrived)
        free.on_produce = free.serve
        async with asyncio.timeout(20):
            assert (await producer.send(b"next")).broker_group == free.name
        producer.abort()


async def test_a_drained_group_gets_nothing_new_and_is_used_again_when_it_is_resumed() -> None:
    async with cluster(2, can_push=True) as it:
        drained = it.groups[0]
        drained.is_writable = False
        await it.mq.send("s", b"0")
        await it.meta.is_watched.wait()
        for number in range(1, 100):
            await it.mq.send("s", b"%d" % number)
        assert not drained.arrived
        drained.is_writable = True
        it.meta.push(groups=["g0"], subjects=["s"])
        async with asyncio.timeout(20):
            while not drained.stored:
                await it.mq.send("s", b"more")


@pytest.mark.parametrize("is_told", [True, False])
async def test_when_no_group_takes_messages_the_error_says_so(is_told: bool) -> None:
    async with cluster(2) as it:
        for group in it.groups:
            group.is_writable = not is_told
            group.refuse(ReadOnly("drained"))
        # a busy machine reaches the groups late, too
        producer = it.mq.producer("s", delivery_timeout_s=4)
        with pytest.raises(DeadlineExceeded, match="E308") as refused:
            await producer.send(b"x")
        assert refused.value.outcome is NOT_STORED
        assert isinstance(refused.value.__cause__, ReadOnly)
        for group in it.groups:
            group.is_writable, group.on_produce = True, group.serve
        await it.mq.send("s", b"y")


async def test_a_message_that_no_broker_can_store_fails_at_once_as_not_stored() -> None:
    async with cluster(1) as it:
        it.groups[0].refuse(InvalidArgument("no"))
        with pytest.raises(InvalidArgument) as refused:
            await it.mq.send("s", b"x")
        assert refused.value.outcome is NOT_STORED
        with pytest.raises(UnknownSubject) as unknown:
            await it.mq.send("none", b"x")
        assert unknown.value.outcome is NOT_STORED


async def test_without_brokers_a_message_is_reported_as_not_stored() -> None:
    async with cluster(1) as it:
        for replica in it.groups[0].replicas:
            await replica.stop()
        with pytest.raises(DeadlineExceeded, match="E301") as failed:
            await it.mq.producer("s", delivery_timeout_s=2).send(b"x")
        assert failed.value.outcome is NOT_STORED


async def test_closing_fails_sent_batches_as_unknown_and_unsent_ones_as_not_stored() -> None:
    async with cluster(1) as it:
        (group,) = it.groups
        group.on_produce = group.store_silently
        producer = it.mq.producer("s", batch_messages=1)
        tickets = [producer.send(b"%d" % number) for number in range(40)]
        await eventually(lambda: len(group.arrived) == 32)
        producer.abort()
        outcomes = []
        for ticket in tickets:
            with pytest.raises(ClientClosed) as closed:
                await ticket
            outcomes.append(closed.value.outcome)
        assert outcomes == [UNKNOWN] * 32 + [NOT_STORED] * 8


async def test_a_group_without_a_master_costs_the_others_nothing() -> None:
    async with cluster(2) as it:
        it.groups[0].master = None
        it.meta.answer = lambda _: [route(group) for group in it.groups]
        for number in range(60):
            assert (await it.mq.send("s", b"%d" % number)).broker_group == "g1"


@pytest.mark.parametrize(
    ("acks", "kind"), [("quorum", FrameKind.PRODUCE), ("master", FrameKind.PRODUCE_FAST)]
)
async def test_the_sender_chooses_which_replicas_an_acknowledgement_needs(
    acks: str, kind: FrameKind
) -> None:
    async with cluster(1) as it:
        kinds = []
        group = it.groups[0]

        def note(broker: FakeBroker, peer: Peer, request: Frame, sent: Sent) -> None:
            kinds.append(request.kind)
            group.serve(broker, peer, request, sent)

        group.on_produce = note
        await it.mq.producer("s", acks=acks).send(b"x")
        assert kinds == [kind]
        with pytest.raises(InvalidArgument, match="quorum"):
            it.mq.producer("s", acks="all")
