"""Requirements of some tests. Without them the tests are skipped with a reason that says how to
install them; CI has all of them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from pathlib import Path

import pytest

from qmq.process.kernel_sync import NUMBERS, system_call
from support.etcd_process import find_binary

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from cluster_runner.netns import unavailable

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "qmq-tests")
"""The folder of tools that scripts fetch for tests: scripts/judges, scripts/kubernetes_tools,
scripts/rocketmq_clients.
"""

NO_ETCD = "no etcd: run scripts/setup, put etcd on the PATH, or set QMQ_ETCD_BIN"
NO_NAMESPACES = "no network namespaces: they need root and apt-get install iproute2"
NO_MOUNTS = "no file systems of the test's own: mounting one needs root"
NO_STRACE = "no strace: apt-get install strace"
NO_KERNEL_SYNCS = "no Linux AIO: this kernel, or the container, refuses io_setup"
NO_PROMTOOL = "no promtool: apt-get install prometheus, or set QMQ_PROMTOOL"
NO_CHROMIUM = "no Chromium: apt-get install chromium"
NO_NODE = "no Node: put node and npm on the PATH"
NO_HELM = "no helm with schemas of Kubernetes: run scripts/kubernetes_tools"
NO_KUBE_TOOLS = "no kubeconform and kube-score: put Go on the PATH and run scripts/kubernetes_tools"
NO_CONFTEST = "no conftest: put Go on the PATH and run scripts/kubernetes_tools --all"
NO_CONTROL_PLANE = (
    "no API server, scheduler and controllers of Kubernetes: put Go on the PATH and run "
    "scripts/kubernetes_tools --all"
)
NO_S3_SERVER = "no versitygw, an S3 server: put Go on the PATH and run scripts/judges"
NO_ICEBERG_REST = "no REST catalog of Iceberg: put java and mvn on the PATH and run scripts/judges"
OTHER_PYSPARK = "4.2.1"
"""Beside the one of the lock file, that of the other supported release (scripts/spark_versions)."""
NO_OTHER_PYSPARK = f"no PySpark {OTHER_PYSPARK}: run scripts/spark_versions"
NO_ENGINE = "no container engine: no DOCKER_HOST and no docker socket"


def can_use_namespaces() -> bool:
    """Whether this machine can make network partitions. As in `scripts/cluster`, that needs the
    rights, `ip` and `nsenter`.
    """
    return not unavailable()


def has_kernel_syncs() -> bool:
    """Whether the kernel syncs files by itself."""
    call, context = system_call(), ctypes.c_uint64()
    if call is None:
        return False
    numbers = NUMBERS[platform.machine()]
    is_taken = call(numbers.setup, 1, ctypes.addressof(context), 0, 0, 0) == 0
    if is_taken:
        call(numbers.destroy, context.value, 0, 0, 0, 0)
    return is_taken


def has_engine() -> bool:
    return "DOCKER_HOST" in os.environ or Path("/var/run/docker.sock").exists()


def find_promtool() -> str | None:
    """Prometheus' own checker of rules."""
    return os.environ.get("QMQ_PROMTOOL") or shutil.which("promtool")


def find_prometheus() -> str | None:
    """The server of Prometheus, which comes with its checker."""
    beside = Path(find_promtool() or "").with_name("prometheus") if find_promtool() else None
    return str(beside) if beside is not None and beside.exists() else shutil.which("prometheus")


def find_kubernetes_tools() -> Path | None:
    """The folder with helm, kubectl and Kubernetes' schemas."""
    folder = CACHE / "kubernetes"
    return folder if (folder / "complete").exists() else None


def find_kube_tool(name: str) -> Path | None:
    """kubeconform, kube-score or conftest."""
    found = CACHE / "kubernetes" / "go" / name
    return (
        found
        if found.exists() and (CACHE / "kubernetes" / "schemas" / "complete").exists()
        else None
    )


def find_control_plane() -> Path | None:
    """The folder with kube-apiserver, kube-controller-manager and kube-scheduler."""
    folder = CACHE / "kubernetes" / "go"
    names = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    return folder if all((folder / each).exists() for each in names) else None


def find_s3_server() -> Path | None:
    """versitygw, an S3 server that keeps objects as files."""
    found = CACHE / "judges" / "versitygw"
    return found if found.exists() else None


def find_iceberg_rest() -> Path | None:
    """The folder with the jars of Apache Iceberg's REST catalog for tests."""
    folder = CACHE / "judges" / "iceberg-rest"
    return folder if (folder / "complete").exists() else None


def find_other_pyspark() -> Path | None:
    """The folder whose package `pyspark` is of the other supported release."""
    folder = CACHE / "pyspark" / OTHER_PYSPARK
    return folder if (folder / "complete").exists() else None


def need_etcd() -> None:
    """For fixtures, which cannot have a mark."""
    if find_binary() is None:
        pytest.skip(NO_ETCD)


etcd = pytest.mark.skipif(find_binary() is None, reason=NO_ETCD)
namespaces = pytest.mark.skipif(not can_use_namespaces(), reason=NO_NAMESPACES)
mounts = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason=NO_MOUNTS)
strace = pytest.mark.skipif(shutil.which("strace") is None, reason=NO_STRACE)
kernel_syncs = pytest.mark.skipif(not has_kernel_syncs(), reason=NO_KERNEL_SYNCS)
engine = pytest.mark.skipif(not has_engine(), reason=NO_ENGINE)
prometheus = pytest.mark.skipif(find_prometheus() is None, reason=NO_PROMTOOL)
promtool = pytest.mark.skipif(find_promtool() is None, reason=NO_PROMTOOL)
chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason=NO_CHROMIUM)
node = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None, reason=NO_NODE
)
s3_server = pytest.mark.skipif(find_s3_server() is None, reason=NO_S3_SERVER)
kube_tools = pytest.mark.skipif(
    find_kube_tool("kubeconform") is None or find_kube_tool("kube-score") is None,
    reason=NO_KUBE_TOOLS,
)
conftest = pytest.mark.skipif(find_kube_tool("conftest") is None, reason=NO_CONFTEST)
control_plane = pytest.mark.skipif(find_control_plane() is None, reason=NO_CONTROL_PLANE)
helm = pytest.mark.skipif(find_kubernetes_tools() is None, reason=NO_HELM)
other_pyspark = pytest.mark.skipif(find_other_pyspark() is None, reason=NO_OTHER_PYSPARK)
