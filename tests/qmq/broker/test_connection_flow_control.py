"""A connection is read from while nothing forbids it; producers of large batches take turns, so
that a round brings few bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import node_config, running

import qmq
from qmq.broker.connection.access import ConnectionAccess, ConnectionFlow, RoundBudget
from qmq.broker.maintenance import ProducerOwners
from qmq.errors import ProtocolViolation
from qmq.limits import MIB
from qmq.security.access import OpenAccess

BUDGET = 100


class Producer:
    """Brings its batches one after another, each when it is read."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.is_read = True

    def wait_for_turn(self) -> None:
        self.is_read = False

    def take_turn(self) -> None:
        self.is_read = True


@given(st.lists(st.lists(st.integers(1, 80), max_size=12), min_size=1, max_size=12))
def test_a_round_brings_little_more_than_the_budget_and_all_come_to_their_end(
    batches: list[list[int]],
) -> None:
    planned = list[Callable[[], None]]()
    budget = RoundBudget(planned.append, lambda: 0, BUDGET, 0)
    producers = [Producer(list(each)) for each in batches]
    largest = max((size for each in batches for size in each), default=0)
    rounds = 0
    while any(each.sizes for each in producers):
        brought = 0
        for each in producers:
            if each.is_read and each.sizes:
                size = each.sizes.pop(0)
                brought += size
                budget.took(each, size)
        turn, planned[:] = list(planned), []
        for call in turn:
            call()
        assert rounds == 0 or brought <= 2 * BUDGET + len(producers) * largest
        rounds += 1
        assert rounds < 1_000
    while planned:
        turn, planned[:] = list(planned), []
        for call in turn:
            call()
    assert all(each.is_read for each in producers)


def test_who_went_over_is_read_again_in_that_order() -> None:
    planned = list[Callable[[], None]]()
    budget = RoundBudget(planned.append, lambda: 0, BUDGET, 1)
    first, second, third, small = (Producer([]) for _ in range(4))
    for each in (first, second, third):
        budget.took(each, 80)
    budget.took(small, 1)
    assert [each.is_read for each in (first, second, third, small)] == [True, False, False, True]
    planned.pop()()
    assert second.is_read
    assert third.is_read
    assert not planned


def test_a_producer_within_the_budget_never_waits() -> None:
    planned = list[Callable[[], None]]()
    budget, producer = RoundBudget(planned.append, lambda: 0, BUDGET, 1), Producer([])
    for _ in range(5):
        for _ in range(4):
            budget.took(producer, BUDGET // 4)
        assert producer.is_read
        planned.pop()()


def test_small_batches_count_until_they_are_written_and_need_no_call_for_that() -> None:
    planned, turn = list[Callable[[], None]](), 0
    budget, small, large = (
        RoundBudget(planned.append, lambda: turn, BUDGET, 10),
        Producer([]),
        Producer([]),
    )
    for turn in range(20):  # noqa: B007 - read by the budget
        for _ in range(9):
            budget.took(small, 10)
    assert not planned
    budget.took(large, 20)
    assert not large.is_read, "the small ones of this round filled it"
    planned.pop()()
    assert large.is_read


async def test_large_batches_of_many_producers_are_all_stored(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node:
        clients = [qmq.connect(node.address) for _ in range(12)]
        try:
            await asyncio.gather(*[send(mq, number) for number, mq in enumerate(clients)])
            async with clients[0].consumer("s", "g") as consumer:
                found = set[bytes]()
                while len(found) < 12 * 4:
                    found |= {
                        message.body[:4]
                        for message in await consumer.pull(48, timedelta(seconds=20))
                    }
        finally:
            for mq in clients:
                await mq.close()


async def send(mq: qmq.Client, number: int) -> None:
    producer = mq.producer("s", batch_messages=1)
    tickets = [producer.send(b"%02d%02d" % (number, each) + bytes(MIB)) for each in range(4)]
    for ticket in tickets:
        await ticket


class Socket:
    """A connection's stream, as far as flow control sees it."""

    def __init__(self) -> None:
        self.is_reading = self.is_writable = True

    @property
    def is_held(self) -> bool:
        return not self.is_reading

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


def flow_of(socket: Socket, budget: RoundBudget | None = None) -> ConnectionFlow:
    def never(_delay_s: float, _call: Callable[[], None]) -> asyncio.TimerHandle:
        raise AssertionError("nothing here has a quota")

    return ConnectionFlow(
        socket, ConnectionAccess(OpenAccess(), ProducerOwners()), never, BUDGET, budget
    )


def test_a_connection_is_read_again_when_half_of_its_bytes_are_answered() -> None:
    socket = Socket()
    flow = flow_of(socket)
    for request_id in range(4):
        flow.began(request_id, 30)
    assert not socket.is_reading
    flow.answered(0)
    flow.answered(1)
    assert not socket.is_reading
    flow.answered(2)
    assert socket.is_reading
    assert flow.unanswered_bytes == 30


def test_a_client_that_does_not_read_its_answers_is_not_read_from() -> None:
    socket = Socket()
    flow = flow_of(socket)
    flow.began(0, 200)
    socket.is_writable = False
    flow.answered(0)
    assert not socket.is_reading
    socket.is_writable = True
    flow.writable()
    assert socket.is_reading


def test_all_reasons_must_be_over_before_a_connection_is_read_again() -> None:
    socket, rounds = Socket(), list[Callable[[], None]]()
    flow = flow_of(socket, RoundBudget(rounds.append, lambda: 0, 50, 10))
    flow.began(0, 120)
    flow.answered(0)
    assert not socket.is_reading, "its turn has not come"
    rounds.pop(0)()
    assert socket.is_reading


def test_the_number_of_an_unanswered_request_cannot_be_used_again() -> None:
    flow = flow_of(Socket())
    flow.began(7, 1)
    with pytest.raises(ProtocolViolation, match="request 7"):
        flow.began(7, 1)
