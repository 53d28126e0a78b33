"""A streaming query from files to a subject, as a program that a test kills: it reads Parquet files, and writes each row as a message."""

from __future__ import annotations

import argparse

import fast_session
from pyspark_qmq.session import session

SCHEMA = "number bigint, key string, tag string, line string"


def main() -> None:
    """Run until everything in the folder is written."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--server", required=True)
    options.add_argument("--files", required=True)
    options.add_argument("--subject", required=True)
    options.add_argument("--checkpoint", required=True)
    options.add_argument("--per-trigger", default="3")
    chosen = options.parse_args()
    spark = session("sink", master=fast_session.MASTER, conf=fast_session.conf())
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", chosen.per_trigger).parquet(chosen.files)
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
    main()
