"""`qmq route show`, `history`, `explain`, `policy`: the JSON keeps its shape, and the text has the
necessary facts.
"""

from __future__ import annotations

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
    lps,
    place,
    route,
    status,
)

from qmq.errors import OrderMismatch, UnknownSubject
from qmq.operations.routes import messages_left
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

TARGETS = (place(4, 256, 384, "g1"), place(5, 384, 512, "g2"))
AFTER = (PLACES[0], *TARGETS, PLACES[2])
TIMES = {
    "prepared": 1_790_000_000_000,
    "sealed": 1_790_000_000_040,
    "published": 1_790_000_000_052,
    "done": 1_790_000_009_000,
}
SPLIT = change(
    "split", 2, (2,), *TARGETS, phase="done", reason="hot", times_ms=TIMES, sealed={2: 99}
)

PARTITION_FIELDS = (
    "partition first end width_percent broker_group state sealed_at messages bytes "
    "messages_per_s bytes_per_s bent_messages"
)
GROUP_FIELDS = (
    "group version gate is_ready is_paused frontier consumers left parked_keys lag_ms lanes "
    "partitions"
)
READING_FIELDS = (
    "partition first end broker_group left lag_ms is_finished parked_keys parked_messages "
    "is_full holders"
)
CHANGE_FIELDS = (
    "id kind to_version sources targets phase reason times_ms sealed refused_ms refused_ms_max"
)


def lagging() -> pb.OrderedGroup:
    """A group that has finished half of the split partition 2."""
    progress = [done(256, 384, 100, is_finished=True), done(384, 512, 60)]
    holder = control.LaneHolder(
        lps=lps(384, 512), consumer="c1", token=3, seen_ms_ago=5, lease_ms=30_000
    )
    old = status(
        2,
        "g1",
        end=100,
        sealed_at=99,
        progress=progress,
        holders=[holder],
        lag_ms=700,
        parked_keys=1,
        parked_messages=4,
    )
    frontier = [
        pb.GroupRange(lps=lps(first, end), version=version)
        for first, end, version in ((0, 384, 2), (384, 512, 1), (512, 1024, 2))
    ]
    lane = pb.AssignedLane(
        partition=2, lps=lps(384, 512), broker_group="g1", version=1, consumer="c1"
    )
    return group(
        "billing",
        1,
        old,
        frontier=frontier,
        consumers=["c1"],
        backlog=20,
        parked_keys=1,
        lanes=[lane],
    )


MOVE = change("move", 3, (3,), place(6, 512, 1024, "g1"), phase="prepared", reason="full disk")


def asked(meta: FakeMeta, **fields: Any) -> None:
    latest = described(2, AFTER, groups=[lagging()], **fields)
    meta.answers["DescribeRoute"] = lambda request: described(1) if request.version == 1 else latest
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(changes=[SPLIT])


def test_json_of_a_route_has_all_there_is_to_know(meta: FakeMeta, qmq: Command) -> None:
    asked(meta, change=MOVE, silent_groups=["g3"])
    found = qmq.json("route", "show", "orders")
    assert " ".join(found) == (
        "subject order fencing logical_partitions version latest_version partitions "
        "older_partitions groups change silent_groups"
    )
    assert found["subject"] == "orders"
    assert found["order"] == "strict"
    assert found["fencing"] == "lease"
    assert found["version"] == 2
    assert [" ".join(each) for each in found["partitions"]] == [PARTITION_FIELDS] * 4
    assert [
        (each["partition"], each["width_percent"], each["state"]) for each in found["partitions"]
    ] == [(1, 25.0, "open"), (4, 12.5, "open"), (5, 12.5, "open"), (3, 50.0, "open")]
    (old,) = found["older_partitions"]
    assert old["partition"] == 2
    assert old["first"] == 256
    assert old["end"] == 512
    assert old["state"] == "sealed"
    assert old["sealed_at"] == 99
    assert old["messages"] == 99
    (billing,) = found["groups"]
    assert " ".join(billing) == GROUP_FIELDS
    assert billing["version"] == 1
    assert billing["left"] == 20
    assert billing["lag_ms"] == 700
    assert billing["parked_keys"] == 1
    assert billing["frontier"][1] == {"first": 384, "end": 512, "version": 1}
    assert billing["lanes"] == [
        {
            "partition": 2,
            "first": 384,
            "end": 512,
            "broker_group": "g1",
            "version": 1,
            "consumer": "c1",
        }
    ]
    (reading,) = billing["partitions"]
    assert " ".join(reading) == READING_FIELDS
    assert (reading["left"], reading["is_finished"]) == (20, False)
    assert reading["holders"] == [
        {
            "consumer": "c1",
            "first": 384,
            "end": 512,
            "seen_ms_ago": 5,
            "client": "",
            "is_paused": False,
        }
    ]
    assert " ".join(found["change"]) == CHANGE_FIELDS
    assert found["silent_groups"] == ["g3"]


