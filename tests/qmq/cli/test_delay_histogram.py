"""The histogram of due times, counted and drawn."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qmq.cli.delay import BAR_COLUMNS_MAX, DAYS, HOURS, Bar, Due, draw, histogram, length, shown

NOW = datetime(2026, 11, 21, 13, 20, tzinfo=UTC)
HOUR = timedelta(hours=1)


def at(text: str, pending: int = 1, span: timedelta = HOUR) -> Due:
    start = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return Due(start, start + span, pending)


def test_hours_days_and_calendar_months_adjoin() -> None:
    found = histogram([at("2028-11-20T10:00")], NOW)
    bars = [*found.hours, *found.days, *found.months]
    assert [bar.end for bar in bars[:-1]] == [bar.start for bar in bars[1:]]
    assert (len(found.hours), len(found.days)) == (HOURS, DAYS)
    assert [
        f"{bar.start:%d %H:%M}"
        for bar in (found.hours[0], found.hours[-1], found.days[0], found.days[1])
    ] == ["21 13:00", "22 12:00", "22 13:00", "23 00:00"]
    assert [f"{bar.start:%Y-%m-%d}" for bar in found.months[:3]] == [
        "2026-12-22",
        "2027-01-01",
        "2027-02-01",
    ]
    assert found.months[-1].start == datetime(2028, 11, 1, tzinfo=UTC)
    assert found.months[-1].pending == 1


def test_each_bucket_counts_where_it_begins() -> None:
    due_times_ms = [
        at("2026-11-21T13:00", 1),
        at("2026-11-22T12:30", 2),
        at("2026-11-22T13:00", 4),
        at("2026-11-30T23:00", 8),
    ]
    found = histogram([*due_times_ms, at("2026-12-21T23:00", 16), at("2026-12-22T00:00", 32)], NOW)
    assert found.hours[0].pending == 1
    assert found.hours[23].pending == 2
    assert found.days[0].pending == 4
    assert found.days[8].pending == 8
    assert (found.days[29].pending, [bar.pending for bar in found.months]) == (16, [32])


def test_only_a_bucket_that_is_over_is_late() -> None:
    found = histogram(
        [
            at("2026-11-21T12:00", 3),
            at("2026-11-21T12:20", 5),
            at("2026-11-21T00:00", 7, timedelta(days=1)),
        ],
        NOW,
    )
    assert (found.late, found.hours[0].pending) == (8, 7)


def test_without_pending_messages_there_are_no_months() -> None:
    found = histogram([], NOW)
    assert found.late == 0
    assert sum(bar.pending for bar in [*found.hours, *found.days]) == 0
    assert found.months == []


def test_the_hours_are_utc_in_any_time_zone() -> None:
    india = NOW.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert histogram([at("2026-11-22T03:00")], india) == histogram([at("2026-11-22T03:00")], NOW)


@given(
    st.lists(
        st.tuples(
            st.integers(-50_000, 1_100_000), st.sampled_from([5, 60, 1440]), st.integers(0, 10**9)
        )
    ),
    st.datetimes(datetime(2024, 1, 1), datetime(2060, 1, 1), timezones=st.just(UTC)),
)
@example([(0, 60, 1)], datetime(2027, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC))
def test_every_pending_message_is_counted_once(
    buckets: list[tuple[int, int, int]], now: datetime
) -> None:
    due_times_ms = [
        Due(start := now + timedelta(minutes=offset), start + timedelta(minutes=minutes), pending)
        for offset, minutes, pending in buckets
    ]
    found = histogram(due_times_ms, now)
    assert found.late + sum(
        bar.pending for bar in [*found.hours, *found.days, *found.months]
    ) == sum(each.pending for each in due_times_ms)


# --- drawing --------------------------------------------------------------------------------------


def bars(*counts: int) -> list[Bar]:
    start = datetime(2026, 11, 21, tzinfo=UTC)
    return [
        Bar(start + number * HOUR, start + (number + 1) * HOUR, count)
        for number, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ((1, 2, 0, 0), [1, 2]),
        ((0, 0, 1), [0, 0, 1]),
        ((0, 0, 0, 1), [None, 1]),
        ((1, 0, 0, 0, 2, 0, 3), [1, None, 2, 0, 3]),
        ((0, 0), []),
    ],
)
def test_long_gaps_are_folded_and_the_empty_end_is_left_out(
    counts: tuple[int, ...], kept: list[int | None]
) -> None:
    assert [bar and bar.pending for bar in shown(bars(*counts))] == kept


def test_bars_are_drawn_to_the_scale_of_the_largest() -> None:
    assert draw(bars(1000, 500, 1, 0, 0, 0, 250), "%H:%M", 19).plain.split("\n") == [
        "00:00 1,000 ███████",
        "01:00   500 ███▌",
        "02:00     1 ▏",
        "    …",
        "06:00   250 █▊",
    ]


@given(st.integers(0, 10**12), st.integers(1, 10**12), st.integers(1, 100))
def test_a_bar_is_visible_unless_zero_and_never_too_long(
    count: int, largest: int, width: int
) -> None:
    drawn = length(min(count, largest), largest, width)
    assert len(drawn) <= width
    assert bool(drawn) == bool(count)
    assert (drawn == "█" * width) >= (count >= largest)


def test_no_line_is_wider_than_the_terminal_or_than_is_easy_to_read() -> None:
    for columns in (20, 80, 500):
        lines = draw(bars(7, 3), "%Y-%m-%d %H:%M", columns).plain.split("\n")
        assert max(map(len, lines)) <= min(max(columns, 16 + 4), 16 + 3 + BAR_COLUMNS_MAX)
