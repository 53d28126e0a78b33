"""The audit of one ordered subject: all checks, put together. A function from messages and routes to findings; it reads nothing else.

What is proved when nothing is found, of the messages that were read:
* by structure, exactly: each producer's stream into each partition is there in its order without gaps; sequences have no gaps; nothing lies
  behind a command message, nor (where both are on one broker group) in a target before its source's last; each message lies in a partition
  that holds its key; what was sent again lies in the order of its ids, and what is stored twice is an in-order replay;
* by what `by` says (order_keys.py): per key, across all partitions and versions, that the log's order is the order of sending.
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
"""Of each rule."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What an audit found."""

    by: str
    routes: Routes
    facts: Mapping[str, int]
    """What was looked at, by name."""
    counts: Mapping[str, int]
    """Violations by rule (`order_rules.RULES`), those that there are."""
    examples: tuple[Violation, ...]
    """The first of each rule, in full."""
    violations: DataFrame
    """All of them, as `order_rules.SCHEMA` says."""
    partitions: tuple[PartitionFacts, ...]
    overtakings: tuple[Overtaking, ...]
    """Targets that took a message before their source's last, also by clocks alone."""

    @property
    def tolerated(self) -> frozenset[str]:
        """Rules that the subject does not promise to keep."""
        return frozenset() if self.routes.is_strict else UNORDERED

    @property
    def is_clean(self) -> bool:
        """Whether nothing that is promised was broken."""
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
        messages: of this subject alone, whole, with the columns `order_rows.COLUMNS` and `parse_by(by).columns`.
        routes: all its routes.
        by: what says in which order messages were sent: create_time, header:NAME or json:FIELD.
        clock_ms: by create_time, how far the clocks of processes that write the same key may differ.
        is_dense: by a number, that a key's numbers rise by one: what is missing between two is lost.
        queues: if `messages` is all there is, the queues as they were before it was read: then their ends are checked, too.
        keys_max: how many distinct keys are hashed.

    Raises InvalidArgument. What reading the messages raises comes from Spark.
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
        ).persist()  # it outlives the rows
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
    """What is stored again, and the order of keys without it."""
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
    """The first of each rule, with all that is known of their messages."""
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
