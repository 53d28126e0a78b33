"""Helm's chart and kustomize's base: valid, restricted, and of options that the commands have."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import jsonschema_rs
import pytest
import yaml
from kubelet.manifests import CHART, EVERYTHING, OPTIONAL, ROOT, helm, rendered, tools
from support import needs
from typer.main import get_command

from qmq.cli.app import app
from qmq.cli.contexts import variables_of
from qmq.node.process import require_guarded
from qmq.security.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, Tls

BASE = ROOT / "deploy" / "kubernetes" / "base"
ZONES = ROOT / "deploy" / "kubernetes" / "overlays" / "three-zones"
VALUES = {
    "defaults": "",
    "everything": EVERYTHING,
    "one replica": "groupDefaults.replicas=1,metaserver.replicas=1,networkPolicy.enabled=false",
    "optional certificates": OPTIONAL,
}
OWN_KINDS = {"Certificate", "PodMonitor"}
"""Kinds of cert-manager and of the Prometheus operator. Kubernetes has no schemas for them."""

pytestmark = needs.helm


def pods(objects: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The spec of each pod, with its object's name."""
    found = []
    for each in objects:
        if each["kind"] == "Pod":
            found.append((each["metadata"]["name"], each["spec"]))
        elif each["kind"] in ("StatefulSet", "Deployment"):
            found.append((each["metadata"]["name"], each["spec"]["template"]["spec"]))
    return found


@pytest.fixture(scope="module", params=VALUES.values(), ids=VALUES)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(request.param)


def test_helm_lint_is_content() -> None:
    for values in VALUES.values():
        done = helm("lint", "--strict", str(CHART), *(("--set", values) if values else ()))
        assert done.returncode == 0, done.stdout


def test_every_object_is_as_kubernetes_describes_it(objects: list[dict[str, Any]]) -> None:
    folder = (
        tools()
        / "python"
        / "kubernetes_validate"
        / "kubernetes-json-schema"
        / "v1.37.0-local-strict"
    )
    definitions = json.loads((folder / "_definitions.json").read_text())
    registry = jsonschema_rs.Registry([(definitions["$id"], definitions)])
    complaints = []
    for each in objects:
        group, _, version = each["apiVersion"].rpartition("/")
        path = (
            folder
            / "-".join(
                [each["kind"], *([group.split(".")[0]] if group else []), f"{version}.json"]
            ).lower()
        )
        if each["kind"] not in OWN_KINDS:
            validator = jsonschema_rs.Draft202012Validator(
                json.loads(path.read_text()), registry=registry
            )
            complaints += [
                (each["metadata"]["name"], error.message) for error in validator.iter_errors(each)
            ]
    assert complaints == []


def test_every_pod_obeys_the_restricted_standard(objects: list[dict[str, Any]]) -> None:
    for name, spec in pods(objects):
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        assert all({"emptyDir", "secret"} & set(volume) for volume in spec["volumes"]), name
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            for kind in ("requests", "limits"):
                assert set(container["resources"][kind]) == {
                    "cpu",
                    "memory",
                    "ephemeral-storage",
                }, name


def test_every_variable_is_an_option_of_the_command_that_gets_it(
    objects: list[dict[str, Any]],
) -> None:
    root = get_command(app)
    for name, spec in pods(objects):
        for container in spec["containers"]:
            words = container["command"][1:]
            command = root.get_command(click.Context(root), words[0])  # type: ignore[attr-defined]
            variables = set(variables_of(command)) | {
                CA_VARIABLE,
                CERT_VARIABLE,
                KEY_VARIABLE,
                "POD_NAME",
            }
            assert {each["name"] for each in container.get("env") or []} <= variables, name
            names = {
                flag for option in command.params for flag in (*option.opts, *option.secondary_opts)
            }
            assert {word for word in words if word.startswith("--")} <= names, name


def test_a_replica_hands_over_before_it_ends_by_a_command_that_there_is(
    objects: list[dict[str, Any]],
) -> None:
    root = get_command(app)
    verbs = 0
    for name, spec in pods(objects):
        for container in spec["containers"]:
            stop = (
                container.get("lifecycle", {})
                .get("preStop", {})
                .get("exec", {})
                .get("command", ["none"])
            )
            if "QMQ_REPLICA" in {each["name"] for each in container.get("env") or []}:
                role = root.get_command(click.Context(root), stop[1])  # type: ignore[attr-defined]
                verb = role.get_command(click.Context(role), stop[2])
                with verb.make_context("hand-over", stop[3:]) as given:
                    assert given.params["wait"] < spec["terminationGracePeriodSeconds"], name
                assert stop[:3] == ["qmq", container["command"][1], "hand-over"]
                verbs += 1
            elif "command" in container and name != "qmq-status":
                assert stop == ["sleep", "3"] or "readinessProbe" not in container, name
    assert verbs == 3


def test_every_server_accepts_its_settings(objects: list[dict[str, Any]]) -> None:
    for name, spec in pods(objects):
        for container in spec["containers"]:
            env = {each["name"]: each.get("value", "") for each in container.get("env") or []}
            if "QMQ_METRICS_HOST" not in env:
                continue
            is_gateway = container["command"][1] == "gateway"  # whose clients have no certificates
            tls = None
            if CA_VARIABLE in env and not is_gateway:
                tls = Tls(
                    "ca", "cert", "key", requires_clients=env["QMQ_TLS_CLIENTS"] == "required"
                )
            is_insecure = env.get("QMQ_INSECURE") == "1"
            require_guarded(
                env["QMQ_HOST"], is_insecure, tls=tls, metrics_host=env["QMQ_METRICS_HOST"]
            )
            assert is_insecure == (tls is None or not tls.requires_clients), name


