"""Checks messages that are stored more than once: in-order replays are allowed, other repetitions are violations.

docs/ORDERING.md, "Duplicates": a producer whose partition was fenced before it answered sends messages that may be stored there again to
the next partition, under the same ids, together with all later messages in flight. So for a key and its first producer, the log goes back
to an earlier message and continues from there one by one, without skipping a message.

    7 8 9 | 8 9 10      a replay of two
    7 8 9 | 8 10        broken: 9 is not repeated before 10
    7 8 8               stored twice in one partition, where the broker should have recognised the duplicate
    7 8 9 | 8           unfinished: 9 was given up (its sender got an unknown outcome) or will follow. Counted, but not a violation
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.jobs.order_keys import POSITION
from pyspark_qmq.jobs.order_rules import finding, here, violations


def chains(keyed: DataFrame, repeats: DataFrame) -> DataFrame:
    """The messages of keys and first producers of which something is there twice, each with its `rank` (the how-manieth message of the
    chain it is: by the ids; where only the ids are of that producer, by the first copies) and `before`, the message of the chain that lies
    before it, with its rank. `keyed` has `is_known`.
    """
    touched = repeats.select("key", F.substring("message_id", 1, 16).alias("sender")).distinct()
    same = Window.partitionBy("key", "message_id").orderBy(*POSITION)
    position = F.struct(*POSITION)
    found = (
        keyed.join(touched, ["key", "sender"], "left_semi")
        .withColumn("copy", F.row_number().over(same))
        .withColumn("copy_before", F.lag(F.struct(*POSITION, "message_id", "producer_id", "number")).over(same))
        .withColumn("first_position", F.first(position).over(same))
    )
    is_same_row = F.col("copy_before.partition").eqNullSafe(F.col("partition")) & (F.col("copy_before.sequence") == F.col("sequence"))
    ranks = Window.partitionBy("key", "sender").orderBy(F.when(F.col("is_known"), F.col("message_id")), "first_position")
    ranked = found.filter(~F.coalesce(is_same_row, F.lit(False))).withColumn("rank", F.dense_rank().over(ranks))
    is_twice = F.coalesce(F.col("copy_before.partition") == F.col("partition"), F.lit(False))
    chain = Window.partitionBy("key", "sender", "is_twice").orderBy(*POSITION)
    return (
        ranked.withColumn("is_twice", is_twice)
        .withColumn("before", F.lag(F.struct(here().alias("place"), "rank")).over(chain))
        .withColumn("ranks", F.max("rank").over(Window.partitionBy("key", "sender")))
        .withColumn("is_last", F.lead("rank").over(chain).isNull())
    )


def check_replays(chained: DataFrame) -> DataFrame:
    is_twice, before = F.col("is_twice"), F.col("before")
    return violations(
        chained,
        finding("stored_twice", is_twice, F.col("copy_before")),
        finding("broken_replay", ~is_twice & (F.col("rank") > before["rank"] + 1), before["place"]),
    )


def count_replays(chained: DataFrame) -> DataFrame:
    """One row: `replays`, `replayed_messages`, `unfinished_replays`."""
    is_copy = ~F.col("is_twice") & (F.col("copy") > 1)
    begins = is_copy & (F.col("rank") <= F.col("before.rank"))
    is_unfinished = is_copy & F.col("is_last") & (F.col("rank") < F.col("ranks"))
    return chained.agg(
        F.count_if(begins).alias("replays"),
        F.count_if(is_copy).alias("replayed_messages"),
        F.count_if(is_unfinished).alias("unfinished_replays"),
    )
