"""Finds messages stored more than once and the reasons, messages that applications sent twice, and
gaps in sequences.

A message id identifies one message, so an id that occurs twice in a subject has a cause. Some
causes are allowed, others are findings:

    replay          allowed   ordered subjects: a fenced partition did not answer, and its messages
                              were sent again, in order (docs/ORDERING.md, "Duplicates")
    directed        allowed   a copy for one consumer group, for a retry later than a broker can
                              delay it (docs/DELAY.md, "Retries")
    broken_replay             ordered subjects: sent again, but not as a replay in order
    stored_twice              one batch twice in a queue under one number: its broker had forgotten
                              it
    two_queues                one batch in two queues under one number: sent elsewhere although its
                              outcome was unknown
    repeated                  the id occurs in another batch: a program, or a sink with a
                              non-deterministic plan, used it twice
    gap                       sequences are missing between two messages of a queue

With --by-content also `same_content`: messages of one key (or without one) with the same body and
other ids, stored within --window-s of each other. They count as findings; only the application
knows whether they are intended.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them

from pyspark_qmq.jobs import order_checks
from pyspark_qmq.jobs.job import main, positive, read_log, source_options
from pyspark_qmq.jobs.order_rules import with_streams
from pyspark_qmq.jobs.report import Plot, Report, ReportTable, cell
from qmq.model import GROUP
from qmq.process.event_loop import time_of

COLUMNS: Final = (
    "subject",
    "partition",
    "broker_group",
    "sequence",
    "route_version",
    "key",
    "headers",
    "message_id",
    "append_time",
    "producer_id",
    "batch_sequence",
    "place",
)
CAUSES: Final = {
    "replay": "sent again in order, after a fence",
    "directed": "for one consumer group, retried after a long delay",
    "broken_replay": "sent again after a fence, and not in order",
    "stored_twice": "one batch, twice in one queue",
    "two_queues": "one batch, in two queues",
    "repeated": "the same id again, in another batch",
    "same_content": "the same key and body, under another id",
    "gap": "sequences are missing before this message",
}
"""The causes by name, in the order of the report."""
ALLOWED: Final = frozenset(("replay", "directed"))
SHOWN_MAX: Final = 3
HOUR_MS: Final = 3_600_000
HOURS_MAX: Final = 2_000
"""The colours in plots."""
_QUEUE: Final = ("subject", "partition", "broker_group")
_PLACE: Final = ("partition", "broker_group", "sequence", "message_id", "append_time")
_SELECTING: Final = frozenset(("tags", "tagsall", "keys", "keyfrom", "keyuntil"))


class Duplicates:
    name = "duplicates"
    summary = "Find messages stored more than once, and gaps in sequences."

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add this job's arguments."""
        parser.add_argument(
            "--by-content",
            action="store_true",
            help="also find messages with the same key and body but other ids",
        )
        parser.add_argument(
            "--window-s",
            type=positive,
            default=60,
            metavar="S",
            help="the largest distance of such messages (60)",
        )

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Search the log. Raises QmqError."""
        columns = (*COLUMNS, "body") if args.by_content else COLUMNS
        rows = prepare(read_log(spark, args, columns, includeDirected="true")).persist()
        try:
            found = [copies(rows)]
            if args.by_content:
                found.append(same_content(rows, args.window_s))
            if not _SELECTING & {name.lower() for name in source_options(args)}:
                found.append(gaps(rows))
            everything = reduce(DataFrame.unionByName, found).persist()
            return report(rows, everything)
        finally:
            rows.unpersist()


def prepare(messages: DataFrame) -> DataFrame:
    """One row per message with only the needed columns. `content`: the body's digest, null if
    bodies were not read.
    """
    content = F.md5("body") if "body" in messages.columns else F.lit(None).cast("string")
    return messages.select(
        *_QUEUE,
        "sequence",
        F.coalesce("route_version", F.lit(0)).alias("version"),
        "key",
        "message_id",
        "append_time",
        "producer_id",
        "batch_sequence",
        "place",
        F.coalesce(F.map_contains_key("headers", GROUP), F.lit(False)).alias("is_directed"),
        content.alias("content"),
    )


# --- rows -> findings -----------------------------------------------------------------------------


def copies(rows: DataFrame) -> DataFrame:
    """Each copy of a message except the first, with its cause and the preceding copy."""
    repeated = (
        rows.groupBy("subject", "message_id").agg(F.count("*").alias("copies")).filter("copies > 1")
    )
    same = Window.partitionBy("subject", "message_id").orderBy(
        "is_directed", "version", "partition", "append_time", "sequence"
    )
    chosen = rows.join(repeated, ["subject", "message_id"], "left_semi")
    seen = chosen.withColumn(
        "before", F.lag(F.struct(*_PLACE, "producer_id", "batch_sequence", "place")).over(same)
    )
    broken = _broken_chains(rows, chosen)
    judged = seen.filter(F.col("before").isNotNull()).join(
        broken, ["subject", "key", "message_id"], "left"
    )
    return _told(judged, _cause(F.col("before")))


def _cause(before: Column) -> Column:
    is_one_queue = (before["partition"] == F.col("partition")) & (
        before["broker_group"] == F.col("broker_group")
    )
    numbers = ("producer_id", "batch_sequence", "place")
    is_one_batch = F.struct(*(before[name] for name in numbers)) == F.struct(*numbers)
    return (
        F.when(F.col("is_directed"), "directed")
        .when(is_one_queue & is_one_batch, "stored_twice")
        .when(is_one_batch, "two_queues")
        .when(is_one_queue | (F.col("partition") == 0), "repeated")
        .when(F.col("is_broken"), "broken_replay")
        .otherwise("replay")
    )


def _broken_chains(rows: DataFrame, chosen: DataFrame) -> DataFrame:
    """(subject, key, message id) of copies that are not part of a replay in
    order, with `is_broken`.
    """
    whole_key = F.concat(F.col("subject").cast("binary"), F.lit(b"\0"), "key")
    keyed = rows.filter(F.col("key").isNotNull() & (F.col("partition") > 0)).withColumn(
        "whole_key", whole_key
    )
    chain = keyed.select(
        F.col("whole_key").alias("key"),
        "subject",
        F.col("key").alias("bare_key"),
        "partition",
        "broker_group",
        "sequence",
        "version",
        "message_id",
        F.substring("message_id", 1, 16).alias("sender"),
        "producer_id",
        F.lit(None).cast("bigint").alias("number"),
    )
    is_carried = F.col("sender") != F.col("producer_id")
    known = with_streams(chain.withColumn("is_carried", is_carried), has_carried=True)
    wanted = (
        chosen.filter(F.col("key").isNotNull() & (F.col("partition") > 0))
        .select(whole_key.alias("key"), "message_id")
        .distinct()
    )
    steps = order_checks.chains(known, wanted)
    jumps = ~F.col("is_twice") & (F.col("rank") > F.col("before.rank") + 1)
    marked = steps.withColumn("is_broken", F.max(jumps).over(Window.partitionBy("key", "sender")))
    return (
        marked.filter("is_broken")
        .select("subject", F.col("bare_key").alias("key"), "message_id", "is_broken")
        .distinct()
    )


def same_content(rows: DataFrame, window_s: int) -> DataFrame:
    """Messages whose key and body occurred under another id within the given number
    of seconds before.
    """
    same_content = Window.partitionBy("subject", "key", "content").orderBy(
        "append_time", "partition", "sequence"
    )
    seen = rows.withColumn("before", F.lag(F.struct(*_PLACE)).over(same_content))
    before = F.col("before")
    is_near = F.unix_millis("append_time") - F.unix_millis(before["append_time"]) <= window_s * 1000
    return _told(
        seen.filter(is_near & (before["message_id"] != F.col("message_id"))), F.lit("same_content")
    )


def gaps(rows: DataFrame) -> DataFrame:
    """Messages after a gap in sequences; `earlier` is the message before the gap."""
    queue = Window.partitionBy(*_QUEUE).orderBy("sequence")
    seen = rows.withColumn("before", F.lag(F.struct(*_PLACE)).over(queue))
    return _told(seen.filter(F.col("sequence") > F.col("before.sequence") + 1), F.lit("gap"))


def _told(rows: DataFrame, cause: Column) -> DataFrame:
    earlier = (F.col(f"before.{name}").alias(f"earlier_{name}") for name in _PLACE)
    return rows.select(cause.alias("cause"), "subject", "key", *_PLACE, *earlier)


# --- the report -----------------------------------------------------------------------------------


def report(rows: DataFrame, found: DataFrame) -> Report:
    """The report. `rows`: the result of `prepare`; `found`: all findings."""
    counted = {
        (row["cause"], row["subject"]): row["count"]
        for row in found.groupBy("cause", "subject").count().collect()
    }
    by_cause = {
        cause: sum(count for (its, _), count in counted.items() if its == cause) for cause in CAUSES
    }
    bad = {cause: count for cause, count in by_cause.items() if count and cause not in ALLOWED}
    queues = rows.groupBy(*_QUEUE).agg(F.count("*").alias("messages")).collect()
    total = sum(row["messages"] for row in queues)
    allowed = sum(by_cause[cause] for cause in ALLOWED)
    return Report(
        "duplicates",
        _headline(bad, total, allowed),
        not bad,
        {
            "messages": total,
            "queues": len(queues),
            "subjects": len({row["subject"] for row in queues}),
            "allowed copies": allowed,
        }
        | {CAUSES[cause]: count for cause, count in bad.items()},
        tuple(_tables(by_cause, counted)),
        tuple(_plots(found)) if counted else (),
        "\n\n".join(_examples(found, bad)),
        {"duplicates": found} if counted else {},
    )


def _headline(bad: Mapping[str, int], total: int, allowed: int) -> str:
    if bad:
        return (
            f"{', '.join(f'{count:,} {cause}' for cause, count in bad.items())} among {total:,} "
            "messages"
        )
    rest = f", but for {allowed:,} allowed copies" if allowed else ""
    return f"{total:,} messages, each stored once{rest}, and no sequence is missing between them"


def _tables(
    by_cause: Mapping[str, int], counted: Mapping[tuple[str, str], int]
) -> Iterator[ReportTable]:
    causes = tuple(
        (cause, by_cause[cause], cause in ALLOWED, says) for cause, says in CAUSES.items()
    )
    yield ReportTable("By cause", ("cause", "count", "is allowed", "what it is"), causes, "causes")
    order = list(CAUSES)
    rows = sorted(
        ((subject, cause, count) for (cause, subject), count in counted.items()),
        key=lambda row: (row[0], order.index(row[1])),
    )
    yield ReportTable("By subject", ("subject", "cause", "count"), tuple(rows), "subjects")


def _plots(found: DataFrame) -> Iterator[Plot]:
    hour = F.floor(F.unix_millis("append_time") / HOUR_MS).cast("bigint")
    counts = {
        (row["hour"], row["cause"]): float(row["count"])
        for row in found.groupBy(hour.alias("hour"), "cause").count().collect()
    }
    axis = _hours(sorted({hour for hour, _ in counts}))
    causes = [cause for cause in CAUSES if any(its == cause for _, its in counts)]
    series = {cause: [counts.get((hour, cause), 0.0) for hour in axis] for cause in causes}
    times = [time_of(hour * HOUR_MS) for hour in axis]
    yield Plot(
        "Findings by the hour in which the copy was stored", "line", times, series, "", "messages"
    )


def _hours(seen: list[int]) -> list[int]:
    """All hours from the first to the last finding;
    if these are too many, only the hours with findings.
    """
    return list(range(seen[0], seen[-1] + 1)) if seen[-1] - seen[0] < HOURS_MAX else seen


def _examples(found: DataFrame, bad: Mapping[str, int]) -> Iterator[str]:
    stored = [
        F.unix_millis(f"{which}append_time").alias(f"{which}ms") for which in ("", "earlier_")
    ]
    for cause in list(bad)[:SHOWN_MAX]:
        chosen = (
            found.filter(F.col("cause") == cause)
            .orderBy("subject", "partition", "sequence")
            .limit(1)
        )
        row = chosen.select("*", *stored).collect()[0]
        key = "none" if row["key"] is None else cell(row["key"])
        lines = (
            f"  subject  {row['subject']}, key {key}",
            f"  first    {_where(row, 'earlier_')}",
            f"  then     {_where(row, '')}",
        )
        yield "\n".join((f"{cause}: {CAUSES[cause]}", *lines))


def _where(row: Row, which: str) -> str:
    queue = f"{row[f'{which}partition']}@{row[f'{which}broker_group']}"
    stored = cell(time_of(row[f"{which}ms"]))
    return (
        f"queue {queue}, sequence {row[f'{which}sequence']}, stored {stored}, message "
        f"{row[f'{which}message_id']}"
    )


JOB = Duplicates()

if __name__ == "__main__":
    raise SystemExit(main(JOB))
