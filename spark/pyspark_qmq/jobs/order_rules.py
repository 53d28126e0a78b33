"""The rules of an order audit, the schema of violations, and the checks for each key across
partitions and route versions.

Each rule belongs to a kind:

    reorder          a message is in the log before one that was sent earlier
    gap              a message is missing
    duplicate        a message is stored twice, and not as an in-order replay
    after_seal       a partition got a message after its command message, or a target before its
                     source was complete
    wrong_partition  a message is in a partition that does not have its key
    unproved         the message lacks the number by which it should be judged

The log order of a key is (version that opened the partition, partition, sequence). At each version
exactly one partition has the key, so the order is total, and any two messages of a key can be
compared.

The log order is compared with the order of sending, which is known in three ways:

* By the ids. A message that was sent again to another partition, because a fenced one did not
  answer, keeps its first id. So the ids of one first producer increase in the log, across
  partitions: exact, without clocks.
* By a number in a header or the body that the application increments for each key: exact, across
  all producers and processes. This is the strongest check and should be used where possible.
* By create_time, the producer's clock in milliseconds. A client has another producer id for each
  partition, so whether two ids are of one client is not in the log. Within one producer, times must
  not decrease. Between two producers, they must not decrease by more than `clock_ms`: 0 is right if
  each key is written by one process. If several processes write a key, there is no guarantee
  between them, and their clocks differ: give the possible difference. Two producers whose messages
  interleave in one partition belong to two clients, because a client has one stream per partition
  at a time; they are not compared. Equal times prove neither order. A clock that was set back looks
  like a violation, as the counterexample says.

create_time judges messages with the id of the producer that stored them, and messages with the id
of another producer that has written to the subject itself (they were sent again). Other foreign ids
come from a delay server, in the order of due times, or from a sink with its own ids. The sending
order of these messages is not in the log, and they are counted as `unjudged`. A number judges them,
too.

Retention may have deleted the first copy of a message, or numbers between two messages. Neither is
a violation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType


class Rule(NamedTuple):
    """`says` describes the violation in a sentence."""

    kind: str
    says: str


RULES: Final[dict[str, Rule]] = {
    "stream_order": Rule(
        "reorder", "a producer's messages in one partition are not in the order of their numbers"
    ),
    "id_order": Rule(
        "reorder", "a message that was sent again follows one that the same producer sent later"
    ),
    "time_order": Rule("reorder", "a message of a key follows one that was created later"),
    "number_order": Rule("reorder", "a message of a key follows one with a higher number"),
    "stream_gap": Rule("gap", "a producer's numbers in a partition have a gap"),
    "sequence_gap": Rule("gap", "sequences of a partition are missing"),
    "number_gap": Rule("gap", "a key's numbers have a gap"),
    "sequence_repeat": Rule("duplicate", "a sequence occurs twice"),
    "stored_twice": Rule("duplicate", "a message is stored twice in one partition"),
    "broken_replay": Rule(
        "duplicate", "messages were stored again, but not all of them in order before newer ones"
    ),
    "number_repeat": Rule("duplicate", "two messages of a key have the same number"),
    "behind_seal": Rule(
        "after_seal", "a message follows the command message that closed its partition"
    ),
    "before_seal": Rule(
        "after_seal", "a partition took a message before the last one of its source"
    ),
    "outside_range": Rule(
        "wrong_partition", "a message's logical partition does not belong to its partition"
    ),
    "wrong_hash": Rule(
        "wrong_partition", "a message's logical partition is not the one of its key"
    ),
    "unknown_partition": Rule("wrong_partition", "a message is in a partition that no route has"),
    "other_group": Rule(
        "wrong_partition", "a message is on another broker group than its partition"
    ),
    "no_key": Rule("wrong_partition", "a message has no key"),
    "no_number": Rule("unproved", "a message lacks the number that gives its sending order"),
}
"""The rules by name, in the order of the report."""

UNORDERED: Final = frozenset(
    {"id_order", "time_order", "number_order", "stored_twice", "broken_replay"}
)
"""Rules that `best-effort` order does not guarantee;
there, such findings are reported but are not violations.
"""

_PLACE: Final = (
    StructField("partition", IntegerType()),
    StructField("sequence", LongType()),
    StructField("message_id", StringType()),
    StructField("producer_id", StringType()),
    StructField("number", LongType()),
)
SCHEMA: Final = StructType(
    [
        StructField("kind", StringType()),
        StructField("rule", StringType()),
        StructField("key", BinaryType()),
        *_PLACE,
        *(StructField(f"earlier_{field.name}", field.dataType) for field in _PLACE),
    ]
)
"""A violation: the message, and if there are two, the earlier one in the log."""
NAMES: Final = tuple(field.name for field in _PLACE)


def here() -> Column:
    """A row's location as a struct."""
    return F.struct(*NAMES)


def nowhere() -> Column:
    """A null location of the same type."""
    return F.lit(None).cast(StructType(list(_PLACE)))


def finding(rule: str, condition: Column, earlier: Column | None = None) -> Column:
    """A violation of `rule` by this row if `condition` is true, otherwise null."""
    place = (
        nowhere() if earlier is None else F.struct(*(earlier[name].alias(name) for name in NAMES))
    )
    return F.when(
        condition,
        F.struct(
            F.lit(RULES[rule].kind).alias("kind"), F.lit(rule).alias("rule"), place.alias("earlier")
        ),
    )


