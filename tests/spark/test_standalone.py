"""The data source on a Spark standalone cluster: a master, a worker and its executor, each in its
own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fast_session
import pytest
from fast_session import LOOPBACK, Standalone, processes, standalone
from support import NodeProcess

import qmq

pytestmark = pytest.mark.xdist_group("drivers")
MESSAGES = 3000

READ = """
import json, os, sys
from pyspark_qmq import session
spark = session.session("standalone", master=sys.argv[1], conf=json.loads(sys.argv[2]))
read = spark.read.format("qmq").option("qmq.servers", sys.argv[3]).option("subscribe", "orders").option("minPartitions", "4").load()
first, *_, last = sorted(bytes(row.body) for row in read.select("body").collect())
counts = read.selectExpr("count(*)", "count(distinct body)", "count(distinct sequence)").first()
executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
print(json.dumps({"counts": list(counts), "first": first.decode(), "last": last.decode(), "executors": executors}))
"""  # noqa: E501


def run(cluster: Standalone, program: str, *words: str) -> dict[str, object]:
    """Run a driver in a separate process. Returns the JSON that it printed."""
    conf = {
        **fast_session.conf(),
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": fast_session.java_options(),
    }
    command = [sys.executable, "-c", program, cluster.url, json.dumps(conf), *words]
    done = subprocess.run(
        command,
        env={**os.environ, "SPARK_LOCAL_IP": LOOPBACK},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.longest
async def test_a_cluster_reads_each_message_once_and_nothing_outlives_a_block_that_failed(
    tmp_path: Path, node_process: NodeProcess
) -> None:
    address = node_process.start()
    async with qmq.connect(address) as client:
        await client.send_many("orders", [b"%06d" % number for number in range(MESSAGES)])
    with pytest.raises(ZeroDivisionError), standalone(tmp_path / "cluster") as cluster:
        found = run(cluster, READ, address)
        assert found == {
            "counts": [MESSAGES] * 3,
            "first": "000000",
            "last": f"{MESSAGES - 1:06d}",
            "executors": 1,
        }
        leaders = [cluster.master, cluster.worker]
        seen = [*leaders, *(each for leader in leaders for each in processes.members(leader))]
        assert {processes.state(each) for each in leaders} == {"running"}
        raise ZeroDivisionError
    assert {processes.state(each) for each in seen} == {"dead"}
