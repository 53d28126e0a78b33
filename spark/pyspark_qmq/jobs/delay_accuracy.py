"""Reports how punctually delayed messages were delivered, and whether any was early or lost.

A delay group's folder has the due times (dataset `schedules`); the log, from brokers or folders,
has the delivered messages. `--from` and `--until` refer to due times here. A delay group deletes a
bucket's files once all its messages are delivered and no checkpoint names the bucket, so the report
covers the buckets that still have files.

Exit status 1 (findings) if a message was early, lost, overdue, or delivered although it was
cancelled.

Each message is judged by comparing the schedule with the log. A delayed message keeps its id when
it is delivered, and each run of a recurring message has its own id, so both sides are joined by
message id. Left out are moved rows (they have another row), seeds of recurring messages (their runs
are delivered), and directed messages, which have the id of the failed message and are visible only
to their group.

    delivered    it is in the log, and not before it was due
    early        in the log before it was due, by more than the clocks may differ
    lost         delivered according to the schedule, but not in the log, although the log still has
                 its time
    gone         delivered according to the schedule, not in the log, but retention may have deleted
                 it
    resurrected  cancelled, but in the log
    overdue      pending or planned, not in the log, and due for longer than OVERDUE_MS
    waiting      pending, and not due yet (or just now)
    cancelled    cancelled, and not in the log

A checkpoint is older than the log: a message that is pending in the checkpoint may be in the log,
and then counts as delivered.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from pyspark_qmq.jobs.job import (
    QUEUE,
    main,
    not_negative,
    now_ms,
    queues_now,
    read_dataset,
    read_subjects,
    time_ms,
    utc,
)
from pyspark_qmq.jobs.lag_figures import NAMED, PERCENTAGES, log_edges, quantile, share_at
from pyspark_qmq.jobs.report import Plot, Report, ReportTable
from qmq.errors import InvalidArgument

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
    """For each subject and message id:
    when it was first stored by a real-time broker, and how often.
    """
    return messages.groupBy("subject", "message_id").agg(
        F.min("append_time").alias("arrival"), F.count("*").alias("copies")
    )


def judged(
    schedules: DataFrame,
    messages: DataFrame,
    horizons: Mapping[str, int],
    now_ms: int,
    clock_ms: int,
) -> DataFrame:
    """The rows of the schedule with `verdict`, `arrival`, `copies`, and `error_ms`: the lateness
    after the first possible delivery time.

    Args:
        schedules: the dataset. messages: subject, message_id and append_time of all messages in the
        log. horizons: for each subject, the time (milliseconds since 1970) from which on the log is
        complete. Other subjects are in no log. now_ms: the current time, for overdue messages.
        clock_ms: the allowed difference between the clocks of a delay group and a broker.
    """
    is_judged = (
        (F.col("state") != "moved")
        & ~F.col("is_directed")
        & ~((F.col("state") == "cancelled") & F.col("is_recurring"))
    )
    rows = schedules.where(is_judged).join(arrivals(messages), ["subject", "message_id"], "left")
    due, arrival = F.unix_millis("due_time"), F.unix_millis("arrival")
    known = (
        F.create_map(*[F.lit(each) for pair in horizons.items() for each in pair])
        if horizons
        else None
    )
    horizon = (
        F.try_element_at(known, F.col("subject")) if known is not None else F.lit(None).cast("long")
    )
    verdict = _verdict(due, arrival, horizon, now_ms, clock_ms)
    first_ms = F.greatest(due, F.unix_millis("append_time"))
    timed = rows.withColumns(
        {
            "verdict": verdict,
            "error_ms": arrival - first_ms,
            "delay_ms": due - F.unix_millis("append_time"),
        }
    )
    return timed.withColumns(
        {"copies": F.coalesce("copies", F.lit(0)), "delay": _delay_name(F.col("delay_ms"))}
    )


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
    """Quantiles of the error (at PERCENTAGES) of delivered messages, grouped by a column: `name`,
    messages, errors.
    """
    arrived = rows.where(F.col("verdict").isin(CAME, EARLY))
    shares = F.array(*map(F.lit, PERCENTAGES))
    return arrived.groupBy(by.alias(name)).agg(
        F.count("*").alias("messages"), F.percentile("error_ms", shares).alias("errors")
    )


def binned(rows: DataFrame, low: float, high: float) -> tuple[list[float], list[float]]:
    """(edges, counts) of a histogram of errors from `low` to `high`;
    larger values are in the last bin.
    """
    width = max((high - low) / BINS, 1.0)
    number = F.least(F.floor((F.col("error_ms") - low) / width), F.lit(BINS - 1)).cast("int")
    arrived = rows.where(F.col("verdict").isin(CAME, EARLY))
    counts = {
        row.bin: row["count"] for row in arrived.groupBy(number.alias("bin")).count().collect()
    }
    last = max(counts, default=0)
    return [low + width * each for each in range(last + 2)], [
        float(counts.get(each, 0)) for each in range(last + 1)
    ]


EXAMPLES: Final = 20
HOURS: Final = 48
"""The number of findings shown, newest first."""
HOUR_MS: Final = 3_600_000
_NEVER_MS: Final = 1 << 62


class DelayAccuracy:
    name = "delay_accuracy"
    summary = "Report how punctually delayed messages were delivered."

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add this job's arguments."""
        parser.add_argument(
            "--delay-path",
            action="append",
            default=[],
            metavar="FOLDER",
            help="a delay group's data folder; repeatable",
        )
        parser.add_argument(
            "--clock-ms",
            type=not_negative,
            default=10,
            metavar="N",
            help="allowed difference of the groups' clocks (10)",
        )

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Compare the schedule with the log. Raises QmqError."""
        folders = args.delay_path or args.path
        if not folders:
            raise InvalidArgument(
                "give the schedule: --delay-path FOLDER, a delay group's data folder"
            )
        schedules = chosen(read_dataset(spark, args, "schedules", path=folders), args).persist()
        try:
            # Read before the log, so that messages delivered until now are in the log.
            schedules.count()
            queues = queues_now(args).queues
            subjects = sorted({key.subject for key in queues})
            messages = read_subjects(
                spark, args, (*QUEUE, "message_id", "append_time"), subjects, is_whole=True
            )
            now = now_ms(args, [each.last_append_ms for each in queues.values()])
            kept_from = horizons(queues.values(), oldest_kept(messages))
            rows = judged(schedules, messages, kept_from, now, args.clock_ms).persist()
            try:
                return report(*figures(rows), now, {"schedule": rows})
            finally:
                rows.unpersist()
        finally:
            schedules.unpersist()


def chosen(schedules: DataFrame, args: argparse.Namespace) -> DataFrame:
    """The rows of the selected subjects that are due between `--from` and `--until`.
    Raises InvalidArgument.
    """
    due = F.unix_millis("due_time")
    if args.subject:
        schedules = schedules.where(F.col("subject").isin(args.subject))
    elif args.pattern:
        schedules = schedules.where(F.col("subject").rlike(f"^(?:{args.pattern})$"))
    if args.from_time not in ("earliest", "latest"):
        schedules = schedules.where(due >= time_ms(args.from_time, "--from"))
    if args.until_time not in ("earliest", "latest"):
        schedules = schedules.where(due < time_ms(args.until_time, "--until"))
    return schedules


def oldest_kept(messages: DataFrame) -> dict[tuple[str, int, str], int]:
    """When the oldest message of each queue was stored, milliseconds since 1970."""
    rows = (
        messages.groupBy(*QUEUE).agg(F.unix_millis(F.min("append_time")).alias("oldest")).collect()
    )
    return {(row.subject, row.partition, row.broker_group): row.oldest for row in rows}


def horizons(queues: Any, oldest: Mapping[tuple[str, int, str], int]) -> dict[str, int]:
    """For each subject, the time from which on all messages are still stored; 0 if retention has
    deleted none.
    """
    found: dict[str, int] = {}
    for queue in queues:
        kept_from = oldest.get(tuple(queue.key), _NEVER_MS) if queue.start else 0
        found[queue.key.subject] = max(found.get(queue.key.subject, 0), kept_from)
    return found


class DelayFinding(NamedTuple):
    """A message that violates a guarantee. Times are milliseconds since 1970."""

    verdict: str
    subject: str
    message_id: str
    delay_group: str
    due_ms: int
    arrival_ms: int | None
    error_ms: int | None
    state: str

    def __str__(self) -> str:
        came = (
            "is not in the log"
            if self.arrival is None
            else f"came at {self.arrival}, {self.error_ms:,} ms after it could"
        )
        due = utc(self.due_ms)
        return (
            f"{self.verdict}: {self.message_id} of {self.subject}, due at {due}, {self.state} "
            f"says {self.delay_group}; it {came}"
        )

    @property
    def arrival(self) -> datetime | None:
        return None if self.arrival_ms is None else utc(self.arrival_ms)


Errors = Sequence[tuple[str, int, Sequence[float]]]
"""(name, messages, quantiles at PERCENTAGES)."""


def figures(
    rows: DataFrame,
) -> tuple[
    dict[str, int], int, Errors, Errors, tuple[list[float], list[float]], list[DelayFinding]
]:
    """Messages by verdict, the number of repeated deliveries, errors by delay and by hour, the
    histogram, and findings.
    """
    counts = {row.verdict: row["count"] for row in rows.groupBy("verdict").count().collect()}
    twice = rows.where("copies > 1").count()
    by_delay = [
        (row.delay, row.messages, row.errors)
        for row in errors_by(rows, "delay", F.col("delay")).collect()
    ]
    hours = (
        errors_by(rows, "hour", F.floor(F.unix_millis("due_time") / HOUR_MS))
        .orderBy("hour")
        .collect()
    )
    by_hour = [
        (f"{utc(row.hour * HOUR_MS):%Y-%m-%d %H}h", row.messages, row.errors) for row in hours
    ]
    whole = errors_by(rows, "all", F.lit("all")).collect()
    bins = binned(rows, whole[0].errors[0], quantile(whole[0].errors, 0.999)) if whole else ([], [])
    wrong = rows.where(F.col("verdict").isin(*FINDINGS))
    times = (F.unix_millis("due_time").alias("due"), F.unix_millis("arrival").alias("arrival"))
    columns = wrong.select(
        "verdict", "subject", "message_id", "delay_group", *times, "error_ms", "state"
    )
    some = [
        DelayFinding(*row)
        for row in columns.orderBy("verdict", "due", "message_id").limit(EXAMPLES).collect()
    ]
    errors = [("all", row.messages, row.errors) for row in whole]
    errors += sorted(by_delay, key=lambda each: DELAYS.index(each[0]))
    return counts, twice, errors, by_hour[-HOURS:], bins, some


def report(
    counts: Mapping[str, int],
    twice: int,
    by_delay: Errors,
    by_hour: Errors,
    bins: tuple[list[float], list[float]],
    some: Sequence[DelayFinding],
    now: int,
    details: dict[str, DataFrame],
) -> Report:
    """The report. Pure."""
    wrong = {name: counts[name] for name in FINDINGS if counts.get(name)}
    total = sum(counts.values())
    columns = ("messages", "min", *NAMED)
    findings = (
        "verdict",
        "subject",
        "message id",
        "delay group",
        "due",
        "arrival",
        "error ms",
        "state",
    )
    return Report(
        "delay_accuracy",
        _headline(total, wrong, by_delay),
        not wrong,
        {
            "delayed messages": total,
            **dict(sorted(counts.items())),
            "more than once": twice,
            "as of": utc(now),
        },
        (
            ReportTable(
                "Error in ms, by delay", ("delay", *columns), _error_rows(by_delay), "by_delay"
            ),
            ReportTable(
                "Error in ms, by the hour (UTC) in which messages were due",
                ("hour", *columns),
                _error_rows(by_hour),
                "by_hour",
            ),
            ReportTable("Violations", findings, tuple(_row(each) for each in some), "findings"),
        ),
        tuple(_plots(by_delay, bins)),
        counterexample="\n".join(map(str, some[:3])),
        details=details,
    )


def _headline(total: int, wrong: Mapping[str, int], by_delay: Errors) -> str:
    if wrong:
        return (
            ", ".join(f"{number:,} {name}" for name, number in wrong.items())
            + f" of {total:,} delayed messages"
        )
    if not by_delay:
        return (
            f"none of {total:,} delayed messages has come yet"
            if total
            else "no delayed message is known here"
        )
    _, messages, errors = by_delay[0]
    return (
        f"{messages:,} delayed messages came, none early; p99 {quantile(errors, 0.99):,.0f} ms, "
        f"at most {errors[-1]:,.0f} ms late"
    )


def _error_rows(found: Errors) -> tuple[tuple[object, ...], ...]:
    shares = (0.0, *NAMED.values())
    return tuple(
        (name, messages, *(quantile(errors, each) for each in shares))
        for name, messages, errors in found
    )


def _plots(by_delay: Errors, bins: tuple[list[float], list[float]]) -> list[Plot]:
    edges, counts = bins
    if not by_delay or not counts:
        return []
    xs = log_edges(min(each[2][0] for each in by_delay), max(each[2][-1] for each in by_delay))
    shares = {name: share_at(errors, xs) for name, _, errors in by_delay}
    return [
        Plot(
            "How late messages came (the latest are in the last bin)",
            "histogram",
            edges,
            {"messages": counts},
            "ms",
            "messages",
            log_y=True,
        ),
        Plot(
            "How late messages came, by delay",
            "cdf",
            xs,
            shares,
            "ms",
            "share of messages",
            log_x=True,
        ),
    ]


def _row(found: DelayFinding) -> tuple[object, ...]:
    return (*found[:4], utc(found.due_ms), found.arrival, found.error_ms, found.state)


JOB = DelayAccuracy()

if __name__ == "__main__":
    raise SystemExit(main(JOB))
