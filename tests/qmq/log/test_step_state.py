"""The state of steps against the table of what may happen to an effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.steps import effect

from qmq.log.actions import LaneDone, StepDone, StepPlan, StepVoid
from qmq.log.step_record import VERSION, Settlement, StepRecord
from qmq.log.step_state import MOVES, STEPS_QUEUE, EffectState, Source, StepState

TARGETS = ("a", "b")


def lane_done(group: str = "g", partition: int = 1) -> LaneDone:
    return LaneDone("source", partition, group, "c", 1, ((0, 0),))


def plan(number: int, target: str, *items: tuple[int, int, int]) -> StepPlan:
    return StepPlan(*STEPS_QUEUE, number, target, 0, "g1", 5, number, items)


class Steps:
    """A state, and beside it each effect with its state, moved by the table alone."""

    def __init__(self) -> None:
        self.state = StepState()
        self.sequence = 0
        self.moved: dict[str, list[EffectState]] = {each: [] for each in TARGETS}
        self.steps: dict[str, list[int]] = {each: [] for each in TARGETS}
        self.plans: dict[int, StepPlan] = {}

    def decide(self, counts: dict[str, int], *settlements: Settlement) -> None:
        effects = tuple([effect(each, [b"x"] * n, is_ordered=True) for each, n in counts.items()])
        numbered = self.state.numbered(effects)
        for each in numbered:
            if not each.first:
                self.moved[each.subject], self.steps[each.subject] = [], []
            self.moved[each.subject] += [MOVES[EffectState.NONE, "step"]] * each.count
            self.steps[each.subject] += [self.sequence] * each.count
        self.state.decide(self.sequence, StepRecord(VERSION, settlements, numbered))
        self.sequence += 1

    def waiting(self, target: str) -> list[int]:
        return [n for n, each in enumerate(self.moved[target]) if each is EffectState.WAITING]

    def plan(self, target: str, numbers: list[int]) -> None:
        items = [(self.steps[target][number], number, 1) for number in numbers]
        made = plan(self.state.next_plan, target, *items)
        self.state.plan(made)
        self.plans[made.number] = made
        self._move(made, "STEP_PLAN")

    def end(self, number: int, what: str) -> None:
        made = self.plans.pop(number)
        if what == "STEP_DONE":
            self.state.finish(StepDone(*STEPS_QUEUE, (number,)))
        else:
            self.state.void(StepVoid(*STEPS_QUEUE, (number,)))
        self._move(made, what)

    def _move(self, made: StepPlan, what: str) -> None:
        states = self.moved[made.target]
        for _, number, _ in made.items:
            states[number] = MOVES[states[number], what]

    def check(self) -> None:
        for target in TARGETS:
            states = self.moved[target]
            if all(each is EffectState.DONE for each in states):
                assert target not in self.state.targets
                continue
            found = [self.state.state_of(target, number) for number in range(len(states) + 1)]
            assert found == [*states, EffectState.NONE]
            left = [n for n, each in enumerate(states) if each is not EffectState.DONE]
            assert self.state.targets[target].left == len(left)
            assert self.state.targets[target].sequence <= self.steps[target][left[0]]
        kept = [each.sequence for each in self.state.targets.values()]
        assert self.state.kept_from == (min(kept) if kept else None)
        again = StepState.from_state(msgspec.msgpack.decode(encoded(self.state)))
        assert encoded(again) == encoded(self.state)


def encoded(state: StepState) -> bytes:
    return msgspec.msgpack.encode(state.to_state())


@given(st.data())
def test_effects_move_as_the_table_says(data: Any) -> None:
    steps = Steps()
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(("step", "plan", "done", "void")))
        if what == "step":
            steps.decide(data.draw(st.dictionaries(st.sampled_from(TARGETS), st.integers(1, 3))))
        elif what == "plan":
            target = data.draw(st.sampled_from(TARGETS))
            waiting = steps.waiting(target)
            if waiting:
                chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
                steps.plan(target, chosen)
        elif steps.plans:
            number = data.draw(st.sampled_from(sorted(steps.plans)))
            steps.end(number, "STEP_DONE" if what == "done" else "STEP_VOID")
        steps.check()


def test_the_table_has_no_way_from_done_and_one_way_to_it() -> None:
    assert not [state for state, _ in MOVES if state is EffectState.DONE]
    assert [what for (_, what), to in MOVES.items() if to is EffectState.DONE] == ["STEP_DONE"]


def test_a_target_that_is_away_costs_the_same_for_any_number_of_effects() -> None:
    steps = Steps()
    sizes = list[int]()
    for round_ in range(400):
        steps.decide({"a": 1, "b": 2})
        steps.plan("b", [2 * (round_ % 1), 1])
        steps.end(steps.state.next_plan - 1, "STEP_DONE")
        sizes.append(len(encoded(steps.state)))
    assert steps.state.targets["a"].left == 400
    assert "b" not in steps.state.targets
    assert sizes[-1] < sizes[0] + 16


def test_a_stuck_effect_among_done_ones_costs_one_span() -> None:
    steps = Steps()
    for _ in range(50):
        steps.decide({"a": 2})
    for number in range(1, 100):
        steps.plan("a", [number])
        steps.end(steps.state.next_plan - 1, "STEP_DONE")
    target = steps.state.targets["a"]
    assert (target.done_before, len(target.done), target.left) == (0, 1, 1)
    steps.plan("a", [0])
    steps.end(steps.state.next_plan - 1, "STEP_DONE")
    assert steps.state.targets == {}


def test_what_does_not_fit_the_state_changes_nothing() -> None:
    steps = Steps()
    steps.decide({"a": 2})
    before = encoded(steps.state)
    steps.state.finish(StepDone(*STEPS_QUEUE, (1, 7)))
    steps.state.void(StepVoid(*STEPS_QUEUE, (1,)))
    assert encoded(steps.state) == before


def endings() -> Iterator[tuple[str, bool]]:
    yield "STEP_DONE", False
    yield "STEP_VOID", True


@pytest.mark.parametrize(("what", "waits"), list(endings()))
def test_a_group_leaves_a_partition_only_when_its_ordered_effects_are_done(
    what: str, waits: bool
) -> None:
    steps = Steps()
    steps.decide({"a": 2}, lane_done())
    source = Source("source", 1, "g")
    assert steps.state.waits_for(source)
    for other in (Source("source", 2, "g"), Source("source", 1, "h")):
        assert not steps.state.waits_for(other)
    steps.decide({"a": 1}, lane_done("h"))
    steps.plan("a", [0, 1])
    steps.end(1, what)
    assert steps.state.waits_for(source) is waits
    assert steps.state.waits_for(Source("source", 1, "h"))


def test_effects_for_unordered_subjects_keep_no_group_in_a_partition() -> None:
    state = StepState()
    state.decide(0, StepRecord(VERSION, (lane_done(),), (effect("a", [b"x"]),)))
    assert state.targets["a"].left == 1
    assert not state.waits_for(Source("source", 1, "g"))
