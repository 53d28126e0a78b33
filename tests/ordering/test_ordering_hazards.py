"""Hazards that other systems of this kind ran into, as far as the pure layer decides them. Each
test is named after one.

Numbers are those of the list that the design began with: 1 child readable early (Pulsar), 4 missing
progress taken for done (KCL), 10 two command messages at once (the original QMQ's rule), 14 a flip
of the mode wedges the drain (Pulsar), 15 split storms (Pulsar), 16 many tiny partitions after a
long life (Pravega).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from qmq_ordering.changes import first_route, merge, move, next_route, split
from qmq_ordering.lanes import (
    Assignment,
    Finished,
    Frontier,
    FrontierPiece,
    Gate,
    advance,
    assign,
    first_frontier,
    readable,
)
from qmq_ordering.resharding import LoadHistory, PartitionLoad, ReshardPolicy, Split, decide
from qmq_ordering.routes import LpRange, Route
from support.invariants import advance_fully

LOGICAL = 100


def splits_of(versions: int) -> dict[int, Route]:
    """A subject that was halved, and halved at its left end again and again."""
    routes = {1: first_route(LOGICAL, 1, ["a"])}
    for version in range(1, versions):
        route = routes[version]
        first = route.partitions[0]
        routes[version + 1] = next_route(
            route, split(route, first.number, [first.range.width // 2], change_id=f"{version}")
        )
    return routes


def done(*pairs: tuple[int, LpRange]) -> Finished:
    """The answer of a broker that keeps progress: without a record, no message is done."""
    return lambda number, lps: any(number == each and known.contains(lps) for each, known in pairs)


@pytest.mark.parametrize("gate", Gate)
def test_hazard_01_a_child_is_not_readable_before_its_parent_is_drained(gate: Gate) -> None:
    routes = splits_of(2)
    begin = first_frontier(LOGICAL, 1)
    steps = advance_fully(
        begin, gate, routes, 2, done(), lambda _: [LpRange(0, 99), LpRange(99, 100)]
    )
    assert steps == []
    almost = done((1, LpRange(0, 99)))
    steps = [
        begin,
        *advance_fully(
            begin, gate, routes, 2, almost, lambda _: [LpRange(0, 99), LpRange(99, 100)]
        ),
    ]
    last = {
        each.partition.number: each.range
        for each in readable(steps[-1], routes)
        if each.range.end == LOGICAL
    }
    assert 1 in last, "the last logical partition is still read from the parent"
    if gate is Gate.STRICT:
        assert [each.partition.number for each in readable(steps[-1], routes)] == [1]


@pytest.mark.parametrize("gate", Gate)
def test_hazard_01_no_assignment_hands_out_a_child_early(gate: Gate) -> None:
    routes = splits_of(4)
    frontier = advance(first_frontier(LOGICAL, 1), gate, routes, 4, done())
    found = assign(Assignment(), ["x", "y", "z"], readable(frontier, routes), lambda *_: 1.0)
    assert {lane.partition for lane, _ in found.lanes} == {1}


@pytest.mark.parametrize("gate", Gate)
def test_hazard_04_missing_progress_is_not_done(gate: Gate) -> None:
    """A merge of 1 and 2 without progress of 2's right half. The merged partition must not open
    although everything else is finished.
    """
    first = first_route(LOGICAL, 2, ["a"])
    routes = {1: first, 2: next_route(first, merge(first, [1, 2], change_id="x"))}
    known = done((1, LpRange(0, 50)), (2, LpRange(50, 75)))

    def kept_of(number: int) -> list[LpRange]:
        return [LpRange(0, 50)] if number == 1 else [LpRange(50, 75), LpRange(75, 100)]

    steps = advance_fully(first_frontier(LOGICAL, 1), gate, routes, 2, known, kept_of)
    frontier = steps[-1] if steps else first_frontier(LOGICAL, 1)
    assert not frontier.is_open(LpRange(75, 100), 2)
    assert frontier.is_open(LpRange(75, 100), 1)
    assert frontier.is_open(LpRange(0, 75), 2) == (gate is Gate.LANES)


@pytest.mark.parametrize("gate", Gate)
def test_hazard_10_two_command_messages_at_once_are_two_steps(gate: Gate) -> None:
    """Everything is finished, six versions ahead: each step is one version, and none is skipped."""
    routes = splits_of(7)
    begin = first_frontier(LOGICAL, 1)
    once = advance(begin, gate, routes, 7, lambda *_: True)
    assert once == first_frontier(LOGICAL, 2)
    steps = [begin, *advance_fully(begin, gate, routes, 7, lambda *_: True)]
    assert [step.version for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert all(b.newest - a.newest <= 1 for a, b in pairwise(steps))


def test_hazard_10_a_range_that_is_ahead_waits_for_its_own_next_source() -> None:
    """Partition 2 of version 2 is closed by version 3, and finished nowhere: that 1 is finished
    carries no range past it.
    """
    routes = splits_of(3)
    steps = advance_fully(
        first_frontier(LOGICAL, 1), Gate.LANES, routes, 3, lambda number, _: number == 1
    )
    assert steps[-1] == Frontier(
        (FrontierPiece(LpRange(0, 50), 2), FrontierPiece(LpRange(50, 100), 3))
    )


def test_hazard_14_a_flip_of_the_gate_wedges_nothing_and_closes_nothing() -> None:
    routes = splits_of(3)
    ahead = Frontier((FrontierPiece(LpRange(0, 50), 2), FrontierPiece(LpRange(50, 100), 1)))
    assert advance(ahead, Gate.STRICT, routes, 3, done()) == ahead, "nothing closes"
    assert advance(ahead, Gate.STRICT, routes, 3, done((2, LpRange(0, 50)))) == ahead, (
        "who is ahead waits"
    )
    caught_up = advance(ahead, Gate.STRICT, routes, 3, done((1, LpRange(50, 100))))
    assert caught_up == first_frontier(LOGICAL, 2)
    gates = [Gate.STRICT, Gate.LANES] * 5
    frontier = ahead
    for gate in gates:
        frontier = advance(frontier, gate, routes, 3, lambda *_: True)
    assert frontier == first_frontier(LOGICAL, 3), "nothing is wedged"


def test_hazard_15_no_split_storm_under_a_load_that_does_not_stop() -> None:
    """A load far above what any split can help with, looked at every second for an hour."""
    policy = ReshardPolicy(is_enabled=True, split_messages_per_s=10, partitions_max=16)
    route, past, times = first_route(LOGICAL, 1, ["a", "b"]), LoadHistory(), []
    for second in range(3600):
        loads = [
            PartitionLoad(
                p.number, p.range.width * 1e6, p.range.width * 1e6, 10**9, (1.0,) * p.range.width
            )
            for p in route.partitions
        ]
        found, past = decide(policy, route, loads, ["a", "b"], past, second * 1000)
        if found.operation is not None:
            assert isinstance(found.operation, Split)
            route = next_route(route, found.operation.change(route, change_id=f"{second}"))
            times.append(second)
    assert len(route.partitions) == 16
    assert len(times) == 15
    assert all(b - a >= 60 for a, b in pairwise(times)), "one change in a cool-down, at most"


def test_hazard_15_a_load_around_the_threshold_does_not_flip_flop() -> None:
    """One minute a little above, one minute a little below, for a day: split once, never merged
    again.
    """
    policy = replace(ReshardPolicy(is_enabled=True), merge_messages_per_s=9_999, merge_quiet_ms=0)
    route, past, operations = first_route(LOGICAL, 1, ["a"]), LoadHistory(), []
    for minute in range(24 * 60):
        rate = (10_500.0 if minute % 2 == 0 else 9_500.0) / LOGICAL
        loads = [
            PartitionLoad(
                p.number, rate * p.range.width, rate * p.range.width, 0, (rate,) * p.range.width
            )
            for p in route.partitions
        ]
        found, past = decide(policy, route, loads, ["a"], past, minute * 60_000)
        if found.operation is not None:
            operations.append(found.operation)
            route = next_route(route, found.operation.change(route, change_id=f"{minute}"))
    assert operations == [Split(1, (50,), ("a", "a"))]


def test_hazard_16_many_tiny_partitions_are_merged_once_the_load_is_gone() -> None:
    policy = ReshardPolicy(is_enabled=True, partitions_min=2)
    route, past, now_ms = first_route(LOGICAL, LOGICAL, ["a", "b"]), LoadHistory(), 0
    for _ in range(100_000):
        loads = [PartitionLoad(part.number, 1.0, 100.0, 0, ()) for part in route.partitions]
        found, past = decide(policy, route, loads, ["a", "b"], past, now_ms)
        if found.operation is not None:
            route = next_route(route, found.operation.change(route, change_id=f"{now_ms}"))
        elif len(route.partitions) == 2:
            break
        now_ms += 60_000
    assert len(route.partitions) == 2


def test_hazard_16_a_long_life_leaves_no_more_open_ranges_than_there_are_partitions() -> None:
    """A thousand changes later a group that keeps up has a frontier of one piece, and reads the
    latest route's partitions only.
    """
    routes = {1: first_route(LOGICAL, 4, ["a", "b"])}
    frontier = first_frontier(LOGICAL, 1)
    for version in range(1, 1001):
        route = routes[version]
        parts = route.partitions
        if version % 3 == 0:
            change = move(route, parts[version % len(parts)].number, "b", change_id="x")
        elif len(parts) > 4:
            at = version % (len(parts) - 1)
            change = merge(route, [part.number for part in parts[at : at + 2]], change_id="x")
        else:
            widest = max(parts, key=lambda part: part.range.width)
            change = split(
                route, widest.number, [widest.range.first + widest.range.width // 3], change_id="x"
            )
        routes[version + 1] = next_route(route, change)
        steps = advance_fully(frontier, Gate.LANES, routes, version + 1, lambda *_: True)
        frontier = steps[-1]
    assert frontier == first_frontier(LOGICAL, 1001)
    assert [each.partition for each in readable(frontier, routes)] == list(routes[1001].partitions)
