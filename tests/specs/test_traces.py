"""Traces of simulated groups are behaviours of the specifications, and traces of groups with
planted bugs are not (docs/JUDGES.md). `tools/run traces` checks more seeds, for a given time.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest
from sim.bugs import BUGS
from specs.model_checker import is_there
from specs.replication_traces import (
    REFUSED_AT,
    check_replicas,
    check_seed,
    trace,
    trace_of_a_late_promise,
)
from support import forms

pytestmark = [
    pytest.mark.long,
    pytest.mark.sampled,
    pytest.mark.skipif(not is_there(), reason="needs Java, and TLC: scripts/judges"),
]

EARLY: Final = (
    "commit without the others",
    "count half as a majority",
    "count what was sent as stored",
    "answer a promise request without promising",
    "skip the promises",
)
"""Those that are refused within the first hundred lines."""
EXTRA_SEEDS: Final = 20
"""When the code changes, so do the traces: from its remembered seed on, a bug may take so many
more.
"""
LINES: Final = 1_000


def test_a_simulated_group_does_what_the_specification_allows(tmp_path: Path) -> None:
    for seed in random.Random(forms.SEED).sample(range(100_000), 3):
        verdict = check_seed(seed, 400, tmp_path / str(seed))
        assert verdict.is_accepted, (
            f"seed {seed}: line {verdict.taken + 1} of {verdict.lines}: {verdict.refused}"
        )


def test_a_promise_that_waits_for_room_on_the_disk_is_allowed(tmp_path: Path) -> None:
    verdict = check_replicas(trace_of_a_late_promise()[0], tmp_path)
    assert verdict.is_accepted, f"line {verdict.taken + 1} of {verdict.lines}: {verdict.refused}"


@pytest.mark.parametrize(
    "bug",
    [pytest.param(each, marks=[] if each in EARLY else pytest.mark.longest) for each in REFUSED_AT],
)
def test_what_a_planted_bug_does_is_refused(bug: str, tmp_path: Path) -> None:
    for seed in range(REFUSED_AT[bug], REFUSED_AT[bug] + EXTRA_SEEDS):
        found = trace(seed, LINES, BUGS[bug])
        if (
            found.lines != trace(seed, LINES).lines
            and not check_replicas(found, tmp_path / str(seed)).is_accepted
        ):
            return
    pytest.fail(f"TLC allows what this bug does from seed {REFUSED_AT[bug]} on")
