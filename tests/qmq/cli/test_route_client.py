"""The metadata client's calls for ordered subjects: a change is made once at most, even if its answer is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from cli_support import PLACES, FakeMeta, change, described, place, route, serving

from qmq.client.client_timing import ClientTiming
from qmq.client.metadata import MetadataClient
from qmq.client.metadata_answers import is_answer_to
from qmq.errors import DeadlineExceeded, InvalidArgument, NotConnected, Outcome, RouteConflict
from qmq.model import Fencing, Order, SubjectConfig
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

SPLIT = pb.SplitOperation(partition=2, at=[300])
TARGETS = (place(4, 256, 300, "g1"), place(5, 300, 512, "g1"))
AFTER = (PLACES[0], *TARGETS, PLACES[2])
LOST = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
async def served() -> AsyncIterator[tuple[FakeMeta, MetadataClient]]:
    with serving() as (meta, address):
        client = MetadataClient([address], timing=ClientTiming(slow_call_s=2.0, publish_look_s=0.001))
        yield meta, client
        await client.close()


def made(phase: str = "published", **fields: Any) -> pb.RouteChangeInfo:
    return change("split", 2, (2,), *TARGETS, phase=phase, reason="why", **fields)


def response() -> pb.ChangeRouteResponse:
    return pb.ChangeRouteResponse(change=made(), route=route(2, *AFTER))


async def test_a_change_without_a_version_is_never_asked_for_twice(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = LOST
    with pytest.raises(NotConnected):
        await client.change_route("orders", split=SPLIT)
    assert len(meta.requests("ChangeRoute")) == 1


async def test_a_change_from_a_version_is_asked_for_again_when_its_answer_is_lost(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = [LOST, LOST, response()]
    assert await client.change_route("orders", split=SPLIT, from_version=1, reason="why") == response()
    assert [each.from_version for each in meta.requests("ChangeRoute")] == [1, 1, 1]


async def test_a_change_whose_answer_was_lost_is_found_in_the_history(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = [LOST, RouteConflict("the latest version is 2")]
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(changes=[made()])
    meta.answers["DescribeRoute"] = described(2, AFTER)
    assert await client.change_route("orders", split=SPLIT, from_version=1, reason="why") == response()


async def test_a_change_that_was_begun_is_waited_for_until_it_is_published(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = [LOST, RouteConflict("another change is under way")]
    meta.answers["RouteHistory"] = [pb.RouteHistoryResponse(), pb.RouteHistoryResponse(changes=[made()])]
    under_way = described(1, change=made("prepared"))
    meta.answers["DescribeRoute"] = [under_way, under_way, under_way, described(2, AFTER)]
    assert await client.change_route("orders", split=SPLIT, from_version=1, reason="why") == response()


async def test_a_change_that_is_not_published_in_time_has_an_unknown_outcome(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = [LOST, RouteConflict("another change is under way")]
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse()
    meta.answers["DescribeRoute"] = described(1, change=made("sealed"))
    with pytest.raises(DeadlineExceeded) as raised:
        await client.change_route("orders", split=SPLIT, from_version=1, reason="why")
    assert raised.value.outcome is Outcome.UNKNOWN


async def test_a_change_by_another_is_a_conflict(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = [LOST, RouteConflict("the latest version is 2")]
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(changes=[change("move", 2, (3,), place(4, 512, 1024, "g1"))])
    meta.answers["DescribeRoute"] = described(2)
    with pytest.raises(RouteConflict, match="the latest version is 2"):
        await client.change_route("orders", split=SPLIT, from_version=1, reason="why")


async def test_a_conflict_at_the_first_try_is_a_conflict_whatever_the_history_says(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = RouteConflict("the latest version is 2")
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(changes=[made()])
    with pytest.raises(RouteConflict):
        await client.change_route("orders", split=SPLIT, from_version=1, reason="why")
    assert meta.requests("RouteHistory") == []


async def test_a_plan_may_be_asked_for_as_often_as_it_takes(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = [LOST, response()]
    assert await client.change_route("orders", split=SPLIT, dry_run=True) == response()


@pytest.mark.parametrize("operations", [{}, {"split": SPLIT, "move": pb.MoveOperation(partition=1, broker_group="g2")}])
async def test_a_change_is_one_operation(served: tuple[FakeMeta, MetadataClient], operations: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="one split, one merge or one move"):
        await served[1].change_route("orders", **operations)


MERGE = pb.MergeOperation(partitions=[2, 1])
MOVE = pb.MoveOperation(partition=3, broker_group="g1")
MERGED, MOVED = change("merge", 2, (1, 2), place(4, 0, 512, "g1")), change("move", 2, (3,), place(4, 512, 1024, "g1"))
HALVES = change("split", 2, (2,), place(4, 256, 384, "g1"), place(5, 384, 512, "g2"))


@pytest.mark.parametrize(
    ("operation", "found", "is_answer"),
    [
        ({"split": SPLIT}, change("split", 2, (2,), *TARGETS), True),
        ({"split": pb.SplitOperation(partition=2, at=[301])}, change("split", 2, (2,), *TARGETS), False),
        ({"split": pb.SplitOperation(partition=1, at=[300])}, change("split", 2, (2,), *TARGETS), False),
        ({"split": pb.SplitOperation(partition=2)}, HALVES, True),
        ({"split": pb.SplitOperation(partition=2, parts=3)}, HALVES, False),
        ({"split": pb.SplitOperation(partition=2, broker_groups=["g1", "g2"])}, HALVES, True),
        ({"split": pb.SplitOperation(partition=2, broker_groups=["g2", "g1"])}, HALVES, False),
        ({"merge": MERGE}, MERGED, True),
        ({"merge": pb.MergeOperation(partitions=[1, 2], broker_group="g2")}, MERGED, False),
        ({"merge": pb.MergeOperation(partitions=[1, 2, 3])}, MERGED, False),
        ({"move": MOVE}, MOVED, True),
        ({"move": pb.MoveOperation(partition=3, broker_group="g3")}, MOVED, False),
        ({"move": MOVE}, MERGED, False),
    ],
)
def test_a_change_is_known_again_by_all_that_was_asked_for(operation: dict[str, Any], found: pb.RouteChangeInfo, is_answer: bool) -> None:
    assert is_answer_to(pb.ChangeRouteRequest(subject="orders", from_version=1, **operation), found) is is_answer
    assert not is_answer_to(pb.ChangeRouteRequest(subject="orders", from_version=1, reason="another", **operation), found)


async def test_a_key_is_unparked_once_whatever_happens_to_the_answer(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["Unpark"] = LOST
    with pytest.raises(NotConnected):
        await client.unpark("orders", "billing", 2, b"k", replay=True)
    assert len(meta.requests("Unpark")) == 1


Ask = Callable[[MetadataClient], Any]


@pytest.mark.parametrize(
    ("call", "ask", "answer", "request_", "result"),
    [
        (
            "DescribeRoute",
            lambda mq: mq.describe_route("orders", 3),
            described(3),
            pb.DescribeRouteRequest(subject="orders", version=3),
            described(3),
        ),
        (
            "RouteHistory",
            lambda mq: mq.route_history("orders"),
            pb.RouteHistoryResponse(changes=[MOVED]),
            pb.RouteHistoryRequest(subject="orders"),
            [MOVED],
        ),
        (
            "DescribeParked",
            lambda mq: mq.parked("orders", "g", keys_max=7),
            control.DescribeParkedResponse(keys=[control.ParkedKey(partition=1, key=b"k")]),
            control.DescribeParkedRequest(subject="orders", group="g", keys_max=7),
            [control.ParkedKey(partition=1, key=b"k")],
        ),
        (
            "Unpark",
            lambda mq: mq.unpark("orders", "g", 1, b"k", replay=False),
            control.UnparkResponse(messages=4),
            control.UnparkRequest(subject="orders", group="g", partition=1, key=b"k"),
            4,
        ),
        (
            "SetReshardPolicy",
            lambda mq: mq.set_reshard_policy(pb.ReshardPolicy(subject="orders", split_backlog=9)),
            pb.ReshardPolicy(subject="orders", split_backlog=9),
            pb.SetReshardPolicyRequest(policy=pb.ReshardPolicy(subject="orders", split_backlog=9)),
            pb.ReshardPolicy(subject="orders", split_backlog=9),
        ),
        (
            "ExplainReshard",
            lambda mq: mq.explain_reshard("orders"),
            pb.ExplainReshardResponse(operation="nothing"),
            pb.ExplainReshardRequest(subject="orders"),
            pb.ExplainReshardResponse(operation="nothing"),
        ),
    ],
)
async def test_calls_pass_their_arguments_and_harmless_ones_survive_a_lost_answer(
    served: tuple[FakeMeta, MetadataClient], call: str, ask: Ask, answer: Any, request_: Any, result: Any
) -> None:
    meta, client = served
    meta.answers[call] = answer if call == "Unpark" else [LOST, answer]
    assert await ask(client) == result
    assert meta.requests(call)[-1] == request_


async def test_an_ordered_subject_is_created_with_all_that_was_chosen(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["CreateSubject"] = pb.CreateSubjectResponse()
    config = SubjectConfig("orders", order=Order.BEST_EFFORT, logical_partitions=64, fencing=Fencing.MAJORITY)
    await client.create_subject(config, partitions=4)
    (request,) = meta.requests("CreateSubject")
    found = request.settings
    assert (found.order, found.logical_partitions, found.fencing, found.partitions) == ("best-effort", 64, "majority", 4)
    await client.create_subject(SubjectConfig("plain"))
    found = meta.requests("CreateSubject")[1].settings
    assert (found.order, found.logical_partitions, found.fencing, found.partitions) == ("", 0, "", 0)
    with pytest.raises(InvalidArgument, match="is unordered"):
        await client.create_subject(SubjectConfig("plain"), partitions=4)


async def test_a_change_that_a_metaserver_left_under_way_is_not_asked_for_again(served: tuple[FakeMeta, MetadataClient]) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = DeadlineExceeded("it is prepared, and continues by itself", outcome=Outcome.STORED)
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(changes=[made()])
    meta.answers["DescribeRoute"] = [described(1, change=made("prepared")), described(1, change=made("sealed")), described(2, AFTER)]
    assert await client.change_route("orders", split=SPLIT, from_version=1, reason="why") == response()
    assert len(meta.requests("ChangeRoute")) == 1
