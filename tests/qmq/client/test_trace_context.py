"""Trace context: the two headers of the W3C recommendation "Trace Context", and their
propagation.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.client import tracing
from qmq.client.interceptors import Chain, Outgoing
from qmq.client.tracing import (
    SpanContext,
    TraceContext,
    format_parent,
    format_state,
    parse,
    parse_parent,
    parse_state,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
ids = st.integers(1, 2**128 - 1).map(lambda number: f"{number:032x}")


def handled(**headers: bytes) -> Any:
    return SimpleNamespace(headers=headers)


def outgoing(*headers: dict[str, bytes]) -> Outgoing:
    count = len(headers)
    return Outgoing("s", count, [None] * count, [()] * count, list(headers))


def test_a_sound_traceparent_is_read() -> None:
    assert parse_parent(PARENT) == SpanContext(TRACE, SPAN, 1)
    assert parse_parent(f"00-{TRACE}-{SPAN}-00") == SpanContext(TRACE, SPAN, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "0",
        PARENT + "-",
        PARENT + "-00",
        " " + PARENT,
        PARENT + "\n",
        f"ff-{TRACE}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01-what",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE}-{SPAN}-1",
        f"01-{TRACE}-{SPAN}-01x",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE[:-1]}\N{ARABIC-INDIC DIGIT ONE}-{SPAN}-01",
    ],
)
def test_a_traceparent_that_breaks_the_grammar_counts_as_none(text: str) -> None:
    assert parse_parent(text) is None


def test_a_later_version_is_read_by_its_first_fields_and_passed_on_as_version_0() -> None:
    for later in (
        f"01-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-what-the-future-brings",
        f"fe-{TRACE}-{SPAN}-01-",
    ):
        found = parse_parent(later)
        assert found is not None
        assert format_parent(found) == PARENT


def test_unknown_flags_are_not_passed_on() -> None:
    found = parse_parent(f"00-{TRACE}-{SPAN}-ff")
    assert found is not None
    assert found.is_sampled
    assert format_parent(found) == f"00-{TRACE}-{SPAN}-03"


@given(ids, st.integers(1, 2**64 - 1), st.integers(0, 3))
def test_written_values_are_read_back(trace_id: str, span: int, flags: int) -> None:
    context = SpanContext(trace_id, f"{span:016x}", flags, (("a", "b"),))
    assert parse(context.headers()) == context


@given(st.text() | st.binary())
def test_whatever_stands_there_reading_it_gives_an_answer(value: str | bytes) -> None:
    assert parse({"traceparent": value, "tracestate": value}) is None
    text = value if isinstance(value, str) else value.decode("latin1")
    found = parse_state(text)
    assert parse_state(format_state(found)) == found


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("", ()),
        ("rojo=1", (("rojo", "1"),)),
        (
            "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
            (("rojo", "00f067aa0ba902b7"), ("congo", "t61rcWkgMzE")),
        ),
        ("a=1 , \t b=2,,", (("a", "1"), ("b", "2"))),
        ("tenant@system=x y", (("tenant@system", "x y"),)),
        ("0a_-*/=" + "v" * 256, (("0a_-*/", "v" * 256),)),
        ("k" * 256 + "=1", (("k" * 256, "1"),)),
        # from here on it breaks the grammar, and nothing of it counts
        ("A=1", ()),
        ("=1", ()),
        ("a", ()),
        ("a=", ()),
        ("a=1,a=2", ()),
        ("a=1=2", ()),
        ("a b=1", ()),
        ("a=\t1\x00", ()),
        ("a=é", ()),
        ("k" * 257 + "=1", ()),
        ("a=" + "v" * 257, ()),
        (",".join(f"a{number}=1" for number in range(33)), ()),
    ],
)
def test_a_tracestate_is_read_whole_or_not_at_all(
    text: str, members: tuple[tuple[str, str], ...]
) -> None:
    assert parse_state(text) == members


def test_a_tracestate_that_breaks_the_grammar_is_left_out_alone() -> None:
    assert parse({"traceparent": PARENT.encode(), "tracestate": b"A=1"}) == SpanContext(
        TRACE, SPAN, 1
    )
    assert parse({"traceparent": b"nonsense", "tracestate": b"a=1"}) is None
    assert parse({"tracestate": b"a=1"}) is None


def test_32_members_are_passed_on() -> None:
    text = ",".join(f"a{number}={number}" for number in range(32))
    assert format_state(parse_state(text)) == text


# --- the interceptor ------------------------------------------------------------------------------


def test_messages_sent_by_a_handler_belong_to_its_trace() -> None:
    chain = Chain([TraceContext()])
    with chain.handling(handled(traceparent=PARENT.encode(), tracestate=b"a=1")):
        assert tracing.current() == SpanContext(TRACE, SPAN, 1, (("a", "1"),))
        told = outgoing({}, {"own": b"1"})
        chain.sending(told)
    assert told.headers == [
        {"traceparent": PARENT.encode(), "tracestate": b"a=1"},
        {"own": b"1", "traceparent": PARENT.encode(), "tracestate": b"a=1"},
    ]
    assert tracing.current() is None


def test_outside_of_a_trace_nothing_is_added_unless_one_is_to_begin() -> None:
    told = outgoing({})
    Chain([TraceContext()]).sending(told)
    assert told.headers == [{}]
    Chain([TraceContext(begins=True, random_bytes=lambda size: bytes(range(1, size + 1)))]).sending(
        told
    )
    assert told.headers == [
        {"traceparent": b"00-0102030405060708090a0b0c0d0e0f10-0102030405060708-02"}
    ]


def test_no_trace_is_begun_with_an_id_that_means_none() -> None:
    assert parse_parent(format_parent(tracing.begin(bytes))) is not None


def test_a_message_without_a_trace_hides_the_one_around_it() -> None:
    with tracing.use(SpanContext(TRACE, SPAN)), Chain([TraceContext()]).handling(handled()):
        assert tracing.current() is None


def test_a_message_keeps_the_trace_that_the_application_gave_it() -> None:
    told = outgoing({"traceparent": b"mine"}, {})
    with tracing.use(SpanContext(TRACE, SPAN, 1, (("a", "1"),))):
        Chain([TraceContext()]).sending(told)
    assert told.headers == [
        {"traceparent": b"mine"},
        {"traceparent": PARENT.encode(), "tracestate": b"a=1"},
    ]


def test_traces_that_lie_in_each_other_come_back_in_turn() -> None:
    outer, inner = SpanContext(TRACE, SPAN), SpanContext(TRACE, "1" * 16)
    with tracing.use(outer):
        with pytest.raises(KeyError), tracing.use(inner):
            raise KeyError
        assert tracing.current() is outer
    assert tracing.current() is None
