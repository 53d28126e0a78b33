"""An archive's rows, as Spark reads them: the Parquet files of one snapshot of a subject's Iceberg table."""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.catalog import Catalog
from pyiceberg.table import FileScanTask
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for them
from pyspark.sql.types import StructType

from pyspark_qmq.lake.table import LakeTable, find_table
from pyspark_qmq.source_schema import default_schema
from qmq.errors import InvalidArgument


def read_archive(spark: SparkSession, catalog: Catalog, subject: str, namespace: str = "qmq") -> DataFrame:
    """The current messages of a subject's table, with all columns of the log.

    The DataFrame has the files of one snapshot: repeated use gives the same rows, until `qmq lake expire` deletes that snapshot. Spark
    itself must reach the files: an object store needs Hadoop's connector for it.

    Raises UnknownSubject if there is no table; InvalidArgument as `snapshot_files`.
    """
    table = find_table(catalog, namespace, subject)
    return snapshot_rows(spark, table, snapshot_files(table))


def snapshot_files(table: LakeTable) -> list[FileScanTask]:
    """The files of the snapshot that `table` has loaded. Raises InvalidArgument if another engine deleted single rows of it."""
    files = table.files()
    if any(each.delete_files for each in files):
        raise InvalidArgument(f"the table of {table.subject!r} has deleted rows, which a reader of its files would see: read it by Iceberg")
    return files


def snapshot_rows(spark: SparkSession, table: LakeTable, files: Sequence[FileScanTask]) -> DataFrame:
    """The rows of files of a table."""
    columns = default_schema(with_headers=True)
    stored = StructType([each for each in columns.fields if each.name != "subject"])
    paths = [each.file.file_path for each in files]
    rows = spark.read.schema(stored).parquet(*paths) if paths else spark.createDataFrame([], stored)
    return rows.withColumn("subject", F.lit(table.subject)).select(*columns.names)
