"""The cost of replication: one broker against a group of three on this machine, `acks=quorum`, without consumers.

`scripts/bench --only replicated` runs it. All processes share the machine's cores, so the rate falls with all CPU time together; the CPU
times of master and slaves show where the time is spent.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

import qmq
from bench.group import ReplicaSet
from bench.processes import together

SUBJECT: Final = "bench"
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")

Figures = dict[str, float]


async def produce(address: str, count: int, size: int) -> tuple[float, float]:
    """(seconds from the first sent to the last acknowledged, seconds of this process's CPU time)."""
    async with qmq.connect(address) as mq:
        producer = mq.producer(SUBJECT)
        await producer.send(b"x")
        bodies = [os.urandom(size) for _ in range(1000)]
        begin, cpu_s = time.monotonic(), time.process_time()
        for _ in range(count // 1000):
            for body in bodies:
                producer.send(body)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return time.monotonic() - begin, time.process_time() - cpu_s


def cpu_s(pid: int) -> tuple[float, float]:
    """(in the process, in the kernel), from /proc, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) * TICK_S, int(fields[12]) * TICK_S


def replicated(replicas: int, count: int, size: int, flush: str = "async") -> Figures:
    """One producer sends to a group of this many replicas. Returns acknowledged messages a second, and microseconds of CPU time a
    message.
    """
    group = ReplicaSet(replicas, "--flush", flush)
    try:
        before = {name: cpu_s(group.processes[name].pid) for name in group.names}
        took_s, client_s = together((produce, group.address, count, size))[0]
        spent = {name: cpu_s(group.processes[name].pid) for name in group.names}
    finally:
        group.stop()
    each = sorted(
        ([1e6 * (now - then) / count for now, then in zip(spent[name], before[name], strict=True)] for name in group.names),
        key=sum,
        reverse=True,
    )
    (user, kernel), slaves = each[0], each[1:]
    found = {
        "acknowledged/s": count / took_s,
        "client, us": 1e6 * client_s / count,
        "master, us": user + kernel,
        "master in the kernel, us": kernel,
    }
    if slaves:
        found["each slave, us"] = sum(map(sum, slaves)) / len(slaves)
        found["each slave in the kernel, us"] = sum(kernel for _, kernel in slaves) / len(slaves)
    return found
