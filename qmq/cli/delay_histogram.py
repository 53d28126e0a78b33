"""What is due when: pending messages counted by hour for the next day, by day for the next month, by calendar month beyond. Pure.

Rules:
* Hours, days and months are UTC's, as the buckets are. The first hour is the one that it is now.
* Every pending message is counted once: the sum of all bars, and of what is late, is what is pending.
* A bucket's messages are counted where the bucket begins, or now, if it has begun. What a bucket that is over still has is *late*.
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
    """What is due from `start` on and before `end`."""

    start: datetime
    end: datetime
    pending: int


class Due(NamedTuple):
    """One bucket's part of a histogram."""

    start: datetime
    end: datetime
    pending: int


class DelayHistogram(NamedTuple):
    """Bars that adjoin: `hours`, then `days`, then as many `months` as anything is due in. `late` was due before."""

    late: int
    hours: list[Bar]
    days: list[Bar]
    months: list[Bar]


def histogram(buckets: Iterable[Due], now: datetime) -> DelayHistogram:
    """Count; `now` has a time zone."""
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
    """Where the bars begin, and where the last one ends; how many of them are hours, how many are days."""
    edges = [first + number * _HOUR for number in range(HOURS + 1)]
    midnight = edges[-1].replace(hour=0) + _DAY
    edges += [midnight + number * _DAY for number in range(DAYS)]
    while edges[-1] <= last:
        edges.append(_next_month(edges[-1]))
    return edges, HOURS, DAYS


def _next_month(time: datetime) -> datetime:
    """The beginning of the month after this time's."""
    return datetime(time.year + time.month // 12, time.month % 12 + 1, 1, tzinfo=UTC)


def shown(bars: list[Bar]) -> list[Bar | None]:
    """What is worth drawing: nothing behind the last bar that has anything; None for a gap of three empty ones or more."""
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
