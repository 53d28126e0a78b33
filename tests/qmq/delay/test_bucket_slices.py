"""Slices against a plain sort."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from qmq.delay.buckets import INDEX_ROW
from qmq.delay.wheel import Sieve, sift


class Index:
    """A bucket's index in memory."""

    def __init__(self, due_times_ms: list[int]) -> None:
        self.count = len(due_times_ms)
        self._rows = np.zeros(len(due_times_ms), INDEX_ROW)
        self._rows["due"] = due_times_ms

    def read(self, first: int, end: int) -> npt.NDArray[np.void]:
        return self._rows[first:end]


def sifted(
    due_times_ms: list[int], settled: list[bool], sieve: Sieve, piece: int
) -> list[tuple[int, int]]:
    runs = sift(
        sieve, 5, Index(due_times_ms), np.array(settled, np.bool_), len(due_times_ms), piece
    )
    found = [run.first(len(run)) for run in runs]
    assert all((each.buckets == 5).all() for each in found)
    return [
        pair
        for each in found
        for pair in zip(each.due_times_ms.tolist(), each.ordinals.tolist(), strict=True)
    ]


def test_the_worked_example_of_the_module_holds() -> None:
    sieve = Sieve(0, 1000, 3)
    rows = np.zeros(7, INDEX_ROW)
    rows["due"] = [500, 20, 300, 900, 40, 700, 60]
    ends = []
    for first, end in ((0, 4), (4, 6), (6, 7)):
        sieve.take(first, rows[first:end], np.zeros(end - first, np.bool_))
        ends.append(sieve.end_ms)
    (run,) = sieve.result(5)
    assert (ends, sieve.end_ms) == ([1000, 500, 500], 300)
    assert run.first(3).due_times_ms.tolist() == [20, 40, 60]
    assert run.first(3).ordinals.tolist() == [1, 4, 6]


def test_a_millisecond_with_more_than_a_slice_is_a_slice_whole() -> None:
    sieve = Sieve(0, 1000, 3)
    assert sifted([7] * 50 + [8], [False] * 51, sieve, 4) == [(7, each) for each in range(50)]
    assert sieve.end_ms == 8


@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=60),
    st.integers(0, 15),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(1, 70),
)
def test_a_slice_is_all_that_is_pending_in_its_stretch_and_as_long_as_may_be(
    lines: list[tuple[int, bool]], first_ms: int, length: int, most: int, piece: int
) -> None:
    due_times_ms, settled = [due for due, _ in lines], [each for _, each in lines]
    sieve = Sieve(first_ms, first_ms + length, most)
    found = sifted(due_times_ms, settled, sieve, piece)
    pending = sorted(
        (due, at)
        for at, (due, is_settled) in enumerate(lines)
        if not is_settled and due >= first_ms
    )
    assert found == [(due, at) for due, at in pending if due < sieve.end_ms]
    assert first_ms < sieve.end_ms <= first_ms + length
    assert len(found) <= most or len({due for due, _ in found}) == 1
    if not found:
        assert sieve.end_ms == first_ms + length


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 12), st.integers(1, 70))
def test_slices_one_after_another_are_everything_once_in_order(
    due_times_ms: list[int], most: int, piece: int
) -> None:
    found: list[tuple[int, int]] = []
    at_ms = 0
    while at_ms < 40:
        sieve = Sieve(at_ms, 40, most)
        found += sifted(due_times_ms, [False] * len(due_times_ms), sieve, piece)
        at_ms = sieve.end_ms
    assert found == sorted((due, at) for at, due in enumerate(due_times_ms))
