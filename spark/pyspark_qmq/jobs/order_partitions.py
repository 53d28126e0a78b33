"""What an order audit checks within each partition, exactly and by no clock: who sent what, in which batch, at which place in it.

* A producer numbers its batches to a partition from 0 without gaps, and a broker takes number n only behind n - 1, or as the first of
  a newer session (docs/adr/0010): so within a session (batch, place) rises by one step from message to message. At the beginning of what
  is kept it may begin anywhere, since retention took what was before.
* Sequences have no gaps within what is kept. (A power cut may leave one where consumers had seen what a disk then lost, docs/CONTRACT.md:
  told all the same, since messages are missing there.)
* Nothing lies behind the command message, and nothing where its logical partition does not belong.

Bent messages (best-effort order) lie elsewhere on purpose: they carry a logical partition of the partition in which they are.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.jobs.order_rules import finding, here, violations
from qmq.model import SESSION_BITS


def check_partitions(rows: DataFrame, *, needs_number: bool) -> DataFrame:
    """Violations within partitions. `rows` are those of `order_rows.prepare`."""
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
    """A place, and its number in its producer's stream."""
    return ("partition", "sequence", "message_id", "producer_id", "number", "batch_sequence", "place")


def _falls(mine: Column) -> Column:
    return F.struct("batch_sequence", "place") <= F.struct(mine["batch_sequence"], mine["place"])


def _skips(mine: Column) -> Column:
    batch, place = F.col("batch_sequence"), F.col("place")
    within = (batch == mine["batch_sequence"]) & (place > mine["place"] + 1)
    behind = (batch == mine["batch_sequence"] + 1) & (place > 0)
    return within | behind | ((batch > mine["batch_sequence"] + 1) & (~_begins_session() | (place > 0)))


def _begins_session() -> Column:
    """Whether a batch is the first one of a session of its producer (qmq/model.py): one that may come behind whatever there is."""
    return F.col("batch_sequence").bitwiseAND((1 << SESSION_BITS) - 1) == 0


def _by_themselves(needs_number: bool) -> list[Column]:
    """What each message shows without any other one."""
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
