"""The loader brings every message into the wheel once, despite any change while a slice is read."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from schedule_support import FakeSchedule, Later, Step

from qmq.delay.batches import Places, SchedulePlace
from qmq.delay.wheel import Loader, Wheel

HOUR = 100
"""A bucket's length in these tests, ms; a tick is 10."""
NOW = 1000
YEARS = 1_000_000


def loader(schedule: FakeSchedule, *, now: int = NOW, most: int = 100, piece: int = 50) -> Loader:
    found = Loader(
        schedule,
        Wheel(10),
        Later,
        wheel_messages_max=most,
        slice_messages_max=piece,
        load_ahead_ms=60,
    )
    schedule.on_pending = found.stored
    found.begin(now)
    return found


def go(found: Loader, now: int = NOW) -> bool:
    step = Step()
    step.begin(found.ahead(now))
    step.finish()
    return bool(step.result)


def all_late(found: Loader) -> None:
    while not found.is_late_done:
        step = Step()
        step.begin(found.more_late())
        step.finish()


def due_times_ms(wheel: Wheel, now: int = 1 << 40) -> list[int]:
    found: list[int] = wheel.advance(now).due_times_ms.tolist()
    return found


def test_an_hour_is_loaded_when_the_horizon_nears_it_and_not_before() -> None:
    schedule = FakeSchedule(HOUR)
    schedule.store([1100, 1180])
    found = loader(schedule)
    assert not go(found)
    assert schedule.readings == []
    assert found.horizon_ms == 1100  # up to where nothing is
    assert go(found, NOW + 50)
    assert (found.horizon_ms, due_times_ms(found.wheel)) == (1200, [1100, 1180])


def test_two_years_of_far_buckets_are_not_read() -> None:
    schedule = FakeSchedule(HOUR)
    schedule.store([NOW + HOUR * each for each in range(5, 2000)])
    found = loader(schedule)
    all_late(found)
    for now in range(NOW, NOW + 400, 10):
        go(found, now)
    assert schedule.readings == []
    assert len(found.wheel) == 0


def test_an_hour_larger_than_the_wheel_comes_in_slices_as_there_is_room() -> None:
    schedule = FakeSchedule(HOUR)
    stored = [NOW + each * 7 % HOUR for each in range(1, HOUR)]
    schedule.store(stored)
    found = loader(schedule, most=30, piece=20)
    left: list[int] = []
    for now in range(NOW, NOW + HOUR + 20, 10):
        while go(found, now):
            assert len(found.wheel) <= 30
        left += due_times_ms(found.wheel, now)
        assert left == sorted(due for due in stored if due <= now)
    assert len(schedule.readings) == 5


def test_an_unreadable_index_is_reported_and_the_next_try_resumes_there() -> None:
    schedule = FakeSchedule(HOUR)
    schedule.store([1010])
    found = loader(schedule)
    schedule.kept[10].is_closed = True
    step = Step()
    step.begin(found.ahead(NOW))
    schedule.store([1020])
    with pytest.raises(FileNotFoundError):
        step.finish()
    schedule.kept[10].is_closed = False
    assert go(found)
    assert due_times_ms(found.wheel) == [1010, 1020]


def test_more_than_the_wheel_may_hold_is_given_back_and_loaded_when_there_is_room() -> None:
    schedule = FakeSchedule(HOUR)
    schedule.store([1001])
    found = loader(schedule, most=40, piece=20)
    assert go(found)
    stored = [1001 + each % 90 for each in range(180)]
    schedule.store(stored)
    assert len(found.wheel) == 181
    assert not go(found)
    assert len(found.wheel) <= 40
    left: list[int] = []
    for now in range(NOW, NOW + 110, 10):
        while go(found, now):
            pass
        left += due_times_ms(found.wheel, now)
        assert len(found.wheel) <= 40
    assert left == sorted([1001, *stored])


