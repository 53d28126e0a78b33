"""`archive` writes a log's new messages into Iceberg tables, one for each subject, each message
exactly once.

    qmq spark archive --servers HOST:PORT --subject orders \\
        --catalog-uri sqlite:////lake/catalog.db --warehouse file:///lake
    … --continuous 30     continue, with a commit every 30 seconds
    … --verify            compare with the log; exit status 1 if it differs

Executors read the log and write Parquet files; the driver commits the files with their positions.
It does what `qmq lake follow` does, with Spark's executors: same tables, same promises
(docs/LAKE.md), and both may run at the same time. `qmq lake compact` and `expire` keep the tables
small.

Executors report the files that they wrote to the driver. `--verify` compares a table with the log,
queue by queue, for all messages that both should have. Both sides are counted and fingerprinted
over all columns, in one action of Spark. Messages that retention deleted from the log can only be
counted: the files must have as many rows as the table says.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyiceberg.catalog import Catalog
from pyiceberg.table import FileScanTask
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them
from pyspark.sql.types import StructType

from pyspark_qmq.jobs.job import checked_source, main, source_options
from pyspark_qmq.jobs.report import Plot, Report, ReportTable
from pyspark_qmq.lake.catalog import open_catalog
from pyspark_qmq.lake.day_files import DayFile
from pyspark_qmq.lake.maintenance import totals
from pyspark_qmq.lake.table import LakeTable, find_table
from pyspark_qmq.lake.task_runner import TaskOutput, TaskSource, write_tasks
from pyspark_qmq.lake.writer import ROUND_BYTES, LakeOptions, LakeWriter, RoundResult
from pyspark_qmq.source_schema import COLUMNS, default_schema
from qmq.client.listening.listeners import asked_in_main_thread
from qmq.columns import offsets
from qmq.columns.model import QueueKey, SourceQueue, Topology
from qmq.columns.options import ReadOptions, parse
from qmq.columns.planning import ReadTask
from qmq.columns.reading import address_of, log_at, starts, topology_of
from qmq.errors import InvalidArgument

SHOWN_MAX: Final = 10
"""Sequences shown in a counterexample."""

_QUEUE: Final = ("subject", "partition", "broker_group")


def read_archive(
    spark: SparkSession, catalog: Catalog, subject: str, namespace: str = "qmq"
) -> DataFrame:
    """The current messages of a subject's table, with all columns of the log.

    The DataFrame has the files of one snapshot: repeated use gives the same rows, until `qmq lake
    expire` deletes that snapshot. Spark itself must reach the files: an object store needs Hadoop's
    connector for it.

    Raises UnknownSubject if there is no table; InvalidArgument as `snapshot_files`.
    """
    table = find_table(catalog, namespace, subject)
    return snapshot_rows(spark, table, snapshot_files(table))


def snapshot_files(table: LakeTable) -> list[FileScanTask]:
    """The files of the snapshot that `table` has loaded. Raises InvalidArgument if another engine
    deleted single rows of it.
    """
    files = table.files()
    if any(each.delete_files for each in files):
        raise InvalidArgument(
            f"the table of {table.subject!r} has deleted rows, which a reader of its files "
            "would see: read it by Iceberg"
        )
    return files


def snapshot_rows(
    spark: SparkSession, table: LakeTable, files: Sequence[FileScanTask]
) -> DataFrame:
    """The rows of files of a table."""
    columns = default_schema(with_headers=True)
    stored = StructType([each for each in columns.fields if each.name != "subject"])
    paths = [each.file.file_path for each in files]
    rows = spark.read.schema(stored).parquet(*paths) if paths else spark.createDataFrame([], stored)
    return rows.withColumn("subject", F.lit(table.subject)).select(*columns.names)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A set of rows of a queue, in any order: two sums of 32-bit halves of a hash over all columns.

    Sums cannot overflow, and unlike XOR, duplicate rows do not cancel out.
    """

    rows: int = 0
    repeated: int = 0
    """Rows with a sequence that another row has."""
    high: int = 0
    low: int = 0


