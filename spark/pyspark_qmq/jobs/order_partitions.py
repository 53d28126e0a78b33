"""The checks of an order audit within each partition, exact and without clocks: producer, batch, and position in the batch.

* A producer numbers its batches to a partition from 0 without gaps, and a broker accepts number n only after n - 1, or as the first batch
  of a newer session (docs/adr/0010). So within a session, (batch, position) advances by one step per message. The first stored message may
  have any number, because retention deleted the earlier ones.
* Stored sequences have no gaps. (A power cut may leave a gap where a disk lost messages that consumers had seen, docs/CONTRACT.md. It is
  reported, because messages are missing.)
* No message follows the command message, and each message's logical partition belongs to the partition.

Bent messages (best-effort order) are in another partition on purpose, and carry a logical partition of that partition.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.jobs.order_rules import finding, here, violations
from qmq.model import SESSION_BITS


def check_partitions(rows: DataFrame, *, needs_number: bool) -> DataFrame:
    """The violations within partitions. `rows`: the result of `order_rows.prepare`."""
    queue = Window.partitionBy("partition", "broker_group").orderBy("sequence")
    stream = Window.partitionBy("partition", "broker_group", "producer_id").orderBy("sequence")
    seen = (
        rows.withColumn("before", F.lag(here()).over(queue))
        .withColumn("oldest", F.first("sequence").over(queue))
        .withColumn("mine", F.lag(F.struct(*here_of_stream())).over(stream))
    )
    before, mine = F.col("before"), F.col("mine")
    is_repeat = F.coalesce(F.col("sequence") == before["sequence"], F.lit(False))
    return violations(
        seen,
        finding("sequence_repeat", is_repeat, before),
        finding("sequence_gap", F.col("sequence") > before["sequence"] + 1, before),
        finding("stream_order", ~is_repeat & _falls(mine), mine),
        finding("stream_gap", ~is_repeat & _skips(mine), mine),
        finding("stream_gap", mine.isNull() & (F.col("oldest") == 0) & (~_begins_session() | (F.col("place") > 0))),
        *_by_themselves(needs_number),
    )


def here_of_stream() -> tuple[str, ...]:
    """A message's location, with its number in the producer's stream."""
    return ("partition", "sequence", "message_id", "producer_id", "number", "batch_sequence", "place")


def _falls(mine: Column) -> Column:
    return F.struct("batch_sequence", "place") <= F.struct(mine["batch_sequence"], mine["place"])


def _skips(mine: Column) -> Column:
    batch, place = F.col("batch_sequence"), F.col("place")
    within = (batch == mine["batch_sequence"]) & (place > mine["place"] + 1)
    behind = (batch == mine["batch_sequence"] + 1) & (place > 0)
    return within | behind | ((batch > mine["batch_sequence"] + 1) & (~_begins_session() | (place > 0)))


def _begins_session() -> Column:
    """Whether a batch is the first of a producer's session (qmq/model.py), which may follow any batch."""
    return F.col("batch_sequence").bitwiseAND((1 << SESSION_BITS) - 1) == 0


def _by_themselves(needs_number: bool) -> list[Column]:
    """The checks of single messages."""
    lp, is_known = F.col("logical_partition"), F.col("version").isNotNull()
    is_inside = (lp >= F.col("first_lp")) & (lp < F.col("end_lp"))
    found = [
        finding("behind_seal", F.col("sequence") >= F.col("sealed_at")),
        finding("unknown_partition", ~is_known),
        finding("outside_range", is_known & ~F.coalesce(is_inside, F.lit(False))),
        finding("other_group", F.col("broker_group") != F.col("home")),
        finding("no_key", F.col("key").isNull()),
    ]
    return [*found, finding("no_number", F.col("number").isNull())] if needs_number else found
