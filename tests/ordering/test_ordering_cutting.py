"""Cuts by load, compared with an exhaustive search."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qmq_ordering.changes import cut_by_load
from qmq_ordering.routes import LpRange, even_cuts, ranges_between
from support.forms import examples

from qmq.errors import InvalidArgument


def parts_of(load: list[float], first: int, cuts: list[int]) -> list[float]:
    return [
        sum(load[a - first : b - first])
        for a, b in ranges_between(LpRange(first, first + len(load)), cuts)
    ]


def test_one_hot_logical_partition_is_isolated() -> None:
    assert cut_by_load(LpRange(500, 505), [1, 1, 100, 1, 1], 3) == [502, 503]
    assert cut_by_load(LpRange(0, 4), [1, 1, 1, 90], 2) == [3]
    assert cut_by_load(LpRange(0, 4), [90, 1, 1, 1], 2) == [1]
    assert cut_by_load(LpRange(0, 5), [0, 0, 7, 0, 0], 3) == [2, 3]


def test_even_loads_are_cut_evenly() -> None:
    assert cut_by_load(LpRange(0, 1000), [3.5] * 1000, 4) == [250, 500, 750]


def test_no_load_at_all_is_cut_evenly() -> None:
    assert (
        cut_by_load(LpRange(10, 20), [0.0] * 10, 4) == even_cuts(LpRange(10, 20), 4) == [12, 15, 17]
    )


def test_logical_partitions_without_load_are_shared_out_evenly() -> None:
    assert cut_by_load(LpRange(0, 10), [1, 0, 0, 0, 0, 0, 0, 0, 0, 1], 2) == [5]


def test_a_heavy_half_is_cut_and_the_light_one_is_not() -> None:
    assert cut_by_load(LpRange(0, 8), [0, 0, 0, 0, 5, 5, 5, 5], 2) == [6]


@pytest.mark.parametrize("parts", [0, -1, 4])
def test_more_parts_than_logical_partitions_are_refused(parts: int) -> None:
    with pytest.raises(InvalidArgument, match="1 to 3"):
        cut_by_load(LpRange(5, 8), [1, 1, 1], parts)


@pytest.mark.parametrize(
    "load", [[1, 1], [1, 1, 1, 1], [1, -1, 1], [1, float("nan"), 1], [1, float("inf"), 1]]
)
def test_invalid_loads_are_refused(load: list[float]) -> None:
    with pytest.raises(InvalidArgument, match="3 loads"):
        cut_by_load(LpRange(5, 8), load, 2)


def test_a_range_of_the_largest_subject_is_cut_at_once() -> None:
    load = [float(i * 7919 % 1000) for i in range(65_536)]
    heaviest = max(parts_of(load, 0, cut_by_load(LpRange(0, 65_536), load, 64)))
    assert heaviest < sum(load) / 64 + 1000


@settings(max_examples=examples(400))
@given(
    st.lists(st.one_of(st.integers(0, 9), st.sampled_from([0, 1000])), min_size=1, max_size=9),
    st.integers(0, 50),
    st.data(),
)
def test_no_other_cuts_make_the_heaviest_part_lighter(
    load: list[float], first: int, data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(load)))
    lps = LpRange(first, first + len(load))
    cuts = cut_by_load(lps, load, parts)
    assert len(cuts) == parts - 1
    assert all(a < b for a, b in pairwise([lps.first, *cuts, lps.end]))
    best = min(
        max(parts_of(load, first, list(each)))
        for each in combinations(range(first + 1, lps.end), parts - 1)
    )
    assert max(parts_of(load, first, cuts)) == best


@given(st.lists(st.integers(0, 9), min_size=2, max_size=60), st.integers(0, 20))
def test_two_parts_are_as_equal_as_can_be(load: list[float], first: int) -> None:
    cuts = cut_by_load(LpRange(first, first + len(load)), load, 2)
    left, right = parts_of(load, first, cuts)
    assert abs(left - right) == min(
        abs(sum(load[:at]) - sum(load[at:])) for at in range(1, len(load))
    )


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=30), st.data())
def test_any_loads_give_parts_that_are_not_empty(load: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(load)))
    cuts = cut_by_load(LpRange(0, len(load)), load, parts)
    assert all(a < b for a, b in pairwise([0, *cuts, len(load)]))
    bound = max(parts_of(load, 0, even_cuts(LpRange(0, len(load)), parts)))
    assert max(parts_of(load, 0, cuts)) <= bound * (1 + 1e-9)


@given(st.integers(0, 99), st.integers(1, 200), st.data())
def test_even_cuts_make_widths_that_differ_by_one_at_most(
    first: int, width: int, data: st.DataObject
) -> None:
    lps = LpRange(first, first + width)
    widths = [
        part.width for part in ranges_between(lps, even_cuts(lps, data.draw(st.integers(1, width))))
    ]
    assert max(widths) - min(widths) <= 1
    assert min(widths) >= 1
