"""Retries: short ones are the broker's, longer ones go to a delay group first, and only then is the
message done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest
from fake_cluster import (
    DelayCluster,
    FakeBroker,
    FakeDelayGroup,
    FakeGroup,
    FakeQueue,
    Peer,
    Sent,
    delay_cluster,
)
from support import eventually

import qmq
from qmq.client.connection.connection import TIMING, ClientTiming
from qmq.client.consuming.long_retries import LongRetry, batches, retry_columns
from qmq.client.consuming.message import BatchSlice, DecodedBatch, Message, Messages
from qmq.errors import ClientClosed, DelayTooLong, Overloaded, ReadOnly
from qmq.model import DelayedId, MessageId
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import BatchView, Envelope, Kind, encode, place, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Columns
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import BY_GROUP_MS, Range, Settlement, Verdict

HOUR = timedelta(hours=1)
LONG = timedelta(days=10)
CREATED_MS = 1_700_000_000_000


class Queue(FakeQueue):
    """The consuming side of a broker group: it hands out columns, and knows the verdicts that a
    consumer had given when it left.
    """

    def __init__(self, group: FakeGroup) -> None:
        super().__init__(group)
        self.settled_when_left: list[Settlement] | None = None
        self.heartbeats = 0
        for replica in group.replicas:
            replica.handle |= {
                FrameKind.HEARTBEAT: self._heartbeat,
                FrameKind.DETACH: self._leave,
            }

    def _heartbeat(self, peer: Peer, request: Frame) -> None:
        self.heartbeats += 1
        peer.answer(request, FrameKind.OK)

    def _leave(self, peer: Peer, request: Frame) -> None:
        self.settled_when_left = self.settled
        peer.answer(request, FrameKind.OK)

    async def hand_out(self, columns: Columns, *, attempt: int = 1, flags: int = 0) -> None:
        """A batch of new messages."""
        await eventually(lambda: bool(self.pulls))
        peer, request = self.pulls.pop(0)
        base, count = self.next, len(columns.bodies)
        self.next += count
        envelope, region = encode(
            b"s",
            columns,
            producer_id=1,
            batch_sequence=base,
            create_time_ms=CREATED_MS,
            flags=flags,
        )
        total, region_crc = sent_sizes(envelope)
        head = wire.pack_delivery(1, base, [Range(base, count, attempt, 0)], 1)
        peer.answer(
            request,
            FrameKind.MESSAGES,
            head + place(Kind.DATA, total, region_crc, base, 1, 1, 1, 0) + region,
        )

    async def fail_over(self) -> None:
        """The other replica leads, and knows of no delivery."""
        assert self.group.master is not None
        peers = list(self.group.master.peers)
        self.pulls.clear()
        self.group.fail_over()
        for peer in peers:
            peer.cut()
        await eventually(lambda: bool(self.pulls))

    async def settled_all(self, count: int) -> list[Settlement]:
        """The verdicts on `count` messages, once they have arrived."""
        await eventually(lambda: sum(each.last - each.first + 1 for each in self.settled) >= count)
        return self.settled


class Held:
    """A delay group that stores a batch when the test says so."""

    def __init__(self, group: FakeDelayGroup) -> None:
        self.group = group
        self.arrived: list[tuple[FakeBroker, Peer, Frame, Sent]] = []
        group.on_produce = lambda *each: self.arrived.append(each)

    async def one(self) -> None:
        """Wait until a batch is here."""
        await eventually(lambda: bool(self.arrived))

    def store(self) -> None:
        """Store all batches, now and later ones."""
        self.group.on_produce = self.group.serve
        for each in self.arrived:
            self.group.serve(*each)


@pytest.fixture
def timing() -> ClientTiming:
    return TIMING


@pytest.fixture
async def it(timing: ClientTiming) -> AsyncIterator[DelayCluster]:
    async with delay_cluster(timing=timing) as found:
        yield found


@pytest.fixture
def queue(it: DelayCluster) -> Queue:
    return Queue(it.groups[0])


async def taken(
    it: DelayCluster, queue: Queue, columns: Columns, **how: int
) -> tuple[qmq.Consumer, Messages]:
    """A consumer, and what it was handed."""
    consumer = it.mq.consumer("s", "ops", ack="explicit")
    pulling = asyncio.create_task(consumer.pull(10_000))
    await queue.hand_out(columns, **how)
    return consumer, await pulling


def nacked(first: int, last: int, delay_ms: int = 3_600_000) -> Settlement:
    return Settlement(first, last, Verdict.NACK, delay_ms)


def acked(first: int, last: int) -> Settlement:
    return Settlement(first, last, Verdict.ACK, 0)


def each_of(settlements: Sequence[Settlement]) -> list[Settlement]:
    """One verdict a message, by pull sequence: how they are joined depends on when they leave."""
    return sorted(
        each._replace(first=pull, last=pull)
        for each in settlements
        for pull in range(each.first, each.last + 1)
    )


# --- where a retry goes ---------------------------------------------------------------------------


async def test_up_to_an_hour_the_broker_keeps_the_retry(it: DelayCluster, queue: Queue) -> None:
    _, found = await taken(it, queue, Columns([b"0", b"1", b"2"]))
    found[0].nack(HOUR)
    found[1].nack()
    found[2].nack(timedelta(microseconds=1))
    assert await queue.settled_all(3) == [
        nacked(0, 0),
        nacked(1, 1, BY_GROUP_MS),
        nacked(2, 2, 1),
    ], "never early"
    assert not it.kept


async def test_a_longer_one_goes_to_a_delay_group_directed_and_then_the_message_is_done(
    it: DelayCluster, queue: Queue
) -> None:
    columns = Columns(
        [b"x", b"y"],
        keys=[b"k", b""],
        tags=[("t",), ()],
        headers=[{"h": b"v"}, {}],
        create_deltas=[0, 500],
        message_ids=[MessageId(9, 8, 7).to_bytes(), MessageId(9, 8, 6).to_bytes()],
    )
    held = Held(it.delays[0])
    before = time.time_ns() // 1_000_000
    _, found = await taken(it, queue, columns, attempt=3)
    found.nack(HOUR + timedelta(milliseconds=1))
    await held.one()
    after = time.time_ns() // 1_000_000
    assert not queue.settled, "not before a delay group has it"
    held.store()
    assert await queue.settled_all(2) == [acked(0, 1)]
    x, y = it.kept
    assert before <= x.due_ms - 3_600_001 <= after + 1
    assert x == (
        "s",
        b"x",
        x.due_ms,
        BatchFlag.DIRECTED,
        b"k",
        ("t",),
        {"h": b"v", "qmq-group": b"ops", "qmq-attempt": b"3"},
    )
    assert y == (
        "s",
        b"y",
        x.due_ms,
        BatchFlag.DIRECTED,
        b"",
        (),
        {"qmq-group": b"ops", "qmq-attempt": b"3"},
    )
    view = BatchView(Envelope(0, 0, 0, 0, 0, 0, 0, 0), it.delays[0].regions[0])
    assert view.message_ids() == columns.message_ids
    assert view.create_times_ms() == [CREATED_MS, CREATED_MS + 500]


async def test_a_message_keeps_the_id_that_follows_from_its_batch(
    it: DelayCluster, queue: Queue
) -> None:
    _, found = await taken(it, queue, Columns([b"0", b"1", b"2"]))
    found[1].nack(LONG)
    await queue.settled_all(1)
    view = BatchView(Envelope(0, 0, 0, 0, 0, 0, 0, 0), it.delays[0].regions[0])
    assert view.message_ids() == [MessageId(1, 0, 1).to_bytes()]


async def test_what_fails_together_leaves_together(it: DelayCluster, queue: Queue) -> None:
    _, found = await taken(it, queue, Columns([b"%d" % number for number in range(1_200)]))
    for message in found:
        message.nack(LONG)
    await queue.settled_all(1_200)
    assert sorted(each.body for each in it.kept) == sorted(found.bodies)
    assert len(it.delays[0].regions) == 3
    assert each_of(queue.settled) == [acked(number, number) for number in range(1_200)]


@pytest.mark.parametrize("delay", [timedelta(days=733), timedelta.max])
async def test_over_two_years_is_refused_and_the_message_stays(
    it: DelayCluster, queue: Queue, delay: timedelta
) -> None:
    _, found = await taken(it, queue, Columns([b"0", b"1"]))
    message = found[0]
    with pytest.raises(DelayTooLong, match="732 days"):
        message.nack(delay)
    with pytest.raises(DelayTooLong):
        found.nack(delay)
    assert not message.is_settled
    found.nack(timedelta(days=732))
    assert await queue.settled_all(2) == [acked(0, 1)]


# --- until it is stored ---------------------------------------------------------------------------


async def test_the_loop_that_comes_back_does_not_acknowledge_what_waits_for_a_delay_group(
    it: DelayCluster, queue: Queue
) -> None:
    held = Held(it.delays[0])
    consumer = it.mq.consumer("s", "ops")
    following = asyncio.create_task(anext(consumer.batches()))
    await queue.hand_out(Columns([b"0", b"1", b"2"]))
    found = await following
    found[1].nack(LONG)
    found.ack_later()
    found[1].ack_later()
    assert await queue.settled_all(2) == [acked(0, 0), acked(2, 2)]
    await held.one()
    held.store()
    assert await queue.settled_all(3) == [acked(0, 0), acked(2, 2), acked(1, 1)]
    assert [each.body for each in it.kept] == [b"1"]


async def test_the_lease_is_kept_while_a_message_waits_for_a_delay_group(
    it: DelayCluster, queue: Queue
) -> None:
    held = Held(it.delays[0])
    consumer = it.mq.consumer("s", "ops", ack="explicit", lease_ms=30)
    pulling = asyncio.create_task(consumer.pull(1))
    await queue.hand_out(Columns([b"0"]))
    (await pulling).nack(LONG)
    closing = asyncio.create_task(consumer.close())
    seen = queue.heartbeats
    await eventually(lambda: queue.heartbeats > seen + 2)
    held.store()
    await closing


async def test_a_message_that_went_to_another_consumer_meanwhile_gets_no_verdict(
    it: DelayCluster, queue: Queue
) -> None:
    held = Held(it.delays[0])
    consumer, found = await taken(it, queue, Columns([b"0", b"1"]))
    found.nack(LONG)
    await held.one()
    await queue.fail_over()
    held.store()
    await eventually(lambda: consumer.stale == 2)
    found.nack(LONG)
    await consumer.close()
    assert (queue.settled, consumer.stale, len(it.kept)) == ([], 4, 2), (
        "what is not ours any more is not sent either"
    )


async def test_at_most_once_nothing_comes_again(it: DelayCluster, queue: Queue) -> None:
    consumer = it.mq.consumer("s", "ops", consume_most_once=True)
    following = asyncio.create_task(anext(consumer))
    await queue.hand_out(Columns([b"0"]))
    (await following).nack(LONG)
    await consumer.close()
    assert (queue.settled, it.kept) == ([acked(0, 0)], [])


# --- no delay group has it ------------------------------------------------------------------------


async def test_what_a_delay_group_refuses_the_broker_keeps_for_an_hour(
    it: DelayCluster, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    it.delays[0].refuse(DelayTooLong("a week is the most here"))
    _, found = await taken(it, queue, Columns([b"0", b"1"]))
    with caplog.at_level(logging.WARNING, "qmq.client"):
        found[0].nack(LONG, "first")
        found[1].nack(LONG, "second")
        assert await queue.settled_all(2) == [
            nacked(0, 0)._replace(error="first"),
            nacked(1, 1)._replace(error="second"),
        ]
    assert "2 failed messages of subject s" in caplog.text
    assert "a week is the most here" in caplog.text


@pytest.mark.parametrize("timing", [ClientTiming(delivery_timeout_s=0.2)])
@pytest.mark.parametrize("how", ["silent", "busy", "absent"])
async def test_without_a_delay_group_in_time_the_broker_keeps_it_for_an_hour(
    it: DelayCluster, queue: Queue, how: str
) -> None:
    delay = it.delays[0]
    if how == "silent":
        delay.on_produce = delay.store_silently
    elif how == "busy":
        delay.refuse(Overloaded("later"))
    else:
        it.meta.delays.clear()
    consumer, found = await taken(it, queue, Columns([b"0"]))
    found.nack(LONG)
    await consumer.close()
    assert queue.settled_when_left == [nacked(0, 0)]
    delay.on_produce = delay.serve
    for peer in [peer for replica in delay.replicas for peer in replica.peers]:
        peer.cut()


async def test_a_delay_group_that_is_away_for_a_moment_is_waited_for(
    it: DelayCluster, queue: Queue
) -> None:
    it.delays[0].refuse(ReadOnly("drained"))
    _, found = await taken(it, queue, Columns([b"0"]))
    found.nack(LONG)
    await eventually(lambda: len(it.delays[0].arrived) > 1)
    it.delays[0].on_produce = it.delays[0].serve
    assert await queue.settled_all(1) == [acked(0, 0)]
    assert len({(each.producer_id, each.number) for each in it.delays[0].arrived}) == 1, (
        "under the same number"
    )


# --- closing --------------------------------------------------------------------------------------


async def test_closing_waits_until_long_retries_are_stored(it: DelayCluster, queue: Queue) -> None:
    held = Held(it.delays[0])
    consumer, found = await taken(it, queue, Columns([b"0", b"1"]))
    found[0].nack(LONG)
    closing = asyncio.create_task(consumer.close())
    await held.one()
    found[1].nack(LONG)
    assert queue.settled_when_left is None
    held.store()
    await closing
    assert queue.settled_when_left is not None
    assert each_of(queue.settled_when_left) == [acked(0, 0), acked(1, 1)]
    found[1].nack(LONG)
    assert [each.body for each in it.kept] == [b"0", b"1"]


async def test_who_waits_for_messages_hears_at_once_that_the_consumer_is_closed(
    it: DelayCluster, queue: Queue
) -> None:
    held = Held(it.delays[0])
    consumer, found = await taken(it, queue, Columns([b"0"]))
    waiting = asyncio.create_task(consumer.pull(1))
    found.nack(LONG)
    closing = asyncio.create_task(consumer.close())
    with pytest.raises(ClientClosed):
        await waiting
    assert not closing.done()
    assert not queue.settled
    held.store()
    await closing


async def test_the_client_closes_in_that_order_too(it: DelayCluster, queue: Queue) -> None:
    _, found = await taken(it, queue, Columns([b"0"]))
    found.nack(LONG)
    await it.mq.close()
    assert queue.settled_when_left == [acked(0, 0)]
    assert len(it.kept) == 1


# --- attempts -------------------------------------------------------------------------------------


def directed(*failed: bytes) -> Columns:
    """Messages that failed so often before they were sent again."""
    return Columns(
        [b"x"] * len(failed),
        headers=[{"qmq-group": b"ops", "qmq-attempt": each} for each in failed],
    )


async def test_a_directed_message_counts_its_attempts_from_where_they_were(
    it: DelayCluster, queue: Queue
) -> None:
    _, found = await taken(
        it, queue, directed(b"1", b"3", b"3", b"?", b"4"), attempt=2, flags=BatchFlag.DIRECTED
    )
    assert [message.attempt for message in found] == [3, 5, 5, 2, 6]
    assert [message.sequence for message in found] == list(range(5))
    found.nack()
    assert await queue.settled_all(5) == [nacked(0, 4, BY_GROUP_MS)], "the broker counts them too"


async def test_it_goes_out_again_with_all_its_attempts(it: DelayCluster, queue: Queue) -> None:
    _, found = await taken(it, queue, directed(b"1", b"3"), flags=BatchFlag.DIRECTED)
    found[0].nack(LONG)
    found[1].nack(LONG)
    await queue.settled_all(2)
    assert [each.headers for each in it.kept] == [
        {"qmq-group": b"ops", "qmq-attempt": b"2"},
        {"qmq-group": b"ops", "qmq-attempt": b"4"},
    ]


async def test_headers_alone_change_no_attempt(it: DelayCluster, queue: Queue) -> None:
    _, found = await taken(it, queue, directed(b"7"), attempt=2)
    assert [message.attempt for message in found] == [2]


async def test_a_receipt_of_messages_with_ids_of_their_own_names_those(it: DelayCluster) -> None:
    ids = [MessageId(9, 8, 7), MessageId(5, 4, 3)]
    columns = Columns(
        [b"x", b"y"], message_ids=[each.to_bytes() for each in ids], due_times_ms=[5, 6]
    )
    found = list(await it.mq.delayed_producer("s").put(columns, create_time_ms=CREATED_MS))
    assert [each.id for each in found] == ids
    assert [DelayedId.parse(str(each.delayed_id)).message_id for each in found] == ids


# --- batches of retries ---------------------------------------------------------------------------


def not_settled(pull: int, verdict: int, delay: int, error: str) -> None:
    raise AssertionError


def made(sizes: Sequence[int], created_ms: Sequence[int] | None = None) -> list[LongRetry]:
    """Retries of messages of these sizes, each in its own batch."""
    found: list[LongRetry] = []
    for number, size in enumerate(sizes):
        created = created_ms[number] if created_ms else 0
        _, region = encode(
            b"s",
            Columns([bytes(size)]),
            producer_id=1,
            batch_sequence=number,
            create_time_ms=created,
        )
        part = BatchSlice(
            DecodedBatch(BatchView(Envelope(0, 0, 0, number, 1, 1, 1, 0), region)),
            0,
            1,
            1,
            number,
            None,
        )  # type: ignore[arg-type]
        message: Message = part.message(0)
        found.append(LongRetry(not_settled, message, number))
    return found


def test_create_times_of_a_batch_lie_near_each_other() -> None:
    created = [5, 5 + 2**32 - 1, 5, 4, 2**32 + 3, 2**32 + 4, 1]
    found = list(batches(made([1] * len(created), created)))
    assert [[each.message.create_time_ms for each in batch] for batch in found] == [
        created[:3],
        created[3:5],
        created[5:6],
        created[6:],
    ]
    for batch in found:
        columns, first = retry_columns(batch, "ops")
        _, region = encode(b"s", columns, producer_id=1, batch_sequence=0, create_time_ms=first)
        times = BatchView(Envelope(0, 0, 0, 0, 1, 1, 1, 0), region).create_times_ms()
        assert times == [each.message.create_time_ms for each in batch]
