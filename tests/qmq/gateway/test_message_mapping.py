"""RocketMQ's messages as ours: names, bodies, properties, and what is refused with which code."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import pytest
from gateway_stub import message
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import (
    BY_CODE,
    AccessDenied,
    CallerError,
    NeverReached,
    NoQuorum,
    Overloaded,
    Unavailable,
    UnknownSubject,
)
from qmq.gateway.filters import tags_of_expression
from qmq.gateway.messages import (
    BORN_HOST,
    CHECK_AFTER_MS,
    DUE_MS,
    ID,
    KEYS,
    TRACE,
    TYPE,
    check_digest,
    digest_of,
    group_of_resource,
    message_for_client,
    message_from_client,
    plain_body,
    subject_of_topic,
)
from qmq.gateway.receiving import wait_s
from qmq.gateway.sending import CheckPlan, first_check_ms
from qmq.gateway.service import endpoints_of
from qmq.gateway.status import Refused, joined_status, status_of_failure
from qmq.process.event_loop import time_of
from qmq.proto.rocketmq import definition_pb2 as api

if TYPE_CHECKING:
    from qmq.client.consuming.message import StoredMessage
    from qmq.client.producing.delayed import DelayedMessage

BODY_MAX = 1_000


def code_of(sent: api.Message) -> int:
    with pytest.raises(Refused) as caught:
        message_from_client(sent, BODY_MAX)
    return caught.value.code


def test_a_fifo_messages_key_is_its_group_and_a_normal_ones_its_id() -> None:
    fifo = message_from_client(message("t", kind=api.FIFO, group="g", keys=["k"]), BODY_MAX)
    normal = message_from_client(message("t", keys=["k", "l"]), BODY_MAX)
    assert (fifo.key(is_ordered=True), normal.key(is_ordered=True)) == ("g", normal.message_id)
    assert normal.key(is_ordered=False) == "k"


def test_a_type_that_a_client_leaves_out_follows_from_the_message() -> None:
    unspecified = api.MESSAGE_TYPE_UNSPECIFIED
    for sent, kind in (
        (message("t", kind=unspecified), api.NORMAL),
        (message("t", kind=unspecified, group="g"), api.FIFO),
        (message("t", kind=unspecified, due_ms=5), api.DELAY),
        (message("t", kind=api.FIFO, group="g", due_ms=5), api.FIFO),
    ):
        assert message_from_client(sent, BODY_MAX).kind == kind


def test_what_a_message_must_not_say_is_refused_with_its_code() -> None:
    nameless = message("t")
    nameless.system_properties.message_id = ""
    assert code_of(nameless) == api.ILLEGAL_MESSAGE_ID
    assert code_of(message("a/b")) == api.ILLEGAL_TOPIC
    assert code_of(message("t", tag="a|b")) == api.ILLEGAL_MESSAGE_TAG
    assert code_of(message("t", keys=["a b"])) == api.ILLEGAL_MESSAGE_KEY
    assert code_of(message("t", **{"qmq-group": "g"})) == api.ILLEGAL_MESSAGE_PROPERTY_KEY
    assert code_of(message("t", **{"rocketmq-id": "g"})) == api.ILLEGAL_MESSAGE_PROPERTY_KEY
    for conflict in (
        message("t", kind=api.FIFO),
        message("t", group="g"),
        message("t", kind=api.DELAY),
        message("t", due_ms=5),
    ):
        assert code_of(conflict) == api.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    assert code_of(message("t", kind=api.PRIORITY)) == api.UNSUPPORTED


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"tag": "a\0b"}, api.ILLEGAL_MESSAGE_TAG),
        ({"tag": "t" * 256}, api.ILLEGAL_MESSAGE_TAG),
        ({"keys": ["a\nb"]}, api.ILLEGAL_MESSAGE_KEY),
        ({"keys": ["k" * 5_000]}, api.ILLEGAL_MESSAGE_KEY),
        ({"properties": {"UNIQ_KEY": "1"}}, api.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ({"properties": {"\0": "1"}}, api.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ({"properties": {"a\x7fb": "1"}}, api.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (
            {"properties": {f"p{number}": "v" for number in range(129)}},
            api.MESSAGE_PROPERTIES_TOO_LARGE,
        ),
        ({"properties": {"p": "v" * (16 << 10)}}, api.MESSAGE_PROPERTIES_TOO_LARGE),
        ({"properties": {"p": "v" * (70 << 10)}}, api.MESSAGE_PROPERTIES_TOO_LARGE),
    ],
)
def test_what_rocketmq_refuses_has_its_code_and_a_short_text(
    changed: dict[str, Any], code: int
) -> None:
    sent = message("t", keys=changed.get("keys", []), **changed.get("properties", {}))
    if "tag" in changed:
        sent.system_properties.tag = changed["tag"]
    with pytest.raises(Refused) as caught:
        message_from_client(sent, BODY_MAX)
    assert (caught.value.code, len(caught.value.message) < 300) == (code, True)


@pytest.mark.parametrize(
    ("asked_s", "remaining_s", "waits_s"),
    [(None, 20, 15), (None, 100, 20), (None, None, 20), (10, 20, 10), (20, 20, 19.7), (5, 0.1, 0)],
)
def test_a_long_poll_ends_before_its_client_gives_up(
    asked_s: int | None, remaining_s: float | None, waits_s: float
) -> None:
    asked = None if asked_s is None else Duration(seconds=asked_s)
    assert wait_s(asked, remaining_s) == pytest.approx(waits_s)


def test_names_are_joined_with_their_namespace() -> None:
    assert subject_of_topic(api.Resource(name="t", resource_namespace="n")) == "n.t"
    assert group_of_resource(api.Resource(name="g")) == "g"
    with pytest.raises(Refused):
        group_of_resource(api.Resource(resource_namespace="n"))


def test_digests_are_checked_however_they_are_written() -> None:
    body = next(
        each for each in (b"%d" % number for number in range(10_000)) if zlib.crc32(each) < 1 << 28
    )
    crc = f"{zlib.crc32(body):X}"
    for told in (crc, crc.lower(), crc.rjust(8, "0")):
        check_digest(body, api.Digest(type=api.CRC32, checksum=told))
    check_digest(body, api.Digest(type=api.SHA1, checksum=hashlib.sha1(body).hexdigest()))
    check_digest(body, digest_of(body))
    check_digest(body, api.Digest())
    for kind in (api.CRC32, api.MD5, api.SHA1):
        with pytest.raises(Refused):
            check_digest(body, api.Digest(type=kind, checksum="1234"))


def test_a_compressed_body_that_is_cut_broken_or_huge_is_refused() -> None:
    packed = gzip.compress(bytes(BODY_MAX))
    assert plain_body(packed, api.GZIP, BODY_MAX) == bytes(BODY_MAX)
    assert plain_body(packed, api.IDENTITY, BODY_MAX) == packed
    for broken, code in (
        (packed[:-9], api.MESSAGE_CORRUPTED),
        (b"nonsense", api.MESSAGE_CORRUPTED),
        (gzip.compress(bytes(100_000_000), 1), api.MESSAGE_BODY_TOO_LARGE),
    ):
        with pytest.raises(Refused) as caught:
            plain_body(broken, api.GZIP, BODY_MAX)
        assert caught.value.code == code


def test_a_tag_expression_is_a_list_of_tags_or_everything() -> None:
    assert tags_of_expression("*") == tags_of_expression(" ") == ()
    assert tags_of_expression("b || a||b") == ("a", "b")
    assert [tags_of_expression(each) for each in ("a||||b", "a || b ||", "|| b ||a")] == [
        ("a", "b")
    ] * 3  # as RocketMQ reads them
    for wrong in ("|", "||", "|| ||", "a | b", "x" * 300):
        with pytest.raises(Refused):
            tags_of_expression(wrong)


def test_every_error_has_a_code_and_the_ones_to_mend_begin_with_four() -> None:
    for kind in BY_CODE.values():
        status = status_of_failure(kind("so"))
        assert status.code != api.CODE_UNSPECIFIED
        if issubclass(kind, CallerError) and not issubclass(kind, NeverReached):
            assert 40_000 <= status.code < 50_000, kind
        elif issubclass(kind, Unavailable) and not issubclass(kind, Overloaded):
            assert 50_000 <= status.code < 60_000, kind
    told = [
        status_of_failure(each).code
        for each in (UnknownSubject("s"), AccessDenied("a"), NoQuorum("q"), ValueError("secret"))
    ]
    assert told == [
        api.TOPIC_NOT_FOUND,
        api.FORBIDDEN,
        api.HA_NOT_AVAILABLE,
        api.INTERNAL_SERVER_ERROR,
    ]
    assert "secret" not in status_of_failure(ValueError("secret")).message
    assert joined_status([]).code == api.BAD_REQUEST


def test_an_advertised_address_says_of_which_kind_it_is() -> None:
    for address, scheme, host in (
        ("10.0.0.1:80", api.IPv4, "10.0.0.1"),
        ("[::1]:80", api.IPv6, "::1"),
        ("mq.example:80", api.DOMAIN_NAME, "mq.example"),
    ):
        found = endpoints_of(address)
        assert found.scheme == scheme
        assert found.addresses[0].host == host
        assert found.addresses[0].port == 80


HEADERS = st.dictionaries(
    st.sampled_from([ID, KEYS, TYPE, DUE_MS, BORN_HOST, CHECK_AFTER_MS, TRACE])
    | st.text(max_size=8),
    st.binary(max_size=40)
    | st.sampled_from(
        ["²".encode(), b"9" * 30, b"9" * 5_000, b"-1", b"99", b"TRANSACTION", b"\xff"]
    ),
    max_size=6,
)


@given(
    HEADERS,
    st.none() | st.binary(max_size=8),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.booleans(),
)
def test_any_stored_message_is_one_for_clients(
    headers: dict[str, bytes], key: bytes | None, time_ms: int, is_ordered: bool
) -> None:
    stored = AnyStored(
        headers=headers, key_bytes=key, create_time_ms=time_ms, append_time_ms=time_ms
    )
    found = message_for_client(
        cast("StoredMessage", stored),
        api.Resource(name="t"),
        is_ordered=is_ordered,
        handle="h",
        invisible_ms=1,
    )
    api.Message.FromString(found.SerializeToString())
    found.system_properties.born_timestamp.ToJsonString()
    found.system_properties.delivery_timestamp.ToJsonString()


@given(HEADERS, st.integers(-(1 << 63), (1 << 63) - 1))
def test_any_half_message_has_a_time_of_its_first_check(
    headers: dict[str, bytes], time_ms: int
) -> None:
    half = cast("DelayedMessage", AnyStored(headers=headers, create_time=time_of(time_ms)))
    assert first_check_ms(half, 5) >= 0
    assert CheckPlan().is_time(half, 0, 0) in (True, False)
    assert CheckPlan().is_over(half) is False


@dataclass
class AnyStored:
    """What a message of any producer can have."""

    headers: dict[str, bytes]
    key_bytes: bytes | None = None
    create_time_ms: int = 0
    append_time_ms: int = 0
    create_time: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    tags: tuple[str, ...] = ()
    body: bytes = b""
    id: str = "id"
    sequence: int = 0
    attempt: int = 1
