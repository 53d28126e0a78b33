"""Ordered subjects in the store: keys sort as their numbers do, values survive a round trip, and
listings are parsed.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qmq_coordination.coordination_store import KeyValue
from qmq_coordination.ordered_records import (
    LEADER,
    ROUTES,
    Fence,
    MemberRecord,
    OrderedState,
    assignment_key,
    change_key,
    decision_key,
    fence_key,
    group_record_key,
    groups_prefix,
    latest_key,
    member_key,
    ordered_state,
    policy_key,
    route_key,
)
from qmq_ordering.lanes import Assignment, Frontier, FrontierPiece, Gate, GroupRecord, Lane
from qmq_ordering.routes import FENCED, Change, ChangeKind, LpRange, Phase, PhysicalPartition, Route

NUMBERS = st.integers(1, 9_999_999_999)


@given(NUMBERS, NUMBERS)
def test_hazard_11_keys_sort_as_their_numbers_do_far_beyond_32_bits(one: int, other: int) -> None:
    for key in (route_key, change_key):
        assert (key("s", one) < key("s", other)) == (one < other)
    assert (fence_key("g", "s", one) < fence_key("g", "s", other)) == (one < other)


@given(NUMBERS)
def test_hazard_11_values_keep_numbers_of_any_width(number: int) -> None:
    part = PhysicalPartition(number, LpRange(0, 10), "g")
    for value in (
        Route(number, 10, number + 1, (part,)),
        Change(
            "id",
            ChangeKind.MOVE,
            number,
            (number,),
            (part,),
            Phase.SEALED,
            {number: number, 1: FENCED},
            "why",
            {"sealed": number},
        ),
        GroupRecord(
            Frontier(
                (FrontierPiece(LpRange(0, 5), number), FrontierPiece(LpRange(5, 10), number + 1))
            ),
            Gate.STRICT,
            "latest",
            False,
        ),
        Assignment(number, ((Lane(number, LpRange(0, 10), "g", number), "x"),)),
        Fence("id", number),
        MemberRecord("x", "1", number),
    ):
        assert type(value).decode(value.encode()) == value


def test_keys_are_apart_where_one_name_begins_with_another() -> None:
    assert not group_record_key("ab", "g").startswith(groups_prefix("a"))
    assert not member_key("s", "gh", "x").startswith(member_key("s", "g", ""))
    assert member_key("s", "g", "x").startswith(member_key("s", "g", ""))
    assert (
        len(
            {
                LEADER,
                policy_key("s"),
                decision_key("s"),
                latest_key("s"),
                assignment_key("s", "g"),
                groups_prefix("s"),
            }
        )
        == 6
    )


def item(key: str, value: bytes) -> KeyValue:
    return KeyValue(key, value, 1, 1, 1)


def route(version: int, *parts: tuple[int, int, int, str]) -> KeyValue:
    partitions = tuple(
        PhysicalPartition(number, LpRange(first, end), group) for number, first, end, group in parts
    )
    return item(route_key("s", version), Route(version, 10, 9, partitions).encode())


def change(to_version: int, phase: Phase, sealed: dict[int, int]) -> KeyValue:
    target = PhysicalPartition(to_version + 1, LpRange(0, 5), "c")
    found = Change(
        f"c{to_version}",
        ChangeKind.MOVE,
        to_version,
        tuple(sealed) or (1,),
        (target,),
        phase,
        sealed,
    )
    return item(change_key("s", to_version), found.encode())


@pytest.fixture
def state() -> OrderedState:
    return ordered_state(
        "s",
        [
            route(1, (1, 0, 5, "a"), (2, 5, 10, "b")),
            route(2, (3, 0, 5, "c"), (2, 5, 10, "b")),
            change(2, Phase.DONE, {1: FENCED}),
            item(latest_key("s"), b"2"),
            item(
                group_record_key("s", "g"),
                GroupRecord(Frontier((FrontierPiece(LpRange(0, 10), 1),))).encode(),
            ),
            item(policy_key("s"), b"{}"),
        ],
    )


def test_a_listing_is_the_subjects_state(state: OrderedState) -> None:
    assert state.route is state.routes[2]
    assert state.broker_groups == ["a", "b", "c"]
    assert [state.partition(number) and state.partition(number).range for number in (1, 2, 3)] == [  # type: ignore[union-attr]
        LpRange(0, 5),
        LpRange(5, 10),
        LpRange(0, 5),
    ]
    assert state.partition(7) is None
    assert list(state.groups) == ["g"]
    assert policy_key("s") in state.items
    state.drop(group_record_key("s", "g"))
    assert (state.groups, state.pending) == ({}, None)


def test_a_partition_is_fenced_until_its_seal_is_known(state: OrderedState) -> None:
    assert state.fenced == [1]
    state.put(change(3, Phase.SEALED, {2: FENCED}))
    assert (state.fenced, state.pending and state.pending.to_version) == ([1], 3)
    state.put(item(latest_key("s"), b"3"))
    assert state.fenced == [1, 2]
    state.put(change(2, Phase.DONE, {1: 77}))
    assert state.fenced == [2]


def test_only_a_prepared_or_sealed_change_is_under_way(state: OrderedState) -> None:
    for phase, is_under_way in (
        (Phase.PREPARED, True),
        (Phase.SEALED, True),
        (Phase.PUBLISHED, False),
        (Phase.DONE, False),
    ):
        state.put(change(3, phase, {}))
        assert (state.pending is not None) == is_under_way


def test_every_key_lies_where_the_view_looks_for_it() -> None:
    for key in (
        route_key("s", 1),
        change_key("s", 1),
        latest_key("s"),
        policy_key("s"),
        decision_key("s"),
        group_record_key("s", "g"),
    ):
        assert key.startswith(f"{ROUTES}s/")
