"""Delayed messages (docs/BENCH.md).

scripts/bench delayed intake     the rate of intake by how far apart the due times of a batch are
scripts/bench delayed pending    a server with many pending messages: start, memory, lateness
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import qmq
from bench.processes import BATCH, Figures, Node, cpu_s, in_loop, resident_mib, together

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
SPANS_MS: Final = {
    "not delayed": 0,
    "within a second": 1_000,
    "within an hour": HOUR_MS,
    "within a day": DAY_MS,
    "within a year": 365 * DAY_MS,
}
"""How far apart the due times of each batch are."""
LATER: Final = "later"
SOON: Final = "soon"
VARIANTS: Final = 50
FILL_MESSAGES: Final = 20_000_000
"""Messages of one process: jobs have a limit of time."""
LEAD_S: Final = 3.0
RATE: Final = 10_000
LATENESS_S: Final = 20
REST_S: Final = 5.0


async def send(
    address: str, count: int, size: int, span_ms: int, ahead_ms: int
) -> tuple[float, float]:
    """Send messages whose due times are scattered over `span_ms`, after `ahead_ms` (a span of 0:
    not delayed). Returns (seconds until all are acknowledged, seconds of this process's CPU time).
    """
    async with qmq.connect(address) as mq:
        producer: Any = mq.delayed_producer(LATER) if span_ms else mq.producer(LATER)
        bodies = [os.urandom(size) for _ in range(BATCH)]
        begin_ms, random = int(time.time() * 1000) + ahead_ms, np.random.default_rng()
        words: list[dict[str, Any]] = [
            {"due_ms": (begin_ms + random.integers(0, span_ms, BATCH)).tolist()} if span_ms else {}
            for _ in range(VARIANTS)
        ]
        producer.send_many(bodies, **words[0])
        await producer.flush()
        begin, used_s = time.monotonic(), time.process_time()
        for number in range(count // BATCH):
            producer.send_many(bodies, **words[number % VARIANTS])
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return time.monotonic() - begin, time.process_time() - used_s


# --- intake ---------------------------------------------------------------------------------------


def intake(count: int, size: int, span_ms: int) -> Figures:
    """One producer sends to one node; the first message is due in a day."""
    node = Node()
    try:
        before_s = cpu_s(node.pid)
        took_s, client_s = together((send, node.address, count, size, span_ms, DAY_MS))[0]
        return {
            "messages/s": count / took_s,
            "node, us": 1e6 * (cpu_s(node.pid) - before_s) / count,
            "client, us": 1e6 * client_s / count,
            "node, MiB": resident_mib(node.pid),
        }
    finally:
        node.stop()


def compare_intake(count: int, size: int, runs: int) -> None:
    """Print the figures of alternating runs, and their ratios to those of the same run."""
    found: dict[str, list[Figures]] = {name: [] for name in SPANS_MS}
    for _ in range(runs):
        for name, span_ms in SPANS_MS.items():
            found[name].append(intake(count, size, span_ms))
    for name, figures in found.items():
        print(name)
        for base in list(SPANS_MS)[:2]:
            parts = [
                mine["messages/s"] / others["messages/s"]
                for mine, others in zip(figures, found[base], strict=True)
            ]
            _print(f"of the rate {base}", parts)
        for figure in figures[0]:
            _print(figure, [each[figure] for each in figures])


def _print(name: str, values: Sequence[float]) -> None:
    middle = statistics.median(values)
    print(f"  {name:32} {middle:14,.3f}   ({min(values):,.3f} to {max(values):,.3f})", flush=True)


# --- many pending messages ------------------------------------------------------------------------


async def schedule(address: str) -> float:
    """Send RATE messages for each second of LATENESS_S. Returns when the first one is due."""
    async with qmq.connect(address) as mq:
        await mq.send(SOON, b"")
        producer, count = mq.delayed_producer(SOON), RATE * LATENESS_S
        begin_ms = int((time.time() + LEAD_S) * 1000)
        due_times_ms = begin_ms + np.arange(count) * 1000 // RATE
        for at in range(0, count, BATCH):
            producer.send_many([b"x" * 100] * BATCH, due_ms=due_times_ms[at : at + BATCH].tolist())
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return begin_ms


async def stored_times(address: str) -> list[int]:
    """When each of these messages was stored in its subject."""
    stored: list[int] = []
    async with qmq.connect(address) as mq:
        await mq.send(SOON, b"")
        consumer = mq.consumer(SOON, "g", prefetch=100_000)
        while len(stored) < RATE * LATENESS_S:
            found = await consumer.pull(10_000)
            stored += [message.append_time_ms for message in found if message.body]
            found.ack_later()
    return sorted(stored)


def lateness(address: str) -> Figures:
    """From due to stored."""
    begin_ms, stored = together((schedule, address), (stored_times, address))
    count = RATE * LATENESS_S
    # They are stored in the order of their due times.
    late_ms = np.array(stored) - (begin_ms + np.arange(count) * 1000 // RATE)
    return {
        "late, p50, ms": float(np.percentile(late_ms, 50)),
        "late, p99, ms": float(np.percentile(late_ms, 99)),
        "late, most, ms": float(late_ms.max()),
    }


async def first_pending(address: str) -> float:
    """Seconds until a list of pending messages begins."""
    async with qmq.connect(address) as mq:
        begin = time.monotonic()
        async for _ in mq.delayed.list(LATER, limit=1):
            return time.monotonic() - begin
    raise SystemExit("nothing is pending")


def started(folder: Path) -> tuple[Node, Figures]:
    """Start a node, and measure it."""
    begin = time.monotonic()
    node = Node(data=folder)
    figures = {"start, s": time.monotonic() - begin}
    figures["first list, s"] = in_loop(first_pending, node.address)
    time.sleep(REST_S)
    figures["MiB"] = resident_mib(node.pid)
    figures |= lateness(node.address)
    return node, figures | {"MiB at the end": resident_mib(node.pid)}


def fill(folder: Path, count: int, size: int) -> None:
    """Fill a node's folder with messages that are due within a year."""
    node = Node(data=folder)
    begin, left = time.monotonic(), count
    while left:
        some = min(FILL_MESSAGES, left)
        together((send, node.address, some, size, SPANS_MS["within a year"], 0))
        left -= some
    _print("filled, messages/s", [count / (time.monotonic() - begin)])
    _print("after that, MiB", [resident_mib(node.pid)])
    node.stop(keep=True)


def pending(count: int, size: int, runs: int) -> None:
    """Start a node with many pending messages, in turns with one that has few."""
    with tempfile.TemporaryDirectory(prefix="qmq-bench-") as place:
        folders = {number: Path(place, str(number)) for number in (BATCH, count)}
        for number, folder in folders.items():
            fill(folder, number, size)
        found: dict[str, list[Figures]] = {}
        for _ in range(runs):
            for how in (signal.SIGTERM, signal.SIGKILL):
                for number, folder in folders.items():
                    node, figures = started(folder)
                    found.setdefault(f"{number:,} pending, before {how.name}", []).append(figures)
                    node.process.send_signal(how)
                    node.process.wait()
        for name, some in found.items():
            print(name)
            for figure in some[0]:
                _print(figure, [each[figure] for each in some])
        files = [each.stat().st_size for each in folders[count].rglob("*") if each.is_file()]
        print(f"{len(files)} files, {sum(files) / 1e9:.2f} GB")


def main(words: Sequence[str]) -> None:
    """The command `scripts/bench delayed`."""
    parser = ArgumentParser(
        "scripts/bench delayed", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("intake", "pending"))
    parser.add_argument("--count", type=int, help="messages (2 million; pending: 100 million)")
    parser.add_argument("--size", type=int, help="bytes of a body (100; pending: 20)")
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args(words)
    if asked.what == "intake":
        compare_intake(asked.count or 2_000_000, asked.size or 100, asked.runs)
    else:
        pending(asked.count or 100_000_000, asked.size or 20, asked.runs)
