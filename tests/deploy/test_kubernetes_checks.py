"""kubeconform, kube-score and conftest with our policies find nothing in the chart, and find the
mistakes that are planted.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from kubelet.manifests import EVERYTHING, OPTIONAL, ROOT, rendered, tools
from support import needs

POLICY = ROOT / "deploy" / "policy"
OVERLAYS = ROOT / "deploy" / "kubernetes" / "overlays"
VALUES = {"defaults": "", "everything": EVERYTHING, "optional certificates": OPTIONAL}
IGNORED = (
    "container-image-pull-policy",  # an image's tag is a version, whose bytes do not change
    "deployment-has-host-podantiaffinity",  # topologySpreadConstraints do that, and over zones, too
    "statefulset-has-host-podantiaffinity",
)

Object = dict[str, Any]


def run(tool: str, *words: str, objects: list[Object]) -> subprocess.CompletedProcess[str]:
    path = needs.find_kube_tool(tool)
    assert path is not None
    return subprocess.run(
        [path, *words],
        input=yaml.safe_dump_all(objects),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def kubeconform(objects: list[Object]) -> list[str]:
    schemas = tools() / "schemas" / "{{.ResourceKind}}{{.KindSuffix}}.json"
    done = run(
        "kubeconform",
        "-strict",
        "-output",
        "json",
        "-schema-location",
        str(schemas),
        objects=objects,
    )
    assert not done.stderr
    return [
        f"{each['kind']} {each['name']}: {each['msg']}"
        for each in json.loads(done.stdout)["resources"]
    ]


def kube_score(objects: list[Object]) -> list[str]:
    ignored = [word for each in IGNORED for word in ("--ignore-test", each)]
    done = run("kube-score", "score", "--output-format", "ci", *ignored, "-", objects=objects)
    assert "[OK]" in done.stdout, done.stderr
    return [each for each in done.stdout.splitlines() if not each.startswith(("[OK]", "[SKIPPED]"))]


def conftest(objects: list[Object]) -> list[str]:
    done = run(
        "conftest",
        "test",
        "--combine",
        "--output",
        "json",
        "--policy",
        str(POLICY),
        "-",
        objects=objects,
    )
    (result,) = json.loads(done.stdout)
    assert result["successes"] + len(result.get("failures", [])) >= 15, done.stderr
    return [each["msg"] for each in result.get("failures", [])]


def kustomized() -> list[Object]:
    done = subprocess.run(
        [tools() / "kubectl" / "kubectl", "kustomize", OVERLAYS / "three-zones"],
        capture_output=True,
        text=True,
        check=True,
    )
    return list(yaml.safe_load_all(done.stdout))


def find(objects: list[Object], kind: str, name: str = "") -> Object:
    return next(
        each
        for each in objects
        if each["kind"] == kind and each["metadata"]["name"].startswith(name)
    )


def container(objects: list[Object], kind: str = "StatefulSet") -> Object:
    found: Object = find(objects, kind)["spec"]["template"]["spec"]["containers"][0]
    return found


@needs.helm
@needs.kube_tools
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubeconform_and_kube_score_find_nothing(values: str) -> None:
    objects = rendered(values)
    assert kubeconform(objects) == []
    assert kube_score(objects) == []


@needs.helm
@needs.kube_tools
def test_kubeconform_and_kube_score_find_nothing_in_the_overlay() -> None:
    objects = kustomized()
    assert kubeconform(objects) == []
    assert kube_score(objects) == []


@needs.helm
@needs.kube_tools
def test_kubeconform_finds_a_field_that_is_none_also_of_resources_of_others() -> None:
    objects = rendered(EVERYTHING)
    container(objects)["readynessProbe"] = {}
    find(objects, "Certificate")["spec"]["dnsName"] = "a"
    find(objects, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["intervall"] = "1s"
    said = kubeconform(objects)
    assert len(said) == 3
    for word in ("readynessProbe", "dnsName", "intervall"):
        assert any(word in each for each in said), said


@needs.helm
@needs.kube_tools
def test_kube_score_finds_a_container_that_may_write_and_one_without_limits() -> None:
    objects = rendered()
    container(objects)["securityContext"]["readOnlyRootFilesystem"] = False
    del container(objects, "Deployment")["resources"]["limits"]["memory"]
    said = "\n".join(kube_score(objects))
    assert "writable root filesystem" in said
    assert "Memory limit is not set" in said


def change_spec(kind: str, field: str, value: object) -> Callable[[list[Object]], None]:
    return lambda objects: find(objects, kind)["spec"].update({field: value})


def drop(kind: str) -> Callable[[list[Object]], None]:
    return lambda objects: objects.remove(find(objects, kind))


def change_container(field: str, value: object) -> Callable[[list[Object]], None]:
    return lambda objects: container(objects).update({field: value})


def drop_data_volume(objects: list[Object]) -> None:
    mounts = container(objects)["volumeMounts"]
    next(each for each in mounts if each["mountPath"] == "/data")["name"] = "tmp"


def grow_limit(objects: list[Object]) -> None:
    container(objects)["resources"]["limits"]["memory"] = "4Gi"


def shorten_grace(objects: list[Object]) -> None:
    find(objects, "StatefulSet")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5


def add_secret(objects: list[Object]) -> None:
    objects.append(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "token"},
            "stringData": {"token": "x"},
        }
    )


MISTAKES: dict[str, Callable[[list[Object]], None]] = {
    "nothing limits": drop("PodDisruptionBudget"),
    "lets more than one": change_spec("PodDisruptionBudget", "maxUnavailable", 2),
    "odd number": change_spec("StatefulSet", "replicas", 4),
    "volumes are deleted": change_spec(
        "StatefulSet", "persistentVolumeClaimRetentionPolicy", {"whenDeleted": "Retain"}
    ),
    "waits for the one before": change_spec("StatefulSet", "podManagementPolicy", "OrderedReady"),
    "do not find each other": change_spec("Service", "publishNotReadyAddresses", False),
    "/data is no volume": drop_data_volume,
    "less than 30 seconds": shorten_grace,
    "more memory than it asked for": grow_limit,
    "liveness asks for readiness": change_container(
        "livenessProbe", {"httpGet": {"path": "/readyz", "port": "metrics"}}
    ),
    "a probe starts a process": change_container(
        "readinessProbe", {"exec": {"command": ["qmq", "health"]}}
    ),
    "needs a preStop": change_container("lifecycle", {}),
    "is another one tomorrow": change_container("image", "qmq:latest"),
    "no secrets in them": add_secret,
}


@needs.helm
@needs.conftest
@pytest.mark.longest
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_chart_keeps_our_policies(values: str) -> None:
    assert conftest(rendered(values)) == []


@needs.helm
@needs.conftest
@pytest.mark.longest
def test_the_overlay_keeps_our_policies() -> None:
    assert conftest(kustomized()) == []


@needs.helm
@needs.conftest
@pytest.mark.longest
@pytest.mark.parametrize("words", MISTAKES)
def test_a_policy_names_what_breaks_it(words: str) -> None:
    objects = rendered()
    MISTAKES[words](objects)
    said = conftest(objects)
    assert said
    assert all(words in each for each in said)


def test_every_policy_has_a_mistake_that_breaks_it() -> None:
    messages = [
        each
        for each in (POLICY / "qmq.rego").read_text().splitlines()
        if each.startswith("deny contains")
    ]
    # of an image without a tag, and of one with the tag latest
    assert len(messages) == len(MISTAKES) + 1
    for words in MISTAKES:
        assert any(words in each for each in messages), words
