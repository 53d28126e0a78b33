"""Streaming queries, as programs that a test kills: `spark_programs.py copy ...`, with slow rows,
small tasks and small batches, and `spark_programs.py sink ...`.
"""

from __future__ import annotations

import argparse
import sys

import fast_session
from pyspark.sql import functions as f
from pyspark_qmq.session import session

FAILURES = 40
"""Of a task: its Python process is killed, too."""


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
        "spark.task.maxFailures": str(FAILURES),
        "spark.deploy.maxExecutorRetries": "-1",
        "spark.executor.memory": "512m",
    }
    spark = session(
        "copy",
        master="local-cluster[2,1,512]" if chosen.executors else f"local[2,{FAILURES}]",
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
    {"copy": copy, "sink": sink}[sys.argv[1]](sys.argv[2:])
