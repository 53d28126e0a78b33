"""Spark against a broker with TLS and enforced rules: the reader, the sink, and which credentials Spark's web pages show."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fast_session
import pytest
from standalone import LOOPBACK, standalone
from support import eventually, node_config
from test_tls import Papers

import qmq
from qmq.node.dev_node import Node
from qmq.rpc.tls_network import TlsNetwork
from qmq.security.contexts import CONTEXT_VARIABLE
from qmq.security.tls import Credentials, Tls

pytestmark = pytest.mark.xdist_group("drivers")
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


@asynccontextmanager
async def closed(folder: Path, tls: Tls, client: Tls) -> AsyncIterator[tuple[Node, qmq.Client]]:
    """A node that enforces rules: `app:reports` may read `orders` and write `copies`, and nothing else."""
    node = Node(node_config(folder), network=TlsNetwork(Credentials(tls)))
    await node.start()
    try:
        async with qmq.connect(node.address, tls=client) as first:
            token = (await first.access.create_token("op:admin")).token
        await eventually(lambda: bool(node.view.access.tokens))
        async with qmq.connect(node.address, tls=client, token=token) as operator:
            await operator.send_many("orders", [b"%d" % number for number in range(MESSAGES)])
            for subject in ("payments", "copies"):
                await operator.metadata.create_subject(qmq.SubjectConfig(subject))
            await operator.access.put_rule("app:reports", ["browse"], "subject", "orders")
            await operator.access.put_rule("app:reports", ["produce", "browse"], "subject", "copies")
            await operator.access.put_rule("op:admin", [], "cluster")
            for kind in ("subject", "group"):
                await operator.access.put_rule("op:admin", [], kind)
            await operator.access.set_mode("enforce")
            await eventually(lambda: node.view.access.mode.value == "enforce")
            yield node, operator
    finally:
        await node.stop()


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


async def check(found: dict[str, Any], operator: qmq.Client) -> None:
    """The reader read all, the sink wrote all, twice; and what no rule allows was refused, by name."""
    assert found["read"] == MESSAGES
    assert len(found["refused"]) == 2
    assert all("app:reports may not" in each and "payments" in each for each in found["refused"]), found["refused"]
    copies = list[bytes]()
    async with operator.consumer("copies", "g") as consumer:
        while len(copies) < 2 * MESSAGES:
            copies += (await consumer.pull(2 * MESSAGES)).bodies
    assert sorted(copies) == sorted([b"%d" % number for number in range(MESSAGES)] * 2)


def variables(tls: Tls) -> dict[str, str]:
    found = {"QMQ_TLS_CA": str(tls.ca)}
    return found if tls.cert is None else {**found, "QMQ_TLS_CERT": str(tls.cert), "QMQ_TLS_KEY": str(tls.key)}


@pytest.mark.sampled
async def test_spark_reads_and_writes_what_its_certificate_may(tmp_path: Path) -> None:
    papers = Papers(tmp_path / "papers")
    reports = papers.of("reports", "app")
    async with closed(tmp_path / "data", papers.server, papers.client) as (node, operator):
        found, shown = await asyncio.to_thread(drive, tmp_path, "local[2]", node.address, variables(reports), {})
        await check(found, operator)
    assert reports.key is not None
    secret = reports.key.read_text().splitlines()[1]
    assert secret not in shown


@pytest.mark.long
async def test_executors_of_a_cluster_get_a_token_that_no_page_of_spark_shows(tmp_path: Path) -> None:
    papers = Papers(tmp_path / "papers")
    server = replace(papers.server, requires_clients=False)
    async with closed(tmp_path / "data", server, papers.ca_only) as (node, operator):
        token = (await operator.access.create_token("app:reports")).token
        given = {**variables(papers.ca_only), "QMQ_TOKEN": token}
        with standalone(tmp_path / "cluster") as cluster:
            conf = {f"spark.executorEnv.{name}": value for name, value in given.items()}
            found, shown = await asyncio.to_thread(drive, tmp_path, cluster.url, node.address, given, conf)
        await check(found, operator)
        logs = "\n".join(
            path.read_text(errors="replace") for path in (tmp_path / "cluster").rglob("*") if path.is_file() and path.suffix != ".jar"
        )
    assert "spark.executorEnv.QMQ_TOKEN" in shown, "the page of the environment was looked at"
    assert token.split("_", 2)[2] not in shown
    assert token.split("_", 2)[2] not in logs
