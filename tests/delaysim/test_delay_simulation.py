"""The delivery of delayed messages, simulated: seeds without a fault, and planted bugs that are
found.
"""

from __future__ import annotations

import pytest
from delaysim.run import BUGS, planted, simulate
from support import forms

SEEDS = forms.seeds(gate=3, every=6, changing=1)
TRIES = 3
MINUTES = 6


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_early_lost_doubled_or_out_of_order(seed: int) -> None:
    result = simulate(seed, MINUTES)
    assert not result.failure, result.failure
    assert result.delivered > 100


def test_recurring_messages_run_in_the_simulation() -> None:
    assert any(simulate(seed, MINUTES).runs for seed in range(1, 4))


@pytest.mark.parametrize("bug", forms.some(BUGS))
def test_a_planted_bug_is_found(bug: str) -> None:
    with planted(bug):
        assert any(simulate(seed, MINUTES).failure for seed in range(1, TRIES + 1)), bug


def test_a_seed_is_the_same_twice() -> None:
    assert simulate(3, 3) == simulate(3, 3)
