"""A Spark standalone cluster on this machine: a master and a worker as child processes, on loopback
and free ports.

pyspark_qmq.standalone starts them, as in docker-compose.yml. Each process leads a separate process
session, with its executors and their Python processes, and dies with the test process even if that
is killed.

A Spark program that reads and writes a secured cluster, in a separate process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fast_session

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from cluster_runner import processes
from cluster_runner.processes import Process

from qmq.security.contexts import CONTEXT_VARIABLE
from qmq.security.tls import Tls

UP_S = 120.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Standalone:
    """A running cluster."""

    url: str
    """For `master=`, such as spark://127.0.0.1:40123."""
    master: Process
    worker: Process
    logs: Path


@contextmanager
def standalone(folder: Path, *, cores: int = 2) -> Iterator[Standalone]:
    """Start master and worker, and wait until the worker is registered. All their processes are
    gone after the block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started: list[Process] = []
    try:
        master = _start(started, folder / "master.log", "master")
        url = _wait_for(master, folder / "master.log", r"Starting Spark master at (spark://\S+)")
        limits = ("--cores", str(cores), "--memory", "1g", "--work-dir", str(folder / "work"))
        worker = _start(started, folder / "worker.log", "worker", *limits, url)
        _wait_for(worker, folder / "worker.log", r"Successfully registered with master (\S+)")
        yield Standalone(url, master, worker, folder)
    finally:
        for each in reversed(started):  # the worker first: its executors go with it
            processes.kill(each)


def _start(started: list[Process], log: Path, role: str, *options: str) -> Process:
    quick = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": fast_session.java_options()}
    words = [
        sys.executable,
        "-m",
        "pyspark_qmq.standalone",
        role,
        "--host",
        LOOPBACK,
        "--port",
        "0",
        "--webui-port",
        "0",
        *options,
    ]
    started.append(processes.spawn(words, {**os.environ, **quick}, log, dies_with_us=True))
    return started[-1]


def _wait_for(process: Process, log: Path, pattern: str) -> str:
    def found() -> re.Match[str] | None:
        return re.search(pattern, log.read_text(errors="replace"))

    processes.until(lambda: found() is not None or processes.state(process) == "dead", UP_S)
    match = found()
    if match is None:
        raise AssertionError(f"{pattern!r} is not in {log}:\n{log.read_text(errors='replace')}")
    return match[1]


MESSAGES = 1000


PROGRAM = """
import json, sys, urllib.request
from pyspark_qmq import session

master, conf, servers, shown, stream = sys.argv[1:]
spark = session.session("secured", master=master, conf=json.loads(conf))


def read(subject):
    return spark.read.format("qmq").option("qmq.servers", servers).option("subscribe", subject).option("minPartitions", "2").load()


orders = read("orders").select("key", "body")
orders.write.format("qmq").mode("append").option("qmq.servers", servers).option("subject", "copies").save()
streamed = spark.readStream.format("qmq").option("qmq.servers", servers).option("subscribe", "orders").option("startingOffsets", "earliest")
copies = streamed.load().select("key", "body").writeStream.format("qmq").option("qmq.servers", servers).option("subject", "copies")
copies.option("checkpointLocation", stream).trigger(availableNow=True).start().awaitTermination()

refused = []
for work in (
    lambda: read("payments").count(),
    lambda: orders.write.format("qmq").mode("append").option("qmq.servers", servers).option("subject", "payments").save(),
):
    try:
        work()
    except Exception as failure:
        refused.append(str(failure))

context = spark.sparkContext
texts = [orders._jdf.queryExecution().toString(), context._conf.toDebugString(), *refused]
texts += [f"{name}={value}" for row in spark.sql("set -v").collect() for name, value in [row[:2]]]
api = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}"
for page in ("environment", "executors", "jobs", "stages?details=true", "sql?details=true&planDescription=true"):
    texts.append(urllib.request.urlopen(f"{api}/{page}").read().decode())
for page in ("environment", "SQL", "StreamingQuery"):
    texts.append(urllib.request.urlopen(f"{context.uiWebUrl}/{page}/").read().decode())
open(shown, "w").write("\\n".join(texts))
print(json.dumps({"read": orders.count(), "refused": refused}))
"""  # noqa: E501


def drive(
    folder: Path, master: str, server: str, variables: Mapping[str, str], conf: Mapping[str, str]
) -> tuple[dict[str, Any], str]:
    """Run a driver as a process. Returns the JSON that it printed, and everything that Spark showed
    and logged about it.
    """
    logs = folder / "events"
    logs.mkdir()
    settings = {
        **fast_session.conf(),
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": fast_session.java_options(),
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": logs.as_uri(),
        **conf,
    }
    shown = folder / "shown"
    words = [
        sys.executable,
        "-c",
        PROGRAM,
        master,
        json.dumps(settings),
        server,
        str(shown),
        str(folder / "checkpoint"),
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("QMQ_T")}
    environment = {**clean, CONTEXT_VARIABLE: "", "SPARK_LOCAL_IP": LOOPBACK, **variables}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    events = [path.read_text() for path in logs.rglob("*") if path.is_file()]
    assert events
    return json.loads(done.stdout.splitlines()[-1]), "\n".join(
        [shown.read_text(), done.stdout, done.stderr, *events]
    )


def variables(tls: Tls) -> dict[str, str]:
    found = {"QMQ_TLS_CA": str(tls.ca)}
    return (
        found
        if tls.cert is None
        else {**found, "QMQ_TLS_CERT": str(tls.cert), "QMQ_TLS_KEY": str(tls.key)}
    )
