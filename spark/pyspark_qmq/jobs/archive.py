"""`archive` writes a log's new messages to Parquet files by subject and day, each message exactly once.

    qmq spark archive --servers HOST:PORT --subject orders --out /archive   archive new messages, and exit
    … --continuous 30                                                      continue, with a micro-batch every 30 seconds
    … --verify                                                             compare with the log; exit status 1 if it differs
    qmq spark archive --out /archive --compact                             combine small files of past days into large ones
    qmq spark archive --out /archive --sweep                               delete files that are no longer read

Read an archive with `read_archive`, which sees each change completely or not at all. `spark.read.parquet("/archive/data")`, and any other
Parquet reader, sees the same rows while no writer is active. All these commands may run at the same time. docs/SPARK_JOBS.md explains why.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from pyspark_qmq.jobs import archive_compaction, archive_files, archive_report, archive_stream, archive_verify
from pyspark_qmq.jobs.archive_chain import ManifestChain
from pyspark_qmq.jobs.archive_disk import ArchiveDisk
from pyspark_qmq.jobs.archive_folder import ArchiveFolder, local_path
from pyspark_qmq.jobs.job import checked_source, main, source_options
from pyspark_qmq.jobs.report import Report
from qmq.errors import InvalidArgument

GRACE_HOURS: Final = 24.0
"""How long replaced files are kept for running readers."""

HOUR_MS: Final = 3_600_000


def read_archive(spark: SparkSession, path: str) -> DataFrame:
    """The current content of an archive: all columns of the log, and `day`.

    The DataFrame refers to fixed files, so repeated use gives the same rows, until a sweep deletes files that were replaced meanwhile (at
    least a day after their replacement).

    Raises InvalidArgument if there is no archive, LogDamaged if its manifests are inconsistent.
    """
    root = local_path(path)
    return archive_files.read_files(spark, root / "_qmq" / "files", _chain(root).latest().files)


@dataclass(frozen=True, slots=True)
class ArchiveJob:
    """The job. Tests pass a disk and a clock."""

    name: str = "archive"
    summary: str = "Archive new messages as Parquet files by subject and day, each exactly once."
    disk: ArchiveDisk = field(default_factory=ArchiveDisk)
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    new_run: Callable[[], str] = lambda: uuid.uuid4().hex

    def options(self, parser: argparse.ArgumentParser) -> None:
        what = parser.add_argument_group("archive: other actions than archiving new messages").add_mutually_exclusive_group()
        what.add_argument(
            "--continuous", type=float, metavar="SECONDS", help="archive new messages at this interval, until Ctrl-C or SIGTERM"
        )
        what.add_argument("--compact", action="store_true", help="combine the small files of past days")
        what.add_argument("--sweep", action="store_true", help="delete replaced files, and files left by crashes")
        what.add_argument("--verify", action="store_true", help="compare the archive with the log")
        parser.add_argument("--grace", type=float, default=GRACE_HOURS, metavar="HOURS", help="how long --sweep keeps replaced files (24)")

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Run the job. Raises InvalidArgument, FolderInUse, DiskFull, LogDamaged, and what the data source raises."""
        root = _root(args)
        if args.verify:
            return self._verify(spark, root, checked_source(source_options(args)))
        options = {} if args.compact or args.sweep else checked_source(source_options(args))
        folder = ArchiveFolder(root, disk=self.disk, now_ms=self.now_ms, run=self.new_run())
        try:
            if args.compact:
                made = archive_compaction.compact(spark, folder, self.disk, self.now_ms())
                return archive_report.compacted(root, folder.latest(), made)
            if args.sweep:
                deleted = folder.sweep(self.now_ms() - round(args.grace * HOUR_MS))
                return archive_report.swept(root, folder.latest(), deleted)
            return self._take(spark, folder, options, args.continuous)
        finally:
            folder.close()

    def _take(self, spark: SparkSession, folder: ArchiveFolder, options: dict[str, str], every_s: float | None) -> Report:
        trigger = {"availableNow": True} if every_s is None else {"processingTime": f"{round(every_s * 1000)} milliseconds"}
        folder.clean()
        made = archive_stream.run_stream(spark, folder, self.disk, options, trigger)
        archive = folder.latest()
        return archive_report.taken(folder.root, archive, made, archive_stream.waiting(options, archive))

    def _verify(self, spark: SparkSession, root: Path, options: dict[str, str]) -> Report:
        """Compare the archive with the log. Read-only: leftovers of a crash are reported, not repaired."""
        chain = _chain(root)
        archive = chain.latest()
        files = root / "_qmq" / "files"
        found = archive_verify.compare(spark, archive, files, options)
        bad = [each for each in found if not each.is_same]
        example = archive_verify.differing(spark, archive, files, options, bad[0]) if bad else []
        wrong = archive_verify.wrong_files(archive, chain.latest, files, root / "data")
        return archive_report.verified(root, archive, found, wrong, example)


def _root(args: argparse.Namespace) -> Path:
    if not args.out:
        raise InvalidArgument("give the archive's folder: --out FOLDER")
    if args.until_time != "latest":
        raise InvalidArgument("an archive takes all committed messages: leave out --until")
    return local_path(args.out)


def _chain(root: Path) -> ManifestChain:
    if not (root / "_qmq" / "manifests").is_dir():
        raise InvalidArgument(f"there is no archive at {root}")
    return ManifestChain(root / "_qmq", ArchiveDisk())


JOB = ArchiveJob()

if __name__ == "__main__":
    raise SystemExit(main(JOB))
