"""The schedule against a dictionary: any messages, flushes at any time, crashes, and recovery from
any checkpoint.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from schedule_support import (
    SECOND,
    START,
    Entry,
    Model,
    checkpoint,
    contents,
    delayed,
    messages_of,
    opened,
    plan,
)
from support.forms import examples

from qmq.delay.batches import Places, SchedulePlace
from qmq.delay.schedule import Schedule
from qmq.log.actions import Cancel, Close, PlanDone, PlanVoid, Postpone, Recur, ScheduleAction
from qmq.model import CRON, DelayedId, MessageId
from qmq.wire.batch_columns import BatchFlag

DUES = st.integers(START, START + 6 * SECOND)
BUCKET = START // SECOND


class ScheduleMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="qmq-"))
        self.entries: list[Entry] = []
        self.model = Model()
        self.time_ms = START - 10 * SECOND
        self.number = 0
        self.recurred: set[SchedulePlace] = set()
        self.checkpoints: list[bytes] = []
        """The newest two, as on disk."""
        self.held: Any = None
        """A checkpoint that was captured and not run."""
        self.told: list[tuple[int, SchedulePlace]] = []
        self.schedule = self._open(None)

    def teardown(self) -> None:
        other = opened(self.folder / "other", buffer_bytes_max=0)
        other.subscribe(lambda _: None)  # everything is near: it is filed when it is stored
        for entry in self.entries:
            entry.feed(other)
        assert contents(other) == contents(self.schedule)
        other.close()
        self.schedule.close()
        shutil.rmtree(self.folder)

    def _open(self, state: Any) -> Schedule:
        found = opened(self.folder / "schedule", state, buffer_bytes_max=600)
        found.subscribe(self._pending)
        return found

    def _pending(self, found: Places) -> None:
        named = zip(found.buckets.tolist(), found.ordinals.tolist(), strict=True)
        self.told += list(
            zip(found.due_times_ms.tolist(), [SchedulePlace(*each) for each in named], strict=True)
        )

    def _near(self, told: list[tuple[int, SchedulePlace]]) -> list[tuple[int, SchedulePlace]]:
        """Those that must have been told."""
        return told

    def _entry(self, **content: Any) -> None:
        entry = Entry(self.entries[-1].index + 2 if self.entries else 1, self.time_ms, **content)
        self.entries.append(entry)
        entry.feed(self.schedule)

    def _act(self, *actions: ScheduleAction) -> None:
        for action in actions:
            self.model.act(self.time_ms, action)
        self._entry(actions=actions)

    def _some(self, data: st.DataObject) -> SchedulePlace | None:
        return (
            data.draw(st.sampled_from(sorted(self.model.messages))) if self.model.messages else None
        )

    # --- entries ----------------------------------------------------------------------------------

    @rule(
        due_times_ms=st.lists(DUES, min_size=1, max_size=6), wait_ms=st.sampled_from([0, 0, 1, 700])
    )
    def take(self, due_times_ms: list[int], wait_ms: int) -> None:
        self.time_ms += wait_ms
        self.number += 1
        region, crc = delayed(due_times_ms, number=self.number)
        self.model.take(self.time_ms, messages_of(due_times_ms, self.number))
        self._entry(region=region, crc=crc)

    @rule(due=DUES)
    def take_recurring(self, due: int) -> None:
        self.number += 1
        headers = [{CRON: b"* * * * *"}]
        region, crc = delayed([due], number=self.number, flags=BatchFlag.RECURRING, headers=headers)
        self.model.take(
            self.time_ms,
            messages_of([due], self.number, flags=BatchFlag.RECURRING, headers=headers),
        )
        self._entry(region=region, crc=crc)

    @rule()
    def something_else_is_in_the_log(self) -> None:
        self.entries.append(Entry(self.entries[-1].index + 1 if self.entries else 1, self.time_ms))

    @rule(data=st.data(), is_recurring=st.booleans())
    def plan(self, data: st.DataObject, is_recurring: bool) -> None:
        pending = self.model.pending()
        if pending:
            chosen = data.draw(
                st.lists(st.sampled_from(pending), min_size=1, max_size=5, unique=True)
            )
            found = plan(
                self.schedule.next_plan, *[(each.bucket, [each.ordinal]) for each in chosen]
            )
            # once for each run, as the engine does: a run that is planned again has its next one
            # already
            recurring = [
                each
                for each in chosen
                if self.model.messages[each].flags and each not in self.recurred
            ]
            self.recurred.update(recurring)
            runs = [Recur(*each, self.model.messages[each].due_ms + SECOND) for each in recurring]
            self._act(found, *runs) if is_recurring else self._act(*runs, found)

    @rule(data=st.data(), is_void=st.booleans())
    def answer(self, data: st.DataObject, is_void: bool) -> None:
        if self.model.plans:
            numbers = data.draw(
                st.lists(
                    st.sampled_from(sorted(self.model.plans)), min_size=1, max_size=3, unique=True
                )
            )
            self._act((PlanVoid if is_void else PlanDone)(tuple(numbers)))
            self._act(PlanDone(tuple(numbers)))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        place = self._some(data)
        if place is not None:
            self._act(Cancel(*place))

    @rule(data=st.data(), due=DUES)
    def postpone(self, data: st.DataObject, due: int) -> None:
        place = self._some(data)
        if place is not None:
            self._act(Postpone(*place, due), Cancel(*place))

    @rule(before=st.integers(BUCKET, BUCKET + 8))
    def close(self, before: int) -> None:
        self._act(Close(before))

    @rule()
    def settle_all_and_close(self) -> None:
        every = [Cancel(*place) for place in self.model.pending()]
        self._act(PlanDone(tuple(self.model.plans)), *every, Close(BUCKET + 3))

    # --- files ------------------------------------------------------------------------------------

    def _saved(self, state: Any) -> None:
        self.checkpoints = [*self.checkpoints[-1:], msgspec.msgpack.encode(state)]

    @rule()
    def checkpoint(self) -> None:
        self.held = None
        self._saved(checkpoint(self.schedule))

    @rule()
    def begin_checkpoint(self) -> None:
        self.held = self.schedule.begin_checkpoint()

    @rule(is_ended=st.booleans())
    def run_checkpoint(self, is_ended: bool) -> None:
        if self.held is not None:
            self.held.run()
            self._saved(self.held.state)
            if is_ended:
                self.schedule.end_checkpoint(self.held)
            else:
                self._crash(self.checkpoints[-1])
            self.held = None

    @rule(data=st.data(), garbage=st.booleans())
    def crash(self, data: st.DataObject, garbage: bool) -> None:
        if garbage:
            for path in (self.folder / "schedule").glob("2*"):
                with path.open("ab") as file:
                    file.write(b"torn")
        self._crash(data.draw(st.sampled_from(self.checkpoints)) if self.checkpoints else None)

    def _crash(self, state: bytes | None) -> None:
        self.schedule.close()
        self.held = None
        told, self.told = self.told, []
        self.schedule = self._open(None if state is None else msgspec.msgpack.decode(state))
        for entry in self.entries:
            entry.feed(self.schedule)
        assert self._near(told)[len(self._near(told)) - len(self._near(self.told)) :] == (
            self._near(self.told)
        )
        self.told = told
        if state is not None:
            self.checkpoints = self.checkpoints[: self.checkpoints.index(state) + 1]

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def it_is_what_the_dictionary_says(self) -> None:
        self.model.compare(self.schedule)
        assert self.told == self.model.told

    @rule(from_ms=DUES, length_ms=st.sampled_from([0, 500, 1500]))
    def scan(self, from_ms: int, length_ms: int) -> None:
        to_ms = from_ms + length_ms if length_ms else 0
        assert list(self.schedule.scan("", from_ms, to_ms)) == self.model.due(from_ms, to_ms)
        assert list(self.schedule.scan("others", from_ms, to_ms)) == []

    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        place = self._some(data)
        if place is not None:
            message = self.model.messages[place]
            digits = MessageId.parse(message.message_id.hex())
            expected = self.model.aliases.get(message.message_id) or self.model.follow(place)
            if expected.bucket >= self.model.closed_before:
                found = self.schedule.find(
                    DelayedId(digits, message.due_ms, message.append_ms, "d")
                )
                assert found == expected


class SpreadScheduleMachine(ScheduleMachine):
    """Most buckets are far, and what falls into them stays in memory and in runs until somebody
    looks.
    """

    def _open(self, state: Any) -> Schedule:
        found = opened(
            self.folder / "schedule",
            state,
            buffer_bytes_max=600,
            run_messages_min=3,
            runs_max=3,
        )
        found.subscribe(self._pending, lambda: START + SECOND)
        return found

    def _near(self, told: list[tuple[int, SchedulePlace]]) -> list[tuple[int, SchedulePlace]]:
        return [each for each in told if each[1].bucket <= BUCKET + 1]

    @rule(
        due_times_ms=st.lists(
            st.integers(START, START + 40 * SECOND), min_size=2, max_size=9, unique=True
        ),
        sizes=st.sampled_from(["equal", "different"]),
        has_keys=st.booleans(),
    )
    def take_spread(self, due_times_ms: list[int], sizes: str, has_keys: bool) -> None:
        self.number += 1
        keys = [b"k%d" % at for at in range(len(due_times_ms))] if has_keys else None
        bodies = [b"b" * (at if sizes == "different" else 5) for at in range(len(due_times_ms))]
        region, crc = delayed(due_times_ms, number=self.number, bodies=bodies, keys=keys)
        self.model.take(
            self.time_ms, messages_of(due_times_ms, self.number, bodies=bodies, keys=keys)
        )
        self._entry(region=region, crc=crc)

    @rule(until=st.integers(0, 40))
    def file_near(self, until: int) -> None:
        self.schedule.file_near(START + until * SECOND)

    @invariant()
    def it_is_what_the_dictionary_says(self) -> None:
        assert [(each.bucket, each.messages) for each in self.schedule.buckets()] == sorted(
            Counter(each.bucket for each in self.model.messages).items()
        )
        assert self.schedule.closed_before == self.model.closed_before
        assert self._near(self.told) == self._near(self.model.told)

    @rule()
    def look_at_everything(self) -> None:
        self.model.compare(self.schedule)


ScheduleMachine.TestCase.settings = SpreadScheduleMachine.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestScheduleMachine = ScheduleMachine.TestCase
TestSpreadScheduleMachine = SpreadScheduleMachine.TestCase
