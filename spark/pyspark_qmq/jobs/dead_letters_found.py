"""Finds dead letters and their causes in deliveries and in a dead-letter subject. DataFrames in, a DataFrame out.

A *letter* is a failed message, or a range of messages of one queue with the same outcome. Causes:

    failing      it was delivered, failed at least the given number of times, and is not done
    parked       it failed, and was set aside with its key                     (ordered subjects)
    follower     it was set aside only because an earlier one of its key was
    skipped      an operator skipped it while it was parked
    expired      it was returned, and retention deleted it before its next delivery
    dead         its attempts are exhausted: a copy is in the group's dead-letter queue (`%dlq%GROUP`)
    ...          the value of a dead letter's reason header; `unknown` if there is none
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from pyspark_qmq.jobs.consumed import QUEUE, covered

FAILING: Final = "failing"
PARKED: Final = "parked"
FOLLOWER: Final = "follower"
SKIPPED: Final = "skipped"
EXPIRED: Final = "expired"
UNKNOWN: Final = "unknown"
RANGE: Final = (*QUEUE, "consumer_group", "first_sequence", "last_sequence", "first_lp", "end_lp", "attempts", "cause", "key")
MESSAGE: Final = (*QUEUE, "sequence", "logical_partition", "key", "tags", "message_id", "append_time")
DEAD: Final = "dead"
_CAUSES: Final = {"drop": SKIPPED, "expired": EXPIRED, "dead": DEAD}
"""The cause for each outcome of a delivery."""


def failed_ranges(deliveries: DataFrame, attempts: int, *, with_dead: bool = True) -> DataFrame:
    """The deliveries that failed for good, with the columns RANGE. `attempts`: failures from which a message counts as failing.

    Without `with_dead`, messages in a dead-letter queue are left out, because they are read from the queue.
    """
    tried = F.col("verdict").isin("open", "waiting") & (F.col("attempt") > attempts)
    failing = deliveries.where(tried).withColumns({"attempts": F.col("attempt") - 1, "cause": F.lit(FAILING)})
    ends = [fate for fate in _CAUSES if with_dead or fate != "dead"]
    ended = deliveries.where(F.col("verdict").isin(*ends)).withColumn("attempts", F.col("attempt"))
    cause = F.create_map(*[F.lit(each) for pair in _CAUSES.items() for each in pair])[F.col("verdict")]
    return failing.select(*RANGE).unionByName(ended.withColumn("cause", cause).select(*RANGE)).unionByName(_parked(deliveries))


def _parked(deliveries: DataFrame) -> DataFrame:
    """The parked messages. Whether a message failed itself is known from its event, if the log still has it."""
    names = (*QUEUE, "consumer_group", "first_sequence")
    events = deliveries.where("verdict = 'park'").groupBy(*names).agg(F.max_by("attempt", "settled_time").alias("attempts"))
    found = deliveries.where("verdict = 'parked'").join(events, list(names), "left")
    return found.withColumn("cause", F.when(F.col("attempts") == 0, FOLLOWER).otherwise(PARKED)).select(*RANGE)


def letters(messages: DataFrame, ranges: DataFrame) -> DataFrame:
    """The stored messages of the ranges, each with its cause."""
    found = covered(messages.select(*MESSAGE), ranges.drop("key"))
    return found.select(*MESSAGE, "consumer_group", "cause", "attempts")


def dead_letters(dead: DataFrame, cause_header: str, subject_header: str, group_header: str) -> DataFrame:
    """Messages of a dead-letter subject as letters, with the values of their headers and all columns that a replay needs."""
    return dead.select(
        *dead.columns,
        F.coalesce(_text(cause_header), F.lit(UNKNOWN)).alias("cause"),
        _text(subject_header).alias("original_subject"),
        _text(group_header).alias("consumer_group"),
        F.format_string("%s/%d@%s#%d", *(F.col(each) for each in ("subject", "partition", "broker_group", "sequence"))).alias("mark"),
    )


def _text(header: str) -> Column:
    return F.decode(F.try_element_at("headers", F.lit(header)), "UTF-8")
