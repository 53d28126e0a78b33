"""The part of a consumer that runs for each message: runs of messages, their acknowledgement, and
what ends a run.
"""

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
from support.forms import SEED, examples

from qmq.client.consuming import IS_COMPILED, TaskHolding, iterator
from qmq.client.consuming.message import BatchSlice, Message, StoredMessage
from qmq.client.task_messages import Owner, TaskMessages
from qmq.integrations.local_messages import LocalMessage, local_batch
from qmq.wire.batch_columns import UNREADABLE

FORMS: list[Any] = [
    iterator,
    *([importlib.import_module("qmq.client._ready")] if IS_COMPILED else []),
]
NEVER_S = 1e9


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__.rpartition(".")[2])
def form(request: pytest.FixtureRequest) -> Any:
    return request.param


class Loop:
    """A consumer's `ReadyMessages`, made of one form, with what it calls. `waiting` messages arrive
    when `arrive` is called.
    """

    def __init__(
        self,
        form: Any,
        *,
        is_auto: bool = True,
        one_by_one: bool = False,
        joined: int = 3,
        held: type[TaskMessages[Any]] = TaskMessages,
    ) -> None:
        self.form, self._joined = form, joined
        self.make: Any = type(
            "Message",
            (form.MessageFields, StoredMessage),
            {"__slots__": (), "settler": Message.settler},
        )
        self.acks: Any = type(
            "Acks",
            (form.GatheredAcks,),
            {"begin_acks": lambda acks, pull: self._begin_acks(acks, pull)},
        )()
        self.now_s = 0.0
        self.begun: list[int] = []
        self.refills: list[Any] = []
        self.arrived = asyncio.Event()
        self.waits = 0
        self.given_back: list[tuple[int, str]] = []
        self.held = (
            held("c", asyncio.get_running_loop(), _ack, self._give_back, make=form.TaskHolding)
            if is_auto
            else None
        )
        self.ready: Any = form.ReadyMessages(
            self.make,
            lambda: self.now_s,
            self._refill,
            self._wait,
            self.held,
            one_by_one=one_by_one,
        )

    def _give_back(self, message: Any, failure: BaseException | None) -> None:
        self.given_back.append((message.pull_sequence, type(failure).__name__))

    def _begin_acks(self, acks: Any, pull: int) -> None:
        self.begun.append(pull)
        acks.ack_first = acks.ack_last = pull
        acks.ack_limit = pull + self._joined

    def _refill(self) -> Any:
        self.ready.end()
        return self.refills.pop(0) if self.refills else None

    async def _wait(self) -> Any:
        self.waits += 1
        while (message := self._refill()) is None:
            self.arrived.clear()
            await self.arrived.wait()
        return message

    def part(self, count: int, pull: int = 0) -> BatchSlice:
        """A slice of messages b"0", b"1" and so on."""
        (part,) = local_batch(
            "s", [LocalMessage(b"%d" % number) for number in range(count)]
        ).messages.slices
        assert part.batch.bodies
        part.settler, part.pull = self.acks, pull
        return part

    def message(self, pull: int) -> Any:
        return self.make(self.acks, self.part(1).batch, 0, 1, pull)


def _ack(message: Any) -> None:
    if not message.is_settled:
        message.settler.ack(message.pull_sequence)


