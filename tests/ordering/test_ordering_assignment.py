"""Assignment of lanes: any history of joins, leaves, splits and changing backlogs keeps the rules'
promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from qmq_ordering.lanes import Assignment, Lane, ProducerBase, Readable, assign
from qmq_ordering.routes import LpRange, PhysicalPartition

NOBODY = Assignment()


def opened(number: int, first: int, end: int, version: int = 1, group: str = "a") -> Readable:
    return Readable(
        PhysicalPartition(number, LpRange(0, 1000), group), LpRange(first, end), version
    )


def no_backlog(_number: int, _lps: LpRange) -> float:
    return 0.0


def by_number(**backlogs: float) -> ProducerBase:
    return lambda number, _: backlogs[f"p{number}"]


def short(assignment: Assignment) -> list[str]:
    return sorted(f"{lane.partition} {lane.range} {who}" for lane, who in assignment.lanes)


def test_the_worked_example_of_the_module_holds() -> None:
    whole = [opened(1, 0, 1000)]
    two = assign(NOBODY, ["x", "y"], whole, no_backlog)
    assert short(two) == ["1 [0, 500) x", "1 [500, 1000) y"]
    three = assign(two, ["x", "y", "z"], whole, no_backlog)
    assert short(three) == ["1 [0, 333) x", "1 [333, 666) z", "1 [666, 1000) y"]
    half = [opened(2, 0, 333, 2), opened(1, 333, 1000)]
    first = assign(three, ["x", "y", "z"], half, by_number(p1=900, p2=100))
    assert short(first) == ["1 [333, 666) z", "1 [666, 1000) y", "2 [0, 333) x"]
    targets = [opened(2, 0, 500, 2), opened(3, 500, 1000, 2)]
    done = assign(first, ["x", "y", "z"], targets, by_number(p2=50, p3=50))
    assert short(done) == ["2 [0, 250) x", "2 [250, 500) z", "3 [500, 1000) y"]
    assert short(assign(done, ["x", "y"], targets, no_backlog)) == [
        "2 [0, 500) x",
        "3 [500, 1000) y",
    ]


def test_with_enough_ranges_none_is_cut() -> None:
    ranges = [opened(number, number * 10, number * 10 + 10) for number in range(7)]
    found = assign(NOBODY, ["x", "y", "z"], ranges, no_backlog)
    assert {lane.range for lane, _ in found.lanes} == {each.range for each in ranges}
    assert sorted(Counter(who for _, who in found.lanes).values()) == [2, 2, 3]


def test_consumers_work_where_the_backlog_is() -> None:
    ranges = [opened(1, 0, 400), opened(2, 400, 700), opened(3, 700, 1000)]
    found = assign(NOBODY, [f"c{i:02}" for i in range(10)], ranges, by_number(p1=100, p2=700, p3=0))
    assert Counter(lane.partition for lane, _ in found.lanes) == {1: 1, 2: 8, 3: 1}


@pytest.mark.parametrize(
    ("backlogs", "consumers", "shares"),
    [
        ((300, 600, 100), 10, [3, 6, 1]),
        ((333, 333, 334), 10, [3, 3, 4]),  # 3.33 3.33 3.34
        ((470, 160, 370), 11, [5, 2, 4]),  # 5.17 1.76 4.07
        ((0.03, 0.06, 0.01), 10, [3, 6, 1]),
        ((1, 1, 1_000_000), 4, [1, 1, 2]),
    ],
)
def test_shares_follow_the_largest_remainder(
    backlogs: tuple[float, ...], consumers: int, shares: list[int]
) -> None:
    ranges = [opened(1, 0, 400), opened(2, 400, 700), opened(3, 700, 1000)]
    found = assign(
        NOBODY,
        [f"c{i:02}" for i in range(consumers)],
        ranges,
        lambda number, _: backlogs[number - 1],
    )
    counts = Counter(lane.partition for lane, _ in found.lanes)
    assert [counts[1], counts[2], counts[3]] == shares


def test_who_reads_a_partition_keeps_it_before_who_read_the_same_keys_elsewhere() -> None:
    """x reads the target [0, 30) already, y the source's [30, 600) still; then the target is open
    as a whole.
    """
    before = assign(NOBODY, ["x", "y"], [opened(2, 0, 30, 2), opened(1, 30, 600)], no_backlog)
    assert short(before) == ["1 [30, 600) y", "2 [0, 30) x"]
    after = assign(before, ["x", "y"], [opened(2, 0, 500, 2), opened(3, 500, 600, 2)], no_backlog)
    assert short(after) == ["2 [0, 500) x", "3 [500, 600) y"]


def test_lanes_that_are_even_already_are_not_cut_elsewhere() -> None:
    """Four logical partitions for three can be cut 2 1 1 or 1 1 2: as they were."""
    lanes = [
        (Lane(1, LpRange(0, 2), "a", 1), "x"),
        (Lane(1, LpRange(2, 3), "a", 1), "y"),
        (Lane(1, LpRange(3, 4), "a", 1), "z"),
    ]
    before = Assignment(7, (*lanes, (Lane(2, LpRange(4, 20), "a", 1), "v")))
    after = assign(
        before,
        ["v", "w", "x", "y", "z"],
        [opened(1, 0, 4), opened(2, 4, 20)],
        by_number(p1=30, p2=20),
    )
    assert short(after) == ["1 [0, 2) x", "1 [2, 3) y", "1 [3, 4) z", "2 [12, 20) w", "2 [4, 12) v"]
    assert after.generation == 8


def test_without_any_backlog_consumers_are_spread_evenly() -> None:
    ranges = [opened(1, 0, 400), opened(2, 400, 700), opened(3, 700, 1000)]
    found = assign(NOBODY, list("abcdefgh"), ranges, no_backlog)
    assert sorted(Counter(lane.partition for lane, _ in found.lanes).values()) == [2, 3, 3]


def test_a_range_without_room_leaves_its_consumers_to_others() -> None:
    ranges = [opened(1, 0, 2), opened(2, 2, 1000)]
    found = assign(NOBODY, list("abcdefgh"), ranges, by_number(p1=1_000_000, p2=0))
    assert Counter(lane.partition for lane, _ in found.lanes) == {1: 2, 2: 6}


def test_with_fewer_logical_partitions_than_consumers_each_has_one_or_none() -> None:
    found = assign(NOBODY, list("abcdef"), [opened(1, 0, 4)], no_backlog)
    assert [len(found.of(name)) for name in "abcdef"] == [1, 1, 1, 1, 0, 0]
    assert assign(found, list("abcde"), [opened(1, 0, 4)], no_backlog) is found


def test_slowly_drifting_backlogs_cause_no_moves() -> None:
    ranges = [opened(1, 0, 500), opened(2, 500, 1000)]
    found = assign(NOBODY, list("abcd"), ranges, by_number(p1=300, p2=100))
    assert assign(found, list("abcd"), ranges, by_number(p1=1, p2=1_000_000)) is found


def test_a_version_that_changes_nothing_moves_nothing() -> None:
    found = assign(
        NOBODY, list("abc"), [opened(1, 0, 500), opened(2, 500, 1000)], by_number(p1=9, p2=1)
    )
    later = assign(
        found, list("abc"), [opened(1, 0, 500, 2), opened(2, 500, 1000, 2)], by_number(p1=1, p2=9)
    )
    assert short(later) == short(found)
    assert (later.generation, {lane.version for lane, _ in later.lanes}) == (
        found.generation + 1,
        {2},
    )


def test_a_splits_targets_go_to_the_reader_of_the_source() -> None:
    before = assign(NOBODY, ["x", "y"], [opened(1, 0, 500), opened(2, 500, 1000)], no_backlog)
    after = assign(
        before,
        ["x", "y"],
        [opened(1, 0, 500, 2), opened(3, 500, 700, 2), opened(4, 700, 1000, 2)],
        no_backlog,
    )
    assert short(after) == ["1 [0, 500) x", "3 [500, 700) y", "4 [700, 1000) y"]


def test_without_consumers_or_ranges_there_is_no_assignment() -> None:
    found = assign(NOBODY, ["x"], [opened(1, 0, 1000)], no_backlog)
    empty = assign(found, [], [opened(1, 0, 1000)], no_backlog)
    assert empty == Assignment(found.generation + 1)
    assert assign(empty, [], [opened(1, 0, 1000)], no_backlog) is empty
    assert assign(found, ["x"], [], no_backlog).lanes == ()
    assert assign(NOBODY, ["x"], [], no_backlog) is NOBODY


def test_an_assignment_survives_the_store() -> None:
    found = assign(
        NOBODY, ["x", "y", "z"], [opened(1, 0, 500, group="b"), opened(2, 500, 1000, 3)], no_backlog
    )
    assert Assignment.decode(found.encode()) == found


class Assignments(RuleBasedStateMachine):
    """Consumers join and leave, ranges open, close and change; every promise holds after each
    step.
    """

    @initialize(width=st.integers(1, 60))
    def begin(self, width: int) -> None:
        self.next_number = 2
        self.open = [opened(1, 0, width)]
        self.consumers: list[str] = []
        self.backlogs: dict[int, float] = {}
        self.now = NOBODY

    def _backlog(self, number: int, _lps: LpRange) -> float:
        return self.backlogs.get(number, 0.0)

    def _assign(self, data: st.DataObject) -> tuple[Assignment, Assignment]:
        before = self.now
        consumers, ranges = (
            data.draw(st.permutations(self.consumers)),
            data.draw(st.permutations(self.open)),
        )
        self.now = assign(before, consumers, ranges, self._backlog)
        assert (
            assign(before, sorted(consumers) * 2, sorted(ranges, reverse=True), self._backlog)
            == self.now
        )
        assert self.now.generation == before.generation + (self.now.lanes != before.lanes)
        return before, self.now

    # --- what may happen

    @rule(data=st.data(), name=st.sampled_from("abcdefghij"))
    def join(self, data: st.DataObject, name: str) -> None:
        if name in self.consumers:
            return
        self.consumers.append(name)
        before, after = self._assign(data)
        if len(self.consumers) <= len(self.open):
            share = len(self.open) // len(self.consumers)
            for other in self.consumers:
                had, has = set(before.of(other)), set(after.of(other))
                assert other == name or has <= had, "a consumer that was there is given nothing"
                assert has >= had or len(had) > share, (
                    "who has no more than the share gives nothing"
                )

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if not self.consumers:
            return
        gone = data.draw(st.sampled_from(self.consumers))
        self.consumers.remove(gone)
        before, after = self._assign(data)
        if len(self.consumers) < len(self.open):
            for other in self.consumers:
                if all(
                    lane.range in {each.range for each in self.open} for lane in before.of(other)
                ):
                    assert set(before.of(other)) <= set(after.of(other)), (
                        "only the ranges of who leaves move"
                    )

    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.open) - 1))
        lps = self.open[place].range
        if lps.width > 1:
            at = data.draw(st.integers(lps.first + 1, lps.end - 1))
            version = self.open[place].version + 1
            parts = [
                opened(self.next_number, lps.first, at, version),
                opened(self.next_number + 1, at, lps.end, version),
            ]
            self.next_number += 2
            self.open[place : place + 1] = parts
            self._assign(data)

    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        if len(self.open) > 1:
            place = data.draw(st.integers(0, len(self.open) - 2))
            first, second = self.open[place : place + 2]
            merged = opened(
                self.next_number,
                first.range.first,
                second.range.end,
                max(first.version, second.version) + 1,
            )
            self.next_number += 1
            self.open[place : place + 2] = [merged]
            self._assign(data)

    @rule(data=st.data())
    def open_a_piece_only(self, data: st.DataObject) -> None:
        """The frontier cuts through a partition: the same partition is open in two pieces, under
        two versions.
        """
        place = data.draw(st.integers(0, len(self.open) - 1))
        piece = self.open[place]
        if piece.range.width > 1:
            at = data.draw(st.integers(piece.range.first + 1, piece.range.end - 1))
            left = piece._replace(range=LpRange(piece.range.first, at), version=piece.version + 1)
            self.open[place : place + 1] = [
                left,
                piece._replace(range=LpRange(at, piece.range.end)),
            ]
            self._assign(data)

    @rule(data=st.data())
    def drift(self, data: st.DataObject) -> None:
        for each in self.open:
            self.backlogs[each.partition.number] = data.draw(
                st.sampled_from([0.0, 0.0, 1.0, 3.0, 50.0, 1e9])
            )
        before, after = self._assign(data)
        assert after is before, "the same consumers and ranges: nothing moves"

    @rule(data=st.data())
    def come_back_with_others_settled(self, data: st.DataObject) -> None:
        """If as many consumers work as before, and all of them stay, no lane moves."""
        name = f"n{self.next_number}"
        self.next_number += 1
        self.consumers.append(name)
        before, after = self._assign(data)
        for each in self.open:
            then, now = self._on(before, each), self._on(after, each)
            if (
                len(then) == len(now)
                and len(self.consumers) > len(self.open)
                and len(before.lanes) >= len(self.open)
            ):
                holders = [who for _, who in then]
                if all(len(before.of(who)) == 1 for who in holders):
                    assert then == now
        self.consumers.remove(name)
        self._assign(data)

    # --- what must be true

    @staticmethod
    def _on(assignment: Assignment, each: Readable) -> Sequence[tuple[Lane, str]]:
        return [(lane, who) for lane, who in assignment.lanes if each.range.contains(lane.range)]

    @invariant()
    def every_open_range_belongs_to_exactly_one_living_consumer(self) -> None:
        lanes = sorted(self.now.lanes, key=lambda pair: pair[0].range)
        if not self.consumers:
            assert not lanes
            return
        read = [lp for lane, _ in lanes for lp in range(*lane.range)]
        assert read == list(range(self.open[-1].range.end))
        assert {who for _, who in lanes} <= set(self.consumers)
        for lane, _ in lanes:
            (whole,) = (each for each in self.open if each.range.overlaps(lane.range))
            assert whole.range.contains(lane.range)
            assert (lane.partition, lane.version) == (whole.partition.number, whole.version)

    @invariant()
    def work_is_dealt_evenly_and_nobody_is_idle(self) -> None:
        counts = [len(self.now.of(name)) for name in self.consumers]
        if len(self.consumers) <= len(self.open):
            assert max(counts, default=0) - min(counts, default=0) <= 1
            assert len(self.now.lanes) == (len(self.open) if self.consumers else 0)
        else:
            width = self.open[-1].range.end
            assert counts.count(1) == min(len(self.consumers), width)
            assert max(counts) == 1

    @invariant()
    def lanes_of_one_range_are_even(self) -> None:
        for each in self.open:
            widths = [lane.range.width for lane, _ in self._on(self.now, each)]
            assert max(widths, default=0) - min(widths, default=0) <= 1

    @invariant()
    def lanes_are_sorted(self) -> None:
        assert list(self.now.lanes) == sorted(self.now.lanes)


TestAssignments = Assignments.TestCase
