"""JSON that somebody else wrote: what is read can be written again, and everything else is a
ValueError.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.text import DEPTH_MAX, parse_json

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "\udfff"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.binary() | JSON.map(json.dumps).map(str.encode))
def test_what_is_read_can_be_written_again(text: bytes) -> None:
    try:
        value = parse_json(text)
    except ValueError:
        return
    assert parse_json(json.dumps(value, allow_nan=False, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "-Infinity",
        "1e999",
        '"\\ud800"',
        '{"\\udfff": 1}',
        "1" * 5_000,
        "[" * 5_000,
        "[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1),
        '{"a":' * 300 + "1" + "}" * 300,
        "",
        "{",
    ],
)
def test_what_cannot_be_written_again_is_refused(text: str) -> None:
    for each in (text, text.encode()):
        with pytest.raises(ValueError, match=r"."):
            parse_json(each)


def test_a_deep_value_within_the_bound_is_read() -> None:
    assert parse_json("[" * DEPTH_MAX + "]" * DEPTH_MAX) is not None
