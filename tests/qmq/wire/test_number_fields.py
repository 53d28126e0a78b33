"""A number that a protobuf field cannot hold is refused by the field's name and range."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from qmq.errors import InvalidArgument
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import access_pb2 as access
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire.number_fields import check_numbers, request_of
from qmq.wire.subject_settings import settings_of


def test_a_message_is_made_of_what_its_fields_can_hold() -> None:
    assert request_of(
        pb.SplitOperation, partition=(1 << 32) - 1, at=[0, 512], broker_groups=["a", "b"]
    ) == pb.SplitOperation(partition=(1 << 32) - 1, at=[0, 512], broker_groups=["a", "b"])
    assert request_of(access.AccessQuota, limits={"connections": 5}).limits["connections"] == 5
    assert request_of(
        pb.ChangeRouteRequest, split={"partition": 1, "at": [7]}
    ).split == pb.SplitOperation(partition=1, at=[7])
    assert request_of(pb.AlterSubjectRequest, subject="s", body_bytes_max=None).subject == "s"


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        (pb.SplitOperation, {"partition": 1 << 32}, "partition is a whole number from 0 to"),
        (pb.SplitOperation, {"at": [1, -1]}, "at is a whole number from 0 to 4294967295, not -1"),
        (pb.ReshardPolicy, {"merge_quiet_ms": 1 << 63}, "merge_quiet_ms is a whole number from -"),
        (pb.ReshardPolicy, {"split_backlog": 1.5}, "split_backlog is a whole number"),
        (control.ResetGroupRequest, {"sequence": 1 << 64}, "sequence is a whole number from 0 to"),
        (pb.ChangeRouteRequest, {"split": {"partition": -1}}, "partition is a whole number from 0"),
        (pb.OrderedRoute, {"partitions": [{"number": 1.5}]}, "number is a whole number from 0 to"),
        (access.AccessQuota, {"limits": {"groups": 1 << 63}}, "groups is a whole number from -"),
    ],
)
def test_a_number_beyond_its_field_is_refused_by_the_fields_name(
    kind: type[Message], fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_numbers(kind, fields)
    assert told in raised.value.message


def test_settings_of_a_subject_are_refused_in_the_same_way() -> None:
    with pytest.raises(InvalidArgument, match="retention_bytes is a whole number"):
        settings_of(SubjectConfig("s", retention_bytes=1 << 63))
    ordered = SubjectConfig("s", order=Order.STRICT, logical_partitions=1024)
    with pytest.raises(InvalidArgument, match="partitions is a whole number"):
        settings_of(ordered, partitions=1 << 32)
