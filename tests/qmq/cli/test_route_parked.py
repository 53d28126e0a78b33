"""`qmq dlq`: keys that a group set aside."""

from __future__ import annotations

import pytest
from cli_support import Command, FakeMeta
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import InvalidArgument, NotConnected, UnknownGroup
from qmq.operations.text import key_text, parse_key
from qmq.proto.v1 import control_pb2 as control

KEYS = [
    control.ParkedKey(
        partition=5, logical_partition=300, key=b"N14228", messages=2, first_sequence=7
    ),
    control.ParkedKey(
        partition=2,
        logical_partition=300,
        key=b"N14228",
        messages=3,
        first_sequence=40,
        may_be_passed=True,
    ),
    control.ParkedKey(
        partition=1, logical_partition=9, key=b"\x00\xff", messages=1, first_sequence=1
    ),
]


@pytest.fixture(autouse=True)
def parked(meta: FakeMeta) -> None:
    meta.answers["DescribeParked"] = control.DescribeParkedResponse(keys=KEYS)
    meta.answers["Unpark"] = lambda request: control.UnparkResponse(messages=10 + request.partition)


def test_a_parked_key_is_listed_once_as_it_can_be_given_back(qmq: Command) -> None:
    assert qmq.json("dlq", "list", "orders", "billing") == [
        {
            "key": "hex:00ff",
            "logical_partition": 9,
            "messages": 1,
            "partitions": [1],
            "may_be_passed": False,
        },
        {
            "key": "N14228",
            "logical_partition": 300,
            "messages": 5,
            "partitions": [2, 5],
            "may_be_passed": True,
        },
    ]


def test_one_key_is_shown_in_all_ways_of_writing_it(qmq: Command) -> None:
    for written in ("hex:00ff", "hex:00FF", "base64:AP8="):
        (found,) = qmq.json("dlq", "show", "orders", "billing", written)
        assert found["key"] == "hex:00ff"
        assert found["hex"] == "hex:00ff"
        assert found["base64"] == "base64:AP8="
        assert found["messages"] == 1


@pytest.mark.parametrize(("verb", "is_replay"), [("replay", True), ("skip", False)])
def test_a_key_is_given_back_or_dropped_from_the_oldest_partition_on(
    meta: FakeMeta, qmq: Command, verb: str, is_replay: bool
) -> None:
    planned = qmq.json("dlq", verb, "orders", "billing", "N14228", "--dry-run")
    assert planned == [
        {"key": "N14228", "partition": 2, "messages": 3},
        {"key": "N14228", "partition": 5, "messages": 2},
    ]
    assert meta.requests("Unpark") == []
    done = qmq.json("dlq", verb, "orders", "billing", "N14228")
    assert done == [
        {"key": "N14228", "partition": 2, "messages": 12},
        {"key": "N14228", "partition": 5, "messages": 15},
    ]
    assert meta.requests("Unpark") == [
        control.UnparkRequest(
            subject="orders", group="billing", partition=number, key=b"N14228", replay=is_replay
        )
        for number in (2, 5)
    ]


@pytest.mark.parametrize("verb", ["show", "replay", "skip"])
def test_one_key_is_asked_for_by_its_name_however_many_others_are_parked(
    meta: FakeMeta, qmq: Command, verb: str
) -> None:
    """A list of all keys ends at some: a key behind them was called not parked, and a part of a key
    was left where it was.
    """
    qmq.json("dlq", verb, "orders", "billing", "N14228")
    asked = meta.requests("DescribeParked")
    assert asked
    assert {each.key for each in asked} == {b"N14228"}


def test_a_replay_that_fails_part_way_says_how_far_it_got(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["Unpark"] = [control.UnparkResponse(messages=3), InvalidArgument("no")]
    _, said = qmq.error("dlq", "replay", "orders", "billing", "N14228")
    assert "3 messages of the key were done (partition 2); then: no" in " ".join(said.split())


def test_a_replay_follows_a_master_that_changes(meta: FakeMeta, qmq: Command) -> None:
    away = NotConnected("the master is away")
    meta.answers["Unpark"] = [
        control.UnparkResponse(messages=3),
        away,
        control.UnparkResponse(messages=2),
    ]
    done = qmq.json("dlq", "replay", "orders", "billing", "N14228")
    assert done == [
        {"key": "N14228", "partition": 2, "messages": 3},
        {"key": "N14228", "partition": 5, "messages": 2},
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("replay", "orders", "billing", "N99999"), "has not parked the key 'N99999'"),
        (("skip", "orders", "billing", "hex:0"), "'hex:0' is not a key"),
        (("skip", "orders", "billing", "hex:zz"), "a key is text, hex:00ff or base64:AP8="),
        (("skip", "orders", "billing", "base64:!"), "a key is text, hex:00ff or base64:AP8="),
        (("show", "orders", "billing", "base64:AP8"), "'base64:AP8' is not a key"),
    ],
)
def test_an_invalid_key_is_an_error(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...], says: str
) -> None:
    status, said = qmq.error("dlq", *words)
    assert (status, says in " ".join(said.split())) == (2, True)
    assert meta.requests("Unpark") == []


def test_an_unknown_group_is_an_error(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["DescribeParked"] = UnknownGroup("group 'audit' has never consumed 'orders'")
    assert qmq.error("dlq", "list", "orders", "audit") == (
        2,
        "error: [E106] group 'audit' has never consumed 'orders' ",
    )


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_every_key_comes_back_as_it_was_printed(key: bytes) -> None:
    assert parse_key(key_text(key)) == key


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (b"abc", "abc"),
        ("Łódź".encode(), "Łódź"),
        (b"", "hex:"),
        (b" a", "hex:2061"),
        (b"hex:00", "hex:6865783a3030"),
        (b"a\nb", "hex:610a62"),
    ],
)
def test_a_key_is_printed_as_text_where_nothing_is_lost(key: bytes, text: str) -> None:
    assert key_text(key) == text
