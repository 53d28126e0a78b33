"""A kubelet's part for one pod: its command as a local process, its probes, its restarts, and its end.

Starts pods as local processes: from the words of a container to those of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cluster_runner import processes
from cluster_runner.processes import Process
from cluster_runner.translate import NOT_INHERITED, program

from kubelet.manifests import PodTemplate, Probe

LOOK_S: Final = 0.05
RESTART_S: Final = 1.0


class ProcessPod:
    """`argv` and `environment` are those of its container, in the words of this machine; `stop_argv` is its preStop, empty for none."""

    def __init__(
        self,
        name: str,
        node: str,
        address: str,
        template: PodTemplate,
        argv: Sequence[str],
        stop_argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.name, self.node, self.address, self.template = name, node, address, template
        self._argv, self._stop_argv, self._environment = argv, stop_argv, environment
        self.log = log
        self.restarts = 0
        self.was_killed = False
        """Whether it did not end within its grace."""
        self._process: Process | None = None
        self._ready_since_s: float | None = None
        self._is_terminating = False
        self._running = asyncio.create_task(self._run())
        self._ending: asyncio.Task[None] | None = None

    # --- what the API server knows of it ----------------------------------------------------------------------------------

    @property
    def is_terminating(self) -> bool:
        return self._is_terminating

    @property
    def is_gone(self) -> bool:
        return self._ending is not None and self._ending.done()

    @property
    def ready_s(self) -> float | None:
        return None if self._ready_since_s is None else time.monotonic() - self._ready_since_s

    def raise_failure(self) -> None:
        for task in (self._running, self._ending):
            if task is not None and task.done() and not task.cancelled():
                task.result()

    # --- running ----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._process = processes.spawn(self._argv, self._environment, self.log, dies_with_us=True)
            await self._until_dead_or_not_alive()
            self._ready_since_s = None
            await self._end_process()
            self.restarts += 1
            await asyncio.sleep(RESTART_S)

    async def _until_dead_or_not_alive(self) -> None:
        """As a kubelet: neither readiness nor liveness is asked for before the startup probe has succeeded."""
        await _first_of(self._until_dead(), self._probe())

    async def _until_dead(self) -> None:
        while self._is_running():
            await asyncio.sleep(LOOK_S)

    def _is_running(self) -> bool:
        return self._process is not None and processes.state(self._process) != "dead"

    async def _probe(self) -> None:
        """Ends when the container is to be restarted."""
        startup = self.template.startup
        if startup is not None and not await self._started(startup):
            return
        await _first_of(self._live(self.template.liveness), self._ready(self.template.readiness))

    async def _started(self, probe: Probe) -> bool:
        for _ in range(probe.failures):
            if await self._succeeds(probe):
                return True
            await asyncio.sleep(probe.period_s)
        return False

    async def _live(self, probe: Probe | None) -> None:
        failures = 0
        while probe is None or failures < probe.failures:
            await asyncio.sleep(3600 if probe is None else probe.period_s)
            if probe is not None:
                failures = 0 if await self._succeeds(probe) else failures + 1

    async def _ready(self, probe: Probe | None) -> None:
        failures = 0
        while True:
            if probe is None or await self._succeeds(probe):
                failures = 0
                self._ready_since_s = self._ready_since_s or time.monotonic()
            else:
                failures += 1
                if failures >= probe.failures:
                    self._ready_since_s = None
            await asyncio.sleep(3600 if probe is None else probe.period_s)

    async def _succeeds(self, probe: Probe) -> bool:
        try:
            async with asyncio.timeout(probe.timeout_s):
                reader, writer = await asyncio.open_connection(self.address, probe.port)
                try:
                    if not probe.path:
                        return True
                    writer.write(f"GET {probe.path} HTTP/1.1\r\nHost: {self.address}\r\nConnection: close\r\n\r\n".encode())
                    status = (await reader.readline()).split()
                    return len(status) > 1 and 200 <= int(status[1]) < 400
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError):
            return False

    # --- the end ----------------------------------------------------------------------------------------------------------

    def delete(self) -> None:
        """Begin to end the pod: preStop, SIGTERM, and SIGKILL at the end of the grace period, which begins now."""
        if self._ending is None:
            self._is_terminating = True
            self._ready_since_s = None
            self._ending = asyncio.create_task(self._delete())

    async def _delete(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._ready_since_s = None
        ends_s = time.monotonic() + self.template.grace_s
        if self._stop_argv and self._is_running():
            before = processes.spawn(self._stop_argv, self._environment, self.log, dies_with_us=True)
            await _dead(before, ends_s - time.monotonic())
            processes.kill(before)
        await self._end_process(ends_s - time.monotonic())

    async def _end_process(self, grace_s: float | None = None) -> None:
        if self._process is None:
            return
        processes.send(self._process, signal.SIGTERM)
        await _dead(self._process, self.template.grace_s if grace_s is None else grace_s)
        self.was_killed = self.was_killed or self._is_running()
        processes.kill(self._process)

    async def gone(self) -> None:
        """Wait for the end that was begun."""
        if self._ending is not None:
            await self._ending


async def _dead(process: Process, within_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(within_s, 0)):
            while processes.state(process) != "dead":
                await asyncio.sleep(LOOK_S)


async def _first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends; then cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LocalPods:
    """`hosts` are the names that pods know, such as etcd's, each with its address. The volume of a pod is a folder of its name, a Secret is
    the folder `secrets/NAME`.
    """

    def __init__(self, folder: Path, hosts: Mapping[str, str]) -> None:
        self._folder, self._hosts = folder, dict(hosts)

    def start(self, name: str, node: str, address: str, template: PodTemplate) -> ProcessPod:
        volume = self._folder / "volumes" / name
        volume.mkdir(parents=True, exist_ok=True)
        environment = {key: value for key, value in os.environ.items() if not NOT_INHERITED.search(key)}
        for variable, value in template.variables(name).items():
            environment[variable] = self._here(self._in_secret(value, template), address, volume)
        command, *words = template.command
        argv = [program(command), *[self._here(each, address, volume) for each in words]]
        before = [program(template.pre_stop[0]), *template.pre_stop[1:]] if template.pre_stop else []
        return ProcessPod(name, node, address, template, argv, before, environment, self._folder / f"{name}.log")

    def _in_secret(self, text: str, template: PodTemplate) -> str:
        for path, secret in template.secrets.items():
            if text.startswith(f"{path}/"):
                return str(self._folder / "secrets" / secret / text.removeprefix(f"{path}/"))
        return text

    def _here(self, text: str, address: str, volume: Path) -> str:
        if text in ("0.0.0.0", "/data"):
            return address if text == "0.0.0.0" else str(volume)
        for name, place in self._hosts.items():
            text = text.replace(name, place)
        return text
