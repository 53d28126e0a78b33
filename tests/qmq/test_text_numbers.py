"""Numbers in texts that somebody else wrote: any text is a number in bounds or none, and never an
error.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import InvalidArgument
from qmq.process.address import host_of, parse
from qmq.process.event_loop import time_of
from qmq.text import joined, number, whole_number

ODD = st.sampled_from(
    [
        "²",
        "٣",
        "1_000",
        " 1",
        "+1",
        "-0",
        "1.",
        "infinity",
        "nan",
        "1e999",
        "1" * 5_000,
        "",
        "0" * 30,
        "1e",
        ".",
    ]
)


@given(ODD | st.text() | st.integers().map(str), st.integers(0, 1 << 70))
def test_a_whole_number_has_these_digits_and_is_in_bounds(text: str, most: int) -> None:
    found = whole_number(text, most)
    assert found is None or (0 <= found <= most and found == int(text) and text.isascii())
    assert whole_number(text.encode(), most) == found


@given(st.integers(0, 1 << 63), st.integers(0, 1 << 63))
def test_every_number_in_bounds_is_read(value: int, most: int) -> None:
    assert whole_number(str(value), most) == (value if value <= most else None)


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_what_json_writes_is_read_exactly(value: float) -> None:
    assert number(json.dumps(value)) == value


@given(ODD | st.text())
def test_any_text_is_a_finite_number_or_none(text: str) -> None:
    found = number(text)
    assert found is None or math.isfinite(found)
    assert found is None or set(text.lower()) <= set("0123456789+-.e")


@pytest.mark.parametrize("port", ["²", "٣", "0", "65536", "", "1" * 5_000, "-1"])
def test_a_port_is_a_number_or_the_address_is_refused(port: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        parse(f"localhost:{port}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[::1]:5", "[::1]:5"),
        ("[::1]", "[::1]:20880"),
        ("host", "host:20880"),
        ("unix:/run/a:5", "unix:/run/a:5"),
        ("10.0.0.1:5", "10.0.0.1:5"),
    ],
)
def test_an_address_may_have_a_host_in_brackets_and_no_port(text: str, told: str) -> None:
    assert str(parse(text, 20880)) == told


@pytest.mark.parametrize("text", ["::1", "::1:5", "[::1", "::1]", "[::1]x:5", "[::1]:"])
def test_an_address_whose_host_and_port_cannot_be_told_apart_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        parse(text, 20880)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("::1", "[::1]:5"),
        ("[::1]", "[::1]:5"),
        ("host", "host:5"),
        ("10.0.0.1", "10.0.0.1:5"),
        ("unix:/run/a", "unix:/run/a:5"),
    ],
)
def test_a_joined_host_and_port_is_an_address(host: str, told: str) -> None:
    assert joined(host, 5) == told
    assert str(parse(told)) == told


@given(st.integers(-(1 << 64), 1 << 64))
def test_every_time_is_in_the_calendar(time_ms: int) -> None:
    assert datetime.min.replace(tzinfo=UTC) <= time_of(time_ms) <= datetime.max.replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("[::1]:5", "::1"),
        ("host:5", "host"),
        ("10.0.0.1:5", "10.0.0.1"),
        ("unix:/run/a:5", "unix:/run/a"),
    ],
)
def test_the_host_of_an_address_is_bare(address: str, host: str) -> None:
    assert host_of(address) == host
