"""Drivers that die: the archive has each row once, and so has the log behind a sink. The short form
of `tools/run spark_faults`.

Outside the form `all` a driver dies once. What an attempt finds of the one before it is proved
without processes (tests/spark).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import forms
from system.group import SECURE
from system.spark_run import archive_run, cluster, copy_run, sink_run

pytestmark = pytest.mark.xdist_group("drivers")
KILLS = 2 if forms.FORM == "all" else 1
ROWS = 30_000 if forms.FORM == "all" else 10_000


@pytest.mark.longest
def test_a_stream_whose_driver_is_killed_archives_each_row_once_across_route_changes(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, secure=SECURE) as found:
        outcome = archive_run(found, tmp_path, rows=ROWS, changes=3 * KILLS, kills=KILLS, seed=1)
    assert not outcome.anomalies, outcome.anomalies[:20]
    assert outcome.changes == 3 * KILLS
    assert sum(outcome.moments.values()) == KILLS


@pytest.mark.longest
def test_a_sink_whose_driver_is_killed_stores_each_row_once_across_changes(tmp_path: Path) -> None:
    with cluster(tmp_path, secure=SECURE) as found:
        outcome = sink_run(found, tmp_path, rows=ROWS, changes=2 * KILLS, kills=KILLS, seed=2)
    assert not outcome.anomalies, outcome.anomalies[:20]
    assert sum(outcome.moments.values()) == KILLS


@pytest.mark.longest
@pytest.mark.parametrize("files", [False, True])
def test_a_stream_copies_each_message_once_while_its_processes_die(
    tmp_path: Path, files: bool
) -> None:
    with cluster(tmp_path, secure=SECURE) as found:
        outcome = copy_run(
            found, tmp_path, rows=ROWS, changes=0, kills=2 * KILLS, seed=3, files=files
        )
    assert not outcome.anomalies, outcome.anomalies[:20]
    assert outcome.rows > 0
    assert sum(outcome.moments.values()) >= 2 * KILLS
