"""Answers and coroutines that wait for commits, in the order of the commits."""

from __future__ import annotations

import asyncio

import pytest

from qmq.broker.dispatch.sessions import PendingAnswer, PendingResponses
from qmq.errors import NotMaster, Outcome

NOTHING = -1


class Reader:
    """A connection that keeps what it is sent."""

    is_writable = True
    client = ""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, *buffers: bytes) -> None:
        self.sent.append(b"".join(buffers))


def unknown() -> NotMaster:
    return NotMaster("it is elsewhere", outcome=Outcome.UNKNOWN)


async def test_a_coroutine_continues_when_its_index_is_committed_and_no_sooner() -> None:
    responses, waiter = PendingResponses(), asyncio.get_running_loop().create_future()
    responses.wait(waiter, 5)
    responses.release(4, 9)
    assert not waiter.done()
    responses.release(5, NOTHING)
    assert waiter.result() is None


async def test_a_waiter_for_unwritten_entries_continues_at_their_commit() -> None:
    responses, waiter, peer = (
        PendingResponses(),
        asyncio.get_running_loop().create_future(),
        Reader(),
    )
    responses.wait(waiter, None)
    responses.unwritten.append(PendingAnswer(0, peer, 1, b"done"))
    responses.release(9, 9)
    assert (waiter.done(), peer.sent, responses.has_unwritten) == (False, [], True)
    responses.written(10)
    responses.release(9, 9)
    assert (waiter.done(), peer.sent, responses.has_unwritten) == (False, [], False)
    responses.release(10, NOTHING)
    assert (waiter.done(), peer.sent) == (True, [b"done"])


async def test_waiters_at_the_end_of_a_mastership_get_an_unknown_outcome() -> None:
    responses, loop, peer = PendingResponses(), asyncio.get_running_loop(), Reader()
    waiters = [loop.create_future() for _ in range(2)]
    responses.wait(waiters[0], 5)
    responses.wait(waiters[1], None)
    responses.for_commit.append(PendingAnswer(5, peer, 1, b""))
    responses.for_flush.append(PendingAnswer(5, peer, 2, b""))
    responses.unwritten.append(PendingAnswer(0, peer, 3, b""))
    assert sorted(each.request_id for each in responses.abandon(unknown)) == [1, 2, 3]
    for waiter in waiters:
        with pytest.raises(NotMaster) as raised:
            await waiter
        assert raised.value.outcome is Outcome.UNKNOWN
    responses.written(6)
    responses.release(9, 9)
    assert peer.sent == []


async def test_a_cancelled_coroutine_does_not_hold_up_others() -> None:
    responses, loop = PendingResponses(), asyncio.get_running_loop()
    gave_up, patient = loop.create_future(), loop.create_future()
    for waiter in (gave_up, patient):
        responses.wait(waiter, 5)
    gave_up.cancel()
    responses.release(5, NOTHING)
    assert patient.result() is None
    assert responses.abandon(unknown) == []
