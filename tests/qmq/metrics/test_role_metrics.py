"""Each role as a process, as operators start it: the address of its metrics port, and the metrics
on that port.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from metric_pages import Values

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts"))

from cluster_runner import Cluster  # noqa: E402

QUICK = {"QMQ_ETCD_HEARTBEAT_MS": "50", "QMQ_ETCD_ELECTION_MS": "500"}


def page(address: str) -> Values:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        return Values(answer.read().decode())


def test_a_node_says_where_its_metrics_are_when_it_is_ready(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "qmq.cli",
        "dev",
        "--data",
        str(tmp_path / "node"),
        "--metrics-port",
        "0",
    ]
    ports = ["--port", "0", "--data-port", "0", "--control-port", "0"]
    with subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"metrics at (127\.0\.0\.1:\d+)\)", process.stdout.readline())
            assert found is not None
            values = page(found[1])
            assert {labels["broker_group"] for labels, _ in values.rows("qmq_serving")} == {
                "broker-0",
                "delay",
            }
            assert values("process_open_fds") > 0
        finally:
            process.terminate()


@pytest.mark.sampled
def test_the_compose_files_metaservers_brokers_and_delay_servers_show_theirs(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path / "cluster", environment=QUICK) as cluster:
        cluster.up(["meta0", "g1-a", "d1-a"])
        meta0, *others = [cluster.translate(f"{name}:20890") for name in ("meta0", "g1-a", "d1-a")]
        # A metaserver hears of replicas by its watch, perhaps a moment after they answer.
        while (meta := page(meta0))("qmq_broker_group_present_replicas", broker_group="d1") != 1:
            time.sleep(0.05)
        broker, delay = map(page, others)
    assert meta("qmq_broker_group_has_master", broker_group="g1") == 0, (
        "one replica of three is no majority"
    )
    assert meta("qmq_coordination_calls_total", method="list") > 0
    assert broker("qmq_serving", broker_group="g1") == 0
    assert broker("qmq_replica_info", replica="g1-a") == 1
    assert broker("qmq_coordination_calls_total", method="grant") > 0
    assert delay("qmq_delay_pending_messages", broker_group="d1") == 0
    assert not any(name.startswith("qmq_group") for name in delay.names)
