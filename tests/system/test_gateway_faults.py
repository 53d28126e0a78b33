"""Through gateways nothing is lost and order holds, whatever dies: short forms of scripts/gateway_faults."""

from __future__ import annotations

import shutil

import forms
import pytest

from system.gateway_processes import JAR
from system.gateway_run import GatewayRun, run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not JAR.is_file() or shutil.which("javac") is None, reason="needs a JDK, and scripts/rocketmq_clients"),
]


async def test_nothing_is_lost_when_gateways_die_and_brokers_fail_over() -> None:
    outcome = await run(GatewayRun(count=3_000, gateway_kills=2, failovers=2, seed=forms.SEED))
    assert (outcome.sent, outcome.lost) == (3_000, 0), outcome


async def test_order_by_message_group_holds_through_splits_merges_and_moves() -> None:
    outcome = await run(GatewayRun(count=2_000, groups=32, changes=8, pause_s=1.0, seed=forms.SEED))
    assert (outcome.lost, outcome.out_of_order) == (0, 0), outcome
