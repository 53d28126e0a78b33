"""Delayed messages of a producer: they go to delay groups with due times, are stored once despite
any failure, and bad input is refused at the call.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fake_cluster import (
    APPEND_MS,
    NOT_STORED,
    DelayCluster,
    FakeBroker,
    FakeDelayGroup,
    Peer,
    Sent,
    delay_cluster,
)

from qmq import limits
from qmq.client.client import Client
from qmq.client.connection.connection import ClientTiming
from qmq.client.producing.delayed import DelayHome
from qmq.errors import (
    DeadlineExceeded,
    DelayTooLong,
    InvalidArgument,
    InvalidName,
    MessageTooLarge,
    Overloaded,
    QmqError,
    ReadOnly,
    UnknownSubject,
)
from qmq.model import DelayedId
from qmq.wire.batch_columns import BatchFlag, Columns
from qmq.wire.frame import Frame

LATER = timedelta(hours=1)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def home_of(it: DelayCluster) -> FakeDelayGroup:
    """The delay group that an ordered subject uses."""
    chosen = DelayHome("s").choose({each.name: True for each in it.delays}, 0.0)
    return it.named(next(name for name, is_home in chosen.items() if is_home))


# --- what is sent ---------------------------------------------------------------------------------


async def test_a_delayed_message_goes_to_a_delay_group_with_its_due_time_and_all_it_has() -> None:
    async with delay_cluster() as it:
        before = now_ms()
        await it.mq.send("s", b"x", key="k", tags=["t"], headers={"h": "v"}, delay=LATER)
        after = now_ms()
        (kept,) = it.kept
        assert before + 3_600_000 <= kept.due_ms <= after + 3_600_001
        assert kept == ("s", b"x", kept.due_ms, 0, b"k", ("t",), {"h": b"v"})
        assert not it.groups[0].arrived
        assert it.meta.asked_delayed == ["s"]
        assert it.meta.located == []
        (arrived,) = it.delays[0].arrived
        assert (arrived.partition, arrived.lps) == (0, ())


async def test_a_message_without_a_time_goes_the_ordinary_way_and_has_no_delayed_id() -> None:
    async with delay_cluster() as it:
        receipt = await it.mq.send("s", b"x")
        (many,) = await it.mq.send_many("s", [b"y"])
        assert (receipt.delayed_id, many.delayed_id) == (None, None)
        assert it.groups[0].bodies == [b"x", b"y"]
        assert not it.kept


async def test_many_messages_have_a_time_each_or_one_for_all() -> None:
    async with delay_cluster() as it:
        moments = [datetime(2027, 1, 15, 8, 0, second, tzinfo=UTC) for second in range(3)]
        receipts = await it.mq.send_many(
            "s", [b"a", b"b", b"c"], keys=["1", None, "3"], ats=moments
        )
        assert [(each.body, each.key, each.due_ms) for each in it.kept] == [
            (b"a", b"1", 1_800_000_000_000),
            (b"b", b"", 1_800_000_001_000),
            (b"c", b"3", 1_800_000_002_000),
        ]
        parsed = [DelayedId.parse(str(receipt.delayed_id)) for receipt in receipts]
        assert [each.due_ms for each in parsed] == [each.due_ms for each in it.kept]
        assert [each.message_id.index for each in parsed] == [0, 1, 2]
        await it.mq.send_many("s", [b"d", b"e"], delays=LATER)
        await it.mq.send_many("s", [b"f", b"g"], delays=[LATER, LATER * 2])
        *_, d, e, f, g = it.kept
        assert d.due_ms == e.due_ms
        assert g.due_ms == f.due_ms + 3_600_000


async def test_the_receipts_id_reads_back_as_message_due_time_append_time_and_group() -> None:
    async with delay_cluster() as it:
        receipt = await it.mq.send("s", b"x", at=datetime(2027, 1, 15, 8, tzinfo=UTC))
        assert receipt.delayed_id is not None
        parsed = DelayedId.parse(receipt.delayed_id)
        assert parsed == DelayedId(receipt.id, 1_800_000_000_000, APPEND_MS, "d0")
        assert str(parsed) == receipt.delayed_id
        batch = await it.mq.delayed_producer("s").send_many([b"y", b"z"], due_ms=[5, 6])
        assert [each.delayed_id for each in batch] == [
            batch.batches[0].delayed_id(index) for index in range(2)
        ]
        ordinary = await it.mq.producer("s").send(b"now")
        assert ordinary.delayed_id(0) is ordinary.receipt(0).delayed_id is None
        assert receipt.broker_group == "d0"


async def test_many_messages_are_cut_into_batches_with_their_own_due_times() -> None:
    async with delay_cluster() as it:
        producer = it.mq.delayed_producer("s", batch_messages=10, batch_bytes=400)
        bodies = [b"%04d" % number + bytes(number) for number in range(95)]
        receipts = await producer.send_many(bodies, due_ms=range(95))
        assert sorted((each.due_ms, each.body) for each in it.kept) == list(enumerate(bodies))
        assert [DelayedId.parse(str(each.delayed_id)).due_ms for each in receipts] == list(
            range(95)
        )
        assert len(it.delays[0].arrived) > 10


async def test_lone_messages_gather_in_batches_and_each_keeps_its_time_and_columns() -> None:
    async with delay_cluster() as it:
        producer = it.mq.delayed_producer("s", batch_messages=7)
        tickets = []
        for number in range(100):
            key = str(number) if number % 3 == 0 else None
            tickets.append((producer.send(b"%d" % number, key, due_ms=number * 1000), number))
            if number % 10 == 9:
                await asyncio.sleep(0)
        await producer.flush()
        found = {each.body: each for each in it.kept}
        assert len(found) == len(it.kept) == 100
        for number in range(100):
            kept = found[b"%d" % number]
            assert (kept.due_ms, kept.key) == (
                number * 1000,
                b"%d" % number if number % 3 == 0 else b"",
            )
        for ticket, number in tickets:
            assert any(
                DelayedId.parse(str(each.delayed_id)).due_ms == number * 1000
                for each in await ticket
            )
        assert len(it.delays[0].arrived) < 40
        assert producer.stored_by_group == {"d0": 100}


async def test_a_missing_subject_is_reported_at_once() -> None:
    async with delay_cluster() as it:
        with pytest.raises(UnknownSubject):
            await it.mq.send("none", b"x", delay=LATER)
        with pytest.raises(UnknownSubject):
            await it.mq.delayed_producer("none").send(b"x", due=LATER)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "failure", "words"),
    [
        ({"at": datetime(2027, 1, 1)}, InvalidArgument, "time zone"),
        ({"delay": LATER, "at": datetime(2027, 1, 1, tzinfo=UTC)}, InvalidArgument, "not both"),
        ({"delay": timedelta(milliseconds=limits.DELAY_MS_MAX + 60_000)}, DelayTooLong, "732 days"),
        ({"delay": timedelta.max}, DelayTooLong, "732 days"),
        ({"at": datetime(9999, 1, 1, tzinfo=UTC)}, DelayTooLong, "732 days"),
        ({"delay": 5}, InvalidArgument, "timedelta"),
        ({"delay": float("nan")}, InvalidArgument, "timedelta"),
        ({"delay": True}, InvalidArgument, "timedelta"),
        ({"at": 1_800_000_000}, InvalidArgument, "datetime"),
        ({"at": LATER}, InvalidArgument, "datetime"),
        ({"cron": "0 9 * * *"}, InvalidArgument, "zone"),
        ({"zone": "UTC"}, InvalidArgument, "cron"),
        ({"zone": "UTC", "delay": LATER}, InvalidArgument, "cron"),
        ({"cron": "0 9 * *", "zone": "UTC"}, InvalidArgument, "five fields"),
        ({"cron": "0 9 * * *", "zone": "UTC", "delay": LATER}, InvalidArgument, "no delay"),
        (
            {"cron": "0 9 * * *", "zone": "UTC", "at": datetime(2027, 1, 1)},
            InvalidArgument,
            "time zone",
        ),
    ],
)
async def test_a_time_that_cannot_be_is_refused_before_anybody_is_asked(
    options: Any, failure: type[QmqError], words: str
) -> None:
    async with delay_cluster() as it:
        with pytest.raises(failure, match=words) as refused:
            await it.mq.send("s", b"x", **options)
        assert refused.value.outcome is NOT_STORED
        assert it.meta.asked_delayed == it.meta.located == []


async def test_the_producer_refuses_a_message_without_one_time_and_the_others_leave() -> None:
    async with delay_cluster() as it:
        producer = it.mq.delayed_producer("s")
        wrong: list[Any] = [
            {},
            {"due": LATER, "due_ms": 5},
            {"due": 5},
            {"due_ms": 5.0},
            {"due_ms": True},
            {"due": datetime(2027, 1, 1)},
            {"due_ms": now_ms() + limits.DELAY_MS_MAX + 60_000},
            {"due_ms": 2**63},
            {"due_ms": 5, "headers": {"qmq-group": "g"}},
        ]
        for options in wrong:
            with pytest.raises((InvalidArgument, DelayTooLong)):
                producer.send(b"wrong", **options)
            producer.send(b"right", due_ms=7)
            if options and "headers" not in options:
                with pytest.raises((InvalidArgument, DelayTooLong)):
                    producer.send_many([b"wrong"], **options)
        with pytest.raises(InvalidArgument):
            producer.send_many([b"wrong"])
        with pytest.raises(InvalidArgument):
            producer.put(Columns([b"wrong"]))
        with pytest.raises(MessageTooLarge):
            producer.send(bytes(limits.LONG_BODY_BYTES_MAX + 1), due_ms=5)
        await producer.flush()
        assert [(each.body, each.due_ms) for each in it.kept] == [(b"right", 7)] * len(wrong)


async def test_an_invalid_name_is_refused() -> None:
    async with delay_cluster() as it:
        with pytest.raises(InvalidName):
            await it.mq.send("~s", b"x", delay=LATER)
        with pytest.raises(InvalidName):
            it.mq.delayed_producer("~s")


@pytest.mark.parametrize("options", [{}, {"delay": LATER}, {"cron": "0 9 * * *", "zone": "UTC"}])
async def test_headers_of_the_system_are_refused_in_applications_messages(options: Any) -> None:
    async with delay_cluster() as it:
        with pytest.raises(InvalidArgument, match="qmq-"):
            await it.mq.send("s", b"x", headers={"qmq-cron": b"* * * * *"}, **options)
        await it.mq.send("s", b"x", headers={"qmq": b"", "x-qmq-cron": b""}, **options)


async def test_headers_of_the_system_are_refused_on_ordered_subjects_too() -> None:
    async with delay_cluster(ordered=True) as it:
        with pytest.raises(InvalidArgument, match="qmq-"):
            await it.mq.send("s", b"x", key="k", headers={"qmq-schedule-id": b""})
        with pytest.raises(InvalidArgument, match="qmq-"):
            await it.mq.send_many("s", [b"x"], keys=["k"], headers=[{"qmq-schedule-id": b""}])


async def test_the_system_itself_sends_its_headers_and_flags() -> None:
    async with delay_cluster() as it:
        producer = it.mq.delayed_producer("s")
        await producer.put(
            Columns([b"x"], headers=[{"qmq-group": b"ops"}], due_times_ms=[5]), BatchFlag.DIRECTED
        )
        await producer.send(b"y", due_ms=5)
        assert [(each.headers, each.flags) for each in it.kept] == [
            ({"qmq-group": b"ops"}, BatchFlag.DIRECTED),
            ({}, 0),
        ]


async def test_a_delay_group_that_takes_less_says_so() -> None:
    async with delay_cluster() as it:
        it.delays[0].refuse(DelayTooLong("a week is the most here"))
        with pytest.raises(DelayTooLong, match="a week") as refused:
            await it.mq.send("s", b"x", delay=LATER)
        assert refused.value.outcome is NOT_STORED


# --- recurring ------------------------------------------------------------------------------------


async def test_a_recurring_message_is_a_batch_of_its_own_that_begins_now() -> None:
    async with delay_cluster() as it:
        before = now_ms()
        receipt = await it.mq.send(
            "s",
            b"x",
            key="k",
            tags=["t"],
            headers={"h": "v"},
            cron=" 0  9 * * MON-FRI",
            zone="Europe/Berlin",
        )
        (kept,) = it.kept
        assert before <= kept.due_ms <= now_ms()
        headers = {"h": b"v", "qmq-cron": b"0 9 * * MON-FRI", "qmq-zone": b"Europe/Berlin"}
        assert kept == ("s", b"x", kept.due_ms, BatchFlag.RECURRING, b"k", ("t",), headers)
        assert DelayedId.parse(str(receipt.delayed_id)) == DelayedId(
            receipt.id, kept.due_ms, APPEND_MS, "d0"
        )


async def test_a_recurring_message_may_begin_later() -> None:
    async with delay_cluster() as it:
        await it.mq.send(
            "s", b"x", cron="0 9 * * *", zone="UTC", at=datetime(2027, 1, 15, 8, tzinfo=UTC)
        )
        assert it.kept[0].due_ms == 1_800_000_000_000


async def test_messages_around_a_recurring_one_are_not_recurring() -> None:
    async with delay_cluster() as it:
        producer = it.mq.delayed_producer("s")
        producer.send(b"before", due_ms=1)
        producer.send_recurring(b"again", "0 9 * * *", "UTC", start_ms=2)
        producer.send(b"after", due_ms=3)
        await producer.flush()
        assert {each.body: each.flags for each in it.kept} == {
            b"before": 0,
            b"again": BatchFlag.RECURRING,
            b"after": 0,
        }
        assert len(it.delays[0].stored) == 3


# --- ordered subjects -----------------------------------------------------------------------------


async def test_a_delayed_message_to_an_ordered_subject_needs_a_key_and_is_marked() -> None:
    async with delay_cluster(ordered=True) as it:
        with pytest.raises(InvalidArgument, match="needs a key"):
            await it.mq.send("s", b"x", delay=LATER)
        with pytest.raises(InvalidArgument, match="needs a key"):
            await it.mq.send("s", b"x", key="", delay=LATER)
        with pytest.raises(InvalidArgument, match="needs a key"):
            await it.mq.send_many("s", [b"x", b"y"], keys=["k", None], delays=LATER)
        with pytest.raises(InvalidArgument, match="needs a key"):
            await it.mq.send("s", b"x", cron="0 9 * * *", zone="UTC")
        await it.mq.send("s", b"a", key="k", delay=LATER)
        await it.mq.send_many("s", [b"b"], keys=["k"], delays=LATER)
        await it.mq.send("s", b"c", key="k", cron="0 9 * * *", zone="UTC")
        ordered = BatchFlag.ORDERED
        assert [(each.body, each.key, each.flags) for each in it.kept] == [
            (b"a", b"k", ordered),
            (b"b", b"k", ordered),
            (b"c", b"k", ordered | BatchFlag.RECURRING),
        ]
        assert {(each.partition, each.lps) for each in it.delays[0].arrived} == {(0, ())}


async def test_an_early_batch_without_keys_to_an_ordered_subject_is_refused_whole() -> None:
    async with delay_cluster(ordered=True) as it:
        producer = it.mq.delayed_producer("s")
        ticket = producer.send(b"x", due_ms=5)
        with pytest.raises(InvalidArgument, match="needs a key") as refused:
            await ticket
        assert refused.value.outcome is NOT_STORED
        with pytest.raises(InvalidArgument, match="needs a key"):
            producer.send(b"y", due_ms=5)
        await producer.send(b"z", "k", due_ms=5)
        assert [each.body for each in it.kept] == [b"z"]


async def test_all_delayed_messages_of_an_ordered_subject_go_to_its_home() -> None:
    async with delay_cluster(3, ordered=True) as it:
        for number in range(100):
            await it.mq.send("s", b"%d" % number, key=str(number), delay=LATER)
        assert [each.body for each in (await home_of(it)).kept] == [
            b"%d" % number for number in range(100)
        ]
        assert len(it.kept) == 100


async def test_a_batch_refused_for_a_while_keeps_its_place_on_an_ordered_subject() -> None:
    async with delay_cluster(2, ordered=True) as it:
        home = await home_of(it)
        tries = Counter[int]()

        def stumble(broker: FakeBroker, peer: Peer, request: Frame, sent: Sent) -> None:
            tries[sent.number] += 1
            if sent.number % 3 == 1 and tries[sent.number] == 1:
                peer.refuse(request, Overloaded("busy"))
            elif sent.number % 5 == 2 and tries[sent.number] == 1:
                home.keep(request, sent)
                peer.cut()
            else:
                home.serve(broker, peer, request, sent)

        home.on_produce = stumble
        producer = it.mq.delayed_producer("s", batch_messages=3)
        for number in range(60):
            producer.send(b"%d" % number, "k", due_ms=5)
        await producer.flush()
        assert [each.body for each in home.kept] == [b"%d" % number for number in range(60)]


async def test_a_drained_home_is_left_for_another() -> None:
    async with delay_cluster(2, ordered=True, can_push=True) as it:
        home = await home_of(it)
        await it.mq.send("s", b"before", key="k", delay=LATER)
        await it.meta.is_watched.wait()
        home.is_writable = False
        home.refuse(ReadOnly("drained"))
        it.meta.push(groups=[home.name])
        receipt = await it.mq.send("s", b"after", key="k", delay=LATER)
        assert receipt.broker_group != home.name


# --- several delay groups, and what goes wrong ----------------------------------------------------


async def test_a_delay_group_that_dies_is_left_and_what_it_may_have_is_stored_once() -> None:
    async with delay_cluster(2) as it:
        producer = it.mq.delayed_producer("s", batch_messages=2)
        await producer.send(b"first", due_ms=1)
        for number in range(400):
            producer.send(b"%d" % number, due_ms=number)
            if number == 200:
                await it.delays[0].replicas[0].stop()
                it.delays[0].fail_over()
            if number % 20 == 0:
                await asyncio.sleep(0)
        await producer.flush()
        assert Counter(each.body for each in it.kept) == Counter(
            [b"first", *(b"%d" % number for number in range(400))]
        )


async def test_a_lost_answer_is_asked_for_again_under_the_same_number_and_has_the_same_id() -> None:
    async with delay_cluster() as it:
        (delay,) = it.delays

        def lose_once(broker: FakeBroker, peer: Peer, request: Frame, sent: Sent) -> None:
            delay.keep(request, sent)
            if len(delay.arrived) == 1:
                peer.cut()
            else:
                delay.serve(broker, peer, request, sent)

        delay.on_produce = lose_once
        receipt = await it.mq.send("s", b"x", delay=LATER)
        first, second = delay.arrived
        assert first == second
        assert len(set(delay.regions)) == 1
        assert [each.body for each in it.kept] == [b"x"]
        assert DelayedId.parse(str(receipt.delayed_id)).due_ms == it.kept[0].due_ms


async def test_without_a_delay_group_the_error_says_what_to_start() -> None:
    async with delay_cluster(0, timing=ClientTiming(delivery_timeout_s=1.5)) as it:
        with pytest.raises(DeadlineExceeded, match="qmq delay") as failed:
            await it.mq.send("s", b"x", delay=LATER)
        assert failed.value.outcome is NOT_STORED
        assert "~" not in str(failed.value)
        with pytest.raises(DeadlineExceeded, match="qmq delay"):
            await it.mq.delayed_producer("s", delivery_timeout_s=1.5).send(b"x", due=LATER)


async def test_when_all_delay_groups_are_drained_the_error_says_so() -> None:
    async with delay_cluster(2) as it:
        for delay in it.delays:
            delay.is_writable = False
        with pytest.raises(DeadlineExceeded, match="to be delayed") as failed:
            await it.mq.delayed_producer("s", delivery_timeout_s=1.5).send(b"x", due=LATER)
        assert "~" not in str(failed.value)


# --- what metaservers push ------------------------------------------------------------------------


async def test_a_new_delay_group_gets_its_share_when_it_is_pushed() -> None:
    async with delay_cluster(2, can_push=True) as it:
        new = it.meta.delays.pop()
        await it.mq.send("s", b"first", delay=LATER)
        await it.meta.is_watched.wait()
        it.meta.delays.append(new)
        it.meta.push(groups=[new.name])
        async with asyncio.timeout(20):
            while not new.kept:
                await it.mq.send("s", b"more", delay=LATER)


async def test_closing_the_client_flushes_delayed_messages() -> None:
    async with delay_cluster() as it:
        mq = Client(it.meta.address)
        mq.delayed_producer("s").send(b"x", due_ms=5)
        await mq.close()
        assert [each.body for each in it.kept] == [b"x"]
