"""Spark Connect: a client without a JVM reads, streams and writes by a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from publishing import create, send
from support import NodeProcess

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("connect")]

CLIENT = """
import json, sys
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark_qmq import register
from pyspark_qmq.stream import lag

url, servers, checkpoint = sys.argv[1:]
spark = SparkSession.builder.remote(url).getOrCreate()


def read(subject, **options):
    chosen = {"qmq.servers": servers, "subscribe": subject, **options}
    return spark.read.format("qmq").options(**chosen).load()


found = {"client": type(spark).__module__, "discovered": read("orders").count()}
register(spark)
register(spark)
found["registered"] = read("orders", keys="k1").count()
upper = read("orders").select("key", f.upper(f.col("body").cast("string")).alias("body"))
upper.write.format("qmq").mode("append").options(**{"qmq.servers": servers, "subject": "shouts"}).save()
stream = spark.readStream.format("qmq").options(**{"qmq.servers": servers, "subscribe": "shouts"})
stream = stream.options(startingOffsets="earliest", maxOffsetsPerTrigger="40").load()
writer = stream.select("key", "body").writeStream.format("qmq")
writer = writer.options(**{"qmq.servers": servers, "subject": "echoes", "checkpointLocation": checkpoint})
query = writer.trigger(availableNow=True).start()
query.awaitTermination()
found["lags"] = [lag(each) for each in query.recentProgress if each.numInputRows]
bodies = sorted(bytes(row.body).decode() for row in read("echoes").select("body").collect())
found["echoes"], found["first"], found["last"] = len(bodies), bodies[0], bodies[-1]
try:
    read("orders", startingOfsets="earliest").count()
except Exception as failure:
    found["refused"] = str(failure)
found["jvm"] = SparkContext._gateway is not None
print(json.dumps(found))
"""  # noqa: E501


def test_a_client_without_a_jvm_reads_streams_and_writes(
    connect_url: str, node_process: NodeProcess, tmp_path: Path
) -> None:
    server = node_process.start()
    create(server, "shouts", "echoes")
    bodies = [f"order {number:03}" for number in range(100)]
    send(server, "orders", bodies, keys=[f"k{number % 4}" for number in range(100)])
    no_java = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, connect_url, server, str(tmp_path / "checkpoint")],
        env={**no_java, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "did you mean 'startingOffsets'" in found.pop("refused")
    assert found == {
        "client": "pyspark.sql.connect.session",
        "discovered": 100,
        "registered": 25,
        "lags": [60, 20, 0],
        "echoes": 100,
        "first": "ORDER 000",
        "last": "ORDER 099",
        "jvm": False,
    }
