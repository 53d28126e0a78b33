"""Writes rows to Parquet files and reads them, with Spark. No other part of the archive handles rows.

A file has one subject's messages of one day (of `append_time`, UTC), sorted by partition, broker group and sequence. Subject and day are in
its path, as in Hive; all other columns are in the file. New files are read back before they are used: the number of rows per queue, and
the first and last sequence, come from the file itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them
from pyspark.sql.types import DateType, StructField, StructType

from pyspark_qmq.jobs.archive_disk import ArchiveDisk, walk
from pyspark_qmq.jobs.archive_manifest import Archive, ArchivedFile, Extent
from pyspark_qmq.jobs.archive_ranges import Ranges, subtract
from pyspark_qmq.source_model import QueueKey
from pyspark_qmq.source_schema import COLUMNS
from qmq.errors import LogDamaged

DAY: Final = "day"
SORTED_BY: Final = ("partition", "broker_group", "sequence")
SCHEMA: Final = StructType([*(StructField(name, kind, True) for name, kind in COLUMNS.items()), StructField(DAY, DateType(), True)])
"""The archive's schema: all columns of the log, and the day."""

_DAY_MICROS: Final = 24 * 3600 * 1_000_000
_TIMES: Final = "spark.sql.parquet.outputTimestampType"
_COMPRESSION: Final = "zstd"


def day_of(time: Column) -> Column:
    """The day in UTC, whatever the session's time zone is."""
    return F.date_from_unix_date(F.floor(F.unix_micros(time) / F.lit(_DAY_MICROS)).cast("int"))


def write_rows(rows: DataFrame, folder: Path) -> None:
    """Write rows with all columns to new files below a new folder: one or more files per subject and day."""
    dated = rows.select(*COLUMNS, day_of(F.col("append_time")).alias(DAY))
    _write(dated.sortWithinPartitions("subject", DAY, *SORTED_BY), folder)


def rewrite_rows(rows: DataFrame, folder: Path, files: int) -> None:
    """Write an archive's rows to about `files` files per subject and day. Each file has a contiguous range of the sorted rows."""
    placed = rows.coalesce(1) if files == 1 else rows.repartitionByRange(files, "subject", DAY, *SORTED_BY)
    _write(placed.sortWithinPartitions("subject", DAY, *SORTED_BY), folder)


def _write(rows: DataFrame, folder: Path) -> None:
    with _exact_times(rows.sparkSession):
        rows.write.option("compression", _COMPRESSION).partitionBy("subject", DAY).parquet(str(folder))


@contextmanager
def _exact_times(spark: SparkSession) -> Iterator[None]:
    """Store times as INT64, which other readers support and for which Parquet keeps statistics."""
    before = spark.conf.get(_TIMES)
    spark.conf.set(_TIMES, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(_TIMES, str(before))


def written_files(spark: SparkSession, attempt: Path, disk: ArchiveDisk) -> tuple[ArchivedFile, ...]:
    """The files in an attempt's folder, described from their content. Spark's own marker files are removed.

    Raises LogDamaged if a file does not have the expected rows.
    """
    sizes: dict[str, int] = {}
    for path in list(walk(attempt)):
        if path.suffix == ".parquet" and not path.name.startswith((".", "_")):
            sizes[str(path.relative_to(attempt.parent))] = path.stat().st_size
        else:
            disk.unlink(path)
    extents = _extents(spark, attempt) if sizes else {}
    if extents.keys() != sizes.keys():
        raise LogDamaged(f"{attempt} holds {len(sizes)} files, and rows of {len(extents)}: it was changed while it was written")
    return tuple(ArchivedFile(path, sizes[path], extents[path]) for path in sorted(sizes))


def _extents(spark: SparkSession, attempt: Path) -> dict[str, dict[str, Extent]]:
    rows = spark.read.schema(SCHEMA).parquet(str(attempt)).select("*", F.col("_metadata.file_name").alias("file"))
    counted = rows.groupBy("subject", DAY, "file", "partition", "broker_group").agg(
        F.min("sequence").alias("first"), F.max("sequence").alias("last"), F.count("*").alias("rows")
    )
    found: dict[str, dict[str, Extent]] = {}
    for each in counted.collect():  # One row per file and queue.
        path = f"{attempt.name}/subject={each['subject']}/{DAY}={each[DAY]}/{each['file']}"
        within = QueueKey(each["subject"], each["partition"], each["broker_group"]).within
        found.setdefault(path, {})[within] = Extent(each["first"], each["last"], each["rows"])
    return found


def read_files(spark: SparkSession, files: Path, paths: Iterable[str]) -> DataFrame:
    """The rows of an archive's files, with all columns of `SCHEMA`."""
    chosen = [str(files / path) for path in paths]
    if not chosen:
        return spark.createDataFrame([], SCHEMA)
    found = spark.read.schema(_with_attempt()).option("basePath", str(files)).parquet(*chosen)
    return found.select(*SCHEMA.fieldNames())


def _with_attempt() -> StructType:
    return StructType(list(SCHEMA.fields)).add("attempt", "string", True)


def within(rows: DataFrame, wanted: Ranges) -> DataFrame:
    """The rows that are in one of the ranges."""
    listed = [(*key, first, end) for key, found in wanted.items() for first, end in found]
    ranges = rows.sparkSession.createDataFrame(listed, "w_subject string, w_partition int, w_group string, w_first bigint, w_end bigint")
    is_queue = (rows["subject"] == ranges["w_subject"]) & (rows["partition"] == ranges["w_partition"])
    is_queue &= rows["broker_group"] == ranges["w_group"]
    is_inside = (rows["sequence"] >= ranges["w_first"]) & (rows["sequence"] < ranges["w_end"])
    return rows.join(F.broadcast(ranges), is_queue & is_inside, "left_semi")


def check_within(files: Iterable[ArchivedFile], wanted: Ranges) -> None:
    """Check that the files have only rows of these ranges. Raises LogDamaged if offsets and rows do not match."""
    for file in files:
        for name, extent in file.queues.items():
            key = QueueKey.parse(file.subject, name)
            held = {key: ((extent.first, extent.first + 1), (extent.last, extent.last + 1))}
            if subtract(held, wanted):
                raise LogDamaged(f"{key}: rows {extent.first} to {extent.last} came for {wanted.get(key, ())}: nothing was archived")


def totals(archive: Archive) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Rows, bytes and files by subject and day."""
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    for file in archive.files.values():
        rows, size, files = found.get((file.subject, file.day), (0, 0, 0))
        found[file.subject, file.day] = (rows + file.rows, size + file.size, files + 1)
    return dict(sorted(found.items()))
