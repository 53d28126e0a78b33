"""Kubernetes' own API server, scheduler and controllers as local processes
(`scripts/kubernetes_tools --all` builds them).

Nodes and pods are the business of kubelets. A pod is a local process with its own address on
loopback: `ProcessPod` has its probes, its restarts, and its end. A restarted pod has the same
address, as a pod in Kubernetes keeps its DNS name. A volume claim is a folder that follows the pod.
`ProcessKubelet` is a kubelet of each node for a real API server: nodes that live on leases, and the
pods that the scheduler binds to them. It asks for the pods several times a second instead of
watching them.

The part of cert-manager: a Secret for each Certificate of the chart, from an authority of this
test, which is in the folder `authority`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import http.client
import json
import os
import secrets
import signal
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from cluster_runner import processes
from cluster_runner.network import Loopback
from cluster_runner.processes import Process
from cluster_runner.translate import NOT_INHERITED, program
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kubelet.manifests import HOSTNAME, PodSet, PodTemplate, Probe, pod_template
from support import needs
from support.etcd_process import free_ports

from qmq.security.certificates import Place, create_authority, issue

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
    """As `kubectl apply --server-side -f`, without the kinds that others than Kubernetes define.
    Raises ApiRefused.
    """
    for each in objects:
        if each["kind"] in PLURALS:
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


PROCESS_LOOK_S: Final = 0.05
RESTART_S: Final = 1.0


class ProcessPod:
    """`argv` and `environment` are those of its container, in the words of this machine;
    `stop_argv` is its preStop, empty for none.
    """

    def __init__(
        self,
        name: str,
        node: str,
        address: str,
        template: PodTemplate,
        argv: Sequence[str],
        stop_argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.name, self.node, self.address, self.template = name, node, address, template
        self._argv, self._stop_argv, self._environment = argv, stop_argv, environment
        self.log = log
        self.restarts = 0
        self.was_killed = False
        """Whether it did not end within its grace."""
        self._process: Process | None = None
        self._ready_since_s: float | None = None
        self._is_terminating = False
        self._running = asyncio.create_task(self._run())
        self._ending: asyncio.Task[None] | None = None

    # --- what the API server knows of it ----------------------------------------------------------

    @property
    def is_terminating(self) -> bool:
        return self._is_terminating

    @property
    def is_gone(self) -> bool:
        return self._ending is not None and self._ending.done()

    @property
    def ready_s(self) -> float | None:
        return None if self._ready_since_s is None else time.monotonic() - self._ready_since_s

    def raise_failure(self) -> None:
        for task in (self._running, self._ending):
            if task is not None and task.done() and not task.cancelled():
                task.result()

    # --- running ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._process = processes.spawn(
                self._argv, self._environment, self.log, dies_with_us=True
            )
            await self._until_dead_or_not_alive()
            self._ready_since_s = None
            await self._end_process()
            self.restarts += 1
            await asyncio.sleep(RESTART_S)

    async def _until_dead_or_not_alive(self) -> None:
        """As a kubelet: neither readiness nor liveness is asked for before the startup probe has
        succeeded.
        """
        await _first_of(self._until_dead(), self._probe())

    async def _until_dead(self) -> None:
        while self._is_running():
            await asyncio.sleep(PROCESS_LOOK_S)

    def _is_running(self) -> bool:
        return self._process is not None and processes.state(self._process) != "dead"

    async def _probe(self) -> None:
        """Ends when the container is to be restarted."""
        startup = self.template.startup
        if startup is not None and not await self._started(startup):
            return
        await _first_of(self._live(self.template.liveness), self._ready(self.template.readiness))

    async def _started(self, probe: Probe) -> bool:
        for _ in range(probe.failures):
            if await self._succeeds(probe):
                return True
            await asyncio.sleep(probe.period_s)
        return False

    async def _live(self, probe: Probe | None) -> None:
        failures = 0
        while probe is None or failures < probe.failures:
            await asyncio.sleep(3600 if probe is None else probe.period_s)
            if probe is not None:
                failures = 0 if await self._succeeds(probe) else failures + 1

    async def _ready(self, probe: Probe | None) -> None:
        failures = 0
        while True:
            if probe is None or await self._succeeds(probe):
                failures = 0
                self._ready_since_s = self._ready_since_s or time.monotonic()
            else:
                failures += 1
                if failures >= probe.failures:
                    self._ready_since_s = None
            await asyncio.sleep(3600 if probe is None else probe.period_s)

    async def _succeeds(self, probe: Probe) -> bool:
        try:
            async with asyncio.timeout(probe.timeout_s):
                reader, writer = await asyncio.open_connection(self.address, probe.port)
                try:
                    if not probe.path:
                        return True
                    writer.write(
                        (
                            f"GET {probe.path} HTTP/1.1\r\nHost: {self.address}\r\nConnection: "
                            "close\r\n\r\n"
                        ).encode()
                    )
                    status = (await reader.readline()).split()
                    return len(status) > 1 and 200 <= int(status[1]) < 400
                finally:
                    writer.close()
                    with suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError):
            return False

    # --- the end ----------------------------------------------------------------------------------

    def delete(self) -> None:
        """Begin to end the pod: preStop, SIGTERM, and SIGKILL at the end of the grace period, which
        begins now.
        """
        if self._ending is None:
            self._is_terminating = True
            self._ready_since_s = None
            self._ending = asyncio.create_task(self._delete())

    async def _delete(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._ready_since_s = None
        ends_s = time.monotonic() + self.template.grace_s
        if self._stop_argv and self._is_running():
            before = processes.spawn(
                self._stop_argv, self._environment, self.log, dies_with_us=True
            )
            await _dead(before, ends_s - time.monotonic())
            processes.kill(before)
        await self._end_process(ends_s - time.monotonic())

    async def _end_process(self, grace_s: float | None = None) -> None:
        if self._process is None:
            return
        processes.send(self._process, signal.SIGTERM)
        await _dead(self._process, self.template.grace_s if grace_s is None else grace_s)
        self.was_killed = self.was_killed or self._is_running()
        processes.kill(self._process)

    async def gone(self) -> None:
        """Wait for the end that was begun."""
        if self._ending is not None:
            await self._ending


async def _dead(process: Process, within_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(max(within_s, 0)):
            while processes.state(process) != "dead":
                await asyncio.sleep(PROCESS_LOOK_S)


async def _first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends; then cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LocalPods:
    """`hosts` are the names that pods know, such as etcd's, each with its address. The volume of a
    pod is a folder of its name, a Secret is the folder `secrets/NAME`.
    """

    def __init__(self, folder: Path, hosts: Mapping[str, str]) -> None:
        self._folder, self._hosts = folder, dict(hosts)

    def start(self, name: str, node: str, address: str, template: PodTemplate) -> ProcessPod:
        volume = self._folder / "volumes" / name
        volume.mkdir(parents=True, exist_ok=True)
        environment = {
            key: value for key, value in os.environ.items() if not NOT_INHERITED.search(key)
        }
        for variable, value in template.variables(name).items():
            environment[variable] = self._here(self._in_secret(value, template), address, volume)
        command, *words = template.command
        argv = [program(command), *[self._here(each, address, volume) for each in words]]
        before = (
            [program(template.pre_stop[0]), *template.pre_stop[1:]] if template.pre_stop else []
        )
        return ProcessPod(
            name, node, address, template, argv, before, environment, self._folder / f"{name}.log"
        )

    def _in_secret(self, text: str, template: PodTemplate) -> str:
        for path, secret in template.secrets.items():
            if text.startswith(f"{path}/"):
                return str(self._folder / "secrets" / secret / text.removeprefix(f"{path}/"))
        return text

    def _here(self, text: str, address: str, volume: Path) -> str:
        if text in ("0.0.0.0", "/data"):
            return address if text == "0.0.0.0" else str(volume)
        for name, place in self._hosts.items():
            text = text.replace(name, place)
        return text


PRINCIPAL: Final = "spiffe://qmq/"


def make_secrets(
    objects: Sequence[Mapping[str, Any]], folder: Path, addresses: Callable[[str], Sequence[str]]
) -> None:
    """Make `secrets/NAME` in `folder` for each Certificate, with an authority in `authority` if
    there are any.

    `addresses` returns the local addresses of the pods that a certificate is for: they take the
    place of the pods' DNS names.
    """
    wanted = [each for each in objects if each["kind"] == "Certificate"]
    if wanted:
        create_authority(folder / "authority")
    for each in wanted:
        spec, secret = each["spec"], folder / "secrets" / each["spec"]["secretName"]
        secret.mkdir(parents=True)
        (uri,) = spec["uris"]
        kind, name = uri.removeprefix(PRINCIPAL).split("/")
        hosts = [*spec["dnsNames"], *addresses(each["metadata"]["name"].removesuffix("-tls"))]
        issue(
            folder / "authority",
            name,
            kind,
            hosts,
            place=Place(secret / "ca.crt", secret / "tls.crt", secret / "tls.key"),
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
        self._folder = folder
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

    def addresses(self, pod_set: str) -> list[str]:
        """The addresses of all pods that a set may have."""
        own = [
            address
            for name, address in self._addresses.items()
            if name.rpartition("-")[0] == pod_set
        ]
        return own or self.spare_addresses

    def logs(self) -> str:
        """What all pods wrote so far, those that are gone included."""
        return "".join(
            path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log"))
        )

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
