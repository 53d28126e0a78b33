"""How many files a message passes, and how many functions only forward it: what a reader must open.
Each has an upper limit, so that the numbers grow only on purpose.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from qmq.testing import TestCluster

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))

from road import Road, of_a_message, of_a_split


def check(road: Road, passes: set[str], modules_max: int, forwards_max: int) -> None:
    assert passes <= set(road.modules)
    assert len(road.modules) <= modules_max, road.modules
    assert len(road.forwards) <= forwards_max, road.forwards


async def test_a_message_passes_at_most_50_files() -> None:
    async with TestCluster(delay=False) as cluster:
        road = await of_a_message(cluster)
    passes = {
        "client/producing/producer",
        "log/store",
        "broker/dispatch/dispatch",
        "client/consuming/consumer",
    }
    check(road, {f"qmq/{each}.py" for each in passes}, 50, 12)


async def test_a_delayed_message_passes_at_most_64_files() -> None:
    async with TestCluster() as cluster:
        road = await of_a_message(cluster, timedelta(milliseconds=200))
    check(road, {"qmq/delay/engine.py", "qmq/delay/wheel.py", "qmq/delay/plan_log.py"}, 64, 14)


async def test_a_split_passes_at_most_74_files() -> None:
    async with TestCluster(delay=False) as cluster:
        road = await of_a_split(cluster)
    check(road, {"qmq/meta/ordered/changes.py", "qmq/broker/control.py"}, 74, 22)
