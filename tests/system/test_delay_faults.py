"""The short form of `tools/run delay_faults`: real processes, real etcd, real faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from system.delay_run import DelayRun
from system.group import SECURE

FAULTS = ("kill", "crash", "brokers", "off", "hand-over", "jump")


@pytest.mark.long
async def test_no_delayed_message_is_early_lost_or_doubled_whatever_dies(tmp_path: Path) -> None:
    run = DelayRun(tmp_path, seed=1, faults=FAULTS, away_s=2.0, secure=SECURE)
    outcome = await run.run(len(FAULTS))
    assert outcome.anomalies == []
    assert sum(outcome.faults.values()) == len(FAULTS)
    assert outcome.delivered > 100
    assert outcome.acknowledged > outcome.cancelled > 0
