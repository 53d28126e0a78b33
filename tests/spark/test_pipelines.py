"""Declarative pipelines by `spark-pipelines run`: from a subject into tables, and back into a
subject.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import fast_session
import pytest
from publishing import change_route, create, create_ordered, send_ordered
from support import NodeProcess

import qmq
from qmq.proto.v1 import meta_pb2 as pb

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("connect")]

SPEC = """
name: bank
storage: {storage}
libraries:
  - glob:
      include: flows/**
"""

FLOWS = """
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()
QMQ = {{"qmq.servers": "{server}"}}


@dp.table
def payments() -> DataFrame:
    asked = {{"subscribe": "bank", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "100"}}
    log = spark.readStream.format("qmq").options(**QMQ, **asked).load()
    account = f.col("key").cast("string").alias("account")
    cents = f.col("body").cast("string").cast("long").alias("cents")
    return log.select(account, cents, f.struct("route_version", "sequence").alias("at"))


@dp.materialized_view
def accounts() -> DataFrame:
    newest = f.max_by("cents", "at").alias("newest")
    return spark.read.table("payments").groupBy("account").agg(f.count("*").alias("n"), newest)


dp.create_sink("alerts", "qmq", {{**QMQ, "subject": "alerts"}})


@dp.append_flow(target="alerts", name="large")
def large() -> DataFrame:
    rows = spark.readStream.table("payments").where("cents >= 390")
    return rows.selectExpr("account as key", "cast(cents as string) as body")
"""


def run(folder: Path, url: str, *words: str) -> str:
    """`spark-pipelines`; what it printed."""
    program = str(fast_session.spark_home() / "bin" / "spark-pipelines")
    done = subprocess.run(
        [program, "--remote", url, *words, "--spec", str(folder / "spark-pipeline.yml")],
        env=fast_session.java_variables(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows_of_table(url: str, table: str) -> list[tuple[object, ...]]:
    from pyspark.sql.connect.session import SparkSession

    spark = SparkSession.builder.remote(url).create()
    try:
        return sorted(tuple(row) for row in spark.read.table(table).collect())
    finally:
        spark.stop()


def bodies(server: str, subject: str) -> list[str]:
    async def work() -> list[str]:
        async with qmq.connect(server) as mq:
            return sorted([each.body.decode() async for each in mq.browse(subject)])

    return asyncio.run(work())


def test_a_pipeline_continues_across_a_route_change_and_writes_alerts_once(
    connect_url: str, node_process: NodeProcess, tmp_path: Path
) -> None:
    server = node_process.start()
    create_ordered(server, "bank", partitions=2)
    create(server, "alerts")
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "bank.py").write_text(FLOWS.format(server=server))
    storage = (tmp_path / "storage").as_uri()
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.format(storage=storage))

    def more(first: int, end: int) -> None:
        pairs = [(f"account-{number % 10}", str(number)) for number in range(first, end)]
        send_ordered(server, "bank", pairs)

    more(0, 250)
    run(tmp_path, connect_url, "run")
    assert len(rows_of_table(connect_url, "payments")) == 250
    change_route(server, "bank", split=pb.SplitOperation(partition=1, at=[200]))
    more(250, 400)
    run(tmp_path, connect_url, "run")
    payments = rows_of_table(connect_url, "payments")
    assert sorted(row[1] for row in payments) == list(range(400))  # type: ignore[type-var]
    assert rows_of_table(connect_url, "accounts") == [
        (f"account-{number}", 40, 390 + number) for number in range(10)
    ]
    assert bodies(server, "alerts") == [str(number) for number in range(390, 400)]
