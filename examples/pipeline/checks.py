"""Counts the flights at the end of every way: each must be there once, and each aircraft's in
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql.connect.session import SparkSession

from . import lake
from .alerts import ALERT_MIN, ALERTS
from .departures import SUBJECT

OPEN: Final = """
select count(*) from flights, (select max(scheduled) - interval 1 day as closed from flights)
where date_trunc('day', scheduled) + interval 1 day > closed
"""
IN_ORDER: Final = """
select count(*) from (
  select number, lag(number) over (partition by key order by route_version, sequence) as before
  from flights
) where before is null or number > before
"""
NUMBER: Final = "get_json_object(cast(body as string), '$.number')"


@dataclass(frozen=True, slots=True)
class Counts:
    """What there is."""

    flights: dict[str, int]
    """By place. Each must be the number of flights that were sent."""
    still_open: int
    """Flights of the days that airline_days has not closed."""
    came_late: int
    """Flights that left after the hour in which they should have left."""
    alerts: dict[str, int]
    """By place. Each must be the number of very late flights."""


def count(spark: SparkSession, servers: str, folder: Path) -> Counts:
    """Count everywhere."""

    def number(query: str) -> int:
        row = spark.sql(query).first()
        return int(row[0] or 0) if row else 0

    for view, subject in (("log", SUBJECT), ("alerts", ALERTS)):
        read = spark.read.format("qmq").option("qmq.servers", servers).option("subscribe", subject)
        read.schema("body binary").load().createOrReplaceTempView(view)
    still_open, in_lake = number(OPEN), lake.numbers(folder)
    return Counts(
        {
            "in the log": number("select count(*) from log"),
            "in flights": number("select count(*) from flights"),
            "in flights, different ones": number("select count(distinct number) from flights"),
            "in flights, in the order of their aircraft": number(IN_ORDER),
            "in airline_days, with the open days": still_open
            + number("select sum(flights) from airline_days"),
            "in airport_hours": number("select sum(flights) from airport_hours"),
            "in the Iceberg table": len(in_lake),
            "in the Iceberg table, different ones": len(in_lake.unique()),
        },
        still_open,
        number("select sum(came_late) from airport_hours"),
        {
            "in flights": number(f"select count(*) from flights where delay_min >= {ALERT_MIN}"),  # noqa: S608
            "in the subject": number("select count(*) from alerts"),
            "in the subject, different ones": number(
                f"select count(distinct {NUMBER}) from alerts"  # noqa: S608
            ),
        },
    )


def report(found: Counts, sent: int) -> bool:
    """Print the numbers. Whether all are right."""
    for place, number in found.flights.items():
        print(f"{number:9,}  flights {place}{'' if number == sent else f': NOT {sent:,}'}")
    print(f"{found.still_open:9,}  of days that are still open")
    print(f"{found.came_late:9,}  came after the hour in which they were due, and count in it")
    for place, number in found.alerts.items():
        print(f"{number:9,}  alerts {place}")
    return set(found.flights.values()) == {sent} and len(set(found.alerts.values())) == 1