def test_a_replica_is_known_and_reached_by_the_name_of_its_pod(
    objects: list[dict[str, Any]],
) -> None:
    sets = [each for each in objects if each["kind"] == "StatefulSet"]
    services = {
        each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"
    }
    assert len(sets) == 3
    for each in sets:
        name, spec = each["metadata"]["name"], each["spec"]
        env = {
            variable["name"]: variable.get("value")
            for variable in spec["template"]["spec"]["containers"][0]["env"]
        }
        assert env["QMQ_REPLICAS"] == ",".join(
            f"{name}-{number}" for number in range(spec["replicas"])
        )
        assert env["QMQ_ADVERTISE"] == f"$(POD_NAME).{name}.qmq.svc"
        service = services[spec["serviceName"]]
        assert service["selector"].items() <= spec["template"]["metadata"]["labels"].items()
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


def test_certificates_have_each_name_that_is_connected_to() -> None:
    objects = rendered(EVERYTHING)
    names = {
        each["spec"]["secretName"]: set(each["spec"]["dnsNames"])
        for each in objects
        if each["kind"] == "Certificate"
    }
    for name, spec in pods(objects):
        secret = next(
            volume["secret"]["secretName"]
            for volume in spec["volumes"]
            if volume["name"] == "certs"
        )
        env = {each["name"]: each.get("value", "") for each in spec["containers"][0]["env"]}
        if "QMQ_REPLICAS" in env:
            for replica in env["QMQ_REPLICAS"].split(","):
                assert {replica, env["QMQ_ADVERTISE"].replace("$(POD_NAME)", replica)} <= names[
                    secret
                ], name
        elif "QMQ_SERVER" in env:
            assert env["QMQ_SERVER"].partition(":")[0] in names["qmq-meta-tls"], name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("groups[0].name=G1,groups[0].kind=broker", "groups.0.name"),
        ("groupDefaults.replicas=2", "groupDefaults.replicas"),
        ("etcd.endpoints={http://etcd:2379}", "etcd.endpoints.0"),
        ("groupDefault.replicas=1", "groupDefault "),
        ("tls.enabled=true", "tls.issuer.name"),
    ],
)
def test_a_mistake_in_values_is_named(values: str, words: str) -> None:
    done = helm("template", "qmq", str(CHART), "--set", values)
    assert done.returncode != 0
    assert words in done.stderr


def test_the_base_of_kustomize_is_what_the_chart_makes(tmp_path: Path) -> None:
    subprocess.run([ROOT / "tools" / "manifests", tmp_path / "qmq.yaml"], check=True)
    assert (tmp_path / "qmq.yaml").read_text() == (BASE / "qmq.yaml").read_text(), (
        "run tools/manifests"
    )


def test_the_overlay_keeps_replicas_in_zones_of_their_own() -> None:
    command = [tools() / "kubectl" / "kubectl", "kustomize", ZONES]
    built = list(
        yaml.safe_load_all(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
    )
    assert {each["metadata"].get("namespace") for each in built} == {"qmq", None}
    sets = [spec for each in built if each["kind"] == "StatefulSet" for _, spec in pods([each])]
    assert len(sets) == 3
    for spec in sets:
        assert {
            rule["topologyKey"]
            for rule in spec["topologySpreadConstraints"]
            if rule["whenUnsatisfiable"] == "DoNotSchedule"
        } == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}


def test_no_image_runs_unless_its_version_is_named(objects: list[dict[str, Any]]) -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert {
        container["image"] for _, spec in pods(objects) for container in spec["containers"]
    } == {f"qmq:{version[1]}"}


def policy(**values: Any) -> dict[str, Any]:
    options = [
        word
        for name, value in values.items()
        for word in ("--set-json", f"networkPolicy.{name}={json.dumps(value)}")
    ]
    (found,) = [each for each in rendered("", *options) if each["kind"] == "NetworkPolicy"]
    spec: dict[str, Any] = found["spec"]
    return spec


def test_clients_and_etcd_of_every_namespace_are_let_in_by_their_labels() -> None:
    spec = policy()
    mine, clients, _ = spec["ingress"]
    assert "ports" not in mine
    assert clients["from"] == [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {"qmq.io/client": "true"}}}
    ]
    assert (spec["policyTypes"], spec["egress"]) == (["Ingress", "Egress"], [{}])


def test_an_empty_list_of_clients_lets_in_no_client() -> None:
    """An empty `from` would be everybody."""
    spec = policy(clients=[], metrics=[])
    assert len(spec["ingress"]) == 1
    assert all(each["from"] for each in spec["ingress"])


def test_egress_is_to_the_cluster_dns_etcd_and_what_the_values_name() -> None:
    spec = policy(egress=[{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 443}]}])
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    _, etcd, dns, s3 = spec["egress"]
    assert etcd["to"] == [
        {
            "namespaceSelector": {},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "etcd"}},
        }
    ]
    assert {each["port"] for each in dns["ports"]} == {53}
    assert s3 == {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 443}]}
    assert len(policy(egress=[])["egress"]) == 3
