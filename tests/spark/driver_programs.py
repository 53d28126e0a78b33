"""Drivers that a test runs in a separate process, and kills: `python driver_programs.py WHAT ...`.

stream SERVERS INPUT CHECKPOINT EVEN,ODD   all files of a folder, one an epoch; lines to two
                                           subjects
retries SERVERS SUBJECT,... ROWS           for each subject a batch whose tasks fail in their
                                           middle, twice each
copy OPTIONS, sink OPTIONS                 streaming queries, with slow rows, small tasks and
                                           small batches
"""

from __future__ import annotations

import argparse
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
DEATHS = 40
"""Of a task: its Python process is killed, too."""


def _session() -> SparkSession:
    conf = fast_session.conf() | {"spark.sql.execution.arrow.maxRecordsPerBatch": "200"}
    return session("sink", master=f"local[2,{FAILURES + 1}]", conf=conf)


def stream(servers: str, folder: str, checkpoint: str, subjects: str) -> None:
    """All files of a folder, one an epoch; lines to two subjects."""
    spark = _session()
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
    spark.stop()


def retries(servers: str, subjects: str, rows: str) -> None:
    """For each subject a batch whose tasks fail in their middle, twice each."""
    spark = _session()
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
    spark.stop()


def copy(words: list[str]) -> None:
    """From a subject to two others, until killed; with --once until everything is copied. Messages
    with an even number go to SUBJECT.plain, the others to SUBJECT.ordered, with a key.
    """
    options = argparse.ArgumentParser(description=copy.__doc__)
    options.add_argument("--server", required=True)
    options.add_argument("--path", default="", help="read the segments of these folders instead")
    options.add_argument("--subject", required=True)
    options.add_argument("--checkpoint", required=True)
    options.add_argument("--task-bytes", required=True)
    options.add_argument("--slowness", type=int, default=300)
    options.add_argument(
        "--executors",
        action="store_true",
        help="two executors with their own JVMs instead of threads",
    )
    options.add_argument(
        "--skip-lost", action="store_true", help="go on behind messages that a purge took"
    )
    options.add_argument("--once", action="store_true")
    chosen = options.parse_args(words)
    conf = fast_session.conf() | {"spark.sql.execution.arrow.maxRecordsPerBatch": "20"}
    conf |= {
        "spark.task.maxFailures": str(DEATHS),
        "spark.deploy.maxExecutorRetries": "-1",
        "spark.executor.memory": "512m",
    }
    spark = session(
        "copy",
        master="local-cluster[2,1,512]" if chosen.executors else f"local[2,{DEATHS}]",
        conf=conf,
    )
    source = (
        spark.readStream.format("qmq")
        .option("subscribe", chosen.subject)
        .option("startingOffsets", "earliest")
    )
    source = source.option("qmq.servers", chosen.server).option(
        "maxBytesPerPartition", chosen.task_bytes
    )
    source = source.option("maxOffsetsPerTrigger", 400).option(
        "failOnDataLoss", str(not chosen.skip_lost).lower()
    )
    rows = (source.option("qmq.path", chosen.path) if chosen.path else source).load()
    slow = f.expr(
        f"aggregate(sequence(1, {chosen.slowness} + length(body) % 2), 0L, (sum, each) -> "
        "sum + each % 7)"
    )
    number = f.substring(f.col("body").cast("string"), 1, 7).cast("int")
    subject = (
        f.when(number % 2 == 0, chosen.subject + ".plain")
        .otherwise(chosen.subject + ".ordered")
        .alias("subject")
    )
    copied = rows.filter(slow > 0).select(
        "body", (number % 97).cast("string").alias("key"), subject
    )
    writer = (
        copied.writeStream.format("qmq")
        .option("qmq.servers", chosen.server)
        .option("qmq.batchMessages", 20)
    )
    writer = writer.option("checkpointLocation", chosen.checkpoint)
    writer = (
        writer.trigger(availableNow=True)
        if chosen.once
        else writer.trigger(processingTime="0 seconds")
    )
    writer.start().awaitTermination()
    spark.stop()


SCHEMA = "number bigint, key string, tag string, line string"


def sink(words: list[str]) -> None:
    """From Parquet files to a subject, until everything in the folder is written: each row is a
    message.
    """
    options = argparse.ArgumentParser(description=sink.__doc__)
    options.add_argument("--server", required=True)
    options.add_argument("--files", required=True)
    options.add_argument("--subject", required=True)
    options.add_argument("--checkpoint", required=True)
    options.add_argument("--per-trigger", default="3")
    chosen = options.parse_args(words)
    spark = session("sink", master=fast_session.MASTER, conf=fast_session.conf())
    rows = (
        spark.readStream.schema(SCHEMA)
        .option("maxFilesPerTrigger", chosen.per_trigger)
        .parquet(chosen.files)
    )
    query = (
        rows.selectExpr("key", "tag", "line as body")
        .writeStream.format("qmq")
        .option("qmq.servers", chosen.server)
        .option("subject", chosen.subject)
        .option("checkpointLocation", chosen.checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what in ("copy", "sink"):
        {"copy": copy, "sink": sink}[what](rest)
    else:
        {"stream": stream, "retries": retries}[what](*rest)
