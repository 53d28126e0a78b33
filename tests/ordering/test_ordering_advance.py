"""A group on its way through the versions, against a dumb twin: a list from logical partition to
version, and a set of what is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from qmq_ordering.changes import first_route, merge, move, next_route, split
from qmq_ordering.lanes import (
    Frontier,
    FrontierPiece,
    Gate,
    GroupRecord,
    Readable,
    advance,
    first_frontier,
    partitions_to_ask,
    readable,
)
from qmq_ordering.routes import LpRange, PhysicalPartition, Route
from support.invariants import advance_fully

from qmq.errors import RouteChanged

FIRST = first_route(1000, 1, ["a"])
SECOND = next_route(FIRST, split(FIRST, 1, [500], change_id="1"))
THIRD = next_route(SECOND, move(SECOND, 2, "b", change_id="2"))
ROUTES = {1: FIRST, 2: SECOND, 3: THIRD}


def frontier(*pieces: tuple[int, int, int]) -> Frontier:
    return Frontier(
        tuple(FrontierPiece(LpRange(first, end), version) for first, end, version in pieces)
    )


def nothing(_number: int, _lps: LpRange) -> bool:
    return False


def everything(_number: int, _lps: LpRange) -> bool:
    return True


def halves(_number: int) -> list[LpRange]:
    return [LpRange(0, 500), LpRange(500, 1000)]


def left_half_of_1(number: int, lps: LpRange) -> bool:
    return number == 1 and LpRange(0, 500).contains(lps)


def test_the_worked_example_of_the_module_holds() -> None:
    start = first_frontier(1000, 1)
    assert start == frontier((0, 1000, 1))
    assert advance_fully(start, Gate.STRICT, ROUTES, 3, left_half_of_1, halves) == []
    half = frontier((0, 500, 2), (500, 1000, 1))
    assert advance_fully(start, Gate.LANES, ROUTES, 3, left_half_of_1, halves) == [half]
    assert readable(half, ROUTES) == (
        Readable(PhysicalPartition(2, LpRange(0, 500), "a"), LpRange(0, 500), 2),
        Readable(PhysicalPartition(1, LpRange(0, 1000), "a"), LpRange(500, 1000), 1),
    )
    ahead = advance(half, Gate.LANES, ROUTES, 3, lambda number, _: number == 2)
    assert ahead == frontier((0, 500, 3), (500, 1000, 1))
    assert [(each.partition.number, each.version) for each in readable(ahead, ROUTES)] == [
        (4, 3),
        (1, 1),
    ]


def test_without_cuts_a_partition_is_asked_about_as_a_whole() -> None:
    assert advance(
        first_frontier(1000, 1), Gate.LANES, ROUTES, 3, left_half_of_1
    ) == first_frontier(1000, 1)


def test_an_unaffected_range_moves_at_once_by_lanes_and_with_the_others_by_strict() -> None:
    start = first_frontier(1000, 2)
    assert advance(start, Gate.LANES, ROUTES, 3, nothing) == frontier((0, 500, 2), (500, 1000, 3))
    assert advance(start, Gate.STRICT, ROUTES, 3, nothing) == start
    assert advance(start, Gate.STRICT, ROUTES, 3, everything) == first_frontier(1000, 3)


def test_an_unchanged_partition_is_read_under_the_version_of_each_piece() -> None:
    """Partition 3 is the same in versions 2 and 3."""
    open_now = readable(frontier((0, 600, 3), (600, 1000, 2)), ROUTES)
    three = PhysicalPartition(3, LpRange(500, 1000), "a")
    assert open_now[1:] == (
        Readable(three, LpRange(500, 600), 3),
        Readable(three, LpRange(600, 1000), 2),
    )


def test_only_closed_partitions_behind_the_frontier_are_asked_for() -> None:
    assert partitions_to_ask(first_frontier(1000, 1), ROUTES, 3) == {1}
    assert partitions_to_ask(first_frontier(1000, 2), ROUTES, 3) == {2}
    assert partitions_to_ask(frontier((0, 500, 2), (500, 1000, 1)), ROUTES, 3) == {1, 2}
    assert partitions_to_ask(frontier((0, 500, 2), (500, 1000, 1)), ROUTES, 2) == {1}
    assert partitions_to_ask(first_frontier(1000, 3), ROUTES, 3) == set()


def test_a_version_that_is_not_known_yet_is_reported_and_not_guessed() -> None:
    with pytest.raises(RouteChanged, match="version 4"):
        readable(first_frontier(1000, 4), ROUTES)
    with pytest.raises(RouteChanged, match="version 4"):
        advance(first_frontier(1000, 3), Gate.LANES, ROUTES, 4, everything)


def test_a_group_beyond_the_latest_version_that_is_known_stays() -> None:
    assert advance(first_frontier(1000, 3), Gate.STRICT, ROUTES, 2, everything) == first_frontier(
        1000, 3
    )


def test_a_group_record_survives_the_store() -> None:
    record = GroupRecord(frontier((0, 500, 3), (500, 1000, 1)), Gate.STRICT, "latest", False)
    assert GroupRecord.decode(record.encode()) == record


class Advance(RuleBasedStateMachine):
    """Random changes, random progress, random flips of the gate; the twin keeps one version for
    each logical partition.
    """

    @initialize(
        logical=st.integers(2, 12), partitions=st.integers(1, 2), gate=st.sampled_from(Gate)
    )
    def begin(self, logical: int, partitions: int, gate: Gate) -> None:
        self.routes: dict[int, Route] = {1: first_route(logical, partitions, ["a"])}
        self.latest = 1
        self.frontier = first_frontier(logical, 1)
        self.gate = gate
        self.twin = [1] * logical
        self.done: set[tuple[int, int]] = set()
        self.asked: set[int] = set()

    # --- what the world does

    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        route = self.routes[self.latest]
        part = data.draw(st.sampled_from(route.partitions))
        kind = data.draw(st.sampled_from(["split", "merge", "move"]))
        if kind == "split" and part.range.width > 1:
            change = split(
                route,
                part.number,
                [data.draw(st.integers(part.range.first + 1, part.range.end - 1))],
                change_id="s",
            )
        elif kind == "merge" and len(route.partitions) > 1:
            at = data.draw(st.integers(0, len(route.partitions) - 2))
            change = merge(
                route, [each.number for each in route.partitions[at : at + 2]], change_id="m"
            )
        else:
            change = move(route, part.number, "b", change_id="v")
        self.latest += 1
        self.routes[self.latest] = next_route(route, change)

    @rule(data=st.data())
    def finish_some(self, data: st.DataObject) -> None:
        """The group reaches the end of a closed partition in some of the logical partitions that it
        reads there.
        """
        closed = [
            each
            for each in readable(self.frontier, self.routes)
            if not self._is_live(each.partition.number)
        ]
        if closed:
            chosen = data.draw(st.sampled_from(closed))
            first = data.draw(st.integers(chosen.range.first, chosen.range.end - 1))
            end = data.draw(st.integers(first + 1, chosen.range.end))
            self.done |= {(chosen.partition.number, lp) for lp in range(first, end)}

    @rule(gate=st.sampled_from(Gate))
    def flip(self, gate: Gate) -> None:
        self.gate = gate

    @rule(grain=st.sampled_from(["runs", "single"]))
    def step(self, grain: str) -> None:
        """However finely progress is kept, the same follows from it."""
        before = self.frontier
        self.asked = set()
        cuts = self._runs if grain == "runs" else self._single
        self.frontier = advance(before, self.gate, self.routes, self.latest, self._finished, cuts)
        assert self.asked <= partitions_to_ask(before, self.routes, self.latest)
        self.twin = self._twin_steps()
        assert self._versions(self.frontier) == self.twin

    @rule()
    def step_fully(self) -> None:
        steps = [
            self.frontier,
            *advance_fully(
                self.frontier, self.gate, self.routes, self.latest, self._finished, self._single
            ),
        ]
        for before, after in pairwise(steps):
            assert before != after
            assert all(
                b - a in (0, 1)
                for a, b in zip(self._versions(before), self._versions(after), strict=True)
            )
            self.twin = self._twin_steps()
            assert self._versions(after) == self.twin
        self.frontier = steps[-1]
        assert self._twin_steps() == self.twin

    # --- what must be true

    @invariant()
    def nothing_is_open_before_what_was_there_is_finished(self) -> None:
        for lp, version in enumerate(self._versions(self.frontier)):
            now = self.routes[version].holder(lp).number
            before = {self.routes[older].holder(lp).number for older in range(1, version)} - {now}
            assert all((number, lp) in self.done for number in before)

    @invariant()
    def each_logical_partition_is_read_in_one_place(self) -> None:
        open_now = readable(self.frontier, self.routes)
        for lp, version in enumerate(self.twin):
            (found,) = (each for each in open_now if each.range.first <= lp < each.range.end)
            assert (found.partition, found.version) == (self.routes[version].holder(lp), version)
        assert len(set(open_now)) == len(open_now)

    def teardown(self) -> None:
        """Under either gate, when everything is finished everything opens."""
        if hasattr(self, "routes"):
            steps = advance_fully(
                self.frontier, self.gate, self.routes, self.latest, lambda *_: True
            )
            assert (steps or [self.frontier])[-1] == first_frontier(len(self.twin), self.latest)

    # --- the twin

    def _is_live(self, number: int) -> bool:
        return self.routes[self.latest].partition(number) is not None

    def _finished(self, number: int, lps: LpRange) -> bool:
        self.asked.add(number)
        return not self._is_live(number) and all((number, lp) in self.done for lp in range(*lps))

    def _may_go(self, lp: int, version: int) -> bool:
        number = self.routes[version].holder(lp).number
        return self.routes[version + 1].partition(number) is not None or (number, lp) in self.done

    def _twin_steps(self) -> list[int]:
        if self.gate is Gate.STRICT:
            lowest = min(self.twin)
            goes = lowest < self.latest and all(
                self._may_go(lp, v) for lp, v in enumerate(self.twin) if v == lowest
            )
            return [v + (goes and v == lowest) for v in self.twin]
        return [v + (v < self.latest and self._may_go(lp, v)) for lp, v in enumerate(self.twin)]

    def _single(self, number: int) -> Sequence[LpRange]:
        return [LpRange(lp, lp + 1) for lp in self._lps_of(number)]

    def _runs(self, number: int) -> Sequence[LpRange]:
        runs: list[LpRange] = []
        for lp in self._lps_of(number):
            if runs and ((number, lp) in self.done) == ((number, lp - 1) in self.done):
                runs[-1] = LpRange(runs[-1].first, lp + 1)
            else:
                runs.append(LpRange(lp, lp + 1))
        return runs

    def _lps_of(self, number: int) -> range:
        return range(
            *next(
                part.range
                for route in self.routes.values()
                for part in route.partitions
                if part.number == number
            )
        )

    @staticmethod
    def _versions(found: Frontier) -> list[int]:
        return [piece.version for piece in found.pieces for _ in range(*piece.range)]


TestAdvance = Advance.TestCase
