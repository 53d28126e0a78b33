"""Kubelets for a real API server: nodes that live on leases, and the pods that the scheduler binds to them as local processes.

What a kubelet does for a pod is in process_pod.py. It asks for the pods several times a second instead of watching them.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from cluster_runner.network import Loopback

from kubelet.control_plane import MERGE, ApiRefused, KubernetesApi
from kubelet.manifests import HOSTNAME, PodSet, pod_template
from kubelet.process_pod import LocalPods, ProcessPod

LOOK_S: Final = 0.2
LEASE_S: Final = 10.0
SPARE: Final = 6
"""Addresses for the pods of Deployments, whose names are random."""
COMPONENT: Final = "app.kubernetes.io/component"
CAPACITY: Final = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "512Gi", "pods": "110"}

Object = Mapping[str, Any]


class ProcessKubelet:
    """The kubelets of all nodes of one namespace. `hosts` as in LocalPods; names of the StatefulSets' pods are added."""

    def __init__(
        self, api: KubernetesApi, folder: Path, namespace: str, nodes: Sequence[str], sets: Sequence[PodSet], hosts: Mapping[str, str]
    ) -> None:
        self._api, self._namespace, self._nodes = api, namespace, tuple(nodes)
        stateful = {f"{each.name}-{number}": each.service for each in sets if each.is_stateful for number in range(each.replicas)}
        self._spare = [f"spare-{number}" for number in range(SPARE)]
        network = Loopback(folder, [*stateful, *self._spare])
        network.claim()
        self._addresses = network.addresses
        own = {f"{name}.{service}.{namespace}.svc": self._addresses[name] for name, service in stateful.items()}
        self._local = LocalPods(folder, {**hosts, **own})
        self._pods: dict[str, ProcessPod] = {}
        """By uid."""
        self._told: dict[str, object] = {}
        """What the API server was told last of each pod."""
        self.killed: list[str] = []
        """Pods that did not end within their grace."""
        self.restarts: dict[str, int] = {}
        self.ready: dict[str, int] = {}
        """Of each component, the pods that are ready now."""
        self.fewest_ready: dict[str, int] = {}
        """Of each component that `watch` was called for, the fewest since then."""
        self._task: asyncio.Task[None] | None = None

    @property
    def spare_addresses(self) -> list[str]:
        return [self._addresses[each] for each in self._spare]

    def watch(self, components: Sequence[str]) -> None:
        """Count from now on."""
        self.fewest_ready = {each: self.ready.get(each, 0) for each in components}

    async def start(self) -> None:
        """Register the nodes."""
        for node in self._nodes:
            metadata = {"name": node, "labels": {HOSTNAME: node, "kubernetes.io/os": "linux"}}
            await self._api.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
            await self._tell_node(node)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End all pods, and leave the API server alone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for pod in self._pods.values():
            pod.delete()
        await asyncio.gather(*[pod.gone() for pod in self._pods.values()])
        self._api.close()

    def raise_failures(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()
        for pod in self._pods.values():
            pod.raise_failure()

    # --- nodes ------------------------------------------------------------------------------------------------------------

    async def _tell_node(self, node: str) -> None:
        """Its status, and its lease. A node whose lease runs out loses its pods."""
        now = _now()
        conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now, "lastTransitionTime": now}]
        status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": conditions}
        await self._api.call("PATCH", f"/api/v1/nodes/{node}/status", {"status": status}, MERGE)
        moment = dt.datetime.now(dt.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        lease = {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": moment}
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        try:
            await self._api.call("PATCH", f"{path}/{node}", {"spec": lease}, MERGE)
        except ApiRefused as refused:
            if refused.status != 404:
                raise
            metadata = {"name": node, "namespace": "kube-node-lease"}
            made = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": lease}
            await self._api.call("POST", path, made)

    # --- pods -------------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        while True:
            if loop.time() - renewed_s > LEASE_S:
                renewed_s = loop.time()
                for node in self._nodes:
                    await self._tell_node(node)
            found = (await self._api.call("GET", f"/api/v1/namespaces/{self._namespace}/pods"))["items"]
            for each in found:
                if each["spec"].get("nodeName") in self._nodes:
                    await self._attend(each)
            self._forget({each["metadata"]["uid"] for each in found})
            self._count()
            await asyncio.sleep(LOOK_S)

    async def _attend(self, found: Object) -> None:
        metadata = found["metadata"]
        uid, name = metadata["uid"], metadata["name"]
        pod = self._pods.get(uid)
        if "deletionTimestamp" in metadata:
            if pod is not None and not pod.is_gone:
                pod.delete()
                await self._tell(found, pod)
                return
            await self._remove(name, uid)
            return
        if pod is None:
            template = pod_template(found)
            address = self._addresses[name] if name in self._addresses else self._free_address()
            pod = self._pods[uid] = self._local.start(name, found["spec"]["nodeName"], address, template)
        await self._tell(found, pod)

    def _free_address(self) -> str:
        taken = {each.address for each in self._pods.values()}
        return next(each for each in self.spare_addresses if each not in taken)

    async def _remove(self, name: str, uid: str) -> None:
        """Its process has ended: now its name is free for the next pod."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        with suppress(ApiRefused):  # it is gone already
            await self._api.call("DELETE", f"/api/v1/namespaces/{self._namespace}/pods/{name}", body)

    def _forget(self, there: set[str]) -> None:
        """Pods that the API server has no longer."""
        for uid, pod in list(self._pods.items()):
            if pod.restarts:
                self.restarts[pod.name] = pod.restarts
            if uid not in there and pod.is_gone:
                self.killed += [pod.name] if pod.was_killed else []
                del self._pods[uid]
                self._told.pop(uid, None)

    async def _tell(self, found: Object, pod: ProcessPod) -> None:
        """Its status, when it has changed."""
        is_ready = pod.ready_s is not None
        fact = (is_ready, pod.restarts)
        uid = found["metadata"]["uid"]
        if self._told.get(uid) == fact:
            return
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod.name}/status"
        body = {"metadata": {"uid": uid}, "status": _status(found, pod, is_ready=is_ready)}
        with suppress(ApiRefused):  # a pod that has gone meanwhile; another one of its name has another uid
            await self._api.call("PATCH", path, body, MERGE)
            self._told[uid] = fact

    def _count(self) -> None:
        self.ready = {}
        for pod in self._pods.values():
            component = pod.template.labels[COMPONENT]
            self.ready[component] = self.ready.get(component, 0) + (pod.ready_s is not None)
        for component, fewest in self.fewest_ready.items():
            self.fewest_ready[component] = min(fewest, self.ready.get(component, 0))


def _status(found: Object, pod: ProcessPod, *, is_ready: bool) -> dict[str, Any]:
    now, word = _now(), "True" if is_ready else "False"
    others = [each for each in found.get("status", {}).get("conditions", ()) if each["type"] == "PodScheduled"]
    conditions = [
        *others,
        {"type": "Initialized", "status": "True", "lastTransitionTime": now},
        {"type": "ContainersReady", "status": word, "lastTransitionTime": now},
        {"type": "Ready", "status": word, "lastTransitionTime": now},
    ]
    (container,) = found["spec"]["containers"]
    state = {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": is_ready,
        "started": is_ready,
        "restartCount": pod.restarts,
        "state": {"running": {"startedAt": found["metadata"]["creationTimestamp"]}},
    }
    addresses = {"podIP": pod.address, "podIPs": [{"ip": pod.address}], "hostIP": "127.0.0.1"}
    start = found.get("status", {}).get("startTime") or now
    return {"phase": "Running", "conditions": conditions, "containerStatuses": [state], "startTime": start, **addresses}


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
