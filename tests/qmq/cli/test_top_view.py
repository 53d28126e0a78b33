"""The screen of `qmq top` fits the terminal, is sorted, and reports missing data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.cli.arguments import age
from qmq.cli.top import HELP, KEYS, TopBy, TopChoice, TopSort, per_second, screen, short
from qmq.operations.snapshot import BrokerGroupFacts, ClusterSnapshot
from qmq.operations.snapshot_reading import (
    BrokerGroupRate,
    ClusterRates,
    GroupRate,
    ReaderRate,
    SubjectRate,
)

G1 = BrokerGroupFacts("g1", "read-write", "read-write", "g1-a", 1, ("g1-a",), (), False, ())
SNAPSHOT = ClusterSnapshot(1_000, 1_000, broker_groups=(G1,))
SUBJECTS = (
    SubjectRate("flights", 120.0, 100.0, 40, 3_000, 2, 1_000, 1 << 20),
    SubjectRate("orders", 5.5, 900.0, 2_000_000, 400_000, 1, 5_000_000, 3 << 30),
    SubjectRate(
        "a-subject-with-a-name-that-is-much-longer-than-any-terminal-line-should-have-to-hold",
        0.0,
        0.0,
        0,
        0,
        0,
        0,
        0,
    ),
)
GROUPS = (
    GroupRate("flights", "ops", 100.0, 40, 3_000, 2, False),
    GroupRate("flights", "late", 0.0, 7, 90_000, 0, False),
    GroupRate("orders", "billing", 900.0, 2_000_000, 400_000, 3, True),
)
BROKERS = (
    BrokerGroupRate("g1", "read-write", "g1-a", 125.5, 1_000.0, 3, 2, 4 << 30, 9 << 30),
    BrokerGroupRate("d1", "offline", "", None, None, 3, 0, 0, None),
)
RATES = ClusterRates(1_000, 2_000, 125.5, 1_000.0, SUBJECTS, GROUPS, BROKERS)


def drawn(
    by: TopBy = TopBy.SUBJECT,
    sort: TopSort = TopSort.IN,
    *,
    width: int | None = 80,
    height: int | None = None,
) -> list[str]:
    return [
        each.plain
        for each in screen(SNAPSHOT, RATES, TopChoice(by, sort), width=width, height=height)
    ]


def names(lines: list[str]) -> list[str]:
    return [line.split()[0][:7] for line in lines[3:]]


@pytest.mark.parametrize("by", TopBy)
@pytest.mark.parametrize("sort", TopSort)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_line_fits_the_terminal(by: TopBy, sort: TopSort, width: int) -> None:
    lines = drawn(by, sort, width=width)
    assert all(len(line) <= width for line in lines if "left out" not in line), lines


def test_the_keys_fit_eighty_columns_and_are_all_named() -> None:
    assert len(HELP) <= 80
    assert all(f"{key} {meant.value.rstrip('r')}" in HELP for key, meant in KEYS.items())


def test_the_head_says_what_flows_through_the_cluster() -> None:
    first, second, *_ = drawn()
    assert first == "in 126/s  out 1,000/s over 2.0 s  lag 2M, oldest 6 min 40 s"
    assert second == "3 subjects  3 groups  1 of 1 broker groups read-write"


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        (TopSort.IN, "flights"),
        (TopSort.OUT, "orders"),
        (TopSort.LAG, "orders"),
        (TopSort.AGE, "orders"),
        (TopSort.NAME, "a-subje"),
    ],
)
def test_the_sort_column_comes_first(sort: TopSort, first: str) -> None:
    assert names(drawn(sort=sort))[0] == first


def test_groups_shows_lag_and_readers() -> None:
    by_age = drawn(TopBy.GROUP, TopSort.AGE)
    assert [line.split()[:2] for line in by_age[3:]] == [
        ["orders", "billing"],
        ["flights", "late"],
        ["flights", "ops"],
    ]
    assert by_age[3].endswith("paused")
    assert "no consumers" in by_age[4]
    assert "1 min 30 s" in by_age[4]


def test_groups_marks_readers_without_a_group() -> None:
    copy = ReaderRate("orders", "copy", 55.0, 900, 500_000, 3_000, 1_000, False, 0, False)
    found = replace(
        RATES,
        readers=(
            copy,
            replace(copy, reader="slow", lag_ms=600_000, is_near_loss=True),
            replace(copy, reader="gone", lag_ms=700_000, is_silent=True, seen_ms_ago=65_000),
            replace(copy, reader="lossy", lag_ms=800_000, lost_messages=12),
        ),
    )
    choice = TopChoice(TopBy.GROUP, TopSort.AGE)
    lines = [each.plain for each in screen(SNAPSHOT, found, choice, width=120)]
    assert "4 readers" in lines[1]
    assert [line.split()[:2] for line in lines[3:8]] == [
        ["orders", "lossy"],
        ["orders", "gone"],
        ["orders", "slow"],
        ["orders", "copy"],
        ["orders", "billing"],
    ]
    for line, state in zip(
        lines[3:],
        (
            "reader, 12 lost",
            "reader, silent for 1 min 5 s",
            "reader, near loss",
            "reader, committed 3 s ago",
        ),
        strict=False,
    ):
        assert line.endswith(state), line


def test_brokers_shows_the_replicas_that_are_away() -> None:
    g1, d1 = drawn(TopBy.BROKER)[3:5]
    assert ("read-write" in g1, "2/3" in g1, "9 GiB" in g1) == (True, True, True)
    assert ("offline" in d1, "0/3" in d1) == (True, True)


def test_what_does_not_fit_in_height_is_counted() -> None:
    lines = drawn(height=5)
    assert len(lines) <= 5
    assert lines[-1] == "2 more"
    assert len(drawn(height=2)) == 2


def test_missing_sources_are_listed_below_the_table() -> None:
    partial = replace(SNAPSHOT, silent={"g2": "no master"}, missing={"groups": "timed out"})
    lines = [
        each.plain
        for each in screen(
            partial, RATES, TopChoice(), width=80, trouble="metaserver m: connection refused"
        )
    ]
    assert lines[-3:] == [
        "metaserver m: connection refused",
        "partial: broker group g2 is missing (no master)",
        "partial: no groups (timed out)",
    ]


def test_a_key_changes_what_is_shown_and_others_do_nothing() -> None:
    assert TopChoice().after("g") == TopChoice(TopBy.GROUP, TopSort.IN)
    assert TopChoice().after("g").after("l") == TopChoice(TopBy.GROUP, TopSort.LAG)
    assert TopChoice().after("x") == TopChoice()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (99_999, "99,999"),
        (123_456, "123k"),
        (999_999, "999k"),
        (2_000_000, "2M"),
        (12_345_678_901, "12.3G"),
        (10**15, "1,000T"),
    ],
)
def test_numbers_are_short_and_exact_while_they_are_small(number: int, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, ""), (0.0, "0"), (0.25, "0.2"), (9.94, "9.9"), (10.4, "10"), (250_000.0, "250k")],
)
def test_a_slow_rate_is_not_zero(rate: float | None, text: str) -> None:
    assert per_second(rate) == text


@pytest.mark.parametrize(
    ("lag_ms", "text"), [(0, "0 s"), (400, "<1 s"), (3_900, "3 s"), (61_500, "1 min 1 s")]
)
def test_an_age_is_shown_in_seconds_minutes_or_hours(lag_ms: int, text: str) -> None:
    assert age(lag_ms) == text
