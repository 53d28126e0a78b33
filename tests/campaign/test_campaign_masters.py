"""The checkers of masters report each broken rule, and two faults are healed in their order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from history.events import History, Operation, Recorder, Reset, load

from campaign import table
from campaign.checkers.masters import MasterLook, ReplicaSeen
from campaign.faults.pairs import both
from campaign.values import Evidence, Fault, Strikes, Striking, Struck

SECOND = 1_000_000_000


def seen(replica: str, epoch: int, commit: int, *, serves: bool = True) -> ReplicaSeen:
    return ReplicaSeen("g1", replica, epoch, commit, serves)


def look(at_s: float, *states: ReplicaSeen) -> list[Operation]:
    begun = MasterLook(process="w", type="invoke", t_ns=int(at_s * SECOND))
    ended = MasterLook(process="w", type="ok", t_ns=int(at_s * SECOND) + 1, states=states)
    return [begun, ended]


def found_in(events: Sequence[Operation]) -> dict[str, int]:
    evidence = Evidence(history=History(events), is_drained=True)  # type: ignore[arg-type]
    found = {
        name: len(list(table.checkers()[name].find(evidence)))
        for name in ("one_master", "commit_stays")
    }
    return {name: count for name, count in found.items() if count}


def test_masters_that_follow_each_other_break_no_rule() -> None:
    assert (
        found_in(
            [
                *look(1, seen("a", 1, 10), seen("b", 1, 9, serves=False)),
                *look(2, seen("a", 1, 12), seen("b", 2, 12)),
                *look(3, seen("b", 2, 13), seen("a", 2, 12, serves=False)),
            ]
        )
        == {}
    )


def test_two_masters_of_one_epoch_are_reported() -> None:
    assert found_in([*look(1, seen("a", 1, 1)), *look(2, seen("b", 1, 1))]) == {"one_master": 1}


def test_two_masters_at_one_time_are_reported_when_it_lasts() -> None:
    two = (seen("a", 1, 5), seen("b", 2, 5))
    assert found_in([*look(1, *two), *look(3, *two)]) == {}
    assert found_in([*look(1, *two), *look(3, *two), *look(5, *two)]) == {"one_master": 1}
    between = look(3, seen("b", 2, 5))
    assert found_in([*look(1, *two), *between, *look(5, *two)]) == {}


def test_a_commit_that_a_later_master_lacks_is_reported() -> None:
    before = look(1, seen("a", 1, 10), seen("b", 1, 8, serves=False))
    assert found_in([*before, *look(2, seen("b", 2, 8, serves=False))]) == {}
    assert found_in([*before, *look(2, seen("b", 2, 8))]) == {"commit_stays": 1}
    forgets: Operation = Reset(process="nemesis", type="invoke", t_ns=2 * SECOND)
    assert found_in([*before, forgets, *look(3, seen("b", 2, 8))]) == {}


def test_a_look_is_a_line_of_a_history(tmp_path: Any) -> None:
    with Recorder(tmp_path / "h.jsonl") as recorder:
        written = recorder.record(look(1, seen("a", 1, 10))[1])
    assert load(tmp_path / "h.jsonl") == [written]


def fault_of(name: str, told: list[str], effect: str = "seen") -> Fault:
    @asynccontextmanager
    async def strike(_: Any) -> Striking:
        told.append(f"{name} begins")
        try:
            yield Struck(targets=(name,), effect=effect and f"{name} {effect}")
        finally:
            told.append(f"{name} is healed")

    found: Strikes = strike
    return Fault(name=name, what=name, strike=found, hits=frozenset({"brokers"}))


WORLD: Any = SimpleNamespace(random=SimpleNamespace(uniform=lambda low, high: 0.0))
"""With chance alone."""


@pytest.mark.parametrize(("crossed", "order"), [(False, ["two", "one"]), (True, ["one", "two"])])
async def test_two_faults_are_healed_in_their_order(crossed: bool, order: list[str]) -> None:
    told: list[str] = []
    pair = both(fault_of("one", told), fault_of("two", told), crossed=crossed)
    async with pair.strike(WORLD) as struck:
        assert struck == Struck(targets=("one", "two"), effect="one seen; two seen")
    assert told == ["one begins", "two begins", *(f"{name} is healed" for name in order)]


async def test_a_pair_of_which_one_was_not_met_was_not_met() -> None:
    told: list[str] = []
    pair = both(fault_of("one", told), fault_of("two", told, effect=""))
    async with pair.strike(WORLD) as struck:
        assert struck.effect == ""


async def test_both_are_healed_when_the_block_fails() -> None:
    told: list[str] = []
    pair = both(fault_of("one", told), fault_of("two", told), crossed=True)
    with pytest.raises(ValueError, match="mine"):
        async with pair.strike(WORLD):
            raise ValueError("mine")
    assert {"one is healed", "two is healed"} <= set(told)
