"""Traces of simulated groups are behaviours of the specifications, and traces of groups with planted bugs are not (docs/JUDGES.md).
`scripts/traces` checks more seeds, for a given time.
"""

from __future__ import annotations

import random
from pathlib import Path

import forms
import pytest
from sim.bugs import BUGS

from specs.model_checker import is_there
from specs.replication_traces import check_seed

pytestmark = [pytest.mark.long, pytest.mark.rotating, pytest.mark.skipif(not is_there(), reason="needs Java, and TLC: scripts/judges")]

REFUSED_AT = {
    "commit without the others": 1,
    "commit entries of an older epoch by counting": 2,
    "answer a promise request without promising": 5,
    "skip the promises": 1,
    "count half as a majority": 1,
}
"""Planted bugs of the simulator, with a seed at which the specification does not allow what they do."""


def test_a_simulated_group_does_what_the_specification_allows(tmp_path: Path) -> None:
    for seed in random.Random(forms.SEED).sample(range(100_000), 3):
        verdict = check_seed(seed, 400, tmp_path / str(seed))
        assert verdict.is_accepted, f"seed {seed}: line {verdict.taken + 1} of {verdict.lines}: {verdict.refused}"


@pytest.mark.parametrize(("bug", "seed"), REFUSED_AT.items())
def test_what_a_planted_bug_does_is_refused(bug: str, seed: int, tmp_path: Path) -> None:
    verdict = check_seed(seed, 400, tmp_path, BUGS[bug])
    assert not verdict.is_accepted
