"""The processes of a benchmark: nodes, groups of replicas, and jobs that each run in another
process; their CPU time and how it is limited.

A watcher stops a limited process (SIGSTOP) while it has used more than its part of a core. A
machine with few cores shows in this way what more processes give as long as there are cores for
them.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import qmq

try:
    from qmq.process.event_loop import calm_collector, keep_freed_memory
except ImportError:  # an older checkout, measured beside this one
    from qmq.process_tuning import calm_collector, keep_freed_memory  # type: ignore[import-not-found, no-redef]

# Not `support.etcd_process`: everyday.py runs this module with older checkouts, too, which have not
# all that the package of the tests' helpers imports.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

if TYPE_CHECKING:
    from etcd_process import EtcdProcess

SUBJECT: Final = "bench"
BATCH: Final = 1_000
TICK_S: Final = 0.005
BURST_S: Final = 0.02
"""The CPU time that a limited process may use at once after it has rested."""

Figures = dict[str, float]


# --- CPU time and memory --------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """CPU time of a process with all its threads, by the kernel's clock of that process, in
    nanoseconds (clock_getcpuclockid).
    """
    return time.clock_gettime(~pid << 3 | 2)


def resident_mib(pid: int) -> float:
    """The resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@dataclass(slots=True)
class Allowance:
    """The CPU time that a limited process may still use: it gains `core_part` of each second, up to
    BURST_S. Pure.
    """

    core_part: float
    now: float
    used_s: float
    left_s: float = 0.0

    def may_run(self, now: float, used_s: float) -> bool:
        """Whether the process may run on, if it has used so much CPU time since its start."""
        self.left_s = min(self.left_s + (now - self.now) * self.core_part, BURST_S) - (
            used_s - self.used_s
        )
        self.now, self.used_s = now, used_s
        return self.left_s > 0


@contextmanager
def limited(pids: Sequence[int], core_part: float) -> Iterator[None]:
    """Let each process use only a part of a core."""
    over = threading.Event()

    def watch() -> None:
        allowances = {pid: Allowance(core_part, time.monotonic(), cpu_s(pid)) for pid in pids}
        while not over.wait(TICK_S):
            for pid, allowance in allowances.items():
                os.kill(
                    pid,
                    signal.SIGCONT
                    if allowance.may_run(time.monotonic(), cpu_s(pid))
                    else signal.SIGSTOP,
                )

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


# --- servers --------------------------------------------------------------------------------------


class Node:
    """A `qmq dev` process with its own folder."""

    def __init__(self, *options: str, data: Path | None = None) -> None:
        self.data = data or Path(tempfile.mkdtemp(prefix="qmq-bench-"))
        ports = ("--port", "0", "--data-port", "0", "--control-port", "0", "--console", "off")
        command = [
            sys.executable,
            "-m",
            "qmq.cli",
            "dev",
            "--data",
            str(self.data),
            *ports,
            *options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.address = line.split("ready at ")[1].split()[0]

    def stop(self, *, keep: bool = False) -> None:
        """Stop the process and delete its data."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        if not keep:
            shutil.rmtree(self.data)


def etcd_at(folder: Path) -> EtcdProcess:
    """A member of etcd that is not started yet, with its data in this folder."""
    from etcd_process import EtcdProcess

    return EtcdProcess(folder / "etcd")


class ReplicaSet:
    """`count` replicas of each of `groups` broker groups (g, h, ...), with etcd and a metaserver:
    processes on free loopback ports, without pauses, ready when made.
    """

    def __init__(
        self, count: int, *options: str, groups: int = 1, variables: Mapping[str, str] | None = None
    ) -> None:
        """`options` are those of the brokers;
        `variables` are added to the environment of all servers.
        """
        from etcd_process import free_ports

        self.folder = Path(tempfile.mkdtemp(prefix="qmq-bench-"))
        self._options = options
        self._environment = {**os.environ, **(variables or {})}
        self.groups = {
            group: [f"{group}{number}" for number in range(count)] for group in "ghijkl"[:groups]
        }
        self.names = [name for names in self.groups.values() for name in names]
        count = len(self.names)
        ports = free_ports(2 * count + 1)
        self.address = f"127.0.0.1:{ports[-1]}"
        self.control = {
            name: f"127.0.0.1:{ports[2 * at + 1]}" for at, name in enumerate(self.names)
        }
        self._ports = {
            name: (ports[2 * at], ports[2 * at + 1]) for at, name in enumerate(self.names)
        }
        self.etcd = etcd_at(self.folder)
        self.etcd.start()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for name in self.names:
            self.start(name)
        self.processes["meta"] = self._run("meta", "--port", str(ports[-1]))

    def start(self, name: str) -> None:
        """Start a replica, and wait until it is ready."""
        data, control = self._ports[name]
        place = (
            "--group",
            name[0],
            "--replica",
            name,
            "--replicas",
            ",".join(self.groups[name[0]]),
            "--data",
            str(self.folder / name),
        )
        ports = ("--data-port", str(data), "--control-port", str(control))
        self.processes[name] = self._run("broker", *place, *ports, *self._options)

    def _run(self, *words: str) -> subprocess.Popen[str]:
        endpoint = self.etcd.endpoint.removeprefix("http://")
        command = [sys.executable, "-m", "qmq.cli", *words, "--etcd", endpoint]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=self._environment
        )
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


# --- jobs -----------------------------------------------------------------------------------------


def in_loop(work: Callable[..., Any], *words: Any) -> Any:
    """Run a coroutine function in a fast event loop of this process, tuned for throughput."""
    import uvloop

    keep_freed_memory()
    calm_collector()
    return uvloop.run(work(*words))


def in_process(results: Any, work: Callable[..., Any], *words: Any) -> None:
    """Entry of a child process."""
    results.put(in_loop(work, *words))


@dataclass(frozen=True, slots=True)
class _Failed:
    """What a job puts in the place of its result."""

    trace: str


def _guarded(entry: Callable[..., None], results: Any, *words: Any) -> None:
    try:
        entry(results, *words)
    except BaseException:
        results.put(_Failed(traceback.format_exc()))
        raise


def together(
    *jobs: tuple[Any, ...],
    entry: Callable[..., None] = in_process,
    core_part: float = 0,
    limited_jobs: int | None = None,
) -> list[Any]:
    """Run jobs, each in its own process, which begins with `entry`. If `core_part` is above 0, the
    first `limited_jobs` of them (None: all) may use only this part of a core.

    Returns their results in order. Raises RuntimeError if one fails.
    """
    context = mp.get_context("spawn")
    queues = [context.Queue() for _ in jobs]
    children = [
        context.Process(target=_guarded, args=(entry, queue, *job))
        for queue, job in zip(queues, jobs, strict=True)
    ]
    for child in children:
        child.start()
    with (
        limited([child.pid for child in children[:limited_jobs] if child.pid], core_part)
        if core_part
        else nullcontext()
    ):
        found = [queue.get(timeout=300) for queue in queues]
    for each in found:
        if isinstance(each, _Failed):
            raise RuntimeError(f"a job of the benchmark failed:\n{each.trace}")
    for child in children:
        child.join()
    return found


async def fill(address: str, count: int, size: int) -> None:
    """Send whole batches to SUBJECT."""
    async with qmq.connect(address) as mq, mq.producer(SUBJECT) as producer:
        bodies = [os.urandom(size) for _ in range(BATCH)]
        for _ in range(count // BATCH):
            producer.send_many(bodies)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
