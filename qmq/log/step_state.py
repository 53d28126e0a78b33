"""The state of the queue `%steps`: which effects of the steps are done, and which batches of them
are planned. Pure: steps and actions in, state out. The state is the same on every replica and after
every restart (docs/adr/0025).

The effects of a target (a subject) are numbered from 0, in the order of the log. Each of these
numbers is in exactly one of these states:

    a step's entry ──▶ waiting ──STEP_PLAN──▶ planned ──STEP_DONE──▶ done
                          ▲                      │
                          └──────STEP_VOID───────┘

`MOVES` is this picture as a table. What is done is kept as `done_before` and the spans after it, so
a target that is away costs the same however many of its effects wait; planned are those of the open
plans; everything else below `next_number` waits. A target of which everything is done is forgotten,
and counts from 0 again.

The place of an effect in the log follows from `sequence`: the first effect that is not done is in
the step with that sequence of `%steps`, or in a later one. Retention keeps the queue from there on.

An ordered source: a group that leaves a partition, because the route changed, has to wait for the
effects that its steps there sent to ordered subjects (`waits_for`). Otherwise the steps in the next
partition, on another broker group, could send to the same keys before them.

An action that does not fit the state is ignored: a DONE or VOID of a plan that is not open.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from qmq.log.actions import LaneDone, StepDone, StepPlan, StepVoid
from qmq.log.step_record import Effect, StepRecord
from qmq.model import STEPS

STEPS_QUEUE: Final = (STEPS, 0, "", "")
"""The first fields of every action on the queue of steps."""


class EffectState(StrEnum):
    """The states of an effect. `NONE`: no step has sent it."""

    NONE = "none"
    WAITING = "waiting"
    PLANNED = "planned"
    DONE = "done"


MOVES: Final[dict[tuple[EffectState, str], EffectState]] = {
    (EffectState.NONE, "step"): EffectState.WAITING,
    (EffectState.WAITING, "STEP_PLAN"): EffectState.PLANNED,
    (EffectState.PLANNED, "STEP_DONE"): EffectState.DONE,
    (EffectState.PLANNED, "STEP_VOID"): EffectState.WAITING,
}
"""Everything that happens to an effect. What is not in the table changes nothing."""


class DoneSpan(NamedTuple):
    """The numbers `first` to `end` - 1 are done. The last of them is an effect of the step with
    this sequence.
    """

    first: int
    end: int
    sequence: int


class Source(NamedTuple):
    """A group on a partition of an ordered subject."""

    subject: str
    partition: int
    group: str


@dataclass(slots=True)
class TargetState:
    """The effects for one subject."""

    sequence: int
    """A step at or before the first one with an effect that is not done."""
    done_before: int
    next_number: int
    done: list[DoneSpan] = field(default_factory=list)
    """Spans after `done_before`, ascending, not adjacent."""
    sources: dict[Source, int] = field(default_factory=dict)
    """Before which number the last effect of each ordered source is; empty if the subject is not
    ordered.
    """

    @property
    def left(self) -> int:
        """The effects that are not done."""
        finished = self.done_before + sum([span.end - span.first for span in self.done])
        return self.next_number - finished

    def is_done(self, number: int) -> bool:
        if number < self.done_before:
            return True
        at = bisect_left(self.done, number + 1, key=_end_of)
        return at < len(self.done) and self.done[at].first <= number

    def finish(self, first: int, end: int, sequence: int) -> None:
        """The numbers `first` to `end` - 1, of the step with this sequence, are done."""
        first = max(first, self.done_before)
        if end <= first:
            return
        done = self.done
        low = high = bisect_left(done, first, key=_end_of)
        while high < len(done) and done[high].first <= end:
            other = done[high]
            first = min(first, other.first)
            if other.end > end:
                end, sequence = other.end, other.sequence
            high += 1
        done[low:high] = [DoneSpan(first, end, sequence)]
        if done[0].first <= self.done_before:
            _, self.done_before, self.sequence = done.pop(0)
            if self.sources:
                self.sources = {
                    each: last for each, last in self.sources.items() if last > self.done_before
                }

    def to_state(self) -> list[Any]:
        """For checkpoint and snapshot."""
        return [
            self.sequence,
            self.done_before,
            self.next_number,
            [tuple(span) for span in self.done],
            [[*source, last] for source, last in self.sources.items()],
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> TargetState:
        """The inverse of `to_state`."""
        sequence, done_before, next_number, done, sources = state
        return cls(
            sequence,
            done_before,
            next_number,
            [DoneSpan(*span) for span in done],
            {Source(*source): last for *source, last in sources},
        )


def _end_of(span: DoneSpan) -> int:
    return span.end


class StepState:
    """The targets with effects that are not done, and the open plans."""

    __slots__ = ("next_plan", "plans", "targets")

    def __init__(self) -> None:
        self.targets: dict[str, TargetState] = {}
        self.plans: dict[int, StepPlan] = {}
        """By number, ascending."""
        self.next_plan = 1

    # --- reading ----------------------------------------------------------------------------------

    def numbered(self, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        """The effects of the next step, with their numbers."""
        return tuple(
            [
                Effect(
                    each.subject,
                    each.is_ordered,
                    target.next_number if (target := self.targets.get(each.subject)) else 0,
                    each.count,
                    each.region,
                )
                for each in effects
            ]
        )

    def planned(self, subject: str) -> Iterator[tuple[int, int]]:
        """[first, end) spans of numbers in open plans."""
        for plan in self.plans.values():
            if plan.target == subject:
                for _, first, count in plan.items:
                    yield first, first + count

    def state_of(self, subject: str, number: int) -> EffectState:
        target = self.targets.get(subject)
        if target is None:
            return EffectState.NONE
        if target.is_done(number):
            return EffectState.DONE
        if number >= target.next_number:
            return EffectState.NONE
        is_planned = any(first <= number < end for first, end in self.planned(subject))
        return EffectState.PLANNED if is_planned else EffectState.WAITING

    @property
    def kept_from(self) -> int | None:
        """The first sequence of `%steps` that is still needed; None if nothing waits."""
        return min([target.sequence for target in self.targets.values()], default=None)

    def waits_for(self, source: Source) -> bool:
        """Whether effects of the source for ordered subjects are not done."""
        return any(source in target.sources for target in self.targets.values())

    # --- changing ---------------------------------------------------------------------------------

    def decide(self, sequence: int, record: StepRecord) -> None:
        """A step is in the log, as message `sequence` of the queue."""
        lanes = [
            Source(each.subject, each.partition, each.group)
            for each in record.settlements
            if isinstance(each, LaneDone)
        ]
        for effect in record.effects:
            target = self.targets.get(effect.subject)
            if target is None:
                target = TargetState(sequence, effect.first, effect.first)
                self.targets[effect.subject] = target
            target.next_number = effect.end
            if effect.is_ordered:
                target.sources.update(dict.fromkeys(lanes, effect.end))

    def plan(self, action: StepPlan) -> None:
        self.plans[action.number] = action
        self.next_plan = action.number + 1

    def finish(self, action: StepDone) -> None:
        for number in action.numbers:
            plan = self.plans.pop(number, None)
            target = self.targets.get(plan.target) if plan is not None else None
            if plan is None or target is None:
                continue
            for sequence, first, count in plan.items:
                target.finish(first, first + count, sequence)
            if not target.left:
                del self.targets[plan.target]

    def void(self, action: StepVoid) -> None:
        for number in action.numbers:
            self.plans.pop(number, None)

    # --- keeping ----------------------------------------------------------------------------------

    def to_state(self) -> list[Any]:
        """For checkpoint and snapshot."""
        return [
            self.next_plan,
            [
                [
                    *(plan.number, plan.target, plan.target_partition, plan.broker_group),
                    *(plan.producer_id, plan.batch_sequence, plan.items),
                ]
                for plan in self.plans.values()
            ],
            {subject: target.to_state() for subject, target in self.targets.items()},
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> StepState:
        """The inverse of `to_state`."""
        steps = cls()
        steps.next_plan, plans, targets = state
        for number, target, partition, group, producer_id, batch_sequence, items in plans:
            steps.plans[number] = StepPlan(
                *STEPS_QUEUE,
                number,
                target,
                partition,
                group,
                producer_id,
                batch_sequence,
                tuple([(sequence, first, count) for sequence, first, count in items]),
            )
        steps.targets = {
            subject: TargetState.from_state(target) for subject, target in targets.items()
        }
        return steps
