"""The ordered producer over real sockets: routes change, brokers fall silent, answers get lost, and
per key the stored order stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from fake_cluster import (
    NOT_STORED,
    UNKNOWN,
    Cluster,
    FakeBroker,
    FakeGroup,
    FakeOrder,
    FakePartition,
    Peer,
    Sent,
    cluster,
    ordered_cluster,
)
from qmq_ordering.hashing import logical_partition
from support import eventually

import qmq
from qmq.client.connection.connection import ClientTiming
from qmq.client.producing.ordered.producer import OrderedProducer
from qmq.errors import (
    ClientClosed,
    DeadlineExceeded,
    DiskFull,
    InvalidArgument,
    NotConnected,
    OrderMismatch,
    UnknownSubject,
)
from qmq.wire.batch_columns import BatchFlag
from qmq.wire.frame import Frame

LPS = 8
KEYS = [b"key-%d" % number for number in range(24)]


def lp(key: bytes) -> int:
    return logical_partition(key, LPS)


LOW = [key for key in KEYS if lp(key) < 4]
"""Keys of partition 1, on g0."""
HIGH = [key for key in KEYS if lp(key) >= 4]
"""Keys of partition 2, on g1."""


class Sender:
    """Numbers messages per key, and knows what must be stored."""

    def __init__(self, producer: OrderedProducer) -> None:
        self.producer = producer
        self.sent: dict[bytes, list[bytes]] = {}
        self.tickets: list[qmq.Ticket] = []

    def send(self, keys: list[bytes], rounds: int) -> None:
        for _ in range(rounds):
            for key in keys:
                mine = self.sent.setdefault(key, [])
                mine.append(b"%s:%d" % (key, len(mine)))
                self.tickets.append(self.producer.send(mine[-1], key))

    async def all_stored_in_order(self, order: FakeOrder) -> None:
        for ticket in self.tickets:
            await ticket
        assert order.stored == self.sent


def silent(group: FakeGroup) -> None:
    """A server that accepts requests and never answers."""
    group.on_produce = lambda *_: None


def per_key_is_sorted(stored: dict[bytes, list[bytes]]) -> bool:
    """Whether the stored messages of each key are in the order of sending, each message once."""
    numbers = [[int(body.rpartition(b":")[2]) for body in bodies] for bodies in stored.values()]
    return all(each == sorted(set(each)) for each in numbers)


# --- several partitions on one broker group -------------------------------------------------------


@asynccontextmanager
async def two_partitions_of_one_group(
    gather_s: float,
) -> AsyncIterator[tuple[OrderedProducer, FakeGroup, FakePartition]]:
    """A producer with batches of up to 100, which has sent one message to each partition; and the
    second partition, that of `HIGH`.
    """
    async with ordered_cluster(1, timing=ClientTiming(gather_s=gather_s)) as (it, order):
        order.publish([1], [(0, 4, "g0"), (4, 8, "g0")])
        async with it.mq.ordered_producer("s", batch_messages=100) as producer:
            for key in (LOW[0], HIGH[0]):
                await producer.send(b"located", key)
            yield producer, it.groups[0], order.partitions[3]


async def awaited(ticket: qmq.Ticket) -> None:
    await ticket


class Held:
    """Keeps the requests of a group unanswered until `serve`."""

    def __init__(self, group: FakeGroup) -> None:
        self._group = group
        self.requests: list[tuple[FakeBroker, Peer, Frame, Sent]] = []
        group.on_produce = lambda *request: self.requests.append(request)

    @property
    def bodies(self) -> list[list[bytes]]:
        return [sent.bodies for *_, sent in self.requests]

    def serve(self) -> None:
        self._group.on_produce = self._group.serve
        for request in self.requests:
            self._group.serve(*request)


async def test_messages_gather_while_their_busy_group_answers_others() -> None:
    async with two_partitions_of_one_group(gather_s=60) as (producer, group, second):
        held = Held(group)
        tickets = [producer.send(b"%d" % number, LOW[0]) for number in range(50)]
        await eventually(lambda: len(held.requests) == 1)
        for number in range(3):
            tickets.append(producer.send(b"%d" % number, HIGH[0]))
            await asyncio.sleep(0)
        held.serve()
        for ticket in tickets:
            await ticket
        assert [sent.bodies for sent in second.log[1:]] == [[b"0", b"1", b"2"]]


async def test_an_awaited_message_does_not_wait_for_a_busy_group() -> None:
    async with two_partitions_of_one_group(gather_s=60) as (producer, group, _):
        held = Held(group)
        producer.send_many([b"x"] * 50, [LOW[0]] * 50)
        awaiting = asyncio.create_task(awaited(producer.send(b"awaited", HIGH[0])))
        await eventually(lambda: held.bodies == [[b"x"] * 50, [b"awaited"]])
        held.serve()
        await awaiting


async def test_a_message_gathers_others_for_a_limited_time() -> None:
    async with two_partitions_of_one_group(gather_s=0) as (producer, group, _):
        held = Held(group)
        producer.send_many([b"x"] * 50, [LOW[0]] * 50)
        producer.send(b"late", HIGH[0])
        await eventually(lambda: held.bodies == [[b"x"] * 50, [b"late"]])
        held.serve()


async def test_a_full_batch_leaves_although_its_group_is_busy() -> None:
    async with two_partitions_of_one_group(gather_s=60) as (producer, group, _):
        held = Held(group)
        producer.send_many([b"x"] * 50, [LOW[0]] * 50)
        await eventually(lambda: len(held.requests) == 1)
        producer.send_many([b"y"] * 110, [HIGH[0]] * 110)
        await eventually(lambda: held.bodies == [[b"x"] * 50, [b"y"] * 100])
        held.serve()
        await producer.flush()
        assert group.partitions[3].log[-1].bodies == [b"y"] * 10


# --- while nothing changes ------------------------------------------------------------------------


async def test_each_key_goes_to_its_partition_and_receipts_say_where() -> None:
    async with ordered_cluster() as (it, order), it.mq.ordered_producer("s") as producer:
        for number, key in enumerate(KEYS):
            ticket = producer.send(b"%d" % number, key)
            place = producer.place_of_last(ticket)
            receipt = (await ticket).receipt(place)
            log = order.partitions[receipt.partition].log
            assert (
                order.partitions[receipt.partition].part.range.first
                <= lp(key)
                < order.partitions[receipt.partition].part.range.end
            )
            assert [body for sent in log for body in sent.bodies][
                receipt.sequence
            ] == b"%d" % number
            assert receipt.broker_group == order.partitions[receipt.partition].part.group
        assert producer.stored_by_group == {"g0": len(LOW), "g1": len(HIGH)}


async def test_many_messages_keep_their_order_and_receipts_come_in_the_order_of_the_call() -> None:
    async with ordered_cluster() as (it, order):
        producer = it.mq.ordered_producer("s", batch_messages=7)
        bodies = [b"%d" % number for number in range(240)]
        keys = [KEYS[number % len(KEYS)] for number in range(240)]
        tags = [[f"t{number % 3}"] for number in range(240)]
        await producer.send(b"located", KEYS[0])
        receipts = await producer.send_many(bodies, keys, tags)
        assert len(receipts) == 240
        where = {
            (number, sequence): body
            for number, partition in order.partitions.items()
            for sequence, body in enumerate(body for sent in partition.log for body in sent.bodies)
        }
        assert [where[receipt.partition, receipt.sequence] for receipt in receipts] == bodies
        assert [where[receipts[at].partition, receipts[at].sequence] for at in (0, 100, -1)] == [
            b"0",
            b"100",
            b"239",
        ]
        for key in KEYS:
            mine = [body for body, its in zip(bodies, keys, strict=True) if its == key]
            assert [body for body in order.stored[key] if body != b"located"] == mine
        await producer.close()


async def test_messages_sent_before_the_route_is_known_wait_for_it_in_order() -> None:
    async with ordered_cluster() as (it, order):
        sender = Sender(it.mq.ordered_producer("s", batch_messages=10))
        sender.send(KEYS, 20)
        many = it.mq.ordered_producer("s").send_many([b"x"] * 3, [b"k1", b"k2", b"k3"])
        assert len(await many) == 3
        for ticket in sender.tickets:
            await ticket
        assert {key: order.stored[key] for key in KEYS} == sender.sent


async def test_a_message_without_a_key_is_refused_where_it_is_sent() -> None:
    async with ordered_cluster() as (it, _):
        producer = it.mq.ordered_producer("s")
        for key in (None, "", b"", 7, bytearray(b"k"), ["k"]):
            with pytest.raises(InvalidArgument, match="key"):
                producer.send(b"x", key)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="key"):
                producer.send_many([b"x"], [key])  # type: ignore[list-item]
        with pytest.raises(InvalidArgument, match="keys"):
            producer.send_many([b"x"], None)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="2 bodies, but 1 keys"):
            producer.send_many([b"x", b"y"], ["k"])
        with pytest.raises(InvalidArgument, match="tag"):
            producer.send(b"x", "k", tags=[1])  # type: ignore[list-item]
        await producer.close()


async def test_the_client_sends_to_an_ordered_subject_by_itself() -> None:
    async with ordered_cluster() as (it, order):
        receipt = await it.mq.send("s", b"x", key=LOW[0])
        assert (receipt.partition, receipt.broker_group) == (1, "g0")
        await it.mq.send_many("s", [b"y", b"z"], keys=[LOW[0], LOW[0]])
        assert order.stored[LOW[0]] == [b"x", b"y", b"z"]
        with pytest.raises(InvalidArgument, match="key"):
            await it.mq.send("s", b"x")
        with pytest.raises(UnknownSubject):
            await it.mq.send("none", b"x", key="k")


async def test_the_wrong_kind_of_producer_gets_the_name_of_the_right_one() -> None:
    async with ordered_cluster() as (it, _):
        with pytest.raises(OrderMismatch, match="ordered_producer") as refused:
            await it.mq.producer("s").send(b"x")
        assert refused.value.outcome is NOT_STORED
        with pytest.raises(InvalidArgument, match="quorum"):
            await it.mq.ordered_producer("s", acks="master").send(b"x", "k")
        with pytest.raises(InvalidArgument, match="resend"):
            it.mq.ordered_producer("s", unknown="guess")
    async with cluster(1) as plain:
        producer = plain.mq.ordered_producer("s")
        with pytest.raises(OrderMismatch, match="unordered"):
            await producer.send(b"x", "k")
        with pytest.raises(OrderMismatch, match="unordered"):
            producer.send(b"x", "k")


async def test_acks_of_the_master_alone_are_for_best_effort_order() -> None:
    async with ordered_cluster(order="best-effort") as (it, order):
        await it.mq.ordered_producer("s", acks="master", compression="zstd").send(
            b"x" * 100, LOW[0]
        )
        assert order.stored == {LOW[0]: [b"x" * 100]}


# --- brokers in trouble ---------------------------------------------------------------------------


async def test_a_timed_out_batch_fails_with_those_behind_it_and_later_ones_continue() -> None:
    async with ordered_cluster() as (it, order):
        producer = it.mq.ordered_producer("s", batch_messages=1, delivery_timeout_s=1.5)
        await asyncio.gather(producer.send(b"a:0", LOW[0]), producer.send(b"b:0", HIGH[0]))
        it.groups[0].on_produce = it.groups[0].store_silently
        stuck = [producer.send(b"a:%d" % number, LOW[0]) for number in range(1, 41)]
        healthy = producer.send(b"b:1", HIGH[0])
        await eventually(lambda: len(it.groups[0].arrived) >= 32)
        late = producer.send(b"a:41", LOW[0])
        await healthy
        outcomes = []
        for ticket in [*stuck, late]:
            with pytest.raises(DeadlineExceeded) as failed:
                await ticket
            outcomes.append(failed.value.outcome)
        assert outcomes == [UNKNOWN] * 32 + [NOT_STORED] * 9
        it.groups[0].on_produce = it.groups[0].serve
        it.groups[0].replicas[0].peers[0].cut()
        await producer.send(b"a:42", LOW[0])
        assert per_key_is_sorted(order.stored)
        assert order.stored[LOW[0]][-1] == b"a:42"


async def test_messages_that_gather_behind_one_out_of_time_fail_too() -> None:
    async with ordered_cluster() as (it, order):
        producer = it.mq.ordered_producer("s", delivery_timeout_s=1.5)
        await producer.send(b"a:0", LOW[0])
        silent(it.groups[0])
        first = producer.send(b"a:1", LOW[0])
        await eventually(lambda: len(it.groups[0].arrived) == 2)
        gathering = producer.send(b"a:2", LOW[0])
        with pytest.raises(DeadlineExceeded):
            await first
        with pytest.raises(DeadlineExceeded, match="earlier message") as failed:
            await gathering
        assert failed.value.outcome is NOT_STORED
        assert order.stored == {LOW[0]: [b"a:0"]}


async def test_without_brokers_a_message_is_reported_as_not_stored() -> None:
    async with ordered_cluster() as (it, _):
        it.meta.answer = lambda _: []
        producer = it.mq.ordered_producer("s", delivery_timeout_s=0.3)
        with pytest.raises(DeadlineExceeded) as failed:
            await producer.send(b"x", "k")
        assert failed.value.outcome is NOT_STORED
        with pytest.raises(UnknownSubject):
            await it.mq.ordered_producer("none").send(b"x", "k")


async def test_closing_fails_sent_batches_as_unknown_and_unsent_ones_as_not_stored() -> None:
    async with ordered_cluster(1) as (it, _):
        producer = it.mq.ordered_producer("s", batch_messages=2)
        await asyncio.gather(producer.send(b"0", "k"), producer.send(b"0", "k"))
        silent(it.groups[0])
        tickets = [producer.send(b"%d" % number, "k") for number in range(81)]
        await eventually(lambda: len(it.groups[0].arrived) == 33)
        producer.abort()
        outcomes = []
        for ticket in tickets:
            with pytest.raises(ClientClosed) as closed:
                await ticket
            outcomes.append(closed.value.outcome)
        assert outcomes == [UNKNOWN] * 64 + [NOT_STORED] * 17
        with pytest.raises(ClientClosed):
            producer.send(b"x", "k")


# --- routes change --------------------------------------------------------------------------------


async def test_a_ticket_whose_batch_was_cut_says_where_each_message_is() -> None:
    async with ordered_cluster() as (it, order):
        producer = it.mq.ordered_producer("s")
        await producer.send(b"first", LOW[0])
        order.publish([1], [(0, 2, "g0"), (2, 4, "g1")])
        bodies = [b"%d" % number for number in range(40)]
        for number, body in enumerate(bodies):
            ticket = producer.send(body, LOW[number % len(LOW)])
        receipts = await ticket
        assert len(receipts) == 40
        assert {receipt.partition for receipt in receipts} == {3, 4}
        logs = {
            number: [body for sent in order.partitions[number].log for body in sent.bodies]
            for number in (3, 4)
        }
        assert [logs[receipt.partition][receipt.sequence] for receipt in receipts] == bodies
        assert len({receipt.id for receipt in receipts}) == 40
        assert receipts.receipt(7) == list(receipts)[7]
        assert receipts.id(7) == receipts.receipt(7).id


async def test_a_merge_takes_each_side_over_when_that_side_is_settled() -> None:
    async with ordered_cluster() as (it, order):
        sender = Sender(it.mq.ordered_producer("s", batch_messages=10))
        sender.send(KEYS, 5)
        await sender.producer.flush()
        held: list[Callable[[], None]] = []

        def hold(broker: FakeBroker, peer: Peer, request: Frame, sent: Sent) -> None:
            held.append(lambda: it.groups[0].serve(broker, peer, request, sent))

        it.groups[0].on_produce = hold
        sender.send(KEYS, 10)
        await eventually(lambda: len(held) > 3)
        held[0]()
        order.publish([1, 2], [(0, 8, "g1")])
        sender.send(KEYS, 10)
        await eventually(lambda: bool(order.partitions[3].log))
        assert all(key in HIGH for sent in order.partitions[3].log for key in sent.keys)
        it.groups[0].on_produce = it.groups[0].serve
        for answer in held[1:]:
            answer()
        await sender.all_stored_in_order(order)
        assert any(key in LOW for sent in order.partitions[3].log for key in sent.keys)


async def _fenced(it: Cluster, order: FakeOrder, producer: OrderedProducer) -> list[qmq.Ticket]:
    """Ten messages: the group stores five and falls silent; it is fenced, and its partition is
    moved.
    """
    await producer.send(b"a:0", LOW[0])
    group = it.groups[0]
    group.on_produce = group.store_silently
    tickets = [producer.send(b"a:%d" % number, LOW[0]) for number in range(1, 6)]
    await eventually(lambda: len(group.arrived) == 6)
    silent(group)
    tickets += [producer.send(b"a:%d" % number, LOW[0]) for number in range(6, 11)]
    await eventually(lambda: len(group.arrived) == 11)
    order.publish([1], [(0, 4, "g1")], fenced=True)
    it.meta.push(subjects=["s"])
    await eventually(lambda: producer.route_version == 2)
    tickets.append(producer.send(b"a:11", LOW[0]))
    return tickets


async def test_after_a_fence_doubtful_batches_are_sent_first_under_their_first_ids() -> None:
    async with ordered_cluster(can_push=True, timing=ClientTiming(fenced_s=0.1)) as (it, order):
        producer = it.mq.ordered_producer("s", batch_messages=1)
        tickets = await _fenced(it, order, producer)
        receipts = [(await ticket).receipt(0) for ticket in tickets]
        assert {receipt.partition for receipt in receipts} == {3}
        old = [sent for sent in order.partitions[1].log if sent.bodies != [b"a:0"]]
        new = order.partitions[3].log
        assert [sent.bodies[0] for sent in old] == [b"a:%d" % number for number in range(1, 6)]
        assert [sent.bodies[0] for sent in new] == [b"a:%d" % number for number in range(1, 12)]
        for first, again, receipt in zip(old, new, receipts, strict=False):
            assert again.ids == (qmq.MessageId(first.producer_id, first.number, 0).to_bytes(),)
            assert receipt.id.to_bytes() == again.ids[0]
        assert not new[-1].ids


async def test_after_a_fence_unknown_batches_fail_if_copies_are_not_allowed() -> None:
    async with ordered_cluster(can_push=True, timing=ClientTiming(fenced_s=0.1)) as (it, order):
        producer = it.mq.ordered_producer("s", batch_messages=1, unknown="fail")
        tickets = await _fenced(it, order, producer)
        for ticket in tickets[:-1]:
            with pytest.raises(NotConnected, match="fenced") as failed:
                await ticket
            assert failed.value.outcome is UNKNOWN
        assert (await tickets[-1]).partition == 3
        assert order.stored[LOW[0]] == [b"a:%d" % number for number in [0, 1, 2, 3, 4, 5, 11]]


async def test_consumers_wait_for_a_silent_group_until_it_is_fenced() -> None:
    async with ordered_cluster(can_push=True) as (it, order):
        producer = it.mq.ordered_producer("s", batch_messages=1)
        await producer.send(b"a:0", LOW[0])
        silent(it.groups[0])
        ticket = producer.send(b"a:1", LOW[0])
        await eventually(lambda: len(it.groups[0].arrived) == 2)
        order.publish([1], [(0, 4, "g1")])
        it.meta.push(subjects=["s"])
        await eventually(lambda: it.meta.located.count("s") > 1)
        other = await producer.send(b"b:0", HIGH[0])
        assert other.partition == 2
        assert not order.partitions[3].log
        it.groups[0].on_produce = it.groups[0].serve
        it.groups[0].replicas[0].peers[0].cut()
        assert (await ticket).partition == 3
        assert order.stored[LOW[0]] == [b"a:0", b"a:1"]


# --- best-effort order ----------------------------------------------------------------------------


async def test_best_effort_order_sends_around_a_group_that_refuses() -> None:
    async with ordered_cluster(order="best-effort") as (it, order):
        producer = it.mq.ordered_producer("s", batch_messages=5)
        await asyncio.gather(producer.send(b"0", LOW[0]), producer.send(b"0", HIGH[0]))
        it.groups[0].refuse(DiskFull("full"))
        receipts = [
            (await producer.send(b"%d" % number, LOW[0])).receipt(0) for number in range(1, 30)
        ]
        assert {receipt.broker_group for receipt in receipts} == {"g1"}
        bent = [sent for sent in order.partitions[2].log if sent.flags & BatchFlag.BENT]
        assert all(4 <= each < 8 for sent in bent for each in sent.lps)
        assert all(key == LOW[0] for sent in bent for key in sent.keys)
        assert producer.bent == sum(len(sent.bodies) for sent in bent) == 29
        it.groups[0].on_produce = it.groups[0].serve
        async with asyncio.timeout(20):
            while (await producer.send(b"later", LOW[0])).broker_group != "g0":
                pass
        assert not order.partitions[1].log[-1].flags


async def test_best_effort_order_does_not_resend_batches_that_may_be_stored() -> None:
    async with ordered_cluster(order="best-effort", timing=ClientTiming(stall_s=0.05)) as (
        it,
        order,
    ):
        producer = it.mq.ordered_producer("s")
        await asyncio.gather(producer.send(b"0", LOW[0]), producer.send(b"0", HIGH[0]))
        it.groups[0].on_produce = it.groups[0].store_silently
        stuck = producer.send(b"1", LOW[0])
        await eventually(lambda: len(order.partitions[1].log) == 2)
        async with asyncio.timeout(20):
            assert (await producer.send(b"2", LOW[0])).broker_group == "g1"
        it.groups[0].on_produce = it.groups[0].serve
        it.groups[0].replicas[0].peers[0].cut()
        assert (await stuck).broker_group == "g0"
        assert order.stored[LOW[0]].count(b"1") == 1


async def test_best_effort_order_does_without_a_group_that_is_gone() -> None:
    async with ordered_cluster(order="best-effort") as (it, order):
        for replica in it.groups[0].replicas:
            await replica.stop()
        producer = it.mq.ordered_producer("s")
        async with asyncio.timeout(20):
            assert (await producer.send(b"x", LOW[0])).broker_group == "g1"
        assert order.partitions[2].log[-1].flags & BatchFlag.BENT


# --- hazards that the producer decides (docs: hazards of peers, by number) ------------------------


@pytest.mark.parametrize("taken", [0, 1, 7])
async def test_hazard_19_batches_refused_at_the_seal_are_sent_on_in_order(taken: int) -> None:
    async with ordered_cluster() as (it, order):
        sender = Sender(it.mq.ordered_producer("s", batch_messages=10))
        sender.send(LOW, 1)
        await sender.producer.flush()
        before = len(order.partitions[1].log)

        def seal_behind(broker: FakeBroker, peer: Peer, request: Frame, sent: Sent) -> None:
            if len(order.partitions[1].log) == before + taken and not order.partitions[1].is_sealed:
                order.publish([1], [(0, 2, "g1"), (2, 4, "g0")])
            it.groups[0].serve(broker, peer, request, sent)

        it.groups[0].on_produce = seal_behind
        sender.send(LOW, 20)
        await sender.all_stored_in_order(order)
        assert len(order.partitions[1].log) == before + taken
