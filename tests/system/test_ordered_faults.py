"""Real processes, real faults, and an ordered subject whose route changes all the while: no promise
of docs/ORDERING.md is broken.

The short form of `tools/run ordered_faults`: two broker groups of three replicas, one of them
frozen for longer than its lease.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import forms
from system.group import SECURE
from system.ordered_nemesis import Options, run_in
from system.ordered_workload import KILLS

pytestmark = pytest.mark.xdist_group("faults")
PATIENCE_S = 60.0
"""A message that waits longer without a reason was forgotten. A shorter wait may come from a busy
machine.
"""


async def test_every_promise_is_kept_while_the_route_changes_and_processes_die(
    tmp_path: Path,
) -> None:
    seconds = 12.0 if forms.FORM == "gate" else 25.0
    options = Options(
        changes=6,
        kills=len(KILLS),
        freezes=1,
        seconds=seconds,
        seed=1,
        rate=1_500.0,
        secure=SECURE,
        slow_s=PATIENCE_S,
        after_s=PATIENCE_S,
    )
    result = await run_in(tmp_path, options)
    assert result.ok, [*map(str, result.report.anomalies), result.tables]
    assert result.report.counts["changes"] >= 6
    assert result.faults == {**dict.fromkeys(KILLS, 1), "freeze-group": 1}
    assert result.report.counts["acknowledged"] >= 5_000
    assert result.report.counts["acknowledged"] == result.report.counts["sent"], result.failures
    assert result.report.write_pauses["a frozen group"].found_ns, "writers continued elsewhere"
    assert json.dumps(result.figures)
