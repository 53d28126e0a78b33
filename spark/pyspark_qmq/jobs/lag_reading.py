"""Computes the progress of groups and the latency of messages, from messages, deliveries and progress. DataFrames in, figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from pyspark_qmq.jobs.consumed import QUEUE, covered, utc
from pyspark_qmq.jobs.lag_figures import PERCENTAGES, LagStep, Position, lag_series
from pyspark_qmq.source_model import QueueKey, SourceQueue

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
"""Of one subject and group: `subject`, `consumer_group`, `settled`, `retried`, `attempt_max`; of each measure its quantiles at PERCENTAGES
(None if there are none), and how many are negative, `created_negative` and so on.
"""


def newest(progress: DataFrame, *keys: str) -> DataFrame:
    """The newest row of each queue and group (and of each value of the columns `keys`)."""
    every = (*QUEUE, "consumer_group", *keys)
    others = [name for name in progress.columns if name not in every]
    latest = progress.groupBy(*every).agg(F.max_by(F.struct(*others), "time").alias("now")).select(*every, "now.*")
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
    is_first = (F.col("attempt") == 1) & F.col("pulled_time").isNotNull() & ~F.col("verdict").isin(*_NOT_TRIED)
    both = covered(messages, deliveries.where(is_done | is_first))
    done = {"created": _ms("settled_time", "create_time"), "stored": _ms("settled_time", "append_time")}
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


def oldest_open(spark: SparkSession, messages: DataFrame, positions: Sequence[Position], queues: Mapping[QueueKey, SourceQueue]) -> Ages:
    """When the oldest message that is not done was stored, of queues and groups that have such a message (milliseconds since 1970)."""
    known = [each for each in positions if each.queue in queues]
    behind = [(*each.queue, each.group, each.done_before) for each in known if each.done_before < queues[each.queue].end]
    if not behind:
        return {}
    wanted = spark.createDataFrame(behind, "subject string, partition int, broker_group string, consumer_group string, done_before long")
    found = messages.join(F.broadcast(wanted), list(QUEUE)).where("sequence >= done_before")
    rows = found.groupBy(*QUEUE, "consumer_group").agg(F.unix_millis(F.min("append_time")).alias("oldest")).collect()
    return {(QueueKey(row.subject, row.partition, row.broker_group), row.consumer_group): row.oldest for row in rows}


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
    for row in messages.groupBy(*QUEUE, step.alias("step")).agg(F.max("sequence").alias("last")).collect():
        ends.setdefault(QueueKey(row.subject, row.partition, row.broker_group), []).append(LagStep(row.step, row.last + 1))
    at = F.floor((F.unix_millis("time") - first) / length).cast("int")
    rows = newest(progress.withColumn("step", at), "step").orderBy("step").collect()
    starts = {key: queue.start for key, queue in queues.items()}
    known = [(row.step, position) for row in rows if (position := position_of(row)).queue in queues]
    axis = [utc(first + length * (each + 1)) for each in range(STEPS)]
    return axis, lag_series(STEPS, ends, known, starts)
