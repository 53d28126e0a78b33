"""Benchmarks of delayed messages: lateness, intake rate, loading an hour's bucket, restart with a year's schedule."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

import qmq
from bench.processes import Node, together
from qmq.limits import MIB
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns

HOUR_MS: Final = 3_600_000
BATCH: Final = 1_000
LEAD_S: Final = 4.0
"""Seconds between the first send and the first due time."""


# --- lateness ------------------------------------------------------------------------------------------------------------


async def schedule(address: str, rate: int, seconds: float, scattered: bool) -> float:
    """Send messages of 100 B that become due evenly at `rate` per second. Returns the first due time, in seconds since 1970.

    Messages are sent in the order of their due times, or `scattered`: the due times of each batch spread over the whole time.
    """
    async with qmq.connect(address) as mq:
        await mq.send("late", b"ready")
        producer = mq.delayed_producer("late")
        count = int(rate * seconds)
        begin_ms = int((time.time() + LEAD_S + count / 200_000) * 1000)
        body = os.urandom(100)
        due_times_ms = begin_ms + np.arange(count) * 1000 // rate
        if scattered:
            np.random.default_rng(1).shuffle(due_times_ms)
        for at in range(0, count, BATCH):
            some = due_times_ms[at : at + BATCH].tolist()
            producer.send_many([body] * len(some), due_ms=some)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return begin_ms / 1000


async def stored_times(address: str, count: int) -> list[int]:
    """The store times at the real-time broker, ascending."""
    stored: list[int] = []
    async with qmq.connect(address) as mq:
        await asyncio.sleep(1.0)
        consumer, got = mq.consumer("late", "g", prefetch=100_000), 0
        while got < count + 1:
            found = await consumer.pull(10_000)
            stored += [message.append_time_ms for message in found if message.body != b"ready"]
            got += len(found)
            found.ack_later()
    return sorted(stored)


def lateness(rate: int, seconds: int, scattered: int = 0) -> dict[str, float]:
    """The lateness at the real-time brokers, in milliseconds."""
    node = Node()
    try:
        count = int(rate * seconds)
        begin, stored = together((schedule, node.address, rate, seconds, bool(scattered)), (stored_times, node.address, count))
        due_times_ms = int(begin * 1000) + np.arange(count) * 1000 // rate
        late = np.array(stored, np.int64) - due_times_ms  # They arrive in the order of their due times, so the n-th stored is the n-th due.
        return {
            "p50, ms": float(np.percentile(late, 50)),
            "p99, ms": float(np.percentile(late, 99)),
            "max, ms": float(late.max()),
            "earliest, ms": float(late.min()),
        }
    finally:
        node.stop()


# --- intake --------------------------------------------------------------------------------------------------------------


async def acknowledged(address: str, count: int, size: int, mode: str, span_s: int) -> float:
    """Acknowledged messages per second. The due times of a batch spread over `spread_s` seconds, a day ahead (0: not delayed)."""
    delayed = span_s > 0
    async with qmq.connect(address) as mq:
        producer: Any = mq.delayed_producer("intake") if delayed else mq.producer("intake")
        bodies = [os.urandom(size) for _ in range(BATCH)]
        due_ms = int(time.time() * 1000) + 24 * HOUR_MS
        due_times_ms = [due_ms + i * span_s * 1000 // BATCH for i in range(BATCH)]
        if delayed:
            await producer.send(b"ready", due_ms=due_ms)
        else:
            await producer.send(b"ready")
        begin = time.monotonic()
        for _ in range(count // BATCH):
            if mode == "many":
                producer.send_many(bodies, due_ms=due_times_ms) if delayed else producer.send_many(bodies)
            elif delayed:
                for body, due in zip(bodies, due_times_ms, strict=True):
                    producer.send(body, due_ms=due)
            else:
                for body in bodies:
                    producer.send(body)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return count / (time.monotonic() - begin)


def intake(count: int, size: int, mode: str, *, delayed: bool, span_s: int = 1) -> float:
    """The intake rate of one node with one producer process; messages are due in a day."""
    node = Node()
    try:
        found: float = together((acknowledged, node.address, count, size, mode, span_s if delayed else 0))[0]
        return found
    finally:
        node.stop()


def compared(count: int, size: int, mode: str = "many", span_s: int = 1, rounds: int = 3) -> dict[str, float]:
    """Medians of acknowledged messages per second, delayed and not delayed, in alternating runs, and their ratio."""
    pairs = [[intake(count, size, mode, delayed=delayed, span_s=span_s) for delayed in (False, True)] for _ in range(rounds)]
    real_time, delayed = np.median(np.array(pairs), axis=0).tolist()
    return {"real-time, msg/s": real_time, "delayed, msg/s": delayed, "ratio": delayed / real_time}


# --- storage: a schedule alone, without network -----------------------------------------------------------------------


def batches(count: int, begin_ms: int, span_ms: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Batches of 1,000, each within one hour, spread evenly."""
    body = os.urandom(size)
    for at in range(0, count, BATCH):
        hour_ms = begin_ms + int(at / count * span_ms) // HOUR_MS * HOUR_MS
        step = HOUR_MS // BATCH
        due_times_ms = [hour_ms + (i * 7919 % BATCH) * step for i in range(BATCH)]
        yield encode(
            b"bench", Columns([body] * BATCH, due_times_ms=due_times_ms), producer_id=1, batch_sequence=at // BATCH, create_time_ms=0
        )


