"""Kubernetes' own API server, scheduler and controllers as local processes
(`scripts/kubernetes_tools --all` builds them).

Nodes and pods are the business of kubelets.

Kubelets for a real API server: nodes that live on leases, and the pods that the scheduler binds to
them as local processes.

What a kubelet does for a pod is in process_kubernetes.py. It asks for the pods several times a
second instead of watching them.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import http.client
import json
import os
import secrets
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from cluster_runner import processes
from cluster_runner.network import Loopback
from cluster_runner.processes import Process
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kubelet.manifests import HOSTNAME, PodSet, pod_template
from kubelet.process_kubernetes import LocalPods, ProcessPod
from support import needs
from support.etcd_process import free_ports

PLURALS: Final = {
    "Namespace": "namespaces",
    "Node": "nodes",
    "PersistentVolume": "persistentvolumes",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "StatefulSet": "statefulsets",
    "Deployment": "deployments",
    "NetworkPolicy": "networkpolicies",
}
CONTROLLERS: Final = (
    "statefulset-controller",
    "deployment-controller",
    "replicaset-controller",
    "disruption-controller",
    "node-lifecycle-controller",
    "persistentvolume-binder-controller",
    "serviceaccount-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
)
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
GRACE_S: Final = 10.0


class ApiRefused(Exception):
    """The API server's answer is an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class KubernetesApi:
    """One connection to an API server, for one task at a time."""

    def __init__(self, port: int, token: str, certificate: Path) -> None:
        self._port, self._token = port, token
        self._trust = ssl.create_default_context(cafile=str(certificate))
        self._connection: http.client.HTTPSConnection | None = None

    async def call(
        self, method: str, path: str, body: object = None, kind: str = "application/json"
    ) -> Any:
        """The answer. Raises ApiRefused, OSError."""
        return await asyncio.to_thread(self._call, method, path, body, kind)

    async def apply(self, found: Mapping[str, Any]) -> None:
        """As `kubectl apply --server-side`. Raises ApiRefused."""
        await self.call("PATCH", path_of(found) + "?fieldManager=tests&force=true", found, APPLY)

    def _call(self, method: str, path: str, body: object, kind: str) -> Any:
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(
                "127.0.0.1", self._port, timeout=60, context=self._trust
            )
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        try:
            self._connection.request(
                method, path, None if body is None else json.dumps(body), headers
            )
            answer = self._connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        if answer.status >= 400:
            raise ApiRefused(answer.status, text)
        return json.loads(text) if text.startswith("{") else text

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def path_of(found: Mapping[str, Any]) -> str:
    """The path of an object at the API server."""
    version, metadata = found["apiVersion"], found["metadata"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    space = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    return f"{root}{space}/{PLURALS[found['kind']]}/{metadata['name']}"


class ControlPlane:
    """Call `start`, then `stop`. Its state is in an etcd that others may use, too."""

    def __init__(self, folder: Path, etcd: str) -> None:
        self._folder, self._etcd = folder, etcd
        self._token = secrets.token_hex(16)
        self._port = free_ports(1)[0]
        self._running: list[Process] = []

    def api(self) -> KubernetesApi:
        return KubernetesApi(self._port, self._token, self._folder / "apiserver.crt")

    async def start(self, *, within_s: float = 120.0) -> None:
        self._folder.mkdir()
        key, tokens, kubeconfig = (
            self._folder / name for name in ("accounts.key", "tokens.csv", "kubeconfig.json")
        )
        _write_key(key)
        tokens.write_text(f'{self._token},tests,tests,"system:masters"\n')
        kubeconfig.write_text(json.dumps(self._kubeconfig()))
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={self._etcd}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self._folder}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={tokens}",
            "--authorization-mode=AlwaysAllow",
            "--service-cluster-ip-range=10.77.0.0/24",
            "--endpoint-reconciler-type=none",
        )
        async with asyncio.timeout(within_s):
            while not await self._is_ready():
                self._require_alive()
                await asyncio.sleep(0.2)
        shared = (f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0")
        self._spawn("kube-scheduler", *shared)
        self._spawn(
            "kube-controller-manager",
            *shared,
            f"--controllers={','.join(CONTROLLERS)}",
            f"--service-account-private-key-file={key}",
        )

    def _spawn(self, name: str, *options: str) -> None:
        folder = needs.find_control_plane()
        assert folder is not None
        argv = [str(folder / name), *options]
        self._running.append(
            processes.spawn(argv, dict(os.environ), self._folder / f"{name}.log", dies_with_us=True)
        )

    async def _is_ready(self) -> bool:
        if not (self._folder / "apiserver.crt").exists():
            return False
        api = self.api()
        try:
            return bool(await api.call("GET", "/readyz") == "ok")
        except (OSError, ApiRefused, http.client.HTTPException):
            return False
        finally:
            api.close()

    def _require_alive(self) -> None:
        if any(processes.state(each) == "dead" for each in self._running):
            logs = {
                path.name: path.read_text(errors="replace")[-600:]
                for path in self._folder.glob("*.log")
            }
            raise RuntimeError(f"the control plane ended: {logs}")

    def _kubeconfig(self) -> dict[str, Any]:
        server = {
            "server": f"https://127.0.0.1:{self._port}",
            "certificate-authority": str(self._folder / "apiserver.crt"),
        }
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": server}],
            "users": [{"name": "tests", "user": {"token": self._token}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
            "current-context": "tests",
        }

    async def stop(self) -> None:
        await asyncio.to_thread(processes.stop, dict.fromkeys(reversed(self._running), GRACE_S))


async def apply_all(api: KubernetesApi, objects: Sequence[Mapping[str, Any]]) -> None:
    """As `kubectl apply --server-side -f`. Raises ApiRefused."""
    for each in objects:
        await api.apply(each)


def _write_key(path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


LOOK_S: Final = 0.2
LEASE_S: Final = 10.0
SPARE: Final = 6
"""Addresses for the pods of Deployments, whose names are random."""
COMPONENT: Final = "app.kubernetes.io/component"
CAPACITY: Final = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "512Gi", "pods": "110"}

Object = Mapping[str, Any]


class ProcessKubelet:
    """The kubelets of all nodes of one namespace. `hosts` as in LocalPods; names of the
    StatefulSets' pods are added.
    """

    def __init__(
        self,
        api: KubernetesApi,
        folder: Path,
        namespace: str,
        nodes: Sequence[str],
        sets: Sequence[PodSet],
        hosts: Mapping[str, str],
    ) -> None:
        self._api, self._namespace, self._nodes = api, namespace, tuple(nodes)
        stateful = {
            f"{each.name}-{number}": each.service
            for each in sets
            if each.is_stateful
            for number in range(each.replicas)
        }
        self._spare = [f"spare-{number}" for number in range(SPARE)]
        network = Loopback(folder, [*stateful, *self._spare])
        network.claim()
        self._addresses = network.addresses
        own = {
            f"{name}.{service}.{namespace}.svc": self._addresses[name]
            for name, service in stateful.items()
        }
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

    # --- nodes ------------------------------------------------------------------------------------

    async def _tell_node(self, node: str) -> None:
        """Its status, and its lease. A node whose lease runs out loses its pods."""
        now = _now()
        conditions = [
            {
                "type": "Ready",
                "status": "True",
                "reason": "KubeletReady",
                "lastHeartbeatTime": now,
                "lastTransitionTime": now,
            }
        ]
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
            made = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": metadata,
                "spec": lease,
            }
            await self._api.call("POST", path, made)

    # --- pods -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        while True:
            if loop.time() - renewed_s > LEASE_S:
                renewed_s = loop.time()
                for node in self._nodes:
                    await self._tell_node(node)
            found = (await self._api.call("GET", f"/api/v1/namespaces/{self._namespace}/pods"))[
                "items"
            ]
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
            pod = self._pods[uid] = self._local.start(
                name, found["spec"]["nodeName"], address, template
            )
        await self._tell(found, pod)

    def _free_address(self) -> str:
        taken = {each.address for each in self._pods.values()}
        return next(each for each in self.spare_addresses if each not in taken)

    async def _remove(self, name: str, uid: str) -> None:
        """Its process has ended: now its name is free for the next pod."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        with suppress(ApiRefused):  # it is gone already
            await self._api.call(
                "DELETE", f"/api/v1/namespaces/{self._namespace}/pods/{name}", body
            )

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
        # the pod may have gone meanwhile; another one of its name has another uid
        with suppress(ApiRefused):
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
    others = [
        each
        for each in found.get("status", {}).get("conditions", ())
        if each["type"] == "PodScheduled"
    ]
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
    return {
        "phase": "Running",
        "conditions": conditions,
        "containerStatuses": [state],
        "startTime": start,
        **addresses,
    }


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