def test_people_see_the_route_the_groups_and_what_is_under_way(
    meta: FakeMeta, qmq: Command
) -> None:
    asked(meta, change=MOVE, silent_groups=["g3"])
    shown = qmq.text("route", "show", "orders")
    lines = shown.splitlines()
    assert lines[0] == "subject orders: strict order, 1,024 logical partitions, route version 2"
    assert lines[1].startswith("│1░░░")
    assert len(lines[1]) == 160
    assert lines[3] == "░ g1  ▒ g2"
    for text in (
        "partitions of older versions that are still read or waited for",
        "sealed at 99",
        "group billing: version 1 of 2, gate lanes",
        "consumers 1, lanes 1, left 20, oldest <1 s, parked keys 1",
        "│v2▒",
        "│v1░",
        "░ version 1  ▒ version 2",
        "c1 [384, 512)",
        "under way: move 3 -> 6 [512, 1024) on g1, to version 3: prepared (full disk)",
        "partial: no answer from g3",
    ):
        assert text in shown, text


def test_an_even_frontier_needs_no_bar_of_its_own(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["DescribeRoute"] = described(groups=[group("billing", 1, status(1, "g1"))])
    shown = qmq.text("route", "show", "orders")
    assert "│v1" not in shown
    assert "no consumer group" not in shown
    meta.answers["DescribeRoute"] = described()
    assert "no consumer group" in qmq.text("route", "show", "orders")


def test_the_first_partitions_places_are_asked_only_if_the_history_lacks_them(
    meta: FakeMeta, qmq: Command
) -> None:
    asked(meta)
    qmq.json("route", "show", "orders")
    assert [each.version for each in meta.requests("DescribeRoute")] == [0, 1]
    meta.asked.clear()
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(
        changes=[change("split", 1, (9,), place(2, 256, 512, "g1"))]
    )
    qmq.json("route", "show", "orders")
    assert [each.version for each in meta.requests("DescribeRoute")] == [0]


def test_a_fenced_partition_and_one_without_an_answer_are_distinguished(
    meta: FakeMeta, qmq: Command
) -> None:
    places = (PLACES[0], place(4, 256, 384, "g3"), place(5, 384, 512, "g3"), PLACES[2])
    silent = described(
        2,
        route=route(2, *places, fenced=(4,)),
        partitions=[status(1, "g1"), status(3, "g2")],
        silent_groups=["g3"],
    )
    meta.answers["DescribeRoute"] = silent
    found = qmq.json("route", "show", "orders")
    assert {
        each["partition"]: (each["state"], each["messages"]) for each in found["partitions"]
    } == {1: ("open", 100), 3: ("open", 100), 4: ("fenced", None), 5: ("unknown", None)}
    assert "fenced" in qmq.text("route", "show", "orders")


def test_a_fenced_partition_is_shown_as_long_as_its_broker_group_is_away(
    meta: FakeMeta, qmq: Command
) -> None:
    moved = (PLACES[0], place(4, 256, 512, "g2"), PLACES[2])
    fenced = described(2, moved, route=route(2, *moved, fenced=(2,)), silent_groups=["g1"])
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(
        changes=[change("move", 2, (2,), moved[1], sealed={2: -1})]
    )
    meta.answers["DescribeRoute"] = lambda request: described(1) if request.version else fenced
    (old,) = qmq.json("route", "show", "orders")["older_partitions"]
    assert old["partition"] == 2
    assert old["first"] == 256
    assert old["end"] == 512
    assert old["broker_group"] == "g1"
    assert old["state"] == "fenced"
    fenced.ClearField("silent_groups")
    assert qmq.json("route", "show", "orders")["older_partitions"] == []


def test_a_partition_that_its_broker_does_not_know_is_open_and_empty(
    meta: FakeMeta, qmq: Command
) -> None:
    meta.answers["DescribeRoute"] = described(partitions=[status(1, "g1")])
    found = qmq.json("route", "show", "orders")
    assert [
        (each["partition"], each["state"], each["messages"], each["broker_group"])
        for each in found["partitions"]
    ] == [(1, "open", 100, "g1"), (2, "open", 0, "g1"), (3, "open", 0, "g2")]


def test_best_effort_order_says_how_often_it_was_bent(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["DescribeRoute"] = described(partitions=[status(1, "g1", bent_messages=1200)])
    assert "1,200 messages were taken out of order" in qmq.text("route", "show", "orders")


@pytest.mark.parametrize(
    ("progress", "fields", "left"),
    [
        ([], {}, 90),
        ([], {"sealed_at": 99}, 89),
        ([done(0, 256, 40)], {}, 60),
        ([done(0, 256, 4)], {}, 90),
        ([done(0, 128, 100), done(128, 256, 60)], {}, 20),
        ([done(0, 128, 99, is_finished=True), done(128, 256, 98)], {"sealed_at": 99}, 1),
        ([done(0, 256, 100, is_finished=True)], {"sealed_at": 99}, 0),
        ([done(0, 192, 100), done(192, 256, 99)], {}, 1),
    ],
)
def test_the_rest_is_counted_by_range_without_the_command_message(
    progress: list[control.LaneProgress], fields: dict[str, Any], left: int
) -> None:
    assert messages_left(status(1, "g1", start=10, end=100, progress=progress, **fields)) == left


def test_history_tells_phases_and_for_how_long_writers_were_refused(
    meta: FakeMeta, qmq: Command
) -> None:
    begun = change(
        "move",
        3,
        (3,),
        place(6, 512, 1024, "g1"),
        phase="prepared",
        times_ms={"prepared": TIMES["done"]},
    )
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(changes=[SPLIT, begun])
    first, second = qmq.json("route", "history", "orders")
    assert " ".join(first) == " ".join(second) == CHANGE_FIELDS
    assert first["kind"] == "split"
    assert first["sources"] == [2]
    assert first["phase"] == "done"
    assert first["reason"] == "hot"
    assert first["sealed"] == {"2": 99}
    assert first["targets"][1] == {"partition": 5, "first": 384, "end": 512, "broker_group": "g2"}
    assert (first["refused_ms"], first["refused_ms_max"]) == (12, 52)
    assert (second["refused_ms"], second["refused_ms_max"]) == (None, None)
    shown = qmq.text("route", "history", "orders")
    for text in ("+40", "+52", "+9,000", "12 to 52", "split 2 -> 4 g1, 5 g2", "hot"):
        assert text in shown, text


def explained(**fields: Any) -> pb.ExplainReshardResponse:
    policy = pb.ReshardPolicy(
        subject="orders",
        is_enabled=True,
        split_messages_per_s=1000,
        partitions_min=1,
        partitions_max=64,
    )
    return pb.ExplainReshardResponse(policy=policy, **fields)


def test_an_explanation_says_what_would_be_done_and_why(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["ExplainReshard"] = explained(
        operation="split 2",
        reasons=["partition 2 takes 1,800 messages/s"],
        last_operation="merge 1 3",
        last_reasons=["cold"],
        last_ms=1,
    )
    found = qmq.json("route", "explain", "orders")
    assert " ".join(found) == "policy operation reasons last_operation last_reasons last_ms"
    assert found["operation"] == "split 2"
    assert qmq.text("route", "explain", "orders").splitlines() == [
        "automatic resharding of orders is on",
        "would be done now: split 2",
        "  partition 2 takes 1,800 messages/s",
        "last, at 1970-01-01T00:00:00.001+00:00: merge 1 3",
        "  cold",
    ]
    meta.answers["ExplainReshard"] = pb.ExplainReshardResponse()
    shown = qmq.text("route", "explain", "orders")
    assert "is off: `qmq route policy orders --enable`" in shown
    assert "now: nothing" in shown


def test_only_the_given_settings_of_a_policy_change(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["ExplainReshard"] = explained()
    meta.answers["SetReshardPolicy"] = lambda request: request.policy
    (now,) = qmq.json("route", "policy", "orders")
    assert " ".join(now) == (
        "subject is_enabled split_messages_per_s split_bytes_per_s split_backlog "
        "merge_messages_per_s merge_bytes_per_s merge_quiet_ms cool_down_ms partitions_min "
        "partitions_max"
    )
    words = ("route", "policy", "orders", "--disable", "split_backlog=500", "cool_down_ms=1500")
    (planned,) = qmq.json(*words, "--dry-run")
    assert meta.requests("SetReshardPolicy") == []
    (after,) = qmq.json(*words)
    assert (
        after == planned == now | {"is_enabled": False, "split_backlog": 500, "cool_down_ms": 1500}
    )
    (request,) = meta.requests("SetReshardPolicy")
    assert request.policy.subject == "orders"
    assert request.policy.split_messages_per_s == 1000
    assert request.policy.split_backlog == 500
    assert "partitions max" in qmq.text("route", "policy", "orders")
    status, said = qmq.error("route", "policy", "orders", "partitions_min=100")
    assert (status, "partitions_min=100 is above partitions_max=64" in said) == (2, True)
    status, said = qmq.error("route", "policy", "orders", "--watch", "--disable")
    assert status == 2
    assert "--watch shows the policy" in said
    assert len(meta.requests("SetReshardPolicy")) == 1


@pytest.mark.parametrize("verb", ["show", "history", "explain", "policy"])
def test_a_subject_that_has_no_route_is_an_error_that_says_so(
    meta: FakeMeta, qmq: Command, verb: str
) -> None:
    for failure in (
        OrderMismatch("subject 'orders' is unordered: it has no route"),
        UnknownSubject("there is no subject 'orders'"),
    ):
        for call in ("DescribeRoute", "RouteHistory", "ExplainReshard"):
            meta.answers[call] = failure
        status, said = qmq.error("route", verb, "orders")
        assert (status, failure.message in said) == (2, True)
