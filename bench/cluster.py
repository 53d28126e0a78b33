"""What a message costs a whole cluster of three replicas: the CPU time of all broker processes for
publishing and for delivering it, with many subjects and small batches.

    scripts/bench cluster [--subjects 200] [--acks quorum|flushed] [--rate 40000] [--seconds 10]

One process publishes at a rate that does not saturate the machine: whole batches of 100, to one
subject after another. Another process then reads everything that was published.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from typing import Final

import qmq
from bench.everyday import GROUP
from bench.processes import Figures, ReplicaSet, cpu_s, together

BATCH: Final = 100
SIZE: Final = 256
WARM_S: Final = 2.0
TICK_S: Final = 0.01
REST_S: Final = 1.0
"""After which a flush and a commit in the background are over."""


def _names(subjects: int, prefix: str) -> list[str]:
    return [f"{prefix}-{number}" for number in range(subjects)]


async def publish(
    address: str, prefix: str, subjects: int, acks: str, rate: int, count: int
) -> float:
    """Send whole batches to the subjects in turns, at the rate. Returns this process's CPU time."""
    bodies = [os.urandom(SIZE) for _ in range(BATCH)]
    async with qmq.connect(address) as mq:
        producers = [
            mq.producer(name, acks=acks, batch_messages=BATCH) for name in _names(subjects, prefix)
        ]
        used_s, begin, sent = time.process_time(), time.monotonic(), 0
        while sent < count:
            due = min(int((time.monotonic() - begin) * rate), count)
            while sent + BATCH <= due:
                producer = producers[sent // BATCH % subjects]
                if producer.full:
                    await producer.drain()
                producer.send_many(bodies)
                sent += BATCH
            await asyncio.sleep(TICK_S)
        for producer in producers:
            await producer.flush()
        return time.process_time() - used_s


async def consume(address: str, prefix: str, subjects: int, count: int) -> float:
    """Read `count` messages of the subjects, and acknowledge them. Returns the CPU time."""
    async with qmq.connect(address) as mq:
        used_s, left, over = time.process_time(), count, asyncio.Event()

        async def read(name: str) -> None:
            nonlocal left
            async with mq.consumer(name, GROUP, start="earliest") as consumer:
                async for messages in consumer.batches():
                    left -= len(messages.bodies)
                    if not left:
                        over.set()

        work = [asyncio.create_task(read(name)) for name in _names(subjects, prefix)]
        await over.wait()
        for each in work:
            each.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        return time.process_time() - used_s


async def prepare(address: str, prefix: str, subjects: int) -> None:
    """Create the subjects: one message to each."""
    async with qmq.connect(address) as mq:
        await asyncio.gather(*[mq.send(name, b"first") for name in _names(subjects, prefix)])


def measured(
    group: ReplicaSet, prefix: str, subjects: int, acks: str, rate: int, seconds: float
) -> Figures:
    """Publish and read the backlog; then publish while another process reads."""
    count = int(rate * seconds) // BATCH * BATCH
    pids = [group.processes[name].pid for name in group.names]

    def used(*jobs) -> list[float]:
        time.sleep(REST_S)
        t = time.time()
        before = [cpu_s(pid) for pid in pids]
        if os.environ.get("OMB_PROF") and prefix == "run0":
            for pid in pids: os.kill(pid, 12)
            time.sleep(0.2)
        perfs = []
        if os.environ.get("OMB_PERF") and prefix == "run0":
            import subprocess
            global PH
            PH = globals().get("PH", 0) + 1
            perfs = [subprocess.Popen(["perf", "record", "-F", "2000", "-e", "cpu-clock", "-g", "-p", str(pid), "-o", f"/tmp/omb/perf-{n}-{PH}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for n, pid in zip(group.names, pids)]
        found = together(*jobs) if jobs else time.sleep(3)
        for each in perfs: each.send_signal(2); each.wait()
        if os.environ.get("OMB_PROF") and prefix == "run0":
            for pid in pids: os.kill(pid, 12)
            time.sleep(0.2)
        time.sleep(REST_S)
        print([round(1e6*(cpu_s(pid) - b)/count,2) for pid, b in zip(pids, before)], [round(1e6*x/count,2) for x in found or ()], f"{time.time()-t:.1f}s")
        return sum(cpu_s(pid) - b for pid, b in zip(pids, before))

    sending = lambda prefix: (publish, group.address, prefix, subjects, acks, rate, count)
    reading = lambda prefix: (consume, group.address, prefix, subjects, count + subjects)
    together((prepare, group.address, prefix, subjects), (prepare, group.address, prefix + "-live", subjects))
    found = {"idle": used(), "published": used(sending(prefix)), "delivered": used(reading(prefix)), "live": used(sending(prefix + "-live"), reading(prefix + "-live"))}
    return {name: value / count * 1e6 for name, value in found.items()}


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("scripts/bench cluster", description=__doc__)
    parser.add_argument("--subjects", type=int, default=200)
    parser.add_argument("--acks", default="quorum")
    parser.add_argument("--rate", type=int, default=40_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args(words)
    group = ReplicaSet(3, variables={"PYTHONSAFEPATH": "1", "PYTHONPATH": os.environ["BROKERS"]} if os.environ.get("BROKERS") else None)
    if os.environ.get("PIDS"):
        with open(os.environ["PIDS"], "w") as out:
            for name in group.names: print(name, group.processes[name].pid, file=out)
    try:
        measured(group, "warm", asked.subjects, asked.acks, asked.rate, WARM_S)
        runs = [
            measured(group, f"run{run}", asked.subjects, asked.acks, asked.rate, asked.seconds)
            for run in range(asked.runs)
        ]
    finally:
        group.stop()
    for name in runs[0]:
        values = [each[name] for each in runs]
        print(f"{name:24} {statistics.median(values):6.2f}  ({min(values):.2f} to {max(values):.2f})")
