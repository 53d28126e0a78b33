"""The objects that helm makes of the chart."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Final

import yaml
from support import needs

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "qmq"
EVERYTHING: Final = (
    "tls.enabled=true,tls.issuer.name=ca,gateway.enabled=true,console.enabled=true,podMonitor.enabled=true,etcd.tlsSecret=etcd"
)
OPTIONAL: Final = "tls.enabled=true,tls.issuer.name=ca,tls.clients=optional"


def tools() -> Path:
    found = needs.find_kubernetes_tools()
    assert found is not None
    return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tools() / "helm" / "helm", *arguments], capture_output=True, text=True, check=False)


def rendered(values: str = "", *options: str) -> list[dict[str, Any]]:
    more = (*(("--set", values) if values else ()), *options)
    done = helm("template", "qmq", str(CHART), "--namespace", "qmq", "--api-versions", "monitoring.coreos.com/v1", *more)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]
