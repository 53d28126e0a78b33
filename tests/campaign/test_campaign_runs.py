"""Tests of the campaign as tests of pytest: an hour of them, others in every run, and some of the
planted bugs. `scripts/campaign` runs all of them.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from support import forms

from campaign import table
from campaign.__main__ import found
from campaign.run import run_test

pytestmark = [pytest.mark.longest, pytest.mark.xdist_group("faults")]

SECONDS = 30.0
BUGS = sorted(Random(forms.SEED).sample(list(table.bugs()), 4))


@pytest.mark.parametrize("name", table.an_hour(forms.SEED))
async def test_promises_hold_under_the_fault(name: str, tmp_path: Path) -> None:
    result = await run_test(table.tests()[name], tmp_path, seed=forms.SEED, seconds=SECONDS)
    if result.verdict == "skipped":
        pytest.skip(result.reason)
    assert result.verdict == "pass", result


@pytest.mark.parametrize("name", BUGS)
async def test_the_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    bug = table.bugs()[name]
    result = await run_test(
        table.tests()[bug.found_by], tmp_path, seed=forms.SEED, seconds=SECONDS, bug=bug
    )
    if result.verdict == "skipped":
        pytest.skip(result.reason)
    assert found(bug, result).verdict == "pass", result
