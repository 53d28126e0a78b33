"""Delayed messages while they wait: cancel, move, show, list, stats; and what a lost answer means
for each.
"""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from fake_cluster import NOT_STORED, UNKNOWN, DelayCluster, delay_cluster, message

import qmq
from qmq.client.connection.connection import ClientTiming
from qmq.client.producing.delayed import DECIDE_S
from qmq.errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidArgument,
    InvalidName,
    MessageNotFound,
    NotConnected,
    NotMaster,
    QmqError,
    TooLate,
)
from qmq.model import MessageId
from qmq.proto.v1 import control_pb2, delay_pb2
from qmq.proto.v1 import meta_pb2 as pb

ID = "00000000000000010000000000020003-1a3185c5000-1a3185c4000-d0"
NINE = datetime(2027, 1, 15, 8, tzinfo=UTC)
NINE_MS = 1_800_000_000_000
QUICK = ClientTiming(decide_retry_s=(0.001,))
LOST = (grpc.StatusCode.UNAVAILABLE, "the connection broke")


async def test_a_message_is_shown_with_all_it_has() -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers["ShowDelayed"] = [
            message(
                ID,
                due_ms=NINE_MS,
                create_time_ms=NINE_MS - 1,
                key=b"k",
                tags=["a", "b"],
                body=b"x",
                cron="0 9 * * *",
                zone="UTC",
                headers=[control_pb2.Header(name="h", value=b"v")],
                body_bytes=1,
            )
        ]
        found = await it.mq.delayed.show(ID)
        assert found == qmq.DelayedMessage(
            id=ID,
            subject="s",
            message_id=MessageId(1, 2, 3),
            due=NINE,
            create_time=NINE - timedelta(milliseconds=1),
            key_bytes=b"k",
            tags=("a", "b"),
            headers={"h": b"v"},
            body=b"x",
            body_bytes=1,
            state="pending",
            cron="0 9 * * *",
            zone="UTC",
            delay_group="d0",
        )
        assert found.key == "k"
        assert found.due.tzinfo is UTC
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.state = "delivered"  # type: ignore[misc]


async def test_the_receipts_id_is_what_cancel_and_move_take() -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers["CancelDelayed"] = [
            lambda request: message(request.id, state="cancelled", body_bytes=1)
        ]
        it.meta.answers["MoveDelayed"] = [
            lambda request: message(request.id, due_ms=request.due_ms)
        ]
        receipt = await it.mq.send("s", b"x", delay=timedelta(hours=1))
        assert receipt.delayed_id is not None
        assert (await it.mq.delayed.move(receipt.delayed_id, NINE)).due == NINE
        cancelled = await it.mq.delayed.cancel(receipt.delayed_id)
        assert (cancelled.state, cancelled.body, cancelled.body_bytes) == ("cancelled", None, 1)
        assert [request.id for _, request in it.meta.asked] == [receipt.delayed_id] * 2
        assert it.meta.requests("MoveDelayed")[0].due_ms == NINE_MS


async def test_a_move_by_a_delay_counts_from_now_and_a_past_time_means_at_once() -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers["MoveDelayed"] = [
            lambda request: message(request.id, due_ms=request.due_ms)
        ]
        later = (await it.mq.delayed.move(ID, timedelta(hours=1))).due
        assert abs(later - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1)
        past = (await it.mq.delayed.move(ID, timedelta(days=-1))).due
        assert past < datetime.now(UTC)
        await it.mq.delayed.move(ID, datetime(1960, 1, 1, tzinfo=UTC))
        assert it.meta.requests("MoveDelayed")[-1].due_ms == 1, "0 is no time in a request"


@pytest.mark.parametrize(
    "failure", [TooLate("delivered"), MessageNotFound("none"), InvalidArgument("no delay group d0")]
)
async def test_what_the_delay_group_says_comes_typed_and_certain(failure: QmqError) -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers = {
            call: [failure] for call in ("CancelDelayed", "MoveDelayed", "ShowDelayed")
        }
        for asking in (
            it.mq.delayed.cancel(ID),
            it.mq.delayed.move(ID, NINE),
            it.mq.delayed.show(ID),
        ):
            with pytest.raises(type(failure), match=failure.message) as refused:
                await asking
            assert refused.value.outcome is NOT_STORED
        assert len(it.meta.asked) == 3


@pytest.mark.parametrize(
    "id", ["", "x", ID.upper(), ID.rpartition("-")[0], "0" * 32, None, 5, ID + "/.."]
)
async def test_an_invalid_id_is_refused_before_any_request(id: Any) -> None:
    async with delay_cluster(timing=QUICK) as it:
        for asking in (
            it.mq.delayed.cancel(id),
            it.mq.delayed.move(id, NINE),
            it.mq.delayed.show(id),
        ):
            with pytest.raises((InvalidArgument, InvalidName)):
                await asking
        assert not it.meta.asked


