"""How long producers and consumers wait while something else happens: a reader of a cold backlog, a
backup, a change of a route.

On a machine with two cores, node, producer and reader compete for them. A producer then waits for a
core, which says nothing about the broker. With a reader that may use only a part of a core there is
a core for each.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import qmq
from bench.processes import SUBJECT, Figures, Node, ReplicaSet, etcd_at, fill, together
from qmq.limits import MIB
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

LIVE: Final = "live"
SIZE: Final = 1024
RATE: Final = 20_000
BURST: Final = 20
"""Messages that the producer sends together, each millisecond."""
READER_CORE_PART: Final = 0.2
SENDING_S: Final = 5.0
MORE_MIB: Final = 256
"""What is new in the second backup."""
KEYS: Final = [b"key-%05d" % number for number in range(10_000)]


async def pace(address: str) -> list[float]:
    """Send RATE messages of 100 B a second. How long each burst waited for its acknowledgement,
    milliseconds, in order of size.
    """
    waited: list[float] = []
    body = os.urandom(100)

    async def burst() -> None:
        begin = time.perf_counter()
        await producer.send_many([body] * BURST)
        waited.append(1e3 * (time.perf_counter() - begin))

    async with qmq.connect(address) as mq, mq.producer(LIVE) as producer:
        await producer.send(body)
        begin, tasks = time.monotonic(), set[asyncio.Task[None]]()
        sent = 0
        while time.monotonic() < begin + SENDING_S:
            while begin + sent * BURST / RATE <= time.monotonic():
                tasks.add(task := asyncio.create_task(burst()))
                task.add_done_callback(tasks.discard)
                sent += 1
            await asyncio.sleep(0.0005)
        await asyncio.gather(*tasks)
    return sorted(waited)


def latencies(name: str, waited_ms: list[float]) -> Figures:
    """Of what `pace` returns."""
    return {
        f"p50 of a producer {name}, ms": waited_ms[len(waited_ms) // 2],
        f"p99 of a producer {name}, ms": waited_ms[int(len(waited_ms) * 0.99)],
        f"worst of a producer {name}, ms": waited_ms[-1],
    }


# --- a cold backlog -------------------------------------------------------------------------------


def cold(count: int) -> Figures:
    """Read `count` messages from the disk. A producer's latency is measured without that, with it,
    and with a limited reader.
    """
    node = Node("--no-delay")
    together((fill, node.address, count, SIZE))
    node.stop(keep=True)
    node = Node("--no-delay", data=node.data)
    try:
        figures = latencies("alone", together((pace, node.address))[0])
        for group, name, part in (
            ("g", "meanwhile", 0.0),
            ("limited", "beside a limited reader", READER_CORE_PART),
        ):
            forget(node.data)
            jobs = (drain, node.address, count, group), (pace, node.address)
            took_s, waited_ms = together(*jobs, core_part=part, limited_jobs=1)
            figures |= {
                f"read{', limited' if part else ''}, MiB/s": count * SIZE / took_s / MIB
            } | latencies(name, waited_ms)
        return figures
    finally:
        node.stop()


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


async def drain(address: str, count: int, group: str) -> float:
    """Seconds from the first message to the last."""
    async with qmq.connect(address) as mq:
        consumer, got, begin = mq.consumer(SUBJECT, group, prefetch=20_000), 0, 0.0
        while got < count:
            found = await consumer.pull(20_000)
            begin = begin or time.monotonic()
            got += len(found.bodies)
            found.ack_later()
        return time.monotonic() - begin


# --- a backup -------------------------------------------------------------------------------------


def backup(mib: int) -> Figures:
    """A backup of one broker group into a folder: whole, again with MORE_MIB new while a producer
    sends, verified, and restored. The seconds are those of the commands, start of the process
    included.
    """
    with tempfile.TemporaryDirectory(prefix="qmq-bench-backup-") as place:
        folder, where = Path(place), str(Path(place, "backups"))
        group = ReplicaSet(1)
        found: Figures = {}
        try:
            etcd = ("--etcd", group.etcd.endpoint.removeprefix("http://"))
            together((fill, group.address, mib * MIB // SIZE, SIZE))
            found |= _timed("create", "create", where, *etcd)
            first = _bytes(folder)
            together((fill, group.address, MORE_MIB * MIB // SIZE, SIZE))
            found |= latencies("alone", together((pace, group.address))[0])
            with ThreadPoolExecutor(1) as thread:
                sending = thread.submit(together, (pace, group.address))
                time.sleep(SENDING_S / 2)  # its process has started by then
                found |= _timed("create again", "create", where, *etcd)
                found |= latencies("meanwhile", sending.result()[0])
            found |= {
                "objects of the first, MB": first / 1e6,
                "more objects, MB": (_bytes(folder) - first) / 1e6,
            }
        finally:
            group.stop()
        found |= _timed("verify", "verify", where)
        new = etcd_at(folder)
        new.start()
        try:
            into = f"{group.names[0][0]}/{group.names[0]}={folder / 'new'}"
            found |= _timed(
                "restore",
                "restore",
                where,
                "--etcd",
                new.endpoint.removeprefix("http://"),
                "--into",
                into,
            )
        finally:
            new.stop()
        return found


def _timed(name: str, *words: str) -> Figures:
    """Wall time and CPU time of `qmq backup WORDS`."""
    begin, before = time.monotonic(), os.times()
    subprocess.run(
        [sys.executable, "-m", "qmq.cli", "backup", *words], stdout=subprocess.DEVNULL, check=True
    )
    after = os.times()
    used_s = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return {f"{name}, s": time.monotonic() - begin, f"{name}, CPU time of the command, s": used_s}


def _bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in (folder / "backups").rglob("*") if each.is_file())


# --- changes of a route ---------------------------------------------------------------------------


def changes(count: int) -> Figures:
    """Splits, moves and merges of an ordered subject under load, on two broker groups of one
    replica each.
    """
    cluster = ReplicaSet(1, groups=2)
    try:
        found: Figures = together((_changing, cluster.address, count, list(cluster.groups)))[0]
        return found
    finally:
        cluster.stop()


async def _changing(address: str, count: int, groups: Sequence[str]) -> Figures:
    """The durations of refused writes and of consumers' pauses, in milliseconds."""
    async with qmq.connect(address) as mq:
        config = SubjectConfig(
            SUBJECT, order=Order.STRICT, logical_partitions=1024, groups=tuple(groups)
        )
        await mq.metadata.create_subject(config, partitions=2)
        handled: list[float] = []
        is_over = False

        async def handle(_: Any) -> None:
            handled.append(time.monotonic())

        async def load() -> None:
            async with mq.ordered_producer(SUBJECT) as producer:
                number = 0
                while not is_over:
                    for _ in range(20):
                        producer.send(b"x" * 100, KEYS[number * 7919 % len(KEYS)])
                        number += 1
                    await asyncio.sleep(0.002)

        members = [mq.ordered_consumer(SUBJECT, "g", name=f"c{number}") for number in range(2)]
        running = [asyncio.create_task(member.run(handle, concurrency=64)) for member in members]
        loading = asyncio.create_task(load())
        await asyncio.sleep(1)
        refused_ms, marks = [], []
        for number in range(count):
            route = (await mq.metadata.describe_route(SUBJECT)).route
            marks.append(time.monotonic())
            change = (
                await mq.metadata.change_route(SUBJECT, **_operation(route, number, groups))
            ).change
            refused_ms.append(change.times_ms["published"] - change.times_ms["prepared"])
            await asyncio.sleep(0.3)
        is_over = True
        await loading
        pauses_ms = [1e3 * _longest_gap(handled, mark, mark + 0.3) for mark in marks]
        for member in members:
            await member.close()
        await asyncio.gather(*running)
        return {
            f"{name}, ms, {said}": value
            for name, values in (("refused writes", refused_ms), ("consumer pause", pauses_ms))
            for said, value in (("p50", statistics.median(values)), ("worst", max(values)))
        }


def _operation(route: pb.OrderedRoute, number: int, groups: Sequence[str]) -> dict[str, Any]:
    parts = route.partitions
    if number % 3 == 0:
        return {
            "split": pb.SplitOperation(
                partition=max(parts, key=lambda part: part.lps.end - part.lps.first).number
            )
        }
    if number % 3 == 1:
        return {
            "move": pb.MoveOperation(
                partition=parts[0].number, broker_group=groups[number // 3 % len(groups)]
            )
        }
    return {"merge": pb.MergeOperation(partitions=[parts[0].number, parts[1].number])}


def _longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    inside = [begin, *[each for each in times if begin <= each <= end], end]
    return max(b - a for a, b in pairwise(inside))
