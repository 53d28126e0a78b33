"""Routes under any series of splits, merges and moves, against a dumb twin: a list from logical
partition to partition number.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from qmq_ordering.changes import first_route, merge, move, next_route, split
from qmq_ordering.routes import Change, ChangeKind, LpRange, PhysicalPartition, Route

from qmq.errors import InvalidArgument, InvalidName, RouteConflict, UnknownPartition

GROUPS = ("a", "b", "c")
ROUTE = first_route(1000, 2, ["a", "b"])


def held(route: Route) -> list[tuple[int, int, int, str]]:
    return [(part.number, *part.range, part.group) for part in route.partitions]


def test_the_first_route_is_even_and_dealt_round_robin() -> None:
    route = first_route(10, 3, ["a", "b"])
    assert held(route) == [(1, 0, 3, "a"), (2, 3, 6, "b"), (3, 6, 10, "a")]
    assert (route.version, route.next_number, route.logical_partitions) == (1, 4, 10)


def test_the_worked_example_of_the_module_holds() -> None:
    second = next_route(ROUTE, split(ROUTE, 2, [600], change_id="x", groups=["b", "c"]))
    assert held(second) == [(1, 0, 500, "a"), (3, 500, 600, "b"), (4, 600, 1000, "c")]
    third = next_route(second, merge(second, [3, 1], change_id="y"))
    assert held(third) == [(5, 0, 600, "a"), (4, 600, 1000, "c")]
    fourth = next_route(third, move(third, 4, "a", change_id="z"))
    assert held(fourth) == [(5, 0, 600, "a"), (6, 600, 1000, "a")]


def test_a_split_may_be_uneven_and_of_many_parts_and_stays_where_the_source_is() -> None:
    change = split(ROUTE, 2, [501, 502, 999], change_id="x", reason="hot")
    assert (change.id, change.kind, change.to_version, change.sources, change.reason) == (
        "x",
        ChangeKind.SPLIT,
        2,
        (2,),
        "hot",
    )
    assert [tuple(part.range) for part in change.targets] == [
        (500, 501),
        (501, 502),
        (502, 999),
        (999, 1000),
    ]
    assert {part.group for part in change.targets} == {"b"}


def test_a_merge_names_its_sources_by_range_and_may_live_elsewhere() -> None:
    route = first_route(9, 3, ["a"])
    change = merge(route, [3, 1, 2], change_id="x", group="b")
    assert change.sources == (1, 2, 3)
    assert change.targets == (PhysicalPartition(4, LpRange(0, 9), "b"),)


def test_a_move_to_its_own_group_opens_a_fresh_partition() -> None:
    assert held(next_route(ROUTE, move(ROUTE, 1, "a", change_id="x")))[0] == (3, 0, 500, "a")


@pytest.mark.parametrize(
    ("logical", "partitions", "groups"), [(8, 0, ["a"]), (8, 9, ["a"]), (8, 1, []), (0, 0, ["a"])]
)
def test_a_first_route_that_cannot_be_is_refused(
    logical: int, partitions: int, groups: list[str]
) -> None:
    with pytest.raises(InvalidArgument):
        first_route(logical, partitions, groups)


@pytest.mark.parametrize("at", [[], [500], [1000], [499], [600, 600], [700, 600]])
def test_a_cut_outside_the_partition_or_out_of_order_is_refused(at: list[int]) -> None:
    with pytest.raises(InvalidArgument):
        split(ROUTE, 2, at, change_id="x")


def test_what_else_cannot_be_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="a broker group for each"):
        split(ROUTE, 2, [600], change_id="x", groups=["b"])
    with pytest.raises(InvalidArgument, match="two or more"):
        merge(ROUTE, [1], change_id="x")
    with pytest.raises(InvalidArgument, match="two or more different"):
        merge(ROUTE, [1, 2, 1], change_id="x")
    with pytest.raises(InvalidArgument, match=r"1 \[0, 3\) and 3 \[6, 9\) are not adjacent"):
        merge(first_route(9, 3, ["a"]), [3, 1], change_id="x")
    with pytest.raises(InvalidArgument, match="id"):
        move(ROUTE, 1, "a", change_id="")
    with pytest.raises(InvalidName):
        move(ROUTE, 1, "", change_id="x")
    with pytest.raises(UnknownPartition, match="was never there"):
        move(ROUTE, 7, "a", change_id="x")
    with pytest.raises(UnknownPartition, match="closed by an earlier change"):
        split(next_route(ROUTE, move(ROUTE, 1, "b", change_id="x")), 1, [5], change_id="y")


def test_a_change_applies_to_the_route_that_it_was_made_for_and_to_no_other() -> None:
    change = split(ROUTE, 2, [600], change_id="x")
    after = next_route(ROUTE, change)
    for route, wrong in (
        (after, change),
        (ROUTE, replace(change, to_version=3)),
        (ROUTE, replace(change, sources=(3,))),
        (ROUTE, replace(change, sources=())),
        (ROUTE, replace(change, sources=(1, 2))),
        (ROUTE, replace(change, targets=change.targets[:1])),
        (ROUTE, replace(change, targets=())),
        (ROUTE, replace(change, targets=(change.targets[0], change.targets[0]))),
        (ROUTE, replace(change, targets=(change.targets[0]._replace(number=1), change.targets[1]))),
        (ROUTE, replace(change, targets=tuple(part._replace(number=8) for part in change.targets))),
    ):
        with pytest.raises(RouteConflict, match="plan the change again"):
            next_route(route, wrong)


def test_a_change_of_two_places_at_once_is_refused() -> None:
    route = first_route(9, 3, ["a"])
    apart = replace(move(route, 1, "b", change_id="x"), sources=(1, 3))
    apart = replace(
        apart,
        targets=(
            PhysicalPartition(4, LpRange(0, 3), "b"),
            PhysicalPartition(5, LpRange(6, 9), "b"),
        ),
    )
    with pytest.raises(RouteConflict):
        next_route(route, apart)


class Routes(RuleBasedStateMachine):
    """Every version is kept, and each has for each logical partition the same owner as the simple
    twin.
    """

    @initialize(logical=st.integers(1, 40), data=st.data())
    def begin(self, logical: int, data: st.DataObject) -> None:
        partitions = data.draw(st.integers(1, min(logical, 5)))
        self.routes = [first_route(logical, partitions, GROUPS)]
        first = [number for number in range(1, partitions + 1) for _ in self._range_of(number)]
        self.twins = [first]
        self.groups = {number: GROUPS[(number - 1) % 3] for number in first}

    def _range_of(self, number: int) -> range:
        found = self.routes[-1].partition(number)
        assert found is not None
        return range(*found.range)

    def _apply(self, change: Change, old: set[int], new: list[tuple[int, str]]) -> None:
        """`new` has the number and the group of each logical partition of the sources, in order."""
        twin = list(self.twins[-1])
        for lp, (number, group) in zip(
            (lp for lp, number in enumerate(twin) if number in old), new, strict=True
        ):
            twin[lp] = number
            self.groups[number] = group
        self.routes.append(next_route(self.routes[-1], Change.decode(change.encode())))
        self.twins.append(twin)

    @precondition(lambda self: len(set(self.twins[-1])) < len(self.twins[-1]))
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        twin = self.twins[-1]
        number = data.draw(st.sampled_from(sorted({n for n in twin if twin.count(n) > 1})))
        lps = [lp for lp, n in enumerate(twin) if n == number]
        at = sorted(data.draw(st.sets(st.sampled_from(lps[1:]), min_size=1, max_size=4)))
        groups = data.draw(
            st.one_of(
                st.just([]),
                st.lists(st.sampled_from(GROUPS), min_size=len(at) + 1, max_size=len(at) + 1),
            )
        )
        fresh = max(self.groups) + 1
        part = [sum(cut <= lp for cut in at) for lp in lps]
        new = [(fresh + i, groups[i] if groups else self.groups[number]) for i in part]
        self._apply(split(self.routes[-1], number, at, change_id="s", groups=groups), {number}, new)

    @precondition(lambda self: len(set(self.twins[-1])) > 1)
    @rule(data=st.data(), group=st.sampled_from(["", *GROUPS]))
    def merge(self, data: st.DataObject, group: str) -> None:
        order = list(dict.fromkeys(self.twins[-1]))
        first = data.draw(st.integers(0, len(order) - 2))
        chosen = order[first : data.draw(st.integers(first + 2, len(order)))]
        new = [(max(self.groups) + 1, group or self.groups[chosen[0]])] * sum(
            number in chosen for number in self.twins[-1]
        )
        shuffled = data.draw(st.permutations(chosen))
        self._apply(merge(self.routes[-1], shuffled, change_id="m", group=group), set(chosen), new)

    @rule(data=st.data(), group=st.sampled_from(GROUPS))
    def move(self, data: st.DataObject, group: str) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.twins[-1]))))
        new = [(max(self.groups) + 1, group)] * self.twins[-1].count(number)
        self._apply(move(self.routes[-1], number, group, change_id="v"), {number}, new)

    @invariant()
    def every_version_says_what_the_twin_says(self) -> None:
        for version, (route, twin) in enumerate(zip(self.routes, self.twins, strict=True), start=1):
            assert route.version == version
            assert Route.decode(route.encode()) == route
            assert [route.holder(lp).number for lp in range(len(twin))] == twin
            assert all(part.group == self.groups[part.number] for part in route.partitions)

    @invariant()
    def no_number_comes_back(self) -> None:
        for number in self.groups:
            versions = [version for version, twin in enumerate(self.twins) if number in twin]
            assert versions == list(range(versions[0], versions[-1] + 1))
            assert (
                len(
                    {
                        tuple(lp for lp, n in enumerate(self.twins[v]) if n == number)
                        for v in versions
                    }
                )
                == 1
            )


TestRoutes = Routes.TestCase
