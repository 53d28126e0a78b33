"""A cluster with a delay group, as processes on free loopback ports: etcd, metaservers, a broker group, a delay group. Tests kill each.

A test can start a process of the delay group with a *crash point* (system/crashing.py), where it dies, and with another clock
(system/faketime.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from qmq_coordination.etcd.process import EtcdProcess, ServerTls, free_ports

from qmq.proto.v1 import control_pb2 as pb
from qmq.rpc.network import NETWORK
from qmq.rpc.tls_network import TlsNetwork
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import Credentials, Tls
from system.group import describe

ROOT: Final = Path(__file__).resolve().parents[2]
META: Final = "meta"
READY: Final = "is ready"
ETCD: Final = "etcd"
ADMIN: Final = "admin"
FILES: Final = ("ca", "cert", "key")


def _issued(folder: Path, names: Sequence[str]) -> dict[str, Tls]:
    """A certificate for each process, for etcd, and for who looks on."""
    create_authority(folder)
    kinds = {**dict.fromkeys(names, "node"), META: "meta", ETCD: "node", ADMIN: "op"}
    made = {name: issue(folder, name, kind, ["127.0.0.1"]) for name, kind in kinds.items()}
    return {name: Tls(folder / "ca.pem", each.cert, each.key) for name, each in made.items()}


class DelayCluster:
    """One broker group `g` and one delay group `d`. `start_all`, then verbs by name; `stop` ends everything."""

    def __init__(self, folder: Path, *, brokers: int = 1, delays: int = 3, options: Sequence[str] = (), secure: bool = False) -> None:
        """With `secure` everything uses TLS, and every process has a certificate."""
        self.folder = folder
        self.brokers = [f"g{number}" for number in range(brokers)]
        self.delays = [f"d{number}" for number in range(delays)]
        self.options = list(options)
        names = [*self.brokers, *self.delays]
        ports = free_ports(2 * len(names) + 1)
        self._ports = {name: (ports[2 * at], ports[2 * at + 1]) for at, name in enumerate(names)}
        self._meta_port = ports[-1]
        self.server = f"127.0.0.1:{self._meta_port}"
        self._papers: dict[str, Tls] = _issued(folder / "papers", names) if secure else {}
        self.tls = self._papers.get(ADMIN)
        """What this process shows; None: nothing."""
        self.network = NETWORK if self.tls is None else TlsNetwork(Credentials(self.tls))
        member = self._papers.get(ETCD)
        tls = ServerTls(member.ca, member.cert, member.key) if member is not None and member.cert and member.key else None
        self.etcd = EtcdProcess(folder / "etcd", tls=tls)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.logs: dict[str, Path] = {}

    # --- life ----------------------------------------------------------------------------------------------------------

    async def start_all(self) -> None:
        """Up, and ready."""
        await asyncio.to_thread(self.etcd.start)
        await asyncio.gather(*[self.start(name) for name in (META, *self.brokers, *self.delays)])

    async def start(self, name: str, *, crash: str = "", environment: Mapping[str, str] | None = None) -> None:
        """Start a process and wait until it reports that it is ready."""
        await asyncio.to_thread(self._start, name, crash, environment or {})

    def _start(self, name: str, crash: str, environment: Mapping[str, str]) -> None:
        module = ["-m", "system.crashing", crash] if crash else ["-m", "qmq.cli"]
        path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        with self._log(name).open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, *module, *self._words(name), "--etcd", self.etcd.endpoint.removeprefix("http://")],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": path, **self._shown(name), **environment},
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        if READY not in line and not crash:  # one that is to crash may do so at once, while it follows
            process.kill()
            process.wait()
            raise RuntimeError(f"{name} did not start: {line!r}; {self._log(name).read_text()[-2000:]}")
        self.processes[name] = process

    def _shown(self, name: str) -> dict[str, str]:
        """The paths of a process's certificate."""
        tls = self._papers.get(name)
        return (
            {} if tls is None else {f"QMQ_{where}_{what.upper()}": str(getattr(tls, what)) for where in ("TLS", "ETCD") for what in FILES}
        )

    def _log(self, name: str) -> Path:
        return self.logs.setdefault(name, self.folder / f"{name}.log")

    def _words(self, name: str) -> list[str]:
        if name == META:
            return ["meta", "--port", str(self._meta_port)]
        data, control = self._ports[name]
        role, group, members = ("delay", "d", self.delays) if name in self.delays else ("broker", "g", self.brokers)
        return [
            role,
            "--group",
            group,
            "--replica",
            name,
            "--replicas",
            ",".join(members),
            "--data",
            str(self.folder / name),
            "--data-port",
            str(data),
            "--control-port",
            str(control),
            *(self.options if role == "delay" else ()),
        ]

    def kill(self, name: str) -> None:
        """SIGKILL; harmless if it is gone."""
        process = self.processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT and others."""
        self.processes[name].send_signal(number)

    def is_running(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    async def stop(self) -> None:
        """End everything."""
        for name in list(self.processes):
            self.kill(name)
        await asyncio.to_thread(self.etcd.stop)

    # --- looking -------------------------------------------------------------------------------------------------------

    def control(self, name: str) -> str:
        """Address of a replica's control port."""
        return f"127.0.0.1:{self._ports[name][1]}"

    async def statuses(self, names: Sequence[str]) -> dict[str, pb.ReplicaStatus]:
        """The statuses of all replicas that answer."""
        found = await asyncio.gather(*[describe(self.control(name), self.network) for name in names])
        return {name: status for name, status in zip(names, found, strict=True) if status is not None}

    async def delay_master(self, *, within_s: float = 240.0) -> str:
        """The serving master of the delay group, waited for."""
        async with asyncio.timeout(within_s):
            while True:
                serving = {name: each for name, each in (await self.statuses(self.delays)).items() if each.is_serving}
                if serving:
                    return max(serving, key=lambda name: serving[name].epoch)
                await asyncio.sleep(0.05)

    async def settled(self, *, within_s: float = 240.0) -> str:
        """The delay group's master, when all its replicas are there and in step."""
        async with asyncio.timeout(within_s):
            while True:
                found = await self.statuses(self.delays)
                masters = [name for name, each in found.items() if each.is_serving]
                is_whole = len(found) == len(self.delays) and len(masters) == 1
                if is_whole and sum(peer.in_step for peer in found[masters[0]].peers) == len(found) - 1:
                    return masters[0]
                await asyncio.sleep(0.05)