@dataclass(frozen=True, slots=True)
class Compared:
    """One queue in the table and in the log, over the range that both should have."""

    queue: QueueKey
    first: int
    """The first compared sequence."""
    end: int
    """The end of the comparison (exclusive):
    the table's position, or the log's end if that is earlier.
    """
    in_table: Fingerprint
    in_log: Fingerprint
    is_log_shorter: bool
    """Whether the log ends before the table."""

    @property
    def is_same(self) -> bool:
        """Whether the two sides are equal."""
        return (
            self.in_table == self.in_log and not self.in_table.repeated and not self.is_log_shorter
        )


@dataclass(frozen=True, slots=True)
class ComparedTable:
    subject: str
    queues: list[Compared]
    rows: int
    """Rows in the table's files."""
    listed: int
    """Rows that the table's snapshot says."""
    example: list[tuple[int, str]]
    """The first differing sequences of the first queue that differs, with the difference."""

    @property
    def differing(self) -> list[Compared]:
        return [each for each in self.queues if not each.is_same]

    @property
    def is_same(self) -> bool:
        return not self.differing and self.rows == self.listed


class Comparison:
    """Compares tables with one log. `where`: the data source's options that name the log."""

    def __init__(self, spark: SparkSession, where: Mapping[str, str]) -> None:
        self._spark = spark
        self._where = where

    def compare(
        self,
        table: LakeTable,
        queues: Mapping[QueueKey, SourceQueue],
        starts: Mapping[QueueKey, int],
    ) -> ComparedTable:
        """Compare from `starts` on. Raises what the data source raises."""
        positions = table.positions()
        first = {key: max(queue.start, starts.get(key, 0)) for key, queue in queues.items()}
        ends = {
            key: max(min(positions.get(key, 0), queue.end), first[key])
            for key, queue in queues.items()
        }
        files = snapshot_files(table)
        rows = snapshot_rows(self._spark, table, files)
        ours, theirs = self._within(rows, first, ends), self._log(first, ends)
        sides = self._fingerprints(ours, theirs)
        found = [
            Compared(
                key,
                first[key],
                ends[key],
                sides.get(("table", key), Fingerprint()),
                sides.get(("log", key), Fingerprint()),
                positions.get(key, 0) > queue.end,
            )
            for key, queue in sorted(queues.items())
        ]
        wrong = next((each for each in found if each.in_table != each.in_log), None)
        listed = sum(each.file.record_count for each in files)
        return ComparedTable(
            table.subject,
            found,
            rows.count(),
            listed,
            _differing(ours, theirs, wrong.queue) if wrong else [],
        )

    def _log(self, first: Mapping[QueueKey, int], ends: Mapping[QueueKey, int]) -> DataFrame:
        start, end = offsets.to_json(first), offsets.to_json(ends)
        chosen = {
            "assign": json.dumps({subject: list(queues) for subject, queues in end.items()}),
            "startingOffsets": json.dumps(start),
            "endingOffsets": json.dumps(end),
        }
        return (
            self._spark.read.format("qmq")
            .schema(default_schema(with_headers=True))
            .options(**self._where, **chosen)
            .load()
        )

    def _within(
        self, rows: DataFrame, first: Mapping[QueueKey, int], ends: Mapping[QueueKey, int]
    ) -> DataFrame:
        listed = [(*key, first[key], ends[key]) for key in ends]
        ranges = self._spark.createDataFrame(
            listed,
            "subject string, partition int, broker_group string, w_first bigint, w_end bigint",
        )
        held = rows.join(F.broadcast(ranges), list(_QUEUE), "inner")
        return held.where("sequence >= w_first and sequence < w_end").select(*rows.columns)

    def _fingerprints(
        self, ours: DataFrame, theirs: DataFrame
    ) -> dict[tuple[str, QueueKey], Fingerprint]:
        both = _hashed(ours, "table").unionAll(_hashed(theirs, "log"))
        summed = both.groupBy("side", *_QUEUE).agg(
            F.count("*"),
            F.count("*") - F.count_distinct("sequence"),
            F.sum(F.shiftright("hash", 32)),
            F.sum(F.col("hash").bitwiseAND(F.lit(0xFFFFFFFF))),
        )
        return {
            (each[0], QueueKey(each[1], each[2], each[3])): Fingerprint(*each[4:])
            for each in summed.collect()
        }


