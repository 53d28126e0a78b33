"""Gateways lose no message and keep the order when any process is killed: short forms of tools/run
gateway_faults.
"""

from __future__ import annotations

import shutil

import pytest
from support import forms
from system.gateway_processes import JAR
from system.gateway_run import GatewayRun, run

pytestmark = [
    pytest.mark.longest,
    pytest.mark.skipif(
        not JAR.is_file() or shutil.which("javac") is None,
        reason="needs a JDK, and scripts/rocketmq_clients",
    ),
]
RUNS = {
    "everything": GatewayRun(
        count=2_003, groups=32, changes=2, gateway_kills=1, failovers=1, seed=forms.SEED
    ),
    "kills": GatewayRun(count=5_000, gateway_kills=2, failovers=2, seed=forms.SEED),
    "changes": GatewayRun(count=4_500, groups=32, changes=8, seed=forms.SEED),
}
"""The first one has all kinds of faults, and a count that is no multiple of its shares; the others
have more faults.
"""


@pytest.mark.parametrize("name", RUNS if forms.FORM == "all" else ["everything"])
async def test_nothing_is_lost_and_order_holds_whatever_dies_and_changes(name: str) -> None:
    wanted = RUNS[name]
    outcome = await run(wanted)
    assert (outcome.sent, outcome.lost, outcome.out_of_order) == (wanted.count, 0, 0), outcome
    assert outcome.under_load == wanted.changes + wanted.gateway_kills + wanted.failovers, outcome
