"""The plan of a run of ordered faults is possible, spread over the run, and the same for the same
seed.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from random import Random

import pytest
from cluster_runner.compose import COMPOSE_FILE, resolve, services, waves
from hypothesis import given
from hypothesis import strategies as st
from qmq_ordering.changes import merge, move, next_route, split
from qmq_ordering.routes import LpRange, PhysicalPartition, Route
from system.group import Shape, shaped
from system.ordered_workload import (
    CHANGES,
    KILLS,
    PARTITIONS_MAX,
    evacuation,
    held_by,
    operation,
    plan,
    worth_harming,
)

from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

GROUPS = ["g1", "g2", "g3"]


def as_message(route: Route) -> pb.OrderedRoute:
    parts = [
        pb.OrderedPartition(
            number=part.number,
            lps=control.LpRange(first=part.range.first, end=part.range.end),
            broker_group=part.group,
        )
        for part in route.partitions
    ]
    return pb.OrderedRoute(
        version=route.version, logical_partitions=route.logical_partitions, partitions=parts
    )


def first_route(count: int) -> Route:
    return Route(1, count, 2, (PhysicalPartition(1, LpRange(0, count), "g1"),))


@given(
    st.integers(0, 1 << 20),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(0, 5),
    st.booleans(),
)
def test_a_plan_has_what_was_asked_for_in_the_order_of_time(
    seed: int, changes: int, kills: int, freezes: int, can_cut: bool
) -> None:
    chosen, faults = plan(
        seed, changes=changes, kills=kills, freezes=freezes, seconds=30.0, can_cut=can_cut
    )
    assert (len(chosen), len(faults)) == (changes, kills + freezes)
    for steps in (chosen, faults):
        assert [step.at_s for step in steps] == sorted(step.at_s for step in steps)
        assert all(0 <= step.at_s <= 30.0 for step in steps)
    assert {step.kind for step in chosen} <= set(CHANGES)
    kinds = [step.kind for step in faults]
    assert set(kinds) <= {*KILLS, "freeze-group", *(["cut-group"] if can_cut else [])}
    assert kills < len(KILLS) or set(KILLS) <= set(kinds), "one of each kind, if there are enough"
    assert (chosen, faults) == plan(
        seed, changes=changes, kills=kills, freezes=freezes, seconds=30.0, can_cut=can_cut
    )


@given(
    st.integers(0, 1 << 20),
    st.integers(1, 12),
    st.lists(st.sampled_from(["split", "merge", "move"]), max_size=40),
)
def test_a_chosen_change_can_be_made_whatever_the_route_is(
    seed: int, lps: int, kinds: list[str]
) -> None:
    coin, route = Random(seed), first_route(lps)
    for kind in kinds:
        ((name, wanted),) = operation(coin, kind, as_message(route), GROUPS).items()
        if isinstance(wanted, pb.SplitOperation):
            change = split(
                route,
                wanted.partition,
                list(wanted.at),
                change_id="c",
                groups=list(wanted.broker_groups),
            )
        elif isinstance(wanted, pb.MergeOperation):
            change = merge(route, list(wanted.partitions), change_id="c", group=wanted.broker_group)
        else:
            assert isinstance(wanted, pb.MoveOperation)
            change = move(route, wanted.partition, wanted.broker_group, change_id="c")
        route = next_route(route, change)
        assert name in ("split", "merge", "move")
        assert len(route.partitions) <= PARTITIONS_MAX


def test_an_evacuation_moves_all_of_a_groups_partitions_and_no_others() -> None:
    parts = tuple(
        PhysicalPartition(at + 1, LpRange(at, at + 1), f"g{at % 2 + 1}") for at in range(4)
    )
    moves = evacuation(as_message(Route(3, 4, 5, parts)), "g1", GROUPS, Random(1))
    assert [each.partition for each in moves] == [1, 3]
    assert {each.broker_group for each in moves} <= {"g2", "g3"}


@given(st.lists(st.tuples(st.integers(1, 400), st.sampled_from(GROUPS)), min_size=1, max_size=8))
def test_a_victim_group_always_has_at_least_half_of_an_even_share(
    parts: list[tuple[int, str]],
) -> None:
    ends = list(accumulate(width for width, _ in parts))
    placed = [
        PhysicalPartition(at + 1, LpRange(end - width, end), group)
        for at, (end, (width, group)) in enumerate(zip(ends, parts, strict=True))
    ]
    route = as_message(Route(1, ends[-1], len(parts) + 1, tuple(placed)))
    worthy = worth_harming(route, GROUPS)
    assert worthy
    widths = {group: len(held_by(route, group)) for group in GROUPS}
    assert sum(widths.values()) == ends[-1]
    assert all(
        (widths[group] >= ends[-1] / len(GROUPS) / 2) == (group in worthy) for group in GROUPS
    )


@pytest.mark.parametrize("shape", [Shape(), Shape(etcds=3, metas=1, groups=3, replicas=1)])
def test_a_shaped_file_is_one_that_compose_takes(shape: Shape, tmp_path: Path) -> None:
    file = tmp_path / "compose.json"
    file.write_text(to_json(shape))
    found = services(resolve(file, {}))
    replicas = [name for names in shape.replica_names.values() for name in names]
    assert set(found) == {*shape.etcd_names, *shape.meta_names, *replicas}
    assert waves(found, found)[0] == shape.etcd_names
    assert len({found[name].environment["QMQ_DATA_PORT"] for name in replicas}) == len(replicas)
    assert {name: found[name].environment["QMQ_REPLICAS"] for name in ("g1-a", replicas[-1])} == {
        name: ",".join(shape.replica_names[name.split("-")[0]]) for name in ("g1-a", replicas[-1])
    }
    assert all(found[name].volumes == {"/data": name} for name in replicas)
    assert found["meta0"].environment["QMQ_ETCD"].count(":2379") == shape.etcds


def to_json(shape: Shape) -> str:
    return json.dumps(shaped(resolve(COMPOSE_FILE, {}), shape))
