"""What an order audit may find wrong: the rules, and how a violation is written down. Values only.

Each rule belongs to a kind, which is what people ask for first:

    reorder          a message lies in the log before one that was sent earlier
    gap              something that must have been there is not
    duplicate        something is there twice, and not as an in-order replay
    after_seal       a partition got a message behind its command message, or a target before its source had all of its own
    wrong_partition  a message lies where its key does not belong
    unproved         the message does not bear the number by which it was to be judged
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType


class Rule(NamedTuple):
    """`says` is what is the matter, for a sentence of its own."""

    kind: str
    says: str


RULES: Final[dict[str, Rule]] = {
    "stream_order": Rule("reorder", "a producer's messages lie in one partition in another order than that in which it numbered them"),
    "id_order": Rule("reorder", "a message that was sent again lies behind one that the same producer sent after it"),
    "time_order": Rule("reorder", "a message of a key lies behind one that was created later"),
    "number_order": Rule("reorder", "a message of a key lies behind one with a higher number"),
    "stream_gap": Rule("gap", "a producer's numbers in a partition have a gap"),
    "sequence_gap": Rule("gap", "sequences of a partition are missing"),
    "number_gap": Rule("gap", "a key's numbers have a gap"),
    "sequence_repeat": Rule("duplicate", "a sequence is there twice"),
    "stored_twice": Rule("duplicate", "a message is stored twice in one partition"),
    "broken_replay": Rule("duplicate", "messages were stored again, and not all of them, in order, before anything newer"),
    "number_repeat": Rule("duplicate", "two messages of a key have the same number"),
    "behind_seal": Rule("after_seal", "a message lies behind the command message that closed its partition"),
    "before_seal": Rule("after_seal", "a partition took a message before the one that it follows had its last"),
    "outside_range": Rule("wrong_partition", "a message's logical partition is not one of those that its partition holds"),
    "wrong_hash": Rule("wrong_partition", "a message's logical partition is not the one of its key"),
    "unknown_partition": Rule("wrong_partition", "a message lies in a partition that no route has"),
    "other_group": Rule("wrong_partition", "a message lies on another broker group than its partition"),
    "no_key": Rule("wrong_partition", "a message has no key"),
    "no_number": Rule("unproved", "a message does not bear the number that says when it was sent"),
}
"""By name, in the order in which they are told."""

UNORDERED: Final = frozenset({"id_order", "time_order", "number_order", "stored_twice", "broken_replay"})
"""What an order of `best-effort` does not promise: such findings are told, and are no violations there."""

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
"""A violation: the message at which it shows and, where there are two, the one that lies before it in the log."""
NAMES: Final = tuple(field.name for field in _PLACE)


def here() -> Column:
    """A row's place, as a struct."""
    return F.struct(*NAMES)


def nowhere() -> Column:
    """No place, of the same type."""
    return F.lit(None).cast(StructType(list(_PLACE)))


def finding(rule: str, condition: Column, earlier: Column | None = None) -> Column:
    """A violation of `rule` by this row where `condition` holds; null where it does not."""
    place = nowhere() if earlier is None else F.struct(*(earlier[name].alias(name) for name in NAMES))
    return F.when(condition, F.struct(F.lit(RULES[rule].kind).alias("kind"), F.lit(rule).alias("rule"), place.alias("earlier")))


def violations(rows: DataFrame, *found: Column) -> DataFrame:
    """The violations of rows, as SCHEMA has them: one for each finding that is not null. The rows have `key` and all of NAMES."""
    single = (
        rows.filter(F.coalesce(*(each["rule"] for each in found)).isNotNull())
        .withColumn("found", F.explode(F.array(*found)))
        .filter(F.col("found").isNotNull())
    )
    earlier = (F.col(f"found.earlier.{name}").alias(f"earlier_{name}") for name in NAMES)
    return single.select(F.col("found.kind"), F.col("found.rule"), "key", *NAMES, *earlier)


@dataclass(frozen=True, slots=True)
class OrderPlace:
    """One message, and where it lies."""

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
    """One violation, in full. `earlier` lies before `place` in the log; None if the rule is about one message."""

    rule: str
    key: bytes | None
    place: OrderPlace
    earlier: OrderPlace | None = None
