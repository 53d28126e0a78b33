"""Judges each delayed message by comparing a delay group's schedule with the log. DataFrames in, DataFrames out.

A delayed message keeps its id when it is delivered, and each run of a recurring message has its own id, so both sides are joined by message
id. Left out are moved rows (they have another row), seeds of recurring messages (their runs are delivered), and directed messages, which
have the id of the failed message and are visible only to their group.

    delivered    it is in the log, and not before it was due
    early        in the log before it was due, by more than the clocks may differ
    lost         delivered according to the schedule, but not in the log, although the log still has its time
    gone         delivered according to the schedule, not in the log, but retention may have deleted it
    resurrected  cancelled, but in the log
    overdue      pending or planned, not in the log, and due for longer than OVERDUE_MS
    waiting      pending, and not due yet (or just now)
    cancelled    cancelled, and not in the log

A checkpoint is older than the log: a message that is pending in the checkpoint may be in the log, and then counts as delivered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from pyspark_qmq.jobs.lag_figures import PERCENTAGES

CAME: Final = "delivered"
EARLY: Final = "early"
LOST: Final = "lost"
GONE: Final = "gone"
RESURRECTED: Final = "resurrected"
OVERDUE: Final = "overdue"
WAITING: Final = "waiting"
CANCELLED: Final = "cancelled"
FINDINGS: Final = (EARLY, LOST, RESURRECTED, OVERDUE)
"""The verdicts that are violations."""
OVERDUE_MS: Final = 60_000
DELAYS: Final = ("up to 1 s", "up to 1 min", "up to 1 h", "up to 1 day", "up to 30 days", "longer")
_DELAY_ENDS_MS: Final = (1_000, 60_000, 3_600_000, 86_400_000, 30 * 86_400_000)
BINS: Final = 60
"""Bins of the histogram up to the 99.9th percentile; larger values are in the last bin."""


def arrivals(messages: DataFrame) -> DataFrame:
    """For each subject and message id: when it was first stored by a real-time broker, and how often."""
    return messages.groupBy("subject", "message_id").agg(F.min("append_time").alias("arrival"), F.count("*").alias("copies"))


def judged(schedules: DataFrame, messages: DataFrame, horizons: Mapping[str, int], now_ms: int, clock_ms: int) -> DataFrame:
    """The rows of the schedule with `verdict`, `arrival`, `copies`, and `error_ms`: the lateness after the first possible delivery time.

    Args:
        schedules: the dataset.
        messages: subject, message_id and append_time of all messages in the log.
        horizons: for each subject, the time (milliseconds since 1970) from which on the log is complete. Other subjects are in no log.
        now_ms: the current time, for overdue messages.
        clock_ms: the allowed difference between the clocks of a delay group and a broker.
    """
    is_judged = (F.col("state") != "moved") & ~F.col("is_directed") & ~((F.col("state") == "cancelled") & F.col("is_recurring"))
    rows = schedules.where(is_judged).join(arrivals(messages), ["subject", "message_id"], "left")
    due, arrival = F.unix_millis("due_time"), F.unix_millis("arrival")
    known = F.create_map(*[F.lit(each) for pair in horizons.items() for each in pair]) if horizons else None
    horizon = F.try_element_at(known, F.col("subject")) if known is not None else F.lit(None).cast("long")
    verdict = _verdict(due, arrival, horizon, now_ms, clock_ms)
    first_ms = F.greatest(due, F.unix_millis("append_time"))
    timed = rows.withColumns({"verdict": verdict, "error_ms": arrival - first_ms, "delay_ms": due - F.unix_millis("append_time")})
    return timed.withColumns({"copies": F.coalesce("copies", F.lit(0)), "delay": _delay_name(F.col("delay_ms"))})


def _verdict(due: Column, arrival: Column, horizon: Column, now_ms: int, clock_ms: int) -> Column:
    is_there, state = arrival.isNotNull(), F.col("state")
    return (
        F.when(is_there & (state == "cancelled"), RESURRECTED)
        .when(is_there & (arrival < due - clock_ms), EARLY)
        .when(is_there, CAME)
        .when(state == "cancelled", CANCELLED)
        .when((state == "delivered") & (due >= horizon), LOST)
        .when(state == "delivered", GONE)
        .when(due < now_ms - OVERDUE_MS, OVERDUE)
        .otherwise(WAITING)
    )


def _delay_name(delay_ms: Column) -> Column:
    found = F.when(delay_ms <= _DELAY_ENDS_MS[0], DELAYS[0])
    for end, name in zip(_DELAY_ENDS_MS[1:], DELAYS[1:], strict=False):
        found = found.when(delay_ms <= end, name)
    return found.otherwise(DELAYS[-1])


def errors_by(rows: DataFrame, name: str, by: Column) -> DataFrame:
    """Quantiles of the error (at PERCENTAGES) of delivered messages, grouped by a column: `name`, messages, errors."""
    arrived = rows.where(F.col("verdict").isin(CAME, EARLY))
    shares = F.array(*map(F.lit, PERCENTAGES))
    return arrived.groupBy(by.alias(name)).agg(F.count("*").alias("messages"), F.percentile("error_ms", shares).alias("errors"))


def binned(rows: DataFrame, low: float, high: float) -> tuple[list[float], list[float]]:
    """(edges, counts) of a histogram of errors from `low` to `high`; larger values are in the last bin."""
    width = max((high - low) / BINS, 1.0)
    number = F.least(F.floor((F.col("error_ms") - low) / width), F.lit(BINS - 1)).cast("int")
    arrived = rows.where(F.col("verdict").isin(CAME, EARLY))
    counts = {row.bin: row["count"] for row in arrived.groupBy(number.alias("bin")).count().collect()}
    last = max(counts, default=0)
    return [low + width * each for each in range(last + 2)], [float(counts.get(each, 0)) for each in range(last + 1)]
