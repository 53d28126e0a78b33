"""Benchmarks of `qmq lake follow`: filling a table from a backlog, and the time from sending a message until it can be read from the
table.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import qmq
from bench.processes import Node, in_loop

SUBJECT: Final = "bench"
KEYS: Final = 100_000


async def fill(address: str, count: int, size: int) -> None:
    """`count` messages of `size` random bytes with keys."""
    async with qmq.connect(address) as mq, mq.producer(SUBJECT) as producer:
        for at in range(count // 1000):
            blob = os.urandom(1000 * size)  # no two bodies are the same: Parquet would keep them once
            bodies = [blob[begin : begin + size] for begin in range(0, len(blob), size)]
            producer.send_many(bodies, keys=[f"key-{(at * 7919 + number) % KEYS:06d}" for number in range(1000)])
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()


async def paced(address: str, rate: int, seconds: float) -> None:
    """`rate` messages of 100 bytes a second, in hundredths of a second."""
    async with qmq.connect(address) as mq, mq.producer(SUBJECT) as producer:
        begin, part = time.monotonic(), rate // 100
        for step in range(int(seconds * 100)):
            await asyncio.sleep(max(begin + step / 100 - time.monotonic(), 0))
            producer.send_many([os.urandom(100) for _ in range(part)])
        await producer.flush()


def backfill(count: int, size: int) -> dict[str, float]:
    """Write a table from a backlog, once from files and once from brokers, each in a separate process."""
    node = Node()
    try:
        in_loop(fill, node.address, count, size)
        files = _apart(_drained, {"qmq.path": str(node.data)}, count)
        brokers = _apart(_drained, {"qmq.servers": node.address}, count)
    finally:
        node.stop()
    bodies_mib = count * size / (1 << 20)
    found = {}
    for name, (wall_s, cpu_s, peak_mib) in {"files": files, "brokers": brokers}.items():
        found |= {
            f"{name}, messages/s": count / wall_s,
            f"{name}, MiB of bodies a second of CPU time": bodies_mib / cpu_s,
            f"{name}, peak memory, MiB": peak_mib,
        }
    return found


def visible(rate: int, seconds: float, interval_s: float = 10.0) -> dict[str, float]:
    """The time from `send` to a snapshot with the message, while `rate` messages a second arrive."""
    node = Node()
    try:
        in_loop(fill, node.address, 1000, 100)
        context = mp.get_context("spawn")
        sender = context.Process(target=in_loop, args=(paced, node.address, rate, seconds))
        sender.start()
        lateness = _apart(_followed, {"qmq.servers": node.address}, seconds + interval_s, interval_s)
        sender.join()
    finally:
        node.stop()
    marks = statistics.quantiles(lateness, n=100)
    return {"visible after, p50, s": marks[49], "visible after, p99, s": marks[98]}


def _apart(work: Callable[..., Any], *words: Any) -> Any:
    """Run in a separate process, so that the CPU time and memory are those of the writer only."""
    context = mp.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_told, args=(results, work, *words))
    process.start()
    found = results.get()
    process.join()
    return found


def _told(results: Any, work: Callable[..., Any], *words: Any) -> None:
    results.put(work(*words))


def _writer(options: dict[str, str], folder: str) -> Any:
    from pyspark_qmq.lake.catalog import open_catalog
    from pyspark_qmq.lake.writer import LakeOptions, LakeWriter
    from pyspark_qmq.options import parse

    asked = parse({"subscribe": SUBJECT, "startingOffsets": "earliest", **options}, is_stream=True)
    catalog = open_catalog("lake", f"sqlite:///{folder}/catalog.db", f"file://{folder}/warehouse")
    return LakeWriter(catalog, asked, LakeOptions()), catalog


def _drained(options: dict[str, str], count: int) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory(prefix="qmq-bench-lake-") as folder:
        writer, catalog = _writer(options, folder)
        rows = 0

        def report(done: Any) -> None:
            nonlocal rows
            rows += done.rows

        begin, cpu = time.monotonic(), time.process_time()
        while rows < count:  # files say what is committed about once a second
            writer.drain(report)
        spent = time.monotonic() - begin, time.process_time() - cpu
        assert rows == count, (rows, count)
        catalog.close()
        return *spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def drained_files(options: dict[str, str], folder: str, count: int) -> list[str]:
    """The files of a new table with all `count` messages."""
    writer, catalog = _writer(options, folder)
    rows = 0

    def report(done: Any) -> None:
        nonlocal rows
        rows += done.rows

    while rows < count:
        writer.drain(report)
    found = [each.file.file_path for each in catalog.load_table(("qmq", SUBJECT)).scan().plan_files()]
    catalog.close()
    return found


def _followed(options: dict[str, str], seconds: float, interval_s: float) -> list[float]:
    """The lateness of each hundredth message, in seconds."""
    with tempfile.TemporaryDirectory(prefix="qmq-bench-lake-") as folder:
        writer, catalog = _writer(options, folder)
        stopping = threading.Event()
        threading.Timer(seconds, stopping.set).start()
        found: list[float] = []
        known: set[str] = set()

        def report(done: Any) -> None:
            now_us = time.time_ns() // 1000
            table = catalog.load_table(("qmq", SUBJECT))
            for task in table.scan().plan_files():
                if task.file.file_path not in known:
                    known.add(task.file.file_path)
                    found.extend((now_us - each) / 1e6 for each in _create_times(task.file.file_path)[::100])

        writer.run(stopping, interval_s, report)
        return found


def _create_times(path: str) -> list[int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pq.read_table(Path(path.removeprefix("file://")), columns=["create_time"], partitioning=None)["create_time"]
    return column.cast(pa.int64()).to_pylist()
