"""When a recurring message runs next: five cron fields in a time zone.

The grammar and what daylight saving does to it are cronsim's, and so those of Debian's cron:

* minute, hour, day of month, month, day of week; lists, ranges, steps, names of months and days; also `L` (the last day), `LW` (the last
  weekday), `FRI#2` (the second Friday), `5L` (the last Friday). If both days are given and neither begins with `*`, either will do.
* A run at a fixed time that daylight saving skips comes as soon as the clocks were moved; one at a time that comes twice runs the first
  time.
  With a `*` in front of minute or hour, runs follow the clock on the wall: none in what is skipped, all of them in what is repeated.

A run is a function of expression, zone and the last run's time, without other state, so any master can continue.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from qmq.errors import InvalidArgument

CHARACTERS_MAX: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_ANY_START: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""cronsim searches fifty years; from here on that covers every combination of dates and days of the week."""
_FIELDS: Final = "five fields: minute, hour, day of month, month, day of week, for instance '0 9 * * MON-FRI'"
_MACHINES_OWN: Final = ("localtime", "posixrules", "Factory")
_OTHER_TREES: Final = ("right/", "posix/")


def next_run(cron: str, zone: str, after_ms: int) -> int:
    """The first run strictly after a time, in milliseconds since 1970; a whole second. Raises InvalidArgument as `check`."""
    try:
        after = (_EPOCH + after_ms * _MILLISECOND).astimezone(_zone(zone))
        runs = _runs(cron, after)
        # In the hour that is repeated, cronsim finds fixed times by the wall clock: its first results may be in the past.
        run = next(run for run in runs if run.astimezone(UTC) > after)
    except (OverflowError, StopIteration) as cause:
        raise InvalidArgument(f"cron {cron!r} never runs after {after_ms} ms since 1970 in {zone}") from cause
    return (run.astimezone(UTC) - _EPOCH) // _MILLISECOND


def check(cron: str, zone: str) -> None:
    """Raise InvalidArgument for an invalid expression, an unknown zone, or a rule that never matches a day."""
    runs = _runs(cron, _ANY_START.astimezone(_zone(zone)))
    if next(runs, None) is None:
        raise InvalidArgument(f"cron {cron!r} never runs: no year has such a day")


def _runs(cron: str, after: datetime) -> CronSim:
    if len(cron) > CHARACTERS_MAX:
        raise InvalidArgument(f"a cron expression has at most {CHARACTERS_MAX} characters, this one {len(cron)}")
    if len(cron.split()) != 5:
        raise InvalidArgument(f"cron {cron!r} has {len(cron.split())} fields: write {_FIELDS}")
    try:
        return CronSim(cron, after)
    except CronSimError as cause:
        what = str(cause).removeprefix("Bad ")
        raise InvalidArgument(f"cron {cron!r}: the field {what!r} is wrong, or there is no such day: write {_FIELDS}") from cause


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
    return InvalidArgument(f"time zone {name!r} is not known: write an IANA name, for instance 'Europe/Berlin' or 'UTC'")
