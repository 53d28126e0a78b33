"""SQL92 filters: what holds, what does not, what is neither; and what is no condition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.gateway.filters import (
    DEPTH_MAX,
    EXPRESSION_CHARS_MAX,
    all_of,
    any_of,
    condition_of,
    negated,
)
from qmq.gateway.status import Refused

ORDER = {
    "price": "12.5",
    "region": "Hangzhou",
    "TAGS": "red",
    "paid": "true",
    "note": "it's late",
    "order.id": "7",
    "big": "9007199254740993",
    "endless": "infinity",
    "spelled": "1_000",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("price > 12", True),
        ("big = 9007199254740993", True),
        ("big = 9007199254740992", False),
        ("big IN (9007199254740992)", False),
        ("endless > 1", None),
        ("spelled = 1000", None),
        ("price >= 12.5 and price <= 1.25e1", True),
        ("12 < price", True),
        ("price = 12.50", True),
        ("price <> 13", True),
        ("region = 'Hangzhou'", True),
        ("region != 'Hangzhou'", False),
        ("region > 5", None),
        ("region < 'Z'", None),
        ("missing = 'x'", None),
        ("NOT missing = 'x'", None),
        ("missing IS NULL AND region IS NOT NULL", True),
        ("TAGS IN ('blue', 'red')", True),
        ("TAGS NOT IN ('blue')", True),
        ("missing IN ('blue')", None),
        ("price BETWEEN 10 AND 13 AND paid = TRUE", True),
        ("price NOT BETWEEN 10 AND 13 OR paid = FALSE", False),
        ("missing = 1 OR price > 1", True),
        ("missing = 1 AND price > 1", None),
        ("missing = 1 AND price < 1", False),
        ("NOT (price < 1 OR region = 'Rome')", True),
        ("note = 'it''s late'", True),
        ("note CONTAINS 's l' and note StartsWith 'it' and not note endswith 'it'", True),
        ("note NOT CONTAINS 'early'", True),
        ("order.id = 7", True),
        ("TRUE", True),
        ("FALSE OR TRUE AND FALSE", False),
        ("android = 1 OR price > -1", True),
    ],
)
def test_a_condition_holds_as_sql_says(text: str, expected: bool | None) -> None:
    assert condition_of(text)(ORDER) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "price",
        "price >",
        "price > 1 AND",
        "(price > 1",
        "a = 'b",
        "a LIKE 'b'",
        "a IN ()",
        "a BETWEEN 1",
        "a = b = c",
        "1; DROP",
    ],
)
def test_an_invalid_condition_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        condition_of(text)


def test_a_condition_that_is_too_long_or_too_deep_is_refused() -> None:
    for text in ("a = 1 OR " * EXPRESSION_CHARS_MAX + "a = 1", "NOT " * (DEPTH_MAX + 2) + "a = 1"):
        with pytest.raises(Refused):
            condition_of(text)
    assert condition_of("(" * 1_000 + "price > 1" + ")" * 1_000)(ORDER) is True


VALUES = st.sampled_from([True, False, None])


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_three_values_follow_de_morgan(parts: list[bool | None]) -> None:
    assert negated(all_of(parts)) == any_of([negated(each) for each in parts])