def violations(rows: DataFrame, *found: Column) -> DataFrame:
    """The violations of rows with SCHEMA: one for each finding that is not null. The rows have
    `key` and all of NAMES.
    """
    single = (
        rows.filter(F.coalesce(*(each["rule"] for each in found)).isNotNull())
        .withColumn("found", F.explode(F.array(*found)))
        .filter(F.col("found").isNotNull())
    )
    earlier = (F.col(f"found.earlier.{name}").alias(f"earlier_{name}") for name in NAMES)
    return single.select(F.col("found.kind"), F.col("found.rule"), "key", *NAMES, *earlier)


@dataclass(frozen=True, slots=True)
class OrderPlace:
    """A message and its location."""

    partition: int
    broker_group: str
    sequence: int
    message_id: str
    producer_id: str
    batch_sequence: int
    place: int
    create_ms: int
    append_ms: int
    number: int | None


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation in full. `earlier` precedes `place` in the log;
    None if the rule is about one message.
    """

    rule: str
    key: bytes | None
    place: OrderPlace
    earlier: OrderPlace | None = None


POSITION = ("version", "partition", "sequence")
"""A message's position in the log order of its key."""


class RetainedKeys(NamedTuple):
    """The ranges that retention has deleted."""

    cut: frozenset[int] = frozenset()
    """Partitions whose oldest messages were deleted."""
    versions: frozenset[int] = frozenset()
    """Route versions that opened partitions with deleted messages."""


class Judging(NamedTuple):
    """How the messages of a key are compared."""

    is_exact: bool = False
    """Whether by a number; otherwise by create_time."""
    is_dense: bool = False
    """Whether the numbers of a key increase by one."""
    clock_ms: int = 0
    """The allowed clock difference of different processes."""
    retention: RetainedKeys = RetainedKeys()


def of_keys(rows: DataFrame) -> DataFrame:
    """The rows that have a position in the order of a key. Bent messages and messages of unknown
    partitions have none.
    """
    return rows.filter(F.col("key").isNotNull() & ~F.col("is_bent") & F.col("version").isNotNull())


def repeats(keyed: DataFrame) -> DataFrame:
    """(key, message id) of messages that are stored more than once."""
    return keyed.groupBy("key", "message_id").agg(F.count("*").alias("copies")).filter("copies > 1")


def first_copies(keyed: DataFrame) -> DataFrame:
    """The first copy of each message."""
    same = Window.partitionBy("key", "message_id").orderBy(*POSITION)
    return (
        keyed.repartition("key")
        .withColumn("copy", F.row_number().over(same))
        .filter("copy = 1")
        .drop("copy")
    )


def with_streams(keyed: DataFrame, *, has_carried: bool) -> DataFrame:
    """Add `is_known`: whether the producer in a message's id has written to the subject itself."""
    if not has_carried:
        return keyed.withColumn("is_known", F.lit(True))
    known = (
        keyed.filter(~F.col("is_carried"))
        .select("sender", F.lit(True).alias("is_known"))
        .distinct()
    )
    return keyed.join(known, "sender", "left").withColumn(
        "is_known", F.coalesce("is_known", F.lit(False))
    )


def without_forgotten(firsts: DataFrame, cut: frozenset[int]) -> DataFrame:
    """Remove repeated messages whose first copy was deleted by retention: they follow messages that
    were sent later.

    Such a message has a smaller id than the first stored message of its first producer, which is in
    a partition with deleted messages.
    """
    chain = Window.partitionBy("key", "sender").orderBy(*POSITION)
    opened = firsts.repartition("key").withColumn(
        "opening", F.first(F.struct("message_id", "partition")).over(chain)
    )
    is_older = (
        F.col("is_carried")
        & F.col("is_known")
        & (F.col("message_id") < F.col("opening.message_id"))
    )
    return opened.filter(~(is_older & F.col("opening.partition").isin(list(cut)))).drop("opening")


def check_keys(firsts: DataFrame, judging: Judging) -> DataFrame:
    """The violations of the order of keys. `firsts`: each message once, with `is_known`."""
    judged = firsts.filter(F.col("number").isNotNull() if judging.is_exact else F.col("is_known"))
    place = F.struct(*NAMES, "version", "sender", "is_carried")
    seen = (
        judged.repartition("key")
        .withColumn("before", F.lag(place).over(Window.partitionBy("key").orderBy(*POSITION)))
        .withColumn(
            "mine", F.lag(place).over(Window.partitionBy("key", "sender").orderBy(*POSITION))
        )
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
    versions = F.array(*(F.lit(version) for version in sorted(judging.retention.versions))).cast(
        "array<bigint>"
    )
    is_gone = F.exists(
        versions, lambda version: (version > before["version"]) & (version <= F.col("version"))
    )
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
    """Remove comparisons of two producers that are certainly two clients: in one partition, each
    began before the other ended.
    """
    first, last = F.min("first").alias("first"), F.max("last").alias("last")
    bounds = streams.groupBy("partition", "producer_id").agg(first, last)
    mine = bounds.select(
        "partition", "producer_id", F.col("first").alias("my_first"), F.col("last").alias("my_last")
    )
    other = bounds.select(
        F.col("partition").alias("earlier_partition"),
        F.col("producer_id").alias("earlier_producer_id"),
        F.col("first").alias("other_first"),
        F.col("last").alias("other_last"),
    )
    is_one_partition = (F.col("rule") == "time_order") & (
        F.col("partition") == F.col("earlier_partition")
    )
    is_pair = is_one_partition & (F.col("producer_id") != F.col("earlier_producer_id"))
    overlaps = (F.col("my_first") < F.col("other_last")) & (F.col("other_first") < F.col("my_last"))
    joined = found.join(mine, ["partition", "producer_id"], "left").join(
        other, ["earlier_partition", "earlier_producer_id"], "left"
    )
    return joined.filter(~F.coalesce(is_pair & overlaps, F.lit(False))).select(*found.columns)
