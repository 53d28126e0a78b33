"""Spark, as a server with the data source: a program without a JVM is its client (Spark Connect).
Tables are Parquet files in the folder, and Derby, which Spark brings, remembers them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark_qmq.java import cache_folder, java_home
from pyspark_qmq.session import home_without_archive

START_S: Final = 180.0
STARTED: Final = re.compile(r"Connect server started at: ?\S*:(\d+)")


@contextmanager
def spark_server(folder: Path, master: str, host: str) -> Iterator[str]:
    """Start a Spark Connect server on a free port of `host`, and yield its URL."""
    log = folder / "spark.log"
    environment = _environment(host)
    command = [f"{environment['SPARK_HOME']}/bin/spark-submit", "--master", master]
    for name, value in _settings(folder, host).items():
        command += ["--conf", f"{name}={value}"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    with log.open("w") as output:
        server = subprocess.Popen(  # noqa: S603
            [*command, "spark-internal"],
            cwd=folder,  # for the log of Derby
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"sc://{host}:{_port(server, log)}"
    finally:
        server.terminate()
        server.wait()


def _settings(folder: Path, host: str) -> dict[str, str]:
    return {
        "spark.connect.grpc.binding.address": host,
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.bindAddress": host,
        "spark.driver.host": host,
        "spark.driver.memory": "2g",
        "spark.hadoop.javax.jdo.option.ConnectionURL": (
            f"jdbc:derby:;databaseName={folder}/catalog;create=true"
        ),
        "spark.log.level": "INFO",  # which tells the port
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.warehouse.dir": str(folder / "tables"),
        "spark.ui.enabled": "false",
    }


def _environment(host: str) -> Mapping[str, str]:
    cache = cache_folder(os.environ)
    return {
        **os.environ,
        "JAVA_HOME": str(java_home(os.environ, cache)),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(home_without_archive(cache)),
        "SPARK_LOCAL_IP": host,
    }


def _port(server: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < until:
        if found := STARTED.search(log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"Spark did not start: see {log}")
