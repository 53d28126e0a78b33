"""A Spark program that reads and writes a secured cluster, in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fast_session
from standalone import LOOPBACK

from qmq.security.contexts import CONTEXT_VARIABLE
from qmq.security.tls import Tls

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
"""


def drive(folder: Path, master: str, server: str, variables: Mapping[str, str], conf: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Run a driver as a process. Returns the JSON that it printed, and everything that Spark showed and logged about it."""
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
    words = [sys.executable, "-c", PROGRAM, master, json.dumps(settings), server, str(shown), str(folder / "checkpoint")]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("QMQ_T")}
    environment = {**clean, CONTEXT_VARIABLE: "", "SPARK_LOCAL_IP": LOOPBACK, **variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    events = [path.read_text() for path in logs.rglob("*") if path.is_file()]
    assert events
    return json.loads(done.stdout.splitlines()[-1]), "\n".join([shown.read_text(), done.stdout, done.stderr, *events])


def variables(tls: Tls) -> dict[str, str]:
    found = {"QMQ_TLS_CA": str(tls.ca)}
    return found if tls.cert is None else {**found, "QMQ_TLS_CERT": str(tls.cert), "QMQ_TLS_KEY": str(tls.key)}
