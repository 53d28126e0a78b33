"""A backlog whose old part is only in an object store: how fast it is read, and whether memory and start time grow with the backlog.

`scripts/bench --only lake` runs it, with 4 GiB of 1 KB messages and 1 GiB on the disk; `--scale 25` makes 100 GiB, which the store's folder
(in TMPDIR) needs as free space. versitygw, which scripts/judges fetches, is the S3 server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

from qmq_coordination.etcd.process import free_ports

from bench.cold import SIZE, drain, fill, forget
from bench.group import ReplicaSet
from bench.processes import together
from bench.replicas import cpu_s
from qmq.limits import MIB

LOCAL_MIB: Final = 1024
SEGMENT_MIB: Final = 64
CACHE_MIB: Final = 256
READ_MIB: Final = 2048
"""The largest amount that is read back."""
STEP_MIB: Final = 512
WAIT_S: Final = 600
"""The longest time that the upload of the remaining segments may take after a step."""
SERVER: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "qmq-tests", "judges", "versitygw")

Figures = dict[str, float]


@contextmanager
def folder_store() -> Iterator[str]:
    """The URL of a store in a folder of this machine."""
    folder = tempfile.mkdtemp(prefix="qmq-bench-objects-")
    try:
        yield f"file://{folder}"
    finally:
        shutil.rmtree(folder)


@contextmanager
def s3_store() -> Iterator[str]:
    """The URL of a bucket of an S3 server on this machine. Sets the credentials for brokers that start later."""
    folder, port = Path(tempfile.mkdtemp(prefix="qmq-bench-s3-")), free_ports(1)[0]
    (folder / "data" / "qmq").mkdir(parents=True)
    (folder / "sidecar").mkdir()
    address = f"127.0.0.1:{port}"
    words = [str(SERVER), "--port", address, "--health", "/health", "--quiet", "posix", "--sidecar", str(folder / "sidecar")]
    os.environ |= {"AWS_ACCESS_KEY_ID": "qmq", "AWS_SECRET_ACCESS_KEY": "qmq-secret", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ENDPOINT": f"http://{address}", "ROOT_ACCESS_KEY": "qmq", "ROOT_SECRET_KEY": "qmq-secret"}
    process = subprocess.Popen([*words, str(folder / "data")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_healthy(address):
            time.sleep(0.05)
        yield "s3://qmq/segments"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def _is_healthy(address: str) -> bool:
    try:
        with urlopen(f"http://{address}/health", timeout=5):
            return True
    except (URLError, OSError):
        return False


def in_folder(mib: int) -> Figures:
    """A backlog of `mib` MiB, with a folder as the store."""
    with folder_store() as url:
        return backlog(url, mib)


def on_s3(mib: int) -> Figures | None:
    """A backlog of `mib` MiB, with an S3 server as the store. None without an S3 server."""
    if not SERVER.exists():
        return None
    with s3_store() as url:
        return backlog(url, mib)


def backlog(url: str, mib: int) -> Figures:
    """Fill, restart after a quarter and at the end, and read the oldest part back."""
    local_mib = min(LOCAL_MIB, max(mib // 4, 2 * SEGMENT_MIB))
    words = ("--object-store", url, "--segment-mib", str(SEGMENT_MIB), "--local-retention-mib", str(local_mib))
    group = ReplicaSet(1, *words, "--object-store-cache-mib", str(CACHE_MIB), "--retention-hours", "87600")
    try:
        found: Figures = {}
        filled, largest = 0, 0.0
        for part, name in ((mib // 4, "after a quarter"), (mib, "at the end")):
            while filled < part:
                step = min(STEP_MIB, part - filled)
                together((fill, group.address, step * MIB // SIZE // 1000 * 1000))
                filled += step
                largest = max(largest, _until_within(group, local_mib + 2 * SEGMENT_MIB))
            found[f"memory {name}, MiB"] = _resident_mib(group)
            found[f"start {name}, s"] = _restarted(group)
        found["largest log on the disk, MiB"] = largest
        for path in _message_folders(url):
            forget(path)
        read = min(READ_MIB, mib - local_mib) * MIB // SIZE // 1000 * 1000
        before, megabytes = sum(cpu_s(group.processes[group.names[0]].pid)), read * SIZE / 1e6
        found["cold read, MB/s"] = megabytes / together((drain, group.address, read))[0]
        found["cold read, the broker's CPU time, ms for each MB"] = (
            1e3 * (sum(cpu_s(group.processes[group.names[0]].pid)) - before) / megabytes
        )
        found["memory after reading, MiB"] = _resident_mib(group)
        return found
    finally:
        group.stop()


def _message_folders(url: str) -> list[Path]:
    """The store's files, if they are on this machine: recently uploaded objects are still in the page cache."""
    return [Path(url.removeprefix("file://"))] if url.startswith("file://") else []


def _log_mib(group: ReplicaSet) -> float:
    sizes = 0
    for path in (group.folder / group.names[0] / "broker" / "message").glob("*.log"):
        try:
            sizes += path.stat().st_size
        except FileNotFoundError:  # deleted just now
            continue
    return sizes / MIB


def _until_within(group: ReplicaSet, mib: float) -> float:
    """Wait until local retention has deleted the segments over its limit; returns the largest size seen."""
    until, largest = time.monotonic() + WAIT_S, 0.0
    while (size := _log_mib(group)) > mib:
        if time.monotonic() > until:
            raise SystemExit(f"the log has {size:.0f} MiB on the disk, and should have {mib:.0f}: the store does not keep up")
        largest = max(largest, size)
        time.sleep(0.2)
    return max(largest, size)


def _resident_mib(group: ReplicaSet) -> float:
    status = Path(f"/proc/{group.processes[group.names[0]].pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _restarted(group: ReplicaSet) -> float:
    """Seconds from the start of the process to its readiness, after a clean stop."""
    name = group.names[0]
    process = group.processes.pop(name)
    process.send_signal(signal.SIGTERM)
    process.wait()
    begin = time.monotonic()
    group.start(name)
    return time.monotonic() - begin