def _hash() -> Column:
    """The hash of a row over all columns, independent of the order of its headers."""
    return F.xxhash64(
        *(
            F.array_sort(F.map_entries(name)) if name == "headers" else F.col(name)
            for name in COLUMNS
        )
    ).alias("hash")


def _hashed(rows: DataFrame, side: str) -> DataFrame:
    return rows.select(F.lit(side).alias("side"), *_QUEUE, "sequence", _hash())


def _differing(ours: DataFrame, theirs: DataFrame, queue: QueueKey) -> list[tuple[int, str]]:
    both = _by_sequence(ours, queue, "ours").join(
        _by_sequence(theirs, queue, "theirs"), "sequence", "full"
    )
    rows = both.where("not (ours <=> theirs)").orderBy("sequence").limit(SHOWN_MAX).collect()
    return [(each["sequence"], _how(each["ours_rows"], each["theirs_rows"])) for each in rows]


def _by_sequence(rows: DataFrame, queue: QueueKey, side: str) -> DataFrame:
    is_queue = (F.col("partition") == queue.partition) & (
        F.col("broker_group") == queue.broker_group
    )
    summed = F.sum(F.col("hash").cast("decimal(38)")).alias(side)
    return (
        rows.where(is_queue)
        .select("sequence", _hash())
        .groupBy("sequence")
        .agg(summed, F.count("*").alias(f"{side}_rows"))
    )


def _how(ours: int | None, theirs: int | None) -> str:
    if not ours or not theirs:
        return "only in the table" if ours else "only in the log"
    return f"{ours} times in the table" if ours > 1 else "different"


SUBJECTS_SHOWN = 6
"""Subjects with their own colour; the others share a bar."""

Day = tuple[str, str, int, int, int]
"""Subject, day, messages, bytes, files."""


@dataclass(slots=True)
class Taken:
    """The rows and files that a run added, of any duration."""

    rows: int = 0
    files: int = 0
    commits: int = 0
    refused: int = 0
    """Commits for which another writer was faster."""

    def add(self, done: RoundResult) -> None:
        """Count a round."""
        if done.is_refused:
            self.refused += 1
            return
        self.rows, self.files, self.commits = (
            self.rows + done.rows,
            self.files + done.files,
            self.commits + 1,
        )


def taken(tables: Sequence[LakeTable], made: Taken, waiting: Mapping[QueueKey, int]) -> Report:
    """The report of a run that archived messages."""
    left, days = sum(waiting.values()), _days(tables)
    facts = {
        **_holdings(tables, days),
        "archived now": made.rows,
        "files now": made.files,
        "commits now": made.commits,
        "commits of another writer": made.refused,
        "waiting in the log": left,
    }
    positions = {key: at for each in tables for key, at in each.positions().items()}
    queues = tuple(
        (key.subject, key.within, positions.get(key, 0), count)
        for key, count in sorted(waiting.items())
    )
    listed = (
        ReportTable(
            "By subject and day",
            ("subject", "day", "messages", "bytes", "files"),
            tuple(days),
            "days",
        ),
        ReportTable("Queues", ("subject", "queue", "archived up to", "waiting"), queues, "queues"),
    )
    headline = (
        f"{_messages(made.rows)} archived; {_messages(left) if left else 'none'} left in the log."
    )
    return Report("archive", headline, True, facts, listed, _plots(days))


