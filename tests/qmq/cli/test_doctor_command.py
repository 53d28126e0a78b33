"""`qmq doctor`: its output, and the exit status for scripts."""

from __future__ import annotations

import asyncio
import json

import pytest
from cli_support import Command, FakeMeta, settings
from typer.testing import CliRunner

from qmq.cli.app import app
from qmq.cli.doctor import paragraph
from qmq.errors import AccessDenied
from qmq.node.dev_node import Node
from qmq.operations.text import Finding, FindingKind, Severity
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


def replica(name: str, role: str = "slave") -> pb.ReplicaDescription:
    status = control.ReplicaStatus(
        replica=name, role=role, is_whole=True, is_serving=role == "master", epoch=3
    )
    return pb.ReplicaDescription(replica=name, is_present=True, status=status)


def cluster(*groups: pb.GroupDescription) -> pb.DescribeClusterResponse:
    return pb.DescribeClusterResponse(groups=groups, process=control.ProcessStatus(version="0.1.0"))


def broker_group(
    name: str, *replicas: pb.ReplicaDescription, mode: str = "read-write"
) -> pb.GroupDescription:
    found = replicas or (replica("a", "master"), replica("b"), replica("c"))
    master = next((each.replica for each in found if each.status.role == "master"), "")
    health = mode if master else "offline"
    voters = [each.replica for each in found]
    return pb.GroupDescription(
        broker_group=name,
        health=health,
        mode=mode,
        master=master,
        epoch=3,
        voters=voters,
        replicas=found,
    )


def consumed(lag_ms: int) -> control.DescribeGroupsResponse:
    held = control.Consumer(name="c1", unacked=1)
    return control.DescribeGroupsResponse(
        groups=[
            control.Group(
                subject="s",
                group="g",
                broker_group="g1",
                next_sequence=5,
                waiting=5,
                lag_ms=lag_ms,
                consumers=[held],
            )
        ]
    )


@pytest.fixture
def well(meta: FakeMeta) -> FakeMeta:
    """The answers of a healthy cluster."""
    queue = control.Queue(subject="s", broker_group="g1", next_sequence=10)
    meta.answers |= {
        "DescribeCluster": cluster(broker_group("g1")),
        "ListSubjects": pb.ListSubjectsResponse(
            subjects=[pb.SubjectDescription(settings=settings("s", ""), queues=[queue])]
        ),
        "DescribeGroups": consumed(0),
        "DescribeDeadLetters": pb.DescribeDeadLettersResponse(),
        "ListPauses": pb.ListPausesResponse(),
    }
    return meta


def test_all_is_well_is_one_line_and_status_zero(well: FakeMeta, qmq: Command) -> None:
    done = qmq("doctor", "--interval", "0")
    assert (done.exit_code, done.stderr) == (0, "")
    assert (
        done.stdout
        == "nothing unusual in 1 metaserver, 1 broker group, 1 subject, 1 consumer group\n"
    )
    assert len(well.requests("ListSubjects")) == 1


def test_doctor_looks_twice_by_default(well: FakeMeta, qmq: Command) -> None:
    assert qmq("doctor", "--interval", "0.01").exit_code == 0
    assert len(well.requests("ListSubjects")) == 2


def test_a_warning_says_why_and_what_to_do_and_has_status_four(
    well: FakeMeta, qmq: Command
) -> None:
    well.answers["DescribeGroups"] = consumed(400_000)
    done = qmq("doctor", "--interval", "0")
    assert done.exit_code == 4
    first, why, command, last = done.stdout.splitlines()
    assert first == "warning   group g of s: is behind: 5 messages, the oldest 6 min 40 s old"
    assert why.startswith("          Its consumers are too slow")
    assert command == "          try: qmq group show s g"
    assert last.startswith("1 warning in ")


def test_limits_are_options(well: FakeMeta, qmq: Command) -> None:
    well.answers["DescribeGroups"] = consumed(400_000)
    assert qmq("doctor", "--interval", "0", "--lag", "10m").exit_code == 0
    assert qmq("doctor", "--interval", "0", "--lag", "10m", "--lag-messages", "4").exit_code == 4
    assert qmq.error("doctor", "--lag", "long")[0] == 2


def test_a_notice_alone_has_status_zero(well: FakeMeta, qmq: Command) -> None:
    well.answers["DescribeCluster"] = cluster(broker_group("g1", mode="read-only"))
    done = qmq("doctor", "--interval", "0")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1].startswith("1 notice in ")


def test_something_critical_has_status_five_and_comes_first(well: FakeMeta, qmq: Command) -> None:
    well.answers["DescribeGroups"] = consumed(400_000)
    well.answers["DescribeCluster"] = cluster(
        broker_group("g1", replica("a"), replica("b")), broker_group("g2")
    )
    done = qmq("doctor", "--interval", "0")
    assert done.exit_code == 5
    assert done.stdout.startswith("critical  broker group g1: has no master")


def test_json_has_every_finding_with_code_and_command(well: FakeMeta, qmq: Command) -> None:
    well.answers["DescribeGroups"] = consumed(400_000)
    done = qmq("doctor", "--interval", "0", "--json")
    assert done.exit_code == 4
    told = json.loads(done.stdout)
    assert set(told) == {"severity", "is_complete", "time_ms", "findings", "thresholds"}
    assert (told["severity"], told["is_complete"]) == ("warning", True)
    (found,) = told["findings"]
    assert (found["code"], found["command"]) == ("group-lags", "qmq group show s g")


def test_an_unanswered_request_is_a_finding_and_not_a_failure(well: FakeMeta, qmq: Command) -> None:
    del well.answers["DescribeDeadLetters"]
    done = qmq("doctor", "--interval", "0")
    assert done.exit_code == 4
    assert "dead letters: no answer" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("; not everything answered")


def test_without_the_right_to_describe_the_cluster_the_rest_is_shown(
    well: FakeMeta, qmq: Command
) -> None:
    well.answers["DescribeCluster"] = AccessDenied("op:bob may not describe the cluster")
    done = qmq("doctor", "--interval", "0", "--json")
    assert done.exit_code == 4
    (found,) = json.loads(done.stdout)["findings"]
    assert found["code"] == "not-answered"
    assert found["about"] == "cluster"
    assert found["command"] == "qmq whoami"
    assert found["what"] == "no answer: op:bob may not describe the cluster"


def test_without_a_metaserver_the_status_is_three() -> None:
    done = CliRunner().invoke(app, ["doctor", "--server", "127.0.0.1:1"])
    assert done.exit_code == 3
    assert done.stdout.startswith("critical  metaserver 127.0.0.1:1: does not answer")


def test_a_narrow_terminal_breaks_between_words_and_never_a_command() -> None:
    command = "qmq subject place a-subject-with-a-long-name --groups group-1,group-2"
    kind = FindingKind(
        "code", "warning", "a group is behind", "Why it matters to those who read it here."
    )
    found = Finding(kind, Severity.WARNING, "group g", "is behind: 5 messages", command)
    lines = [each.plain for each in paragraph(found, 40)]
    assert lines == [
        "warning   group g: is behind: 5 messages",
        "          Why it matters to those who",
        "          read it here.",
        f"          try: {command}",
    ]


async def test_a_real_node_is_looked_at(node: Node) -> None:
    words = ["doctor", "--interval", "0", "--server", node.address]
    async with asyncio.timeout(120):
        while (done := await asyncio.to_thread(lambda: CliRunner().invoke(app, words))).exit_code:
            assert "does not answer" in done.output  # a busy machine: only that is tried again
    assert "broker group broker-0: has one voter" in done.stdout
