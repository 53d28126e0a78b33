"""The effects of steps on their way to the dispatcher that also sends due messages (docs/adr/0025).

    log ──EffectLoader──▶ DueDispatcher ──StepPlanLog──▶ log
                               │
                               └──▶ targets

`EffectLoader` decides which effects come next; `StepPlanLog` writes the dispatcher's plans and what
became of them. Both are of one term of a master.

Rules:
* Only committed effects are handed over, and those of a target in the order of the log.
* The open plans of earlier masters are resumed first, unchanged.
* The dispatcher has at most `WINDOW` messages of a target, and those of one step more. The others
  stay in the log. A target without room is *behind*: its next effect is looked for from where it
  stopped, by the tags of `%steps`, when there is room again. Other targets go on.

Worked example: the window is 2; steps 0, 1 and 2 each send one message to a and one to b, and a is
away. a:0 and a:1 are handed over, and a is behind from step 2 on; b gets all three.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Final, TypeVar

from qmq.broker.parts import ServingBroker
from qmq.delay.batches import DueMessage, SchedulePlace, ids_of
from qmq.delay.dispatcher import DueDispatcher, PlanLog
from qmq.delay.plan_log import Draft
from qmq.errors import CorruptBatch, InvalidArgument, LogDamaged, NotMaster
from qmq.log.actions import PlanAction, StepDone, StepPlan, StepVoid
from qmq.log.consume_log import IndexEntry
from qmq.log.queue import Queue
from qmq.log.reading import ColdRead
from qmq.log.step_record import Effect, StepRecord, record_of
from qmq.log.step_state import STEPS_QUEUE, StepState
from qmq.log.store import Store
from qmq.model import STEPS
from qmq.wire.batch import BatchView, Envelope
from qmq.wire.batch_columns import tag_bloom, tag_hash

log = logging.getLogger("qmq.broker")

_T = TypeVar("_T")

WINDOW: Final = 16_000
"""Sixteen full batches: enough for a target's window of batches, twice."""
ENTRIES: Final = 500
"""Entries that are looked at before others get a turn."""
AGAIN_S: Final = 10.0
"""Pause after damage, which is repaired from another replica."""
_UNPLACED: Final = Envelope(0, 0, 0, -1, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class LoadedEffects:
    """Messages for the dispatcher, and their numbers among the effects of their targets."""

    messages: list[DueMessage]
    numbers: list[int]


def effects_of(
    record: StepRecord, sequence: int, append_ms: int, subject: str
) -> tuple[Effect, list[DueMessage]] | None:
    """The effect of a step for one target, and its messages; None if it has none. Raises
    CorruptBatch.

    The place of a message is (sequence of the step, its number among all messages of the step).
    """
    ordinal = 0
    for effect in record.effects:
        if effect.subject == subject:
            return effect, list(_messages(effect, sequence, ordinal, append_ms))
        ordinal += effect.count
    return None


def _messages(effect: Effect, sequence: int, ordinal: int, append_ms: int) -> Iterator[DueMessage]:
    view = BatchView(_UNPLACED, effect.region)
    header, count = view.header, view.count
    columns = zip(
        view.bodies(),
        view.keys() or [b""] * count,
        view.tags() or [()] * count,
        view.headers() or [{}] * count,
        view.create_times_ms(),
        view.message_ids() or ids_of(header.producer_id, header.batch_sequence, count),
        strict=True,
    )
    for at, (body, key, tags, headers, created_ms, message_id) in enumerate(columns, ordinal):
        yield DueMessage(
            SchedulePlace(sequence, at),
            append_ms,
            effect.subject,
            body,
            key,
            tags,
            headers,
            created_ms,
            message_id,
            header.flags,
            append_ms,
        )


class EffectLoader:
    """`store` is served by this master; all plans in it are committed."""

    def __init__(self, store: Store, *, window: int = WINDOW) -> None:
        self._store = store
        self._queue: Queue = store.open_queue(STEPS, 0)
        self._window = window
        self._head = self._queue.visible_sequence
        """Steps from here on are new to every target that is not behind."""
        self._behind = {subject: target.sequence for subject, target in self.steps.targets.items()}
        """From which step on effects of these targets were not looked at."""
        self._held: dict[str, int] = {}
        """Messages of each target that the dispatcher has."""
        self.unreadable: list[tuple[str, int]] = []
        """(target, step) of effects that cannot be read. They wait."""
        self._resumed: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """[first, end) spans of numbers in plans of earlier masters, by target and step."""
        for plan in self.steps.plans.values():
            for sequence, first, count in plan.items:
                spans = self._resumed.setdefault((plan.target, sequence), [])
                spans.append((first, first + count))
                self._hold(plan.target, count)

    @property
    def steps(self) -> StepState:
        assert self._queue.steps is not None
        return self._queue.steps

    def _hold(self, subject: str, count: int) -> None:
        held = self._held.get(subject, 0) + count
        if held:
            self._held[subject] = held
        else:
            self._held.pop(subject, None)

    def released(self, subject: str, count: int) -> None:
        """The dispatcher is done with so many messages of a target."""
        self._hold(subject, -count)

    @property
    def has_uncommitted(self) -> bool:
        """Whether there are steps that may not be handed over yet."""
        return self._queue.next_sequence > self._queue.visible_sequence

    @property
    def behind(self) -> int:
        """The targets without room."""
        return len(self._behind)

    # --- plans of earlier masters -----------------------------------------------------------------

    def planned(self, plan: StepPlan) -> LoadedEffects:
        """The messages of an open plan, in its order. Raises LogDamaged, ColdRead."""
        found = LoadedEffects([], [])
        for sequence, first, count in plan.items:
            entry = self._entry_from(sequence)
            record = self._record(entry) if entry is not None else None
            loaded = (
                effects_of(record, sequence, entry.append_time_ms, plan.target)
                if entry is not None and record is not None
                else None
            )
            if loaded is None or not loaded[0].first <= first <= loaded[0].end - count:
                raise LogDamaged(f"plan {plan.number} has what step {sequence} does not send")
            effect, messages = loaded
            at = first - effect.first
            found.messages.extend(messages[at : at + count])
            found.numbers.extend(range(first, first + count))
        return found

    # --- what comes next --------------------------------------------------------------------------

    def next(self) -> tuple[LoadedEffects, bool]:
        """Effects to hand over, and whether to ask again at once. Raises LogDamaged, ColdRead, when
        there is nothing to hand over before the damage.
        """
        found, left = LoadedEffects([], []), ENTRIES
        try:
            for subject in list(self._behind):
                left = self._catch_up(subject, found, left)
            self._go_on(found, left)
        except (LogDamaged, ColdRead):
            if not found.messages:
                raise
        is_more = self._head < self._queue.visible_sequence or any(
            self._has_room(subject) for subject in self._behind
        )
        return found, is_more

    def _go_on(self, found: LoadedEffects, left: int) -> None:
        """Look at the steps that are new to every target that is not behind."""
        while left > 0 and self._head < self._queue.visible_sequence:
            entry = self._entry_from(self._head)
            if entry is None:
                self._head = self._queue.visible_sequence
                return
            record = self._record(entry)
            for effect in record.effects if record is not None else ():
                if effect.subject not in self._behind:
                    if self._has_room(effect.subject):
                        self._add(found, record, entry, effect.subject)
                    else:
                        self._behind[effect.subject] = entry.base_sequence
            self._head = entry.next_sequence
            left -= 1

    def _has_room(self, subject: str) -> bool:
        return self._held.get(subject, 0) < self._window

    def _catch_up(self, subject: str, found: LoadedEffects, left: int) -> int:
        """Look for effects of a target that is behind. Returns how many entries may still be
        looked at.
        """
        target, wanted = self.steps.targets.get(subject), tag_bloom([tag_hash(subject)])
        if target is None:  # all its effects are done
            del self._behind[subject]
            return left
        at = max(self._behind[subject], target.sequence)
        while at < self._head and left > 0 and self._has_room(subject):
            entry = self._entry_from(at)
            if entry is None:
                at = self._head
                break
            if entry.tag_bloom & wanted == wanted:
                self._add(found, self._record(entry), entry, subject)
            at = self._behind[subject] = entry.next_sequence
            left -= 1
        if at >= self._head:
            del self._behind[subject]
        return left

    def _add(
        self, found: LoadedEffects, record: StepRecord | None, entry: IndexEntry, subject: str
    ) -> None:
        sequence = entry.base_sequence
        target = self.steps.targets.get(subject)
        try:
            loaded = (
                effects_of(record, sequence, entry.append_time_ms, subject)
                if record is not None and target is not None
                else None
            )
        except (CorruptBatch, InvalidArgument) as cause:
            log.error(
                "what step %d sends to %r cannot be read, and waits: %s", sequence, subject, cause
            )
            self.unreadable.append((subject, sequence))
            return
        if loaded is None or target is None:
            return
        effect, messages = loaded
        resumed = self._resumed.pop((subject, sequence), ())
        for number, message in enumerate(messages, effect.first):
            is_planned = any(first <= number < end for first, end in resumed)
            if not is_planned and not target.is_done(number):
                found.messages.append(message)
                found.numbers.append(number)
                self._hold(subject, 1)

    def _entry_from(self, sequence: int) -> IndexEntry | None:
        """The entry of the first step from this sequence on."""
        index = self._queue.index
        at = index.find_sequence(sequence)
        while at < index.count:
            entry = index.entry(at)
            if entry.next_sequence > sequence:
                return entry
            at += 1
        return None

    def _record(self, entry: IndexEntry) -> StepRecord | None:
        """None if it cannot be read: then the step has changed nothing."""
        _, region = self._store.read(self._queue, entry)
        try:
            return record_of(region)
        except CorruptBatch:
            return None


class StepPlanLog:
    """The plan log of one term of a master, for the effects of steps."""

    def __init__(self, writer: ServingBroker, released: Callable[[str, int], None]) -> None:
        """`released` is told how many messages of a target are stored."""
        self._writer = writer
        self._released = released
        self._numbers: dict[SchedulePlace, int] = {}
        self._places: dict[int, list[SchedulePlace]] = {}
        """The messages of each plan that is not done."""

    def take(self, loaded: LoadedEffects) -> None:
        """These messages go to the dispatcher."""
        for message, number in zip(loaded.messages, loaded.numbers, strict=True):
            self._numbers[message.place] = number

    def resume(self, plan: StepPlan, loaded: LoadedEffects) -> PlanAction:
        """An open plan of an earlier master, as the dispatcher has it."""
        self.take(loaded)
        self._places[plan.number] = [message.place for message in loaded.messages]
        return _as_plan(plan)

    async def plan(self, draft: Draft) -> PlanAction:
        steps = self._writer.store.open_queue(STEPS, 0).steps
        assert steps is not None
        plan = StepPlan(
            *STEPS_QUEUE,
            steps.next_plan,
            draft.subject,
            draft.partition,
            draft.broker_group,
            draft.producer_id,
            draft.batch_sequence,
            self._items(draft.messages),
        )
        self._places[plan.number] = [message.place for message in draft.messages]
        self._writer.act(plan)
        await self._writer.committed()
        return _as_plan(plan)

    def done(self, plan: PlanAction, append_time_ms: int) -> None:
        self._writer.act(StepDone(*STEPS_QUEUE, (plan.number,)))
        places = self._places.pop(plan.number)
        for place in places:
            del self._numbers[place]
        self._released(plan.subject, len(places))

    def void(self, plan: PlanAction) -> None:
        self._writer.act(StepVoid(*STEPS_QUEUE, (plan.number,)))
        del self._places[plan.number]

    def _items(self, messages: Sequence[DueMessage]) -> tuple[tuple[int, int, int], ...]:
        """(sequence, first number, count) of runs of consecutive numbers of one step."""
        numbered = [(message.place.bucket, self._numbers[message.place]) for message in messages]
        items = list[tuple[int, int, int]]()
        for _, run in groupby(
            enumerate(numbered), key=lambda each: (each[1][0], each[1][1] - each[0])
        ):
            found = [each for _, each in run]
            items.append((*found[0], len(found)))
        return tuple(items)


def _as_plan(plan: StepPlan) -> PlanAction:
    """The plan as the dispatcher knows plans. It does not look at the items."""
    return PlanAction(
        plan.number,
        plan.target,
        plan.target_partition,
        plan.broker_group,
        plan.producer_id,
        plan.batch_sequence,
        (),
    )


class EffectForwarder:
    """Forwards the effects of steps while this replica is master. Call `start` once and `stop`
    once.
    """

    def __init__(
        self,
        writer: ServingBroker,
        make_dispatcher: Callable[[PlanLog], DueDispatcher],
        fatal: Callable[[BaseException], None],
        *,
        window: int = WINDOW,
    ) -> None:
        self._writer = writer
        self._loader = EffectLoader(writer.store, window=window)
        self._fatal = fatal
        self._awake = asyncio.Event()
        self._plan_log = StepPlanLog(writer, self._stored)
        self.dispatcher = make_dispatcher(self._plan_log)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The master serves: every plan in the store is committed."""
        self._awake.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """Steps were written; their effects leave when they are committed."""
        self._awake.set()

    def _stored(self, subject: str, count: int) -> None:
        self._loader.released(subject, count)
        if self._loader.behind:
            self._awake.set()

    async def _run(self) -> None:
        try:
            for plan in list(self._loader.steps.plans.values()):
                loaded = await self._read(partial(self._loader.planned, plan))
                self.dispatcher.resume(self._plan_log.resume(plan, loaded), loaded.messages)
            while True:
                await self._awake.wait()
                self._awake.clear()
                if self._loader.has_uncommitted:
                    await self._writer.committed()
                loaded, is_more = await self._read(self._loader.next)
                if loaded.messages:
                    self._plan_log.take(loaded)
                    self.dispatcher.put(loaded.messages)
                if is_more:
                    self._awake.set()
                await asyncio.sleep(0)  # let other tasks run
        except NotMaster:
            pass  # losing the mastership stops this forwarder
        except Exception as cause:
            self._fatal(cause)

    async def _read(self, read: Callable[[], _T]) -> _T:
        """Read until it succeeds: damage is repaired from another replica."""
        while True:
            try:
                return read()
            except ColdRead as cause:
                await asyncio.sleep(cause.retry_after_ms / 1000)
            except LogDamaged as damage:
                log.error("effects of steps cannot be read, and wait: %s", damage)
                self._writer.report_damage(damage)
                await asyncio.sleep(AGAIN_S)

    def halt(self) -> None:
        """The mastership is lost, or the process ends: plan nothing more."""
        self.dispatcher.halt()
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Wait for what `halt` stopped."""
        self.halt()
        await self.dispatcher.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
