"""What Kubernetes' controllers decide: the StatefulSet's and the Deployment's rolling update, the
scheduler's choice of a node, and whether a PodDisruptionBudget allows an eviction. Pure; the rules
are those of Kubernetes 1.33's source.

The part of cert-manager: a Secret for each Certificate of the chart, from an authority of this
test.

A small Kubernetes: the controllers' decisions on pods that are local processes.

Nodes are names. Each pod has its own address on loopback. A restarted pod has the same address, as
a pod in Kubernetes keeps its DNS name. A volume claim is a folder that follows the pod. The chart's
certificates come from an authority in the folder `authority`.

A kubelet's part for one pod: its command as a local process, its probes, its restarts, and its end.

Starts pods as local processes: from the words of a container to those of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster_runner import processes
from cluster_runner.network import Loopback
from cluster_runner.processes import Process
from cluster_runner.translate import NOT_INHERITED, program
from kubelet.manifests import Budget, PodSet, PodTemplate, Probe, budgets, pod_sets

from qmq.security.certificates import Place, create_authority, issue

LOOK_S: Final = 0.05
RESTART_S: Final = 1.0


class ProcessPod:
    """`argv` and `environment` are those of its container, in the words of this machine;
    `stop_argv` is its preStop, empty for none.
    """

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

    # --- what the API server knows of it ----------------------------------------------------------

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

    # --- running ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._process = processes.spawn(
                self._argv, self._environment, self.log, dies_with_us=True
            )
            await self._until_dead_or_not_alive()
            self._ready_since_s = None
            await self._end_process()
            self.restarts += 1
            await asyncio.sleep(RESTART_S)

    async def _until_dead_or_not_alive(self) -> None:
        """As a kubelet: neither readiness nor liveness is asked for before the startup probe has
        succeeded.
        """
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
                    writer.write(
                        (
                            f"GET {probe.path} HTTP/1.1\r\nHost: {self.address}\r\nConnection: "
                            "close\r\n\r\n"
                        ).encode()
                    )
                    status = (await reader.readline()).split()
                    return len(status) > 1 and 200 <= int(status[1]) < 400
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError):
            return False

    # --- the end ----------------------------------------------------------------------------------

    def delete(self) -> None:
        """Begin to end the pod: preStop, SIGTERM, and SIGKILL at the end of the grace period, which
        begins now.
        """
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
            before = processes.spawn(
                self._stop_argv, self._environment, self.log, dies_with_us=True
            )
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
    """`hosts` are the names that pods know, such as etcd's, each with its address. The volume of a
    pod is a folder of its name, a Secret is the folder `secrets/NAME`.
    """

    def __init__(self, folder: Path, hosts: Mapping[str, str]) -> None:
        self._folder, self._hosts = folder, dict(hosts)

    def start(self, name: str, node: str, address: str, template: PodTemplate) -> ProcessPod:
        volume = self._folder / "volumes" / name
        volume.mkdir(parents=True, exist_ok=True)
        environment = {
            key: value for key, value in os.environ.items() if not NOT_INHERITED.search(key)
        }
        for variable, value in template.variables(name).items():
            environment[variable] = self._here(self._in_secret(value, template), address, volume)
        command, *words = template.command
        argv = [program(command), *[self._here(each, address, volume) for each in words]]
        before = (
            [program(template.pre_stop[0]), *template.pre_stop[1:]] if template.pre_stop else []
        )
        return ProcessPod(
            name, node, address, template, argv, before, environment, self._folder / f"{name}.log"
        )

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


SURGE: Final = 1


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod as its controller sees it."""

    name: str
    labels: Mapping[str, str]
    revision: str
    node: str
    ready_s: float | None
    """For how long it has been ready; None if it is not."""
    is_terminating: bool = False

    @property
    def is_ready(self) -> bool:
        return self.ready_s is not None and not self.is_terminating

    def is_available(self, min_ready_s: float) -> bool:
        return self.is_ready and self.ready_s is not None and self.ready_s >= min_ready_s


@dataclass(frozen=True, slots=True)
class Step:
    """The pods that a controller creates and deletes now."""

    create: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()


def next_step(wanted: PodSet, pods: Sequence[PodView]) -> Step:
    return _stateful(wanted, pods) if wanted.is_stateful else _deployed(wanted, pods)


def _stateful(wanted: PodSet, pods: Sequence[PodView]) -> Step:
    """With `Parallel`, all missing pods together. Otherwise the highest ordinal of another
    revision, once all pods with higher ordinals are available.
    """
    by_name = {each.name: each for each in pods}
    names = [f"{wanted.name}-{ordinal}" for ordinal in range(wanted.replicas)]
    missing = tuple(each for each in names if each not in by_name)
    if missing:
        return Step(create=missing)
    for name in reversed(names):
        pod = by_name[name]
        if pod.revision != wanted.template.revision and not pod.is_terminating:
            return Step(delete=(name,))
        if not pod.is_available(wanted.min_ready_s):
            return Step()
    return Step()


