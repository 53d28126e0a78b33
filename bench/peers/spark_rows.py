"""Spark's rows of the comparison: the same rows through QMQ's source and sink, Spark's Kafka source
and sink, and Parquet.

One session (`clients/spark_job.py`) does all of them, since a JVM is warm late; both servers run
beside it, and one works at a time. A new row or way is one entry.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from fetch import jars
from rows import Row
from servers import (
    CLIENTS,
    KAFKA,
    KAFKA_SETTINGS,
    PEERS,
    Missing,
    Server,
    cpu_by_process,
    kafka,
    qmq,
)
from session import READY_S, TIMEOUT_S, Client, Times
from verdict import Compared, Figures, figures_of

TURNS: Final = 3
"""In so many turns a row's systems do their work, one after the other."""
WARM_TIMES: Final = 2
"""Each way does its work at least so often before it is measured."""
SEEN_S: Final = 10.0
"""QMQ's files show what is committed about a second later."""
OURS: Final = "QMQ"
THEIRS: Final = "Kafka, spark-sql-kafka"
PARQUET: Final = "Parquet"
COUNTS: Final = {100: 2_000_000, 1024: 400_000}
"""By size of a body: the rows of one read or write."""


@dataclass(frozen=True, slots=True)
class Way:
    """How Spark reads or writes rows. Options may name {qmq}, {files}, {kafka}, {folder} and
    {topic}; columns are expressions.
    """

    format: str
    options: Mapping[str, str]
    columns: tuple[str, ...]
    schema: str = ""

    def at(self, places: Mapping[str, str]) -> Way:
        return replace(
            self, options={name: value.format_map(places) for name, value in self.options.items()}
        )


@dataclass(frozen=True, slots=True)
class SparkRow:
    """`ways`: by system."""

    name: str
    size: int
    ways: Mapping[str, Way]
    writes: bool = False

    def of(self, systems: Sequence[str]) -> SparkRow:
        """The row with these systems only."""
        return replace(self, ways={system: self.ways[system] for system in systems})


COLUMNS: Final = ("key", "body", "sequence", "append_time")
SCHEMA: Final = "key binary, body binary, sequence bigint, append_time timestamp"
IN_PARQUET: Final = Way("parquet", {"path": "{folder}/{topic}"}, COLUMNS)
FILES: Final = {
    OURS: Way("qmq", {"qmq.path": "{files}", "subscribe": "{topic}"}, COLUMNS, SCHEMA),
    PARQUET: IN_PARQUET,
}
BROKERS: Final = {
    OURS: Way("qmq", {"qmq.servers": "{qmq}", "subscribe": "{topic}"}, COLUMNS, SCHEMA),
    THEIRS: Way(
        "kafka",
        {"kafka.bootstrap.servers": "{kafka}", "subscribe": "{topic}"},
        ("key", "value body", "offset sequence", "timestamp append_time"),
    ),
    PARQUET: IN_PARQUET,
}
SINKS: Final = {
    OURS: Way(
        "qmq",
        {"qmq.servers": "{qmq}", "subject": "{topic}", "createSubject": "true"},
        ("key", "body"),
    ),
    THEIRS: Way(
        "kafka", {"kafka.bootstrap.servers": "{kafka}", "topic": "{topic}"}, ("key", "body value")
    ),
    PARQUET: Way(
        "parquet", {"path": "{folder}/{topic}", "compression": "uncompressed"}, ("key", "body")
    ),
}
SPARK_ROWS: Final = tuple(
    SparkRow(f"Spark {work}, {said}", size, ways, writes)
    for said, size in (("100 B", 100), ("1 KB", 1024))
    for work, ways, writes in (
        ("reads files", FILES, False),
        ("reads brokers", BROKERS, False),
        ("writes", SINKS, True),
    )
)
SYSTEMS: Final = {
    THEIRS: {"durability": KAFKA, "settings": f"{KAFKA_SETTINGS}; 2 partitions"},
    PARQUET: {"durability": "files, flushed when the kernel does", "settings": "uncompressed"},
}
"""What QMQ's peers in `servers.py` do not say."""

T = TypeVar("T")
Told = Callable[[str, str, Figures | Exception], None]
"""Takes row, system, and figures or why there are none."""


