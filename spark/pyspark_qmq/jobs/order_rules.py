"""The rules of an order audit, and the schema of violations. Values only.

Each rule belongs to a kind:

    reorder          a message is in the log before one that was sent earlier
    gap              a message is missing
    duplicate        a message is stored twice, and not as an in-order replay
    after_seal       a partition got a message after its command message, or a target before its source was complete
    wrong_partition  a message is in a partition that does not have its key
    unproved         the message lacks the number by which it should be judged
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType


class Rule(NamedTuple):
    """`says` describes the violation in a sentence."""

    kind: str
    says: str


RULES: Final[dict[str, Rule]] = {
    "stream_order": Rule("reorder", "a producer's messages in one partition are not in the order of their numbers"),
    "id_order": Rule("reorder", "a message that was sent again follows one that the same producer sent later"),
    "time_order": Rule("reorder", "a message of a key follows one that was created later"),
    "number_order": Rule("reorder", "a message of a key follows one with a higher number"),
    "stream_gap": Rule("gap", "a producer's numbers in a partition have a gap"),
    "sequence_gap": Rule("gap", "sequences of a partition are missing"),
    "number_gap": Rule("gap", "a key's numbers have a gap"),
    "sequence_repeat": Rule("duplicate", "a sequence occurs twice"),
    "stored_twice": Rule("duplicate", "a message is stored twice in one partition"),
    "broken_replay": Rule("duplicate", "messages were stored again, but not all of them in order before newer ones"),
    "number_repeat": Rule("duplicate", "two messages of a key have the same number"),
    "behind_seal": Rule("after_seal", "a message follows the command message that closed its partition"),
    "before_seal": Rule("after_seal", "a partition took a message before the last one of its source"),
    "outside_range": Rule("wrong_partition", "a message's logical partition does not belong to its partition"),
    "wrong_hash": Rule("wrong_partition", "a message's logical partition is not the one of its key"),
    "unknown_partition": Rule("wrong_partition", "a message is in a partition that no route has"),
    "other_group": Rule("wrong_partition", "a message is on another broker group than its partition"),
    "no_key": Rule("wrong_partition", "a message has no key"),
    "no_number": Rule("unproved", "a message lacks the number that gives its sending order"),
}
"""The rules by name, in the order of the report."""

UNORDERED: Final = frozenset({"id_order", "time_order", "number_order", "stored_twice", "broken_replay"})
"""Rules that `best-effort` order does not guarantee; there, such findings are reported but are not violations."""

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
    place = nowhere() if earlier is None else F.struct(*(earlier[name].alias(name) for name in NAMES))
    return F.when(condition, F.struct(F.lit(RULES[rule].kind).alias("kind"), F.lit(rule).alias("rule"), place.alias("earlier")))


def violations(rows: DataFrame, *found: Column) -> DataFrame:
    """The violations of rows with SCHEMA: one for each finding that is not null. The rows have `key` and all of NAMES."""
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
    """A violation in full. `earlier` precedes `place` in the log; None if the rule is about one message."""

    rule: str
    key: bytes | None
    place: OrderPlace
    earlier: OrderPlace | None = None
