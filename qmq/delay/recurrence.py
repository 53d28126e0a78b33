"""When a recurring message runs next: five cron fields in a time zone.

The grammar is cronsim's, and so that of Debian's cron: minute, hour, day of month, month, day of
week; lists, ranges, steps, names of months and days; also `L` (the last day), `LW` (the last
weekday), `FRI#2` (the second Friday), `5L` (the last Friday). If both days are given and neither
begins with `*`, either will do. What a moved clock does to it is Debian's rule, too, for moves of
any length:

* With a `*` in front of minute or hour, runs follow the clock on the wall: none in what is skipped,
  all of them in what is repeated.
* Otherwise a time that is skipped runs as soon as the clock was moved (several of them run once),
  and one that comes twice the first time.

cronsim matches times without a zone; where these times lie, if they exist, is found here.

A run is a function of expression, zone and the last run's time, without other state, so any master
can continue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from qmq.errors import InvalidArgument

CHARACTERS_MAX: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_NEAR: Final = timedelta(hours=26)
"""The clock shows no time again later than this:
Samoa once skipped a day, which is the longest move.
"""
_ANY_START: Final = datetime(2000, 1, 1)
"""cronsim searches fifty years; from here on that covers every combination of dates
and days of the week.
"""
_FIELDS: Final = (
    "five fields: minute, hour, day of month, month, day of week, for instance '0 9 * * MON-FRI'"
)
_MACHINES_OWN: Final = ("localtime", "posixrules", "Factory")
_OTHER_TREES: Final = ("right/", "posix/")


def next_run(cron: str, zone: str, after_ms: int) -> int:
    """The first run strictly after a time, in milliseconds since 1970; a whole second. Raises
    InvalidArgument as `check`.
    """
    try:
        after, where = _EPOCH + after_ms * _MILLISECOND, _zone(zone)
        run = _first_after(
            after, _runs(cron, _begin(after, where)), where, follows_wall=_follows_wall(cron)
        )
    except (OverflowError, StopIteration) as cause:
        raise InvalidArgument(
            f"cron {cron!r} never runs after {after_ms} ms since 1970 in {zone}"
        ) from cause
    return (run - _EPOCH) // _MILLISECOND


def _follows_wall(cron: str) -> bool:
    minute, hour, *_ = cron.split()
    return minute.startswith("*") or hour.startswith("*")


def _begin(after: datetime, where: ZoneInfo) -> datetime:
    """A time on the wall before every run that comes after `after`: the clock may show times again
    that it has shown already.
    """
    offsets = [_offset(after + beside, where) for beside in (-_NEAR, timedelta(0), _NEAR)]
    return _wall(after, where) - (max(offsets) - min(offsets))


def _first_after(
    after: datetime, walls: Iterator[datetime], where: ZoneInfo, *, follows_wall: bool
) -> datetime:
    """The first run of those at these times on the wall, which ascend."""
    best: datetime | None = None
    for wall in walls:
        times = _times_of(wall, where, follows_wall=follows_wall)
        if best is not None and times and times[0] >= best:
            break  # later times on the wall come later, or again after that
        later = [time for time in times if time > after]
        best = min([*later, *([best] if best else [])], default=None)
    if best is None:
        raise StopIteration
    return best


def _times_of(wall: datetime, where: ZoneInfo, *, follows_wall: bool) -> list[datetime]:
    """When a run at this time on the wall comes, ascending."""
    found = [(wall.replace(tzinfo=where, fold=fold)).astimezone(UTC) for fold in (0, 1)]
    real = sorted({time for time in found if _wall(time, where) == wall})
    if follows_wall:
        return real
    return real[:1] or [_moved(found[1], found[0], where)]


def _moved(before: datetime, after: datetime, where: ZoneInfo) -> datetime:
    """The second between two times at which the clock is moved."""
    offset, seconds = _offset(before, where), int((after - before).total_seconds())
    return before + timedelta(
        seconds=bisect_left(
            range(seconds),
            True,
            key=lambda at: _offset(before + timedelta(seconds=at), where) != offset,
        )
    )


def _wall(time: datetime, where: ZoneInfo) -> datetime:
    return time.astimezone(where).replace(tzinfo=None, fold=0)


def _offset(time: datetime, where: ZoneInfo) -> timedelta:
    return time.astimezone(where).utcoffset() or timedelta(0)


def check(cron: str, zone: str) -> None:
    """Raise InvalidArgument for an invalid expression, an unknown zone, or a rule that never
    matches a day.
    """
    _zone(zone)
    runs = _runs(cron, _ANY_START)
    if next(runs, None) is None:
        raise InvalidArgument(f"cron {cron!r} never runs: no year has such a day")


def _runs(cron: str, after: datetime) -> CronSim:
    """The times on a wall that match, strictly after one of them."""
    if len(cron) > CHARACTERS_MAX:
        raise InvalidArgument(
            f"a cron expression has at most {CHARACTERS_MAX} characters, this one {len(cron)}"
        )
    if len(cron.split()) != 5:
        raise InvalidArgument(f"cron {cron!r} has {len(cron.split())} fields: write {_FIELDS}")
    try:
        return CronSim(cron, after)
    except CronSimError as cause:
        what = str(cause).removeprefix("Bad ")
        raise InvalidArgument(
            f"cron {cron!r}: the field {what!r} is wrong, or there is no such day: write {_FIELDS}"
        ) from cause


@lru_cache(maxsize=1000)
def _zone(name: str) -> ZoneInfo:
    """An IANA zone that means the same on every machine."""
    if name not in _MACHINES_OWN and not name.startswith(_OTHER_TREES):
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError) as cause:
            raise _no_zone(name) from cause
    raise _no_zone(name)


def _no_zone(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"time zone {name!r} is not known: write an IANA name, for instance 'Europe/Berlin' "
        "or 'UTC'"
    )
