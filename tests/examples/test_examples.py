"""The examples of order processing, binlog replication and log collection, run as a user runs
them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import log_collection
import orders
import pytest
from support import node_config, running

import replication
from qmq.node.dev_node import Node


@pytest.fixture
async def node_with_delays(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(node_config(tmp_path / "node", delay=True)) as found:
        yield found


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


async def test_a_table_in_sqlite_that_follows_by_ordered_messages_ends_byte_equal(
    node: Node, tmp_path: Path
) -> None:
    result = await replication.replicate(node.address, tmp_path, 6_000, 300, quiet=True)
    assert result.is_equal
    assert (result.changes, result.applied, result.route_versions) == (6_000, 6_000, 3)


async def test_every_line_is_archived_once_alarms_are_errors_and_every_dashboard_sees_all(
    node: Node, tmp_path: Path
) -> None:
    result = await log_collection.collect(node.address, tmp_path, 8_000, quiet=True)
    assert result.is_equal
    assert (result.archived, result.alarms, result.dashboards) == (
        8_000,
        result.errors,
        [8_000, 8_000],
    )
    assert result.repeated == result.sent - result.lines > 0, (
        "the collector that began again sent some lines twice"
    )


async def test_every_order_is_paid_and_shipped_once_or_dead_and_reminded_of(
    node_with_delays: Node, tmp_path: Path
) -> None:
    result = await orders.trade(node_with_delays.address, tmp_path, 45, 15.0, quiet=True)
    assert result == orders.Result(
        orders=45, paid=43, shipped=43, reminded=2, dead_letters=2, left_in_outbox=0, is_right=True
    )


def test_an_example_runs_by_one_command_on_a_node_of_its_own() -> None:
    command = [sys.executable, str(EXAMPLES / "log_collection.py"), "--lines", "400", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout)["is_equal"]


def test_lines_that_are_not_whole_yet_wait() -> None:
    assert list(log_collection.whole_lines(b"a\nb\nc")) == [b"a", b"b"]
    assert list(log_collection.whole_lines(b"c")) == []
