"""The calculator of docs/SIZING.md (scripts/sizing.py)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from sizing import Workload, size_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "sizing.py"
LOAD = Workload(rate=100_000, body_bytes=1024, replicas=3, groups=1)


@pytest.mark.parametrize(
    ("body_bytes", "replicas", "measured_us"),
    [(100, 1, 0.27), (1024, 1, 1.57), (100, 3, 0.36), (1024, 3, 2.40)],
)
def test_storing_costs_what_was_measured(
    body_bytes: int, replicas: int, measured_us: float
) -> None:
    found = size_of(
        Workload(rate=1e6, body_bytes=body_bytes, replicas=replicas, groups=0, batch=1_000_000)
    )
    assert found.master_cores == pytest.approx(measured_us, rel=0.05)


def test_each_group_more_costs_a_delivery_more() -> None:
    one, two, three = (size_of(replace(LOAD, groups=groups)).master_cores for groups in (1, 2, 3))
    assert three - two == pytest.approx(two - one)
    assert two > one


def test_lone_messages_cost_many_times_what_batches_do() -> None:
    assert (
        size_of(replace(LOAD, batch=1)).master_cores
        > 10 * size_of(replace(LOAD, batch=1000)).master_cores
    )


def test_the_disk_holds_the_retention_and_a_single_replica_has_no_slave() -> None:
    day = size_of(replace(LOAD, retention_h=24))
    assert size_of(replace(LOAD, retention_h=48)).disk_gib == pytest.approx(2 * day.disk_gib)
    assert day.disk_gib > 100_000 * 1024 * 86_400 / (1 << 30)
    assert size_of(replace(LOAD, replicas=1)).slave_cores == 0


def test_there_are_shards_enough_and_one_at_least() -> None:
    assert size_of(replace(LOAD, rate=1)).shards == 1
    busy = size_of(replace(LOAD, rate=2_000_000))
    assert busy.master_cores / busy.shards <= 0.6


def test_the_command_answers_and_refuses_what_cannot_be() -> None:
    command = [sys.executable, str(SCRIPT), "--rate"]
    done = subprocess.run([*command, "50000"], capture_output=True, text=True, check=True)
    assert "cores as master" in done.stdout
    refused = subprocess.run([*command, "-1"], capture_output=True, text=True, check=False)
    assert (refused.returncode, "are positive" in refused.stderr) == (2, True)