# --- answers that are lost ------------------------------------------------------------------------


LATE = DeadlineExceeded("late", outcome=UNKNOWN)
LOSSES = [
    LOST,
    LATE,
    NotMaster("before commit", outcome=UNKNOWN),
    NotConnected("silent", outcome=UNKNOWN),
]


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_cancel_whose_answer_is_lost_is_asked_for_until_it_is_known(loss: Any) -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers["CancelDelayed"] = [loss, loss, loss, message(ID, state="cancelled")]
        assert (await it.mq.delayed.cancel(ID)).state == "cancelled"
        assert len(it.meta.asked) == 4


async def test_after_a_lost_answer_too_late_is_certain_and_not_found_is_unknown() -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers["CancelDelayed"] = [LOST, TooLate("delivered")]
        with pytest.raises(TooLate) as late:
            await it.mq.delayed.cancel(ID)
        assert late.value.outcome is NOT_STORED
        it.meta.answers["CancelDelayed"] = [LOST, MessageNotFound("its bucket is deleted")]
        with pytest.raises(MessageNotFound, match="may have been done") as unknown:
            await it.mq.delayed.cancel(ID)
        assert unknown.value.outcome is UNKNOWN


async def test_a_move_is_asked_for_again_with_the_same_moment() -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers["MoveDelayed"] = [
            LOST,
            LOST,
            lambda request: message(request.id, due_ms=request.due_ms),
        ]
        await it.mq.delayed.move(ID, timedelta(hours=1))
        first, second, third = it.meta.requests("MoveDelayed")
        assert first == second == third


async def test_a_move_that_was_made_and_delivered_before_it_was_known_is_a_move() -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers["MoveDelayed"] = [LOST, TooLate("delivered")]
        it.meta.answers["ShowDelayed"] = [message(ID, due_ms=NINE_MS, state="delivered")]
        moved = await it.mq.delayed.move(ID, NINE)
        assert (moved.due, moved.state) == (NINE, "delivered")


@pytest.mark.parametrize(
    "shown",
    [
        message(ID, due_ms=NINE_MS - 1, state="delivered"),
        MessageNotFound("gone"),
        InvalidArgument("what"),
    ],
)
async def test_a_move_without_an_answer_has_an_unknown_outcome(shown: Any) -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers = {"MoveDelayed": [LOST, TooLate("delivered")], "ShowDelayed": [shown]}
        with pytest.raises(TooLate) as late:
            await it.mq.delayed.move(ID, NINE)
        assert late.value.outcome is UNKNOWN


async def test_too_late_at_the_first_try_of_a_move_asks_nothing_more() -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers["MoveDelayed"] = [NotMaster("elected soon"), TooLate("delivered")]
        with pytest.raises(TooLate) as late:
            await it.mq.delayed.move(ID, NINE)
        assert late.value.outcome is NOT_STORED
        assert not it.meta.requests("ShowDelayed")


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([LOST], UNKNOWN),
        ([LATE], UNKNOWN),
        ([NotConnected("no master")], NOT_STORED),
        ([], NOT_STORED),
    ],
)
async def test_an_outcome_that_stays_unknown_ends_as_unknown(
    answers: list[Any], outcome: Any
) -> None:
    too_long_s = DECIDE_S * 10
    timing = ClientTiming(decide_retry_s=(*[0.001] * len(answers), too_long_s))
    async with delay_cluster(timing=timing) as it:
        it.meta.answers["CancelDelayed"] = [*answers, NotConnected("still no master")]
        with pytest.raises(NotConnected) as failed:
            await it.mq.delayed.cancel(ID)
        assert failed.value.outcome is outcome
        assert len(it.meta.requests("CancelDelayed")) == len(answers) + 1


async def test_a_closed_client_sends_no_requests() -> None:
    async with delay_cluster(timing=QUICK) as it:
        delayed = it.mq.delayed
        await it.mq.close()
        with pytest.raises(ClientClosed):
            await delayed.cancel(ID)
        with pytest.raises(ClientClosed):
            await it.mq.send("s", b"x", delay=timedelta(1))


# --- lists and figures ----------------------------------------------------------------------------


def pages(it: DelayCluster, total: int) -> None:
    """Answer with a number of messages, in pages of the requested size."""

    def page(request: delay_pb2.ListDelayedRequest) -> delay_pb2.ListDelayedResponse:
        begin = int(request.after or 0)
        end = min(begin + request.messages_max, total)
        found = [
            message(f"{number:032x}-1-1-d0", due_ms=number, body_bytes=9)
            for number in range(begin, end)
        ]
        return delay_pb2.ListDelayedResponse(messages=found, next=str(end) if end < total else "")

    it.meta.answers["ListDelayed"] = [page]


