"""Measures the cost of waiting for the disk: groups of one and three replicas on a disk whose
fdatasync takes a given time.

    scripts/bench flush                                  modes of this tree
    scripts/bench flush --tree OTHER --modes async       another tree's servers, to compare with

A library, compiled here and preloaded (LD_PRELOAD), replaces the servers' fdatasync by a sleep, and
the kernel's asynchronous sync by a timer, so that the variance of the real disk is not measured.
Writes are real. etcd is a static program and not affected. Modes: async, flushed (async, and the
measured producer has acks="flushed"), sync (all servers with --flush sync).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import qmq
from bench.processes import SUBJECT, ReplicaSet

_SHIM: Final = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>
static long delay_us(void) {
    const char *text = getenv("QMQ_BENCH_FDATASYNC_US");
    return text ? atol(text) : -1;
}
static struct timespec taken(long us) {
    return (struct timespec){us / 1000000, us % 1000000 * 1000};
}
long syscall(long number, ...);
int fdatasync(int fd) {
    long us = delay_us();
    if (us < 0) return syscall(SYS_fdatasync, fd);
    struct timespec wait = taken(us);
    nanosleep(&wait, 0);
    return 0;
}
/* A sync by the kernel becomes its wait for a timer. */
static int timers[2] = {-1, -1};
long syscall(long number, ...) {
    static long (*next)(long, ...);
    if (!next) next = dlsym(RTLD_NEXT, "syscall");
    __builtin_va_list words;
    __builtin_va_start(words, number);
    long a[6];
    for (int each = 0; each < 6; each++) a[each] = __builtin_va_arg(words, long);
    __builtin_va_end(words);
    long us = number == SYS_io_submit ? delay_us() : -1;
    if (us < 0) return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    struct iocb polls[2], *list[2];
    struct itimerspec wait = {{0, 0}, taken(us ? us : 1)};
    for (long each = 0; each < a[1]; each++) {
        if (timers[each] < 0) timers[each] = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
        timerfd_settime(timers[each], 0, &wait, 0);
        polls[each] = *((struct iocb **)a[2])[each];
        polls[each].aio_lio_opcode = IOCB_CMD_POLL;
        polls[each].aio_fildes = timers[each];
        polls[each].aio_buf = POLLIN;
        list[each] = &polls[each];
    }
    return next(number, a[0], a[1], list);
}
"""
RATE: Final = 1_000
SENDERS: Final = 256


def main(words: Sequence[str]) -> None:
    options = argparse.ArgumentParser(
        "scripts/bench flush",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--modes", default="async,flushed,sync")
    options.add_argument("--delays-us", default="100,1000,5000", help="-1: the real disk.")
    options.add_argument("--replicas", default="1,3")
    options.add_argument("--flush-interval-ms", type=int, default=None)
    options.add_argument("--tree", type=Path, help="Run the servers of this tree.")
    options.add_argument("--seconds", type=float, default=1.0, help="Of each measurement.")
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LD_PRELOAD"] = str(_compiled(Path(folder)))
        if given.tree is not None:
            os.environ["PYTHONPATH"] = ":".join(
                str(given.tree / each) for each in ("", "replication", "coordination", "ordering")
            )
            os.environ["PYTHONSAFEPATH"] = (
                "1"  # with `-m` Python looks into the working folder first, which is this tree
            )
        print(
            "| replicas | fdatasync ms | mode | one awaiting sender /s | p50 / p99 ms at "
            "1,000/s | 256 senders /s |"
        )
        print("|---|---|---|---|---|---|", flush=True)
        for count in map(int, given.replicas.split(",")):
            for delay_us in map(int, given.delays_us.split(",")):
                os.environ["QMQ_BENCH_FDATASYNC_US"] = str(delay_us)
                delay = f"{delay_us / 1000:g}" if delay_us >= 0 else "real"
                for mode in given.modes.split(","):
                    print(
                        f"| {count} | {delay} | {mode} | {_measured(count, mode, given)} |",
                        flush=True,
                    )


def _compiled(folder: Path) -> Path:
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(_SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return library


def _measured(count: int, mode: str, given: Any) -> str:
    words = ["--flush", "sync" if mode == "sync" else "async"]
    if given.flush_interval_ms is not None:
        os.environ["QMQ_FLUSH_INTERVAL_MS"] = str(given.flush_interval_ms)
    group = ReplicaSet(count, *words)
    try:
        return asyncio.run(
            _measure(
                group.address,
                "flushed" if mode == "flushed" else "quorum",
                given.seconds,
                given.rounds,
            )
        )
    finally:
        group.stop()


async def _measure(address: str, acks: str, seconds: float, rounds: int) -> str:
    async with qmq.connect(address) as mq:
        producer = mq.producer(SUBJECT, acks=acks)

        async def send() -> None:
            await producer.send(b"x" * 100)

        await _count(send, 0.5)
        alone, many, p50, p99 = [], [], [], []
        for _ in range(rounds):
            alone.append(await _count(send, seconds))
            marks = quantiles(await _paced(send, seconds), n=100)
            p50.append(marks[49] * 1000)
            p99.append(marks[98] * 1000)
            many.append(sum(await asyncio.gather(*[_count(send, seconds) for _ in range(SENDERS)])))
    return f"{median(alone):,.0f} | {median(p50):.2f} / {median(p99):.1f} | {median(many):,.0f}"


async def _count(send: Callable[[], Any], seconds: float) -> float:
    """Messages per second of one sender that awaits each message."""
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        await send()
        count += 1
    return count / (time.perf_counter() - begin)


async def _paced(send: Callable[[], Any], seconds: float) -> list[float]:
    """The latency of each message in seconds at RATE per second,
    counted from its planned send time.
    """
    begin, took = time.perf_counter(), []

    async def one(due: float) -> None:
        await send()
        took.append(time.perf_counter() - due)

    tasks = []
    for number in range(int(seconds * RATE)):
        due = begin + number / RATE
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    return took
