"""Payloads of frames: what is packed is unpacked, and anything else is a ProtocolViolation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import (
    BY_CODE,
    DiskFull,
    Outcome,
    ProtocolViolation,
    Unavailable,
    UnknownSubject,
    from_wire,
)
from qmq.wire import frame_payloads as wire

I64 = st.integers(-(2**63), 2**63 - 1)
U32 = st.integers(0, 2**32 - 1)


@given(st.lists(st.builds(wire.Range, I64, U32, U32, U32), max_size=9), U32, I64, U32)
def test_a_delivery_comes_back(
    ranges: list[wire.Range], session: int, first: int, batches: int
) -> None:
    packed = wire.pack_delivery(session, first, ranges, batches)
    assert wire.unpack_delivery(packed + b"batches") == (
        session,
        first,
        ranges,
        batches,
        len(packed),
    )


@given(st.builds(wire.Pull, U32, U32, U32, U32, st.integers(-1, 2**63 - 1)))
def test_a_pull_comes_back(pull: wire.Pull) -> None:
    assert wire.unpack_pull(wire.pack_pull(pull)) == pull


def test_a_pull_without_a_kept_batch_has_the_fields_that_older_brokers_know() -> None:
    assert len(wire.pack_pull(wire.Pull(1, 2, 3, 4))) == 16


@given(st.lists(st.builds(wire.Settlement, I64, I64, st.integers(0, 2), U32), max_size=9), U32)
def test_settlements_come_back(settlements: list[wire.Settlement], session: int) -> None:
    assert wire.unpack_settle(wire.pack_settle(session, settlements)) == (session, settlements)


@given(st.lists(st.builds(wire.Produced, I64, I64), max_size=9))
def test_produced_comes_back(results: list[wire.Produced]) -> None:
    assert wire.unpack_produced(wire.pack_produced(results)) == results


@given(st.builds(wire.Fetched, I64, I64, I64, I64, I64, st.booleans(), U32))
def test_what_stands_before_fetched_batches_comes_back(fetched: wire.Fetched) -> None:
    packed = wire.pack_fetched(fetched)
    assert wire.unpack_fetched(packed + b"batches") == (fetched, wire.FETCHED_HEAD_BYTES)


@given(st.lists(st.tuples(I64, I64, U32).map(list), max_size=9))
def test_what_was_found_comes_back(found: list[list[int]]) -> None:
    assert wire.FoundBatches.unpack(wire.FoundBatches(found).pack()) == wire.FoundBatches(found)


@pytest.mark.parametrize(
    "text",
    [
        b'{"found": 1}',
        b'{"found": [1]}',
        b'{"found": [["1"]]}',
        b'{"found": [[true]]}',
        b'{"found": [null]}',
    ],
)
def test_found_of_another_shape_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        wire.FoundBatches.unpack(text)


def test_tags_of_another_kind_are_refused() -> None:
    whole = wire.Fetch("s", 0, 0, 1, 0, 1, ["a"], [], [], 0).pack()
    assert wire.Fetch.unpack(whole).tags_any == ["a"]
    with pytest.raises(ProtocolViolation):
        wire.Fetch.unpack(whole.replace(b'["a"]', b"[1]"))


@given(st.binary(max_size=200))
def test_random_payloads_are_read_or_refused(data: bytes) -> None:
    readers = (
        wire.unpack_delivery,
        wire.unpack_settle,
        wire.unpack_produced,
        wire.unpack_pull,
        wire.unpack_error,
        wire.unpack_session,
        wire.unpack_detach,
        wire.unpack_settled,
        wire.Hello.unpack,
        wire.Attach.unpack,
        wire.Fetch.unpack,
        wire.unpack_fetched,
        wire.Find.unpack,
        wire.FoundBatches.unpack,
    )
    for read in readers:
        try:
            read(data)
        except ProtocolViolation:
            pass


@pytest.mark.parametrize(
    "text",
    [
        b"[1]",
        b"null",
        b'{"version": "1", "client": "x"}',
        b'{"version": true, "client": ""}',
        b"{}",
        b"[" * 5000,
    ],
)
def test_json_of_another_shape_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        wire.Hello.unpack(text)


def test_a_newer_peer_may_say_more() -> None:
    assert wire.Hello.unpack(b'{"version": 1, "client": "x", "colour": "blue"}') == wire.Hello(
        1, "x"
    )


def test_errors_keep_type_code_outcome_and_hint_over_the_wire() -> None:
    sent = DiskFull("no space", outcome=Outcome.UNKNOWN, retry_after_ms=1234)
    found = wire.unpack_error(wire.pack_error(sent))
    assert (type(found), found.code, found.message, found.outcome, found.retry_after_ms) == (
        DiskFull,
        303,
        "no space",
        Outcome.UNKNOWN,
        1234,
    )


def test_an_error_that_says_to_try_again_still_says_so_over_the_wire() -> None:
    """Without its code the error became INTERNAL and was not retried: a hand-over that took too
    long failed for good.
    """
    assert (
        type(wire.unpack_error(wire.pack_error(Unavailable("the replica is starting"))))
        is Unavailable
    )


def test_every_error_has_a_code_of_its_own_and_an_unknown_code_is_kept() -> None:
    assert BY_CODE[105] is UnknownSubject
    codes = [kind.code for kind in BY_CODE.values()]
    assert len(codes) == len(set(codes))
    assert from_wire(999, "from the future", 0, 0).code == 999
