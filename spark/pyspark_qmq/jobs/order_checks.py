"""The audit of one ordered subject: a function from messages and routes to findings.

An audit without findings proves, for the messages that were read:
* by structure, exactly: each producer's stream into each partition is complete and in order; sequences have no gaps; no message follows a
  command message, and (if both are on one broker group) no message of a target precedes the last one of its source; each message is in a
  partition that has its key; repeated messages are in the order of their ids, and duplicates are in-order replays;
* by the number or time given by `by` (order_keys.py): for each key, across all partitions and versions, log order is sending order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.jobs import order_hashes, order_keys, order_partitions, order_replays, order_seals
from pyspark_qmq.jobs.order_keys import Judging
from pyspark_qmq.jobs.order_rows import parse_by, prepare
from pyspark_qmq.jobs.order_rules import RULES, UNORDERED, OrderPlace, Violation
from pyspark_qmq.jobs.order_seals import Overtaking, PartitionFacts
from pyspark_qmq.source_model import Routes, SourceQueue

EXAMPLES_MAX: Final = 3
"""Examples kept per rule."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of an audit."""

    by: str
    routes: Routes
    facts: Mapping[str, int]
    """Figures about the audited messages, by name."""
    counts: Mapping[str, int]
    """The number of violations by rule (`order_rules.RULES`); rules without violations are left out."""
    examples: tuple[Violation, ...]
    """The first violations of each rule, in full."""
    violations: DataFrame
    """All violations, with the schema `order_rules.SCHEMA`."""
    partitions: tuple[PartitionFacts, ...]
    overtakings: tuple[Overtaking, ...]
    """Targets that took a message before the last one of their source, including those known only from clocks."""

    @property
    def tolerated(self) -> frozenset[str]:
        """Rules that the subject does not guarantee."""
        return frozenset() if self.routes.is_strict else UNORDERED

    @property
    def is_clean(self) -> bool:
        """Whether no guaranteed rule was violated."""
        return not self.counts.keys() - self.tolerated


def audit(
    messages: DataFrame,
    routes: Routes,
    *,
    by: str = "create_time",
    clock_ms: int = 0,
    is_dense: bool = False,
    queues: Sequence[SourceQueue] = (),
    keys_max: int = order_hashes.KEYS_MAX,
) -> Findings:
    """Audit one ordered subject.

    Args:
        messages: all messages of this subject, with the columns `order_rows.COLUMNS` and `parse_by(by).columns`.
        routes: all its routes.
        by: the source of the sending order: create_time, header:NAME or json:FIELD.
        clock_ms: for create_time, the allowed clock difference of processes that write the same key.
        is_dense: for a number, whether a key's numbers increase by one, so that a missing number is a lost message.
        queues: if `messages` is complete, the queues as they were before it was read; their ends are then checked, too.
        keys_max: the number of distinct keys to hash.

    Raises InvalidArgument. Spark raises errors of reading the messages.
    """
    way = parse_by(by)
    with ExitStack() as stack:

        def keep(rows: DataFrame) -> DataFrame:
            stack.callback(rows.persist().unpersist)
            return rows

        rows = keep(prepare(messages, routes, way))
        streamed = order_seals.streams(rows)
        partitions = order_seals.partition_facts(streamed)
        overtakings = list(order_seals.overtakings(partitions, routes))
        keyed = order_keys.of_keys(rows)
        hashed = order_hashes.check_hashes(keyed, routes.logical_partitions, keys_max)
        facts = _facts(partitions, routes) | {"keys": hashed.keys, "hashed_keys": hashed.hashed}
        judging = Judging(way.is_exact, is_dense, clock_ms, order_seals.retention(partitions, routes))
        of_keys = _check_keys(keyed, judging, keep, has_carried=facts["carried"] > 0)
        found = _union(
            order_partitions.check_partitions(rows, needs_number=way.is_exact),
            hashed.violations,
            order_seals.violations_of(rows, overtakings),
            order_seals.violations_at_ends(rows, order_seals.missing_ends(partitions, queues)),
            of_keys.violations,
        ).persist()  # It is used after the rows are unpersisted.
        counts = _counts(found)
        if "time_order" in counts:
            stack.callback(found.unpersist)
            found = order_keys.drop_concurrent(found, streamed).persist()
            counts = _counts(found)
        examples = _examples(found, rows) if counts else ()
        return Findings(by, routes, facts | of_keys.facts, counts, examples, found, tuple(partitions), tuple(overtakings))


