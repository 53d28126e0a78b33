"""A histogram of due times: pending messages counted by hour for the next day, by day for the next month, by month after that. Pure.

Rules:
* Hours, days and months are in UTC, as the buckets are. The first hour is the current one.
* Every pending message is counted once: the bars plus `late` add up to the number of pending messages.
* A bucket counts in the bar where the bucket begins, or in the current hour if the bucket has begun. Messages of a bucket that has ended
  count as *late*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

HOURS: Final = 24
DAYS: Final = 30

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)


class Bar(NamedTuple):
    """The messages due from `start` (included) to `end` (excluded)."""

    start: datetime
    end: datetime
    pending: int


class Due(NamedTuple):
    """One bucket: its time range and its pending messages."""

    start: datetime
    end: datetime
    pending: int


class DelayHistogram(NamedTuple):
    """Adjoining bars: `hours`, then `days`, then `months` up to the last one with a message. `late` counts messages due before now."""

    late: int
    hours: list[Bar]
    days: list[Bar]
    months: list[Bar]


def histogram(buckets: Iterable[Due], now: datetime) -> DelayHistogram:
    """The histogram of the buckets as of `now`, which has a time zone."""
    known = list(buckets)
    this_hour = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    edges, hours, days = _edges(this_hour, max([each.start for each in known], default=this_hour))
    counts = [0] * (len(edges) - 1)
    late = 0
    for each in known:
        if each.end <= now:
            late += each.pending
        else:
            counts[bisect_right(edges, max(each.start, this_hour)) - 1] += each.pending
    bars = [Bar(start, end, count) for start, end, count in zip(edges, edges[1:], counts, strict=False)]
    return DelayHistogram(late, bars[:hours], bars[hours : hours + days], bars[hours + days :])


def _edges(first: datetime, last: datetime) -> tuple[list[datetime], int, int]:
    """The start of each bar and the end of the last one; the number of hours; the number of days."""
    edges = [first + number * _HOUR for number in range(HOURS + 1)]
    midnight = edges[-1].replace(hour=0) + _DAY
    edges += [midnight + number * _DAY for number in range(DAYS)]
    while edges[-1] <= last:
        edges.append(_next_month(edges[-1]))
    return edges, HOURS, DAYS


def _next_month(time: datetime) -> datetime:
    """The start of the next month."""
    return datetime(time.year + time.month // 12, time.month % 12 + 1, 1, tzinfo=UTC)


def shown(bars: list[Bar]) -> list[Bar | None]:
    """The bars to draw, up to the last one that is not empty. None stands for a gap of three or more empty bars."""
    kept: list[Bar | None] = []
    gap: list[Bar] = []
    for bar in bars:
        if not bar.pending:
            gap.append(bar)
            continue
        kept += gap if len(gap) < 3 else [None]
        kept.append(bar)
        gap = []
    return kept
