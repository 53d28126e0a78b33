"""Reports the lag of consumer groups, and the time until messages were settled.

The progress of groups is in the action logs (datasets `deliveries` and `progress`), so the report
needs no running consumers and also works on copies of folders. Latencies are computed for every
message, not sampled. They are differences between two machines' clocks; if these disagree, a
latency may be negative, and is reported unchanged.

    from creation    passed to the producer → acknowledged
    from storing     stored by the broker → acknowledged
    to the pull      stored by the broker → first delivered (unknown for ordered subjects)

Exit status 1 (findings) if retention deleted messages before their delivery to a group.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from pyspark_qmq.jobs.job import (
    QUEUE,
    covered,
    main,
    now_ms,
    of_groups,
    positive,
    queues_now,
    read_dataset,
    read_log,
    require_groups,
    utc,
)
from pyspark_qmq.jobs.lag_figures import (
    NAMED,
    PERCENTAGES,
    GroupLag,
    LagStep,
    Position,
    group_lags,
    lag_series,
    log_edges,
    quantile,
    share_at,
)
from pyspark_qmq.jobs.report import Plot, Report, ReportTable
from qmq.columns.model import QueueKey, SourceQueue

STEPS: Final = 60
"""Points of the curve of lag over time."""
COLUMNS: Final = (*QUEUE, "sequence", "create_time", "append_time", "logical_partition")
"""Of messages."""
MEASURES: Final = {"created": "from creation", "stored": "from storing", "pulled": "to the pull"}
_DONE: Final = ("ack", "done")
_NOT_TRIED: Final = ("release", "return")

Ages = Mapping[tuple[QueueKey, str], int]
"""When the oldest message that is not done was stored, by queue and group."""
Latencies = Mapping[str, Any]
"""Of one subject and group: `subject`, `consumer_group`, `settled`, `retried`, `attempt_max`; of
each measure its quantiles at PERCENTAGES (None if there are none), and how many are negative,
`created_negative` and so on.
"""


def newest(progress: DataFrame, *keys: str) -> DataFrame:
    """The newest row of each queue and group (and of each value of the columns `keys`)."""
    every = (*QUEUE, "consumer_group", *keys)
    others = [name for name in progress.columns if name not in every]
    latest = (
        progress.groupBy(*every)
        .agg(F.max_by(F.struct(*others), "time").alias("now"))
        .select(*every, "now.*")
    )
    return latest.withColumn("time_ms", F.unix_millis("time"))


def position_of(row: Row) -> Position:
    """A row of `newest`."""
    return Position(
        QueueKey(row.subject, row.partition, row.broker_group),
        row.consumer_group,
        row.time_ms,
        row.done_before,
        row.next_sequence,
        row.held,
        row.waiting,
        row.parked,
        row.expired,
        row.consumers,
    )


def measured(messages: DataFrame, deliveries: DataFrame) -> DataFrame:
    """`Latencies` of each subject and group, exact."""
    is_done = F.col("verdict").isin(*_DONE)
    is_first = (
        (F.col("attempt") == 1)
        & F.col("pulled_time").isNotNull()
        & ~F.col("verdict").isin(*_NOT_TRIED)
    )
    both = covered(messages, deliveries.where(is_done | is_first))
    done = {
        "created": _ms("settled_time", "create_time"),
        "stored": _ms("settled_time", "append_time"),
    }
    timed = both.select(
        "subject",
        "consumer_group",
        is_done.alias("is_done"),
        F.when(is_done, F.col("attempt")).alias("attempt"),
        *(F.when(is_done, took).alias(name) for name, took in done.items()),
        F.when(is_first, _ms("pulled_time", "append_time")).alias("pulled"),
    )
    return timed.groupBy("subject", "consumer_group").agg(
        F.count_if("is_done").alias("settled"),
        F.count_if(F.col("attempt") > 1).alias("retried"),
        F.max("attempt").alias("attempt_max"),
        *(F.percentile(name, F.array(*map(F.lit, PERCENTAGES))).alias(name) for name in MEASURES),
        *(F.count_if(F.col(name) < 0).alias(f"{name}_negative") for name in MEASURES),
    )


def _ms(end: str, begin: str) -> Column:
    return F.unix_millis(end) - F.unix_millis(begin)


def oldest_open(
    spark: SparkSession,
    messages: DataFrame,
    positions: Sequence[Position],
    queues: Mapping[QueueKey, SourceQueue],
) -> Ages:
    """When the oldest message that is not done was stored, of queues and groups that have such a
    message (milliseconds since 1970).
    """
    known = [each for each in positions if each.queue in queues]
    behind = [
        (*each.queue, each.group, each.done_before)
        for each in known
        if each.done_before < queues[each.queue].end
    ]
    if not behind:
        return {}
    wanted = spark.createDataFrame(
        behind,
        (
            "subject string, partition int, broker_group string, consumer_group string, "
            "done_before long"
        ),
    )
    found = messages.join(F.broadcast(wanted), list(QUEUE)).where("sequence >= done_before")
    rows = (
        found.groupBy(*QUEUE, "consumer_group")
        .agg(F.unix_millis(F.min("append_time")).alias("oldest"))
        .collect()
    )
    return {
        (QueueKey(row.subject, row.partition, row.broker_group), row.consumer_group): row.oldest
        for row in rows
    }


def over_time(
    messages: DataFrame, progress: DataFrame, queues: Mapping[QueueKey, SourceQueue], now_ms: int
) -> tuple[list[datetime], dict[tuple[str, str], list[float]]]:
    """The times of STEPS points from the oldest message to now, and each group's lag at them."""
    first = messages.agg(F.unix_millis(F.min("append_time"))).collect()[0][0]
    if first is None:
        return [], {}
    length = max(-(-(now_ms - first + 1) // STEPS), 1)
    step = F.floor((F.unix_millis("append_time") - first) / length).cast("int")
    ends: dict[QueueKey, list[LagStep]] = {}
    for row in (
        messages.groupBy(*QUEUE, step.alias("step")).agg(F.max("sequence").alias("last")).collect()
    ):
        ends.setdefault(QueueKey(row.subject, row.partition, row.broker_group), []).append(
            LagStep(row.step, row.last + 1)
        )
    at = F.floor((F.unix_millis("time") - first) / length).cast("int")
    rows = newest(progress.withColumn("step", at), "step").orderBy("step").collect()
    starts = {key: queue.start for key, queue in queues.items()}
    known = [(row.step, position) for row in rows if (position := position_of(row)).queue in queues]
    axis = [utc(first + length * (each + 1)) for each in range(STEPS)]
    return axis, lag_series(STEPS, ends, known, starts)


CURVES_MAX: Final = 8


class LagReport:
    name = "lag_report"
    summary = "Report the lag of consumer groups, and the time until messages were settled."

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add this job's arguments."""
        parser.add_argument(
            "--group",
            action="append",
            default=[],
            metavar="NAME",
            help="only this consumer group; repeatable",
        )
        parser.add_argument(
            "--top",
            type=positive,
            default=20,
            metavar="N",
            help="number of queues to list, largest lag first (20)",
        )

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Read both logs and report the lag. Raises QmqError."""
        subjects = sorted({key.subject for key in queues_now(args).queues})
        messages = read_log(spark, args, COLUMNS)
        kept = of_groups(read_dataset(spark, args, "progress"), args.group, subjects).persist()
        deliveries = of_groups(
            read_dataset(spark, args, "deliveries"), args.group, subjects
        ).persist()
        try:
            positions = [position_of(row) for row in newest(kept).collect()]
            require_groups([each.group for each in positions], args.group)
            queues = queues_now(
                args
            ).queues  # Read after the positions, so that no group is ahead of its queue's end.
            now = now_ms(
                args,
                [
                    *(each.last_append_ms for each in queues.values()),
                    *(each.time_ms for each in positions),
                ],
            )
            ages = oldest_open(spark, messages, positions, queues)
            latencies = [row.asDict() for row in measured(messages, deliveries).collect()]
            axis, curves = over_time(messages, kept, queues, now)
        finally:
            kept.unpersist()
            deliveries.unpersist()
        return report(positions, queues, ages, latencies, (axis, curves), now, args.top)


# --- the report -----------------------------------------------------------------------------------


def report(
    positions: Sequence[Position],
    queues: Mapping[QueueKey, SourceQueue],
    ages: Ages,
    latencies: Sequence[Latencies],
    curves: tuple[Sequence[datetime], Mapping[tuple[str, str], Sequence[float]]],
    now: int,
    top: int,
) -> Report:
    """The report. Pure."""
    lags = group_lags(positions, queues)
    lost = [each for each in lags if each.lost]
    negative = sum(each[f"{name}_negative"] for each in latencies for name in MEASURES)
    ordered = sorted(latencies, key=lambda each: (each["subject"], each["consumer_group"]))
    return Report(
        "lag_report",
        _headline(lags, lost),
        not lost,
        {
            "groups": len(lags),
            "queues": len(queues),
            "messages kept": sum(each.end - each.start for each in queues.values()),
            "not done": sum(each.lag for each in lags),
            "settled": sum(each["settled"] for each in latencies),
            "negative latencies (clocks disagree)": negative,
            "as of": utc(now),
        },
        (
            _group_table(lags, ages, now),
            _latency_table(ordered),
            _attempts_table(ordered),
            _queue_table(positions, queues, ages, now, top),
        ),
        tuple(_plots(ordered, *curves)),
    )


def _headline(lags: Sequence[GroupLag], lost: Sequence[GroupLag]) -> str:
    if not lags:
        return "no group has consumed these subjects within the action log"
    if lost:
        total = sum(each.lost for each in lost)
        return (
            f"retention deleted {total:,} messages before "
            f"{', '.join(sorted({each.group for each in lost}))} consumed them"
        )
    worst = lags[0]
    if not worst.lag:
        return f"{len(lags)} groups have consumed everything"
    return (
        f"{len(lags)} groups; the largest lag is {worst.lag:,} messages, of {worst.group} on "
        f"{worst.subject}"
    )


def _group_table(lags: Sequence[GroupLag], ages: Ages, now: int) -> ReportTable:
    oldest: dict[tuple[str, str], int] = {}
    for (queue, group), time_ms in ages.items():
        key = (queue.subject, group)
        oldest[key] = min(oldest.get(key, time_ms), time_ms)
    columns = (
        "subject",
        "group",
        "not done",
        "oldest ms",
        "held",
        "waiting",
        "parked",
        "expired",
        "lost",
        "consumers",
        "not begun",
    )
    rows = tuple(
        (
            each.subject,
            each.group,
            each.lag,
            now - oldest.get((each.subject, each.group), now),
            each.held,
            each.waiting,
            each.parked,
            each.expired,
            each.lost,
            each.consumers,
            each.not_begun,
        )
        for each in lags
    )
    return ReportTable("Lag of groups", columns, rows, "groups")


def _latency_table(latencies: Sequence[Latencies]) -> ReportTable:
    shares = (0.0, *NAMED.values())
    rows = tuple(
        (
            each["subject"],
            each["consumer_group"],
            words,
            *(quantile(each[name], share) for share in shares),
            each[f"{name}_negative"],
        )
        for each in latencies
        for name, words in MEASURES.items()
        if each[name]
    )
    return ReportTable(
        "Latencies, in ms",
        ("subject", "group", "measured", "min", *NAMED, "negative"),
        rows,
        "latencies",
    )


def _attempts_table(latencies: Sequence[Latencies]) -> ReportTable:
    done = [each for each in latencies if each["settled"]]
    rows = tuple(
        (
            each["subject"],
            each["consumer_group"],
            each["settled"],
            each["retried"],
            each["attempt_max"],
        )
        for each in done
    )
    return ReportTable(
        "Attempts until a message was done",
        ("subject", "group", "done", "at a later attempt", "most attempts"),
        rows,
        "attempts",
    )


def _queue_table(
    positions: Sequence[Position],
    queues: Mapping[QueueKey, SourceQueue],
    ages: Ages,
    now: int,
    top: int,
) -> ReportTable:
    rows = [
        (
            *each.queue,
            each.group,
            each.lag(queue.end, queue.start),
            now - ages.get((each.queue, each.group), now),
            each.done_before,
            queue.end,
        )
        for each in positions
        if (queue := queues.get(each.queue)) is not None
    ]
    rows.sort(key=lambda row: (-row[4], row[:4]))
    columns = (*QUEUE, "group", "not done", "oldest ms", "done before", "end")
    return ReportTable(
        "Queues with the largest lag",
        tuple(each.replace("_", " ") for each in columns),
        tuple(rows[:top]),
        "queues",
    )


def _plots(
    latencies: Sequence[Latencies],
    axis: Sequence[datetime],
    curves: Mapping[tuple[str, str], Sequence[float]],
) -> list[Plot]:
    found: list[Plot] = []
    if axis and curves:
        largest = sorted(
            curves,
            key=lambda key: (
                -max((each for each in curves[key] if each == each), default=0.0),
                key,
            ),
        )[:CURVES_MAX]
        series = {
            f"{group} on {subject}": list(curves[subject, group]) for subject, group in largest
        }
        found.append(
            Plot("Messages not done, over time", "line", list(axis), series, "", "messages")
        )
    for name, words in MEASURES.items():
        measured_ones = [each for each in latencies if each[name]][:CURVES_MAX]
        if measured_ones:
            low = min(each[name][0] for each in measured_ones)
            xs = log_edges(low, max(each[name][-1] for each in measured_ones))
            shares = {
                f"{each['consumer_group']} on {each['subject']}": share_at(each[name], xs)
                for each in measured_ones
            }
            found.append(
                Plot(f"Latency {words}", "cdf", xs, shares, "ms", "share of messages", log_x=True)
            )
    return found


JOB = LagReport()

if __name__ == "__main__":
    raise SystemExit(main(JOB))
