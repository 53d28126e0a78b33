"""`qmq broker drain` with ordered subjects: a series of moves that continues after an
interruption.
"""

from __future__ import annotations

from typing import Any

from cli_support import Command, FakeMeta, change, place, route, settings, status

from qmq.cli import broker
from qmq.cli.broker import Move, plan
from qmq.errors import InvalidArgument, QmqError, RouteConflict
from qmq.proto.v1 import meta_pb2 as pb


class Cluster:
    """Subjects whose partitions move as requested; `refusals` are raised first, one for each
    requested move.
    """

    def __init__(
        self,
        meta: FakeMeta,
        subjects: dict[str, dict[int, str]],
        *,
        rates: dict[int, float] | None = None,
    ) -> None:
        self.subjects = subjects
        self.versions = dict.fromkeys(subjects, 1)
        self.rates = rates or {}
        self.health = {"g1": "read-write", "g2": "read-write", "g3": "read-write"}
        self.refusals: list[QmqError | None] = []
        meta.answers["ListSubjects"] = lambda _: pb.ListSubjectsResponse(
            subjects=[pb.SubjectDescription(settings=settings(name)) for name in subjects]
            + [pb.SubjectDescription(settings=settings("plain", ""))]
        )
        meta.answers["DescribeRoute"] = lambda request: self.describe(request.subject)
        meta.answers["DescribeCluster"] = lambda _: pb.DescribeClusterResponse(
            groups=[
                pb.GroupDescription(broker_group=name, health=health, mode="read-write")
                for name, health in self.health.items()
            ]
        )
        meta.answers["ChangeRoute"] = self.change
        meta.answers["SetGroupMode"] = lambda request: pb.SetGroupModeResponse(mode=request.mode)

    def describe(self, name: str) -> pb.DescribeRouteResponse:
        parts = sorted(self.subjects[name].items())
        places = [place(number, at, at + 1, group) for at, (number, group) in enumerate(parts)]
        statuses = [
            status(number, group, rate=self.rates.get(number, 0.0)) for number, group in parts
        ]
        return pb.DescribeRouteResponse(
            settings=settings(name),
            route=route(self.versions[name], *places),
            latest_version=self.versions[name],
            partitions=statuses,
        )

    def change(self, request: pb.ChangeRouteRequest) -> Any:
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            return refusal
        parts = self.subjects[request.subject]
        if (
            request.from_version != self.versions[request.subject]
            or request.move.partition not in parts
        ):
            return RouteConflict("look again")
        self.versions[request.subject] += 1
        del parts[request.move.partition]
        number = 100 * self.versions[request.subject]
        parts[number] = request.move.broker_group
        target = place(number, 0, 1, request.move.broker_group)
        made = change("move", self.versions[request.subject], (request.move.partition,), target)
        return pb.ChangeRouteResponse(change=made, route=self.describe(request.subject).route)


def test_a_drain_makes_the_group_read_only_and_moves_all_its_partitions(
    meta: FakeMeta, qmq: Command
) -> None:
    cluster = Cluster(meta, {"audit": {1: "g1"}, "orders": {1: "g1", 2: "g2", 3: "g1"}})
    (found,) = qmq.json("broker", "drain", "g1")
    assert found == {
        "group": "g1",
        "from": "read-write",
        "to": "read-only",
        "moves": [
            {"subject": "audit", "partition": 1, "target": "g3"},
            {"subject": "orders", "partition": 1, "target": "g2"},
            {"subject": "orders", "partition": 3, "target": "g3"},
        ],
    }
    assert [each.mode for each in meta.requests("SetGroupMode")] == ["read-only"]
    assert "g1" not in {group for parts in cluster.subjects.values() for group in parts.values()}
    changes = meta.requests("ChangeRoute")
    assert [(each.subject, each.from_version, each.reason) for each in changes] == [
        ("audit", 1, "drain g1"),
        ("orders", 1, "drain g1"),
        ("orders", 2, "drain g1"),
    ]


def test_a_dry_run_lists_the_moves_and_changes_nothing(meta: FakeMeta, qmq: Command) -> None:
    Cluster(meta, {"orders": {1: "g1", 2: "g2"}})
    (found,) = qmq.json("broker", "drain", "g1", "--dry-run")
    assert found["moves"] == [{"subject": "orders", "partition": 1, "target": "g3"}]
    shown = qmq.text("broker", "drain", "g1", "--dry-run")
    assert "would be moved" in shown
    assert meta.requests("ChangeRoute") == meta.requests("SetGroupMode") == []


def test_without_ordered_partitions_and_with_no_move_a_drain_is_what_it_was(
    meta: FakeMeta, qmq: Command
) -> None:
    Cluster(meta, {"orders": {1: "g1"}})
    for words in (("g2",), ("g1", "--no-move")):
        meta.asked.clear()
        assert qmq.json("broker", "drain", *words) == [
            {"group": words[0], "from": "read-write", "to": "read-only"}
        ]
        assert len(meta.requests("SetGroupMode")) == 1
        assert meta.requests("ChangeRoute") == []