async def test_a_message_has_its_fields(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(3)
    message = loop.make(loop.acks, part.batch, 2, 4, 9)
    assert (message.body, message.attempt, message.is_settled, message.pull_sequence) == (
        b"2",
        4,
        False,
        9,
    )
    assert (message.settler, message.sequence) == (loop.acks, part.batch.view.base_sequence + 2)
    message.is_settled = True
    assert message.is_settled is True
    with pytest.raises(IndexError):
        loop.make(loop.acks, part.batch, 3, 1, 9)
    with pytest.raises(AttributeError):
        message.other = 1


async def test_the_bodies_of_a_message_are_decoded_if_they_were_not(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(2)
    part.batch.decoded = None
    assert loop.make(loop.acks, part.batch, 1, 1, 0).body == b"1"


async def test_a_run_hands_out_messages_in_order_and_leaves_the_rest(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(5, pull=7)
    loop.ready.begin(part, 3, NEVER_S)
    found, base = [loop.ready.take() for _ in range(3)], part.batch.view.base_sequence
    assert [(each.body, each.pull_sequence, each.sequence - base) for each in found] == [
        (b"0", 7, 0),
        (b"1", 8, 1),
        (b"2", 9, 2),
    ]
    assert all(
        each.attempt == 1 and each.settler is loop.acks and type(each) is loop.make
        for each in found
    )
    assert loop.ready.take() is None
    assert (part.offset, part.pull, part.count) == (3, 10, 2)


async def test_a_run_that_is_ended_leaves_what_was_not_handed_out(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(5, pull=7)
    loop.ready.begin(part, 4, NEVER_S)
    loop.ready.take()
    loop.ready.end()
    assert (part.offset, part.pull, part.count) == (1, 8, 4)
    assert loop.ready.take() is None
    loop.ready.end()
    assert (part.offset, part.pull, part.count) == (1, 8, 4)


async def test_nothing_is_handed_out_of_a_run_after_its_time(form: Any) -> None:
    loop = Loop(form)
    part = loop.part(5)
    loop.ready.begin(part, 4, 10.0)
    loop.now_s = 10.0
    assert loop.ready.take().body == b"0"
    loop.now_s = 10.001
    assert loop.ready.take() is None
    assert part.count == 4


async def test_acknowledged_neighbours_join_one_range_up_to_its_limit(form: Any) -> None:
    loop = Loop(form)
    for pull in (0, 1, 2, 3, 4, 6, 5, 6):
        loop.acks.ack(pull)
    assert loop.begun == [0, 4, 6, 5]
    assert (loop.acks.ack_first, loop.acks.ack_last) == (5, 6)


async def test_a_loop_acknowledges_a_message_when_it_asks_for_the_next(form: Any) -> None:
    loop = Loop(form)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    seen = []
    async for message in loop.ready:
        assert loop.acks.ack_last == message.pull_sequence - 1
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


async def test_one_by_one_a_task_gets_the_next_message_when_it_finished_the_last(
    form: Any,
) -> None:
    loop = Loop(form, one_by_one=True)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    assert [(await anext(loop.ready)).pull_sequence for _ in range(4)] == [0, 1, 2, 3]
    assert (loop.waits, loop.acks.ack_last) == (0, 2)


async def test_one_by_one_a_second_message_at_a_time_is_not_of_the_run(form: Any) -> None:
    loop = Loop(form, one_by_one=True)
    part = loop.part(6)
    loop.ready.begin(part, 5, NEVER_S)
    loop.refills = [loop.message(50), loop.message(60)]
    first, second = await asyncio.gather(anext(loop.ready), anext(loop.ready))
    assert [first.pull_sequence, second.pull_sequence] == [0, 50]
    assert part.offset == 1
    third = await asyncio.ensure_future(_next_of(loop))
    assert third.pull_sequence == 60


async def test_one_by_one_a_task_that_ended_has_not_finished_its_message(form: Any) -> None:
    loop = Loop(form, one_by_one=True)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    loop.refills = [loop.message(50)]
    left = await asyncio.ensure_future(_next_of(loop))
    assert left.pull_sequence == 0
    assert (await anext(loop.ready)).pull_sequence == 50
    loop.held.close()  # type: ignore[union-attr]


async def _next_of(loop: Loop) -> Any:
    return await anext(loop.ready)


async def test_what_refilling_or_waiting_raises_reaches_the_loop(form: Any) -> None:
    async def fail() -> Any:
        raise ConnectionError("gone")

    loop = Loop(form)
    ready = form.ReadyMessages(loop.make, lambda: 0.0, lambda: None, fail, None)
    with pytest.raises(ConnectionError, match="gone"):
        await anext(ready)
    ready = form.ReadyMessages(loop.make, lambda: 0.0, lambda: 1 // 0, fail, None)
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


async def compare_with_model(loop: Loop, messages: Any, chance: random.Random) -> None:
    """What tasks do in any order, against a model: a message is acknowledged when its task asks for
    the next one, and not otherwise.
    """
    count = chance.randint(2, 12)
    loop.ready.begin(loop.part(count + 1), count, NEVER_S)
    steps: list[asyncio.Queue[str]] = [asyncio.Queue() for _ in range(3)]
    has: list[list[Any]] = [[], [], []]
    stepped = asyncio.Event()

    async def work(number: int) -> None:
        while True:
            step = await steps[number].get()
            if step == "ask":
                has[number].append(await anext(messages))
            elif step == "ask by another task":
                has[number].append(await asyncio.create_task(anext(messages)))
            elif step == "ask for two":
                has[number] += await asyncio.gather(anext(messages), anext(messages))
            elif step == "settle" and has[number]:
                has[number][-1].is_settled = True
            stepped.set()

    tasks = [asyncio.create_task(work(number)) for number in range(3)]
    acked: list[int] = []
    try:
        while count >= 2:
            number = chance.randrange(3)
            step = chance.choice(["ask", "ask", "ask by another task", "ask for two", "settle"])
            if step != "settle":
                acked += [each.pull_sequence for each in has[number] if not each.is_settled]
                has[number].clear()
                count -= 2 if step == "ask for two" else 1
            stepped.clear()
            steps[number].put_nowait(step)
            await stepped.wait()
            assert loop.begun == acked, "acknowledged: what the task had that asked"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    left = sorted(message.pull_sequence for held in has for message in held)
    assert sorted(pull for pull, _ in loop.given_back) == left
    assert loop.begun == acked


async def test_tasks_acknowledge_only_their_own_messages(form: Any) -> None:
    chance = random.Random(f"{SEED} {form.__name__}")
    for _ in range(examples(400)):
        loop = Loop(form, joined=0)
        await compare_with_model(loop, loop.ready, chance)


class OneForAllTasks(TaskMessages[Any]):
    """A consumer has one current message for all tasks."""

    def holding(self, owner: Owner | None) -> TaskHolding:
        return super().holding(None)


class FinishesLaterOnes(TaskMessages[Any]):
    """A question acknowledges also what its task got after it had asked."""

    def finish(self, holding: TaskHolding, last: Any) -> None:
        super().finish(holding, holding.message)


class KeepsTheNewest(TaskMessages[Any]):
    """A task that asks for several messages holds the last one only."""

    def add(self, holding: TaskHolding, message: Any) -> None:
        holding.message = holding.earlier = None
        super().add(holding, message)


class GivesNothingBack(TaskMessages[Any]):
    """What a task had when it ended is forgotten."""

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, ack: Any, give_back: Any, **named: Any
    ) -> None:
        super().__init__(name, loop, ack, lambda message, failure: None, **named)


class AsksWhenAwaited:
    """A message belongs to the task that awaits it, which may be a helper of the one that asked."""

    def __init__(self, ready: Any) -> None:
        self._ready = ready

    async def __anext__(self) -> Any:
        return await anext(self._ready)


@pytest.mark.parametrize(
    "bug", [OneForAllTasks, FinishesLaterOnes, KeepsTheNewest, GivesNothingBack, AsksWhenAwaited]
)
async def test_the_model_finds_a_planted_bug(form: Any, bug: Any) -> None:
    chance = random.Random(f"{SEED} {form.__name__}")

    async def compare_often() -> None:
        for _ in range(200):
            loop = Loop(form, joined=0, **({} if bug is AsksWhenAwaited else {"held": bug}))
            await compare_with_model(
                loop, bug(loop.ready) if bug is AsksWhenAwaited else loop.ready, chance
            )

    with pytest.raises(AssertionError):
        await compare_often()


async def test_a_message_for_a_task_that_has_ended_goes_back(form: Any) -> None:
    loop = Loop(form, joined=0)

    async def ask() -> Any:
        return asyncio.create_task(anext(loop.ready))

    asked = await asyncio.create_task(ask())
    loop.refills = [loop.message(0)]
    loop.arrived.set()
    assert (await asked).pull_sequence == 0
    while not loop.given_back:
        await asyncio.sleep(0)
    assert loop.given_back == [(0, "NoneType")]


async def test_a_question_is_a_coroutine(form: Any) -> None:
    loop = Loop(form, joined=0)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    question = anext(loop.ready)
    assert asyncio.iscoroutine(question)
    with pytest.raises(StopIteration) as found:
        question.send(None)
    assert found.value.value.pull_sequence == 0
    with pytest.raises(RuntimeError, match="already awaited"):
        question.send(None)
    question = anext(loop.ready)
    with pytest.raises(KeyError, match="thrown"):
        question.throw(KeyError("thrown"))
    question = anext(loop.ready)
    question.close()
    with pytest.raises(RuntimeError, match="already awaited"):
        question.send(None)
    assert (await anext(loop.ready)).pull_sequence == 1, (
        "a question that was not awaited takes nothing"
    )


async def test_a_question_that_waits_can_be_ended(form: Any) -> None:
    loop = Loop(form, joined=0)
    question = anext(loop.ready)
    question.send(None)
    with pytest.raises(RuntimeError, match="being awaited already"):
        await question
    with pytest.raises(KeyError, match="thrown"):
        question.throw(KeyError("thrown"))
    question = anext(loop.ready)
    question.send(None)
    question.close()
    loop.refills = [loop.message(7)]
    assert (await anext(loop.ready)).pull_sequence == 7


async def test_what_is_thrown_into_a_waiting_question_may_be_handled_there(form: Any) -> None:
    loop = Loop(form, joined=0)

    async def wait() -> Any:
        try:
            await asyncio.Event().wait()
        except KeyError:
            return loop.message(3)

    ready = form.ReadyMessages(loop.make, lambda: 0.0, lambda: None, wait, loop.held)
    question = anext(ready)
    question.send(None)
    with pytest.raises(StopIteration) as found:
        question.throw(KeyError())
    assert found.value.value.pull_sequence == 3


async def test_a_loop_that_never_waits_lets_other_tasks_run(form: Any) -> None:
    loop = Loop(form, joined=0)
    loop.ready.begin(loop.part(65), 64, NEVER_S)
    others, seen = asyncio.create_task(asyncio.sleep(0)), []
    async for message in loop.ready:
        seen.append(message.pull_sequence)
        loop.now_s += 0.01
        if others.done():
            break
    assert len(seen) < 20, "the other task needs two turns, and gets one in 0.05 s"
    assert loop.begun == seen[:-1] == list(range(len(seen) - 1))
    assert loop.waits == 0


async def test_attempts_of_any_number_are_kept(form: Any) -> None:
    loop = Loop(form, joined=0)
    part = loop.part(2)
    part.attempt = 1 << 40
    loop.ready.begin(part, 1, NEVER_S)
    assert loop.ready.take().attempt == 1 << 40
    assert loop.make(loop.acks, part.batch, 0, 1 << 40, 0).attempt == 1 << 40


async def test_a_slice_without_its_fields_is_refused(form: Any) -> None:
    loop = Loop(form, joined=0)
    with pytest.raises(AttributeError):
        loop.ready.begin(object(), 1, NEVER_S)


async def test_a_dropped_consumer_is_freed_with_its_messages(form: Any) -> None:
    loop = Loop(form)
    loop.ready.begin(loop.part(6), 5, NEVER_S)
    loop.ready.take()
    # a cycle: loop, message, acknowledgements, and the loop that they tell
    loop.refills = [await anext(loop.ready)]
    assert loop.held is not None
    assert len(loop.held.close()) == 1
    seen = weakref.ref(loop)
    del loop
    gc.collect()
    assert seen() is None


def column(bodies: list[bytes]) -> tuple[bytes, int, int, int]:
    """A region with a column of bodies between other bytes, and the column's place in it."""
    marks = list(accumulate(map(len, bodies), initial=0))
    return (
        b"before--" + pack(f"<{len(marks)}i", *marks) + b"".join(bodies) + b"behind",
        8,
        8 + 4 * len(marks),
        len(bodies),
    )


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
    for places in (
        (at, data_at, count + 100),
        (len(region) + 5, data_at, 1),
        (len(region), data_at, 0),
        (at, data_at, 1 << 40),
    ):
        with pytest.raises(UNREADABLE):
            form.cut_bodies(region, *places)
