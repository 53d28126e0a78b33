"""A Spark standalone cluster on this machine: a master and a worker as child processes, on loopback and free ports.

pyspark_qmq.standalone starts them, as in docker-compose.yml. Each process leads a separate process session, with its executors and
their Python processes, and dies with the test process even if that is killed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fast_session

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from cluster_runner import processes
from cluster_runner.processes import Process

UP_S = 120.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Standalone:
    """A running cluster."""

    url: str
    """For `master=`, such as spark://127.0.0.1:40123."""
    master: Process
    worker: Process
    logs: Path


@contextmanager
def standalone(folder: Path, *, cores: int = 2) -> Iterator[Standalone]:
    """Start master and worker, and wait until the worker is registered. All their processes are gone after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    started: list[Process] = []
    try:
        master = _start(started, folder / "master.log", "master")
        url = _wait_for(master, folder / "master.log", r"Starting Spark master at (spark://\S+)")
        limits = ("--cores", str(cores), "--memory", "1g", "--work-dir", str(folder / "work"))
        worker = _start(started, folder / "worker.log", "worker", *limits, url)
        _wait_for(worker, folder / "worker.log", r"Successfully registered with master (\S+)")
        yield Standalone(url, master, worker, folder)
    finally:
        for each in reversed(started):  # the worker first: its executors go with it
            processes.kill(each)


def _start(started: list[Process], log: Path, role: str, *options: str) -> Process:
    quick = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": fast_session.java_options()}
    words = [sys.executable, "-m", "pyspark_qmq.standalone", role, "--host", LOOPBACK, "--port", "0", "--webui-port", "0", *options]
    started.append(processes.spawn(words, {**os.environ, **quick}, log, dies_with_us=True))
    return started[-1]


def _wait_for(process: Process, log: Path, pattern: str) -> str:
    def found() -> re.Match[str] | None:
        return re.search(pattern, log.read_text(errors="replace"))

    processes.until(lambda: found() is not None or processes.state(process) == "dead", UP_S)
    match = found()
    if match is None:
        raise AssertionError(f"{pattern!r} is not in {log}:\n{log.read_text(errors='replace')}")
    return match[1]
