"""Planning: from offsets to tasks."""

from __future__ import annotations

import pytest
from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import LpRange

from qmq.columns.model import (
    QueueKey,
    QueuePiece,
    ReadSelection,
    RoutePartition,
    Routes,
    SourceQueue,
    Topology,
)
from qmq.columns.planning import Plan, PlannedRange, ranges, tasks
from qmq.errors import MessagesExpired

ORDERS = QueueKey("orders", 0, "g1")
ONE, TWO = QueueKey("bank", 1, "g1"), QueueKey("bank", 2, "g2")
PARTS = {
    1: RoutePartition(1, LpRange(0, 512), "g1", 1),
    2: RoutePartition(2, LpRange(512, 1024), "g2", 3, (7,)),
}
QUEUES = {
    ORDERS: SourceQueue(ORDERS, 10, 1000, 99_000),
    ONE: SourceQueue(ONE, 0, 500, 50_000),
    TWO: SourceQueue(TWO, 0, 100, 10_000),
}


def topology(*, is_strict: bool = True) -> Topology:
    return Topology(QUEUES, {"bank": Routes(1024, 3, PARTS, {}, is_strict)})


class CuttingLog:
    """A log that cuts evenly, with 100 bytes for each message."""

    def pieces(self, queue: QueueKey, first: int, end: int, bytes_max: int) -> list[QueuePiece]:
        step = max(bytes_max // 100, 1)
        return [QueuePiece(queue, at, min(at + step, end)) for at in range(first, end, step)]


def plan_tasks(
    wanted: list[PlannedRange],
    plan: Plan,
    selection: ReadSelection | None = None,
    *,
    is_strict: bool = True,
) -> list[tuple[str, int, int]]:
    found = tasks(
        CuttingLog(), topology(is_strict=is_strict), wanted, plan, selection or ReadSelection()
    )  # type: ignore[arg-type]
    return [(each.piece.queue.within, each.piece.first, each.piece.end) for each in found]


def test_what_lies_between_offsets_is_read_and_empty_ranges_are_not() -> None:
    found = ranges({ORDERS: 10, ONE: 500}, {ORDERS: 20, ONE: 500, TWO: 7}, QUEUES, skips_lost=False)
    assert found == [PlannedRange(TWO, 0, 7), PlannedRange(ORDERS, 10, 20)]


def test_reading_expired_messages_fails_with_the_remaining_range() -> None:
    with pytest.raises(
        MessagesExpired,
        match=(
            r"7 messages were deleted.*messages 3 to 9 of orders/0@g1 \(7\).*"
            r"failOnDataLoss=false"
        ),
    ):
        ranges({ORDERS: 3}, {ORDERS: 20}, QUEUES, skips_lost=False)


def test_missing_messages_are_skipped_on_request() -> None:
    assert ranges({ORDERS: 3}, {ORDERS: 20}, QUEUES, skips_lost=True) == [
        PlannedRange(ORDERS, 10, 20)
    ]
    assert ranges({ORDERS: 3}, {ORDERS: 8}, QUEUES, skips_lost=True) == []


def test_big_queues_are_cut_and_tasks_never_mix_queues() -> None:
    found = plan_tasks(
        [PlannedRange(ORDERS, 10, 1000), PlannedRange(TWO, 0, 100)], Plan(piece_bytes_max=50_000)
    )
    assert found == [("0@g1", 10, 510), ("0@g1", 510, 1000), ("2@g2", 0, 100)]


def test_there_are_at_least_so_many_tasks_if_that_is_asked_for() -> None:
    assert len(plan_tasks([PlannedRange(ORDERS, 10, 1000)], Plan(pieces_min=9))) >= 9


def test_in_a_stream_a_partition_of_an_ordered_subject_is_one_task() -> None:
    found = plan_tasks(
        [PlannedRange(ONE, 0, 500), PlannedRange(ORDERS, 10, 1000)],
        Plan(piece_bytes_max=10_000, keeps_order=True),
    )
    assert [each for each in found if each[0] == "1@g1"] == [("1@g1", 0, 500)]
    assert len(found) > 2


def test_exact_keys_leave_out_the_partitions_that_cannot_hold_them() -> None:
    key = next(
        str(number).encode()
        for number in range(1000)
        if logical_partition(str(number).encode(), 1024) < 512
    )
    wanted = [PlannedRange(ONE, 0, 500), PlannedRange(TWO, 0, 100)]
    assert plan_tasks(wanted, Plan(), ReadSelection(keys=(key,))) == [("1@g1", 0, 500)]
    assert len(plan_tasks(wanted, Plan(), ReadSelection(keys=(key,)), is_strict=False)) == 2


def test_a_task_knows_its_partitions_version_and_wanted_logical_partitions() -> None:
    key = next(
        str(number).encode()
        for number in range(1000)
        if logical_partition(str(number).encode(), 1024) >= 512
    )
    found = tasks(
        CuttingLog(), topology(), [PlannedRange(TWO, 0, 100)], Plan(), ReadSelection(keys=(key,))
    )  # type: ignore[arg-type]
    lp = logical_partition(key, 1024)
    assert [(each.route_version, each.piece.lps) for each in found] == [(3, (LpRange(lp, lp + 1),))]
