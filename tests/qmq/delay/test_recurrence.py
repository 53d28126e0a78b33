"""When recurring messages run: daylight saving, leap years, and years of runs against every minute
of them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.forms import FORM, examples

from qmq.delay.recurrence import check, next_run
from qmq.errors import InvalidArgument

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
YEARS = 3 if FORM == "gate" else 10
"""From 2026 on: 2028 is a leap year."""


def ms(text: str) -> int:
    """The milliseconds of an ISO time with an offset."""
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def runs(cron: str, zone: str, after: str, count: int) -> list[str]:
    found, at = [], ms(after)
    for _ in range(count):
        at = next_run(cron, zone, at)
        found.append(
            datetime.fromtimestamp(at / 1000, ZoneInfo(zone)).isoformat(timespec="minutes")
        )
    return found


RUNS = """\
0 9 * * * | Europe/Berlin | 2026-11-21T09:00+01:00 | 2026-11-22T09:00+01:00 2026-11-23T09:00+01:00
0 9 * * MON-FRI | America/New_York | 2026-11-20T09:00-05:00 | 2026-11-23T09:00-05:00
*/20 * * * * | UTC | 2026-11-21T23:50+00:00 | 2026-11-22T00:00+00:00 2026-11-22T00:20+00:00
0 0 L * * | UTC | 2027-12-31T12:00+00:00 |\
    2028-01-31T00:00+00:00 2028-02-29T00:00+00:00 2028-03-31T00:00+00:00
0 0 29 2 * | Europe/Berlin | 2026-01-01T00:00+01:00 | 2028-02-29T00:00+01:00 2032-02-29T00:00+01:00
0 0 29 2 * | UTC | 2096-03-01T00:00+00:00 | 2104-02-29T00:00+00:00
0 8 1 jan,jul * | Asia/Kolkata | 2026-02-01T00:00+05:30 |\
    2026-07-01T08:00+05:30 2027-01-01T08:00+05:30
0 12 * * FRI#2 | UTC | 2026-11-21T00:00+00:00 | 2026-12-11T12:00+00:00
# the gap: skipped fixed times come as soon as the clocks were moved
30 2 * * * | Europe/Berlin | 2026-03-28T02:30+01:00 | 2026-03-29T03:00+02:00 2026-03-30T02:30+02:00
0,30 2 * * * | Europe/Berlin | 2026-03-29T01:59+01:00 |\
    2026-03-29T03:00+02:00 2026-03-30T02:00+02:00
30 2 * * * | America/New_York | 2026-03-07T12:00-05:00 |\
    2026-03-08T03:00-04:00 2026-03-09T02:30-04:00
*/30 2 * * * | Europe/Berlin | 2026-03-29T00:00+01:00 |\
    2026-03-30T02:00+02:00 2026-03-30T02:30+02:00
*/30 * * * * | Europe/Berlin | 2026-03-29T01:30+01:00 |\
    2026-03-29T03:00+02:00 2026-03-29T03:30+02:00
# the hour that comes twice: fixed times once, the first time
30 2 * * * | Europe/Berlin | 2026-10-25T00:00+02:00 | 2026-10-25T02:30+02:00 2026-10-26T02:30+01:00
30 1 * * * | America/New_York | 2026-11-01T00:00-04:00 |\
    2026-11-01T01:30-04:00 2026-11-02T01:30-05:00
30 2 * * * | Europe/Berlin | 2026-10-25T02:10+01:00 | 2026-10-26T02:30+01:00
*/30 2 * * * | Europe/Berlin | 2026-10-25T02:00+02:00 |\
    2026-10-25T02:30+02:00 2026-10-25T02:00+01:00 2026-10-25T02:30+01:00
