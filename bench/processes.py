"""The processes of a benchmark: a node, and jobs that each run in another process with a fast event loop."""

from __future__ import annotations

import multiprocessing as mp
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.limit import limited

try:
    from qmq.process.event_loop import calm_collector, keep_freed_memory
except ImportError:  # an older checkout, measured beside this one
    from qmq.process_tuning import calm_collector, keep_freed_memory  # type: ignore[import-not-found, no-redef]


class Node:
    """A `qmq dev` process with its own folder."""

    def __init__(self, *options: str, data: Path | None = None) -> None:
        self.data = data or Path(tempfile.mkdtemp(prefix="qmq-bench-"))
        ports = ("--port", "0", "--data-port", "0", "--control-port", "0", "--console", "off")
        command = [sys.executable, "-m", "qmq.cli", "dev", "--data", str(self.data), *ports, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.address = line.split("ready at ")[1].split()[0]

    def resident_mib(self) -> float:
        """The resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def stop(self, *, keep: bool = False) -> None:
        """Stop the process and delete its data."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        if not keep:
            shutil.rmtree(self.data)


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
    *jobs: tuple[Any, ...], entry: Callable[..., None] = in_process, core_part: float = 0, limited_jobs: int | None = None
) -> list[Any]:
    """Run jobs, each in its own process, which begins with `entry`. If `core_part` is above 0, the first `limited_jobs` of them (None: all)
    may use only this part of a core.

    Returns their results in order. Raises RuntimeError if one fails.
    """
    context = mp.get_context("spawn")
    queues = [context.Queue() for _ in jobs]
    children = [context.Process(target=_guarded, args=(entry, queue, *job)) for queue, job in zip(queues, jobs, strict=True)]
    for child in children:
        child.start()
    with limited([child.pid for child in children[:limited_jobs] if child.pid], core_part) if core_part else nullcontext():
        found = [queue.get(timeout=300) for queue in queues]
    for each in found:
        if isinstance(each, _Failed):
            raise RuntimeError(f"a job of the benchmark failed:\n{each.trace}")
    for child in children:
        child.join()
    return found
