"""An ordered subject's history as partitions and sources: small histories by hand."""

from __future__ import annotations

from qmq.columns.servers.metaservers import routes_of
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


def part(number: int, first: int, end: int, group: str = "g1") -> pb.OrderedPartition:
    return pb.OrderedPartition(
        number=number, lps=control.LpRange(first=first, end=end), broker_group=group
    )


def change(
    version: int,
    sources: list[int],
    *targets: pb.OrderedPartition,
    phase: str = "done",
    sealed: dict[int, int] | None = None,
) -> pb.RouteChangeInfo:
    return pb.RouteChangeInfo(
        id=f"c{version}",
        to_version=version,
        sources=sources,
        targets=targets,
        phase=phase,
        sealed=sealed or {},
    )


FIRST = pb.OrderedRoute(
    version=1, logical_partitions=16, partitions=[part(1, 0, 8), part(2, 8, 16, "g2")]
)
SPLIT = change(2, [1], part(3, 0, 4), part(4, 4, 8, "g2"), sealed={1: 10})
MERGE = change(3, [4, 2], part(5, 4, 16), sealed={2: 20, 4: 0})
MOVE = change(4, [5], part(6, 4, 16, "g3"), phase="published", sealed={5: -1})


def test_a_fenced_partition_has_no_known_end_until_its_broker_group_reports_it() -> None:
    assert dict(routes_of(FIRST, [SPLIT, MERGE, MOVE]).sealed_at) == {1: 10, 2: 20, 4: 0}
    known = change(4, [5], part(6, 4, 16, "g3"), sealed={5: 7})
    assert dict(routes_of(FIRST, [SPLIT, MERGE, known]).sealed_at)[5] == 7


def test_an_unpublished_change_opens_no_partition_though_sources_may_be_closed() -> None:
    for phase in ("prepared", "sealed"):
        found = routes_of(FIRST, [change(2, [1], part(3, 0, 8), phase=phase, sealed={1: 10})])
        assert (found.version, sorted(found.partitions), dict(found.sealed_at)) == (
            1,
            [1, 2],
            {1: 10},
        )


def test_several_targets_of_several_sources_have_those_that_overlap_them() -> None:
    found = routes_of(FIRST, [change(2, [1, 2], part(3, 0, 4), part(4, 4, 12), part(5, 12, 16))])
    assert {
        number: each.sources for number, each in found.partitions.items() if each.version == 2
    } == {3: (1,), 4: (1, 2), 5: (2,)}