def _deployed(wanted: PodSet, pods: Sequence[PodView]) -> Step:
    """One more than wanted at most, and never fewer available ones than wanted while pods are
    replaced (maxSurge 1, maxUnavailable 0).
    """
    living = [each for each in pods if not each.is_terminating]
    old = [each for each in living if each.revision != wanted.template.revision]
    fresh = [each for each in living if each.revision == wanted.template.revision]
    if len(fresh) < wanted.replicas and len(living) < wanted.replicas + SURGE:
        taken = {each.name for each in pods}
        free = (
            name
            for number in range(len(taken) + 1)
            if (name := f"{wanted.name}-{number}") not in taken
        )
        return Step(create=(next(free),))
    available = sum(each.is_available(wanted.min_ready_s) for each in living)
    unready = [each.name for each in old if not each.is_ready]
    if unready:
        return Step(delete=(unready[0],))
    if old and available > wanted.replicas:
        return Step(delete=(old[0].name,))
    return Step()


def choose_node(
    wanted: PodSet, nodes: Iterable[str], cordoned: frozenset[str], pods: Sequence[PodView]
) -> str | None:
    """The node with the fewest pods of this set, or none: topology spread counts cordoned nodes too
    (nodeTaintsPolicy: Ignore).
    """
    own = [each for each in pods if each.labels == wanted.template.labels]
    counts = {node: sum(each.node == node for each in own) for node in nodes}
    loads = {node: sum(each.node == node for each in pods) for node in counts}
    least = min(counts.values())
    allowed = [
        node
        for node in counts
        if node not in cordoned
        and not (wanted.template.spreads_hosts and counts[node] + 1 - least > 1)
    ]
    return min(allowed, key=lambda node: (counts[node], loads[node], node), default=None)


def allows_eviction(
    budgets: Iterable[Budget], pod: PodView, pods: Sequence[PodView], expected: Mapping[str, int]
) -> bool:
    """The eviction API's answer. `expected` is the number of pods that each budget's controller
    wants.
    """
    for budget in budgets:
        if not budget.covers(pod.labels):
            continue
        healthy = sum(each.is_ready and budget.covers(each.labels) for each in pods)
        needed = expected[budget.name] - budget.unavailable_max
        if healthy - pod.is_ready < needed:
            return False
    return True


PRINCIPAL: Final = "spiffe://qmq/"


def make_secrets(
    objects: Sequence[Mapping[str, Any]], folder: Path, addresses: Callable[[str], Sequence[str]]
) -> None:
    """Make `secrets/NAME` in `folder` for each Certificate, with an authority in `authority` if
    there are any.

    `addresses` returns the local addresses of the pods that a certificate is for: they take the
    place of the pods' DNS names.
    """
    wanted = [each for each in objects if each["kind"] == "Certificate"]
    if wanted:
        create_authority(folder / "authority")
    for each in wanted:
        spec, secret = each["spec"], folder / "secrets" / each["spec"]["secretName"]
        secret.mkdir(parents=True)
        (uri,) = spec["uris"]
        kind, name = uri.removeprefix(PRINCIPAL).split("/")
        hosts = [*spec["dnsNames"], *addresses(each["metadata"]["name"].removesuffix("-tls"))]
        issue(
            folder / "authority",
            name,
            kind,
            hosts,
            place=Place(secret / "ca.crt", secret / "tls.crt", secret / "tls.key"),
        )


ROUND_S: Final = 0.1
EVICT_S: Final = 0.5