def verified(tables: Sequence[LakeTable], found: Sequence[ComparedTable]) -> Report:
    """The report of a comparison with the log."""
    queues = [each for table in found for each in table.queues]
    bad, rows = (
        [each for each in queues if not each.is_same],
        sum(each.in_table.rows for each in queues),
    )
    wrong = tuple(
        (each.subject, each.rows, each.listed) for each in found if each.rows != each.listed
    )
    facts = {
        **_holdings(tables, _days(tables)),
        "rows compared": rows,
        "queues": len(queues),
        "queues that differ": len(bad),
        "tables with other rows than their snapshots say": len(wrong),
    }
    lines = tuple(
        (
            each.queue.subject,
            each.queue.within,
            each.first,
            each.end,
            each.in_table.rows,
            each.in_log.rows,
            each.in_table.repeated,
            each.is_same,
        )
        for each in queues
    )
    listed = (
        ReportTable(
            "Queues",
            ("subject", "queue", "from", "to", "table", "log", "repeated", "same"),
            lines,
            "verified",
        ),
        ReportTable(
            "Wrong tables",
            ("subject", "rows in files", "rows of the snapshot"),
            wrong,
            "wrong_tables",
        ),
    )
    is_clean = all(each.is_same for each in found)
    headline = (
        f"{_messages(rows)} are identical in table and log."
        if is_clean
        else f"{len(bad):,} of {len(queues):,} queues and {len(wrong):,} tables differ."
    )
    return Report("archive", headline, is_clean, facts, listed, counterexample=_example(found))


def _example(found: Sequence[ComparedTable]) -> str:
    table = next((each for each in found if each.differing), None)
    if table is None:
        return ""
    first = table.differing[0]
    lines = [f"{first.queue}, sequences {first.first} to {first.end - 1}"]
    if first.is_log_shorter:
        lines.append("  the log ends before the table: it is another log, or its end was lost")
    return "\n".join(lines + [f"  {sequence:>12}  {how}" for sequence, how in table.example])


def _days(tables: Sequence[LakeTable]) -> list[Day]:
    return [
        (each.subject, day, rows, size, files)
        for each in tables
        for day, files, rows, size in totals(each)
    ]


def _holdings(tables: Sequence[LakeTable], days: Sequence[Day]) -> dict[str, object]:
    dates = [each[1] for each in days]
    return {
        "tables": [".".join(each.iceberg.name()) for each in tables],
        "days": f"{min(dates)} to {max(dates)}" if dates else "none yet",
        "messages": sum(each[2] for each in days),
        "bytes": sum(each[3] for each in days),
        "files": sum(each[4] for each in days),
    }


def _plots(found: Sequence[Day]) -> tuple[Plot, ...]:
    rows = {(subject, day): count for subject, day, count, _, _ in found}
    days, sums = sorted({day for _, day in rows}), dict[str, int]()
    for (subject, _), count in rows.items():
        sums[subject] = sums.get(subject, 0) + count
    by_rows = sorted(sums, key=lambda each: -sums[each])
    series = {
        subject: [float(rows.get((subject, day), 0)) for day in days]
        for subject in by_rows[:SUBJECTS_SHOWN]
    }
    others = by_rows[SUBJECTS_SHOWN:]
    if others:
        series["all others"] = [
            float(sum(rows.get((subject, day), 0) for subject in others)) for day in days
        ]
    return (Plot("Messages per day", "bar", days, series, "", "messages"),)


def _messages(number: int) -> str:
    return f"{number:,} message" if number == 1 else f"{number:,} messages"


