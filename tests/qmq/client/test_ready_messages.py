"""The part of a consumer that runs for each message: runs of messages, their acknowledgement, and what ends a run."""

from __future__ import annotations

import asyncio
import gc
import importlib
import random
import weakref
from itertools import accumulate
from struct import pack
from typing import Any

import pytest

from qmq.batch_columns import UNREADABLE
from qmq.client import ready_messages
from qmq.client.local_messages import LocalMessage, local_batch
from qmq.client.message import Slice
from qmq.client.ready_form import IS_COMPILED

FORMS: list[Any] = [ready_messages, *([importlib.import_module("qmq.client._ready")] if IS_COMPILED else [])]
NEVER_S = 1e9


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__.rpartition(".")[2])
def form(request: pytest.FixtureRequest) -> Any:
    return request.param


class Loop:
    """A consumer's `ReadyMessages`, made of one form, with what it calls. `waiting` messages arrive when `arrive` is called."""

    def __init__(self, form: Any, *, is_auto: bool = True) -> None:
        self.form = form
        self.make: Any = type("Message", (form.MessageFields,), {"__slots__": ()})
        self.acks: Any = type("Acks", (form.GatheredAcks,), {"begin_acks": lambda acks, pull: self._begin_acks(acks, pull)})()
        self.now_s = 0.0
        self.begun: list[int] = []
        self.refills: list[Any] = []
        self.arrived = asyncio.Event()
        self.waits = 0
        self.ready: Any = form.ReadyMessages(self.make, lambda: self.now_s, self._refill, self._wait, is_auto)

    def _begin_acks(self, acks: Any, pull: int) -> None:
        self.begun.append(pull)
        acks.ack_first = acks.ack_last = pull
        acks.ack_limit = pull + 3

    def _refill(self) -> Any:
        self.ready.end()
        return self.refills.pop(0) if self.refills else None

    async def _wait(self) -> Any:
        self.waits += 1
        while (message := self._refill()) is None:
            self.arrived.clear()
            await self.arrived.wait()
        return self.ready.keep(message)

    def part(self, count: int, pull: int = 0) -> Slice:
        """A slice of messages b"0", b"1" and so on."""
        (part,) = local_batch("s", [LocalMessage(b"%d" % number) for number in range(count)]).messages.slices
        assert part.batch.bodies
        part.settler, part.pull = self.acks, pull
        return part

    def message(self, pull: int) -> Any:
        return self.make(self.acks, self.part(1).batch, 0, 1, pull)