async def test_a_list_goes_through_all_pages_in_order_and_has_no_bodies() -> None:
    async with delay_cluster(timing=QUICK) as it:
        pages(it, 1234)
        found = [each async for each in it.mq.delayed.list("s")]
        assert [each.id for each in found] == [f"{number:032x}-1-1-d0" for number in range(1234)]
        assert {(each.body, each.body_bytes) for each in found} == {(None, 9)}
        assert [
            (request.subject, request.messages_max, request.after)
            for request in it.meta.requests("ListDelayed")
        ] == [
            ("s", 500, ""),
            ("s", 500, "500"),
            ("s", 500, "1000"),
        ]


@pytest.mark.parametrize(("limit", "asked"), [(0, []), (1, [1]), (500, [500]), (700, [500, 200])])
async def test_a_list_with_a_limit_asks_for_no_more(limit: int, asked: list[int]) -> None:
    async with delay_cluster(timing=QUICK) as it:
        pages(it, 1234)
        assert len([each async for each in it.mq.delayed.list(limit=limit)]) == limit
        assert [request.messages_max for request in it.meta.requests("ListDelayed")] == asked


async def test_a_list_has_bounds_and_nothing_is_a_list_too() -> None:
    async with delay_cluster(timing=QUICK) as it:
        pages(it, 0)
        assert [
            each
            async for each in it.mq.delayed.list("s", start=NINE, end=NINE + timedelta(hours=1))
        ] == []
        assert [
            each async for each in it.mq.delayed.list(end=datetime(1960, 1, 1, tzinfo=UTC))
        ] == []
        bounded, early = it.meta.requests("ListDelayed")
        assert (bounded.from_ms, bounded.to_ms) == (NINE_MS, NINE_MS + 3_600_000)
        assert (early.subject, early.from_ms, early.to_ms) == ("", 0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"start": datetime(2027, 1, 1)},
        {"end": 5},
        {"limit": -1},
        {"limit": True},
        {"limit": 1.5},
        {"subject": "~s"},
    ],
)
async def test_an_impossible_list_is_refused(options: Any) -> None:
    async with delay_cluster(timing=QUICK) as it:
        with pytest.raises((InvalidArgument, InvalidName)):
            await anext(it.mq.delayed.list(**options))
        assert not it.meta.asked


async def test_a_list_with_a_delay_group_away_is_refused() -> None:
    async with delay_cluster(timing=QUICK) as it:
        it.meta.answers["ListDelayed"] = [NotConnected("d1 does not answer")]
        with pytest.raises(NotConnected, match="d1"):
            async with asyncio.timeout(20):
                await anext(it.mq.delayed.list())


async def test_stats_say_how_each_delay_group_stands_and_who_is_silent() -> None:
    async with delay_cluster(timing=QUICK) as it:
        described = delay_pb2.DelayDescription(
            group="d0",
            replica="d0-1",
            pending=7,
            waiting=1,
            planned=2,
            delivered=3,
            wheel_messages=4,
            wheel_bytes=64,
            horizon_ms=2**63 - 1,
            lateness_p50_ms=100,
            lateness_p99_ms=400,
            time_ms=NINE_MS,
            clock_step_ms=-3_600_000,
            buckets=[
                delay_pb2.DelayBucket(
                    start_ms=NINE_MS, length_ms=3_600_000, messages=9, pending=7, stored_bytes=100
                )
            ],
            troubles=[
                delay_pb2.DelayTrouble(
                    subject="gone", waiting=1, reason="[E105] there is no subject"
                )
            ],
        )
        it.meta.answers["DescribeDelays"] = [
            pb.DescribeDelaysResponse(delays=[described, described], silent={"d1": "no master"})
        ]
        stats = await it.mq.delayed.stats()
        assert (stats.pending, stats.silent) == (14, {"d1": "no master"})
        group = stats.groups[0]
        assert (group.name, group.replica, group.waiting, group.planned, group.delivered) == (
            "d0",
            "d0-1",
            1,
            2,
            3,
        )
        assert (group.lateness_p50, group.lateness_p99) == (
            timedelta(milliseconds=100),
            timedelta(milliseconds=400),
        )
        assert (group.time, group.clock_step, group.horizon.year) == (
            NINE,
            timedelta(hours=-1),
            9999,
        )
        (bucket,) = group.buckets
        assert (
            bucket.start,
            bucket.length,
            bucket.messages,
            bucket.pending,
            bucket.stored_bytes,
        ) == (NINE, timedelta(hours=1), 9, 7, 100)
        (trouble,) = group.troubles
        assert (trouble.subject, trouble.waiting, trouble.reason) == (
            "gone",
            1,
            "[E105] there is no subject",
        )
