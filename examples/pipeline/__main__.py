"""Runs the pipeline, and counts at the end whether every flight is everywhere once.

    python -m examples.pipeline                               on its own node and Spark
    python -m examples.pipeline --servers localhost:20880     on a cluster that is there
    … --servers meta0:20880 --master spark://spark-master:7077     and on a Spark that is there
    … --flights 3000                                          the first of the year

Exit status 1 if a number is wrong. A second run finds everything, and repeats nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from pyspark.sql.connect.session import SparkSession

import qmq

from . import alerts, checks, lake
from .dashboard import draw
from .departures import Departure, departures
from .load import load
from .node import own_node
from .server import spark_server
from .update import update, write_spec

ALL: Final = 336_776


class Steps:
    """Tells what is done, and how long each step took."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()

    def done(self, what: str) -> None:
        now = time.perf_counter()
        print(f"{now - self._last:6.1f} s  {what}", flush=True)
        self._last = now

    def end(self) -> None:
        print(f"{self._last - self._begin:6.1f} s  in all")


async def send(servers: str, rows: list[Departure]) -> int:
    async with qmq.connect(servers) as mq:
        return await load(mq, rows)


async def tell_alerts(servers: str) -> int:
    async with qmq.connect(servers) as mq:
        return await alerts.print_alerts(mq, lambda text: print(f"          {text}"))


def run(chosen: argparse.Namespace) -> int:
    """Run all steps. Returns the exit status."""
    folder: Path = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    steps, host = Steps(), "127.0.0.1"
    if not chosen.master.startswith("local"):
        host = socket.gethostbyname(socket.gethostname())
    with ExitStack() as stack:
        servers = chosen.servers or stack.enter_context(own_node(folder / "node"))
        rows = list(departures(chosen.flights))
        url = stack.enter_context(spark_server(folder, chosen.master, host))
        spec = write_spec(folder, servers)
        steps.done("a node and Spark are there" if not chosen.servers else "Spark is there")
        for end in (len(rows) // 2, len(rows)):
            sent = asyncio.run(send(servers, rows[:end]))
            steps.done(f"{sent:,} flights sent; {end:,} are in the log")
            if sent or end == len(rows):
                update(spec, url)
                steps.done("the declarative pipeline is up to date")
        lake.follow(folder, servers)
        steps.done(f"the Iceberg table is up to date: {lake.where(folder)}")
        steps.done(f"{asyncio.run(tell_alerts(servers))} new alerts came to the consumer")
        spark = SparkSession.builder.remote(url).create()
        stack.callback(spark.stop)
        picture = folder / "dashboard.png"
        draw(spark, picture)
        steps.done(f"the picture: {picture}")
        found = checks.count(spark, servers, folder)
        steps.done("counted")
    steps.end()
    return 0 if checks.report(found, len(rows)) else 1


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--servers", default="", help="metaservers; without it, its own node")
    options.add_argument("--master", default="local[2]", help="Spark's master")
    options.add_argument("--flights", type=int, default=ALL, help="the first so many of the year")
    options.add_argument(
        "--folder", type=Path, default=Path("flights-pipeline"), help="for everything that stays"
    )
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # stops what it started
    return run(options.parse_args())


if __name__ == "__main__":
    sys.exit(main())