def fill(folder: Path, count: int, begin_ms: int, span_ms: int, size: int = 20) -> None:
    """Write a node's delay folder with `count` messages, in the node's own format."""
    from qmq.broker.produce_checks import Destination, read_batch
    from qmq.delay.schedule import Schedule
    from qmq.log.checkpoint import begin_checkpoint, close_store, end_checkpoint
    from qmq.log.disk import Disk
    from qmq.log.log_config import LogConfig
    from qmq.log.recovery import open_store
    from qmq.process.event_loop import SystemClock

    disk = Disk()
    projection = Schedule(folder / "schedule", disk, HOUR_MS)
    store = open_store(folder, LogConfig(segment_bytes=256 * MIB), SystemClock(), disk=disk, projection=projection)
    queue = store.open_queue("bench", 0)

    def find(_subject: bytes, _partition: int) -> Destination:
        return Destination(queue, 1 << 20, check_due_times=lambda *_: None)

    for number, (envelope, region) in enumerate(batches(count, begin_ms, span_ms, size)):
        store.append([read_batch(region, int.from_bytes(envelope[12:16], "little"), find)])
        if number % 20_000 == 19_999:
            plan = begin_checkpoint(store)
            plan.run()
            end_checkpoint(store, plan)
    close_store(store)


def load_hour(count: int) -> dict[str, float]:
    """Load an hour's bucket into the wheel, in another process. Returns seconds and peak memory."""
    import multiprocessing as mp

    folder = Path(tempfile.mkdtemp(prefix="qmq-bench-"))
    try:
        begin_ms = 500_000 * HOUR_MS
        fill(folder, count, begin_ms, HOUR_MS)
        context = mp.get_context("spawn")
        results = context.Queue()
        child = context.Process(target=_load, args=(str(folder), begin_ms, results))
        child.start()
        found: dict[str, float] = results.get(timeout=300)
        child.join()
        return found
    finally:
        shutil.rmtree(folder)


def _load(folder: str, begin_ms: int, results: Any) -> None:
    from qmq.delay.loader import Loader
    from qmq.delay.schedule import Schedule
    from qmq.delay.wheel import Wheel
    from qmq.log.disk import Disk
    from qmq.log.log_config import LogConfig
    from qmq.log.recovery import open_store
    from qmq.process.event_loop import SystemClock

    disk = Disk()
    projection = Schedule(Path(folder) / "schedule", disk, HOUR_MS)
    store = open_store(Path(folder), LogConfig(), SystemClock(), disk=disk, projection=projection)
    wheel = Wheel(500)

    async def at_once(run: Any) -> Any:
        return run()

    async def load() -> float:
        loader = Loader(projection, wheel, at_once)
        loader.begin(begin_ms)
        begin = time.monotonic()
        while loader.horizon_ms < begin_ms + HOUR_MS:
            before = loader.horizon_ms
            await loader.ahead(max(loader.horizon_ms, begin_ms))
            if loader.horizon_ms == before:
                break
        return time.monotonic() - begin

    took = asyncio.run(load())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"load, s": took, "messages": float(len(wheel)), "peak memory, MiB": peak}
    results.put({**found, "bytes a message in the wheel": wheel.nbytes / max(len(wheel), 1)})
    store.close()


async def next_due(address: str, subject: str) -> float:
    """The due time of the subject's next message, in seconds since 1970; 0: none."""
    async with qmq.connect(address) as mq:
        async for message in mq.delayed.list(subject, limit=1):
            return message.due.timestamp()
    return 0


def restart(count: int) -> dict[str, float]:
    """Start a node with `count` messages scheduled over a year. Returns seconds until it is ready, and its memory."""
    folder = Path(tempfile.mkdtemp(prefix="qmq-bench-"))
    try:
        begin_ms = (int(time.time() * 1000) // HOUR_MS + 2) * HOUR_MS
        fill(folder / "delay", count, begin_ms, 365 * 24 * HOUR_MS)
        begin = time.monotonic()
        node = Node(data=folder)
        took = time.monotonic() - begin
        memory = node.resident_mib()
        listed = time.monotonic()
        assert asyncio.run(next_due(node.address, "bench")) * 1000 >= begin_ms, "the node does not have the schedule"
        listed_took = time.monotonic() - listed
        node.stop(keep=True)
        empty = time.monotonic()
        other = Node()
        empty_took = time.monotonic() - empty
        other.stop()
        return {"start, s": took, "start of an empty node, s": empty_took, "memory, MiB": memory, "its next message, s": listed_took}
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    print(globals()[sys.argv[1]](*(int(word) if word.isdigit() else word for word in sys.argv[2:])))
