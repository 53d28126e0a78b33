"""What an order audit checks for each key, across partitions and route versions.

The log order of a key is (version that opened the partition, partition, sequence): at each version one partition alone holds the key, so
the order is total, and two messages of a key can be compared wherever they lie.

What is compared with it, the order of sending, is known in three ways:

* By the ids. A message that was sent again to another partition, because a fenced one did not answer, keeps the id that it had first. So
  of one first producer the ids rise in the log, wherever they lie: exact, by no clock.
* By a number in header or body, that the application counts up for each key: exact, over all producers and processes. It proves what
  the application wants to know, and is the way to choose where it can be.
* By create_time, the producer's clock in milliseconds. A client has another producer id for each partition, so whether two ids are of one
  client is not in the log. Within one producer a time must not fall at all. Between two producers it must not fall by more than `clock_ms`:
  0 is right if each key is written by one process; if several processes write a key, nothing is promised between them, and their clocks
  differ: give what they may differ by. Two producers whose messages in one partition interleave are certainly two clients, since a client
  has one stream for a partition at a time: these are not compared. Equal times prove nothing either way. A clock that is set back looks
  like a violation; the counterexample says so.

By create_time are judged: messages that bear the id of the producer that stored them, and those that bear the id of a producer which is
known to have written to the subject itself (they were sent again). What else bears a foreign id came from a delay server, in the order
in which it became due, or from a sink with ids of its own: its send order is not in the log. It is counted as `unjudged`; a number judges
it, too.

Retention may have taken the first copy of a message whose second is there, and numbers between two messages: neither is a violation.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.jobs.order_rules import NAMES, finding, violations

POSITION = ("version", "partition", "sequence")
"""A message's place in the order of its key."""


class RetainedKeys(NamedTuple):
    """What is not there any more."""

    cut: frozenset[int] = frozenset()
    """Partitions of which the oldest messages are gone."""
    versions: frozenset[int] = frozenset()
    """Route versions that opened partitions of which something is gone, or everything."""


class Judging(NamedTuple):
    """How a key's messages are compared."""

    is_exact: bool = False
    """By a number; otherwise by create_time."""
    is_dense: bool = False
    """The numbers of a key rise by one."""
    clock_ms: int = 0
    """How far clocks of different processes may differ."""
    retention: RetainedKeys = RetainedKeys()


def of_keys(rows: DataFrame) -> DataFrame:
    """What has a place in the order of a key. Bent messages have none, and those of unknown partitions."""
    return rows.filter(F.col("key").isNotNull() & ~F.col("is_bent") & F.col("version").isNotNull())


def repeats(keyed: DataFrame) -> DataFrame:
    """(key, message id) of messages that are there more than once."""
    return keyed.groupBy("key", "message_id").agg(F.count("*").alias("copies")).filter("copies > 1")


def first_copies(keyed: DataFrame) -> DataFrame:
    """Of each message the one that lies first."""
    same = Window.partitionBy("key", "message_id").orderBy(*POSITION)
    return keyed.repartition("key").withColumn("copy", F.row_number().over(same)).filter("copy = 1").drop("copy")


def with_streams(keyed: DataFrame, *, has_carried: bool) -> DataFrame:
    """Adds is_known: whether the producer that a message's id names wrote to the subject itself."""
    if not has_carried:
        return keyed.withColumn("is_known", F.lit(True))
    known = keyed.filter(~F.col("is_carried")).select("sender", F.lit(True).alias("is_known")).distinct()
    return keyed.join(known, "sender", "left").withColumn("is_known", F.coalesce("is_known", F.lit(False)))


def without_forgotten(firsts: DataFrame, cut: frozenset[int]) -> DataFrame:
    """Without what was sent again, and of which retention took the first copy: it lies behind messages that were sent after it.

    Known by its id: less than that of the first message of its first producer that is kept, which lies where the oldest are gone.
    """
    chain = Window.partitionBy("key", "sender").orderBy(*POSITION)
    opened = firsts.repartition("key").withColumn("opening", F.first(F.struct("message_id", "partition")).over(chain))
    is_older = F.col("is_carried") & F.col("is_known") & (F.col("message_id") < F.col("opening.message_id"))
    return opened.filter(~(is_older & F.col("opening.partition").isin(list(cut)))).drop("opening")


def check_keys(firsts: DataFrame, judging: Judging) -> DataFrame:
    """Violations of the order of keys. `firsts`: each message once, with `is_known`."""
    judged = firsts.filter(F.col("number").isNotNull() if judging.is_exact else F.col("is_known"))
    place = F.struct(*NAMES, "version", "sender", "is_carried")
    seen = (
        judged.repartition("key")
        .withColumn("before", F.lag(place).over(Window.partitionBy("key").orderBy(*POSITION)))
        .withColumn("mine", F.lag(place).over(Window.partitionBy("key", "sender").orderBy(*POSITION)))
    )
    before, mine = F.col("before"), F.col("mine")
    is_sent_again = (F.col("is_carried") | mine["is_carried"]) & F.col("is_known")
    by_id = finding("id_order", is_sent_again & (F.col("message_id") < mine["message_id"]), mine)
    found = _by_number(before, judging) if judging.is_exact else _by_time(before, mine, judging)
    return violations(seen, by_id, *found)


def _by_number(before: Column, judging: Judging) -> list[Column]:
    number = F.col("number")
    found = [
        finding("number_order", number < before["number"], before),
        finding("number_repeat", number == before["number"], before),
    ]
    if not judging.is_dense:
        return found
    versions = F.array(*(F.lit(version) for version in sorted(judging.retention.versions))).cast("array<bigint>")
    is_gone = F.exists(versions, lambda version: (version > before["version"]) & (version <= F.col("version")))
    is_gap = number > F.try_add(before["number"], F.lit(1))
    return [*found, finding("number_gap", is_gap & ~is_gone, before)]


def _by_time(before: Column, mine: Column, judging: Judging) -> list[Column]:
    number = F.col("number")
    is_other = before["sender"] != F.col("sender")
    slack = F.when(before["producer_id"] == F.col("producer_id"), 0).otherwise(judging.clock_ms)
    return [
        finding("time_order", number < mine["number"], mine),
        finding("time_order", is_other & (number + slack < before["number"]), before),
    ]


def drop_concurrent(found: DataFrame, streams: DataFrame) -> DataFrame:
    """Without what two producers did that certainly are two clients: within one partition, each began before the other ended."""
    first, last = F.min("first").alias("first"), F.max("last").alias("last")
    bounds = streams.groupBy("partition", "producer_id").agg(first, last)
    mine = bounds.select("partition", "producer_id", F.col("first").alias("my_first"), F.col("last").alias("my_last"))
    other = bounds.select(
        F.col("partition").alias("earlier_partition"),
        F.col("producer_id").alias("earlier_producer_id"),
        F.col("first").alias("other_first"),
        F.col("last").alias("other_last"),
    )
    is_one_partition = (F.col("rule") == "time_order") & (F.col("partition") == F.col("earlier_partition"))
    is_pair = is_one_partition & (F.col("producer_id") != F.col("earlier_producer_id"))
    overlaps = (F.col("my_first") < F.col("other_last")) & (F.col("other_first") < F.col("my_last"))
    joined = found.join(mine, ["partition", "producer_id"], "left").join(other, ["earlier_partition", "earlier_producer_id"], "left")
    return joined.filter(~F.coalesce(is_pair & overlaps, F.lit(False))).select(*found.columns)
