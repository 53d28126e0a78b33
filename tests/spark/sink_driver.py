"""A driver that writes into a node, in a separate process that a test kills and whose tasks are
repeated.

python sink_driver.py stream SERVERS INPUT CHECKPOINT EVEN,ODD   all files of a folder, one an
                                                                 epoch; lines to two subjects
python sink_driver.py retries SERVERS SUBJECT,... ROWS           for each subject a batch whose
                                                                 tasks fail in their middle, twice
                                                                 each
"""

from __future__ import annotations

import sys

import fast_session
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StringType
from pyspark.taskcontext import TaskContext
from pyspark_qmq.session import session

FAILURES = 2
PADDING = 4_000
"""So that Spark cannot hand a task all its rows before the task has begun to work."""
SLOWNESS = 20_000
"""So that an epoch takes a while, and is killed in its middle: a millisecond a row, about."""


def stream(spark: SparkSession, servers: str, folder: str, checkpoint: str, subjects: str) -> None:
    even, odd = subjects.split(",")
    lines = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1).text(folder)
    slow = f.expr(
        f"aggregate(sequence(1, {SLOWNESS} + length(value)), 0L, (sum, each) -> sum + each % 7)"
    )
    is_even = f.substring("value", 7, 1).isin(*"02468")
    subject = f.when(is_even, even).otherwise(odd).alias("subject")
    rows = lines.filter(slow > 0).select(
        f.rpad("value", PADDING, ".").alias("value"),
        f.substring("value", 1, 4).alias("key"),
        subject,
    )
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 20)
    writer = (
        rows.writeStream.format("qmq")
        .option("qmq.servers", servers)
        .option("qmq.batchMessages", 40)
    )
    writer.option("checkpointLocation", checkpoint).trigger(
        availableNow=True
    ).start().awaitTermination()


def retries(spark: SparkSession, servers: str, subjects: str, rows: str) -> None:
    partition = int(rows) // 2

    def fail_at(row: int) -> str:
        context = TaskContext.get()
        assert context is not None
        if (
            context.attemptNumber() < FAILURES
            and row % partition == partition * (4 - context.attemptNumber()) // 5
        ):
            raise RuntimeError("this attempt fails, as it shall")
        return f"{row:06d}" + "." * PADDING

    body = f.udf(fail_at, StringType())(f.col("id"))
    found = spark.range(0, int(rows), numPartitions=2).select(
        body.alias("body"), (f.col("id") % 50).cast("string").alias("key")
    )
    writer = (
        found.write.format("qmq")
        .mode("append")
        .option("qmq.servers", servers)
        .option("qmq.batchMessages", 100)
    )
    for subject in subjects.split(","):
        writer.option("subject", subject).save()


def main() -> None:
    what, *rest = sys.argv[1:]
    conf = fast_session.conf() | {"spark.sql.execution.arrow.maxRecordsPerBatch": "200"}
    spark = session("sink", master=f"local[2,{FAILURES + 1}]", conf=conf)
    {"stream": stream, "retries": retries}[what](spark, *rest)
    spark.stop()


if __name__ == "__main__":
    main()
