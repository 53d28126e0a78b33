"""Effects of steps from the log to brokers that fail: each is stored once, planned before it is
sent, per key in the order of the steps, and a target that is away delays no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from fake_brokers import KEYS, Fault, Line, World, played, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import ManualClock, intake
from support.forms import examples
from support.steps import acknowledged, effect, waiting_effects

from qmq.broker.parts import ServingBroker
from qmq.delay.effects import EffectForwarder, EffectLoader
from qmq.errors import NotMaster, Outcome
from qmq.log.actions import Begin, Join, PullAction, Pulled, StepAction, StepDone, StepPlan
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.step_record import Effect
from qmq.log.step_state import STEPS_QUEUE, StepState
from qmq.log.store import StepIntake, Store
from qmq.model import STEPS

MESSAGES = 20_000


def source_store(folder: Path) -> Store:
    """A store whose consumer holds many messages."""
    store = open_store(folder, LogConfig(), ManualClock(), is_replicated=True)
    if store.index == 0:
        store.append_barrier(1)
        store.append([intake(store.open_queue("source", 0), [b""] * MESSAGES)])
        store.act(Begin("source", 0, "g", "", 0))
        store.act(Join("source", 0, "g", "c", "i", 1000, -1))
        store.act(PullAction("source", 0, "g", "c", (Pulled(0, MESSAGES, 1),)))
    store.write_actions()
    store.commit(store.index)
    return store


def steps_of(store: Store) -> StepState:
    found = store.open_queue(STEPS, 0).steps
    assert found is not None
    return found


class Master:
    """One life of a master: the broker to which the plan log writes. Entries are committed a little
    later; a deposed master commits nothing.
    """

    def __init__(self, store: Store, world: SteppedWorld, **options: Any) -> None:
        self.store = store
        self.is_deposed = False
        self.is_cut_off = False
        """Whether nothing is committed."""
        self.plans = list[StepPlan]()
        self._line = Line()
        world.master = self
        self.forwarder = EffectForwarder(
            cast(ServingBroker, self), world.dispatcher_of, self.fatal, **options
        )
        self.forwarder.start()

    def fatal(self, cause: BaseException) -> None:
        raise cause

    def act(self, action: StepAction) -> None:
        if self.is_deposed:
            raise NotMaster("deposed")
        self.store.act(action)
        if isinstance(action, StepPlan):
            self.plans.append(action)

    async def committed(self) -> None:
        self.store.write_actions()
        index = self.store.index
        await self._line.wait(0.003)
        while self.is_cut_off:
            await self._line.wait(1.0)
        if self.is_deposed:
            raise NotMaster("deposed", outcome=Outcome.UNKNOWN)
        self.store.commit(index)

    def step(self, number: int, *effects: Effect) -> None:
        queue = self.store.open_queue("source", 0)
        settlement = acknowledged(queue, "g", "c", number, number)
        self.store.append_step(StepIntake(1, number, (settlement,), effects))
        self.store.write_actions()
        self.forwarder.wake()

    async def depose(self) -> None:
        self.is_deposed = True
        await self.forwarder.stop()
        self.store.close()


class SteppedWorld(World):
    """A world that is sent the effects of steps: its plans are in a store."""

    master: Master

    def __init__(self, groups: int = 2, faults: Sequence[Fault] = ()) -> None:
        super().__init__(groups, faults)
        self.plan_log = cast(Any, self)

    def dispatcher_of(self, plan_log: Any) -> Any:
        self.plan_log, kept = plan_log, self.plan_log
        try:
            return self.dispatcher(batch_messages=50)
        finally:
            self.plan_log = kept

    def is_committed(self, producer_id: int, number: int) -> bool:
        """A plan is committed if it is in the log that a next master has, open or done: asked of a
        batch that arrives.
        """
        known = [*self.master.plans, *steps_of(self.master.store).plans.values()]
        return any(
            (each.producer_id, each.batch_sequence) == (producer_id, number) for each in known
        )


def numbered(subject: str, number: int, key: bytes | None = None, **more: Any) -> Effect:
    return effect(
        subject,
        [b"%d" % number],
        keys=[key] if key is not None else None,
        is_ordered=key is not None,
        number=number,
        **more,
    )


def is_quiet(master: Master) -> bool:
    steps = steps_of(master.store)
    return not steps.targets and not steps.plans


@played
async def test_effects_of_committed_steps_are_stored_once_with_their_fields(
    tmp_path: Path,
) -> None:
    world = SteppedWorld(2)
    world.add("a")
    world.add("b", is_ordered=True)
    master = Master(source_store(tmp_path), world)
    for number in range(120):
        master.step(number, numbered("a", number), numbered("b", number, KEYS[number % 7]))
    await until(lambda: is_quiet(master))
    assert sorted(map(int, world.stored("a"))) == list(range(120))
    per_key = world.per_key("b")
    assert per_key == {KEYS[k]: list(range(k, 120, 7)) for k in range(7)}
    ids = {each for view in world.views("a") for each in view.message_ids() or []}
    assert len(ids) == 120
    await master.depose()


@played
async def test_nothing_of_a_step_that_is_not_committed_leaves(tmp_path: Path) -> None:
    world = SteppedWorld(1)
    world.add("a")
    master = Master(source_store(tmp_path), world)
    master.is_cut_off = True
    master.step(0, numbered("a", 0))
    with pytest.raises(TimeoutError):
        await until(lambda: bool(world.stored("a")), 60)
    master.is_cut_off = False
    await until(lambda: world.stored("a") == [b"0"])
    await master.depose()


@played
async def test_a_target_that_is_away_delays_no_other_and_few_of_its_effects_are_in_memory(
    tmp_path: Path,
) -> None:
    world = SteppedWorld(2)
    world.add("away", groups=["g0"])
    world.add("here", groups=["g1"])
    world.away("g0")
    master = Master(source_store(tmp_path), world, window=100)
    for number in range(3_000):
        master.step(number, numbered("away", number), numbered("here", number))
        if number % 250 == 249:
            await until(lambda: master.store.committed_index == master.store.index)
    await until(lambda: len(world.stored("here")) == 3_000)
    assert [int(each) for each in world.stored("here")] == list(range(3_000))
    await until(lambda: master.forwarder.dispatcher.waiting == 100)
    assert steps_of(master.store).targets["away"].left == 3_000
    world.back("g0")
    await until(lambda: is_quiet(master))
    assert [int(each) for each in world.stored("away")] == list(range(3_000))
    await master.depose()


@played
async def test_a_next_master_sends_open_plans_again_under_their_numbers(tmp_path: Path) -> None:
    world = SteppedWorld(1)
    world.add("a")
    world.groups["g0"].is_silent = True
    first = Master(source_store(tmp_path), world)
    for number in range(200):
        first.step(number, numbered("a", number))
    await until(lambda: bool(steps_of(first.store).plans))
    open_plans = dict(steps_of(first.store).plans)
    await first.depose()
    world.groups["g0"].is_silent = False
    world.faults.extend([Fault.CUT, Fault.UNKNOWN])
    second = Master(source_store(tmp_path), world)
    assert steps_of(second.store).plans == open_plans
    await until(lambda: is_quiet(second))
    assert [int(each) for each in world.stored("a")] == list(range(200))
    sent = {(each.producer_id, each.number) for each in world.queue("a").log}
    assert {(each.producer_id, each.batch_sequence) for each in open_plans.values()} <= sent
    await second.depose()


@played
async def test_the_target_of_a_deleted_subject_waits_alone(tmp_path: Path) -> None:
    world = SteppedWorld(1)
    world.add("here")
    master = Master(source_store(tmp_path), world)
    for number in range(10):
        master.step(number, numbered("gone", number), numbered("here", number))
    await until(lambda: len(world.stored("here")) == 10)
    await until(lambda: bool(master.forwarder.dispatcher.troubles()))
    assert [each[:2] for each in master.forwarder.dispatcher.troubles()] == [("gone", 10)]
    world.add("gone")
    await until(lambda: is_quiet(master))
    assert [int(each) for each in world.stored("gone")] == list(range(10))
    await master.depose()


@played
async def test_keys_keep_the_order_of_the_steps_through_a_change_of_the_targets_route(
    tmp_path: Path,
) -> None:
    world = SteppedWorld(2)
    world.add("b", is_ordered=True)
    master = Master(source_store(tmp_path), world)
    for number in range(600):
        master.step(number, numbered("b", number, KEYS[number % 12]))
        if number == 200:
            await until(lambda: bool(world.stored("b")))
            world.publish("b", [1], [(0, 2, "g0"), (2, 4, "g1")])
    await until(lambda: is_quiet(master))
    assert world.per_key("b") == {KEYS[k]: list(range(k, 600, 12)) for k in range(12)}
    await master.depose()


FAULTS = [each for each in Fault if each is not Fault.REFUSED]


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 16))
def test_after_any_failures_each_effect_is_stored_once_in_the_order_of_the_steps(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")

    @played
    async def scene() -> None:
        random = Random(seed)
        world = SteppedWorld(2, [random.choice(FAULTS) for _ in range(random.randrange(40))])
        world.add("a")
        world.add("b", is_ordered=True)
        made = 0
        master = Master(source_store(folder), world, window=random.choice((5, 60, 1_000)))
        for _ in range(random.randrange(1, 5)):
            for _ in range(random.randrange(1, 80)):
                master.step(made, numbered("a", made), numbered("b", made, KEYS[made % 5]))
                made += 1
            if random.random() < 0.5:
                busy = random.uniform(0.0, 0.05)
                await Line().wait(busy)
                await master.depose()
                window = random.choice((5, 60, 1_000))
                master = Master(source_store(folder), world, window=window)
        await until(lambda: is_quiet(master))
        assert sorted(map(int, world.stored("a"))) == list(range(made))
        keys = {KEYS[k]: list(range(k, made, 5)) for k in range(min(5, made))}
        assert world.per_key("b") == keys
        await master.depose()

    scene()


# --- the loader alone -----------------------------------------------------------------------------


def loaded(loader: EffectLoader, subject: str) -> list[int]:
    """The bodies of a target that come next, until nothing more comes."""
    found, is_more = list[int](), True
    while is_more:
        effects, is_more = loader.next()
        found += [int(each.body) for each in effects.messages if each.subject == subject]
    return found


def test_what_is_done_or_planned_is_not_handed_over_again(tmp_path: Path) -> None:
    store = source_store(tmp_path)
    queue = store.open_queue("source", 0)
    for number in range(10):
        done = acknowledged(queue, "g", "c", number, number)
        sends = (numbered("a", number), numbered("b", number))
        store.append_step(StepIntake(1, number, (done,), sends))
    store.act(StepPlan(*STEPS_QUEUE, 1, "a", 0, "g0", 9, 0, ((0, 0, 1), (4, 4, 1))))
    store.act(StepPlan(*STEPS_QUEUE, 2, "a", 0, "g0", 9, 1, ((1, 1, 1), (6, 6, 1))))
    store.act(StepDone(*STEPS_QUEUE, (2,)))
    store.write_actions()
    store.commit(store.index)
    loader = EffectLoader(store)
    (plan,) = loader.steps.plans.values()
    assert [int(each.body) for each in loader.planned(plan).messages] == [0, 4]
    assert loaded(loader, "a") == [2, 3, 5, 7, 8, 9]
    assert [number for _, number in waiting_effects(store, "a")] == [2, 3, 5, 7, 8, 9]
    store.close()


def test_a_target_that_counts_from_0_again_is_not_taken_for_the_one_before(
    tmp_path: Path,
) -> None:
    store = source_store(tmp_path)
    queue = store.open_queue("source", 0)

    def step(number: int) -> None:
        done = acknowledged(queue, "g", "c", number, number)
        store.append_step(StepIntake(1, number, (done,), (numbered("a", number),)))
        store.write_actions()
        store.commit(store.index)

    for number in range(3):
        step(number)
    items = tuple([(number, number, 1) for number in range(3)])
    store.act(StepPlan(*STEPS_QUEUE, 1, "a", 0, "g0", 9, 0, items))
    loader = EffectLoader(store, window=100)
    store.act(StepDone(*STEPS_QUEUE, (1,)))
    loader.released("a", 3)
    step(3)
    assert steps_of(store).targets["a"].next_number == 1
    assert loaded(loader, "a") == [3]
    store.close()
