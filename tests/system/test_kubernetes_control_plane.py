"""The chart in Kubernetes' own API server, scheduler and controllers: an upgrade and a drained node
under load. Only the kubelet is ours.

It is one of the form `all`: the programs take six minutes of CPU to build, which CI does not have.
`QMQ_ROLL_OUT_PRODUCERS=8 QMQ_ROLL_OUT_BATCH=200 … pytest -n 0 -s` loads more and prints the
figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest
from kubelet.manifests import BATCH, NODES, OPTIONS, PRODUCERS, pod_sets, rendered
from kubelet.process_kubelet import (
    MERGE,
    ApiRefused,
    ControlPlane,
    KubernetesApi,
    ProcessKubelet,
    apply_all,
    make_secrets,
)
from support import needs
from support.etcd_process import EtcdProcess
from system.workload import Workload

import qmq
from qmq.security.certificates import issue

pytestmark = [
    pytest.mark.xdist_group("faults"),
    pytest.mark.longest,
    needs.helm,
    needs.etcd,
    needs.control_plane,
]
GROUPS: Final = ("g1", "g2")
SECURED: Final = ",tls.enabled=true,tls.issuer.name=test"
RESTRICTED: Final = {
    "apiVersion": "v1",
    "kind": "Namespace",
    "metadata": {"name": "qmq", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
}
PODS: Final = "/api/v1/namespaces/qmq/pods"


def volumes(folder: Path) -> list[dict[str, Any]]:
    """One for each replica. They can be used at every node, as those of a network storage."""
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"data-{group}-{number}"},
            "spec": {
                "capacity": {"storage": "100Gi"},
                "accessModes": ["ReadWriteOnce"],
                "claimRef": {"namespace": "qmq", "name": f"data-qmq-{group}-{number}"},
                "hostPath": {"path": str(folder)},
            },
        }
        for group in GROUPS
        for number in range(3)
    ]


class Operator:
    """What an operator does at the API server."""

    def __init__(self, api: KubernetesApi, kubelet: ProcessKubelet) -> None:
        self._api, self._kubelet = api, kubelet

    async def until(self, is_so: Callable[[], Awaitable[bool]], within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while not await is_so():
                self._kubelet.raise_failures()
                await asyncio.sleep(0.2)

    async def rolled_out(self, *, within_s: float = 600.0) -> None:
        """As `kubectl rollout status` of all."""
        await self.until(self._is_rolled_out, within_s)

    async def _is_rolled_out(self) -> bool:
        for plural in ("statefulsets", "deployments"):
            for each in (await self._api.call("GET", f"/apis/apps/v1/namespaces/qmq/{plural}"))[
                "items"
            ]:
                status, wanted = each["status"], each["spec"]["replicas"]
                counts = [
                    status.get(name, 0)
                    for name in ("replicas", "updatedReplicas", "availableReplicas")
                ]
                if (
                    status.get("observedGeneration") != each["metadata"]["generation"]
                    or counts != [wanted] * 3
                ):
                    return False
        return True

    async def pods(self) -> dict[str, str]:
        """Each pod and its node."""
        found = (await self._api.call("GET", PODS))["items"]
        return {each["metadata"]["name"]: each["spec"].get("nodeName", "") for each in found}

    async def drain(self, node: str, *, within_s: float = 120.0) -> float:
        """As `kubectl drain`. Returns the seconds it took."""
        begin_s = time.monotonic()
        await self._api.call(
            "PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}}, MERGE
        )
        evicted: set[str] = set()

        async def is_empty() -> bool:
            there = [name for name, place in (await self.pods()).items() if place == node]
            for name in set(there) - evicted:
                if await self._evict(name):
                    evicted.add(name)
            return not there

        await self.until(is_empty, within_s)
        return time.monotonic() - begin_s

    async def _evict(self, pod: str) -> bool:
        """False while a budget forbids it."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": "qmq"},
        }
        try:
            await self._api.call("POST", f"{PODS}/{pod}/eviction", body)
        except ApiRefused as refused:
            if refused.status != 429:
                raise
            return False
        return True


@pytest.mark.parametrize("values", ["", SECURED], ids=["plain", "secured"])
async def test_the_real_controllers_upgrade_and_drain_without_an_error_at_a_client(
    own_etcd: EtcdProcess, tmp_path: Path, values: str
) -> None:
    plane = ControlPlane(tmp_path / "plane", own_etcd.endpoint)
    await plane.start()
    hosts = {"etcd.test:2379": own_etcd.endpoint.removeprefix("http://")}
    first = rendered(f"image.tag=first{values}", *OPTIONS, "--no-hooks")
    kubelet = ProcessKubelet(plane.api(), tmp_path, "qmq", NODES, pod_sets(first), hosts)
    make_secrets(first, tmp_path, kubelet.addresses)
    api = plane.api()
    operator = Operator(api, kubelet)
    try:
        await apply_all(api, [RESTRICTED, *volumes(tmp_path)])
        await kubelet.start()
        await apply_all(api, first)
        await operator.rolled_out()
        placed = await operator.pods()
        for group in GROUPS:
            assert len({placed[f"qmq-{group}-{number}"] for number in range(3)}) == 3, (
                "no two replicas share a node"
            )
        server = ",".join(f"{address}:20880" for address in kubelet.spare_addresses)
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
        kubelet.watch(GROUPS)

        work.note("upgrade")
        await apply_all(api, rendered(f"image.tag=second{values}", *OPTIONS, "--no-hooks"))
        await operator.rolled_out()
        await work.wait_for_acks(500, within_s=120.0)

        node = (await operator.pods())["qmq-g1-0"]
        work.note(f"drain {node}")
        print(f"drained in {await operator.drain(node):.1f} s")
        await operator.rolled_out()
        assert (await operator.pods())["qmq-g1-0"] != node
        await work.wait_for_acks(500, within_s=120.0)

        seconds = time.monotonic() - begin_s
        report = await work.stop()
        print(f"{report}; {report.acked / seconds:,.0f} messages/s")
    finally:
        await kubelet.stop()
        api.close()
        await plane.stop()
    assert not report.anomalies, [*map(str, report.anomalies)]
    assert (report.counts["failed"], report.counts["unknown"]) == (0, 0)
    assert kubelet.fewest_ready == {"g1": 2, "g2": 2}, "the budget's one, and never more, is away"
    assert kubelet.killed == [], "every pod ends within its grace"
    assert kubelet.restarts == {}
    assert "Traceback" not in kubelet.logs()


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