class ProcessKubernetes:
    """`hosts` are other names that pods know, such as etcd's, each with its address and port."""

    def __init__(
        self,
        folder: Path,
        objects: Sequence[Mapping[str, Any]],
        nodes: Sequence[str],
        hosts: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._nodes = tuple(nodes)
        self._cordoned: frozenset[str] = frozenset()
        self._pods: dict[str, ProcessPod] = {}
        self.killed: list[str] = []
        """Pods that did not end within their grace."""
        self.fewest_ready: dict[str, int] = {}
        """Of each budget, the fewest pods that were ready at a time since the first roll-out."""
        self.apply(objects)
        names = [name for each in self._sets for name in _pod_names(each)]
        self._network = Loopback(folder, names)
        self._network.claim()
        own = {
            f"{name}.{each.service}.qmq.svc": self._network.addresses[name]
            for each in self._sets
            for name in _pod_names(each)
        }
        make_secrets(objects, folder, self.addresses)
        self._local = LocalPods(folder, {**hosts, **own})
        self._controlling = asyncio.create_task(self._control())

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """From now on these are wanted. The sets must be the same ones."""
        self._sets, self._budgets = pod_sets(objects), budgets(objects)

    def addresses(self, pod_set: str) -> list[str]:
        """The addresses of all pods that a set may have."""
        (found,) = [each for each in self._sets if each.name == pod_set]
        return [self._network.addresses[name] for name in _pod_names(found)]

    def logs(self) -> str:
        """What all pods wrote so far, those that are gone included."""
        return "".join(
            path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log"))
        )

    def restarts(self) -> dict[str, int]:
        return {name: pod.restarts for name, pod in self._pods.items() if pod.restarts}

    # --- controllers ------------------------------------------------------------------------------

    async def _control(self) -> None:
        while True:
            for name in [name for name, pod in self._pods.items() if pod.is_gone]:
                pod = self._pods.pop(name)
                self.killed += [name] if pod.was_killed else []
            for wanted in self._sets:
                self._step(wanted)
            self._count_ready()
            await asyncio.sleep(ROUND_S)

    def _step(self, wanted: PodSet) -> None:
        step = next_step(wanted, self._views(wanted))
        for name in step.delete:
            self._pods[name].delete()
        for name in step.create:
            node = choose_node(wanted, self._nodes, self._cordoned, self._views())
            if node is not None:
                self._pods[name] = self._local.start(
                    name, node, self._network.addresses[name], wanted.template
                )

    def _views(self, wanted: PodSet | None = None) -> list[PodView]:
        names = set(self._pods) if wanted is None else set(_pod_names(wanted)) & self._pods.keys()
        return [
            PodView(
                name,
                pod.template.labels,
                pod.template.revision,
                pod.node,
                pod.ready_s,
                pod.is_terminating,
            )
            for name, pod in sorted(self._pods.items())
            if name in names
        ]

    def _count_ready(self) -> None:
        for budget in self._budgets:
            if budget.name in self.fewest_ready:
                ready = sum(each.is_ready and budget.covers(each.labels) for each in self._views())
                self.fewest_ready[budget.name] = min(ready, self.fewest_ready[budget.name])

    # --- what an operator does --------------------------------------------------------------------

    async def rolled_out(self, *, within_s: float = 300.0) -> None:
        """Wait until all that is wanted is there and available, and nothing else."""
        await self._until(self._is_rolled_out, within_s)
        for budget in self._budgets:
            self.fewest_ready.setdefault(budget.name, self._expected()[budget.name])

    def _is_rolled_out(self) -> bool:
        for wanted in self._sets:
            views = self._views(wanted)
            is_current = all(
                each.revision == wanted.template.revision and each.is_available(wanted.min_ready_s)
                for each in views
            )
            if len(views) != wanted.replicas or not is_current:
                return False
        return True

    def _expected(self) -> dict[str, int]:
        return {
            budget.name: sum(
                each.replicas for each in self._sets if budget.covers(each.template.labels)
            )
            for budget in self._budgets
        }

    def node_of(self, pod: str) -> str:
        return self._pods[pod].node

    async def drain(self, node: str, *, within_s: float = 120.0) -> float:
        """As `kubectl drain`: no new pods there, and every pod is evicted as soon as its budget
        allows. Returns the seconds it took.
        """
        begin_s = time.monotonic()
        self._cordoned |= {node}
        leaving = [pod for pod in self._pods.values() if pod.node == node]
        async with asyncio.timeout(within_s):
            while waiting := [each for each in leaving if not each.is_terminating]:
                for pod in waiting:
                    (view,) = [each for each in self._views() if each.name == pod.name]
                    if allows_eviction(self._budgets, view, self._views(), self._expected()):
                        pod.delete()
                self._raise_failures()
                await asyncio.sleep(EVICT_S)
            await asyncio.gather(*[each.gone() for each in leaving])
        return time.monotonic() - begin_s

    async def _until(self, is_so: Callable[[], bool], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not is_so():
                    self._raise_failures()
                    await asyncio.sleep(ROUND_S)
        except TimeoutError as cause:
            logs = {
                name: pod.log.read_text(errors="replace")[-400:]
                for name, pod in self._pods.items()
                if pod.ready_s is None
            }
            raise TimeoutError(f"not ready: {logs}") from cause

    def _raise_failures(self) -> None:
        if self._controlling.done():
            self._controlling.result()
        for pod in self._pods.values():
            pod.raise_failure()

    async def stop(self) -> None:
        """End everything."""
        self._controlling.cancel()
        await asyncio.gather(self._controlling, return_exceptions=True)
        for pod in self._pods.values():
            pod.delete()
        await asyncio.gather(*[pod.gone() for pod in self._pods.values()])


def _pod_names(wanted: PodSet) -> list[str]:
    """All names that the pods may have: new pods of a Deployment start while the old ones still
    end.
    """
    count = wanted.replicas if wanted.is_stateful else 2 * wanted.replicas + SURGE
    return [f"{wanted.name}-{number}" for number in range(count)]
