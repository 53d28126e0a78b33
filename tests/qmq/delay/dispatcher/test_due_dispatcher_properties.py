"""With any faults of brokers, metaservers and masters, each message is stored once, planned before
it is sent, and per key in order.

A history is a list of events. Between them messages become due and requests meet faults; at the end
everything is well again, and the world must come to rest with every message delivered. Among the
events are crashes: another master has the log up to any point behind what was committed, and
continues from there. Only where a partition was fenced may a message be stored twice, as a replay
in order.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from enum import Enum, auto

import pytest
from fake_brokers import KEYS, Fault, MemoryLedger, World, due, places, play, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.forms import examples

from qmq.delay.dispatcher.dispatcher import DueDispatcher
from qmq.delay.interfaces import DueMessage, SchedulePlace

SUBJECTS = ("plain", "sorted", "alone")


class Event(Enum):
    """The next event."""

    DUE = auto()
    DEPOSE = auto()
    AWAY = auto()
    BACK = auto()
    DRAIN = auto()
    RESUME = auto()
    FULL = auto()
    SEAL = auto()
    PUBLISH = auto()
    FENCE = auto()
    PUSH = auto()
    WITHDRAW = auto()
    CRASH = auto()


events = st.tuples(
    st.sampled_from(Event), st.integers(0, 1_000), st.sampled_from([0.0, 0.004, 0.05, 1.0])
)
faults = st.sampled_from([*Fault, *[Fault.NONE] * 8])


class History:
    """A world, and an account of every message."""

    def __init__(self, script: list[Fault]) -> None:
        self.world = World(2, script)
        self.world.add("plain")
        self.world.add("sorted", is_ordered=True)
        self.world.add("alone", groups=["g1"])
        self.messages: dict[SchedulePlace, DueMessage] = {}
        self.withdrawn: dict[SchedulePlace, int] = {}
        """And how long the log was then: a crash behind which it is shorter has them back."""
        self.dispatcher: DueDispatcher = self.world.dispatcher(batch_messages=4)
        self.sealed: list[int] = []
        self.is_fenced = False
        self.crashes = 0

    async def happen(self, event: Event, choice: int) -> None:
        world, group = self.world, list(self.world.groups.values())[choice % 2]
        if event is Event.DUE:
            self.put(1 + choice % 40)
        elif event is Event.DEPOSE:
            world.depose(group)
        elif event is Event.AWAY:
            world.away(group.name)
        elif event is Event.BACK and group.is_away:
            world.back(group.name)
        elif event in (Event.DRAIN, Event.RESUME):
            group.is_drained = event is Event.DRAIN
        elif event is Event.FULL:
            group.failure = None if group.failure else world.refusal
        elif event is Event.SEAL and not self.sealed:
            route = world.subjects["sorted"].route
            assert route is not None
            self.sealed = [route.partitions[choice % len(route.partitions)].number]
            world.seal("sorted", *self.sealed)
        elif event is Event.PUBLISH and self.sealed:
            self.publish(choice)
        elif event is Event.FENCE and group.is_away and not self.sealed:
            self.fence(group.name, choice)
        elif event is Event.PUSH:
            world.push(subjects=["sorted", "plain"], groups=[group.name])
        elif event is Event.WITHDRAW and self.messages:
            place = list(self.messages)[choice % len(self.messages)]
            if self.dispatcher.withdraw(place):
                self.withdrawn[place] = len(world.plan_log.log)
        elif event is Event.CRASH:
            await self.crash(choice)

    def put(self, count: int) -> None:
        made = []
        for _ in range(count):
            number = len(self.messages) + len(made)
            made.append(due(number, SUBJECTS[number % 3], key=KEYS[number % len(KEYS)]))
        self.messages |= {message.place: message for message in made}
        self.dispatcher.put(made)

    def publish(self, choice: int) -> None:
        route = self.world.subjects["sorted"].route
        assert route is not None
        (number,), self.sealed = self.sealed, []
        found = route.partition(number)
        assert found is not None
        first, end = found.range
        middle = first + 1 + choice % max(end - first - 1, 1)
        cuts = [first, middle, end] if middle < end else [first, end]
        targets = [(a, b, f"g{(choice + a) % 2}") for a, b in itertools.pairwise(cuts)]
        self.world.publish("sorted", [number], targets)

    def fence(self, group: str, choice: int) -> None:
        """A partition of a group that is away is moved to the other one."""
        route = self.world.subjects["sorted"].route
        assert route is not None
        its = [part for part in route.partitions if part.group == group]
        if its:
            part, other = (
                its[choice % len(its)],
                next(each for each in self.world.groups if each != group),
            )
            self.world.publish("sorted", [part.number], [(*part.range, other)], fenced=True)
            self.is_fenced = True

    async def crash(self, choice: int) -> None:
        old = self.world.plan_log
        await self.dispatcher.stop()
        old.is_closed = True
        self.crashes += 1
        kept = old.committed + choice % (len(old.log) - old.committed + 1)
        self.world.plan_log = MemoryLedger(old.log[:kept])
        self.withdrawn = {place: at for place, at in self.withdrawn.items() if at <= kept}
        self.dispatcher = self.world.dispatcher(batch_messages=4)
        for plan in self.world.plan_log.open():
            self.dispatcher.resume(plan, [self.messages[place] for place in places(plan)])
        states = self.world.plan_log.states
        pending = [
            place
            for place in self.messages
            if states.get(place, "pending") == "pending" and place not in self.withdrawn
        ]
        self.dispatcher.put([self.messages[place] for place in pending])

    async def come_to_rest(self) -> None:
        self.world.faults.clear()
        for group in self.world.groups.values():
            group.is_drained, group.failure = False, None
            if group.is_away:
                self.world.back(group.name)
        if self.sealed:
            self.publish(0)
        await until(lambda: self.dispatcher.waiting + self.dispatcher.planned == 0, 3_600)
        assert self.dispatcher.troubles() == []

    def check(self) -> None:
        expected = {
            place: message
            for place, message in self.messages.items()
            if place not in self.withdrawn
        }
        assert {
            place for place, state in self.world.plan_log.states.items() if state == "done"
        } == set(expected)
        for subject in SUBJECTS:
            bodies = list(map(int, self.world.stored(subject)))
            mine = {
                place.ordinal for place, message in expected.items() if message.subject == subject
            }
            may_be_left_behind = subject == "sorted" and self.is_fenced
            assert len(bodies) == len(set(bodies)) or may_be_left_behind
            # who takes over does not know what a fenced partition may have: it may be cancelled
            if may_be_left_behind and self.crashes:
                mine |= set(bodies) & {place.ordinal for place in self.withdrawn}
            assert set(bodies) == mine
        for subject in SUBJECTS:
            for view in self.world.views(subject):
                assert [int.from_bytes(each, "big") for each in view.message_ids() or []] == list(
                    map(int, view.bodies())
                )
        for numbers in self.world.per_key("sorted").values():
            assert list(dict.fromkeys(numbers)) == sorted(set(numbers)), (
                "what is seen first is in order"
            )
            assert list(dict.fromkeys(reversed(numbers))) == sorted(set(numbers), reverse=True), (
                "and so is what is replayed"
            )


async def unfold(history: History, script: list[tuple[Event, int, float]]) -> None:
    history.put(30)
    for event, choice, wait_s in script:
        await history.happen(event, choice)
        await asyncio.sleep(wait_s)
    await history.come_to_rest()
    history.check()
    await history.dispatcher.stop()


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(events, max_size=30), st.lists(faults, max_size=60))
def test_each_message_is_stored_once_and_each_key_in_order(
    script: list[tuple[Event, int, float]], its: list[Fault]
) -> None:
    play(lambda: unfold(History(its), script))


@pytest.mark.parametrize("seed", range(6))
def test_a_long_history_comes_to_rest(seed: int) -> None:

    chance = random.Random(seed)
    script = [
        (
            chance.choice(list(Event)),
            chance.randrange(1_000),
            chance.choice([0.0, 0.004, 0.05, 1.0]),
        )
        for _ in range(300)
    ]
    its = [chance.choice([*Fault, *[Fault.NONE] * 8]) for _ in range(2_000)]
    play(lambda: unfold(History(its), script))
