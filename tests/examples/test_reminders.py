"""The example of flight reminders: a month of real flights, each with one reminder. No reminder is
lost, doubled or early.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import reminders

from qmq.node.dev_node import Node, NodeConfig

MINUTES = 0.2


def test_the_plan_holds_every_flight_of_the_month_an_hour_before_it_leaves() -> None:
    january = reminders.plan(1, 3.0)
    assert len(january) == 27_004
    first = january[0]
    assert (first.departure.hour, first.departure.minute) == (5, 15)
    assert abs(first.due_s - (4 * 3600 + 15 * 60) / (31 * 86_400) * 180) < 1e-9
    assert max(each.due_s for each in january) < 180


def test_missing_doubled_and_early_messages_are_reported() -> None:
    planned = reminders.plan(1, 3.0, rows=4)
    due = [int(1_000 + each.due_s * 1000) for each in planned]
    came = [
        (planned[0].number, due[0]),
        (planned[1].number, due[1] - 1),
        (planned[2].number, due[2]),
        (planned[2].number, due[2]),
    ]
    result = reminders.compare(planned, 1_000, came)
    assert (result.early, result.twice, result.missing) == (
        [planned[1].number],
        [planned[2].number],
        [planned[3].number],
    )
    assert not result.is_right


@pytest.mark.long
async def test_every_flight_of_a_month_is_reminded_of_once_and_in_time(tmp_path: Path) -> None:
    node = Node(NodeConfig(tmp_path, meta_port=0, data_port=0, control_port=0))
    await node.start()
    try:
        result = await reminders.play(node.address, reminders.plan(2, MINUTES), MINUTES, quiet=True)
    finally:
        await node.stop()
    assert result.planned > 20_000
    assert result.is_right, (result.missing[:5], result.twice[:5], result.early[:5])
