"""The wheel against a sorted list."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from qmq.delay import wheel as wheel_module
from qmq.delay.batches import Places
from qmq.delay.wheel import Wheel, runs_of

ERA = 1 << 32
Row = tuple[int, int, int]


def places(rows: list[Row]) -> Places:
    due_times_ms, buckets, ordinals = zip(*rows, strict=True) if rows else ((), (), ())
    return Places(
        np.array(due_times_ms, np.int64), np.array(buckets, np.int32), np.array(ordinals, np.uint32)
    )


def rows(found: Places) -> list[Row]:
    assert (found.due_times_ms.dtype, found.buckets.dtype, found.ordinals.dtype) == (
        np.int64,
        np.int32,
        np.uint32,
    )
    return list(
        zip(
            found.due_times_ms.tolist(),
            found.buckets.tolist(),
            found.ordinals.tolist(),
            strict=True,
        )
    )


def many(count: int, seed: int = 1) -> Places:
    due_times_ms = np.random.default_rng(seed).integers(ERA, ERA + 3_600_000, count)
    return Places(due_times_ms, np.full(count, 1193, np.int32), np.arange(count, dtype=np.uint32))


def test_the_worked_example_of_the_module_holds() -> None:
    wheel = Wheel(500)
    wheel.add_runs(runs_of(places([(100, 0, 0), (400, 0, 1), (700, 0, 2), (1300, 0, 3)])))
    wheel.add_runs(runs_of(places([(450, 0, 4), (900, 0, 5)])))
    assert [rows(wheel.advance(now)) for now in (499, 500, 999, 1200)] == [
        [],
        [(100, 0, 0), (400, 0, 1), (450, 0, 4)],
        [],
        [(700, 0, 2), (900, 0, 5)],
    ]
    assert (len(wheel), wheel.left_ms) == (1, 900)


def test_the_highest_ordinal_leaves_in_time_too() -> None:
    wheel = Wheel(500)
    wheel.add(places([(500, 0, (1 << 32) - 1), (501, 0, 0)]))
    assert rows(wheel.advance(500)) == [(500, 0, (1 << 32) - 1)]


def test_a_message_takes_nine_bytes_at_most_and_memory_follows_what_left() -> None:
    wheel = Wheel()
    wheel.add(many(2_000_000))
    assert wheel.nbytes <= 9 * len(wheel)
    wheel.advance(ERA + 3_000_000, 1_700_000)
    assert wheel.nbytes <= 12 * len(wheel)
    wheel.clear()
    assert len(wheel) == 0
    wheel.check()


def test_a_long_run_leaves_in_order_while_the_memory_of_its_beginning_is_given_back() -> None:
    wheel, every = Wheel(10), many(20_000)
    wheel.add(every)
    left: list[Row] = []
    for now_ms in range(ERA, ERA + 3_700_000, 60_000):
        left += rows(wheel.advance(now_ms))
        wheel.check()
    assert left == sorted(rows(every))


@pytest.mark.parametrize(("floor", "cut"), [(-1, 4), (5, 5)])
def test_nothing_is_given_back_at_or_before_what_left_or_before_the_floor(
    floor: int, cut: int
) -> None:
    wheel = Wheel(1)
    wheel.add(places([(due, 0, due) for due in range(1, 9)]))
    wheel.advance(3, 3)
    wheel.add(places([(2, 0, 99)]))
    assert wheel.shrink(0, floor) == cut
    assert [due for due, _, _ in rows(wheel.advance(9))] == [2, *range(4, cut)]


class Ticking(RuleBasedStateMachine):
    """Wheels with small baskets and runs, against a sorted list."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            patch.object(wheel_module, "BASKET", 5),
            patch.object(wheel_module, "RUN_MESSAGES_MAX", 16),
        ]
        for each in self.patches:
            each.start()
        self.wheel = Wheel(10)
        self.twin: list[Row] = []
        self.ordinals = 0
        self.now = ERA
        self.left_ms = -ERA

    def teardown(self) -> None:
        assert rows(self.wheel.advance(1 << 50, 1 << 20)) == sorted(self.twin)
        for each in self.patches:
            each.stop()

    @rule(
        found=st.lists(
            st.tuples(
                st.one_of(st.integers(-30, 120), st.sampled_from([-ERA, ERA])), st.integers(0, 1)
            ),
            max_size=30,
        )
    )
    def add(self, found: list[tuple[int, int]]) -> None:
        new = [
            (self.now + due, bucket, self.ordinals + at) for at, (due, bucket) in enumerate(found)
        ]
        self.ordinals += len(new)
        self.wheel.add(places(new))
        self.twin += new

    @rule(count=st.integers(1, 40), due=st.integers(-20, 80))
    def add_singly(self, count: int, due: int) -> None:
        for each in range(count):
            self.add([(due + each % 7, 1)])

    @rule(step=st.integers(-30, 60), most=st.one_of(st.integers(0, 40), st.just(1000)))
    def advance(self, step: int, most: int) -> None:
        self.now += step
        self.twin.sort()
        expected = [row for row in self.twin if row[0] <= self.now // 10 * 10][:most]
        assert rows(self.wheel.advance(self.now, most)) == expected
        self.twin = [row for row in self.twin if row not in set(expected)]
        self.left_ms = max([self.left_ms, *[due for due, _, _ in expected]])

    @rule(most=st.integers(0, 60))
    def give_back(self, most: int) -> None:
        due_times_ms = sorted(due for due, _, _ in self.twin)
        cut = self.wheel.shrink(most)
        if cut is None:
            assert len(due_times_ms) <= most or max(due_times_ms) <= max(
                self.left_ms, due_times_ms[0]
            )
        else:
            assert len(due_times_ms) > most
            assert cut > max(self.left_ms, due_times_ms[0])
            assert (
                sum(due < cut for due in due_times_ms) <= most
                or cut == max(self.left_ms, due_times_ms[0]) + 1
            )
            assert sum(due <= cut for due in due_times_ms) > most
            self.twin = [row for row in self.twin if row[0] < cut]

    @invariant()
    def agrees(self) -> None:
        self.wheel.check()
        assert len(self.wheel) == len(self.twin)


TestTicking = Ticking.TestCase