class SparkTasks:
    """A `TaskRunner`. Files of attempts that failed or were superseded are in no commit."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self.cores = self._context.defaultParallelism

    def __call__(
        self, source: TaskSource, work: Sequence[ReadTask], output: TaskOutput
    ) -> list[DayFile]:
        """One Spark task for each core; a task makes one file for each day.
        Raises PySparkException.
        """
        count = min(len(work), self.cores)
        parts = [work[at::count] for at in range(count)]
        rows = self._context.parallelize(parts, count)
        return rows.flatMap(lambda part: write_tasks(source, part, output)).collect()


__all__ = ["JOB", "ArchiveJob", "read_archive"]


@dataclass(frozen=True, slots=True)
class ArchiveJob:
    """The job."""

    name: str = "archive"
    summary: str = "Archive new messages in Iceberg tables, each exactly once."

    def options(self, parser: argparse.ArgumentParser) -> None:
        what = parser.add_argument_group(
            "archive: other actions than archiving new messages"
        ).add_mutually_exclusive_group()
        what.add_argument(
            "--continuous",
            type=float,
            metavar="SECONDS",
            help="archive new messages at this interval, until Ctrl-C or SIGTERM",
        )
        what.add_argument("--verify", action="store_true", help="compare the tables with the log")
        lake = parser.add_argument_group("archive: the tables, as of `qmq lake`")
        lake.add_argument(
            "--catalog",
            default="lake",
            metavar="NAME",
            help="the catalog's name in PyIceberg's configuration (lake)",
        )
        lake.add_argument(
            "--catalog-uri",
            default=os.environ.get("QMQ_LAKE_CATALOG_URI", ""),
            metavar="URI",
            help="sqlite:///…, http(s)://…",
        )
        lake.add_argument(
            "--warehouse",
            default=os.environ.get("QMQ_LAKE_WAREHOUSE", ""),
            metavar="URI",
            help="file:///…, s3://…",
        )
        lake.add_argument("--namespace", default="qmq", help="the namespace of the tables (qmq)")
        lake.add_argument(
            "-P",
            "--property",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="a property for PyIceberg; repeatable",
        )

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Run the job. Raises QmqError, OSError, PySparkException."""
        if args.until_time != "latest":
            raise InvalidArgument("an archive takes all committed messages: leave out --until")
        options = checked_source(source_options(args))
        asked = parse(
            {"startingOffsets": "earliest", **options}
            if "startingTimestamp" not in options
            else options,
            is_stream=True,
        )
        catalog = open_catalog(args.catalog, args.catalog_uri, args.warehouse, args.property)
        try:
            if args.verify:
                return _verify(spark, catalog, args.namespace, asked, options)
            return _take(spark, catalog, args.namespace, asked, args.continuous)
        finally:
            catalog.close()


def _take(
    spark: SparkSession, catalog: Catalog, namespace: str, asked: ReadOptions, every_s: float | None
) -> Report:
    tasks, made = SparkTasks(spark), Taken()
    writer = LakeWriter(
        catalog, asked, LakeOptions(namespace, ROUND_BYTES * tasks.cores), run_tasks=tasks
    )
    try:
        if every_s is None:
            writer.drain(made.add)
        else:
            stopping = threading.Event()  # so that a round ends with its commit
            with asked_in_main_thread(stopping.set):
                writer.run(stopping, every_s, made.add)
        topology = topology_of(log_at(address_of(asked.where)), asked.choice)
    finally:
        writer.close()
    tables = [find_table(catalog, namespace, subject) for subject in _subjects(topology)]
    reached = {key: at for each in tables for key, at in each.positions().items()}
    waiting = {
        key: queue.end - max(reached.get(key, 0), queue.start)
        for key, queue in topology.queues.items()
    }
    return taken(tables, made, waiting)


def _verify(
    spark: SparkSession,
    catalog: Catalog,
    namespace: str,
    asked: ReadOptions,
    options: dict[str, str],
) -> Report:
    log = log_at(address_of(asked.where))
    topology = topology_of(log, asked.choice)
    first = starts(asked, topology.queues.values(), log.find_time)
    tables = [find_table(catalog, namespace, subject) for subject in _subjects(topology)]
    comparison = Comparison(
        spark,
        {
            name: value
            for name, value in options.items()
            if name.lower().startswith("qmq.") or name == "path"
        },
    )
    found = [
        comparison.compare(
            each,
            {key: queue for key, queue in topology.queues.items() if key.subject == each.subject},
            first,
        )
        for each in tables
    ]
    return verified(tables, found)


def _subjects(topology: Topology) -> list[str]:
    return sorted({key.subject for key in topology.queues})


JOB = ArchiveJob()

if __name__ == "__main__":
    raise SystemExit(main(JOB))
