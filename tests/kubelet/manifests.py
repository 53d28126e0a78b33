"""The objects that helm makes of the chart.

The parts of rendered manifests that a kubelet needs. Pure. A pod with a field
that this module does not support is refused, so that no test passes because a field was ignored.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from support import needs

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "qmq"
EVERYTHING: Final = "tls.enabled=true,tls.issuer.name=ca,gateway.enabled=true,console.enabled=true,podMonitor.enabled=true,etcd.tlsSecret=etcd"  # noqa: E501
OPTIONAL: Final = "tls.enabled=true,tls.issuer.name=ca,tls.clients=optional"


def tools() -> Path:
    found = needs.find_kubernetes_tools()
    assert found is not None
    return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tools() / "helm" / "helm", *arguments], capture_output=True, text=True, check=False
    )


def rendered(values: str = "", *options: str) -> list[dict[str, Any]]:
    more = (*(("--set", values) if values else ()), *options)
    done = helm(
        "template",
        "qmq",
        str(CHART),
        "--namespace",
        "qmq",
        "--api-versions",
        "monitoring.coreos.com/v1",
        *more,
    )
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


POD_FIELDS: Final = frozenset(
    [
        "serviceAccountName",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "securityContext",
        "topologySpreadConstraints",
        "affinity",
        "terminationGracePeriodSeconds",
        "containers",
        "volumes",
    ]
)
CONTAINER_FIELDS: Final = frozenset(
    [
        "name",
        "image",
        "imagePullPolicy",
        "securityContext",
        "command",
        "env",
        "ports",
        "startupProbe",
        "livenessProbe",
        "readinessProbe",
        "lifecycle",
        "resources",
        "volumeMounts",
    ]
)
ADDED_TO_PODS: Final = frozenset(
    [
        "dnsPolicy",
        "hostname",
        "nodeName",
        "preemptionPolicy",
        "priority",
        "restartPolicy",
        "schedulerName",
        "serviceAccount",
        "subdomain",
        "tolerations",
    ]
)
"""What the API server, the controllers and the scheduler add to a pod, and needs nothing of a
kubelet here.
"""
ADDED_TO_CONTAINERS: Final = frozenset(["terminationMessagePath", "terminationMessagePolicy"])
PROBE_FIELDS: Final = frozenset(
    [
        "httpGet",
        "tcpSocket",
        "periodSeconds",
        "timeoutSeconds",
        "failureThreshold",
        "successThreshold",
    ]
)
HOSTNAME: Final = "kubernetes.io/hostname"


class NotHonoured(Exception):
    """A manifest asks for something that this Kubernetes does not do."""


@dataclass(frozen=True, slots=True)
class Probe:
    port: int
    path: str
    """Empty: it is enough that a connection opens."""
    period_s: float
    timeout_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class PodTemplate:
    labels: Mapping[str, str]
    image: str
    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    """In order; a value may name the variables before it, and POD_NAME."""
    folders: Mapping[str, str]
    """Each path of the container, and the volume that is there."""
    startup: Probe | None
    liveness: Probe | None
    readiness: Probe | None
    pre_stop: tuple[str, ...]
    grace_s: float
    spreads_hosts: bool
    """Whether pods of these labels are kept apart, one on a node."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Each path of the container with files of a Secret, and the Secret's name."""

    def variables(self, pod: str) -> dict[str, str]:
        """Its environment, with `$(NAME)` replaced."""
        found: dict[str, str] = {}
        for name, value in self.env:
            text = pod if value == "metadata.name" else value
            found[name] = re.sub(r"\$\((\w+)\)", lambda match: found.get(match[1], match[0]), text)
        return found


@dataclass(frozen=True, slots=True)
class PodSet:
    """A StatefulSet or a Deployment."""

    name: str
    is_stateful: bool
    replicas: int
    service: str
    """The headless Service that names its pods; empty for a Deployment."""
    template: PodTemplate


def pod_sets(objects: Iterable[Mapping[str, Any]]) -> list[PodSet]:
    """Raises NotHonoured."""
    return [_pod_set(each) for each in objects if each["kind"] in ("StatefulSet", "Deployment")]


