"""The dashboard as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from pyspark.sql import SparkSession

mpl.use("Agg")
from matplotlib import pyplot as plt

AIRLINES_SHOWN: Final = 6
BY_AIRLINE: Final = """
select carrier, sum(delay_min) / sum(flights - cancelled) mean, sum(flights) flights
from airline_days group by carrier having sum(flights - cancelled) > 0 order by mean
"""
BY_WEEK: Final = """
select carrier, date_trunc('week', day) week, sum(delay_min) / sum(flights - cancelled) mean
from airline_days group by carrier, week having sum(flights - cancelled) > 0 order by week
"""
BY_HOUR: Final = """
select origin, hour(from_utc_timestamp(hour, 'America/New_York')) local,
  sum(delay_min) / sum(flights - cancelled) mean
from airport_hours group by origin, local having sum(flights - cancelled) > 0 order by local
"""
BY_MONTH: Final = """
select date_trunc('month', from_utc_timestamp(hour, 'America/New_York')) month,
  sum(cancelled) cancelled, sum(came_late) late
from airport_hours group by month order by month
"""


def draw(spark: SparkSession, picture: Path) -> None:
    """Draw the tables' contents into a PNG."""
    by_airline, by_week, by_hour, by_month = (
        spark.sql(query).collect() for query in (BY_AIRLINE, BY_WEEK, BY_HOUR, BY_MONTH)
    )
    figure, places = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    figure.suptitle("Departures from New York")
    (airlines, weeks), (hours, months) = places
    airlines.barh([row.carrier for row in by_airline], [row.mean for row in by_airline])
    airlines.set(title="mean delay by airline", xlabel="minutes")
    largest = sorted(by_airline, key=lambda row: -row.flights)[:AIRLINES_SHOWN]
    for carrier in sorted(row.carrier for row in largest):
        _line(weeks, [row for row in by_week if row.carrier == carrier], "week", carrier)
    weeks.set(title="mean delay by week, the largest airlines", ylabel="minutes")
    for origin in sorted({row.origin for row in by_hour}):
        _line(hours, [row for row in by_hour if row.origin == origin], "local", origin)
    hours.set(title="mean delay by airport and hour", xlabel="hour in New York", ylabel="minutes")
    at = [row.month for row in by_month]
    months.plot(at, [row.cancelled for row in by_month], "o-", label="cancelled")
    months.plot(at, [row.late for row in by_month], "o-", label="came after their hour")
    months.set(title="by month", ylabel="flights")
    for each in (weeks, hours, months):
        each.legend(fontsize="small")
    for each in (weeks, months):
        each.tick_params("x", labelrotation=30)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _line(place: Any, rows: list[Any], x: str, label: str) -> None:
    place.plot([row[x] for row in rows], [row["mean"] for row in rows], label=label)
