"""Reports dead letters by cause, and replays them.

Failures are in the action logs (dead_letters_found.py lists the causes). With `--dead-subject`, the job also reads a subject to which
applications or brokers send dead letters, with headers that give the reason. `--replay` replays parked keys and messages of the dead-letter
subject (dead_letters_replay.py); `--dry-run` only reports what would be replayed.

Exit status 1 (findings) if there are dead letters that this run did not replay.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from pyspark_qmq.jobs import dead_letters_found as found_letters
from pyspark_qmq.jobs.consumed import not_negative, of_groups, positive, queues_now, read_dataset, read_subjects, utc
from pyspark_qmq.jobs.dead_letters_found import FOLLOWER, MESSAGE, PARKED, failed_ranges, letters
from pyspark_qmq.jobs.dead_letters_replay import Pace, ReplayedKey, not_replayed, outgoing, send, unpark
from pyspark_qmq.jobs.job import main, read_log
from pyspark_qmq.jobs.plot_data import Plot
from pyspark_qmq.jobs.report import Report, ReportTable
from qmq.errors import InvalidArgument

EXAMPLES: Final = 20
_DEAD: Final = (*(name for name in MESSAGE if name != "logical_partition"), "body", "headers", "create_time")
_BY: Final = ("cause", "subject", "consumer_group")


class DeadLettersJob:
    name = "dead_letters"
    summary = "Report dead letters by cause, and replay them."

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add this job's arguments."""
        parser.add_argument("--group", action="append", default=[], metavar="NAME", help="only this consumer group; repeatable")
        parser.add_argument("--cause", action="append", default=[], metavar="NAME", help="only this cause; repeatable")
        parser.add_argument("--attempts", type=positive, default=5, metavar="N", help="count messages that failed this many times (5)")
        parser.add_argument("--dead-subject", default="", metavar="NAME", help="a dead-letter subject to read as well")
        parser.add_argument(
            "--cause-header", default="qmq-error", metavar="NAME", help="header of dead letters with the reason (qmq-error)"
        )
        parser.add_argument("--subject-header", default="qmq-subject", metavar="NAME", help="... with the original subject (qmq-subject)")
        parser.add_argument("--group-header", default="qmq-group", metavar="NAME", help="... with the consumer group (qmq-group)")
        parser.add_argument("--replay", action="store_true", help="replay parked keys and messages of the dead-letter subject")
        parser.add_argument(
            "--rate", type=not_negative, default=1_000, metavar="N", help="replay at most this many per second (1000); 0: no limit"
        )
        parser.add_argument("--dry-run", action="store_true", help="with --replay: only report what would be replayed")

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Find dead letters, and replay them if requested. Raises QmqError."""
        if args.replay and not args.servers and not args.dry_run:
            raise InvalidArgument("--replay needs --servers: a metaserver replays parked keys")
        if args.dead_subject and not args.subject and not args.pattern:
            args = argparse.Namespace(**{**vars(args), "subject": [args.dead_subject]})
        ranges = self._ranges(spark, args).persist()
        dead = self._dead(spark, args).persist() if args.dead_subject else None
        try:
            every = letters(read_log(spark, args, MESSAGE), ranges)
            parked = parked_keys(ranges)
            facts, given = self._replay(spark, args, parked, dead) if args.replay else ({}, 0)
            return report(counted(ranges, dead), tagged(every, dead), parked, examples(every, dead), facts, given, {"letters": every})
        finally:
            if dead is not None:
                dead.unpersist()

    def _ranges(self, spark: SparkSession, args: argparse.Namespace) -> DataFrame:
        subjects = sorted({key.subject for key in queues_now(args).queues})
        read = of_groups(read_dataset(spark, args, "deliveries"), args.group, subjects)
        found = failed_ranges(read, args.attempts, with_dead=not args.dead_subject)
        return found.where(F.col("cause").isin(args.cause)) if args.cause else found

    def _dead(self, spark: SparkSession, args: argparse.Namespace) -> DataFrame:
        read = read_subjects(spark, args, _DEAD, [args.dead_subject])
        found = found_letters.dead_letters(read, args.cause_header, args.subject_header, args.group_header)
        if args.cause:
            found = found.where(F.col("cause").isin(args.cause))
        return found.where(F.col("consumer_group").isin(args.group)) if args.group else found

    def _replay(
        self, spark: SparkSession, args: argparse.Namespace, parked: Sequence[ReplayedKey], dead: DataFrame | None
    ) -> tuple[dict[str, object], int]:
        """The report's part about the replay, and the number of messages replayed now or before."""
        rows, homeless = self._to_send(spark, args, dead) if dead is not None else (None, 0)
        waiting = rows.count() if rows is not None else 0
        before = dead.count() - homeless - waiting if dead is not None else 0
        others: dict[str, object] = {"sent again before": before, "without original subject": homeless}
        if args.dry_run:
            asked = sum(each.messages for each in parked)
            return {"would be given back by brokers": asked, "would be sent again": waiting, **others}, before
        pace = Pace(args.rate)
        given, sent = unpark(args.servers, parked, pace), send(rows, args.servers, pace) if rows is not None else 0
        return {"given back by brokers": given, "sent again": sent, **others}, given + sent + before

    def _to_send(self, spark: SparkSession, args: argparse.Namespace, dead: DataFrame) -> tuple[DataFrame | None, int]:
        """The messages to send, and the number of letters without a target subject."""
        targets = sorted(row[0] for row in dead.select("original_subject").distinct().collect() if row[0])
        homeless = dead.where(F.coalesce("original_subject", F.lit("")) == "").count()
        if not targets:
            return None, homeless
        stored = read_subjects(spark, args, ("headers",), targets, is_whole=True)
        return outgoing(not_replayed(dead.where(F.col("original_subject").isin(targets)), stored)), homeless