"""
"""Expression, zone, the time after which, and the first runs then."""


@pytest.mark.parametrize("line", [each for each in RUNS.splitlines() if not each.startswith("#")])
def test_runs_are_those_of_cron(line: str) -> None:
    cron, zone, after, expected = (each.strip() for each in line.split("|"))
    assert runs(cron, zone, after, len(expected.split())) == expected.split()


def test_a_run_is_strictly_after_to_the_millisecond() -> None:
    run = ms("2026-11-21T09:00+00:00")
    assert next_run("0 9 * * *", "UTC", run - 1) == run
    assert next_run("0 9 * * *", "UTC", run - 999) == run
    assert next_run("0 9 * * *", "UTC", run) == run + 86_400_000
    assert next_run("0 9 * * *", "UTC", run + 1) == run + 86_400_000


@pytest.mark.parametrize(
    ("cron", "zone", "why"),
    [
        ("0 0 31 2 *", "UTC", "no such day"),
        ("0 0 30,31 feb *", BERLIN, "no such day"),
        ("0 0 31 4,6,9,11 *", BERLIN, "no such day"),
        ("* * */20 * 1L", "UTC", "never runs"),
        ("60 * * * *", "UTC", "'minute' is wrong"),
        ("0 24 * * *", "UTC", "'hour' is wrong"),
        ("0 0 * * 8", "UTC", "'day-of-week' is wrong"),
        ("*/0 * * * *", "UTC", "'minute' is wrong"),
        ("", "UTC", "0 fields"),
        ("@daily", "UTC", "1 fields: write five"),
        ("0 0 9 * * *", "UTC", "6 fields: write five"),
        ("0 " * 500 + "* * *", "UTC", "at most 1000 characters"),
        ("9" * 900 + " * * * *", "UTC", "'minute' is wrong"),
        ("0 9 * * *", "Europe/Atlantis", "'Europe/Atlantis' is not known"),
        ("0 9 * * *", "", "is not known"),
        ("0 9 * * *", "Europe", "is not known"),
        ("0 9 * * *", "../../etc/passwd", "is not known"),
        ("0 9 * * *", "UTC\0", "is not known"),
        ("0 9 * * *", "localtime", "is not known"),
        ("0 9 * * *", "right/UTC", "is not known"),
    ],
)
def test_what_cannot_run_is_refused_and_the_error_says_why(cron: str, zone: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=r"(?s).*") as refused:
        check(cron, zone)
    assert why in refused.value.message


def test_a_time_beyond_all_calendars_is_refused() -> None:
    for after_ms in (10**18, 253_402_300_799_999, -(10**18)):
        with pytest.raises(InvalidArgument):
            next_run("0 9 * * *", "UTC", after_ms)


def test_a_day_that_is_rare_is_not_refused() -> None:
    check("0 0 29 2 *", BERLIN)
    check("0 0 * 2 MON#5", NEW_YORK)
    check("0 0 30 2 MON", "UTC")


# --- ten years ------------------------------------------------------------------------------------


def matches(cron: str, local: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether the expression (numbers and stars only) matches a minute of the wall clock, counted
    from 1970.
    """
    minute, hour, day, month, weekday = cron.split()
    days = (local // 1440).astype("datetime64[D]")
    months = days.astype("datetime64[M]")
    values = (
        (minute, local % 60),
        (hour, local // 60 % 24),
        (day, (days - months).astype(np.int64) + 1),
        (month, months.astype(np.int64) % 12 + 1),
        (weekday, (local // 1440 + 4) % 7),
    )
    result = np.ones(len(local), dtype=bool)
    for text, value in values:
        if text.startswith("*/"):
            result &= value % int(text[2:]) == 0
        elif text != "*":
            result &= np.isin(value, [int(each) for each in text.split(",")])
    return result


@cache
def offsets(zone: str, begin: int, hours: int) -> list[int]:
    """Minutes that the wall's clock is ahead of UTC, hour by hour; here it is moved at full hours
    only.
    """
    info, found = ZoneInfo(zone), []
    for hour in range(hours):
        offset = datetime.fromtimestamp((begin + hour * 60) * 60, UTC).astimezone(info).utcoffset()
        assert offset is not None
        found.append(int(offset.total_seconds()) // 60)
    return found


def every_run(cron: str, zone: str, begin: int, hours: int) -> list[int]:
    """Look at every minute (of 1970 + n) from `begin` on: the minutes at which the expression
    runs.
    """
    utc = begin + np.arange(hours * 60)
    local = utc + np.repeat(np.array(offsets(zone, begin, hours), dtype=np.int64), 60)
    if "*" in (cron.split()[0][0], cron.split()[1][0]):
        return [int(at) for at in utc[matches(cron, local)]]
    wanted = np.arange(local[0], local[-1])
    wanted = wanted[matches(cron, wanted)]
    # the first minute at which the wall's clock has got so far
    return [int(at) for at in np.unique(utc[np.searchsorted(np.maximum.accumulate(local), wanted)])]


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK])
@pytest.mark.parametrize(
    "cron",
    [
        "30 2 * * *",
        "0,20 1,2,3 * * 0",
        "*/15 1,2 * * 0",
        "5 */6 * * 1",
        "0 0 29 2 *",
        "59 23 31 * *",
    ],
)
def test_over_years_no_run_is_lost_or_doubled(cron: str, zone: str) -> None:
    begin, hours = ms("2026-01-01T12:00+00:00") // 60_000, YEARS * 365 * 24
    expected = every_run(cron, zone, begin, hours)
    found, at = [], begin * 60_000 - 1
    while (at := next_run(cron, zone, at)) < (begin + hours * 60) * 60_000:
        found.append(at)
    assert expected
    assert all(one < two for one, two in pairwise(found))
    assert [at // 60_000 for at in found] == expected
    assert all(at % 60_000 == 0 for at in found)


fields = st.sampled_from(
    [
        "*",
        "*/7",
        "0",
        "1",
        "2",
        "5-20/3",
        "0,2",
        "L",
        "LW",
        "MON#2",
        "5L",
        "jan",
        "31",
        "x",
        "1-",
        "/",
        "#",
        "1/2",
    ]
)


@settings(deadline=None, max_examples=examples(300))
@given(
    st.lists(fields, min_size=5, max_size=5).map(" ".join),
    st.sampled_from([BERLIN, NEW_YORK, "UTC"]),
    st.integers(0, 4 * 10**12),
)
@example("0 0 L/2 * *", "UTC", 0)
def test_any_expression_is_refused_or_runs_after(cron: str, zone: str, after_ms: int) -> None:
    try:
        check(cron, zone)
    except InvalidArgument:
        return
    run = next_run(cron, zone, after_ms)
    assert run > after_ms
    assert next_run(cron, zone, run) > run
    assert next_run(cron, zone, run - 1) == run


@settings(deadline=None, max_examples=examples(300))
@given(st.text("0123456789*/-,#L MON²\t", max_size=40))
def test_no_text_breaks_the_check(cron: str) -> None:
    refused = ""
    try:
        check(cron, "UTC")
    except InvalidArgument as failure:
        refused = failure.message
    assert not refused or "cron" in refused
