"""What a user meets first: another Python, wrong addresses, a missing subject; and the line of each
micro-batch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import fast_session
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark_qmq.java import java_home
from pyspark_qmq.progress_lines import ProgressLines, line_of
from sink_node import NodeThread, node_thread

NOBODY = "127.0.0.1:1"
"""Nobody listens on this port."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeThread]:
    with node_thread(tmp_path_factory.mktemp("node"), auto_create=True) as found:
        yield found


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeThread]:
    """A node that creates no subject at its first message."""
    with node_thread(tmp_path_factory.mktemp("closed"), auto_create=False) as found:
        yield found


def rows(spark: SparkSession) -> DataFrame:
    return spark.range(100).selectExpr("cast(id as string) as body")


def save(rows: DataFrame, servers: str, subject: str, **options: str) -> None:
    writer = rows.write.format("qmq").mode("append").options(**options)
    writer.option("qmq.servers", servers).option("subject", subject).save()


def refused(failure: PySparkException, sentence: str) -> None:
    """The sentence is the last line of the Python traceback that the user sees."""
    text = str(failure).split("JVM stacktrace:")[0].replace("SQLSTATE: 38000", "")
    lines = [each for each in text.splitlines() if each.strip()]
    assert re.search(sentence, lines[-1]), lines


# --- subjects -------------------------------------------------------------------------------------


def test_a_write_creates_a_missing_subject_as_a_first_message_does(
    spark: SparkSession, node: NodeThread
) -> None:
    save(rows(spark), node.address, "fresh")
    assert node.bodies("fresh") == sorted(b"%d" % row for row in range(100))


def test_where_first_messages_create_no_subject_a_write_is_refused_in_one_sentence(
    spark: SparkSession, closed: NodeThread
) -> None:
    with pytest.raises(PySparkException) as failure:
        save(rows(spark), closed.address, "fresh")
    refused(failure.value, r"UnknownSubject: .*no subject 'fresh': .*qmq subject create fresh")


def test_a_write_that_is_to_create_no_subject_is_refused_in_the_same_way(
    spark: SparkSession, node: NodeThread
) -> None:
    with pytest.raises(PySparkException) as failure:
        save(rows(spark), node.address, "misspelt", createSubject="false")
    refused(failure.value, r"UnknownSubject: .*no subject 'misspelt'")


def test_a_stream_creates_its_subject_too(
    spark: SparkSession, node: NodeThread, tmp_path: Path
) -> None:
    save(rows(spark), node.address, "source")
    read = spark.readStream.format("qmq").option("qmq.servers", node.address)
    written = read.option("subscribe", "source").option("startingOffsets", "earliest").load()
    query = (
        written.select("body")
        .writeStream.format("qmq")
        .option("qmq.servers", node.address)
        .option("subject", "copy")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert node.bodies("copy") == node.bodies("source")


def test_a_read_of_a_missing_subject_names_those_that_are_like_it(
    spark: SparkSession, node: NodeThread
) -> None:
    node.create("orders")
    read = spark.read.format("qmq").option("qmq.servers", node.address).option("subscribe", "order")
    with pytest.raises(PySparkException) as failure:
        read.load().count()
    refused(failure.value, r"UnknownSubject: .*no subject 'order': did you mean 'orders'")


# --- addresses ------------------------------------------------------------------------------------


def test_a_read_without_a_server_names_the_address(spark: SparkSession) -> None:
    read = spark.read.format("qmq").option("qmq.servers", NOBODY).option("subscribe", "orders")
    with pytest.raises(PySparkException) as failure:
        read.load().count()
    refused(failure.value, rf"NotConnected: .*answers at {NOBODY}: is `qmq dev` running there")


def test_a_write_without_a_server_names_the_address(spark: SparkSession) -> None:
    with pytest.raises(PySparkException) as failure:
        save(rows(spark), NOBODY, "orders", **{"qmq.retryMs": "0"})
    refused(failure.value, rf"NotConnected: .*answers at {NOBODY}: is `qmq dev` running there")


# --- progress -------------------------------------------------------------------------------------


def test_each_micro_batch_has_a_line_with_its_rows_and_its_lag(
    spark: SparkSession, node: NodeThread, tmp_path: Path
) -> None:
    save(rows(spark), node.address, "lines")
    lines: SimpleQueue[str] = SimpleQueue()
    listener = ProgressLines(lines.put)
    spark.streams.addListener(listener)
    try:
        read = spark.readStream.format("qmq").option("qmq.servers", node.address)
        query = (
            read.option("subscribe", "lines")
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", "60")
            .load()
            .writeStream.format("noop")
            .queryName("counted")
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        read_rows, lags = list[int](), list[int]()
        while sum(read_rows) < 100:
            if "counted" in (line := lines.get(timeout=60)):
                read_rows.append(int(re.findall(r"(\d+) rows,", line)[0]))
                lags.append(int(line.rpartition("lag ")[2]))
    finally:
        spark.streams.removeListener(listener)
    assert len(read_rows) > 1
    assert lags == [100 - sum(read_rows[: at + 1]) for at in range(len(read_rows))]


def test_a_line_of_another_source_has_no_lag() -> None:
    source = {"latestOffset": 7, "endOffset": 5}
    progress: Any = SimpleNamespace(
        name=None,
        id="9f",
        batchId=3,
        numInputRows=0,
        processedRowsPerSecond=float("nan"),
        json=json.dumps({"sources": [source]}),
    )
    assert line_of(progress) == "qmq: 9f, batch 3: 0 rows"


# --- other Pythons --------------------------------------------------------------------------------

UNNAMED = """
import sys
from pyspark.sql import SparkSession
import pyspark_qmq
spark = SparkSession.builder.master("local[1]").getOrCreate()
pyspark_qmq.register(spark)
print(len(spark.read.format("qmq").load().columns))
"""


def driver(folder: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with plain PySpark, where the first python3 on PATH has no packages."""
    other = folder / "bin" / "python3"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    other.chmod(0o755)
    settings = [f"--conf {name}={value!r}" for name, value in fast_session.conf().items()]
    known = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    known |= {
        "JAVA_HOME": str(java_home(os.environ, folder)),
        "PATH": f"{other.parent}:{os.environ['PATH']}",
        "PYSPARK_SUBMIT_ARGS": " ".join([*settings, "pyspark-shell"]),
        "SPARK_LOCAL_IP": "127.0.0.1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        env=known,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.long
@pytest.mark.xdist_group("drivers")
def test_a_local_session_of_plain_pyspark_runs_this_python_where_none_is_named(
    tmp_path: Path,
) -> None:
    done = driver(tmp_path, UNNAMED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1]) > 10


@pytest.mark.parametrize("module", ["source", "reader", "stream", "lake_reader", "sink.writer"])
def test_a_python_without_a_package_says_so_in_one_sentence(module: str) -> None:
    """Spark's processes import one of these modules first."""
    program = f"import sys; sys.modules['google_crc32c'] = None; import pyspark_qmq.{module}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert sys.executable in last
    assert "google_crc32c: set PYSPARK_PYTHON" in last
