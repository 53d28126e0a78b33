"""A service that can be started on this machine: the compose file's values, translated for a
network and a state folder.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from cluster_runner import processes
from cluster_runner.compose import Service
from cluster_runner.errors import ClusterError
from cluster_runner.health import Check, port_of
from cluster_runner.network import Network
from cluster_runner.processes import Process
from cluster_runner.state import StateFolder
from cluster_runner.translate import Translator


class Launcher:
    """Starts services, and knows their health checks."""

    def __init__(
        self,
        services: Mapping[str, Service],
        network: Network,
        folder: StateFolder,
        releases: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        """`releases` are folders of packages that services run instead of this checkout's."""
        self.services, self.network, self.folder, self._releases = (
            services,
            network,
            folder,
            releases,
        )

    def translator(self, service: Service) -> Translator:
        """The words of a service at its place on the network."""
        folders = {path: self.folder.volume(volume) for path, volume in service.volumes.items()}
        return Translator(self.network.addresses, self.network.own(service.name), folders)

    def argv(self, name: str) -> list[str]:
        """The command of a service."""
        service = self.services[name]
        return [*self.network.prefix(name), *self.translator(service).argv(service.command)]

    def environment(self, name: str) -> dict[str, str]:
        service = self.services[name]
        found = self.translator(service).environment(service)
        return (
            {**found, "PYTHONPATH": str(self._releases[name])} if name in self._releases else found
        )

    def check(self, name: str) -> Check | None:
        """The service's health check; None without one."""
        service = self.services[name]
        if not service.health:
            return None
        try:
            argv = [*self.network.prefix(name), *self.translator(service).argv(service.health)]
        except ClusterError:
            if service.health[0] != "etcdctl":
                raise
            argv = []
        address, environment = self.network.addresses[name], self.environment(name)
        # over HTTP where there is no TLS: etcd's metrics have /health, too
        asked = (
            service.health
            if argv
            else [environment.get("ETCD_LISTEN_METRICS_URLS", ""), *service.health]
        )
        # A shell asks cheaply, and may ask a port that only the service's own loopback has.
        port = 0 if service.health[0] == "bash" else port_of(asked)
        return Check(argv, environment, address, port, service.health_timeout_s)

    def start(self, name: str, *, dies_with_us: bool = False) -> Process:
        """Make the service's volumes, write its command to the log, and start it."""
        return processes.spawn(
            self._prepared(name),
            self.environment(name),
            self.folder.log(name),
            dies_with_us=dies_with_us,
        )

    def complete(self, name: str, within_s: float) -> int:
        """Run the service until it ends. Returns the exit status. Raises ClusterError."""
        argv = self._prepared(name)
        with self.folder.log(name).open("ab") as log:
            try:
                return subprocess.run(
                    argv,
                    env=self.environment(name),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=within_s,
                    check=False,
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as cause:
                raise ClusterError(f"{name}: {cause}\n{self.log_tail(name)}") from cause

    def _prepared(self, name: str) -> list[str]:
        for volume in self.services[name].volumes.values():
            self.folder.volume(volume).mkdir(
                parents=True, exist_ok=True, mode=0o700
            )  # etcd warns if others may look
        self.network.attach(name)
        argv, log = self.argv(name), self.folder.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"--- {' '.join(argv)}\n")
        return argv

    def outside(self) -> Translator:
        """The settings of a client on this machine, which is not a service."""
        return Translator(self.network.addresses, "", {})

    def run(self, argv: Sequence[str], name: str) -> tuple[list[str], dict[str, str]]:
        """Argv and environment of a command on this machine, or of the service's own command, as if
        in the service's container.
        """
        service, outside = self.services[name], self.outside()
        mine = Translator(
            outside.addresses, outside.own, self.translator(service).folders
        )  # a variable may name a file in a volume
        return outside.argv(argv) if argv else mine.argv(service.command), mine.environment(service)

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The last lines of a service's output."""
        log = self.folder.log(name)
        return (
            "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""
        )
