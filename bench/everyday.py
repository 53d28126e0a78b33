"""Benchmarks of what programs do: message by message or in bulk, through the public client alone,
with its defaults and plain asyncio.

Each row runs on its own node, and the client's parts run in separate processes. A row has the rate,
and the CPU time a message of the client and of the node. CPU time says more than the rate where the
machine is shared.

`scripts/bench everyday` measures them. With `--against PATH` it measures this checkout and the one
at PATH alternately, and prints the medians side by side; `--row` chooses rows by a part of their
names, and with `--fast` the clients run by `qmq.run`. With `--awake` no processor sleeps meanwhile
(docs/BENCH.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import qmq
from bench.processes import SUBJECT, Figures, Node, cpu_s, together
from qmq.model import Order, SubjectConfig

GROUP: Final = "g"
TASKS: Final = 256
KEYS: Final = 1_000
PARTITIONS: Final = 4
WARM: Final = 500
HERE: Final = Path(__file__).resolve().parents[1]
FAST: Final = "QMQ_BENCH_FAST"
"""The environment variable by which the client's processes learn that `qmq.run` runs them."""
FIRST: Final = b"first"
"""The message that shows that producer and consumers are connected; the clock starts behind it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The work of one client process: its beginning and end (monotonic
    seconds), and its CPU time.
    """

    begin: float
    end: float
    cpu_s: float
    more: dict[str, float]


class Watch:
    """Measures a stretch of a process's work."""

    def __init__(self) -> None:
        self.begin, self._cpu_s = time.monotonic(), time.process_time()

    def stop(self, **more: float) -> Measured:
        return Measured(self.begin, time.monotonic(), time.process_time() - self._cpu_s, more)


Work = Callable[[qmq.Client, int, int], Awaitable[Measured]]
"""(client, messages, bytes of a body)"""


# --- sending, each awaited ------------------------------------------------------------------------


async def one_sender(mq: qmq.Client, count: int, size: int) -> Measured:
    """One task that awaits each send."""
    body = os.urandom(size)
    for _ in range(WARM):
        await mq.send(SUBJECT, body)
    took_s = []
    watch = Watch()
    for _ in range(count):
        before = time.perf_counter()
        await mq.send(SUBJECT, body)
        took_s.append(time.perf_counter() - before)
    return watch.stop(
        p50_ms=statistics.median(took_s) * 1e3, p10_ms=statistics.quantiles(took_s, n=10)[0] * 1e3
    )