def test_a_message_has_its_fields(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(3)
    message = loop.make(loop.acks, part.batch, 2, 4, 9)
    assert (message.body, message.attempt, message.is_settled, message.pull_sequence) == (b"2", 4, False, 9)
    assert (message._settler, message._batch, message._index) == (loop.acks, part.batch, 2)
    message.is_settled = True
    assert message.is_settled is True
    with pytest.raises(IndexError):
        loop.make(loop.acks, part.batch, 3, 1, 9)
    with pytest.raises(AttributeError):
        message.other = 1


def test_the_bodies_of_a_message_are_decoded_if_they_were_not(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(2)
    part.batch.decoded = None
    assert loop.make(loop.acks, part.batch, 1, 1, 0).body == b"1"


def test_a_run_hands_out_messages_in_order_and_leaves_the_rest(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(5, pull=7)
    loop.ready.begin(part, 3, NEVER_S)
    found = [loop.ready.take() for _ in range(3)]
    assert [(each.body, each.pull_sequence, each._index) for each in found] == [(b"0", 7, 0), (b"1", 8, 1), (b"2", 9, 2)]
    assert all(each.attempt == 1 and each._settler is loop.acks and type(each) is loop.make for each in found)
    assert loop.ready.take() is None
    assert (part.offset, part.pull, part.count) == (3, 10, 2)


def test_a_run_that_is_ended_leaves_what_was_not_handed_out(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(5, pull=7)
    loop.ready.begin(part, 4, NEVER_S)
    loop.ready.take()
    loop.ready.end()
    assert (part.offset, part.pull, part.count) == (1, 8, 4)
    assert loop.ready.take() is None
    loop.ready.end()
    assert (part.offset, part.pull, part.count) == (1, 8, 4)


def test_a_run_is_replaced_by_the_next_one(form: Any) -> None:
    loop = Loop(form)
    one, two = loop.part(3), loop.part(3, pull=20)
    loop.ready.begin(one, 2, NEVER_S)
    loop.ready.take()
    loop.ready.begin(two, 2, NEVER_S)
    assert (one.offset, one.pull, one.count) == (1, 1, 2)
    assert loop.ready.take().pull_sequence == 20


def test_nothing_is_handed_out_of_a_run_after_its_time(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(5)
    loop.ready.begin(part, 4, 10.0)
    loop.now_s = 10.0
    assert loop.ready.take().body == b"0"
    loop.now_s = 10.001
    assert loop.ready.take() is None
    assert part.count == 4


def test_acknowledged_neighbours_join_one_range_up_to_its_limit(form: Any) -> None:
    loop = Loop(form)
    for pull in (0, 1, 2, 3, 4, 6, 5, 6):
        loop.acks.ack(pull)
    assert loop.begun == [0, 4, 6, 5]
    assert (loop.acks.ack_first, loop.acks.ack_last) == (5, 6)


def test_without_a_range_every_message_begins_one(form: Any) -> None:
    loop = Loop(form)
    assert (loop.acks.ack_first, loop.acks.ack_last, loop.acks.ack_limit) == (0, -1, -1)
    loop.acks.ack(0)
    loop.acks.ack_last = loop.acks.ack_limit = -1
    loop.acks.ack(0)
    assert loop.begun == [0, 0]


async def test_a_loop_acknowledges_a_message_when_it_asks_for_the_next(form: Any) -> None:
    loop = Loop(form)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    seen = []
    async for message in loop.ready:
        assert loop.acks.ack_last == message.pull_sequence - 1
        assert loop.ready.current is message
        seen.append(message.body)
        if len(seen) == 4:
            break
    assert seen == [b"0", b"1", b"2", b"3"]
    assert loop.acks.ack_last == 2
    assert loop.waits == 0


async def test_a_loop_leaves_a_message_alone_that_has_a_verdict(form: Any) -> None:
    loop = Loop(form)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    async for message in loop.ready:
        message.is_settled = message.pull_sequence < 2
        if message.pull_sequence == 4:
            break
    assert (loop.begun, loop.acks.ack_last) == ([2], 3)


async def test_with_explicit_acknowledgement_a_loop_gives_no_verdict(form: Any) -> None:
    loop = Loop(form, is_auto=False)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    async for message in loop.ready:
        if message.pull_sequence == 4:
            break
    assert loop.begun == []


async def test_a_redirected_message_is_acknowledged_where_it_came_from(form: Any) -> None:
    loop = Loop(form)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    async for message in loop.ready:
        message._settler = None
        if message.pull_sequence == 2:
            break
    assert loop.acks.ack_last == 1


async def test_a_settler_of_another_class_is_asked_for_each_message(form: Any) -> None:
    loop = Loop(form)
    acked: list[int] = []
    part = loop.part(4)
    part.settler = type("Other", (), {"ack": lambda self, pull: acked.append(pull)})()
    loop.ready.begin(part, 3, NEVER_S)
    async for message in loop.ready:
        if message.pull_sequence == 2:
            break
    assert acked == [0, 1]


async def test_a_loop_waits_when_nothing_is_ready(form: Any) -> None:
    loop = Loop(form)
    loop.refills = [loop.message(0)]
    assert (await anext(loop.ready)).pull_sequence == 0
    waiting = asyncio.ensure_future(anext(loop.ready))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert loop.acks.ack_last == 0, "acknowledged, although no other message is there"
    loop.refills = [loop.message(1)]
    loop.arrived.set()
    assert (await waiting).pull_sequence == 1
    assert loop.ready.current.pull_sequence == 1


async def test_what_refilling_or_waiting_raises_reaches_the_loop(form: Any) -> None:
    async def fail() -> Any:
        raise ConnectionError("gone")

    loop = Loop(form)
    ready = form.ReadyMessages(loop.make, lambda: 0.0, lambda: None, fail, True)
    with pytest.raises(ConnectionError, match="gone"):
        await anext(ready)
    ready = form.ReadyMessages(loop.make, lambda: 0.0, lambda: 1 // 0, fail, True)
    with pytest.raises(ZeroDivisionError):
        ready.take()


async def test_an_acknowledgement_that_fails_reaches_the_loop(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(4)
    part.settler = type("Broken", (), {"ack": lambda self, pull: 1 // 0})()
    loop.ready.begin(part, 3, NEVER_S)
    await anext(loop.ready)
    with pytest.raises(ZeroDivisionError):
        await anext(loop.ready)
    assert (await anext(loop.ready)).pull_sequence == 1, "no message is lost"


async def test_what_is_not_awaited_takes_and_acknowledges_nothing(form: Any) -> None:
    loop = Loop(form)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    await anext(loop.ready)
    dropped = loop.ready.__anext__()
    assert loop.begun == []
    if asyncio.iscoroutine(dropped):
        dropped.close()
    del dropped
    assert loop.ready.current.pull_sequence == 0
    assert (await anext(loop.ready)).pull_sequence == 1


async def test_a_cancelled_wait_loses_no_message(form: Any) -> None:
    loop = Loop(form)
    waiting = asyncio.ensure_future(anext(loop.ready))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    loop.ready.begin(loop.part(2), 1, NEVER_S)
    assert (await anext(loop.ready)).pull_sequence == 0
    loop.refills = [loop.message(1)]
    assert (await asyncio.wait_for(anext(loop.ready), 5)).pull_sequence == 1


async def test_two_tasks_get_different_messages(form: Any) -> None:
    loop = Loop(form, is_auto=False)
    loop.ready.begin(loop.part(9), 4, NEVER_S)
    found: list[int] = []

    async def read() -> None:
        async for message in loop.ready:
            found.append(message.pull_sequence)
            await asyncio.sleep(0)

    readers = [asyncio.ensure_future(read()) for _ in range(2)]
    while loop.waits < 2:
        await asyncio.sleep(0)
    loop.refills = [loop.message(4), loop.message(5)]
    loop.arrived.set()
    while len(found) < 6:
        await asyncio.sleep(0)
    for each in readers:
        each.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    assert sorted(found) == list(range(6))


async def test_a_dropped_consumer_is_freed_with_its_messages(form: Any) -> None:
    loop = Loop(form)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    loop.ready.take()
    loop.refills = [await anext(loop.ready)]  # a cycle: loop, message, acknowledgements, and the loop that they tell
    seen = weakref.ref(loop)
    del loop
    gc.collect()
    assert seen() is None


def column(bodies: list[bytes]) -> tuple[bytes, int, int, int]:
    """A region with a column of bodies between other bytes, and the column's place in it."""
    marks = list(accumulate(map(len, bodies), initial=0))
    return b"before--" + pack(f"<{len(marks)}i", *marks) + b"".join(bodies) + b"behind", 8, 8 + 4 * len(marks), len(bodies)


def test_bodies_are_cut_out_of_a_batch(form: Any) -> None:
    bodies = [b"", b"1", bytes(range(256)), b"x" * 5_000, b"", b"22"]
    assert form.cut_bodies(*column(bodies)) == bodies
    assert form.cut_bodies(*column([])) == []


def test_both_forms_cut_the_same_bodies_whatever_the_offsets_are() -> None:
    chance, marks = random.Random(7), (-(1 << 31), -101, -3, 0, 1, 50, 99, 100, 101, (1 << 31) - 1)
    for _ in range(2_000):
        region = b"offsets:" + pack("<6i", *chance.choices(marks, k=6)) + bytes(range(100))
        place = (8, chance.choice((0, 32, 90, 132, 500)), 5)
        found = [form.cut_bodies(region, *place) for form in FORMS]
        assert found[0] == found[-1], place


def test_offsets_outside_a_batch_are_unreadable(form: Any) -> None:
    region, at, data_at, count = column([b"1", b"22"])
    for places in ((at, data_at, count + 100), (len(region) + 5, data_at, 1), (len(region), data_at, 0), (at, data_at, 1 << 40)):
        with pytest.raises(UNREADABLE):
            form.cut_bodies(region, *places)
