"""The audit of one ordered subject: a function from messages and routes to findings.

An audit without findings proves, for the messages that were read:
* by structure, exactly: each producer's stream into each partition is complete and in order;
  sequences have no gaps; no message follows a command message, and (if both are on one broker
  group) no message of a target precedes the last one of its source; each message is in a partition
  that has its key; repeated messages are in the order of their ids, and duplicates are in-order
  replays;
* by the number or time given by `by` (order_rules.py): for each key, across all partitions and
  versions, log order is sending order.

*The logical partition of each key.* Spark has no CRC-32C function, so the driver hashes each
distinct key, up to a limit. Beyond the limit, a key with two logical partitions is still found by
comparing its messages with each other.

*Within each partition*, exactly and without clocks, by producer, batch, and position in the batch:

* A producer numbers its batches to a partition from 0 without gaps, and a broker accepts number n
  only after n - 1, or as the first batch of a newer session (docs/adr/0010). So within a session,
  (batch, position) advances by one step per message. The first stored message may have any number,
  because retention deleted the earlier ones.
* Stored sequences have no gaps. (A power cut may leave a gap where a disk lost messages that
  consumers had seen, docs/CONTRACT.md. It is reported, because messages are missing.)
* No message follows the command message, and each message's logical partition belongs to the
  partition.

Bent messages (best-effort order) are in another partition on purpose, and carry a logical partition
of that partition.

*Messages that are stored more than once*: in-order replays are allowed, other repetitions are
violations (docs/ORDERING.md, "Duplicates"). A producer whose partition was fenced before it
answered sends messages that may be stored there again to the next partition, under the same ids,
together with all later messages in flight. So for a key and its first producer, the log goes back
to an earlier message and continues from there one by one, without skipping a message.

    7 8 9 | 8 9 10      a replay of two
    7 8 9 | 8 10        broken: 9 is not repeated before 10
    7 8 8               stored twice in one partition, where the broker should have recognised the
                        duplicate
    7 8 9 | 8           unfinished: 9 was given up (its sender got an unknown outcome) or will
                        follow. Counted, but not a violation

*Whole partitions*: their size, and whether targets waited for their sources. A target takes
messages only after its sources are sealed. If both are on one broker group, they are in one log,
and entry numbers decide exactly. On two broker groups, only the masters' clocks can be compared;
the result is reported as a fact, not as a violation.

The rows are messages of one subject, joined with the routes' data about their partitions. `--by`
selects the source of the sending order:

    create_time    milliseconds since 1970 at which the message was passed to its producer
    header:NAME    an integer, as text, in a header that the application increments for each key
    json:FIELD     an integer in a body that is a JSON object; `a.b` is field b of the object in a
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them
from qmq_ordering.hashing import logical_partition

from pyspark_qmq.jobs import order_rules
from pyspark_qmq.jobs.order_rules import (
    NAMES,
    POSITION,
    RULES,
    SCHEMA,
    UNORDERED,
    Judging,
    OrderPlace,
    RetainedKeys,
    Violation,
    finding,
    here,
    violations,
)
from qmq.columns.model import Routes, SourceQueue
from qmq.errors import InvalidArgument
from qmq.model import SESSION_BITS

KEYS_MAX: Final = 1_000_000
"""Keys hashed by the driver; each needs about 100 bytes of memory."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """The result of the check."""

    keys: int
    """The number of distinct keys."""
    hashed: int
    """The number of keys checked against the hash."""
    violations: DataFrame | None
    """The violations; None if there are none."""


def check_hashes(keyed: DataFrame, logical_partitions: int, keys_max: int = KEYS_MAX) -> Hashed:
    """Compare logical partitions with keys.
    `keyed`: messages with keys that are not bent, with `logical_partition`.
    """
    lps = F.min("logical_partition").alias("least"), F.max("logical_partition").alias("most")
    keys = keyed.groupBy("key").agg(*lps)
    chosen = keys.limit(keys_max + 1).toArrow()
    count = chosen.num_rows
    if count > keys_max:
        count = keys.count()
        # Keys with two logical partitions must be wrong, so they are checked beyond the limit, too.
        is_sure = F.col("least") == F.col("most")
        chosen = keys.orderBy(is_sure).limit(keys_max).toArrow()
    wrong = _wrong(chosen, logical_partitions)
    hashed = min(count, keys_max)
    if not wrong:
        return Hashed(count, hashed, None)
    table = pa.table(
        {
            "key": pa.array([key for key, _ in wrong], pa.binary()),
            "right": pa.array([lp for _, lp in wrong], pa.int32()),
        }
    )
    suspects = keyed.join(keyed.sparkSession.createDataFrame(table), "key")
    return Hashed(
        count,
        hashed,
        violations(suspects, finding("wrong_hash", F.col("logical_partition") != F.col("right"))),
    )


def _wrong(keys: pa.Table, logical_partitions: int) -> list[tuple[bytes, int]]:
    found: list[tuple[bytes, int]] = []
    for key, least, most in zip(
        *(keys.column(name).to_pylist() for name in ("key", "least", "most")), strict=True
    ):
        right = logical_partition(key, logical_partitions)
        if least is not None and not least == right == most:
            found.append((key, right))
    return found


def check_partitions(rows: DataFrame, *, needs_number: bool) -> DataFrame:
    """The violations within partitions. `rows`: the result of `prepare`."""
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
        finding(
            "stream_gap",
            mine.isNull() & (F.col("oldest") == 0) & (~_begins_session() | (F.col("place") > 0)),
        ),
        *_by_themselves(needs_number),
    )


def here_of_stream() -> tuple[str, ...]:
    """A message's location, with its number in the producer's stream."""
    return (
        "partition",
        "sequence",
        "message_id",
        "producer_id",
        "number",
        "batch_sequence",
        "place",
    )


def _falls(mine: Column) -> Column:
    return F.struct("batch_sequence", "place") <= F.struct(mine["batch_sequence"], mine["place"])


def _skips(mine: Column) -> Column:
    batch, place = F.col("batch_sequence"), F.col("place")
    within = (batch == mine["batch_sequence"]) & (place > mine["place"] + 1)
    behind = (batch == mine["batch_sequence"] + 1) & (place > 0)
    return (
        within
        | behind
        | ((batch > mine["batch_sequence"] + 1) & (~_begins_session() | (place > 0)))
    )


def _begins_session() -> Column:
    """Whether a batch is the first of a producer's session (qmq/model.py),
    which may follow any batch.
    """
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


def chains(keyed: DataFrame, repeats: DataFrame) -> DataFrame:
    """The messages of keys and first producers of which something is there twice, each with its
    `rank` (the how-manieth message of the chain it is: by the ids; where only the ids are of that
    producer, by the first copies) and `before`, the message of the chain that lies before it, with
    its rank. `keyed` has `is_known`.
    """
    touched = repeats.select("key", F.substring("message_id", 1, 16).alias("sender")).distinct()
    same = Window.partitionBy("key", "message_id").orderBy(*POSITION)
    position = F.struct(*POSITION)
    found = (
        keyed.join(touched, ["key", "sender"], "left_semi")
        .withColumn("copy", F.row_number().over(same))
        .withColumn(
            "copy_before",
            F.lag(F.struct(*POSITION, "message_id", "producer_id", "number")).over(same),
        )
        .withColumn("first_position", F.first(position).over(same))
    )
    is_same_row = F.col("copy_before.partition").eqNullSafe(F.col("partition")) & (
        F.col("copy_before.sequence") == F.col("sequence")
    )
    ranks = Window.partitionBy("key", "sender").orderBy(
        F.when(F.col("is_known"), F.col("message_id")), "first_position"
    )
    ranked = found.filter(~F.coalesce(is_same_row, F.lit(False))).withColumn(
        "rank", F.dense_rank().over(ranks)
    )
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
    edges = [
        edge(name).alias(name)
        for edge, which in ((F.min, "first"), (F.max, "last"))
        for name in (which, *_times(which))
    ]
    found = (
        streamed.groupBy("partition", "broker_group")
        .agg(*sums, *edges, F.count("*").alias("producers"))
        .collect()
    )
    return sorted(PartitionFacts(**row.asDict()) for row in found)


def _times(which: str) -> tuple[str, str]:
    return f"{which}_entry", f"{which}_append_ms"


def retention(found: Iterable[PartitionFacts], routes: Routes) -> RetainedKeys:
    """The ranges that retention has deleted, derived from the stored messages."""
    at_home = _at_home(found, routes)
    cut = frozenset(each.partition for each in at_home.values() if each.first > 0)
    missing = {
        number
        for number in routes.partitions
        if number not in at_home and routes.sealed_at.get(number, 0) > 0
    }
    return RetainedKeys(
        cut, frozenset(routes.partitions[number].version for number in cut | missing)
    )


def _at_home(found: Iterable[PartitionFacts], routes: Routes) -> dict[int, PartitionFacts]:
    """The partitions by number, on the broker groups where they belong."""
    known = [each for each in found if each.partition in routes.partitions]
    return {
        each.partition: each
        for each in known
        if routes.partitions[each.partition].broker_group == each.broker_group
    }


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


def overtakings_of(found: Iterable[PartitionFacts], routes: Routes) -> Iterator[Overtaking]:
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


def missing_ends(
    found: Iterable[PartitionFacts], queues: Iterable[SourceQueue]
) -> list[tuple[PartitionFacts | None, SourceQueue]]:
    """Queues that had messages after the last one that was read."""
    by_place: Mapping[tuple[int, str], PartitionFacts] = {each.place: each for each in found}
    pairs = [
        (by_place.get((queue.key.partition, queue.key.broker_group)), queue)
        for queue in queues
        if queue.end > queue.start
    ]
    return [(read, queue) for read, queue in pairs if read is None or read.last < queue.end - 1]


def violations_of(rows: DataFrame, pairs: Iterable[Overtaking]) -> DataFrame | None:
    """A violation for each certain overtaking:
    the target's first message, and the source's last.
    """
    certain = [(each.source, each.target) for each in pairs if each.is_certain]
    if not certain:
        return None
    spark = rows.sparkSession
    wanted = spark.createDataFrame(
        [
            (source.partition, source.last_entry, target.partition, target.first_entry)
            for source, target in certain
        ],
        "source int, last_entry long, target int, first_entry long",
    )
    place, at = F.struct(*NAMES, "key"), F.col("sequence")
    ends = (
        rows.filter("broker_group = home")
        .groupBy("partition", "entry")
        .agg(F.min_by(place, at).alias("opening"), F.max_by(place, at).alias("closing"))
    )
    targets = ends.select(
        F.col("partition").alias("target"),
        F.col("entry").alias("first_entry"),
        F.col("opening").alias("here"),
    )
    sources = ends.select(
        F.col("partition").alias("source"),
        F.col("entry").alias("last_entry"),
        F.col("closing").alias("there"),
    )
    found = wanted.join(targets, ["target", "first_entry"]).join(sources, ["source", "last_entry"])
    rule = [
        F.lit(RULES["before_seal"].kind).alias("kind"),
        F.lit("before_seal").alias("rule"),
        F.col("here.key").alias("key"),
    ]
    here = [F.col(f"here.{name}").alias(name) for name in NAMES]
    return found.select(
        *rule, *here, *(F.col(f"there.{name}").alias(f"earlier_{name}") for name in NAMES)
    )


def violations_at_ends(
    spark_rows: DataFrame, missing: Iterable[tuple[PartitionFacts | None, SourceQueue]]
) -> DataFrame | None:
    """A violation for each queue whose end is missing, at the first missing sequence."""
    found = [
        (
            "gap",
            "sequence_gap",
            None,
            queue.key.partition,
            queue.start if read is None else read.last + 1,
            *[None] * 8,
        )
        for read, queue in missing
    ]
    return spark_rows.sparkSession.createDataFrame(found, SCHEMA) if found else None


COLUMNS: Final = (
    "partition",
    "broker_group",
    "sequence",
    "key",
    "message_id",
    "create_time",
    "append_time",
    "producer_id",
    "batch_sequence",
    "place",
    "logical_partition",
    "is_bent",
    "entry",
)
"""The columns of the log that every audit needs."""

_FIELD: Final = re.compile(r"[^.'\[\]$*]+(\.[^.'\[\]$*]+)*")


class By(NamedTuple):
    """The source of the sending order of a key's messages."""

    kind: str
    """create_time, header or json."""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind

    @property
    def is_exact(self) -> bool:
        """Whether it is a number that increases with each message, rather than a time."""
        return self.kind != "create_time"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns needed in addition to COLUMNS."""
        return {"header": ("headers",), "json": ("body",)}.get(self.kind, ())

    def number(self) -> Column:
        """The number of a message; null if the message has none."""
        if self.kind == "header":
            return F.col("headers")[self.name].cast("string").try_cast("bigint")
        if self.kind == "json":
            steps = "".join(f"['{step}']" for step in self.name.split("."))
            return F.get_json_object(F.col("body").cast("string"), f"${steps}").try_cast("bigint")
        return F.unix_millis("create_time")


def parse_by(text: str) -> By:
    """Parse the value of `--by`. Raises InvalidArgument."""
    kind, colon, name = text.partition(":")
    if kind == "create_time" and not colon:
        return By(kind)
    if kind == "header" and name:
        return By(kind, name)
    if kind == "json" and _FIELD.fullmatch(name):
        return By(kind, name)
    raise InvalidArgument(
        f"--by {text!r} is not a source of order: write create_time, header:NAME or json:FIELD"
    )


def prepare(messages: DataFrame, routes: Routes, by: By) -> DataFrame:
    """One row per message, with the columns that the audit uses.

    Added columns: version, first_lp, end_lp, home (the broker group) and sealed_at of its
    partition, all null if no route has the partition; `number`, by which the message is judged;
    `sender`, the producer in its id; is_carried, whether another producer stored it.
    """
    sender = F.substring("message_id", 1, 16)
    rows = messages.select(
        F.when(F.length("key") > 0, F.col("key")).alias("key"),
        "partition",
        "broker_group",
        "sequence",
        "message_id",
        sender.alias("sender"),
        (sender != F.col("producer_id")).alias("is_carried"),
        "producer_id",
        "batch_sequence",
        "place",
        by.number().alias("number"),
        F.unix_millis("create_time").alias("create_ms"),
        F.unix_millis("append_time").alias("append_ms"),
        "logical_partition",
        F.coalesce("is_bent", F.lit(False)).alias("is_bent"),
        "entry",
    )
    return rows.join(F.broadcast(_partitions(messages.sparkSession, routes)), "partition", "left")


def _partitions(spark: SparkSession, routes: Routes) -> DataFrame:
    parts = sorted(routes.partitions.values(), key=lambda part: part.number)
    table = pa.table(
        {
            "partition": pa.array([part.number for part in parts], pa.int32()),
            "version": pa.array([part.version for part in parts], pa.int64()),
            "first_lp": pa.array([part.lps.first for part in parts], pa.int32()),
            "end_lp": pa.array([part.lps.end for part in parts], pa.int32()),
            "home": pa.array([part.broker_group for part in parts], pa.string()),
            "sealed_at": pa.array(
                [routes.sealed_at.get(part.number) for part in parts], pa.int64()
            ),
        }
    )
    return spark.createDataFrame(table)


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
    """The number of violations by rule (`order_rules.RULES`);
    rules without violations are left out.
    """
    examples: tuple[Violation, ...]
    """The first violations of each rule, in full."""
    violations: DataFrame
    """All violations, with the schema `order_rules.SCHEMA`."""
    partitions: tuple[PartitionFacts, ...]
    overtakings: tuple[Overtaking, ...]
    """Targets that took a message before the last one of their source, including those known only
    from clocks.
    """

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
    keys_max: int = KEYS_MAX,
) -> Findings:
    """Audit one ordered subject.

    Args:
        messages: all messages of this subject, with the columns `order_rows.COLUMNS` and
        `parse_by(by).columns`. routes: all its routes. by: the source of the sending order:
        create_time, header:NAME or json:FIELD. clock_ms: for create_time, the allowed clock
        difference of processes that write the same key. is_dense: for a number, whether a key's
        numbers increase by one, so that a missing number is a lost message. queues: if `messages`
        is complete, the queues as they were before it was read; their ends are then checked, too.
        keys_max: the number of distinct keys to hash.

    Raises InvalidArgument. Spark raises errors of reading the messages.
    """
    way = parse_by(by)
    with ExitStack() as stack:

        def keep(rows: DataFrame) -> DataFrame:
            stack.callback(rows.persist().unpersist)
            return rows

        rows = keep(prepare(messages, routes, way))
        streamed = streams(rows)
        partitions = partition_facts(streamed)
        overtakings = list(overtakings_of(partitions, routes))
        keyed = order_rules.of_keys(rows)
        hashed = check_hashes(keyed, routes.logical_partitions, keys_max)
        facts = _facts(partitions, routes) | {"keys": hashed.keys, "hashed_keys": hashed.hashed}
        judging = Judging(way.is_exact, is_dense, clock_ms, retention(partitions, routes))
        of_keys = _check_keys(keyed, judging, keep, has_carried=facts["carried"] > 0)
        found = _union(
            check_partitions(rows, needs_number=way.is_exact),
            hashed.violations,
            violations_of(rows, overtakings),
            violations_at_ends(rows, missing_ends(partitions, queues)),
            of_keys.violations,
        ).persist()  # It is used after the rows are unpersisted.
        counts = _counts(found)
        if "time_order" in counts:
            stack.callback(found.unpersist)
            found = order_rules.drop_concurrent(found, streamed).persist()
            counts = _counts(found)
        examples = _examples(found, rows) if counts else ()
        return Findings(
            by,
            routes,
            facts | of_keys.facts,
            counts,
            examples,
            found,
            tuple(partitions),
            tuple(overtakings),
        )


class _OfKeys(NamedTuple):
    violations: DataFrame
    facts: dict[str, int]


def _check_keys(
    keyed: DataFrame, judging: Judging, keep: Callable[[DataFrame], DataFrame], *, has_carried: bool
) -> _OfKeys:
    """Check replays, and the order of keys without them."""
    known = order_rules.with_streams(keyed, has_carried=has_carried)
    repeats = keep(order_rules.repeats(keyed))
    facts = {"replays": 0, "replayed_messages": 0, "unfinished_replays": 0}
    found: list[DataFrame] = []
    if not repeats.isEmpty():
        chained = keep(chains(known, repeats))
        facts = count_replays(chained).collect()[0].asDict()
        found.append(check_replays(chained))
        known = order_rules.first_copies(known)
    if has_carried and not judging.is_exact:
        facts["unjudged"] = known.filter(~F.col("is_known")).count()
    if has_carried and judging.retention.cut:
        known = order_rules.without_forgotten(known, judging.retention.cut)
    return _OfKeys(_union(order_rules.check_keys(known, judging), *found), facts)


def _union(*found: DataFrame | None) -> DataFrame:
    return reduce(DataFrame.unionByName, [each for each in found if each is not None])


def _facts(partitions: Sequence[PartitionFacts], routes: Routes) -> dict[str, int]:
    known = [
        routes.partitions[each.partition].version
        for each in partitions
        if each.partition in routes.partitions
    ]
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
    pairs = {
        (row[f"{which}partition"], row[f"{which}sequence"])
        for row in chosen
        for which in ("", "earlier_")
    }
    wanted = rows.sparkSession.createDataFrame(
        [pair for pair in pairs if None not in pair], "partition int, sequence long"
    )
    places = [
        _place(row) for row in rows.join(F.broadcast(wanted), ["partition", "sequence"]).collect()
    ]
    by_place = {(each.partition, each.sequence, each.message_id): each for each in places}
    return tuple(_violation(row, by_place) for row in chosen)


def _place(row: Row) -> OrderPlace:
    return OrderPlace(**{name: row[name] for name in OrderPlace.__slots__})


def _violation(row: Row, places: Mapping[tuple[int, int, str], OrderPlace]) -> Violation:
    key = None if row["key"] is None else bytes(row["key"])
    earlier = places.get(
        (row["earlier_partition"], row["earlier_sequence"], row["earlier_message_id"])
    )
    here = places.get((row["partition"], row["sequence"], row["message_id"]))
    nowhere = OrderPlace(row["partition"], "", row["sequence"], "", "", -1, -1, 0, 0, None)
    return Violation(row["rule"], key, here or nowhere, earlier)