def test_the_horizon_is_never_taken_back_to_where_late_messages_are() -> None:
    schedule = FakeSchedule(HOUR)
    schedule.store([990, 991])
    found = loader(schedule, most=4, piece=2)
    flood = [985 + each for each in range(12)]
    schedule.store(flood)
    for now in (NOW, NOW + 10, NOW + 20):
        go(found, now)
    assert found.horizon_ms >= NOW
    all_late(found)
    assert (due_times_ms(found.late), due_times_ms(found.wheel)) == ([990, 991], flood)
    while go(found, NOW + 30):
        pass
    assert due_times_ms(found.wheel) == []


def test_messages_settled_before_loading_are_not_loaded() -> None:
    schedule = FakeSchedule(HOUR)
    stored = schedule.store([980, 990, 1010, 1020])
    schedule.settle(stored[0])
    schedule.settle(stored[2])
    found = loader(schedule)
    all_late(found)
    go(found)
    assert (due_times_ms(found.late), due_times_ms(found.wheel)) == ([990], [1020])


def test_a_far_horizon_moves_on_when_the_wheel_is_empty_however_small_it_is() -> None:
    schedule = FakeSchedule(HOUR)
    schedule.store([1010] * 9)
    found = loader(schedule, most=1, piece=5)
    assert go(found)
    assert due_times_ms(found.wheel) == [1010] * 9


PROGRAM = """
import asyncio
from pathlib import Path
import numpy as np
from qmq.delay.buckets import INDEX_ROW, BucketInfo
from qmq.delay.wheel import Loader, Wheel

HOUR, BUCKET, COUNT = 3_600_000, 490_000, 10_000_000

class Reader:
    count = COUNT
    def read(self, first, end):
        rows = np.zeros(end - first, INDEX_ROW)
        rows["due"] = BUCKET * HOUR + np.random.default_rng(first).integers(0, HOUR, end - first)
        return rows

class Source:
    bucket_ms, closed_before = HOUR, 0
    def buckets(self): return [BucketInfo(BUCKET, COUNT, COUNT, 0)]
    def count(self, bucket): return COUNT
    def reader(self, bucket): return Reader()
    def settled(self, bucket): return np.zeros(COUNT, np.bool_)

async def main():
    wheel = Wheel()
    loader = Loader(Source(), wheel, asyncio.to_thread)
    loader.begin(BUCKET * HOUR)
    while await loader.ahead((BUCKET + 1) * HOUR - 1):
        pass
    peak_kib = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]  # ru_maxrss would begin with the parent's
    print(len(wheel), wheel.nbytes, int(peak_kib) * 1024)

asyncio.run(main())
"""  # noqa: E501


@pytest.mark.long
def test_ten_million_messages_of_one_hour_take_less_than_500_mib() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True
    )
    count, held, peak = map(int, ran.stdout.split())
    assert count == 10_000_000
    assert held <= 9 * count
    assert peak < 500 << 20


