"""The partitioner alone: through any changes of the route, the messages of a logical partition are
in one place and leave in order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from qmq_ordering.routes import LpRange, PhysicalPartition, Route
from support.forms import examples

from qmq.delivery.partitioner import Partitioner

LPS = 8


class FakeWindow:
    """Messages as (logical partition, serial); the test decides when the fate of sent messages is
    known.
    """

    def __init__(self, part: PhysicalPartition) -> None:
        self.part = part
        self.messages: list[tuple[int, int]] = []
        self.wants_route = self.is_left = self.is_fenced = self.is_known = False

    @property
    def is_settled(self) -> bool:
        return self.is_left and (self.is_known or not self.messages)

    def leave(self, now: float, *, is_fenced: bool) -> None:
        self.is_left, self.is_fenced, self.wants_route = True, is_fenced, False

    def keep(self) -> None:
        self.wants_route = False


def route(version: int, *tiles: tuple[int, int]) -> Route:
    """`tiles`: the number of each partition, and where it ends."""
    parts, first = [], 0
    for number, end in tiles:
        parts.append(PhysicalPartition(number, LpRange(first, end), f"g{number}"))
        first = end
    return Route(version, first, max(number for number, _ in tiles) + 1, tuple(parts))


def holders(partitioner: Partitioner[FakeWindow]) -> list[int]:
    return [window.part.number for window in partitioner.by_lp]


class Machine(RuleBasedStateMachine):
    """Routes change while messages arrive and leave; the sender misses some of the changes."""

    @initialize(data=st.data(), cuts=st.sets(st.integers(1, LPS - 1), max_size=3))
    def begin(self, data: st.DataObject, cuts: set[int]) -> None:
        self.partitioner = Partitioner(FakeWindow)
        self.stored: dict[int, list[int]] = defaultdict(list)
        self.serial = self.next_number = 0
        self.version = 1
        self.ends: dict[tuple[int, int], int] = {}
        self.newest = self._route(cuts)
        self.partitioner.learn(self.newest, (), 0.0)
        for _ in range(data.draw(st.integers(0, 2))):
            self._resume(data.draw(st.sets(st.integers(0, LPS - 1), min_size=1)))
        self.hear()

    def _resume(self, lps: set[int]) -> None:
        """Messages of an earlier life went to a partition that no longer exists. Two such
        partitions have no logical partition in common.
        """
        self.next_number += 1
        part = PhysicalPartition(1000 + self.next_number, LpRange(0, 0), "old")
        lps = {lp for lp in lps if self.partitioner.by_lp[lp].part.range.width}
        window = self.partitioner.resume(part, lps)
        for lp in lps:
            window.messages.append((lp, self._serial()))

    def _serial(self) -> int:
        self.serial += 1
        return self.serial

    def _route(self, cuts: set[int]) -> Route:
        marks = [0, *sorted(cuts), LPS]
        tiles = []
        for first, end in itertools.pairwise(marks):
            if (first, end) not in self.ends:
                self.next_number += 1
                self.ends[first, end] = self.next_number
            tiles.append((self.ends[first, end], end))
        self.ends = {place: self.ends[place] for place in itertools.pairwise(marks)}
        return route(self.version, *tiles)

    @rule(lps=st.lists(st.integers(0, LPS - 1), min_size=1, max_size=8))
    def send(self, lps: list[int]) -> None:
        for lp in lps:
            self.partitioner.by_lp[lp].messages.append((lp, self._serial()))

    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        """A partition stores the first of its batches. A sealed partition may say that it is
        sealed; then the missing batches are certain.
        """
        window = data.draw(st.sampled_from(list(self.partitioner.partitions.values())))
        for lp, serial in window.messages[:2]:
            self.stored[lp].append(serial)
        del window.messages[:2]
        window.wants_route = not window.is_left

    @rule(cuts=st.sets(st.integers(1, LPS - 1), max_size=3))
    def change(self, cuts: set[int]) -> None:
        self.version += 1
        self.newest = self._route(cuts)

    @rule()
    def hear(self) -> None:
        self.partitioner.learn(self.newest, (), 0.0)
        numbers = {part.number for part in self.newest.partitions}
        assert numbers <= self.partitioner.partitions.keys()
        for number, window in self.partitioner.partitions.items():
            assert window.is_left == (number not in numbers)
        self.settle()

    @precondition(
        lambda self: any(window.is_left for window in self.partitioner.partitions.values())
    )
    @rule(data=st.data())
    def learn_fate(self, data: st.DataObject) -> None:
        left = [window for window in self.partitioner.partitions.values() if window.is_left]
        data.draw(st.sampled_from(left)).is_known = True
        self.settle()

    def settle(self) -> None:
        for window in self.partitioner.settle():
            for lp, serial in list(window.messages):
                self.partitioner.by_lp[lp].messages.append((lp, serial))

    @invariant()
    def all_of_a_logical_partition_is_in_one_place(self) -> None:
        if hasattr(self, "partitioner"):
            for window in self.partitioner.partitions.values():
                assert all(self.partitioner.by_lp[lp] is window for lp, _ in window.messages)
            assert {id(window) for window in self.partitioner.by_lp} <= {
                id(window) for window in self.partitioner.partitions.values()
            }

    def teardown(self) -> None:
        if not hasattr(self, "partitioner"):
            return
        self.hear()
        for window in self.partitioner.partitions.values():
            window.is_known = window.is_left
        self.settle()
        assert holders(self.partitioner) == [self.newest.holder(lp).number for lp in range(LPS)]
        assert self.partitioner.partitions.keys() == {
            part.number for part in self.newest.partitions
        }
        for window in self.partitioner.partitions.values():
            for lp, serial in window.messages:
                self.stored[lp].append(serial)
        assert sum(len(found) for found in self.stored.values()) == self.serial
        for found in self.stored.values():
            assert found == sorted(found)


TestPartitioner = Machine.TestCase
TestPartitioner.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)


def test_routes_that_are_older_than_the_known_one_are_not_believed() -> None:
    partitioner = Partitioner(FakeWindow)
    partitioner.learn(route(2, (3, 2), (4, 4)), (), 0.0)
    partitioner.learn(route(1, (1, 4)), (), 0.0)
    assert partitioner.version == 2
    assert holders(partitioner) == [3, 3, 4, 4]
    assert not any(window.is_left for window in partitioner.partitions.values())


def test_a_partition_that_a_newer_route_keeps_no_longer_asks_for_one() -> None:
    partitioner = Partitioner(FakeWindow)
    partitioner.learn(route(1, (1, 2), (2, 4)), (), 0.0)
    partitioner.partitions[1].wants_route = True
    partitioner.learn(route(1, (1, 2), (2, 4)), (), 0.0)
    assert partitioner.wants_route, "the same route says nothing new"
    partitioner.learn(route(2, (1, 2), (3, 4)), (), 0.0)
    assert not partitioner.wants_route