async def many_senders(mq: qmq.Client, count: int, size: int) -> Measured:
    """Many tasks; each awaits each of its sends."""
    body = os.urandom(size)

    async def sender(messages: int) -> None:
        for _ in range(messages):
            await mq.send(SUBJECT, body)

    await asyncio.gather(*[sender(10) for _ in range(TASKS)])
    watch = Watch()
    await asyncio.gather(*[sender(count // TASKS) for _ in range(TASKS)])
    return watch.stop()


# --- sending in bulk ------------------------------------------------------------------------------


async def fill(mq: qmq.Client, count: int, size: int) -> Measured:
    """Many messages in whole batches."""
    bodies = [os.urandom(size) for _ in range(1_000)]
    await mq.send(SUBJECT, FIRST)
    await asyncio.sleep(0.3)
    async with mq.producer(SUBJECT) as producer:
        watch = Watch()
        for _ in range(count // 1_000):
            producer.send_many(bodies)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return watch.stop()


async def send_each(mq: qmq.Client, count: int, size: int) -> Measured:
    """Send messages one by one without awaiting them."""
    bodies = [os.urandom(size) for _ in range(1_000)]
    await mq.send(SUBJECT, FIRST)
    await asyncio.sleep(0.3)
    async with mq.producer(SUBJECT) as producer:
        watch = Watch()
        for _ in range(count // 1_000):
            for body in bodies:
                producer.send(body)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return watch.stop()


async def send_ordered(mq: qmq.Client, count: int, size: int) -> Measured:
    """Send messages with keys one by one without awaiting them."""
    bodies = [os.urandom(size) for _ in range(1_000)]
    keys = [b"%d" % number for number in range(KEYS)]
    await mq.send(SUBJECT, FIRST, key="first")
    await asyncio.sleep(0.3)
    async with mq.ordered_producer(SUBJECT) as producer:
        watch = Watch()
        for _ in range(count // 1_000):
            for body, key in zip(bodies, keys, strict=True):
                producer.send(body, key)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return watch.stop()


async def pace(mq: qmq.Client, count: int, size: int) -> Measured:
    """1,000 messages a second, each with the time in its body."""
    rest = bytes(size - 20)
    await mq.send(SUBJECT, FIRST)
    await asyncio.sleep(0.3)
    async with mq.producer(SUBJECT) as producer:
        watch = Watch()
        for number in range(count):
            ahead_s = watch.begin + number / 1_000 - time.monotonic()
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)
            producer.send(b"%020d" % time.monotonic_ns() + rest)
        await producer.flush()
        return watch.stop()


# --- consuming ------------------------------------------------------------------------------------


async def each_message(mq: qmq.Client, count: int, _size: int) -> Measured:
    """`async for`, acknowledged by itself."""
    async with mq.consumer(SUBJECT, GROUP) as consumer:
        return await _receive(consumer, count)


async def _receive(consumer: Any, count: int) -> Measured:
    left = count + 1
    watch = Watch()
    async for message in consumer:
        left -= 1
        if not left:
            break
        if message.body == FIRST:
            watch = Watch()
    return watch.stop()


async def each_acked(mq: qmq.Client, count: int, _size: int) -> Measured:
    """`async for`, and each message acknowledged by the program, without waiting."""
    left = count + 1
    async with mq.consumer(SUBJECT, GROUP, ack="explicit") as consumer:
        watch = Watch()
        async for message in consumer:
            await message.ack()
            left -= 1
            if not left:
                break
        return watch.stop()


async def each_acked_surely(mq: qmq.Client, count: int, _size: int) -> Measured:
    """`async for`; the program waits for the broker's answer to each acknowledgement."""
    left = count
    async with mq.consumer(SUBJECT, GROUP, ack="explicit") as consumer:
        watch = Watch()
        async for message in consumer:
            await message.ack_sync()
            left -= 1
            if not left:
                break
        return watch.stop()


async def a_share(mq: qmq.Client, count: int, _size: int) -> Measured:
    """One of several consumers of a group: until nothing has come for a second."""
    got = 0
    async with mq.consumer(SUBJECT, GROUP) as consumer:
        found = await consumer.pull(1)
        found.ack_later()
        watch = Watch()
        end = watch.stop(messages=0)
        try:
            while True:
                async with asyncio.timeout(1):
                    async for _ in consumer:
                        got += 1
                        if got % 1_000 == 0:
                            break
                end = watch.stop(messages=got)
        except TimeoutError:
            return end


async def listening(mq: qmq.Client, count: int, _size: int) -> Measured:
    """A listener whose handler does nothing."""
    left = count + 1

    @mq.listener(SUBJECT, group=GROUP)
    async def handle(body: bytes) -> None:
        nonlocal left
        left -= 1
        if not left:
            mq.stop()

    watch = Watch()
    await mq.run()
    return watch.stop()


async def message_objects(mq: qmq.Client, count: int, _size: int) -> Measured:
    """In batches, a message object for each."""
    left = count + 1
    async with mq.consumer(SUBJECT, GROUP) as consumer:
        watch = Watch()
        async for messages in consumer.batches():
            for message in messages:
                left -= 1
                if message.body == FIRST:
                    watch = Watch()
            if not left:
                break
        return watch.stop()


async def receive_columns(consumer: Any, count: int) -> Measured:
    """In batches, as lists of bodies; the first message comes alone, and begins the measurement."""
    left = count + 1
    watch = Watch()
    async for messages in consumer.batches():
        left -= len(messages.bodies)
        if messages.bodies[0] == FIRST:
            watch = Watch()
        if not left:
            break
    return watch.stop()


async def columns(mq: qmq.Client, count: int, _size: int) -> Measured:
    """In batches, as lists of bodies."""
    async with mq.consumer(SUBJECT, GROUP) as consumer:
        return await receive_columns(consumer, count)


async def clocked(mq: qmq.Client, count: int, _size: int) -> Measured:
    """The time from sending to receiving, of each message."""
    took_ns: list[int] = []
    async with mq.consumer(SUBJECT, GROUP) as consumer:
        watch = Watch()
        async for message in consumer:
            if message.body == FIRST:
                watch = Watch()
                continue
            took_ns.append(time.monotonic_ns() - int(message.body[:20]))
            if len(took_ns) == count:
                break
        found = sorted(took_ns[count // 20 :])
        return watch.stop(
            p50_ms=found[len(found) // 2] / 1e6, p99_ms=found[len(found) * 99 // 100] / 1e6
        )


async def ordered_messages(mq: qmq.Client, count: int, _size: int) -> Measured:
    """`async for` over an ordered subject."""
    async with mq.ordered_consumer(SUBJECT, GROUP) as consumer:
        return await _receive(consumer, count)


async def ordered_handler(mq: qmq.Client, count: int, _size: int) -> Measured:
    """`run(handler)` over an ordered subject."""
    left, over = count + 1, asyncio.Event()

    async def handle(_message: qmq.OrderedMessage) -> None:
        nonlocal left
        left -= 1
        if not left:
            over.set()

    async with mq.ordered_consumer(SUBJECT, GROUP) as consumer:
        watch = Watch()
        running = asyncio.create_task(consumer.run(handle))
        await over.wait()
        found = watch.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return found


async def ordered_columns(mq: qmq.Client, count: int, _size: int) -> Measured:
    """An ordered subject in batches."""
    left = count + 1
    async with mq.ordered_consumer(SUBJECT, GROUP) as consumer:
        watch = Watch()
        async for messages in consumer.batches():
            left -= len(messages.bodies)
            if FIRST in messages.bodies:
                watch = Watch()
            if not left:
                break
        return watch.stop()


# --- the rows -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """`before` fills the subject first; `beside` works at the same time. `partitions` above 0: an
    ordered subject.

    `core_part` above 0: each client process may use only this part of a core, so that several do
    not compete on a machine with few cores.
    """

    name: str
    count: int
    work: Work
    size: int = 100
    before: Work | None = None
    beside: Work | None = None
    processes: int = 1
    partitions: int = 0
    core_part: float = 0


ROWS: Final = [
    Row("one task awaits each send", 6_000, one_sender),
    Row("256 tasks await each send", 150_000, many_senders),
    Row("async for, end to end", 900_000, each_message, beside=send_each),
    Row("async for, a backlog", 1_200_000, each_message, before=fill),
    Row("three consumers of a group, a backlog", 1_800_000, a_share, before=fill, processes=3),
    Row("one consumer of a fifth of a core", 1_500_000, a_share, before=fill, core_part=0.2),
    Row(
        "three consumers, a fifth of a core each",
        4_500_000,
        a_share,
        before=fill,
        processes=3,
        core_part=0.2,
    ),
    Row("await message.ack(), a backlog", 1_200_000, each_acked, before=fill),
    Row("await message.ack_sync(), a backlog", 3_000, each_acked_surely, before=fill),
    Row("listener, a backlog", 300_000, listening, before=fill),
    Row(
        "ordered, async for, end to end",
        200_000,
        ordered_messages,
        beside=send_ordered,
        partitions=PARTITIONS,
    ),
    Row(
        "ordered, run(handler), end to end",
        200_000,
        ordered_handler,
        beside=send_ordered,
        partitions=PARTITIONS,
    ),
    Row("bulk, message objects", 1_000_000, message_objects, beside=send_each),
    Row("bulk, columns", 1_500_000, columns, beside=send_each),
    Row("bulk, columns, send_many", 2_000_000, columns, beside=fill),
    Row("bulk, columns, 1 KB", 300_000, columns, 1024, beside=fill),
    Row("ordered bulk, 1 partition", 600_000, ordered_columns, beside=send_ordered, partitions=1),
    Row("ordered bulk, 8 partitions", 600_000, ordered_columns, beside=send_ordered, partitions=8),
    Row("lone message at 1,000/s", 3_000, clocked, beside=pace),
]


def _in_process(results: Any, work: Work, address: str, count: int, size: int) -> None:
    """Entry of a child process, with plain asyncio."""

    async def run() -> Measured:
        async with qmq.connect(address) as mq:
            return await work(mq, count, size)

    results.put((qmq.run if os.environ.get(FAST) else asyncio.run)(run()))


async def _create_ordered(address: str, partitions: int) -> None:
    async with qmq.connect(address) as mq:
        config = SubjectConfig(SUBJECT, order=Order.STRICT, logical_partitions=1024)
        await mq.metadata.create_subject(config, partitions=partitions)


def measured(row: Row, count: int) -> Figures:
    """Measure one row on a new node. The client's CPU time is the sum over its processes."""
    node = Node("--no-delay")
    try:
        if row.partitions:
            asyncio.run(_create_ordered(node.address, row.partitions))
        if row.before is not None:
            together((row.before, node.address, count, row.size), entry=_in_process)
        before_s = cpu_s(node.pid)
        jobs = [
            (
                row.work,
                node.address,
                count // row.processes if row.processes == 1 else count,
                row.size,
            )
        ] * row.processes
        if row.beside is not None:
            jobs.append((row.beside, node.address, count, row.size))
        found = together(*jobs, entry=_in_process, core_part=row.core_part)
        node_s = cpu_s(node.pid) - before_s
    finally:
        node.stop()
    begin = (
        max(each.begin for each in found[-1:])
        if row.beside is not None
        else min(each.begin for each in found)
    )
    end = max(each.end for each in found[: row.processes])
    # Limited processes begin at different times, so their rates are added.
    rate = (
        sum(each.more["messages"] / (each.end - each.begin) for each in found)
        if row.core_part
        else count / (end - begin)
    )
    figures = {
        "messages/s": rate,
        "client us": sum(each.cpu_s for each in found) / count * 1e6,
        "node us": node_s / count * 1e6,
    }
    return figures | {name: value for name, value in found[0].more.items() if name != "messages"}


def _scaled(row: Row, scale: float) -> int:
    return max(int(row.count * scale) // 1000 * 1000, 2000)


# --- two checkouts side by side -------------------------------------------------------------------


def _child(tree: Path, row: Row, scale: float) -> Figures:
    """Measure one row with the code of a checkout, but with this program, which is found first: in
    a folder that has nothing else.
    """
    with tempfile.TemporaryDirectory(prefix="qmq-bench-") as folder:
        Path(folder, "bench").symlink_to(HERE / "bench")
        parts = (
            folder,
            tree,
            tree / "coordination",
            tree / "replication",
            tree / "ordering",
            tree / "spark",
        )
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, parts))}
        command = [
            sys.executable,
            "-m",
            "bench",
            "everyday",
            "--one",
            row.name,
            "--scale",
            str(scale),
        ]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=folder
        )
    found: Figures = json.loads(done.stdout)
    return found


def _compare(trees: list[Path], rows: list[Row], runs: int, scale: float) -> None:
    """Alternate between the checkouts, and which of them is first. Print medians and ratios."""
    for row in rows:
        found: list[list[Figures]] = [[] for _ in trees]
        for run in range(runs):
            for at in sorted(range(len(trees)), reverse=run % 2 == 1):
                found[at].append(_child(trees[at], row, scale))
        for figure in found[0][0]:
            medians = [statistics.median(each[figure] for each in mine) for mine in found]
            ratio = f"{medians[0] / medians[-1]:7.2f}" if len(trees) > 1 and medians[-1] else ""
            print(
                f"{row.name:42} {figure:11}"
                + "".join(f"{each:14,.2f}" for each in medians)
                + ratio,
                flush=True,
            )


def _spin(processor: int) -> None:
    """Keep a processor busy while no other process needs it."""
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


@contextmanager
def _awake() -> Iterator[None]:
    """Keep all processors awake: on a virtual machine, waking a processor takes longer than the
    broker's work for a message.
    """
    context = mp.get_context("spawn")
    spinning = [
        context.Process(target=_spin, args=(each,), daemon=True) for each in os.sched_getaffinity(0)
    ]
    for each in spinning:
        each.start()
    try:
        yield
    finally:
        for each in spinning:
            each.terminate()
            each.join()


def main(words: Sequence[str]) -> None:
    about = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser("scripts/bench everyday", description=about)
    parser.add_argument(
        "--against", type=Path, help="another checkout, measured alternately with this one"
    )
    parser.add_argument(
        "--row", action="append", default=[], help="a part of a row's name; several may be given"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="the part of the usual number of messages"
    )
    parser.add_argument(
        "--fast", action="store_true", help="run the clients by qmq.run in the place of asyncio.run"
    )
    parser.add_argument(
        "--awake",
        action="store_true",
        help="keep the processors awake by processes of the lowest priority",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.fast:
        os.environ[FAST] = "1"
    if asked.one:
        row = next(each for each in ROWS if each.name == asked.one)
        print(json.dumps(measured(row, _scaled(row, asked.scale))))
        return
    rows = [row for row in ROWS if not asked.row or any(part in row.name for part in asked.row)]
    with _awake() if asked.awake else nullcontext():
        _compare(
            [HERE, *([asked.against.resolve()] if asked.against else [])],
            rows,
            asked.runs,
            asked.scale,
        )
