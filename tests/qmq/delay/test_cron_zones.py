"""Cron in every time zone: compared, minute by minute around each move of a clock, with what the
rule says.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest
from support import forms

from qmq.delay.recurrence import next_run

MINUTE = timedelta(minutes=1)
NAMES = sorted(
    name
    for name in available_timezones()
    if not name.startswith(("posix", "right", "Etc", "SystemV")) and name != "localtime"
)
YEARS = (2020, 2031)
CRONS = {
    "*/15 9-17 * * *": lambda t: 9 <= t.hour <= 17 and t.minute % 15 == 0,
    "30 * * * *": lambda t: t.minute == 30,
    "*/10 * * * *": lambda t: t.minute % 10 == 0,
    "15 2 * * *": lambda t: (t.hour, t.minute) == (2, 15),
    "0,45 0-3 * * *": lambda t: t.hour <= 3 and t.minute in (0, 45),
    "10 1 * * SUN": lambda t: (t.hour, t.minute) == (1, 10) and t.weekday() == 6,
}


def moves(zone: ZoneInfo) -> Iterator[datetime]:
    """The minutes at which the zone's clock is moved."""
    time, end = datetime(YEARS[0], 1, 1, tzinfo=UTC), datetime(YEARS[1], 1, 1, tzinfo=UTC)
    offset = time.astimezone(zone).utcoffset()
    while (time := time + timedelta(hours=12)) < end:
        now = time.astimezone(zone).utcoffset()
        if now != offset:
            at = time - timedelta(hours=12)
            while at.astimezone(zone).utcoffset() == offset:
                at += MINUTE
            yield at
            offset = now


def shift_of(zone: ZoneInfo, at: datetime) -> timedelta:
    before, after = (at - MINUTE).astimezone(zone).utcoffset(), at.astimezone(zone).utcoffset()
    assert before is not None
    assert after is not None
    return after - before


def is_odd(name: str) -> bool:
    zone = ZoneInfo(name)
    return any(abs(shift_of(zone, at)) != timedelta(hours=1) for at in moves(zone))


def expected(cron: str, zone: ZoneInfo, begin: datetime, end: datetime) -> set[datetime]:
    """One minute after the other: which minutes the rule names."""
    fits, follows_wall = CRONS[cron], any(field.startswith("*") for field in cron.split()[:2])
    found: set[datetime] = set()
    seen: set[datetime] = set()
    last: datetime | None = None
    time = begin - timedelta(hours=30)
    while time <= end:
        wall = time.astimezone(zone).replace(tzinfo=None)
        if follows_wall:
            matches = fits(wall)
        else:
            skipped = last is not None and wall > last + MINUTE
            walls = [wall]
            if skipped and last is not None:
                walls += [
                    last + number * MINUTE for number in range(1, int((wall - last) / MINUTE))
                ]
            matches = any(fits(each) and each not in seen for each in walls)
            seen.update(walls)
            last = wall
        if matches and time > begin:
            found.add(time)
        time += MINUTE
    return found


def got(cron: str, name: str, begin: datetime, end: datetime) -> list[datetime]:
    runs: list[datetime] = []
    ms = int(begin.timestamp() * 1000)
    while True:
        ms = next_run(cron, name, ms)
        run = datetime.fromtimestamp(ms / 1000, UTC)
        if run > end:
            return runs
        runs.append(run)


def judge(name: str, most: int) -> None:
    zone = ZoneInfo(name)
    for at in list(moves(zone))[-most:]:
        begin, end = at - timedelta(hours=5), at + timedelta(hours=26)
        for cron in CRONS:
            runs = got(cron, name, begin, end)
            assert runs == sorted(expected(cron, zone, begin, end)), (name, cron, at)


ODD = (
    "Australia/Lord_Howe",
    "Antarctica/Troll",
    "Pacific/Norfolk",
    "Asia/Pyongyang",
    "Antarctica/Casey",
)


@pytest.mark.parametrize("name", ODD)
def test_no_run_is_lost_or_repeated_where_the_clock_is_moved_by_other_than_an_hour(
    name: str,
) -> None:
    judge(name, 4)


@pytest.mark.parametrize("name", forms.some(NAMES, 20))
def test_no_run_is_lost_or_repeated_in_any_zone(name: str) -> None:
    judge(name, 20 if forms.FORM == "all" else 2)


def test_a_day_that_a_zone_skips_runs_its_fixed_times_once() -> None:
    """Samoa had no 30 December 2011."""
    zone, begin = ZoneInfo("Pacific/Apia"), datetime(2011, 12, 29, tzinfo=UTC)
    end = begin + timedelta(days=4)
    for cron in CRONS:
        assert got(cron, "Pacific/Apia", begin, end) == sorted(expected(cron, zone, begin, end)), (
            cron
        )
