"""Tasks a second of Celery, Dramatiq and Taskiq on QMQ, beside Redis and RabbitMQ where the
framework has them.

    scripts/bench integrations [--count N] [--runs N] [--only celery,dramatiq,taskiq]

One process sends tasks that do nothing, one at a time; then one worker with one thread runs them
all. The places of a framework take turns, each run has its own queue, and the figures are medians.
Each setting is the framework's default, without results: Celery acknowledges a task before it runs
and prefetches four. CPU time is that of the framework's process for each task sent and run, and
that of the server for both. Redis writes its append-only file and flushes every second; RabbitMQ
keeps persistent messages in classic queues, without confirms, as Celery does. Needs Debian's
redis-server and rabbitmq-server, and Redis's client: `.venv/bin/pip install 'redis<9'`. A server
that is missing is left out, and named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

from servers import Missing, Server, qmq, rabbitmq, redis

SCHEMES: Final = {"QMQ": "qmq://{}", "Redis": "redis://{}/0", "RabbitMQ": "amqp://guest:guest@{}//"}
SERVERS: Final[dict[str, Callable[[Path], Server]]] = {
    "QMQ": qmq,
    "Redis": redis,
    "RabbitMQ": rabbitmq,
}
PLACES: Final = {
    "celery": ("QMQ", "Redis", "RabbitMQ"),
    "dramatiq": ("QMQ", "Redis"),
    "taskiq": ("QMQ",),
}


class Meter:
    """Counts the tasks of a worker, and ends the process after the last one."""

    def __init__(self, count: int) -> None:
        self._count, self._seen = count, 0
        self._begun_s = self._cpu_s = 0.0

    def tick(self) -> None:
        if self._seen == 0:
            self._begun_s, self._cpu_s = time.monotonic(), time.process_time()
        self._seen += 1
        if self._seen == self._count:
            tell(self._count, self._begun_s, self._cpu_s)
            os._exit(0)  # what was prefetched beyond is nothing


def tell(count: int, begun_s: float, cpu_s: float) -> None:
    elapsed_s = time.monotonic() - begun_s
    found = {"per_s": count / elapsed_s, "cpu_us": (time.process_time() - cpu_s) / count * 1e6}
    print(json.dumps(found), flush=True)


def sending(count: int, send: Callable[[int], object]) -> None:
    send(0)  # connects
    begun_s, cpu_s = time.monotonic(), time.process_time()
    for number in range(1, count):
        send(number)
    tell(count - 1, begun_s, cpu_s)


def celery(role: str, place: str, address: str, queue: str, count: int) -> None:
    from celery import Celery

    import qmq.integrations.kombu

    assert qmq.integrations.kombu.Transport
    app, meter = Celery("bench", broker=SCHEMES[place].format(address)), Meter(count)
    app.conf.update(
        task_ignore_result=True,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
    )

    @app.task(name="nothing")
    def nothing(number: int) -> None:
        meter.tick()

    if role == "send":
        sending(count, lambda number: nothing.apply_async((number,), queue=queue))
    else:
        app.worker_main(["worker", "-P", "solo", "-c", "1", "-Q", queue, "-l", "ERROR"])


def dramatiq(role: str, place: str, address: str, queue: str, count: int) -> None:
    import dramatiq

    from qmq.integrations.dramatiq import DramatiqBroker

    if place == "QMQ":
        broker: Any = DramatiqBroker(address)
    else:
        from dramatiq.brokers.redis import RedisBroker

        broker = RedisBroker(url=SCHEMES[place].format(address))
    dramatiq.set_broker(broker)
    meter = Meter(count)

    @dramatiq.actor(actor_name="nothing", queue_name=queue)
    def nothing(number: int) -> None:
        meter.tick()

    if role == "send":
        sending(count, nothing.send)
        broker.close()
    else:
        dramatiq.Worker(broker, worker_threads=1).start()
        while True:
            time.sleep(60)


def taskiq(role: str, _: str, address: str, queue: str, count: int) -> None:
    from taskiq.receiver import Receiver

    from qmq.integrations.taskiq import QmqBroker

    broker, meter = QmqBroker(address, subject=queue), Meter(count)

    @broker.task(task_name="nothing")
    async def nothing(number: int) -> None:
        meter.tick()

    async def send() -> None:
        await broker.startup()
        await nothing.kiq(0)
        begun_s, cpu_s = time.monotonic(), time.process_time()
        for number in range(1, count):
            await nothing.kiq(number)
        tell(count - 1, begun_s, cpu_s)
        await broker.shutdown()

    async def work() -> None:
        broker.is_worker_process = True
        await broker.startup()
        await Receiver(broker, run_startup=False, max_async_tasks=1).listen(asyncio.Event())

    asyncio.run(send() if role == "send" else work())


FRAMEWORKS: Final = {"celery": celery, "dramatiq": dramatiq, "taskiq": taskiq}


def program(
    framework: str, role: str, place: str, address: str, queue: str, count: int
) -> dict[str, float]:
    """Run a role in a separate process. Returns what the process measured."""
    command = [
        sys.executable,
        "-m",
        "bench",
        "integrations",
        "--role",
        role,
        framework,
        place,
        address,
        queue,
        str(count),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(
            f"{framework} on {place}, {role}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
        )
    return dict(json.loads(lines[-1]))


def turn(framework: str, place: str, server: Server, count: int) -> dict[str, float]:
    """One run of one framework at one place."""
    queue, cpu_s = f"bench-{uuid4().hex[:8]}", server.cpu_s()
    told: dict[str, float] = {}
    for role in ("send", "work"):
        found = program(framework, role, place, server.address, queue, count)
        told |= {f"{role} {name}": value for name, value in found.items()}
    return told | {"server cpu_us": (server.cpu_s() - cpu_s) / count * 1e6}


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "scripts/bench integrations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=5_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default=",".join(FRAMEWORKS))
    parser.add_argument("--role", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.role:
        role, framework, place, address, queue, count = options.role
        FRAMEWORKS[framework](role, place, address, queue, int(count))
        return
    servers: dict[str, Server] = {}
    try:
        for name, start in SERVERS.items():
            try:
                servers[name] = start(Path())
            except Missing as why:
                print(f"{name} is left out: {why}")
        wanted = [
            (each, place)
            for each in options.only.split(",")
            for place in PLACES[each]
            if place in servers
        ]
        found: dict[tuple[str, str], list[dict[str, float]]] = {each: [] for each in wanted}
        for _ in range(options.runs):
            for each in wanted:
                found[each].append(turn(*each, servers[each[1]], options.count))
    finally:
        for server in servers.values():
            server.stop()
    print(
        "| framework | on | sent a second | run a second | CPU of sending | CPU of running | "
        "CPU of the server |"
    )
    print("|---|---|---|---|---|---|---|")
    for (framework, place), runs in found.items():
        middle = {name: statistics.median(each[name] for each in runs) for name in runs[0]}
        rates = f"{middle['send per_s']:,.0f} | {middle['work per_s']:,.0f}"
        cpus = " | ".join(
            f"{middle[name]:,.0f} µs" for name in ("send cpu_us", "work cpu_us", "server cpu_us")
        )
        print(f"| {framework} | {place} | {rates} | {cpus} |")
    print(
        f"{options.runs} runs of {options.count:,} tasks; load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} processors"
    )
