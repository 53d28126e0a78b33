"""Benchmarks: one producer process, one broker process, one consumer process on this machine, persisted.

Each scenario runs `--runs` times. Scenarios alternate, so that a change of the machine's speed affects all of them. The output has the
medians, with the ratio to a raw loopback copy of the same bytes, and to NATS JetStream (nats-py) if nats-server is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import qmq
from bench import backup, delay, delivery, everyday, lake, large, many, new_replica, ordered, replicas, shards, spark, tiering
from bench import cold as cold_reads
from bench.processes import Node, in_loop, together

SUBJECTS: Final = 10_000
console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)


# --- throughput ----------------------------------------------------------------------------------------------------------


async def produce(address: str, count: int, size: int, mode: str) -> float:
    """Send `count` messages. Returns the monotonic time of the first send, in seconds."""
    async with qmq.connect(address) as mq:
        producer = mq.producer("bench")
        bodies = [os.urandom(size) for _ in range(1000)]
        await producer.send(b"ready")
        await asyncio.sleep(0.3)
        begin = time.monotonic()
        for _ in range(count // 1000):
            if mode == "send":
                send = producer.send
                for body in bodies:
                    send(body)
            else:
                producer.send_many(bodies)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return begin


async def consume(address: str, count: int) -> float:
    """Consume all messages. Returns the time at which the last was decoded."""
    async with qmq.connect(address) as mq:
        consumer, got = mq.consumer("bench", "g", prefetch=100_000), 0
        while got < count + 1:
            found = await consumer.pull(100_000)
            got += len(found.bodies)
            found.ack_later()
        return time.monotonic()


def throughput(count: int, size: int, mode: str, flush: str) -> float:
    """Messages per second, from the first send to the last decode."""
    node = Node("--flush", flush)
    try:
        begin, end = together((produce, node.address, count, size, mode), (consume, node.address, count))
        return count / (end - begin)
    finally:
        node.stop()


async def produce_subjects(address: str, count: int, subjects: int) -> float:
    """Send 100 messages at a time to one subject after another. Returns acknowledged messages per second.

    One batch is sent to each subject before, and as many if there is one subject: the first batch makes the state that broker and client
    keep for a subject, and of three million messages each of 10,000 subjects gets three batches only.
    """
    async with qmq.connect(address) as mq:
        producers = [mq.producer(f"subject-{number}") for number in range(subjects)]
        bodies = [os.urandom(100) for _ in range(100)]
        for at in range(0, subjects, 100):
            await asyncio.gather(*[_first(producer, b"x") for producer in producers[at : at + 100]])
        await _send_in_turn(producers, bodies, SUBJECTS)
        begin = time.monotonic()
        await _send_in_turn(producers, bodies, count // 100)
        took_s = time.monotonic() - begin
        for producer in producers:  # which takes longer for more of them, and finds nothing: one connection answers in order
            await producer.flush()
        return count / took_s


async def _send_in_turn(producers: list[qmq.Producer], bodies: list[bytes], batches: int) -> None:
    """Send so many batches to one producer's subject after another, and wait for every 200th and for the last."""
    for number in range(batches):
        tickets = producers[number % len(producers)].send_many(bodies)
        if number % 200 == 199 or number == batches - 1:
            await tickets


async def _first(producer: qmq.Producer, body: bytes) -> None:
    await producer.send(body)


def many_subjects(count: int, subjects: int) -> float:
    node = Node()
    try:
        return float(together((produce_subjects, node.address, count, subjects))[0])
    finally:
        node.stop()


# --- latency -------------------------------------------------------------------------------------------------------------


async def pace(address: str, rate: int, count: int) -> None:
    """Send at a steady rate; each body begins with the time."""
    async with qmq.connect(address) as mq, mq.producer("bench") as producer:
        await producer.send(b"%020d" % 0)
        await asyncio.sleep(0.5)
        begin, sent = time.perf_counter(), 0
        while sent < count:
            ahead_s = begin + sent / rate - time.perf_counter()
            if ahead_s > 0.002:
                await asyncio.sleep(ahead_s)
            else:
                time.sleep(max(ahead_s, 0))  # noqa: ASYNC251 - the loop's timers count milliseconds, and spinning would take a core
            while sent < count and begin + sent / rate <= time.perf_counter():
                producer.send(b"%020d" % time.monotonic_ns() + bytes(80))
                sent += 1
            await asyncio.sleep(0)