class Stage:
    """Spark's session and the servers, for one run."""

    def __init__(
        self, job: Client, servers: Mapping[str, Server], folder: Path, python: Path
    ) -> None:
        self._job, self._servers, self._python = job, servers, python
        self._places = {"folder": str(folder)}
        if OURS in servers:
            self._places |= {
                "qmq": servers[OURS].address,
                "files": str(servers[OURS].folder / "data"),
            }
        if THEIRS in servers:
            self._places["kafka"] = servers[THEIRS].address
        self._made: dict[int, list[float]] = {}
        self._filled: set[tuple[str, str]] = set()

    def measure(
        self, row: SparkRow, systems: Sequence[str], times: Times, run: int, tell: Told
    ) -> None:
        """Fill, warm, measure in turns, and compare. A system that fails is left out, and the
        others continue.
        """
        stored = self._make(row.size)
        runs = {system: WayRun(self, row, system, stored) for system in systems}

        def each(step: Callable[[WayRun], object], first: int = 0) -> None:
            for system in rotated(systems, first):
                if system in runs:
                    try:
                        step(runs[system])
                    except (RuntimeError, KeyError) as failure:
                        del runs[system]
                        tell(row.name, system, failure)

        each(WayRun.prepare)
        each(lambda one: one.work(times.warm_s, WARM_TIMES))
        for turn in range(TURNS):
            each(lambda one: one.measure(times.row_s / TURNS), run + turn)
        each(lambda one: tell(row.name, one.system, one.figures()))

    def ask(self, command: str, value: object, **more: object) -> list[float]:
        self._job.say(json.dumps({command: value, **more}))
        answer = self._job.hear_any(TIMEOUT_S)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        found: list[float] = answer["done"]
        return found

    def do(self, command: str, way: Way, topic: str, **more: object) -> list[float]:
        return self.ask(command, asdict(way.at({**self._places, "topic": topic})), **more)

    def fill(self, system: str, topic: str) -> None:
        """Write each row once, if that is not done yet."""
        if (system, topic) not in self._filled:
            self.create(system, topic)
            sink = SINKS[system]
            self.do(
                "write",
                replace(sink, columns=COLUMNS) if system == PARQUET else sink,
                topic,
                seconds=0,
                at_least=1,
            )
            self._filled.add((system, topic))

    def create(self, system: str, topic: str) -> None:
        """Kafka's topics get a partition for each core."""
        if system == THEIRS:
            peer = next(each for each in PEERS if each.module == "kafka_confluent")
            with closing(
                Client(peer.client(self._python, self._servers[system].address), os.environ)
            ) as client:
                client.say(json.dumps({"work": "make", "topic": topic, "partitions": 2}))
                client.hear("ready", READY_S)
                client.say("begin")
                client.hear("done", READY_S)

    def spark_cpu(self) -> dict[int, float]:
        """CPU time so far of Spark and its Python processes, by process: Spark ends those that wait
        for a minute.
        """
        return cpu_by_process([self._job.pid])

    def server_cpu_s(self, system: str) -> float:
        return self._servers[system].cpu_s() if system in self._servers else 0.0

    def _make(self, size: int) -> list[float]:
        if size not in self._made:
            self._made = {size: self.ask("make", COUNTS[size], size=size)}
        return self._made[size]


class WayRun:
    """One system in one row: what it did in the turns so far.
    `stored`: count and sum of the rows.
    """

    def __init__(self, stage: Stage, row: SparkRow, system: str, stored: Sequence[float]) -> None:
        self.system = system
        self._stage, self._row, self._stored = stage, row, stored
        self._topic = f"{'written' if row.writes else 'rows'}-{row.size}"
        self._times = self._all_times = 0
        self._seconds = self._server_s = self._spark_s = 0.0

    def prepare(self) -> None:
        if self._row.writes:
            self._stage.create(self.system, self._topic)
            return
        self._stage.fill(self.system, self._topic)
        end_s = time.monotonic() + SEEN_S
        while self._stage.do("count", self._row.ways[self.system], self._topic) != self._stored:
            if time.monotonic() > end_s:
                raise RuntimeError("it reads other rows than were written")

    def work(self, seconds: float, at_least: int = 1) -> tuple[int, float]:
        """Read or write all rows, again until the time is over.
        How often, and how long that took.
        """
        command, way = "write" if self._row.writes else "read", self._row.ways[self.system]
        times, took_s = self._stage.do(
            command, way, self._topic, seconds=seconds, at_least=at_least
        )
        self._all_times += int(times)
        return int(times), took_s

    def measure(self, seconds: float) -> None:
        server_s, spark = self._stage.server_cpu_s(self.system), self._stage.spark_cpu()
        times, took_s = self.work(seconds)
        self._spark_s += used_s(spark, self._stage.spark_cpu())
        self._server_s += self._stage.server_cpu_s(self.system) - server_s
        self._times += times
        self._seconds += took_s

    def figures(self) -> Figures:
        """Raises RuntimeError if other rows are stored than were written."""
        count, total = self._stored
        way = self._row.ways[self.system]
        if self._row.writes:
            way = replace(BROKERS[self.system], columns=BROKERS[self.system].columns[:2])
            count, total = count * self._all_times, total * self._all_times
        found, found_total = self._stage.do("count", way, self._topic)
        if found == count and found_total != total:
            raise RuntimeError("it reads other rows than were written")
        report = {"seconds": self._seconds, "cpu_s": self._spark_s}
        compared = Compared(
            int(self._stored[0]) * self._times,
            int(max(count - found, 0)),
            int(max(found - count, 0)),
        )
        return figures_of([report], self._server_s, Row(self._row.name, "publish"), compared)


def used_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """CPU time of the processes that are still there. Those that ended meanwhile were idle."""
    return sum(value - before.get(pid, 0.0) for pid, value in after.items())


def rotated(names: Sequence[T], first: int) -> list[T]:
    first %= max(len(names), 1)
    return [*names[first:], *names[:first]]


def measure_spark(
    rows: Sequence[SparkRow], cache: Path, python: Path, times: Times, run: int, tell: Told
) -> None:
    """All rows once, in a new session with new servers."""
    wanted = {system for row in rows for system in row.ways}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qmq-peer-")))
        servers: dict[str, Server] = {}
        for system, start in ((OURS, qmq), (THEIRS, kafka)):
            if system in wanted:
                try:
                    servers[system] = start(cache)
                    stack.callback(servers[system].stop)
                except (Missing, RuntimeError) as failure:
                    wanted.remove(system)
                    tell("Spark's rows", system, failure)
        job = Client(
            [sys.executable, str(CLIENTS / "spark_job.py"), str(jars(cache, "spark") or "")],
            os.environ,
        )
        stack.enter_context(closing(job))
        stage = Stage(job, servers, folder, python)
        for row in rows:
            stage.measure(
                row, [system for system in row.ways if system in wanted], times, run, tell
            )
