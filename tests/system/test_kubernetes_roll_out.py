"""The chart's pods as local processes, with their probes, grace and budgets: what clients see of an
upgrade and of a drained node.

`QMQ_ROLL_OUT_PRODUCERS=8 QMQ_ROLL_OUT_BATCH=200 … pytest -n 0 -s` loads more and prints the
figures.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kubelet.manifests import BATCH, NODES, OPTIONS, PRODUCERS, rendered
from kubelet.process_kubernetes import ProcessKubernetes
from qmq_coordination.etcd.process import EtcdProcess
from support import needs
from system.workload import Workload

import qmq
from qmq.security.certificates import issue

pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.longest, needs.helm, needs.etcd]
GROUPS = ("qmq-g1", "qmq-g2")
SECURED = ",tls.enabled=true,tls.issuer.name=test"


@pytest.mark.parametrize("values", ["", SECURED], ids=["plain", "secured"])
async def test_clients_see_no_error_of_a_rolling_upgrade_and_of_a_drained_node(
    own_etcd: EtcdProcess, tmp_path: Path, values: str
) -> None:
    hosts = {"etcd.test:2379": own_etcd.endpoint.removeprefix("http://")}
    kubernetes = ProcessKubernetes(
        tmp_path, rendered(f"image.tag=first{values}", *OPTIONS), NODES, hosts
    )
    try:
        await kubernetes.rolled_out()
        server = ",".join(f"{address}:20880" for address in kubernetes.addresses("qmq-meta"))
        orders = await enforce_rules(server, tmp_path / "authority") if values else None
        work = Workload(
            server,
            "orders",
            tmp_path / "history.jsonl",
            producers=PRODUCERS,
            batch=BATCH,
            tls=orders,
        )
        await work.start()
        begin_s = time.monotonic()
        await work.wait_for_acks(500, within_s=120.0)

        work.note("upgrade")
        kubernetes.apply(rendered(f"image.tag=second{values}", *OPTIONS))
        await kubernetes.rolled_out(within_s=600.0)
        await work.wait_for_acks(500, within_s=120.0)

        node = kubernetes.node_of("qmq-g1-0")
        work.note(f"drain {node}")
        print(f"drained in {await kubernetes.drain(node):.1f} s")
        await kubernetes.rolled_out()
        assert kubernetes.node_of("qmq-g1-0") != node
        await work.wait_for_acks(500, within_s=120.0)

        seconds = time.monotonic() - begin_s
        report = await work.stop()
        print(f"{report}; {report.acked / seconds:,.0f} messages/s")
    finally:
        await kubernetes.stop()
    assert not report.anomalies, [*map(str, report.anomalies)]
    assert (report.counts["failed"], report.counts["unknown"]) == (0, 0)
    assert [kubernetes.fewest_ready[group] for group in GROUPS] == [2, 2], (
        "the budget's one, and never more, is away"
    )
    assert kubernetes.killed == [], "every pod ends within its grace"
    assert kubernetes.restarts() == {}
    assert "Traceback" not in kubernetes.logs()


async def enforce_rules(server: str, authority: Path) -> qmq.Tls:
    """Let one application use the subject, and nobody else anything. Returns its certificate."""
    shown = {}
    for kind, name in (("op", "admin"), ("app", "orders")):
        made = issue(authority, name, kind)
        shown[name] = qmq.Tls(authority / "ca.pem", made.cert, made.key)
    async with qmq.connect(server, tls=shown["admin"]) as admin:
        await admin.access.put_rule("op:admin", [], "cluster")
        await admin.access.put_rule("app:orders", [], "subject", "orders")
        await admin.access.put_rule("app:orders", [], "group", "*")
        await admin.access.set_mode("enforce")
    return shown["orders"]