def pod_template(pod: Mapping[str, Any]) -> PodTemplate:
    """The template of a pod as the API server has it. Raises NotHonoured."""
    spec = {name: value for name, value in pod["spec"].items() if name not in ADDED_TO_PODS}
    spec["containers"] = [
        {name: value for name, value in each.items() if name not in ADDED_TO_CONTAINERS}
        for each in pod["spec"]["containers"]
    ]
    return _template(
        pod["metadata"]["name"], {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": spec}
    )


def _pod_set(found: Mapping[str, Any]) -> PodSet:
    spec, name = found["spec"], found["metadata"]["name"]
    is_stateful = found["kind"] == "StatefulSet"
    if is_stateful:
        _require(
            spec["podManagementPolicy"] == "Parallel"
            and spec["updateStrategy"] == {"type": "RollingUpdate"},
            name,
            "its strategy",
        )
    else:
        _require(
            spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1},
            name,
            "its strategy",
        )
    template = _template(name, spec["template"])
    return PodSet(
        name,
        is_stateful,
        spec["replicas"],
        spec.get("serviceName", ""),
        template,
    )


def _template(name: str, found: Mapping[str, Any]) -> PodTemplate:
    spec = found["spec"]
    _require(
        not spec.keys() - POD_FIELDS, name, f"fields {sorted(spec.keys() - POD_FIELDS)} of its pods"
    )
    (container,) = spec["containers"]
    _require(
        not container.keys() - CONTAINER_FIELDS,
        name,
        f"fields {sorted(container.keys() - CONTAINER_FIELDS)} of its container",
    )
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    secrets = {
        each["name"]: each["secret"]["secretName"]
        for each in spec.get("volumes", ())
        if "secret" in each
    }
    stop = container.get("lifecycle", {}).get("preStop", {"exec": {"command": []}})
    _require(stop.keys() == {"exec"}, name, "a preStop that is no command")
    return PodTemplate(
        labels=found["metadata"]["labels"],
        image=container["image"],
        command=tuple(container["command"]),
        env=tuple((each["name"], _value(name, each)) for each in container["env"]),
        folders={each["mountPath"]: each["name"] for each in container["volumeMounts"]},
        startup=_probe(name, container.get("startupProbe"), ports),
        liveness=_probe(name, container.get("livenessProbe"), ports),
        readiness=_probe(name, container.get("readinessProbe"), ports),
        pre_stop=tuple(stop["exec"]["command"]),
        grace_s=spec["terminationGracePeriodSeconds"],
        spreads_hosts=any(
            each["topologyKey"] == HOSTNAME
            and each["whenUnsatisfiable"] == "DoNotSchedule"
            and each["maxSkew"] == 1
            for each in spec["topologySpreadConstraints"]
        ),
        secrets={
            each["mountPath"]: secrets[each["name"]]
            for each in container["volumeMounts"]
            if each["name"] in secrets
        },
    )


def _value(name: str, variable: Mapping[str, Any]) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable.get("valueFrom", {}).get("fieldRef", {})
    _require(source.get("fieldPath") == "metadata.name", name, f"the source of {variable['name']}")
    return "metadata.name"


def _probe(name: str, found: Mapping[str, Any] | None, ports: Mapping[str, int]) -> Probe | None:
    if found is None:
        return None
    _require(
        not found.keys() - PROBE_FIELDS,
        name,
        f"fields {sorted(found.keys() - PROBE_FIELDS)} of a probe",
    )
    asked = found.get("httpGet") or found["tcpSocket"]
    # A probe over HTTPS goes over HTTP here: pods have loopback addresses, where their metrics port
    # has no TLS.
    _require(asked.get("scheme", "HTTP") in ("HTTP", "HTTPS"), name, "the scheme of a probe")
    return Probe(
        ports[asked["port"]],
        asked.get("path", ""),
        found.get("periodSeconds", 10),
        found.get("timeoutSeconds", 1),
        found.get("failureThreshold", 3),
    )


def _require(is_honoured: bool, name: str, what: str) -> None:
    if not is_honoured:
        raise NotHonoured(f"{name}: {what}")


OPTIONS = (
    "--set",
    "etcd.endpoints={etcd.test:2379}",
    "--set-json",
    'groups=[{"name":"g1","kind":"broker"},{"name":"g2","kind":"broker"}]',
)


NODES = ("n1", "n2", "n3", "n4")


PRODUCERS = int(os.environ.get("QMQ_ROLL_OUT_PRODUCERS", "2"))


BATCH = int(os.environ.get("QMQ_ROLL_OUT_BATCH", "20"))