class _OfKeys(NamedTuple):
    violations: DataFrame
    facts: dict[str, int]


def _check_keys(keyed: DataFrame, judging: Judging, keep: Callable[[DataFrame], DataFrame], *, has_carried: bool) -> _OfKeys:
    """Check replays, and the order of keys without them."""
    known = order_keys.with_streams(keyed, has_carried=has_carried)
    repeats = keep(order_keys.repeats(keyed))
    facts = {"replays": 0, "replayed_messages": 0, "unfinished_replays": 0}
    found: list[DataFrame] = []
    if not repeats.isEmpty():
        chained = keep(order_replays.chains(known, repeats))
        facts = order_replays.count_replays(chained).collect()[0].asDict()
        found.append(order_replays.check_replays(chained))
        known = order_keys.first_copies(known)
    if has_carried and not judging.is_exact:
        facts["unjudged"] = known.filter(~F.col("is_known")).count()
    if has_carried and judging.retention.cut:
        known = order_keys.without_forgotten(known, judging.retention.cut)
    return _OfKeys(_union(order_keys.check_keys(known, judging), *found), facts)


def _union(*found: DataFrame | None) -> DataFrame:
    return reduce(DataFrame.unionByName, [each for each in found if each is not None])


def _facts(partitions: Sequence[PartitionFacts], routes: Routes) -> dict[str, int]:
    known = [routes.partitions[each.partition].version for each in partitions if each.partition in routes.partitions]
    return {
        "messages": sum(each.messages for each in partitions),
        "partitions": len(partitions),
        "versions": len(set(known)),
        "latest_version": routes.version,
        "producers": sum(each.producers for each in partitions),
        "bent": sum(each.bent for each in partitions),
        "carried": sum(each.carried for each in partitions),
    }


def _counts(found: DataFrame) -> dict[str, int]:
    rows = {row["rule"]: row["count"] for row in found.groupBy("rule").count().collect()}
    return {rule: rows[rule] for rule in RULES if rule in rows}


def _examples(found: DataFrame, rows: DataFrame) -> tuple[Violation, ...]:
    """The first violations of each rule, with all columns of their messages."""
    nth = F.row_number().over(Window.partitionBy("rule").orderBy("partition", "sequence"))
    chosen = found.withColumn("nth", nth).filter(F.col("nth") <= EXAMPLES_MAX).collect()
    chosen.sort(key=lambda row: (list(RULES).index(row["rule"]), row["nth"]))
    pairs = {(row[f"{which}partition"], row[f"{which}sequence"]) for row in chosen for which in ("", "earlier_")}
    wanted = rows.sparkSession.createDataFrame([pair for pair in pairs if None not in pair], "partition int, sequence long")
    places = [_place(row) for row in rows.join(F.broadcast(wanted), ["partition", "sequence"]).collect()]
    by_place = {(each.partition, each.sequence, each.message_id): each for each in places}
    return tuple(_violation(row, by_place) for row in chosen)


def _place(row: Row) -> OrderPlace:
    return OrderPlace(**{name: row[name] for name in OrderPlace.__slots__})


def _violation(row: Row, places: Mapping[tuple[int, int, str], OrderPlace]) -> Violation:
    key = None if row["key"] is None else bytes(row["key"])
    earlier = places.get((row["earlier_partition"], row["earlier_sequence"], row["earlier_message_id"]))
    here = places.get((row["partition"], row["sequence"], row["message_id"]))
    nowhere = OrderPlace(row["partition"], "", row["sequence"], "", "", -1, -1, 0, 0, None)
    return Violation(row["rule"], key, here or nowhere, earlier)
