"""`qmq route export` writes what Spark's source reads, and only published versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import PLACES, Command, FakeMeta, change, described, place, route
from qmq_ordering.routes import LpRange

from qmq.cli.route import routes_of
from qmq.columns.files.routes import parse_routes, read_routes
from qmq.columns.model import RoutePartition
from qmq.errors import InvalidArgument, OrderMismatch
from qmq.proto.v1 import meta_pb2 as pb

SPLIT = change(
    "split",
    2,
    (2,),
    place(4, 256, 384, "g1"),
    place(5, 384, 512, "g2"),
    phase="done",
    sealed={2: 99},
)
MERGE = change("merge", 3, (1, 4), place(6, 0, 384, "g3"), sealed={1: 7, 4: -1})
UNDER_WAY = change("move", 4, (3,), place(7, 512, 1024, "g1"), phase="sealed", sealed={3: 500})


def test_partitions_of_all_versions_are_there_with_what_they_came_from() -> None:
    subject = routes_of("orders", route(1, *PLACES), [SPLIT, MERGE, UNDER_WAY])
    routes = parse_routes(
        json.dumps({"format": "qmq-routes", "version": 1, "subjects": [subject]})
    )["orders"]
    assert (routes.logical_partitions, routes.version) == (1024, 3)
    assert routes.partitions == {
        1: RoutePartition(1, LpRange(0, 256), "g1", 1),
        2: RoutePartition(2, LpRange(256, 512), "g1", 1),
        3: RoutePartition(3, LpRange(512, 1024), "g2", 1),
        4: RoutePartition(4, LpRange(256, 384), "g1", 2, (2,)),
        5: RoutePartition(5, LpRange(384, 512), "g2", 2, (2,)),
        6: RoutePartition(6, LpRange(0, 384), "g3", 3, (1, 4)),
    }
    assert routes.sealed_at == {1: 7, 2: 99, 3: 500}  # 4 was fenced: not known yet


def test_sources_are_only_those_that_held_some_of_the_range() -> None:
    both = change(
        "merge", 2, (1, 2, 3), place(4, 0, 300, "g1"), place(5, 300, 1024, "g1"), phase="done"
    )
    found = routes_of("orders", route(1, *PLACES), [both])
    assert [(each["number"], each["sources"]) for each in found["partitions"]][3:] == [
        (4, [1, 2]),
        (5, [2, 3]),
    ]


def test_file_is_replaced_and_read_again(meta: FakeMeta, qmq: Command, tmp_path: Path) -> None:
    meta.answers["DescribeRoute"] = lambda request: described(1)
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(changes=[SPLIT])
    out = tmp_path / "routes.json"
    out.write_text("older")
    assert qmq.text("route", "export", "orders", "shipments", "orders", "--out", str(out)) == ""
    found = read_routes(str(out))
    assert list(found) == ["orders", "shipments"]
    assert found["orders"].version == 2
    assert list(tmp_path.iterdir()) == [out]
    assert [request.version for request in meta.requests("DescribeRoute")] == [1, 1]
    assert json.loads(qmq.text("route", "export", "orders"))["subjects"][0]["sealed_at"] == {
        "2": 99
    }


def test_subject_that_is_not_ordered_and_file_that_cannot_be_written_are_refused(
    meta: FakeMeta, qmq: Command, tmp_path: Path
) -> None:
    meta.answers["DescribeRoute"] = OrderMismatch("orders is unordered: it has no route")
    status, text = qmq.error("route", "export", "orders", "--out", str(tmp_path / "routes.json"))
    assert (status, "has no route" in text) == (2, True)
    assert not list(tmp_path.iterdir())
    meta.answers |= {"DescribeRoute": described(1), "RouteHistory": pb.RouteHistoryResponse()}
    status, text = qmq.error(
        "route", "export", "orders", "--out", str(tmp_path / "nowhere" / "routes.json")
    )
    assert (status, "cannot be written" in text) == (2, True)


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"format": "qmq-routes", "version": 2, "subjects": []}', '{"format": "x"}'],
)
def test_file_that_is_something_else_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "routes.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=r"is not what `qmq route export` writes"):
        read_routes(str(path))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_routes(str(tmp_path / "nowhere"))
