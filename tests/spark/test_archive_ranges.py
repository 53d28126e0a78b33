"""Ranges of sequences behave as the sets that they stand for."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from pyspark_qmq.jobs.archive_ranges import Range, add, between, count, ends, joined, of_json, overlap, subtract, to_json, without
from pyspark_qmq.source_model import QueueKey

KEY = QueueKey("orders", 0, "g1")
OTHER = QueueKey("orders", 1, "g2")

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)
QUEUES = st.dictionaries(st.sampled_from([KEY, OTHER]), RANGES.map(joined))


def members(ranges: list[Range] | tuple[Range, ...]) -> set[int]:
    return {number for first, end in ranges for number in range(first, end)}


@given(RANGES)
def test_joined_ranges_are_the_same_set_ascending_and_apart(ranges: list[Range]) -> None:
    found = joined(ranges)
    assert members(found) == members(ranges)
    assert all(first < end for first, end in found)
    assert all(one[1] < two[0] for one, two in pairwise(found))


@given(RANGES, RANGES)
def test_without_is_the_difference_of_sets(ranges: list[Range], taken: list[Range]) -> None:
    assert members(without(ranges, taken)) == members(ranges) - members(taken)


@given(QUEUES, QUEUES)
def test_queues_are_added_subtracted_and_overlapped_as_sets(
    left: dict[QueueKey, tuple[Range, ...]], right: dict[QueueKey, tuple[Range, ...]]
) -> None:
    for key in (KEY, OTHER):
        one, two = members(left.get(key, ())), members(right.get(key, ()))
        assert members(add(left, right).get(key, ())) == one | two
        assert members(subtract(left, right).get(key, ())) == one - two
        assert members(overlap(left, right).get(key, ())) == one & two
    assert count(left) == sum(len(members(each)) for each in left.values())


@given(QUEUES)
def test_json_gives_back_the_same_ranges(ranges: dict[QueueKey, tuple[Range, ...]]) -> None:
    assert of_json(to_json(ranges)) == ranges


def test_between_offsets_lies_what_a_micro_batch_reads() -> None:
    assert between({KEY: 5}, {KEY: 9, OTHER: 3}) == {KEY: ((5, 9),), OTHER: ((0, 3),)}
    assert between({KEY: 9}, {KEY: 9}) == {}
    assert between({KEY: 9}, {KEY: 5}) == {}
    assert ends({KEY: ((0, 3), (5, 9)), OTHER: ()}) == {KEY: 9}
