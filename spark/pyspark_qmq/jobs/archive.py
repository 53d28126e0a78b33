"""`archive`: keep a log's messages as Parquet, by subject and day; each once, and only what is new.

    qmq spark archive --servers HOST:PORT --subject orders --out /archive   take what is new, and end
    … --continuous 30                                                      go on, a micro-batch every 30 seconds
    … --verify                                                             compare with the log; exit status 1 if it differs
    qmq spark archive --out /archive --compact                             small files of days that are over become large ones
    qmq spark archive --out /archive --sweep                               delete what nobody reads any more

Readers take `read_archive`: it sees each change whole or not at all. `spark.read.parquet("/archive/data")`, and any other reader of
Parquet, sees the same as long as nothing is at work there. All of these may run at the same time. Why it holds: docs/SPARK_JOBS.md.
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
"""How long files that left the archive stay for those who are reading them."""

HOUR_MS: Final = 3_600_000


def read_archive(spark: SparkSession, path: str) -> DataFrame:
    """What an archive holds at this moment: all columns of the log, and `day`.

    The DataFrame names its files, so it gives the same rows however often it is used, until a sweep deletes files that were rewritten
    meanwhile (not before they are out of the archive for a day).

    Raises InvalidArgument if there is no archive; LogDamaged if its manifests do not hold together.
    """
    root = local_path(path)
    return archive_files.read_files(spark, root / "_qmq" / "files", _chain(root).latest().files)


@dataclass(frozen=True, slots=True)
class ArchiveJob:
    """The job. Tests hand in a disk and a clock."""

    name: str = "archive"
    summary: str = "Keep messages as Parquet, by subject and day: each once, and only what is new."
    disk: ArchiveDisk = field(default_factory=ArchiveDisk)
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    new_run: Callable[[], str] = lambda: uuid.uuid4().hex

    def options(self, parser: argparse.ArgumentParser) -> None:
        what = parser.add_argument_group("archive: what to do, instead of taking what is new").add_mutually_exclusive_group()
        what.add_argument("--continuous", type=float, metavar="SECONDS", help="take what is new every so often, until Ctrl-C or SIGTERM")
        what.add_argument("--compact", action="store_true", help="make few files of the many of days that are over")
        what.add_argument("--sweep", action="store_true", help="delete files that were replaced, and what crashes left")
        what.add_argument("--verify", action="store_true", help="compare the archive with the log")
        parser.add_argument("--grace", type=float, default=GRACE_HOURS, metavar="HOURS", help="--sweep keeps replaced files so long (24)")

    def run(self, spark: SparkSession, args: argparse.Namespace) -> Report:
        """Raises InvalidArgument, FolderInUse, DiskFull, LogDamaged; what the data source raises."""
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
        """Reads only: what a crash left is found, not mended."""
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
        raise InvalidArgument("name the archive's folder: --out FOLDER")
    if args.until_time != "latest":
        raise InvalidArgument("an archive takes all committed messages: leave --until out")
    return local_path(args.out)


def _chain(root: Path) -> ManifestChain:
    if not (root / "_qmq" / "manifests").is_dir():
        raise InvalidArgument(f"there is no archive at {root}")
    return ManifestChain(root / "_qmq", ArchiveDisk())


JOB = ArchiveJob()

if __name__ == "__main__":
    raise SystemExit(main(JOB))
