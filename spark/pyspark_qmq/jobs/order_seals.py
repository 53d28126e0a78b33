"""The checks of an order audit for whole partitions: their size, and whether targets waited for their sources. Mostly pure.

A target takes messages only after its sources are sealed. If both are on one broker group, they are in one log, and entry numbers decide
exactly. On two broker groups, only the masters' clocks can be compared; the result is reported as a fact, not as a violation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.jobs.order_keys import RetainedKeys
from pyspark_qmq.jobs.order_rules import NAMES, RULES, SCHEMA
from pyspark_qmq.source_model import Routes, SourceQueue


class PartitionFacts(NamedTuple):
    """The range that was read from a queue."""

    partition: int
    broker_group: str
    messages: int
    producers: int
    first: int
    last: int
    first_entry: int
    last_entry: int
    first_append_ms: int
    last_append_ms: int
    bent: int
    carried: int
    keyless: int

    @property
    def place(self) -> tuple[int, str]:
        return self.partition, self.broker_group


def streams(rows: DataFrame) -> DataFrame:
    """One row per producer and partition: the number of messages, the first and the last."""
    return rows.groupBy("partition", "broker_group", "producer_id").agg(
        F.count("*").alias("messages"),
        F.min("sequence").alias("first"),
        F.max("sequence").alias("last"),
        F.min("entry").alias("first_entry"),
        F.max("entry").alias("last_entry"),
        F.min("append_ms").alias("first_append_ms"),
        F.max("append_ms").alias("last_append_ms"),
        F.count_if("is_bent").alias("bent"),
        F.count_if("is_carried").alias("carried"),
        F.count_if(F.col("key").isNull()).alias("keyless"),
    )


def partition_facts(streamed: DataFrame) -> list[PartitionFacts]:
    """The sums of `streams` per queue, ascending."""
    sums = [F.sum(name).alias(name) for name in ("messages", "bent", "carried", "keyless")]
    edges = [edge(name).alias(name) for edge, which in ((F.min, "first"), (F.max, "last")) for name in (which, *_times(which))]
    found = streamed.groupBy("partition", "broker_group").agg(*sums, *edges, F.count("*").alias("producers")).collect()
    return sorted(PartitionFacts(**row.asDict()) for row in found)


def _times(which: str) -> tuple[str, str]:
    return f"{which}_entry", f"{which}_append_ms"


def retention(found: Iterable[PartitionFacts], routes: Routes) -> RetainedKeys:
    """The ranges that retention has deleted, derived from the stored messages."""
    at_home = _at_home(found, routes)
    cut = frozenset(each.partition for each in at_home.values() if each.first > 0)
    missing = {number for number in routes.partitions if number not in at_home and routes.sealed_at.get(number, 0) > 0}
    return RetainedKeys(cut, frozenset(routes.partitions[number].version for number in cut | missing))


def _at_home(found: Iterable[PartitionFacts], routes: Routes) -> dict[int, PartitionFacts]:
    """The partitions by number, on the broker groups where they belong."""
    known = [each for each in found if each.partition in routes.partitions]
    return {each.partition: each for each in known if routes.partitions[each.partition].broker_group == each.broker_group}


class Overtaking(NamedTuple):
    """A target that took a message before the last one of its source."""

    source: PartitionFacts
    target: PartitionFacts

    @property
    def is_certain(self) -> bool:
        """Whether both are in one log."""
        return self.source.broker_group == self.target.broker_group

    @property
    def by_ms(self) -> int:
        """The difference in milliseconds, by the masters' clocks."""
        return self.source.last_append_ms - self.target.first_append_ms


def overtakings(found: Iterable[PartitionFacts], routes: Routes) -> Iterator[Overtaking]:
    """All overtakings among the partitions that have messages on their broker group."""
    at_home = _at_home(found, routes)
    for target in at_home.values():
        for number in routes.partitions[target.partition].sources:
            source = at_home.get(number)
            if source is None:
                continue
            pair = Overtaking(source, target)
            if source.last_entry > target.first_entry if pair.is_certain else pair.by_ms > 0:
                yield pair


def missing_ends(found: Iterable[PartitionFacts], queues: Iterable[SourceQueue]) -> list[tuple[PartitionFacts | None, SourceQueue]]:
    """Queues that had messages after the last one that was read."""
    by_place: Mapping[tuple[int, str], PartitionFacts] = {each.place: each for each in found}
    pairs = [(by_place.get((queue.key.partition, queue.key.broker_group)), queue) for queue in queues if queue.end > queue.start]
    return [(read, queue) for read, queue in pairs if read is None or read.last < queue.end - 1]


def violations_of(rows: DataFrame, pairs: Iterable[Overtaking]) -> DataFrame | None:
    """A violation for each certain overtaking: the target's first message, and the source's last."""
    certain = [(each.source, each.target) for each in pairs if each.is_certain]
    if not certain:
        return None
    spark = rows.sparkSession
    wanted = spark.createDataFrame(
        [(source.partition, source.last_entry, target.partition, target.first_entry) for source, target in certain],
        "source int, last_entry long, target int, first_entry long",
    )
    place, at = F.struct(*NAMES, "key"), F.col("sequence")
    ends = (
        rows.filter("broker_group = home")
        .groupBy("partition", "entry")
        .agg(F.min_by(place, at).alias("opening"), F.max_by(place, at).alias("closing"))
    )
    targets = ends.select(F.col("partition").alias("target"), F.col("entry").alias("first_entry"), F.col("opening").alias("here"))
    sources = ends.select(F.col("partition").alias("source"), F.col("entry").alias("last_entry"), F.col("closing").alias("there"))
    found = wanted.join(targets, ["target", "first_entry"]).join(sources, ["source", "last_entry"])
    rule = [F.lit(RULES["before_seal"].kind).alias("kind"), F.lit("before_seal").alias("rule"), F.col("here.key").alias("key")]
    here = [F.col(f"here.{name}").alias(name) for name in NAMES]
    return found.select(*rule, *here, *(F.col(f"there.{name}").alias(f"earlier_{name}") for name in NAMES))


def violations_at_ends(spark_rows: DataFrame, missing: Iterable[tuple[PartitionFacts | None, SourceQueue]]) -> DataFrame | None:
    """A violation for each queue whose end is missing, at the first missing sequence."""
    found = [
        ("gap", "sequence_gap", None, queue.key.partition, queue.start if read is None else read.last + 1, *[None] * 8)
        for read, queue in missing
    ]
    return spark_rows.sparkSession.createDataFrame(found, SCHEMA) if found else None
