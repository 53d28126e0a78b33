"""Tasks that read files of the lake."""

from __future__ import annotations

from pyspark_qmq.lake.rows import FilePart, LakeFile, LakeTask, TimeRange, lake_tasks
from qmq_ordering.routes import LpRange

from qmq.columns.model import QueueKey, RoutePartition, Routes, Topology
from qmq.columns.planning import Plan, PlannedRange

G1, G2 = QueueKey("orders", 0, "g1"), QueueKey("orders", 0, "g2")
ONE, TWO = QueueKey("bank", 1, "g1"), QueueKey("bank", 2, "g1")
ROUTES = Routes(
    1024,
    3,
    {
        1: RoutePartition(1, LpRange(0, 512), "g1", 1),
        2: RoutePartition(2, LpRange(512, 1024), "g1", 3),
    },
)
WHOLE = 1 << 62


def plan(files: list[LakeFile], wanted: list[PlannedRange], how: Plan) -> list[LakeTask]:
    return lake_tasks(
        wanted[0].queue.subject,
        files,
        wanted,
        Topology({}, {"bank": ROUTES}),
        how,
        TimeRange(5, 9),
        {"s3.region": "x"},
    )


def test_small_files_are_read_together_and_large_ones_in_parts_of_row_groups() -> None:
    files = [
        LakeFile("c", 100, 4, (0, 0), (20, 90)),
        LakeFile("a", 20, 1, (0, 0), (0, 9)),
        LakeFile("b", 20, 1, (0, 0), (10, 19)),
    ]
    found = plan(
        files, [PlannedRange(G1, 0, 90), PlannedRange(G2, 0, 90)], Plan(piece_bytes_max=50)
    )
    assert [each.parts for each in found] == [
        (FilePart("a", 0, WHOLE, 20), FilePart("b", 0, WHOLE, 20)),
        (FilePart("c", 0, 2, 100),),
        (FilePart("c", 2, WHOLE, 100),),
    ]
    assert found[0] == LakeTask(
        "orders",
        found[0].parts,
        (PlannedRange(G1, 0, 90), PlannedRange(G2, 0, 90)),
        None,
        TimeRange(5, 9),
        {"s3.region": "x"},
    )


def test_a_file_of_one_row_group_is_not_divided() -> None:
    found = plan(
        [LakeFile("a", 1000, 1, (0, 0), (0, 9))],
        [PlannedRange(G1, 0, 90)],
        Plan(piece_bytes_max=10),
    )
    assert [each.parts for each in found] == [(FilePart("a", 0, WHOLE, 1000),)]


def test_a_file_without_wanted_rows_is_left_out() -> None:
    files = [
        LakeFile("a", 10, 1, (0, 0), (0, 9)),
        LakeFile("b", 10, 1, (0, 0), (10, 19)),
        LakeFile("c", 10, 1, (0, 0), (20, 29)),
    ]
    assert [each.parts for each in plan(files, [PlannedRange(G1, 10, 20)], Plan())] == [
        (FilePart("b", 0, WHOLE, 10),)
    ]


def test_a_task_has_one_partition_of_an_ordered_subject_and_its_version() -> None:
    files = [LakeFile("a", 100, 1, (1, 2), (0, 99)), LakeFile("b", 100, 1, (2, 2), (100, 199))]
    found = plan(
        files, [PlannedRange(ONE, 0, 100), PlannedRange(TWO, 0, 200)], Plan(piece_bytes_max=1000)
    )
    assert [
        ([part.location for part in each.parts], each.wanted, each.route_version) for each in found
    ] == [
        (["a"], (PlannedRange(ONE, 0, 100),), 1),
        (["a", "b"], (PlannedRange(TWO, 0, 200),), 3),
    ]


def test_there_are_about_as_many_tasks_as_are_asked_for() -> None:
    files = [LakeFile(str(number), 100, 1, (0, 0), (number, number)) for number in range(8)]
    assert len(plan(files, [PlannedRange(G1, 0, 8)], Plan(pieces_min=4))) == 4
