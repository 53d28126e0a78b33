"""The judge of delayed messages finds planted violations."""

from __future__ import annotations

import pytest
from system.delay_workload import Sight, Wish, judge, out_of_order


def _acked(number: int, due: int, **more: bool) -> Wish:
    return Wish(number, 0, {due}, is_acked=True, **more)


def test_what_came_once_and_in_time_is_fine() -> None:
    verdict = judge(
        [_acked(1, 100), _acked(2, 200)], [Sight(1, "q", 0, 100), Sight(2, "q", 1, 650)]
    )
    assert verdict.anomalies == []
    assert verdict.lateness_ms == [0, 450]


def test_one_stored_copy_seen_twice_counts_once() -> None:
    assert judge([_acked(1, 100)], [Sight(1, "q", 0, 100), Sight(1, "q", 0, 100)]).anomalies == []


@pytest.mark.parametrize(
    ("wish", "sights", "says"),
    [
        (_acked(1, 100), [], "never came"),
        (_acked(1, 100), [Sight(1, "q", 0, 100), Sight(1, "q", 7, 100)], "2 times"),
        (_acked(1, 100), [Sight(1, "q", 0, 100), Sight(1, "r", 0, 100)], "2 times"),
        (_acked(1, 100), [Sight(1, "q", 0, 99)], "early"),
        (_acked(1, 100, is_cancelled=True), [Sight(1, "q", 0, 100)], "was cancelled"),
        (Wish(1, 0, {100}, is_refused=True), [Sight(1, "q", 0, 100)], "was refused"),
        (_acked(1, 100), [Sight(1, "q", 0, 100), Sight(2, "q", 1, 100)], "never sent"),
    ],
)
def test_each_broken_promise_is_found(wish: Wish, sights: list[Sight], says: str) -> None:
    assert any(says in each for each in judge([wish], sights).anomalies)


def test_a_message_with_unknown_outcome_may_come_or_not() -> None:
    wishes = [Wish(1, 0, {100}), Wish(2, 0, {100}), _acked(3, 100, may_be_cancelled=True)]
    assert judge(wishes, [Sight(1, "q", 0, 100)]).anomalies == []


def test_order_is_by_due_time_then_by_send() -> None:
    wishes = [Wish(1, 7, {200}), Wish(2, 7, {100}), Wish(3, 7, {100}), Wish(4, 8, {50})]
    right = [Sight(number, "q", at, 0) for at, number in enumerate((2, 3, 4, 1))]
    assert out_of_order(wishes, right) == []
    assert out_of_order(wishes, [right[1], right[0], *right[2:]])
    assert out_of_order(wishes, [right[3], *right[:3]])
