"""The metadata client's calls for ordered subjects: a change is made once at most, even if its
answer is lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from cli_support import PLACES, FakeMeta, change, described, place, route, serving

from qmq.client.connection.connection import ClientTiming
from qmq.client.metadata.service import MetadataClient
from qmq.errors import (
    CoordinationUnavailable,
    CoordinationUnknown,
    DeadlineExceeded,
    InvalidArgument,
    NotConnected,
    Outcome,
    QmqError,
    RouteConflict,
)
from qmq.model import SubjectConfig
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

SPLIT = pb.SplitOperation(partition=2, at=[300])
TARGETS = (place(4, 256, 300, "g1"), place(5, 300, 512, "g1"))
AFTER = (PLACES[0], *TARGETS, PLACES[2])
LOST = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
async def served() -> AsyncIterator[tuple[FakeMeta, MetadataClient]]:
    with serving() as (meta, address):
        client = MetadataClient([address], timing=ClientTiming(slow_call_s=2.0))
        yield meta, client
        await client.close()


def made(phase: str = "published", **fields: Any) -> pb.RouteChangeInfo:
    return change("split", 2, (2,), *TARGETS, phase=phase, reason="why", **fields)


def response() -> pb.ChangeRouteResponse:
    return pb.ChangeRouteResponse(change=made(), route=route(2, *AFTER))


async def test_a_change_without_a_version_is_never_asked_for_twice(
    served: tuple[FakeMeta, MetadataClient],
) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = LOST
    with pytest.raises(NotConnected):
        await client.change_route("orders", split=SPLIT)
    assert len(meta.requests("ChangeRoute")) == 1


async def test_a_change_from_a_version_is_asked_for_again_when_its_answer_is_lost(
    served: tuple[FakeMeta, MetadataClient],
) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = [LOST, LOST, response()]
    assert (
        await client.change_route("orders", split=SPLIT, from_version=1, reason="why") == response()
    )
    assert [each.from_version for each in meta.requests("ChangeRoute")] == [1, 1, 1]
    assert len({each.change_id for each in meta.requests("ChangeRoute")}) == 1


async def test_a_conflict_after_a_lost_answer_is_a_conflict_even_with_an_equal_change(
    served: tuple[FakeMeta, MetadataClient],
) -> None:
    """Another client made the same change from the same version: once, both clients were told that
    the change was theirs.
    """
    meta, client = served
    meta.answers["ChangeRoute"] = [LOST, RouteConflict("the latest version is 2")]
    meta.answers["RouteHistory"] = pb.RouteHistoryResponse(changes=[made()])
    meta.answers["DescribeRoute"] = described(2, AFTER)
    with pytest.raises(RouteConflict, match="the latest version is 2"):
        await client.change_route("orders", split=SPLIT, from_version=1, reason="why")


async def test_a_change_that_is_not_published_in_time_is_begun(
    served: tuple[FakeMeta, MetadataClient],
) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = DeadlineExceeded(
        "it is prepared, and continues by itself", outcome=Outcome.STORED
    )
    with pytest.raises(DeadlineExceeded) as raised:
        await client.change_route("orders", split=SPLIT, from_version=1, reason="why")
    assert raised.value.outcome is Outcome.STORED


@pytest.mark.parametrize(
    "later",
    [InvalidArgument("there is no broker group g9"), CoordinationUnavailable("no member answers")],
)
async def test_a_refusal_after_a_lost_answer_leaves_the_outcome_open(
    served: tuple[FakeMeta, MetadataClient], later: QmqError
) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = [CoordinationUnknown("the answer was lost"), later]
    with pytest.raises(CoordinationUnknown) as raised:
        await client.change_route("orders", split=SPLIT, from_version=1, reason="why")
    assert raised.value.outcome is Outcome.UNKNOWN


async def test_a_plan_may_be_asked_for_as_often_as_it_takes(
    served: tuple[FakeMeta, MetadataClient],
) -> None:
    meta, client = served
    meta.answers["ChangeRoute"] = [LOST, response()]
    assert await client.change_route("orders", split=SPLIT, dry_run=True) == response()


@pytest.mark.parametrize(
    "operations", [{}, {"split": SPLIT, "move": pb.MoveOperation(partition=1, broker_group="g2")}]
)
async def test_a_change_is_one_operation(
    served: tuple[FakeMeta, MetadataClient], operations: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match="one split, one merge or one move"):
        await served[1].change_route("orders", **operations)


MOVED = change("move", 2, (3,), place(4, 512, 1024, "g1"))


async def test_a_key_is_unparked_once_whatever_happens_to_the_answer(
    served: tuple[FakeMeta, MetadataClient],
) -> None:
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
    served: tuple[FakeMeta, MetadataClient],
    call: str,
    ask: Ask,
    answer: Any,
    request_: Any,
    result: Any,
) -> None:
    meta, client = served
    meta.answers[call] = answer if call == "Unpark" else [LOST, answer]
    assert await ask(client) == result
    assert meta.requests(call)[-1] == request_


async def test_only_an_ordered_subject_is_created_with_partitions(
    served: tuple[FakeMeta, MetadataClient],
) -> None:
    _, client = served
    with pytest.raises(InvalidArgument, match="is unordered"):
        await client.create_subject(SubjectConfig("plain"), partitions=4)


async def test_a_change_that_is_under_way_is_waited_for_under_its_id(
    served: tuple[FakeMeta, MetadataClient],
) -> None:
    meta, client = served
    begun = DeadlineExceeded("it is prepared, and continues by itself", outcome=Outcome.STORED)
    meta.answers["ChangeRoute"] = [begun, begun, response()]
    assert (
        await client.change_route("orders", split=SPLIT, from_version=1, reason="why") == response()
    )
    assert len({each.change_id for each in meta.requests("ChangeRoute")}) == 1
