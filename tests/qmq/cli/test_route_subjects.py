"""`qmq subject` and `qmq group` for ordered subjects, next to unordered ones."""

from __future__ import annotations

import pytest
from cli_support import Command, FakeMeta, described, done, group, lps, settings, status

from qmq.errors import InvalidArgument, UnknownGroup
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

QUEUES = [
    control.Queue(subject="orders", partition=number, broker_group="g1", next_sequence=5)
    for number in (1, 2)
]


@pytest.fixture(autouse=True)
def subjects(meta: FakeMeta) -> None:
    known = [
        pb.SubjectDescription(settings=settings("orders"), queues=QUEUES),
        pb.SubjectDescription(settings=settings("orders.plain", "")),
    ]
    meta.answers["ListSubjects"] = lambda request: pb.ListSubjectsResponse(
        subjects=[each for each in known if each.settings.name.startswith(request.prefix)]
    )
    holder = control.LaneHolder(lps=lps(0, 256), consumer="c1")
    reading = status(1, "g1", progress=[done(0, 256, 60)], holders=[holder], lag_ms=70)
    meta.answers["DescribeRoute"] = described(3, groups=[group("billing", 2, reading, backlog=40)])
    plain = control.Group(subject="orders.plain", broker_group="g1", group="billing", waiting=3)
    seen = control.Group(
        subject="orders", partition=1, broker_group="g1", group="billing", waiting=40
    )
    meta.answers["DescribeGroups"] = lambda request: control.DescribeGroupsResponse(
        groups=[each for each in (plain, seen) if request.subject in ("", each.subject)]
    )


def test_a_list_of_subjects_says_which_are_ordered(qmq: Command) -> None:
    found = qmq.json("subject", "list")
    assert [(each["subject"], each["partition"], each["order"]) for each in found] == [
        ("orders", 1, "strict"),
        ("orders", 2, "strict"),
        ("orders.plain", 0, ""),
    ]


@pytest.mark.parametrize("verb", ["show", "describe"])
def test_a_subject_shows_how_it_is_ordered(qmq: Command, verb: str) -> None:
    found = qmq.json("subject", verb, "orders")
    assert {(each["order"], each["logical_partitions"], each["fencing"]) for each in found} == {
        ("strict", 1024, "lease")
    }
    (plain,) = qmq.json("subject", verb, "orders.plain")
    assert (plain["order"], plain["logical_partitions"], plain["fencing"]) == ("", 0, "")


@pytest.mark.parametrize(
    ("words", "settings_"),
    [
        (("--order", "strict"), ("strict", 1024, "lease", 0)),
        (
            (
                "--order",
                "best-effort",
                "--logical-partitions",
                "64",
                "--partitions",
                "4",
                "--fencing",
                "majority",
            ),
            ("best-effort", 64, "majority", 4),
        ),
        ((), ("", 0, "", 0)),
    ],
)
def test_a_subject_is_created_with_the_order_that_was_asked_for(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...], settings_: tuple[str, int, str, int]
) -> None:
    meta.answers["CreateSubject"] = pb.CreateSubjectResponse()
    assert qmq.json("subject", "create", "new", *words) == [
        {"subject": "new", "order": settings_[0]}
    ]
    (request,) = meta.requests("CreateSubject")
    found = request.settings
    assert (found.order, found.logical_partitions, found.fencing, found.partitions) == settings_


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--order", "loose"), "--order must be strict or best-effort, not 'loose'"),
        (
            ("--order", "strict", "--fencing", "wall"),
            "--fencing must be lease or majority, not 'wall'",
        ),
        (
            ("--partitions", "4", "--fencing", "lease"),
            "--partitions, --fencing needs an ordered subject: --order strict or best-effort",
        ),
        (("--order", "strict", "--logical-partitions", "70000"), "less than or equal to 65536"),
    ],
)
def test_an_order_that_cannot_be_had_is_an_error(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...], says: str
) -> None:
    status, said = qmq.error("subject", "create", "new", *words)
    assert (status, says in said) == (2, True), said
    assert meta.requests("CreateSubject") == []


def test_groups_of_ordered_subjects_are_listed_once_with_their_version(
    meta: FakeMeta, qmq: Command
) -> None:
    plain, ordered = qmq.json("group", "list")
    assert (
        " ".join(plain)
        == "subject partition broker_group group consumers lag lag_ms version kind is_paused"
    )
    assert (plain["subject"], plain["lag"], plain["version"]) == ("orders.plain", 3, "")
    assert ordered == {
        "subject": "orders",
        "partition": 1,
        "broker_group": "g1",
        "group": "billing",
        "consumers": 1,
        "lag": 40,
        "lag_ms": 70,
        "version": 2,
        "kind": "group",
        "is_paused": False,
    }
    assert qmq.json("group", "list", "orders") == [ordered]
    assert qmq.json("group", "list", "orders.plain") == [plain]
    assert [each.subject for each in meta.requests("DescribeGroups")] == [
        "",
        "orders",
        "orders.plain",
    ]


@pytest.mark.parametrize("verb", ["show", "lag"])
def test_a_group_of_an_ordered_subject_is_shown_with_its_frontier(qmq: Command, verb: str) -> None:
    found = qmq.json("group", verb, "orders", "billing")
    assert found["subject"] == "orders"
    assert found["group"] == "billing"
    assert found["version"] == 2
    assert found["latest_version"] == 3
    assert found["frontier"] == [{"first": 0, "end": 1024, "version": 2}]
    assert found["partitions"][0]["left"] == 40
    assert "group billing: version 2 of 3, gate lanes" in qmq.text(
        "group", verb, "orders", "billing"
    )
    assert qmq.json("group", verb, "orders.plain", "billing")[0]["waiting"] == 3
    status, said = qmq.error("group", verb, "orders", "audit")
    assert status == 2
    assert f"[E{UnknownGroup.code}] group 'audit' has never consumed 'orders'" in said


def test_a_group_of_an_ordered_subject_is_reset_as_a_whole(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["ResetGroup"] = control.ResetGroupResponse(
        moved=[control.Moved(partition=1, broker_group="g1", from_sequence=60, to_sequence=0)]
    )
    words = ("group", "reset", "orders", "billing", "--to")
    assert qmq.json(*words, "earliest") == [
        {"partition": 1, "broker_group": "g1", "from": 60, "to": 0}
    ]
    qmq.json(*words, "2026-11-21T09:30:00Z")
    assert [each.WhichOneof("target") for each in meta.requests("ResetGroup")] == [
        "earliest",
        "time_ms",
    ]
    meta.answers["ResetGroup"] = InvalidArgument(
        "'orders' is ordered: a sequence counts in one partition only"
    )
    status, said = qmq.error(*words, "7")
    assert (status, "a sequence counts in one partition only" in said) == (2, True)
    status, said = qmq.error(*words, "earliest", "--broker-group", "g1")
    assert (status, "can only be reset as a whole" in said) == (2, True)
    assert len(meta.requests("ResetGroup")) == 3
