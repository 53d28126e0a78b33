"""The demo: publish every flight, consume with one, two, then three consumers, and compare the
received rows with the source.

With `--server` it uses a running cluster (with a new subject each time); otherwise it starts a
node. Exit status 1 if a row was lost, corrupted or unexpected. The last 2,000 flights are sent
live, at 1,000 per second, to measure latency. At the end, another group reads the backlog again in
whole batches, which is the fastest way to read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from flights import Flight, flights  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, Progress, TextColumn  # noqa: E402
from rich.table import Table  # noqa: E402

import qmq  # noqa: E402

SUBJECT: Final = os.environ.setdefault("QMQ_DEMO_SUBJECT", f"flight.departed.{os.getpid()}")
GROUP: Final = "ops"
LIVE: Final = 2_000
LIVE_RATE: Final = 1_000
BATCH_GROUP: Final = "archive"

console = Console()


@dataclass
class Outcome:
    """The messages that the consumers got."""

    rows: Counter[str] = field(default_factory=Counter)
    by_consumer: Counter[int] = field(default_factory=Counter)
    latencies_ns: list[int] = field(default_factory=list)
    live: int = 0
    first_s: float = 0.0
    backlog_s: float = 0.0


# --- the node -------------------------------------------------------------------------------------


def start_node(data: Path) -> tuple[subprocess.Popen[str], str]:
    """Run `qmq dev` on free ports. Returns the process and its address."""
    command = [
        sys.executable,
        "-m",
        "qmq.cli",
        "dev",
        "--data",
        str(data),
        "--port",
        "0",
        "--data-port",
        "0",
        "--control-port",
        "0",
        "--console",
        "off",
    ]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    line = node.stdout.readline()
    if "ready at" not in line:
        raise SystemExit("the node did not start")
    return node, line.split("ready at ")[1].split()[0]


# --- the producer ---------------------------------------------------------------------------------


async def publish(address: str, rows: list[Flight], bar: Progress) -> float:
    """Send the flights as fast as possible. Returns messages a second."""
    task = bar.add_task("published", total=len(rows))
    async with qmq.connect(address) as mq, mq.producer(SUBJECT) as producer:
        begin = time.perf_counter()
        for at, row in enumerate(rows):
            producer.send(row.line.encode(), row.tail_number, (row.carrier,))
            if at % 1000 == 999:
                bar.update(task, completed=at + 1)
                await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        rate = len(rows) / (time.perf_counter() - begin)
        bar.update(task, completed=len(rows))
    return rate


async def publish_live(address: str, rows: list[Flight], bar: Progress) -> None:
    """Send the last flights one by one, at a steady rate, each with the time in a header."""
    task = bar.add_task("live", total=len(rows))
    async with qmq.connect(address) as mq, mq.producer(SUBJECT) as producer:
        await asyncio.sleep(0.2)
        begin = time.perf_counter()
        for at, row in enumerate(rows):
            await asyncio.sleep(max(begin + at / LIVE_RATE - time.perf_counter(), 0))
            producer.send(
                row.line.encode(),
                row.tail_number,
                (row.carrier,),
                {"sent": str(time.monotonic_ns())},
            )
            bar.update(task, completed=at + 1)


# --- a consumer, in its own process ---------------------------------------------------------------


def consume(number: int, address: str, start: Event, stop: Event, results: Any) -> None:
    """Consume as a member of the group from `start` until `stop`, and report every row."""
    asyncio.run(_consume(number, address, start, stop, results))


async def _consume(number: int, address: str, start: Event, stop: Event, results: Any) -> None:
    await asyncio.to_thread(start.wait)
    async with qmq.connect(address) as mq, mq.consumer(SUBJECT, GROUP, prefetch=10_000) as consumer:
        while not stop.is_set():
            found = await consumer.pull(2_000, timedelta(seconds=0.5))
            now_ns = time.monotonic_ns()
            rows, latencies = [], []
            for message in found:
                rows.append(f"{message.body.decode()}|{message.key or ''}|{','.join(message.tags)}")
                if "sent" in message.headers:
                    latencies.append(now_ns - int(message.headers["sent"]))
            if rows:
                results.put((number, len(rows), "\n".join(rows), latencies))
                await found.ack()


async def read_in_batches(address: str, count: int) -> float:
    """Read `count` messages as one more group, in whole batches. Returns messages a second."""
    async with (
        qmq.connect(address) as mq,
        mq.consumer(SUBJECT, BATCH_GROUP, prefetch=100_000) as consumer,
    ):
        got, begin = 0, time.perf_counter()
        while got < count:
            found = await consumer.pull(100_000)
            got += len(found.bodies)
            found.ack_later()
        return got / (time.perf_counter() - begin)


# --- watching -------------------------------------------------------------------------------------


def watch(
    results: Any, starts: list[Event], total: int, live: int, bar: Progress, on_backlog_done: Any
) -> Outcome:
    """Collect the consumers' reports. Start the second and third consumer while
    the first one works.
    """
    outcome, blobs, done = Outcome(live=live), list[str](), 0
    task = bar.add_task("consumed", total=total + live)
    join_at = {total // 12: 1, total // 6: 2}
    starts[0].set()
    silent_since = time.perf_counter()
    while done < total + live and time.perf_counter() - silent_since < 20:
        try:
            number, count, rows, latencies = results.get(timeout=0.2)
        except queue.Empty:
            continue
        silent_since = time.perf_counter()
        outcome.first_s = outcome.first_s or silent_since
        blobs.append(rows)
        done += count
        outcome.by_consumer[number] += count
        outcome.latencies_ns += latencies
        bar.update(task, completed=done)
        for at in [each for each in join_at if done >= each]:
            starts[join_at.pop(at)].set()
        if done >= total and not outcome.backlog_s:
            outcome.backlog_s = silent_since
            on_backlog_done()
    for each in blobs:
        outcome.rows.update(each.split("\n"))
    return outcome


def compare(source: list[Flight], outcome: Outcome) -> tuple[int, int, int]:
    """(lost, twice, corrupted or from nowhere), compared row by row with the source."""
    wanted = Counter(f"{row.line}|{row.tail_number}|{row.carrier}" for row in source)
    lost = sum((wanted - outcome.rows).values())
    extra = outcome.rows - wanted
    foreign = sum(count for row, count in extra.items() if row not in wanted)
    return lost, sum(extra.values()) - foreign, foreign


def percentile(values: list[int], share: float) -> float:
    """In milliseconds."""
    return (
        sorted(values)[min(int(len(values) * share), len(values) - 1)] / 1e6
        if values
        else float("nan")
    )


def report(
    source: list[Flight],
    outcome: Outcome,
    rate: float,
    batch_rate: float,
    disk_bytes: int,
    *,
    as_json: bool,
) -> bool:
    """Print the table; True if nothing is wrong."""
    lost, twice, foreign = compare(source, outcome)
    consumed_s = max(outcome.backlog_s - outcome.first_s, 1e-9)
    figures = {
        "sent": len(source),
        "received": sum(outcome.rows.values()),
        "lost": lost,
        "twice": twice,
        "corrupted": foreign,
        "published, messages/s": round(rate),
        "consumed one by one, messages/s": round((len(source) - outcome.live) / consumed_s),
        "read again in batches, messages/s": round(batch_rate),
        "by consumer": ", ".join(
            f"{number}: {count:,}" for number, count in sorted(outcome.by_consumer.items())
        ),
        **({"bytes on disk": disk_bytes} if disk_bytes else {}),
        "latency p50, ms": round(percentile(outcome.latencies_ns, 0.5), 3),
        "latency p99, ms": round(percentile(outcome.latencies_ns, 0.99), 3),
    }
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        where = "one node" if disk_bytes else "the cluster"
        table = Table(
            title=f"{len(source):,} flights through {where}",
            title_justify="left",
            show_header=False,
            box=None,
        )
        table.add_column()
        table.add_column(justify="right")
        for name, value in figures.items():
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
        console.print(table)
    return lost == 0 and foreign == 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="print the table as JSON")
    options.add_argument("--rows", type=int, default=0, help="only so many flights")
    options.add_argument(
        "--server", default="", help="metaservers of a running cluster, HOST:PORT,HOST:PORT"
    )
    chosen = options.parse_args()
    source = list(flights())[: chosen.rows or None]
    live = min(LIVE, len(source) // 2)
    backlog, latest = source[:-live], source[-live:]
    folder = Path(tempfile.mkdtemp(prefix="qmq-demo-"))
    context = mp.get_context("spawn")
    results, stop = context.Queue(), context.Event()
    starts = [context.Event() for _ in range(3)]
    node, address = (None, chosen.server) if chosen.server else start_node(folder)
    consumers = [
        context.Process(
            target=consume, args=(n, address, starts[n - 1], stop, results), daemon=True
        )
        for n in (1, 2, 3)
    ]
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(40),
        TextColumn("{task.completed:>8,} of {task.total:,}"),
    )
    try:
        for each in consumers:
            each.start()
        with Progress(*columns, console=console, disable=chosen.json) as bar:
            rate, outcome, batch_rate = asyncio.run(
                _run(address, results, starts, backlog, latest, bar)
            )
        stop.set()
        for each in consumers:
            each.join(10)
        disk_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return (
            0 if report(source, outcome, rate, batch_rate, disk_bytes, as_json=chosen.json) else 1
        )
    finally:
        for each in consumers:
            if each.is_alive():
                each.kill()
        if node is not None:
            node.terminate()
            node.wait()
        shutil.rmtree(folder)


async def _run(
    address: str,
    results: Any,
    starts: list[Event],
    backlog: list[Flight],
    latest: list[Flight],
    bar: Progress,
) -> tuple[float, Outcome, float]:
    """Publish, consume, read again: messages a second published, what the consumers got, messages a
    second read in batches.
    """
    rate = await publish(address, backlog, bar)
    loop = asyncio.get_running_loop()
    drained = asyncio.Event()
    watching = asyncio.create_task(
        asyncio.to_thread(
            watch,
            results,
            starts,
            len(backlog),
            len(latest),
            bar,
            lambda: loop.call_soon_threadsafe(drained.set),
        )
    )
    waiting = asyncio.create_task(drained.wait())
    await asyncio.wait([watching, waiting], return_when=asyncio.FIRST_COMPLETED)
    if drained.is_set():
        await publish_live(address, latest, bar)
    waiting.cancel()
    outcome = await watching
    return rate, outcome, await read_in_batches(address, len(backlog))


if __name__ == "__main__":
    sys.exit(main())
