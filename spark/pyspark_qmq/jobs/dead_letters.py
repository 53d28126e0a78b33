"""Reports dead letters by cause, and replays them.

Failures are in the action logs. With `--dead-subject`, the job also reads a subject to which
applications or brokers send dead letters, with headers that give the reason. `--replay` replays
parked keys and messages of the dead-letter subject; `--dry-run` only reports what would be
replayed.

Exit status 1 (findings) if there are dead letters that this run did not replay.

A *letter* is a failed message, or a range of messages of one queue with the same outcome. Causes:

    failing      it was delivered, failed at least the given number of times, and is not done
    parked       it failed, and was set aside with its key (ordered subjects)
    follower     it was set aside only because an earlier one of its key was
    skipped      an operator skipped it while it was parked
    expired      it was returned, and retention deleted it before its next delivery
    dead         its attempts are exhausted: a copy is in the group's dead-letter queue
                 (`%dlq%GROUP`)
    ...          the value of a dead letter's reason header; `unknown` if there is none

A replay:

* The brokers replay parked keys, oldest partition of a key first, so that its messages come before
  newer ones of the key.
* Messages of a dead-letter subject are sent as new messages to their original subject, with the
  same message id and a header that names the dead letter (REPLAYED). Letters named by such a header
  in the original subject are skipped, so a second replay is harmless. If a crashed replay and the
  next one both write a slice, they use the same writer's name, and the slice is stored once.

Messages are sent in slices, in the order of storing (which keeps the order of keys), at a limited
rate.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from pyspark_qmq.jobs.job import (
    QUEUE,
    covered,
    main,
    not_negative,
    of_groups,
    positive,
    queues_now,
    read_dataset,
    read_log,
    read_subjects,
    utc,
)
from pyspark_qmq.jobs.report import Plot, Report, ReportTable
from qmq.client.client import Client
from qmq.errors import InvalidArgument, UnknownGroup
from qmq.model import PREFIX

FAILING: Final = "failing"
PARKED: Final = "parked"
FOLLOWER: Final = "follower"
SKIPPED: Final = "skipped"
EXPIRED: Final = "expired"
UNKNOWN: Final = "unknown"
RANGE: Final = (
    *QUEUE,
    "consumer_group",
    "first_sequence",
    "last_sequence",
    "first_lp",
    "end_lp",
    "attempts",
    "cause",
    "key",
)
MESSAGE: Final = (
    *QUEUE,
    "sequence",
    "logical_partition",
    "key",
    "tags",
    "message_id",
    "append_time",
)
DEAD: Final = "dead"
_CAUSES: Final = {"drop": SKIPPED, "expired": EXPIRED, "dead": DEAD}
"""The cause for each outcome of a delivery."""


def failed_ranges(deliveries: DataFrame, attempts: int, *, with_dead: bool = True) -> DataFrame:
    """The deliveries that failed for good, with the columns RANGE. `attempts`: failures from which
    a message counts as failing.

    Without `with_dead`, messages in a dead-letter queue are left out, because they are read from
    the queue.
    """
    tried = F.col("verdict").isin("open", "waiting") & (F.col("attempt") > attempts)
    failing = deliveries.where(tried).withColumns(
        {"attempts": F.col("attempt") - 1, "cause": F.lit(FAILING)}
    )
    ends = [fate for fate in _CAUSES if with_dead or fate != "dead"]
    ended = deliveries.where(F.col("verdict").isin(*ends)).withColumn("attempts", F.col("attempt"))
    cause = F.create_map(*[F.lit(each) for pair in _CAUSES.items() for each in pair])[
        F.col("verdict")
    ]
    return (
        failing.select(*RANGE)
        .unionByName(ended.withColumn("cause", cause).select(*RANGE))
        .unionByName(_parked(deliveries))
    )


def _parked(deliveries: DataFrame) -> DataFrame:
    """The parked messages. Whether a message failed itself is known from its event, if the log
    still has it.
    """
    names = (*QUEUE, "consumer_group", "first_sequence")
    events = (
        deliveries.where("verdict = 'park'")
        .groupBy(*names)
        .agg(F.max_by("attempt", "settled_time").alias("attempts"))
    )
    found = deliveries.where("verdict = 'parked'").join(events, list(names), "left")
    return found.withColumn(
        "cause", F.when(F.col("attempts") == 0, FOLLOWER).otherwise(PARKED)
    ).select(*RANGE)


def letters(messages: DataFrame, ranges: DataFrame) -> DataFrame:
    """The stored messages of the ranges, each with its cause."""
    found = covered(messages.select(*MESSAGE), ranges.drop("key"))
    return found.select(*MESSAGE, "consumer_group", "cause", "attempts")


def dead_letters(
    dead: DataFrame, cause_header: str, subject_header: str, group_header: str
) -> DataFrame:
    """Messages of a dead-letter subject as letters, with the values of their headers and all
    columns that a replay needs.
    """
    return dead.select(
        *dead.columns,
        F.coalesce(_text(cause_header), F.lit(UNKNOWN)).alias("cause"),
        _text(subject_header).alias("original_subject"),
        _text(group_header).alias("consumer_group"),
        F.format_string(
            "%s/%d@%s#%d",
            *(F.col(each) for each in ("subject", "partition", "broker_group", "sequence")),
        ).alias("mark"),
    )


def _text(header: str) -> Column:
    return F.decode(F.try_element_at("headers", F.lit(header)), "UTF-8")


REPLAYED: Final = "replayed-from"
"""Header of a replayed message: the dead letter's subject/partition@group#sequence."""
SLICE_ROWS_MAX: Final = 10_000
_ORDER: Final = ("append_time", "subject", "partition", "broker_group", "sequence")


