"""Broker groups for benchmarks: etcd, a metaserver and some replicas, as processes on free loopback ports, without pauses."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from qmq_coordination.etcd.process import EtcdProcess, free_ports


class ReplicaSet:
    """`count` replicas of each of `groups` broker groups (g, h, ...), ready when made."""

    def __init__(self, count: int, *options: str, groups: int = 1) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="qmq-bench-"))
        self._options = options
        self.groups = {group: [f"{group}{number}" for number in range(count)] for group in "ghijkl"[:groups]}
        self.names = [name for names in self.groups.values() for name in names]
        count = len(self.names)
        ports = free_ports(2 * count + 1)
        self.address = f"127.0.0.1:{ports[-1]}"
        self.control = {name: f"127.0.0.1:{ports[2 * at + 1]}" for at, name in enumerate(self.names)}
        self._ports = {name: (ports[2 * at], ports[2 * at + 1]) for at, name in enumerate(self.names)}
        self.etcd = EtcdProcess(self.folder / "etcd")
        self.etcd.start()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for name in self.names:
            self.start(name)
        meta = self._run("meta", "--port", str(ports[-1]))
        self.processes["meta"] = meta

    def start(self, name: str) -> None:
        """Start a replica, and wait until it is ready."""
        data, control = self._ports[name]
        self.processes[name] = self._run(
            "broker",
            "--group",
            name[0],
            "--replica",
            name,
            "--replicas",
            ",".join(self.groups[name[0]]),
            "--data",
            str(self.folder / name),
            "--data-port",
            str(data),
            "--control-port",
            str(control),
            *self._options,
        )

    def _run(self, *words: str) -> subprocess.Popen[str]:
        endpoint = self.etcd.endpoint.removeprefix("http://")
        process = subprocess.Popen([sys.executable, "-m", "qmq.cli", *words, "--etcd", endpoint], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if "is ready" not in process.stdout.readline():
            raise SystemExit(f"{words[0]} did not start")
        return process

    def kill(self, name: str) -> None:
        _kill(self.processes.pop(name))

    def stop(self) -> None:
        """Stop all processes, and delete their data."""
        for process in self.processes.values():
            _kill(process)
        self.etcd.stop()
        shutil.rmtree(self.folder)


def _kill(process: subprocess.Popen[str]) -> None:
    with process:  # closes its output
        process.kill()
