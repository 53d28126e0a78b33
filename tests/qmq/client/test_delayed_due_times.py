"""When a message is due, from what applications say; and which delay group an ordered subject
uses.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq import limits
from qmq.cli.arguments import parse_duration, parse_when
from qmq.client.producing import delayed
from qmq.client.producing.delayed import MISSING_S, DelayHome
from qmq.errors import DelayTooLong, InvalidArgument
from qmq.process.event_loop import time_of

NOW_MS = 1_800_000_000_000
NOW_NS = NOW_MS * 1_000_000


def test_a_delay_counts_from_now_and_a_fraction_is_never_early() -> None:
    assert delayed.due_at_ms(timedelta(seconds=1), NOW_NS) == NOW_MS + 1000
    assert delayed.due_at_ms(timedelta(0), NOW_NS) == NOW_MS
    assert delayed.due_at_ms(timedelta(microseconds=1), NOW_NS) == NOW_MS + 1
    assert delayed.due_at_ms(timedelta(0), NOW_NS + 1) == NOW_MS + 1
    assert delayed.due_at_ms(datetime(2027, 1, 15, 8, 0, 0, 1, UTC), NOW_NS) == NOW_MS + 1


def test_a_moment_is_the_same_in_every_zone() -> None:
    berlin = datetime(2027, 1, 15, 9, tzinfo=ZoneInfo("Europe/Berlin"))
    assert (
        delayed.due_at_ms(berlin, NOW_NS)
        == delayed.due_at_ms(berlin.astimezone(UTC), NOW_NS)
        == NOW_MS
    )
    assert (
        delayed.due_at_ms(berlin.astimezone(timezone(timedelta(hours=-9, minutes=-30))), NOW_NS)
        == NOW_MS
    )


def test_of_an_hour_that_comes_twice_fold_says_which() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    assert (
        delayed.due_at_ms(first.replace(fold=1), NOW_NS) - delayed.due_at_ms(first, NOW_NS)
        == 3_600_000
    )


@pytest.mark.parametrize(
    "when",
    [
        timedelta.min,
        datetime(1900, 1, 1, tzinfo=UTC),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
    ],
)
def test_before_1970_is_as_good_as_1970(when: delayed.When) -> None:
    assert delayed.due_at_ms(when, NOW_NS) == 0
    assert delayed.checked(-5, NOW_NS) == 0
    assert 0 < delayed.due_at_ms(timedelta(days=-1), NOW_NS) < NOW_MS


def test_the_longest_delay_is_allowed_and_a_millisecond_more_names_it() -> None:
    assert (
        delayed.due_at_ms(timedelta(milliseconds=limits.DELAY_MS_MAX), NOW_NS)
        == NOW_MS + limits.DELAY_MS_MAX
    )
    with pytest.raises(DelayTooLong, match=r"732 days \(two years\)"):
        delayed.due_at_ms(timedelta(milliseconds=limits.DELAY_MS_MAX + 1), NOW_NS)


@pytest.mark.parametrize(
    "when",
    [
        timedelta.max,
        datetime.max.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))),
    ],
)
def test_beyond_all_bounds_is_too_long(when: delayed.When) -> None:
    with pytest.raises(DelayTooLong):
        delayed.due_at_ms(when, NOW_NS)


@pytest.mark.parametrize("number", [2**63, 2**200, NOW_MS + limits.DELAY_MS_MAX + 1])
def test_a_number_beyond_all_bounds_is_too_long(number: int) -> None:
    with pytest.raises(DelayTooLong):
        delayed.checked(number, NOW_NS)
    with pytest.raises(DelayTooLong):
        delayed.many_ms([NOW_MS, number], 2, NOW_NS)


@pytest.mark.parametrize(
    "when", [None, 5, 5.0, float("nan"), float("inf"), True, "10m", b"", date(2027, 1, 1), object()]
)
def test_a_time_that_is_neither_a_delay_nor_a_moment_is_refused(when: Any) -> None:
    with pytest.raises(InvalidArgument):
        delayed.due_at_ms(when, NOW_NS)
    with pytest.raises(InvalidArgument):
        delayed.many([when], 1, NOW_NS)


@pytest.mark.parametrize("number", [5.0, float("nan"), True, "5", None, timedelta(1)])
def test_a_due_time_as_a_number_is_a_whole_one(number: Any) -> None:
    with pytest.raises(InvalidArgument):
        delayed.checked(number, NOW_NS)
    with pytest.raises(InvalidArgument):
        delayed.many_ms([number], 1, NOW_NS)
    with pytest.raises(InvalidArgument):
        delayed.many_ms([NOW_MS, number], 2, NOW_NS)


def test_of_many_messages_one_time_for_each_or_one_for_all() -> None:
    second = timedelta(seconds=1)
    assert delayed.many_of([second, second * 2], None, 2, NOW_NS) == [NOW_MS + 1000, NOW_MS + 2000]
    assert delayed.many_of(second, None, 2, NOW_NS) == [NOW_MS + 1000] * 2
    assert delayed.many_of(None, datetime(2027, 1, 15, 8, tzinfo=UTC), 2, NOW_NS) == [NOW_MS] * 2
    assert delayed.many_ms(7, 2, NOW_NS) == [7, 7]
    assert delayed.many_ms([-1, 7], 2, NOW_NS) == [0, 7]
    assert list(delayed.many_ms(range(5, 8), 3, NOW_NS)) == [5, 6, 7]
    assert list(delayed.many_ms([], 0, NOW_NS)) == []
    for wrong in ([second], [second] * 3, [second, "x"], "xx", 5):
        with pytest.raises(InvalidArgument):
            delayed.many_of(wrong, None, 2, NOW_NS)
    with pytest.raises(InvalidArgument, match="2 bodies, but 1 due_ms"):
        delayed.many_ms([1], 2, NOW_NS)


@given(st.lists(st.integers(0, NOW_MS + limits.DELAY_MS_MAX)))
def test_plain_numbers_go_through_as_they_are(numbers: list[int]) -> None:
    assert list(delayed.many_ms(numbers, len(numbers), NOW_NS)) == numbers


@given(st.integers(0, NOW_MS + limits.DELAY_MS_MAX))
def test_a_time_goes_there_and_back(number: int) -> None:
    assert delayed.due_at_ms(time_of(number), NOW_NS) == number


def test_a_time_beyond_the_calendar_is_its_last() -> None:
    assert time_of(2**63 - 1).year == 9999


@pytest.mark.parametrize("cron", ["0 9 * * *", "*/5 0-6,22 1,L * MON-FRI", " 0  9 * * 5#2 "])
def test_five_fields_and_a_zone_are_a_recurrence(cron: str) -> None:
    assert delayed.check_recurrence(cron, "America/Argentina/Buenos_Aires") == (
        " ".join(cron.split()),
        "America/Argentina/Buenos_Aires",
    )
    assert delayed.check_recurrence(cron, "Etc/GMT+5")[1] == "Etc/GMT+5"


@pytest.mark.parametrize(
    "cron",
    [
        "",
        "@daily",
        "* * * *",
        "* * * * * *",
        "0 9 * * $",
        "0 9 * * ä",
        None,
        5,
        "1," * 1000 + "1 * * * *",
    ],
)
def test_an_invalid_recurrence_is_refused(cron: Any) -> None:
    with pytest.raises(InvalidArgument, match="five fields"):
        delayed.check_recurrence(cron, "UTC")


@pytest.mark.parametrize("zone", [None, "", "Europe Berlin", "../etc", "/UTC", 5, "x" * 200])
def test_a_recurrence_needs_a_zone(zone: Any) -> None:
    with pytest.raises(InvalidArgument, match="time zone"):
        delayed.check_recurrence("0 9 * * *", zone)


# --- the home of an ordered subject ---------------------------------------------------------------


def homes(name: str, groups: dict[str, bool]) -> list[str]:
    return [
        group for group, is_writable in DelayHome(name).choose(groups, 0.0).items() if is_writable
    ]


def test_all_senders_choose_the_same_home_and_subjects_are_spread() -> None:
    groups = {f"d{number}": True for number in range(4)}
    chosen = [homes(f"s{number}", groups) for number in range(200)]
    assert chosen == [homes(f"s{number}", dict(reversed(groups.items()))) for number in range(200)]
    assert all(len(each) == 1 for each in chosen)
    assert all(25 <= chosen.count([group]) <= 75 for group in groups)


def test_a_new_group_takes_over_its_part_of_the_subjects_and_no_others_move() -> None:
    before = {"d0": True, "d1": True}
    for number in range(100):
        old, new = homes(f"s{number}", before), homes(f"s{number}", before | {"d2": True})
        assert new in (old, ["d2"])


def test_a_drained_home_is_left_at_once_and_one_that_is_missing_after_a_while() -> None:
    home, both = DelayHome("s"), {"d0": True, "d1": True}
    (first,) = [group for group, chosen in home.choose(both, 0.0).items() if chosen]
    (other,) = both.keys() - {first}
    assert home.choose({first: False, other: True}, 1.0) == {first: False, other: True}
    assert home.choose(both, 2.0)[first]
    assert home.choose({other: True}, 2.0 + MISSING_S / 2) == {other: False}
    assert home.choose({other: True}, 2.0 + MISSING_S) == {other: True}
    assert home.choose(both, 30.0)[first]
    assert home.choose({}, 31.0) == {}


# --- as people type them --------------------------------------------------------------------------


def test_durations_as_people_type_them() -> None:
    assert parse_duration("10m") == timedelta(minutes=10)
    assert parse_duration("1h30m") == timedelta(minutes=90)
    assert parse_duration("1.5s") == timedelta(milliseconds=1500)
    assert parse_duration("250ms") == timedelta(milliseconds=250)
    assert parse_duration("1w2d") == timedelta(days=9)
    assert parse_duration("0s") == timedelta(0)
    for wrong in (
        "",
        "10",
        "m",
        "10 m",
        "-10m",
        "10y",
        "1h-5m",
        "nan",
        "infs",
        "9" * 300 + "d",
        "٣m",
    ):
        with pytest.raises(InvalidArgument):
            parse_duration(wrong)


def test_moments_as_people_type_them() -> None:
    assert (
        parse_when("2027-01-15T09:00:00+01:00")
        == parse_when("2027-01-15T08:00Z")
        == datetime(2027, 1, 15, 8, tzinfo=UTC)
    )
    for wrong in ("", "tomorrow", "2027-13-01T00:00Z", "2027-02-30T00:00Z"):
        with pytest.raises(InvalidArgument, match="is not a time"):
            parse_when(wrong)
    for naive in ("2027-01-15T09:00:00", "2027-01-15"):
        with pytest.raises(InvalidArgument, match="time zone"):
            parse_when(naive)