async def clock(address: str, count: int) -> list[int]:
    """The latency of each message in nanoseconds, without the first twentieth."""
    found: list[int] = []
    async with qmq.connect(address) as mq:
        consumer = mq.consumer("bench", "g")
        while len(found) < count + 1:
            part = await consumer.pull(1000)
            now = time.monotonic_ns()
            found += [now - int(body[:20]) for body in part.bodies]
            part.ack_later()
    return sorted(found[1 + count // 20 :])


def latency(rate: int, count: int, flush: str = "async") -> tuple[float, float]:
    """(p50, p99) in milliseconds."""
    node = Node("--flush", flush)
    try:
        found = together((clock, node.address, count), (pace, node.address, rate, count))[0]
        return found[len(found) // 2] / 1e6, found[int(len(found) * 0.99)] / 1e6
    finally:
        node.stop()


# --- memory and start ----------------------------------------------------------------------------------------------------


def memory(count: int) -> tuple[float, float]:
    """The broker's resident memory in MiB after a tenth of the messages and after all of them, without consumers."""
    node = Node()
    try:
        together((produce, node.address, count // 10, 100, "many"))
        early = node.resident_mib()
        together((produce, node.address, count - count // 10, 100, "many"))
        return early, node.resident_mib()
    finally:
        node.stop()


def start_time(gib: float) -> float:
    """Seconds until a node is ready on a log of `gib` GiB, after a clean stop."""
    node = Node()
    together((produce, node.address, int(gib * (1 << 30) / 10_240) // 1000 * 1000, 10_240, "many"))
    node.stop(keep=True)
    begin = time.monotonic()
    node = Node(data=node.data)
    took = time.monotonic() - begin
    node.stop()
    return took


# --- what to compare with ------------------------------------------------------------------------------------------------


def loopback(size: int, count: int) -> float:
    """The rate of a bare loopback connection with 64 KiB writes, in messages of this size per second."""
    total = size * count
    server = socket.create_server(("127.0.0.1", 0))

    def receive() -> None:
        peer, _ = server.accept()
        buffer, got = bytearray(1 << 18), 0
        while got < total:
            got += peer.recv_into(buffer)
        peer.close()

    reader = threading.Thread(target=receive)
    reader.start()
    client = socket.create_connection(server.getsockname())
    chunk, begin = bytes(65536), time.monotonic()
    for _ in range(total // len(chunk)):
        client.sendall(chunk)
    client.sendall(bytes(total % len(chunk)))
    reader.join()
    took = time.monotonic() - begin
    client.close()
    server.close()
    return count / took


async def nats_round(port: int, size: int, count: int) -> tuple[float, float]:
    """(published, fetched) messages per second through JetStream with file storage, with nats-py."""
    import nats

    client = await nats.connect(f"nats://127.0.0.1:{port}")
    stream = client.jetstream(publish_async_max_pending=4000)
    await stream.add_stream(name="bench", subjects=["bench"])
    body, begin = os.urandom(size), time.monotonic()
    for _ in range(count):
        await stream.publish_async("bench", body)
    await stream.publish_async_completed()
    published = count / (time.monotonic() - begin)
    pull, got, begin = await stream.pull_subscribe("bench", "g"), 0, time.monotonic()
    while got < count:
        found = await pull.fetch(min(1000, count - got))
        got += len(found)
        for message in found:
            await message.ack()
    fetched = count / (time.monotonic() - begin)
    await client.close()
    return published, fetched


def nats(size: int, count: int) -> tuple[float, float] | None:
    """The rates of NATS; None if NATS is not installed."""
    server = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin")
    try:
        import nats as _installed  # noqa: F401
    except ImportError:
        return None
    if server is None:
        return None
    folder = tempfile.mkdtemp(prefix="qmq-nats-")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [server, "-js", "-sd", folder, "-a", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        return in_loop(nats_round, port, size, count)  # type: ignore[no-any-return]
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


# --- the table -----------------------------------------------------------------------------------------------------------


def scenarios(scale: float) -> dict[str, dict[str, Callable[[], Any]]]:
    """The scenarios by kind and name. Each returns one figure, several, or none."""

    def n(count: int) -> int:
        return max(int(count * scale) // 1000 * 1000, 2000)

    return {
        "unordered": {
            "100 B, send, messages/s": lambda: throughput(n(3_000_000), 100, "send", "async"),
            "100 B, send_many, messages/s": lambda: throughput(n(5_000_000), 100, "many", "async"),
            "1 KB, send, messages/s": lambda: throughput(n(600_000), 1024, "send", "async"),
            "1 KB, send_many, messages/s": lambda: throughput(n(600_000), 1024, "many", "async"),
            "100 B, send, sync flush, messages/s": lambda: throughput(n(2_000_000), 100, "send", "sync"),
            "1 subject, 100 at a time, messages/s": lambda: many_subjects(n(3_000_000), 1),
            "10,000 subjects, 100 at a time, messages/s": lambda: many_subjects(n(3_000_000), SUBJECTS),
        },
        "everyday": dict(everyday.scenarios(scale)),
        "many": {
            "2,000 groups on a subject": lambda: many.groups(2_000),
            "10,000 subjects": lambda: many.subjects(10_000),
            "50,000 subjects": lambda: many.subjects(50_000),
        },
        "ordered": {
            "100 B, send, messages/s": lambda: throughput(n(3_000_000), 100, "send", "async"),
            "100 B with keys, unordered, send, messages/s": lambda: ordered.throughput(n(3_000_000), 100, "send"),
            "100 B, ordered, 1 partition, send, messages/s": lambda: ordered.throughput(n(3_000_000), 100, "send", 1),
            "100 B, ordered, 4 partitions, send, messages/s": lambda: ordered.throughput(n(3_000_000), 100, "send", 4),
            "100 B, send_many, messages/s": lambda: throughput(n(5_000_000), 100, "many", "async"),
            "100 B with keys, unordered, send_many, messages/s": lambda: ordered.throughput(n(5_000_000), 100, "many"),
            "100 B, ordered, 1 partition, send_many, messages/s": lambda: ordered.throughput(n(5_000_000), 100, "many", 1),
            "100 B, ordered, 4 partitions, send_many, messages/s": lambda: ordered.throughput(n(5_000_000), 100, "many", 4),
        },
        "lanes": {
            f"drain of a sealed partition, {count} consumers": lambda count=count: ordered.drain_rates(count, n(ordered.BACKLOG))
            for count in (1, 2, 4, 8, 16)
        },
        "changes": {
            "changes under load": lambda: ordered.of_replicas(ordered.changing, max(int(30 * scale), 6), groups=2),
            "split to another group": lambda: ordered.of_replicas(ordered.split_over_groups, max(8 * scale, 3.0), groups=2),
        },
        "latency": {
            "latency 1,000/s": lambda: latency(1_000, n(5_000)),
            "latency 20,000/s": lambda: latency(20_000, n(60_000)),
        },
        "replicated": {
            "100 B, send, one replica": lambda: replicas.replicated(1, n(3_000_000), 100),
            "100 B, send, three replicas, quorum": lambda: replicas.replicated(3, n(3_000_000), 100),
            "1 KB, send, one replica": lambda: replicas.replicated(1, n(600_000), 1024),
            "1 KB, send, three replicas, quorum": lambda: replicas.replicated(3, n(600_000), 1024),
        },
        "shards": {f"shards, {name}": work for name, work in shards.scenarios(scale).items()},
        "cold": {"2 GiB that is on the disk only": lambda: cold_reads.cold(n(2_000_000))},
        "large": {f"{mib} MiB bodies": lambda mib=mib: large.bodies(mib, max(int(1024 * scale) // mib, 8)) for mib in (1, 4, 15)},
        "delay": {
            "due at 10,000/s, lateness": lambda: delay.lateness(10_000, max(40 * scale, 5)),
            "due at 10,000/s, scattered over batches, lateness": lambda: delay.lateness(10_000, max(40 * scale, 5), 1),
            "100 B, send, one hour, acknowledged": lambda: delay.compared(n(2_000_000), 100, "send", 1, 1),
            "100 B, send_many, one hour, acknowledged": lambda: delay.compared(n(3_000_000), 100, "many", 1, 1),
            "100 B, send_many, over a day, acknowledged": lambda: delay.compared(n(1_000_000), 100, "many", 86_400, 1),
            "an hour of 1 M messages": lambda: delay.load_hour(n(1_000_000)),
            "an hour of 10 M messages": lambda: delay.load_hour(n(10_000_000)),
        },
        "delivery": {
            "listener, messages/s": lambda: delivery.listening(n(500_000)),
            "listener, one of a hundred fails five times, messages/s": lambda: delivery.listening(n(200_000), fails=True),
            "outbox in SQLite": lambda: delivery.sending(n(20_000)),
        },
        "spark": {
            "10 M of 100 B": lambda: spark.source(spark.session(), n(10_000_000), 100),
            "1 M of 1 KB": lambda: spark.source(spark.session(), n(1_000_000), 1024),
            "micro-batch of 1,000 rows": lambda: spark.micro_batches(spark.session()),
            "sink, 100 B": lambda: spark.sink(spark.session(), n(1_000_000), 100),
        },
        "lake": {
            "5 M of 100 B into a table": lambda: lake.backfill(n(5_000_000), 100),
            "1 M of 1 KB into a table": lambda: lake.backfill(n(1_000_000), 1024),
            "4 GiB in a folder, 1 GiB on the disk": lambda: tiering.in_folder(int(4096 * scale)),
            "4 GiB on an S3 server, 1 GiB on the disk": lambda: tiering.on_s3(int(4096 * scale)),
            "2 GiB, a new replica from a store": lambda: new_replica.from_store(int(2048 * scale)),
            "2 GiB, a new replica from the master": lambda: new_replica.from_master(int(2048 * scale)),
            "100,000 messages/s, followed": lambda: lake.visible(100_000, max(40 * scale, 15)),
        },
        "backup": {"2 GiB": lambda: backup.whole_and_again(int(2048 * scale))},
        "others": {
            "loopback 100 B, messages/s": lambda: loopback(100, n(20_000_000)),
            "loopback 1 KB, messages/s": lambda: loopback(1024, n(4_000_000)),
            "NATS 100 B": lambda: nats(100, n(40_000)),
            "NATS 1 KB": lambda: nats(1024, n(40_000)),
        },
    }


def measure(runs: int, scale: float, kinds: list[str]) -> dict[str, list[float]]:
    """Run the scenarios. Returns the values of each figure in all runs."""
    every = scenarios(scale)
    chosen = {name: work for kind in kinds for name, work in every[kind].items()}
    found: dict[str, list[float]] = {}
    with Progress(console=errors, transient=True) as bar:
        task = bar.add_task("benchmarks", total=runs * len(chosen))
        for _ in range(runs):
            for name, scenario in chosen.items():
                bar.update(task, description=name)
                for figure, value in flatten(name, scenario()).items():
                    found.setdefault(figure, []).append(value)
                bar.advance(task)
    return found


def flatten(name: str, value: Any) -> dict[str, float]:
    """A scenario's result as figures: one, several, or none if it could not be measured."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return {f"{name}, {part}": each for part, each in value.items()}
    if isinstance(value, tuple):
        parts = ("p50, ms", "p99, ms") if name.startswith("latency") else ("published, messages/s", "fetched, messages/s")
        return {f"{name}, {part}": each for part, each in zip(parts, value, strict=True)}
    return {name: value}


def ratio(found: dict[str, list[float]], name: str, base: str) -> str:
    """The median of the ratio of two figures, run by run, if both exist."""
    if "messages/s" not in name or base not in found or base == name or name.startswith(("loopback", "NATS")):
        return ""
    return f"{statistics.median(map(operator.truediv, found[name], found[base])):.3g}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="print JSON only")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--scale", type=float, default=1.0, help="fewer or more messages")
    options.add_argument("--only", action="append", choices=list(scenarios(1)), help="only this kind; repeatable")
    options.add_argument("--long", action="store_true", help="also measure memory over 50 M messages and the start on a 5 GiB log")
    chosen = options.parse_args()
    found = measure(chosen.runs, chosen.scale, chosen.only or list(scenarios(1)))
    figures = {name: statistics.median(values) for name, values in found.items()}
    if chosen.long:
        early, late = memory(int(50_000_000 * chosen.scale))
        figures["broker memory after a tenth of 50 M messages, MiB"] = early
        figures["broker memory after 50 M messages, MiB"] = late
        figures["start on a 5 GiB log, s"] = start_time(5 * chosen.scale)
        for part, value in delay.restart(int(50_000_000 * chosen.scale)).items():
            figures[f"50 M messages scheduled over a year, {part}"] = value
    if chosen.json:
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
        return
    bases = {
        "to unordered": "{size}, {mode}, messages/s",
        "to unordered with keys": "{size} with keys, unordered, {mode}, messages/s",
        "to loopback": "loopback {size}, messages/s",
        "to NATS publish": "NATS {size}, published, messages/s",
        "to NATS fetch": "NATS {size}, fetched, messages/s",
    }
    table = Table(title=f"medians of {chosen.runs}")
    table.add_column("figure", no_wrap=True)
    for column in ("value", *bases):
        table.add_column(column, justify="right")
    for name, value in figures.items():
        size, mode = "1 KB" if "1 KB" in name else "100 B", "send_many" if "send_many" in name else "send"
        ratios = [ratio(found, name, base.format(size=size, mode=mode)) for base in bases.values()]
        if "ordered" not in name:
            ratios[:2] = "", ""
        table.add_row(name, f"{value:,.0f}" if value >= 100 else f"{value:,.3f}", *ratios)
    console.print(table)


if __name__ == "__main__":
    main()
