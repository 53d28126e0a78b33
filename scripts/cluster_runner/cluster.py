"""The operations of a cluster, used by `scripts/cluster` and by tests.

Services are started in the order of depends_on: etcd, then metaservers and brokers. A step begins
when the previous one is healthy. Two things differ from Docker: dead services are not restarted
(tests want to observe them), and `up` returns only when all services are healthy.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cluster_runner import processes
from cluster_runner.compose import (
    COMPOSE_FILE,
    SECURE_FILE,
    Service,
    resolve,
    services,
    waves,
    with_dependencies,
)
from cluster_runner.errors import ClusterError
from cluster_runner.launch import Launcher
from cluster_runner.networks import check_name, claim, network_of
from cluster_runner.processes import Process
from cluster_runner.state import State, StateFolder

HEALTHY_S: Final = 60.0
POLL_S: Final = 0.02
CERTS: Final = "certs"
"""The service that makes the certificates of a secured cluster."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One line of `status`."""

    service: str
    state: str
    """'running', 'paused', 'dead' (it was started and is gone) or 'absent'."""
    pid: int
    address: str
    health: str
    """'healthy', why not, or empty if it was not asked."""


class Cluster:
    """The services of a compose file as processes of this machine, remembered in a folder."""

    def __init__(
        self,
        state_dir: Path,
        network: str = "",
        environment: Mapping[str, str] | None = None,
        file: Path = COMPOSE_FILE,
        progress: Callable[[str], None] = lambda line: None,
        *,
        secure: bool = False,
    ) -> None:
        """`network` is 'loopback' or 'netns', empty for the remembered one; `environment` is for
        the file's ${...}, at `up`.

        With `secure`, docker-compose.secure.yml is merged into the file, and `up` first makes the
        missing certificates.
        """
        self.folder, self._network = StateFolder(state_dir), check_name(network)
        self._environment, self._file, self._progress = environment or {}, file, progress
        self._overrides = (SECURE_FILE,) if secure else ()
        self._releases: dict[str, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all services: a test needs no clean shutdown."""
        self.down(force=True)

    # --- up and down ------------------------------------------------------------------------------

    def up(
        self,
        names: Collection[str] = (),
        *,
        deps: bool = True,
        wait: bool = True,
        foreground: bool = False,
        within_s: float = HEALTHY_S,
    ) -> None:
        """Start services (all without a profile, if none is named) and what they need, and wait
        until they are healthy.

        With `foreground` they die with the thread that started them, so call it from the main one.
        """
        model = resolve(self._file, self._environment, *self._overrides)
        known = services(model)
        chosen = set(_known(names, known)) or {
            name for name, each in known.items() if not each.profiles
        }
        with self.folder.changing() as state:
            claim(self._network, state, self.folder, list(known))
            self.folder.save_model(model)
        if self._overrides:
            self._complete(CERTS, within_s)
        for step in waves(known, with_dependencies(known, chosen) if deps else chosen):
            self._start(step, wait=wait, dies_with_us=foreground, within_s=within_s)

    def start(self, *names: str, wait: bool = True, within_s: float = HEALTHY_S) -> None:
        """Start services that were killed or stopped, as `up` started them, without what they
        depend on.
        """
        self._start(names, wait=wait, within_s=within_s)

    def install(self, release: Path | None, *names: str) -> None:
        """Services run the packages in this folder after their next start.
        None means this checkout.
        """
        for name in _known(names, self.services):
            if release is None:
                self._releases.pop(name, None)
            else:
                self._releases[name] = release

    def stop(self, *names: str) -> None:
        """SIGTERM, and SIGKILL to a service that outlives its stop_grace_period."""
        known = self.services
        found = {name: self._running(name) for name in _known(names, known)}
        grace = {process: known[name].grace_s for name, process in found.items()}
        stubborn = processes.stop(grace)
        for name, process in found.items():
            self._progress(
                f"{name}: "
                + ("killed, it did not stop in time" if process in stubborn else "stopped")
            )

    def down(self, *, volumes: bool = False, force: bool = False) -> None:
        """Stop everything in the reverse order (with `force`: SIGKILL), and remove the network;
        with `volumes`, the data as well.
        """
        if not self.folder.path.exists():
            return
        state = self.folder.load()
        alive = {name for name, each in state.processes.items() if processes.state(each) != "dead"}
        for step in reversed(waves(self.services, alive)) if alive else ():
            (self.kill if force else self.stop)(*step)
        if state.is_claimed:
            network_of(state, self.folder).release()
        with self.folder.changing() as state:
            state.is_claimed, state.processes, state.cuts = False, {}, []
        if volumes:
            shutil.rmtree(self.folder.path)

    # --- faults -----------------------------------------------------------------------------------

    def kill(self, *names: str) -> None:
        """SIGKILL, and wait until the services are gone."""
        for name in names:
            processes.kill(self._running(name))

    def pause(self, *names: str) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        for name in names:
            processes.pause(self._running(name))

    def resume(self, *names: str) -> None:
        for name in names:
            processes.resume(self._running(name))

    def partition(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Drop all packets between two services;
        with `one_way`, only those that `a` sends to `b`.
        """
        with self._changing() as (state, launcher):
            _known((a, b), launcher.services)
            for source, target in [(a, b)] if one_way else [(a, b), (b, a)]:
                if (source, target) not in state.cuts:
                    launcher.network.cut(source, target)
                    state.cuts.append((source, target))

    def heal(self) -> None:
        with self._changing() as (state, launcher):
            while state.cuts:
                launcher.network.heal(*state.cuts[-1])
                state.cuts.pop()

    # --- looking ----------------------------------------------------------------------------------

    @property
    def services(self) -> dict[str, Service]:
        """The content of the compose file: as of the last `up`, or now if there was none."""
        return services(
            self.folder.load_model() or resolve(self._file, self._environment, *self._overrides)
        )

    def address(self, name: str) -> str:
        """The address of a service; its ports are the file's."""
        launcher = self._launcher(self.folder.load())
        _known((name,), launcher.services)
        return launcher.network.addresses[name]

    def translate(self, text: str) -> str:
        """Text with addresses for names: `translate("meta0:20880,meta1:20880")` is what a client of
        the cluster wants.
        """
        return self._launcher(self.folder.load()).outside().text(text)

    def prefix(self, name: str) -> list[str]:
        """The prefix of a command that runs at a service's place on the network;
        empty on loopback.
        """
        return self._launcher(self.folder.load()).network.prefix(name)

    def log(self, name: str) -> Path:
        """The file of a service's output."""
        return self.folder.log(name)

    def health(self, name: str) -> str:
        """Why a service is not healthy, by its health check; empty if it is, or if it has no check
        and runs.
        """
        check = self._launcher(self.folder.load()).check(name)
        state = self._state(name)
        return check.failure() if check and state != "dead" else "" if state == "running" else state

    def status(self, *, health: bool = False) -> list[ServiceStatus]:
        """Every service; with `health`, their checks are run."""
        state = self.folder.load()
        launcher = self._launcher(state)
        lines = []
        for name in launcher.services:
            process = state.processes.get(name)
            word = processes.state(process) if process else "absent"
            checked = (
                (self.health(name) or "healthy") if health and word in ("running", "paused") else ""
            )
            lines.append(
                ServiceStatus(
                    name,
                    word,
                    process.pid if process else 0,
                    launcher.network.addresses[name],
                    checked,
                )
            )
        return lines

    def exit_status(self, name: str) -> int | None:
        """How a service ended that this program started; see `processes.exit_status`."""
        process = self.folder.load().processes.get(name)
        return processes.exit_status(process) if process else None

    def run(self, argv: Sequence[str], service: str = "client") -> int:
        """Run a command on this machine in a service's environment, with addresses for names; its
        exit status.
        """
        words, environment = self._launcher(self.folder.load()).run(argv, service)
        return subprocess.run(words, env=environment, check=False).returncode

    # --- within -----------------------------------------------------------------------------------

    def _launcher(self, state: State) -> Launcher:
        return Launcher(self.services, network_of(state, self.folder), self.folder, self._releases)

    @contextmanager
    def _changing(self) -> Iterator[tuple[State, Launcher]]:
        with self.folder.changing() as state:
            yield state, self._launcher(state)

    def _start(
        self, names: Collection[str], *, wait: bool, within_s: float, dies_with_us: bool = False
    ) -> None:
        begin, known = time.monotonic(), self.services
        for name in [each for each in names if each in known and known[each].ends]:
            self._complete(name, within_s)
        names = [each for each in names if each not in known or not known[each].ends]
        for name in names:
            with self._changing() as (state, launcher):
                _known((name,), launcher.services)
                process = state.processes.get(name)
                if process is None or processes.state(process) == "dead":
                    process = state.processes[name] = launcher.start(
                        name, dies_with_us=dies_with_us
                    )
                    self._progress(
                        f"{name}: started at {launcher.network.addresses[name]}, process "
                        f"{process.pid}"
                    )
        for name in names if wait else ():
            self._wait(name, within_s - (time.monotonic() - begin))
            self._progress(f"{name}: healthy after {time.monotonic() - begin:.1f} s")

    def _complete(self, name: str, within_s: float) -> None:
        """Run a service that ends by itself. Raises ClusterError."""
        with self._changing() as (_, launcher):
            status = launcher.complete(name, within_s)
        if status:
            raise ClusterError(
                f"{name} failed with status {status}\n{self.log(name)} ends "
                f"with\n{launcher.log_tail(name)}"
            )
        self._progress(f"{name}: done")

    def _wait(self, name: str, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while failure := self.health(name):
            if self._state(name) == "dead" or time.monotonic() > deadline:
                tail = self._launcher(self.folder.load()).log_tail(name)
                raise ClusterError(
                    f"{name} is not healthy: {failure}\n{self.log(name)} ends with\n{tail}"
                )
            time.sleep(POLL_S)

    def _state(self, name: str) -> str:
        process = self.folder.load().processes.get(name)
        return processes.state(process) if process else "dead"

    def _running(self, name: str) -> Process:
        process = self.folder.load().processes.get(name)
        if process is None or processes.state(process) == "dead":
            raise ClusterError(f"{name} does not run")
        return process


def _known(names: Collection[str], known: Mapping[str, Service]) -> Collection[str]:
    for name in names:
        if name not in known:
            raise ClusterError(f"there is no service {name}, only {', '.join(known)}")
    return names