# --- counting ----------------------------------------------------------------------------------------------------------


def counted(ranges: DataFrame, dead: DataFrame | None) -> list[Row]:
    """The number of messages and the largest attempt by cause, subject and group, most messages first."""
    size = F.col("last_sequence") - F.col("first_sequence") + 1
    found = ranges.select(*_BY, size.alias("size"), "attempts")
    if dead is not None:
        found = found.unionByName(dead.select(*_BY, F.lit(1).cast("long").alias("size"), F.lit(None).cast("int").alias("attempts")))
    sums = found.groupBy(*_BY).agg(F.sum("size").alias("messages"), F.max("attempts").alias("attempts"))
    return sums.orderBy(F.desc("messages"), *_BY).collect()


def tagged(every: DataFrame, dead: DataFrame | None) -> list[Row]:
    """Stored messages by cause, subject, group and tag."""
    found = every.select(*_BY, "tags")
    if dead is not None:
        found = found.unionByName(dead.select(*_BY, "tags"))
    exploded = found.select(*_BY, F.explode("tags").alias("tag"))
    return exploded.groupBy(*_BY, "tag").agg(F.count("*").alias("messages")).orderBy(F.desc("messages"), *_BY, "tag").limit(500).collect()


def parked_keys(ranges: DataFrame) -> list[ReplayedKey]:
    """The parked keys, including keys of which only followers match the selection."""
    rows = ranges.where(F.col("cause").isin(PARKED, FOLLOWER)).groupBy("subject", "consumer_group", "key", "partition").count().collect()
    return sorted(ReplayedKey(row.subject, row.consumer_group, bytes(row.key), row.partition, row["count"]) for row in rows)


def examples(every: DataFrame, dead: DataFrame | None) -> list[Row]:
    """Some letters, newest first."""
    columns = (F.unix_millis("append_time").alias("stored"), *_BY, "partition", "broker_group", "sequence", "key", "message_id")
    found = every.select(*columns)
    if dead is not None:
        found = found.unionByName(dead.select(*columns))
    return found.orderBy(F.desc("stored"), "sequence").limit(EXAMPLES).collect()


# --- the report --------------------------------------------------------------------------------------------------------


def report(
    counts: Sequence[Row],
    tags: Sequence[Row],
    parked: Sequence[ReplayedKey],
    some: Sequence[Row],
    facts: dict[str, object],
    given: int,
    details: dict[str, DataFrame],
) -> Report:
    """The report. Pure."""
    total = sum(row.messages for row in counts)
    left = max(total - given, 0)
    causes: dict[str, int] = {}
    for row in counts:
        causes[row.cause] = causes.get(row.cause, 0) + row.messages
    by_cause = Plot("Dead letters by cause", "bar", list(causes), {"messages": [float(each) for each in causes.values()]}, "", "messages")
    by = ("cause", "subject", "group")
    newest = tuple((utc(row[0]), *row[1:]) for row in some)
    return Report(
        "dead_letters",
        _headline(total, given, causes),
        not left,
        {"dead letters": total, **{f"… {cause}": number for cause, number in causes.items()}, "parked keys": len(parked), **facts},
        (
            ReportTable("By cause", (*by, "messages", "most attempts"), _rows(counts, (*_BY, "messages", "attempts")), "causes"),
            ReportTable("By tag", (*by, "tag", "messages"), _rows(tags, (*_BY, "tag", "messages")), "tags"),
            ReportTable("Parked keys", ("subject", "group", "key", "partition", "messages"), tuple(map(tuple, parked)), "parked_keys"),
            ReportTable("The newest", ("stored", *by, "partition", "broker group", "sequence", "key", "id"), newest, "newest"),
        ),
        (by_cause,) if causes else (),
        details=details,
    )


def _rows(rows: Sequence[Row], names: Sequence[str]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row[name] for name in names) for row in rows)


def _headline(total: int, given: int, causes: dict[str, int]) -> str:
    if not total:
        return "no message failed for good"
    most = max(causes, key=lambda cause: causes[cause])
    rest = f"; {given:,} have been given back" if given else ""
    return f"{total:,} messages failed for good, most of them because of {most!r} ({causes[most]:,}){rest}"


JOB = DeadLettersJob()

if __name__ == "__main__":
    raise SystemExit(main(JOB))
