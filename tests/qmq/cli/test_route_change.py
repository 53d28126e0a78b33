"""`qmq route split`, `merge`, `move`: their requests, the dry run's output, and waiting for
consumer groups.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from cli_support import (
    PLACES,
    Command,
    FakeMeta,
    change,
    described,
    done,
    group,
    place,
    route,
    serving,
    status,
)

from qmq.errors import RouteConflict
from qmq.proto.v1 import meta_pb2 as pb

TARGETS = (place(4, 256, 384, "g1"), place(5, 384, 512, "g2"))
AFTER = (PLACES[0], *TARGETS, PLACES[2])
TIMES = {"prepared": 1_000, "sealed": 1_040, "published": 1_052}
SPLIT = change("split", 2, (2,), *TARGETS, reason="hot", times_ms=TIMES, sealed={2: 100})
MERGE = change("merge", 2, (1, 2), place(4, 0, 512, "g2"))
MOVE = change("move", 2, (3,), place(4, 512, 1024, "g1"))


def answers(
    meta: FakeMeta,
    made: pb.RouteChangeInfo,
    after: tuple[pb.OrderedPartition, ...] = AFTER,
    **fields: Any,
) -> None:
    meta.answers["DescribeRoute"] = described(**fields)
    meta.answers["ChangeRoute"] = pb.ChangeRouteResponse(change=made, route=route(2, *after))
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse()


@pytest.mark.parametrize(
    ("words", "operation"),
    [
        (("split", "orders", "2"), {"split": pb.SplitOperation(partition=2, parts=2)}),
        (
            ("split", "orders", "2", "--partitions", "3"),
            {"split": pb.SplitOperation(partition=2, parts=3)},
        ),
        (
            ("split", "orders", "2", "--at", "400", "--at", "300"),
            {"split": pb.SplitOperation(partition=2, at=[300, 400])},
        ),
        (
            ("split", "orders", "2", "--to", "g1,g2"),
            {"split": pb.SplitOperation(partition=2, parts=2, broker_groups=["g1", "g2"])},
        ),
        (
            ("split", "orders", "2", "--at", "300", "--to", "g1", "--to", "g2"),
            {"split": pb.SplitOperation(partition=2, at=[300], broker_groups=["g1", "g2"])},
        ),
        (
            ("split", "orders", "2", "--partitions", "3", "--to", "g2"),
            {"split": pb.SplitOperation(partition=2, parts=3, broker_groups=["g2"] * 3)},
        ),
        (("merge", "orders", "1", "2"), {"merge": pb.MergeOperation(partitions=[1, 2])}),
        (
            ("merge", "orders", "1", "2", "3", "--to", "g2"),
            {"merge": pb.MergeOperation(partitions=[1, 2, 3], broker_group="g2")},
        ),
        (
            ("move", "orders", "3", "--to", "g1"),
            {"move": pb.MoveOperation(partition=3, broker_group="g1")},
        ),
    ],
)
def test_a_change_is_asked_for_from_the_version_that_was_looked_at(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...], operation: dict[str, Any]
) -> None:
    answers(meta, SPLIT)
    qmq.text("route", *words, "--reason", "hot", "--no-wait")
    expected = {"subject": "orders", "from_version": 1, "reason": "hot", **operation}
    (asked,) = meta.requests("ChangeRoute")
    assert asked.change_id
    assert asked == pb.ChangeRouteRequest(**expected, change_id=asked.change_id)
    meta.asked.clear()
    qmq.text("route", *words, "--reason", "hot", "--dry-run")
    assert meta.requests("ChangeRoute") == [pb.ChangeRouteRequest(**expected, dry_run=True)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("split", "orders", "9"),
            "partition 9 is not in route version 1 of 'orders': it has 1, 2, 3",
        ),
        (
            ("split", "orders", "2", "--at", "300", "--partitions", "3"),
            "--at makes 2 parts, but --partitions is 3",
        ),
        (
            ("split", "orders", "2", "--partitions", "3", "--to", "g1,g2"),
            "--to names 2 broker groups for 3 parts",
        ),
        (("merge", "orders", "1"), "give two or more partitions"),
        (("merge", "orders", "1", "7", "8"), "partition 7, 8 is not in route version 1"),
        (("move", "orders", "3", "--to", "g2"), "partition 3 is already on g2"),
        (("move", "orders", "3"), "Missing option '--to'"),
    ],
)
def test_a_mistake_is_found_before_anything_is_asked_for(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...], says: str
) -> None:
    answers(meta, SPLIT)
    status, said = qmq.error("route", *words)
    assert (status, says in said) == (2, True), said
    assert meta.requests("ChangeRoute") == []


def test_a_dry_run_prints_the_whole_plan_as_json(meta: FakeMeta, qmq: Command) -> None:
    billing = group(
        "billing", 1, status(2, "g1", progress=[done(256, 512, 60)]), status(1, "g1"), backlog=140
    )
    answers(meta, change("split", 2, (2,), *TARGETS, phase="prepared"), groups=[billing])
    earlier = change("move", 1, (9,), place(2, 256, 512, "g1"), phase="done", times_ms=TIMES)
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(changes=[earlier])
    found = qmq.json("route", "split", "orders", "2", "--dry-run")
    assert " ".join(found) == (
        "subject from_version change before after refused_percent last_refused_ms_max groups undo"
    )
    assert [each["partition"] for each in found["before"]] == [1, 2, 3]
    assert [each["partition"] for each in found["after"]] == [1, 4, 5, 3]
    assert (found["refused_percent"], found["last_refused_ms_max"]) == (25.0, 52)
    assert found["groups"] == [{"group": "billing", "version": 1, "left": 40}]
    assert found["undo"] == "qmq route merge orders 4 5 --to g1"


def test_a_dry_run_draws_the_new_route_below_the_old_one(meta: FakeMeta, qmq: Command) -> None:
    answers(
        meta, SPLIT, groups=[group("billing", 1, status(2, "g1", progress=[done(256, 512, 60)]))]
    )
    lines = qmq.text("route", "split", "orders", "2", "--dry-run").splitlines()
    assert lines[0] == (
        "would be: split 2 -> 4 [256, 384) on g1, 5 [384, 512) on g2, to version 2: published (hot)"
    )
    bars = [line for line in lines if line.startswith("│")]
    assert [bar.count("│") for bar in bars] == [4, 5]
    assert bars[0].index("│2") == bars[1].index("│4")
    text = " ".join(lines)
    assert (
        "Writers of partition 2 (25 % of the keys) are refused until it is published: no "
        "change of this subject has been made"
    ) in text
    assert "Group billing (version 1) finishes 40 messages in 2 before it continues." in text
    assert lines[-1] == "To undo it: qmq route merge orders 4 5 --to g1"


@pytest.mark.parametrize(
    ("words", "made", "after", "undo"),
    [
        (
            ("merge", "orders", "1", "2", "--to", "g2"),
            MERGE,
            (place(4, 0, 512, "g2"), PLACES[2]),
            "split orders 4 --at 256 --to g1 --to g1",
        ),
        (
            ("move", "orders", "3", "--to", "g1"),
            MOVE,
            (*PLACES[:2], place(4, 512, 1024, "g1")),
            "move orders 4 --to g2",
        ),
    ],
)
def test_what_undoes_a_change_leads_back_to_the_same_ranges_and_groups(
    meta: FakeMeta,
    qmq: Command,
    words: tuple[str, ...],
    made: pb.RouteChangeInfo,
    after: Any,
    undo: str,
) -> None:
    answers(meta, made, after)
    assert qmq.json("route", *words, "--dry-run")["undo"] == f"qmq route {undo}"


def test_a_change_is_over_when_every_group_has_advanced(meta: FakeMeta, qmq: Command) -> None:
    answers(meta, SPLIT)
    old = status(2, "g1", sealed_at=99)
    meta.answers["DescribeRoute"] = [
        described(groups=[group("billing", 1, old)]),
        described(
            2, AFTER, groups=[group("billing", 1, old, consumers=["c"]), group("audit", 1, old)]
        ),
        described(2, AFTER, groups=[group("billing", 2, consumers=["c"]), group("audit", 1, old)]),
        described(2, AFTER, groups=[group("billing", 2, consumers=["c"]), group("audit", 3)]),
    ]
    done = qmq("route", "split", "orders", "2")
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "split 2 -> 4 [256, 384) on g1, 5 [384, 512) on g2, to version 2: published (hot)"
    )
    assert done.stderr.splitlines() == [
        "version 2 of orders is published",
        "group audit has no consumer: it follows when one connects",
        "group billing reads version 2",
        "group audit reads version 3",
    ]
    assert len(meta.requests("DescribeRoute")) == 4


@pytest.mark.sampled
def test_waiting_outlasts_a_metaserver_that_is_away(
    meta: FakeMeta, qmq: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpc import StatusCode

    answers(meta, SPLIT)
    away = [StatusCode.UNAVAILABLE] * 30
    meta.answers["DescribeRoute"] = [
        described(),
        *away,
        described(2, AFTER, groups=[group("billing", 2)]),
    ]
    assert qmq.json("route", "split", "orders", "2")["groups"] == [
        {"group": "billing", "version": 2}
    ]


def test_json_of_a_change_says_what_was_done_and_how_to_undo_it(
    meta: FakeMeta, qmq: Command
) -> None:
    answers(meta, SPLIT, groups=[group("billing", 1, status(2, "g1"))])
    found = qmq.json("route", "split", "orders", "2", "--no-wait")
    assert list(found) == ["subject", "change", "undo", "groups"]
    assert (found["change"]["id"], found["change"]["refused_ms_max"]) == ("change-2", 52)
    assert found["groups"] == [{"group": "billing", "version": 1}]
    assert found["undo"] == "qmq route merge orders 4 5 --to g1"


def test_a_route_that_changed_meanwhile_is_refused_not_changed_blindly(
    meta: FakeMeta, qmq: Command
) -> None:
    answers(meta, SPLIT)
    meta.answers["ChangeRoute"] = RouteConflict("the latest version is 2, not 1: look again")
    status, said = qmq.error("route", "split", "orders", "2")
    assert (status, "the latest version is 2, not 1" in said) == (2, True)


def test_ctrl_c_ends_the_waiting_and_says_that_the_change_continues() -> None:
    with serving() as (meta, address):
        answers(meta, SPLIT, groups=[group("billing", 1, status(2, "g1"))])
        words = ("route", "split", "orders", "2", "--server", address)
        # Who runs the tests may ignore the signal.
        command = ["env", "--default-signal=INT", sys.executable, "-m", "qmq.cli", *words]
        environment = {**os.environ, "COLUMNS": "200"}
        waiting = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert waiting.stderr is not None
        assert "is published" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        _, said = waiting.communicate(timeout=30)
    assert waiting.returncode == 130
    assert (
        "the change is published; consumer groups follow by themselves: `qmq route show "
        "orders` shows its progress"
    ) in said
