"""A real Prometheus with the labels that the chart's PodMonitor gives: the alerts about processes
fire there.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubelet.manifests import ROOT, rendered
from support import needs
from support.etcd_process import free_ports

pytestmark = [needs.helm, needs.prometheus]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
POD = "__meta_kubernetes_pod_label_app_kubernetes_io_component"


def relabelings() -> list[dict[str, Any]]:
    """As the operator writes them for Prometheus: the names with underscores."""
    (monitor,) = [
        each for each in rendered("podMonitor.enabled=true") if each["kind"] == "PodMonitor"
    ]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    spelled = {"targetLabel": "target_label", "sourceLabels": "source_labels"}
    return [
        {spelled.get(name, name): value for name, value in each.items()}
        for each in endpoint["relabelings"]
    ]


@contextmanager
def prometheus(folder: Path, targets: list[dict[str, Any]]) -> Iterator[str]:
    """Runs one that finds these targets, and waits for no alert's `for`."""
    rules = yaml.safe_load(ALERTS.read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule["for"] = "0s"
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    (folder / "targets.json").write_text(json.dumps(targets))
    found = [
        {
            "job_name": "qmq/podMonitor/qmq/qmq/0",
            "file_sd_configs": [{"files": ["targets.json"]}],
            "relabel_configs": relabelings(),
        }
    ]
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": found,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    words = [
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            [needs.find_prometheus() or "prometheus", *words], cwd=folder, stdout=log, stderr=log
        )
        try:
            yield address
        finally:
            running.terminate()
            running.wait()


def firing(address: str) -> set[tuple[str, str]]:
    """The alerts, with the `service` that each is about."""
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/alerts", timeout=5) as answer:
            alerts = json.load(answer)["data"]["alerts"]
    except OSError:
        return set()
    return {
        (each["labels"]["alertname"], each["labels"].get("service", ""))
        for each in alerts
        if each["state"] == "firing"
    }


@pytest.mark.parametrize(
    ("components", "expected"),
    [
        (
            ["meta", "g1"],
            {("QmqServerDown", "meta"), ("QmqServerDown", "g1"), ("QmqNoMetaserver", "")},
        ),
        ([], {("QmqNoMetaserver", "")}),
    ],
    ids=["pods that do not answer", "no pod at all"],
)
async def test_the_alerts_about_processes_fire_on_what_the_chart_deploys(
    tmp_path: Path, components: list[str], expected: set[tuple[str, str]]
) -> None:
    targets = [
        {"targets": [f"127.0.0.1:{free_ports(1)[0]}"], "labels": {POD: each}} for each in components
    ]
    with prometheus(tmp_path, targets) as address:
        async with asyncio.timeout(60):
            while not expected <= await asyncio.to_thread(firing, address):
                await asyncio.sleep(0.1)
