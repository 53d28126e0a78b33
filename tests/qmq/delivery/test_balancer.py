"""The balancer alone: with any groups that appear, fill up, stall and are drained, each batch goes
to a group with room, and every group gets some.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from support.forms import examples

from qmq.delivery.balancer import BATCH_COST_BYTES, Balancer


@dataclass(eq=False)
class FakeGroup:
    name: str
    is_writable: bool = False
    is_stalled: bool = False
    room: int = 1 << 40


def balancer(
    groups: dict[str, bool], *, stay_bytes: int = 0
) -> tuple[Balancer[FakeGroup], dict[str, FakeGroup]]:
    made: dict[str, FakeGroup] = {}

    def make(name: str) -> FakeGroup:
        assert name not in made
        made[name] = FakeGroup(name)
        return made[name]

    found = Balancer(make, lambda group, size: group.room >= size, stay_bytes=stay_bytes)
    found.learn(groups)
    return found, made


def picked(found: Balancer[FakeGroup], batches: int, size: int = 1) -> list[str]:
    names = []
    for _ in range(batches):
        group = found.pick(size)
        assert group is not None
        found.charge(size)
        names.append(group.name)
    return names


GROUP = st.tuples(st.sampled_from("abcde"), st.booleans(), st.booleans(), st.integers(0, 3))


@settings(max_examples=examples(300), deadline=None)
@given(
    stay_batches=st.integers(0, 3),
    rounds=st.lists(
        st.tuples(st.lists(GROUP, max_size=5), st.integers(0, 3)), min_size=1, max_size=8
    ),
)
def test_a_batch_goes_to_a_group_that_can_take_it_if_there_is_any(
    stay_batches: int, rounds: list[tuple[list[tuple[str, bool, bool, int]], int]]
) -> None:
    found, made = balancer({}, stay_bytes=stay_batches * BATCH_COST_BYTES)
    for states, size in rounds:
        found.learn({name: is_writable for name, is_writable, _, _ in states})
        for name, is_writable, is_stalled, room in states:
            made[name].is_stalled, made[name].room = is_stalled, room
            made[name].is_writable = is_writable
        named = {name for name, _, _, _ in states}
        assert not any(group.is_writable for name, group in made.items() if name not in named), (
            "a group that is no more gets nothing"
        )
        assert found.is_writable == any(group.is_writable for group in made.values())
        able = [group for group in made.values() if group.is_writable and group.room >= size]
        healthy = [group for group in able if not group.is_stalled]
        group = found.pick(size)
        assert group in (healthy or able or [None])
        assert found.pick(size) is not None or not able
        found.charge(size)


@settings(max_examples=examples(100), deadline=None)
@given(count=st.integers(1, 5), stay_batches=st.integers(0, 4), first=st.integers(0, 4))
def test_groups_that_can_take_all_get_the_same_share(
    count: int, stay_batches: int, first: int
) -> None:
    names = [str(number) for number in range(count)]
    found = Balancer(
        FakeGroup,
        lambda *_: True,
        stay_bytes=stay_batches * (BATCH_COST_BYTES + 1),
        first=lambda among: first % among,
    )
    found.learn(dict.fromkeys(names, True))
    turn = max(stay_batches, 1)
    shares = Counter(picked(found, 3 * count * turn))
    assert shares == dict.fromkeys(names, 3 * turn)


def test_a_group_keeps_its_turn_until_enough_has_left() -> None:
    found, _ = balancer({"a": True, "b": True}, stay_bytes=3 * BATCH_COST_BYTES)
    assert picked(found, 9) == ["b", "b", "b", "a", "a", "a", "b", "b", "b"]
    assert picked(found, 3, size=3 * BATCH_COST_BYTES) == ["a", "b", "a"]


def test_a_group_without_room_is_skipped_and_loses_its_turn() -> None:
    heard: list[tuple[str | None, list[str]]] = []
    found = Balancer(
        FakeGroup,
        lambda group, size: group.room >= size,
        stay_bytes=10 * BATCH_COST_BYTES,
        turned=lambda chosen, passed: heard.append(
            (chosen and chosen.name, [group.name for group in passed])
        ),
    )
    found.learn({"a": True, "b": True, "c": True, "d": False})
    assert picked(found, 2) == ["b", "b"]
    for group in found:
        group.room = 5 if group.name == "a" else 0
    assert picked(found, 2) == ["a", "a"]
    assert found.pick(6) is None
    assert heard == [("b", []), ("a", ["c"]), (None, ["b", "c", "a"])]


def test_a_stalled_group_is_used_only_if_there_is_no_other_and_gets_no_turn() -> None:
    found, made = balancer({"a": True, "b": True}, stay_bytes=10 * BATCH_COST_BYTES)
    assert picked(found, 1) == ["b"]
    made["b"].is_stalled = True
    assert picked(found, 2) == ["a", "a"]
    made["a"].room = 0
    assert picked(found, 1) == ["b"]
    made["a"].room = 5
    assert picked(found, 2) == ["a", "a"]