class ReplayedKey(NamedTuple):
    """A parked key of a group on one partition."""

    subject: str
    group: str
    key: bytes
    partition: int
    messages: int


class Pace:
    """Limits messages per second (0: no limit). `clock` returns seconds, `sleep` waits."""

    def __init__(
        self,
        rate: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._free_s = clock()

    def wait(self) -> None:
        """Wait until more messages may be sent."""
        ahead_s = self._free_s - self._clock()
        if ahead_s > 0:
            self._sleep(ahead_s)

    def went(self, messages: int) -> None:
        """Count sent messages."""
        if self.rate:
            self._free_s = max(self._free_s, self._clock()) + messages / self.rate

    @property
    def slice_rows(self) -> int:
        """The number of messages to send at once."""
        return min(self.rate, SLICE_ROWS_MAX) if self.rate else SLICE_ROWS_MAX


def unpark(servers: str, keys: Iterable[ReplayedKey], pace: Pace) -> int:
    """Replay parked keys, oldest partition of each key first; returns the number of messages. Keys
    that are no longer parked are skipped.

    Raises NotConnected, UnknownSubject, OrderMismatch.
    """
    return asyncio.run(_unpark(servers, sorted(keys), pace))


async def _unpark(servers: str, keys: list[ReplayedKey], pace: Pace) -> int:
    total = 0
    client = Client(servers.split(","), create_subjects=False)
    try:
        for each in keys:
            pace.wait()
            try:
                given = await client.metadata.unpark(
                    each.subject, each.group, each.partition, each.key, replay=True
                )
            except UnknownGroup:
                given = 0
            pace.went(given)
            total += given
    finally:
        await client.close()
    return total


def not_replayed(letters: DataFrame, stored: DataFrame) -> DataFrame:
    """The letters that are not named by the REPLAYED header of a message in `stored`, which must
    have `headers`.
    """
    back = stored.select(
        F.decode(F.try_element_at("headers", F.lit(REPLAYED)), "UTF-8").alias("mark")
    ).where("mark is not null")
    return letters.join(back.distinct(), "mark", "left_anti")


def outgoing(letters: DataFrame) -> DataFrame:
    """The letters as new messages, numbered from 0 in the order of storing:
    the sink's columns and `number`.
    """
    kept = F.map_filter(
        F.coalesce("headers", F.create_map().cast("map<string,binary>")),
        lambda name, _: ~name.startswith(PREFIX),
    )
    own = F.map_filter(kept, lambda name, _: name != REPLAYED)
    headers = F.map_concat(own, F.create_map(F.lit(REPLAYED), F.encode("mark", "UTF-8")))
    number = F.row_number().over(Window.orderBy(*_ORDER)) - 1
    return letters.select(
        number.alias("number"),
        "mark",
        F.col("original_subject").alias("subject"),
        "key",
        "body",
        "tags",
        headers.alias("headers"),
        "create_time",
        "message_id",
    )


def send(rows: DataFrame, servers: str, pace: Pace) -> int:
    """Write the messages of `outgoing`, slice by slice; returns their number."""
    numbered = rows.persist()
    try:
        count = numbered.count()
        for first in range(0, count, pace.slice_rows):
            pace.wait()
            piece = numbered.where(
                (F.col("number") >= first) & (F.col("number") < first + pace.slice_rows)
            )
            _write(piece, servers)
            pace.went(min(pace.slice_rows, count - first))
    finally:
        numbered.unpersist()
    return count


def _write(piece: DataFrame, servers: str) -> None:
    """Write one slice in order, as one task.
    The writer's name is derived from the slice's letters.
    """
    name = piece.select(F.md5(F.concat_ws(",", F.sort_array(F.collect_list("mark"))))).collect()[0][
        0
    ]
    rows = piece.coalesce(1).sortWithinPartitions("number").drop("number", "mark")
    rows.write.format("qmq").mode("append").option("qmq.servers", servers).option(
        "qmq.txnId", f"dead_letters {name}"
    ).save()


EXAMPLES: Final = 20
_DEAD: Final = (
    *(name for name in MESSAGE if name != "logical_partition"),
    "body",
    "headers",
    "create_time",
)
_BY: Final = ("cause", "subject", "consumer_group")


class DeadLettersJob:
    name = "dead_letters"
    summary = "Report dead letters by cause, and replay them."

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add this job's arguments."""
        parser.add_argument(
            "--group",
            action="append",
            default=[],
            metavar="NAME",
            help="only this consumer group; repeatable",
        )
        parser.add_argument(
            "--cause",
            action="append",
            default=[],
            metavar="NAME",
            help="only this cause; repeatable",
        )
        parser.add_argument(
            "--attempts",
            type=positive,
            default=5,
            metavar="N",
            help="count messages that failed this many times (5)",
        )
        parser.add_argument(
            "--dead-subject",
            default="",
            metavar="NAME",
            help="a dead-letter subject to read as well",
        )
        parser.add_argument(
            "--cause-header",
            default="qmq-error",
            metavar="NAME",
            help="header of dead letters with the reason (qmq-error)",
        )
        parser.add_argument(
            "--subject-header",
            default="qmq-subject",
            metavar="NAME",
            help="... with the original subject (qmq-subject)",
        )
        parser.add_argument(
            "--group-header",
            default="qmq-group",
            metavar="NAME",
            help="... with the consumer group (qmq-group)",
        )
        parser.add_argument(
            "--replay",
            action="store_true",
            help="replay parked keys and messages of the dead-letter subject",
        )
        parser.add_argument(
            "--rate",
            type=not_negative,
            default=1_000,
            metavar="N",
            help="replay at most this many per second (1000); 0: no limit",
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="with --replay: only report what would be replayed",
        )

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
            return report(
                counted(ranges, dead),
                tagged(every, dead),
                parked,
                examples(every, dead),
                facts,
                given,
                {"letters": every},
            )
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
        found = dead_letters(read, args.cause_header, args.subject_header, args.group_header)
        if args.cause:
            found = found.where(F.col("cause").isin(args.cause))
        return found.where(F.col("consumer_group").isin(args.group)) if args.group else found

    def _replay(
        self,
        spark: SparkSession,
        args: argparse.Namespace,
        parked: Sequence[ReplayedKey],
        dead: DataFrame | None,
    ) -> tuple[dict[str, object], int]:
        """The report's part about the replay, and the number of messages replayed now or before."""
        rows, homeless = self._to_send(spark, args, dead) if dead is not None else (None, 0)
        waiting = rows.count() if rows is not None else 0
        before = dead.count() - homeless - waiting if dead is not None else 0
        others: dict[str, object] = {
            "sent again before": before,
            "without original subject": homeless,
        }
        if args.dry_run:
            asked = sum(each.messages for each in parked)
            return {
                "would be given back by brokers": asked,
                "would be sent again": waiting,
                **others,
            }, before
        pace = Pace(args.rate)
        given, sent = (
            unpark(args.servers, parked, pace),
            send(rows, args.servers, pace) if rows is not None else 0,
        )
        return {"given back by brokers": given, "sent again": sent, **others}, given + sent + before

    def _to_send(
        self, spark: SparkSession, args: argparse.Namespace, dead: DataFrame
    ) -> tuple[DataFrame | None, int]:
        """The messages to send, and the number of letters without a target subject."""
        targets = sorted(
            row[0] for row in dead.select("original_subject").distinct().collect() if row[0]
        )
        homeless = dead.where(F.coalesce("original_subject", F.lit("")) == "").count()
        if not targets:
            return None, homeless
        stored = read_subjects(spark, args, ("headers",), targets, is_whole=True)
        return outgoing(
            not_replayed(dead.where(F.col("original_subject").isin(targets)), stored)
        ), homeless


# --- counting -------------------------------------------------------------------------------------


def counted(ranges: DataFrame, dead: DataFrame | None) -> list[Row]:
    """The number of messages and the largest attempt by cause, subject and group,
    most messages first.
    """
    size = F.col("last_sequence") - F.col("first_sequence") + 1
    found = ranges.select(*_BY, size.alias("size"), "attempts")
    if dead is not None:
        found = found.unionByName(
            dead.select(
                *_BY, F.lit(1).cast("long").alias("size"), F.lit(None).cast("int").alias("attempts")
            )
        )
    sums = found.groupBy(*_BY).agg(
        F.sum("size").alias("messages"), F.max("attempts").alias("attempts")
    )
    return sums.orderBy(F.desc("messages"), *_BY).collect()


def tagged(every: DataFrame, dead: DataFrame | None) -> list[Row]:
    """Stored messages by cause, subject, group and tag."""
    found = every.select(*_BY, "tags")
    if dead is not None:
        found = found.unionByName(dead.select(*_BY, "tags"))
    exploded = found.select(*_BY, F.explode("tags").alias("tag"))
    return (
        exploded.groupBy(*_BY, "tag")
        .agg(F.count("*").alias("messages"))
        .orderBy(F.desc("messages"), *_BY, "tag")
        .limit(500)
        .collect()
    )


def parked_keys(ranges: DataFrame) -> list[ReplayedKey]:
    """The parked keys, including keys of which only followers match the selection."""
    rows = (
        ranges.where(F.col("cause").isin(PARKED, FOLLOWER))
        .groupBy("subject", "consumer_group", "key", "partition")
        .count()
        .collect()
    )
    return sorted(
        ReplayedKey(row.subject, row.consumer_group, bytes(row.key), row.partition, row["count"])
        for row in rows
    )


def examples(every: DataFrame, dead: DataFrame | None) -> list[Row]:
    """Some letters, newest first."""
    columns = (
        F.unix_millis("append_time").alias("stored"),
        *_BY,
        "partition",
        "broker_group",
        "sequence",
        "key",
        "message_id",
    )
    found = every.select(*columns)
    if dead is not None:
        found = found.unionByName(dead.select(*columns))
    return found.orderBy(F.desc("stored"), "sequence").limit(EXAMPLES).collect()


# --- the report -----------------------------------------------------------------------------------


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
    by_cause = Plot(
        "Dead letters by cause",
        "bar",
        list(causes),
        {"messages": [float(each) for each in causes.values()]},
        "",
        "messages",
    )
    by = ("cause", "subject", "group")
    newest = tuple((utc(row[0]), *row[1:]) for row in some)
    return Report(
        "dead_letters",
        _headline(total, given, causes),
        not left,
        {
            "dead letters": total,
            **{f"… {cause}": number for cause, number in causes.items()},
            "parked keys": len(parked),
            **facts,
        },
        (
            ReportTable(
                "By cause",
                (*by, "messages", "most attempts"),
                _rows(counts, (*_BY, "messages", "attempts")),
                "causes",
            ),
            ReportTable(
                "By tag", (*by, "tag", "messages"), _rows(tags, (*_BY, "tag", "messages")), "tags"
            ),
            ReportTable(
                "Parked keys",
                ("subject", "group", "key", "partition", "messages"),
                tuple(map(tuple, parked)),
                "parked_keys",
            ),
            ReportTable(
                "The newest",
                ("stored", *by, "partition", "broker group", "sequence", "key", "id"),
                newest,
                "newest",
            ),
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
    return (
        f"{total:,} messages failed for good, most of them because of {most!r} "
        f"({causes[most]:,}){rest}"
    )


JOB = DeadLettersJob()

if __name__ == "__main__":
    raise SystemExit(main(JOB))