class Loading(RuleBasedStateMachine):
    """A loader whose threads run, and end, at any moment, among sends, settlements, ticks and
    closes; against plain sets.
    """

    @initialize(
        before=st.lists(st.integers(NOW - 350, NOW + 350), max_size=30),
        closed=st.integers(0, 12),
        piece=st.integers(1, 8),
        most=st.integers(1, 20),
        settled=st.sets(st.integers(0, 29)),
    )
    def begin(
        self, before: list[int], closed: int, piece: int, most: int, settled: set[int]
    ) -> None:
        self.now = NOW
        self.schedule = FakeSchedule(HOUR)
        self.schedule.closed_before = closed
        self.due_times_ms: dict[SchedulePlace, int] = {}
        self.settled: set[SchedulePlace] = set()
        self.left: set[SchedulePlace] = set()
        self.late_left: list[int] = []
        self.ahead, self.late = Step(), Step()
        if before:
            self._store(before)
        for place in [place for at, place in enumerate(self.due_times_ms) if at in settled]:
            self._settle(place)
        self.was_before = set(self.due_times_ms)
        self.slice = min(piece, most)
        self.loader = loader(self.schedule, most=most, piece=piece)

    def _store(self, due_times_ms: list[int]) -> None:
        self.due_times_ms.update(zip(self.schedule.store(due_times_ms), due_times_ms, strict=True))

    def _settle(self, place: SchedulePlace) -> None:
        self.schedule.settle(place)
        self.settled.add(place)

    @rule(
        ahead=st.lists(
            st.one_of(st.integers(-200, 300), st.sampled_from([0, 1, 50])), min_size=1, max_size=8
        )
    )
    def store(self, ahead: list[int]) -> None:
        self._store([self.now + each for each in ahead])

    @rule(data=st.data(), is_left=st.booleans())
    def settle(self, data: st.DataObject, is_left: bool) -> None:
        known = sorted((self.left if is_left else set(self.due_times_ms)) - self.settled)
        for place in data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []:
            self._settle(place)

    @rule(buckets=st.integers(-3, 2))
    def close(self, buckets: int) -> None:
        self.schedule.close(self.now // HOUR + buckets)

    @rule()
    def begin_ahead(self) -> None:
        if not self.ahead.is_under_way:
            self.ahead.begin(self.loader.ahead(self.now))

    @rule()
    def begin_late(self) -> None:
        if not self.late.is_under_way:
            self.late.begin(self.loader.more_late())

    @rule()
    def read(self) -> None:
        self.ahead.read()
        self.late.read()

    @rule()
    def finish_ahead(self) -> None:
        self.ahead.finish()

    @rule()
    def finish_late(self) -> None:
        self.late.finish()

    @rule(step=st.integers(-20, 80), most=st.sampled_from([1, 5, 10_000]))
    def tick(self, step: int, most: int) -> None:
        self.now += step
        self._leave(self.loader.wheel.advance(self.now, most))
        boundary = self.now // 10 * 10
        if most == 10_000:
            due = {
                place
                for place, due_ms in self.due_times_ms.items()
                if due_ms <= boundary and due_ms < self.loader.horizon_ms
            }
            is_late = {place for place in self.was_before if self.due_times_ms[place] < NOW}
            assert due - is_late <= self.left | self.settled

    @rule(most=st.sampled_from([1, 5, 10_000]))
    def tick_late(self, most: int) -> None:
        found = self.loader.late.advance(self.now, most)
        self._leave(found)
        self.late_left += found.due_times_ms.tolist()
        assert all(a <= b for a, b in pairwise(self.late_left)), (
            "an older late message came behind a newer one"
        )
        for bucket, ordinal in zip(found.buckets.tolist(), found.ordinals.tolist(), strict=True):
            assert SchedulePlace(bucket, ordinal) in self.was_before

    def _leave(self, found: Places) -> None:
        rows = list(
            zip(
                found.due_times_ms.tolist(),
                found.buckets.tolist(),
                found.ordinals.tolist(),
                strict=True,
            )
        )
        assert rows == sorted(rows)
        for due, bucket, ordinal in rows:
            place = SchedulePlace(bucket, ordinal)
            assert self.due_times_ms[place] == due <= self.now
            assert place not in self.left, "twice"
            self.left.add(place)

    @invariant()
    def slices_keep_to_their_limit(self) -> None:
        if hasattr(self, "loader"):
            self.loader.wheel.check()
            self.loader.late.check()
            same = max(Counter(self.due_times_ms.values()).values(), default=0)
            assert len(self.loader.late) <= max(self.slice, same) + self.slice

    def teardown(self) -> None:
        if not hasattr(self, "loader"):
            return
        self.ahead.finish()
        self.late.finish()
        while not self.loader.is_late_done:
            self.begin_late()
            self.late.finish()
            self.tick_late(10_000)
        while self.loader.horizon_ms <= max(self.due_times_ms.values(), default=0):
            before = self.loader.horizon_ms, len(self.left)
            self.now = max(self.now, self.loader.horizon_ms)
            self.begin_ahead()
            self.ahead.finish()
            self.tick(20, 10_000)
            assert (self.loader.horizon_ms, len(self.left)) != before, "no progress"
        self.tick(YEARS, 10_000)
        self.tick_late(10_000)
        assert set(self.due_times_ms) == self.left | self.settled
        assert len(self.loader.wheel) == len(self.loader.late) == 0


TestLoading = Loading.TestCase
