"""Drivers that die: the archive has each row once, and so has the log behind a sink. The short form of `scripts/spark_faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from system.spark_run import archive_run, cluster, sink_run

pytestmark = pytest.mark.xdist_group("faults")


@pytest.mark.long
def test_a_stream_whose_driver_is_killed_archives_each_row_once_across_route_changes(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        outcome = archive_run(found, tmp_path, rows=60_000, changes=6, kills=2, seed=1)
    assert not outcome.anomalies, outcome.anomalies[:20]
    assert outcome.changes == 6
    assert sum(outcome.moments.values()) == 2


@pytest.mark.long
def test_a_sink_whose_driver_is_killed_leaves_each_row_once_in_the_log_across_route_changes(tmp_path: Path) -> None:
    with cluster(tmp_path) as found:
        outcome = sink_run(found, tmp_path, rows=30_000, changes=4, kills=2, seed=2)
    assert not outcome.anomalies, outcome.anomalies[:20]
    assert sum(outcome.moments.values()) == 2
