"""The command line while a broker group is lost: what the others answer, marked as partial."""

from __future__ import annotations

import pytest
from cli_support import Command, FakeMeta, described, place, route, settings

from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import delay_pb2 as delay
from qmq.proto.v1 import meta_pb2 as pb

SILENT = {"g2": "no master just now"}
QUEUE = control.Queue(subject="s", broker_group="g1", next_sequence=3)
SUBJECTS = pb.ListSubjectsResponse(
    subjects=[pb.SubjectDescription(settings=settings("s", ""), queues=[QUEUE])], silent=SILENT
)


@pytest.mark.parametrize(
    "words",
    [
        ("subject", "list"),
        ("subject", "show", "s"),
        ("group", "list"),
        ("group", "show", "s", "g"),
        ("dlq", "list"),
    ],
)
def test_a_partial_answer_is_marked_and_not_a_failure(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...]
) -> None:
    meta.answers["ListSubjects"] = SUBJECTS
    meta.answers["DescribeGroups"] = control.DescribeGroupsResponse(
        groups=[control.Group(subject="s", group="g", broker_group="g1")], silent=SILENT
    )
    meta.answers["DescribeDeadLetters"] = pb.DescribeDeadLettersResponse(
        queues=[pb.DeadLetterQueue(group="g", broker_group="g1", messages=1)], silent=SILENT
    )
    done = qmq(*words)
    assert done.exit_code == 0
    assert "partial: broker group g2 is missing (no master just now)" in done.stderr
    assert "g1" in done.stdout
    assert [each["silent_groups"] for each in qmq.json(*words)] == [["g2"]]


def test_an_ordered_group_names_the_missing_consumers(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["ListSubjects"] = pb.ListSubjectsResponse(
        subjects=[pb.SubjectDescription(settings=settings())]
    )
    meta.answers["DescribeRoute"] = described(
        groups=[pb.OrderedGroup(group="g", version=1)], silent_groups=["g2"]
    )
    done = qmq("group", "show", "orders", "g")
    assert (done.exit_code, "partial: broker group g2 is missing" in done.stderr) == (0, True)
    assert qmq.json("group", "show", "orders", "g")["silent_groups"] == ["g2"]


def test_delayed_messages_are_listed_without_a_lost_delay_group(
    meta: FakeMeta, qmq: Command
) -> None:
    meta.answers["ListDelayed"] = delay.ListDelayedResponse(silent={"d2": "no master just now"})
    done = qmq("delay", "list")
    assert (done.exit_code, "partial: broker group d2 is missing" in done.stderr) == (0, True)


def test_a_parked_key_is_not_replayed_while_an_older_part_may_be_away(
    meta: FakeMeta, qmq: Command
) -> None:
    key = control.ParkedKey(partition=2, key=b"k", messages=1)
    meta.answers["DescribeParked"] = control.DescribeParkedResponse(keys=[key], silent=SILENT)
    code, said = qmq.error("dlq", "replay", "orders", "g", "k")
    assert (code, "nothing was done: no master just now" in said) == (3, True)
    assert not meta.requests("Unpark")


def test_draining_a_lost_broker_group_says_what_will_happen(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["ListSubjects"] = pb.ListSubjectsResponse(
        subjects=[pb.SubjectDescription(settings=settings())], silent=SILENT
    )
    meta.answers["DescribeRoute"] = described(
        places=(place(1, 0, 1024, "g2"),), silent_groups=["g2"]
    )
    meta.answers["DescribeCluster"] = pb.DescribeClusterResponse(
        groups=[
            pb.GroupDescription(
                broker_group="g1", health="read-write", mode="read-write", master="a"
            ),
            pb.GroupDescription(broker_group="g2", health="offline", mode="read-write"),
        ]
    )
    meta.answers["ChangeRoute"] = pb.ChangeRouteResponse(route=route(2, place(2, 0, 1024, "g1")))
    meta.answers["SetGroupMode"] = lambda request: pb.SetGroupModeResponse(mode=request.mode)
    done = qmq("broker", "drain", "g2", "--dry-run")
    assert (done.exit_code, "g2 has no master" in done.stderr) == (0, True)
    done = qmq("broker", "drain", "g1", "--dry-run", "--no-move")
    assert (done.exit_code, done.stderr) == (0, "")


def test_a_group_is_deleted_once_its_name_is_typed_again(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["DeleteGroup"] = control.DeleteGroupResponse(queues=2)
    meta.answers["DescribeParked"] = control.DescribeParkedResponse(
        keys=[control.ParkedKey(key=b"k"), control.ParkedKey(key=b"l")]
    )
    code, said = qmq.error("group", "delete", "s", "g")
    assert "type g to delete it with its 2 parked keys" in said
    assert (code, meta.requests("DeleteGroup")) == (1, [])
    assert qmq.json("group", "delete", "s", "g", "--yes") == [
        {"subject": "s", "group": "g", "queues": 2}
    ]
