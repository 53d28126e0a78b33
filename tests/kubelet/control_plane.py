"""Kubernetes' own API server, scheduler and controllers as local processes (`scripts/kubernetes_tools --all` builds them).

Nodes and pods are the business of kubelets: process_kubelet.py.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cluster_runner import processes
from cluster_runner.processes import Process
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from qmq_coordination.etcd.process import free_ports
from support import needs

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

    async def call(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """The answer. Raises ApiRefused, OSError."""
        return await asyncio.to_thread(self._call, method, path, body, kind)

    async def apply(self, found: Mapping[str, Any]) -> None:
        """As `kubectl apply --server-side`. Raises ApiRefused."""
        await self.call("PATCH", path_of(found) + "?fieldManager=tests&force=true", found, APPLY)

    def _call(self, method: str, path: str, body: object, kind: str) -> Any:
        if self._connection is None:
            self._connection = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=60, context=self._trust)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        try:
            self._connection.request(method, path, None if body is None else json.dumps(body), headers)
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
        key, tokens, kubeconfig = (self._folder / name for name in ("accounts.key", "tokens.csv", "kubeconfig.json"))
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
            "kube-controller-manager", *shared, f"--controllers={','.join(CONTROLLERS)}", f"--service-account-private-key-file={key}"
        )

    def _spawn(self, name: str, *options: str) -> None:
        folder = needs.find_control_plane()
        assert folder is not None
        argv = [str(folder / name), *options]
        self._running.append(processes.spawn(argv, dict(os.environ), self._folder / f"{name}.log", dies_with_us=True))

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
            logs = {path.name: path.read_text(errors="replace")[-600:] for path in self._folder.glob("*.log")}
            raise RuntimeError(f"the control plane ended: {logs}")

    def _kubeconfig(self) -> dict[str, Any]:
        server = {"server": f"https://127.0.0.1:{self._port}", "certificate-authority": str(self._folder / "apiserver.crt")}
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
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
