"""`archive` writes a log's new messages into Iceberg tables, one for each subject, each message exactly once.

    qmq spark archive --servers HOST:PORT --subject orders --catalog-uri sqlite:////lake/catalog.db --warehouse file:///lake
    … --continuous 30     continue, with a commit every 30 seconds
    … --verify            compare with the log; exit status 1 if it differs

Executors read the log and write Parquet files; the driver commits the files with their positions. It does what `qmq lake follow` does,
with Spark's executors: same tables, same promises (docs/LAKE.md), and both may run at the same time. `qmq lake compact` and `expire` keep
the tables small.
"""

from __future__ import annotations

import argparse
import os
import threading
from dataclasses import dataclass

from pyiceberg.catalog import Catalog
from pyspark.sql import SparkSession

from pyspark_qmq.jobs import archive_report
from pyspark_qmq.jobs.archive_rows import read_archive
from pyspark_qmq.jobs.archive_tasks import SparkTasks
from pyspark_qmq.jobs.archive_verify import Comparison
from pyspark_qmq.jobs.job import checked_source, main, source_options
from pyspark_qmq.jobs.report import Report
from pyspark_qmq.lake.catalogs import open_catalog
from pyspark_qmq.lake.lake_table import find_table
from pyspark_qmq.lake.lake_writer import ROUND_BYTES, LakeOptions, LakeWriter
from pyspark_qmq.log_opening import address_of, log_at
from pyspark_qmq.read_options import ReadOptions, parse
from pyspark_qmq.read_ranges import look, starts
from pyspark_qmq.source_model import Topology
from qmq.client.listening.process_signals import asked_in_main_thread
from qmq.errors import InvalidArgument

__all__ = ["JOB", "ArchiveJob", "read_archive"]


@dataclass(frozen=True, slots=True)
class ArchiveJob:
    """The job."""

    name: str = "archive"
    summary: str = "Archive new messages in Iceberg tables, each exactly once."

    def options(self, parser: argparse.ArgumentParser) -> None:
        what = parser.add_argument_group("archive: other actions than archiving new messages").add_mutually_exclusive_group()
        what.add_argument(
            "--continuous", type=float, metavar="SECONDS", help="archive new messages at this interval, until Ctrl-C or SIGTERM"
        )
        what.add_argument("--verify", action="store_true", help="compare the tables with the log")
        lake = parser.add_argument_group("archive: the tables, as of `qmq lake`")
        lake.add_argument("--catalog", default="lake", metavar="NAME", help="the catalog's name in PyIceberg's configuration (lake)")
        lake.add_argument(
            "--catalog-uri", default=os.environ.get("QMQ_LAKE_CATALOG_URI", ""), metavar="URI", help="sqlite:///…, http(s)://…"
        )
        lake.add_argument("--warehouse", default=os.environ.get("QMQ_LAKE_WAREHOUSE", ""), metavar="URI", help="file:///…, s3://…")
        lake.add_argument("--namespace", default="qmq", help="the namespace of the tables (qmq)")
        lake.add_argument("-P", "--property", action="append", default=[], metavar="KEY=VALUE", help="a property for PyIceberg; repeatable")

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Run the job. Raises QmqError, OSError, PySparkException."""
        if args.until_time != "latest":
            raise InvalidArgument("an archive takes all committed messages: leave out --until")
        options = checked_source(source_options(args))
        asked = parse({"startingOffsets": "earliest", **options} if "startingTimestamp" not in options else options, is_stream=True)
        catalog = open_catalog(args.catalog, args.catalog_uri, args.warehouse, args.property)
        try:
            if args.verify:
                return _verify(spark, catalog, args.namespace, asked, options)
            return _take(spark, catalog, args.namespace, asked, args.continuous)
        finally:
            catalog.close()


def _take(spark: SparkSession, catalog: Catalog, namespace: str, asked: ReadOptions, every_s: float | None) -> Report:
    tasks, made = SparkTasks(spark), archive_report.Taken()
    writer = LakeWriter(catalog, asked, LakeOptions(namespace, ROUND_BYTES * tasks.cores), run_tasks=tasks)
    try:
        if every_s is None:
            writer.drain(made.add)
        else:
            stopping = threading.Event()  # so that a round ends with its commit
            with asked_in_main_thread(stopping.set):
                writer.run(stopping, every_s, made.add)
        topology = look(log_at(address_of(asked.where)), asked.choice)
    finally:
        writer.close()
    tables = [find_table(catalog, namespace, subject) for subject in _subjects(topology)]
    reached = {key: at for each in tables for key, at in each.positions().items()}
    waiting = {key: queue.end - max(reached.get(key, 0), queue.start) for key, queue in topology.queues.items()}
    return archive_report.taken(tables, made, waiting)


def _verify(spark: SparkSession, catalog: Catalog, namespace: str, asked: ReadOptions, options: dict[str, str]) -> Report:
    log = log_at(address_of(asked.where))
    topology = look(log, asked.choice)
    first = starts(asked, topology.queues.values(), log.find_time)
    tables = [find_table(catalog, namespace, subject) for subject in _subjects(topology)]
    comparison = Comparison(spark, {name: value for name, value in options.items() if name.lower().startswith("qmq.") or name == "path"})
    found = [
        comparison.compare(each, {key: queue for key, queue in topology.queues.items() if key.subject == each.subject}, first)
        for each in tables
    ]
    return archive_report.verified(tables, found)


def _subjects(topology: Topology) -> list[str]:
    return sorted({key.subject for key in topology.queues})


JOB = ArchiveJob()

if __name__ == "__main__":
    raise SystemExit(main(JOB))
