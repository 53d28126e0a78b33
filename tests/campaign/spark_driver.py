"""A driver of Spark with some queries. No workload itself.

    python -m campaign.spark_driver SERVERS FOLDER MASTER QUERY,...

    copy     the subject `campaign` into another one
    keyed    an ordered subject into another ordered one
    files    text files of a folder, which Spark deletes when they are done, into a subject
    table    the subject `campaign` into Parquet files, by Spark's own sink

Checkpoints, files and tables are in the folder. Each life cuts its new micro-batches into tasks of
another size. It ends when a query ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

SOURCE: Final = "campaign"
TARGET: Final = "campaign-copy"
KEYED: Final = "campaign-keys"
KEYED_TARGET: Final = "campaign-keys-copy"
FILED: Final = "campaign-filed"
TABLED: Final = "campaign-tabled"
CHECKPOINTS: Final = "checkpoints"
FILES: Final = "files"
TABLE: Final = "table"
TASK_BYTES: Final = ("1000", "4000", "100000")
ROWS_MAX: Final = "400"
SLOWNESS: Final = 4_000
"""So that some rows of a micro-batch are stored when others are not: a fifth of a millisecond a
row.
"""
DEATHS: Final = 100
"""Of a task, before its query ends."""
EXECUTORS: Final = {
    "spark.executor.memory": "512m",
    "spark.deploy.maxExecutorRetries": "-1",
    # What Spark's file sources are cut by, with any executors.
    "spark.default.parallelism": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
COMMON: Final = {
    "spark.task.maxFailures": str(DEATHS),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20",
    "spark.driver.memory": "768m",
}


class Queries:
    """The queries of one life."""

    def __init__(self, spark: SparkSession, servers: str, folder: Path) -> None:
        self._spark, self._servers, self._folder = spark, servers, folder
        self._random = Random()

    def start(self, name: str) -> None:
        """Go on with a query."""
        found: dict[str, Callable[[], DataStreamWriter]] = {
            "copy": self._copy,
            "keyed": self._keyed,
            "files": self._files,
            "table": self._table,
        }
        checkpoint = str(self._folder / CHECKPOINTS / name)
        writer = found[name]().queryName(name).option("checkpointLocation", checkpoint)
        writer.trigger(processingTime="300 milliseconds").start()

    def _read(self, subject: str) -> DataFrame:
        rows = (
            self._spark.readStream.format("qmq")
            .option("qmq.servers", self._servers)
            .option("subscribe", subject)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", ROWS_MAX)
            .option("maxBytesPerPartition", self._random.choice(TASK_BYTES))
            .load()
        )
        slow = (
            f"aggregate(sequence(1, {SLOWNESS} + length(body) % 2), 0L, "
            "(sum, each) -> sum + each % 7)"
        )
        return rows.filter(f"{slow} > 0")

    def _write(self, rows: DataFrame, subject: str) -> DataStreamWriter:
        return (
            rows.writeStream.format("qmq")
            .option("qmq.servers", self._servers)
            .option("subject", subject)
            .option("qmq.batchMessages", 20)
        )

    def _copy(self) -> DataStreamWriter:
        return self._write(self._read(SOURCE).select("body"), TARGET)

    def _keyed(self) -> DataStreamWriter:
        return self._write(self._read(KEYED).select("key", "body"), KEYED_TARGET)

    def _files(self) -> DataStreamWriter:
        lines = self._spark.readStream.option("maxFilesPerTrigger", 8)
        rows = lines.option("cleanSource", "delete").text(str(self._folder / FILES))
        return self._write(rows, FILED)

    def _table(self) -> DataStreamWriter:
        rows = self._read(TABLED).selectExpr("cast(body as string) as value")
        return rows.writeStream.format("parquet").option("path", str(self._folder / TABLE))


def drive(servers: str, folder: str, master: str, names: str) -> None:
    """Run the queries until one ends."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "spark"))
    import fast_session
    from pyspark_qmq.session import session

    conf = fast_session.conf() | COMMON
    if not master.startswith("local["):
        conf |= EXECUTORS | {"spark.executor.extraJavaOptions": fast_session.java_options()}
    spark = session("campaign", master=master, conf=conf)
    queries = Queries(spark, servers, Path(folder))
    for name in names.split(","):
        queries.start(name)
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    drive(*sys.argv[1:])