def test_a_drain_that_broke_off_continues_when_it_is_run_again(
    meta: FakeMeta, qmq: Command
) -> None:
    cluster = Cluster(meta, {"orders": {1: "g1", 2: "g1", 3: "g1", 4: "g2"}})
    cluster.refusals = [None, InvalidArgument("the disk of g3 is full")]
    status, said = qmq.error("broker", "drain", "g1")
    assert status == 2
    assert (
        "1 of 3 partitions were moved; g1 is read-only: run `qmq broker drain g1` again to continue"
        in said
    )
    assert "the disk of g3 is full" in said
    assert list(cluster.subjects["orders"].values()).count("g1") == 2
    (found,) = qmq.json("broker", "drain", "g1")
    assert [each["partition"] for each in found["moves"]] == [2, 3]
    assert "g1" not in cluster.subjects["orders"].values()
    assert "moves" not in qmq.json("broker", "drain", "g1")[0]


def test_a_change_by_another_server_is_awaited(meta: FakeMeta, qmq: Command) -> None:
    cluster = Cluster(meta, {"orders": {1: "g1", 2: "g2"}})
    cluster.refusals = [RouteConflict("another change is under way")] * 3
    qmq.json("broker", "drain", "g1")
    assert "g1" not in cluster.subjects["orders"].values()
    assert len(meta.requests("ChangeRoute")) == 4


def test_a_partition_that_left_meanwhile_is_passed_over(meta: FakeMeta, qmq: Command) -> None:
    cluster = Cluster(meta, {"orders": {1: "g1", 2: "g1"}})

    def merged(request: pb.ChangeRouteRequest) -> Any:
        cluster.subjects["orders"], cluster.versions["orders"] = {3: "g2"}, 2
        return RouteConflict("the latest version is 2, not 1")

    meta.answers["ChangeRoute"] = merged
    qmq.json("broker", "drain", "g1")
    assert len(meta.requests("ChangeRoute")) == 1


def test_a_conflict_that_never_ends_is_reported(meta: FakeMeta, qmq: Command) -> None:
    cluster = Cluster(meta, {"orders": {1: "g1"}})
    cluster.refusals = [RouteConflict("another change is under way")] * 100
    status, said = qmq.error("broker", "drain", "g1")
    assert (status, "another change is under way" in said) == (2, True)
    assert len(meta.requests("ChangeRoute")) == broker.CONFLICTS_MAX + 1


def test_nothing_is_changed_if_there_is_nowhere_to_move_to(meta: FakeMeta, qmq: Command) -> None:
    cluster = Cluster(meta, {"orders": {1: "g1"}})
    cluster.health = {"g1": "read-write", "g2": "read-only", "g3": "offline"}
    status, said = qmq.error("broker", "drain", "g1")
    assert (status, "--no-move to leave the partitions there" in said) == (2, True)
    assert meta.requests("SetGroupMode") == []


def described(name: str, **groups: list[tuple[int, float]]) -> pb.DescribeRouteResponse:
    found = sorted(
        (number, group, rate) for group, parts in groups.items() for number, rate in parts
    )
    places = [place(number, at, at + 1, group) for at, (number, group, _) in enumerate(found)]
    statuses = [status(number, group, rate=rate) for number, group, rate in found]
    return pb.DescribeRouteResponse(
        settings=settings(name), route=route(1, *places), latest_version=1, partitions=statuses
    )


def test_a_partition_goes_to_the_group_with_fewest_partitions_then_messages() -> None:
    subject = described(
        "s",
        g1=[(1, 5.0), (2, 1.0), (3, 1.0), (4, 1.0)],
        g2=[(5, 90.0)],
        g3=[(6, 10.0)],
        g4=[(7, 0.0), (8, 0.0), (9, 0.0)],
    )
    assert plan([subject], "g1", ["g2", "g3", "g4"]) == [
        Move("s", 1, "g3"),  # one each: g3 takes fewer messages
        Move("s", 2, "g2"),
        Move("s", 3, "g3"),  # two each: 15 against 91 messages a second
        Move("s", 4, "g2"),
    ]


def test_groups_of_the_same_load_are_chosen_by_name_and_an_empty_one_first() -> None:
    subject = described("s", g1=[(1, 0.0), (2, 0.0)], g2=[(3, 0.0)])
    assert plan([subject], "g1", ["g3", "g2", "g4"]) == [Move("s", 1, "g3"), Move("s", 2, "g4")]


def test_where_nothing_is_to_move_nowhere_is_good_enough() -> None:
    assert plan([described("s", g2=[(1, 0.0)])], "g1", []) == []
