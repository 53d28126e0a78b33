"""Automatic resharding: decisions, their reasons, and that it becomes stable under any load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qmq_ordering.changes import first_route, next_route, split
from qmq_ordering.resharding import (
    LoadHistory,
    Merge,
    PartitionLoad,
    ReshardDecision,
    ReshardPolicy,
    Split,
    decide,
)
from qmq_ordering.routes import LpRange, PhysicalPartition, Route

from qmq.errors import InvalidArgument

POLICY = ReshardPolicy(is_enabled=True)
MINUTE = 60_000
NOW = 1_700_000_000_000


def route_of(*widths: int, group: str = "a") -> Route:
    parts, first = [], 0
    for number, width in enumerate(widths, start=1):
        parts.append(PhysicalPartition(number, LpRange(first, first + width), group))
        first += width
    return Route(1, first, len(widths) + 1, tuple(parts))


def load(
    route: Route,
    number: int,
    lp_load: Sequence[float],
    *,
    backlog: int = 0,
    message_bytes: float = 100.0,
) -> PartitionLoad:
    part = route.partition(number)
    assert part is not None
    assert part.range.width == len(lp_load)
    return PartitionLoad(
        number, sum(lp_load), sum(lp_load) * message_bytes, backlog, tuple(lp_load)
    )


def once(
    route: Route,
    loads: list[PartitionLoad],
    *,
    policy: ReshardPolicy = POLICY,
    groups: Sequence[str] = ("a",),
    past: LoadHistory | None = None,
) -> ReshardDecision:
    return decide(policy, route, loads, groups, LoadHistory(), NOW)[0]


def test_a_hot_partition_is_split_where_its_load_halves() -> None:
    route = route_of(4, 4)
    found = once(route, [load(route, 1, [0, 0, 6000, 6000]), load(route, 2, [500] * 4)])
    assert found.operation == Split(1, (3,), ("a", "a"))
    assert found.reasons == (
        (
            "Partition 1 takes 12,000 messages/s, above 10,000; it is to be split at logical "
            "partition 3."
        ),
    )


def test_one_hot_logical_partition_is_isolated() -> None:
    route = route_of(512)
    loads = [load(route, 1, [9000.0 if lp == 17 else 6.0 for lp in range(512)])]
    assert once(route, loads).operation == Split(1, (17, 18), ("a", "a", "a"))
    edge = [load(route, 1, [9000.0 if lp == 0 else 6.0 for lp in range(512)])]
    assert once(route, edge).operation == Split(1, (1,), ("a", "a"))


def test_with_room_for_one_partition_more_the_load_is_halved_as_well_as_can_be() -> None:
    route = route_of(5)
    found = once(
        route, [load(route, 1, [1, 1, 20_000, 1, 1])], policy=replace(POLICY, partitions_max=2)
    )
    assert isinstance(found.operation, Split)
    assert len(found.operation.at) == 1


def test_splitting_a_partition_of_one_logical_partition_is_an_error() -> None:
    route = route_of(1, 7)
    found = once(route, [load(route, 1, [12_000]), load(route, 2, [500] * 7)])
    assert found.operation is None
    assert "holds logical partition 0 only and cannot be split" in found.reasons[0]


def test_a_load_that_is_all_in_one_logical_partition_is_left_there() -> None:
    route = route_of(8)
    found = once(route, [load(route, 1, [0, 0, 0, 12_000, 0, 0, 0, 0])])
    assert found.operation is None
    assert "all of it is in logical partition 3" in found.reasons[0]


def test_the_next_hottest_is_split_if_the_hottest_cannot_be() -> None:
    route = route_of(1, 4)
    found = once(route, [load(route, 1, [90_000]), load(route, 2, [3000] * 4)])
    assert found.operation == Split(2, (3,), ("a", "a"))
    assert [reason.split(";")[0] for reason in found.reasons] == [
        "Partition 2 takes 12,000 messages/s, above 10,000",
        "Partition 1 takes 90,000 messages/s, above 10,000",
    ]


def test_bytes_and_backlog_make_hot_too() -> None:
    route = route_of(4)
    by_bytes = once(route, [load(route, 1, [1000] * 4, message_bytes=20_000)])
    assert "takes 80,000,000 bytes/s, above 50,000,000" in by_bytes.reasons[0]
    by_backlog = once(route, [load(route, 1, [1] * 4, backlog=2_000_000)])
    assert "has a backlog of 2,000,000 messages, above 1,000,000" in by_backlog.reasons[0]
    unknown = once(route, [PartitionLoad(1, 0.0, 0.0, 2_000_000, ())])
    assert (
        by_bytes.operation
        == by_backlog.operation
        == unknown.operation
        == Split(1, (2,), ("a", "a"))
    )


def test_the_heaviest_part_goes_to_the_least_loaded_group_and_the_lightest_stays() -> None:
    route = route_of(4)
    loads = [load(route, 1, [1000, 20_000, 500, 400])]
    found = once(route, loads, groups=["c", "a", "b"])
    assert found.operation == Split(1, (1, 2), ("b", "c", "a"))
    assert once(route, loads, groups=["c"]).operation == Split(1, (1, 2), ("c", "c", "c"))
    assert once(route, loads, groups=[]).operation == Split(1, (1, 2), ())


def test_cold_neighbours_are_merged_when_they_were_cold_for_long() -> None:
    route = route_of(4, 4, 4)
    loads = [load(route, 1, [900] * 4), load(route, 2, [10] * 4), load(route, 3, [20] * 4)]
    first, past = decide(POLICY, route, loads, ["a"], LoadHistory(), NOW)
    assert first == ReshardDecision(
        None,
        (
            "Partitions 2 and 3 have been cold for 0 s: together 120 messages/s and 12,000 "
            "bytes/s, "
            "below 1,000 and 5,000,000; they are to be merged when that has lasted 300 s.",
        ),
    )
    later, past = decide(
        POLICY, route, loads, ["a"], LoadHistory.decode(past.encode()), NOW + 5 * MINUTE - 1
    )
    assert later.operation is None
    ripe, past = decide(POLICY, route, loads, ["a"], past, NOW + 5 * MINUTE)
    assert ripe.operation == Merge((2, 3), "a")
    assert past.changed_ms == NOW + 5 * MINUTE


def test_a_warm_moment_starts_the_quiet_time_again() -> None:
    route = route_of(4, 4)
    cold = [load(route, 1, [1] * 4), load(route, 2, [1] * 4)]
    _, past = decide(POLICY, route, cold, ["a"], LoadHistory(), NOW)
    _, past = decide(
        POLICY, route, [cold[0], load(route, 2, [300] * 4)], ["a"], past, NOW + 4 * MINUTE
    )
    found, past = decide(POLICY, route, cold, ["a"], past, NOW + 6 * MINUTE)
    assert found.operation is None
    assert past.cold_since_ms == {(1, 2): NOW + 6 * MINUTE}


def test_nothing_is_merged_that_would_be_more_than_half_of_hot() -> None:
    route = route_of(4, 4)
    policy = replace(POLICY, split_messages_per_s=1500.0, merge_quiet_ms=0)
    warm = [load(route, 1, [100] * 4), load(route, 2, [100] * 4)]
    assert once(route, warm, policy=policy).operation is None
    waiting = [load(route, 1, [1] * 4, backlog=300_000), load(route, 2, [1] * 4, backlog=300_000)]
    assert once(route, waiting, policy=policy).operation is None
    cold = [load(route, 1, [90] * 4), load(route, 2, [90] * 4)]
    assert once(route, cold, policy=policy).operation == Merge((1, 2), "a")


def test_a_merge_lives_where_there_is_least_load_already() -> None:
    one = first_route(8, 2, ["a", "b"])
    cold = [load(one, 1, [1] * 4), load(one, 2, [1] * 4)]
    policy = replace(POLICY, merge_quiet_ms=0)
    assert once(one, cold, policy=policy, groups=["c", "b", "a"]).operation == Merge((1, 2), "b")
    assert once(one, cold, policy=policy, groups=["c"]).operation == Merge((1, 2), "c")
    assert once(one, cold, policy=policy, groups=[]).operation == Merge((1, 2), "")


def test_silence_is_not_coldness() -> None:
    route = route_of(4, 4)
    found = once(route, [load(route, 1, [1] * 4)], policy=replace(POLICY, merge_quiet_ms=0))
    assert found.operation is None
    assert "Partition 2 is left alone: no figures came from its broker group a." in found.reasons
    assert once(route, []).reasons[0] == "Nothing is known of the load of any partition."


def test_the_limits_of_the_policy_hold_and_are_named() -> None:
    route = route_of(4, 4)
    hot = [load(route, 1, [9000] * 4), load(route, 2, [900] * 4)]
    full = once(route, hot, policy=replace(POLICY, partitions_max=2))
    assert full.operation is None
    assert "has 2 partitions and may have 2" in full.reasons[0]
    cold = [load(route, 1, [1] * 4), load(route, 2, [1] * 4)]
    few = once(route, cold, policy=replace(POLICY, partitions_min=2, merge_quiet_ms=0))
    assert few.operation is None
    assert "has 2 and shall have 2" in few.reasons[0]


def test_behind_any_change_there_is_a_cool_down() -> None:
    route = route_of(8)
    hot = [load(route, 1, [2000] * 8)]
    _, past = decide(POLICY, route, hot, ["a"], LoadHistory(), NOW)
    found, past = decide(POLICY, route, hot, ["a"], past, NOW + 20_000)
    assert found.operation is None
    assert (
        found.reasons[-1]
        == "Nothing is done yet: the last change was 20 s ago, and the cool-down is 60 s."
    )
    assert decide(POLICY, route, hot, ["a"], past, NOW + MINUTE)[0].operation is not None


def test_a_change_made_by_another_is_noticed() -> None:
    route = route_of(8)
    calm = [load(route, 1, [1000] * 8)]
    _, past = decide(POLICY, route, calm, ["a"], LoadHistory(), NOW)
    other = next_route(route, split(route, 1, [1], change_id="by hand"))
    hot = [load(other, 2, [9]), load(other, 3, [9000] * 7)]
    found, past = decide(POLICY, other, hot, ["a"], past, NOW + 10 * MINUTE)
    assert found.operation is None
    assert past.changed_ms == NOW + 10 * MINUTE


def test_a_clock_that_was_ahead_holds_nothing_up_for_longer_than_the_cool_down() -> None:
    route = route_of(8)
    hot = [load(route, 1, [2000] * 8)]
    past = LoadHistory(version=1, changed_ms=NOW + 1_000_000_000)
    found, past = decide(POLICY, route, hot, ["a"], past, NOW)
    assert found.operation is None
    assert decide(POLICY, route, hot, ["a"], past, NOW + MINUTE)[0].operation is not None


def test_a_policy_that_is_off_explains_and_does_nothing() -> None:
    route = route_of(8)
    found, past = decide(
        ReshardPolicy(), route, [load(route, 1, [2000] * 8)], ["a"], LoadHistory(), NOW
    )
    assert found.operation is None
    assert found.reasons[0].startswith("Automatic resharding is off")
    assert "it is to be split at logical partition 4" in found.reasons[1]
    assert past.changed_ms is None


def test_a_calm_cluster_is_reported_with_figures() -> None:
    route = route_of(4, 4)
    found = once(route, [load(route, 1, [900] * 4), load(route, 2, [1000] * 4)])
    assert found.reasons == (
        (
            "No partition is hot and no neighbours are cold: of 2, partition 2 takes most, 4,000 "
            "messages/s and 400,000 bytes/s."
        ),
    )


def test_operations_say_what_they_are_and_become_changes() -> None:
    route = route_of(8, 8)
    division, union = Split(1, (2, 3), ("a", "b", "a")), Merge((1, 2), "b")
    assert (str(division), str(union)) == ("split 1 at 2 3 onto a b a", "merge 1 2 onto b")
    assert (str(Split(1, (2,), ())), str(Merge((1, 2), ""))) == ("split 1 at 2", "merge 1 2")
    change = division.change(route, change_id="x", reason="hot")
    assert ([part.group for part in change.targets], change.reason) == (["a", "b", "a"], "hot")
    assert union.change(route, change_id="y").sources == (1, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"split_messages_per_s": 0},
        {"split_bytes_per_s": float("nan")},
        {"split_backlog": -1},
        {"merge_messages_per_s": -1},
        {"merge_quiet_ms": -1},
        {"cool_down_ms": -1},
        {"partitions_min": 0},
        {"partitions_min": 5, "partitions_max": 4},
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument):
        ReshardPolicy(**wrong)  # type: ignore[arg-type]


def test_stored_values_come_back() -> None:
    policy = ReshardPolicy(is_enabled=True, split_backlog=7, partitions_max=9)
    assert ReshardPolicy.decode(policy.encode()) == policy
    past = LoadHistory(4, 17, {(1, 2): 5, (9, 3): 6})
    assert LoadHistory.decode(past.encode()) == past
    assert LoadHistory.decode(LoadHistory().encode()) == LoadHistory()


LP_LOADS = st.lists(
    st.one_of(st.integers(0, 30), st.sampled_from([0, 0, 0, 50, 400])), min_size=1, max_size=24
)
POLICIES = st.builds(
    ReshardPolicy,
    is_enabled=st.just(True),
    split_messages_per_s=st.sampled_from([5.0, 40.0, 100.0]),
    split_bytes_per_s=st.sampled_from([4000.0, 1e9]),
    split_backlog=st.sampled_from([30, 10**9]),
    merge_messages_per_s=st.sampled_from([0.0, 3.0, 30.0, 1000.0]),
    merge_bytes_per_s=st.just(1e9),
    merge_quiet_ms=st.sampled_from([0, 90_000]),
    cool_down_ms=st.sampled_from([0, 60_000]),
    partitions_min=st.sampled_from([1, 3]),
    partitions_max=st.sampled_from([3, 8, 64]),
)


def looked_at(route: Route, lp_loads: Sequence[float]) -> list[PartitionLoad]:
    """Loads that are constant for each logical partition, backlog included."""
    found = []
    for part in route.partitions:
        mine = lp_loads[part.range.first : part.range.end]
        found.append(
            PartitionLoad(part.number, sum(mine), sum(mine) * 100.0, int(sum(mine)), tuple(mine))
        )
    return found


@given(LP_LOADS, POLICIES, st.data())
def test_any_constant_load_settles(
    lp_loads: list[float], policy: ReshardPolicy, data: st.DataObject
) -> None:
    """There are fewer splits than logical partitions, and fewer merges than partitions that ever
    existed; then nothing changes.
    """
    route = first_route(len(lp_loads), data.draw(st.integers(1, len(lp_loads))), ["a", "b"])
    begun = len(route.partitions)
    past, now_ms, splits, merges, quiet = LoadHistory(), NOW, 0, 0, 0
    while quiet < 6:
        found, past = decide(policy, route, looked_at(route, lp_loads), ["b", "a"], past, now_ms)
        assert found.reasons
        quiet = 0 if found.operation else quiet + 1
        if found.operation is not None:
            count = len(route.partitions)
            route = next_route(route, found.operation.change(route, change_id=f"{now_ms}"))
            splits += isinstance(found.operation, Split)
            merges += isinstance(found.operation, Merge)
            assert count >= len(route.partitions) or len(route.partitions) <= policy.partitions_max
            assert count <= len(route.partitions) or len(route.partitions) >= policy.partitions_min
        assert splits < len(lp_loads)
        assert merges < begun + 2 * len(lp_loads)
        now_ms += 30_000


@given(LP_LOADS, st.data())
def test_what_settled_has_nothing_hot_that_could_be_split(
    lp_loads: list[float], data: st.DataObject
) -> None:
    policy = ReshardPolicy(
        is_enabled=True, split_messages_per_s=40, merge_messages_per_s=0, cool_down_ms=0
    )
    route = first_route(len(lp_loads), data.draw(st.integers(1, min(3, len(lp_loads)))), ["a"])
    past = LoadHistory()
    while (found := decide(policy, route, looked_at(route, lp_loads), ["a"], past, NOW))[
        0
    ].operation is not None:
        operation, past = found[0].operation, found[1]
        assert operation is not None
        route = next_route(route, operation.change(route, change_id="x"))
    for part in looked_at(route, lp_loads):
        assert part.messages_per_s <= 40 or sum(each > 0 for each in part.lp_load) == 1
