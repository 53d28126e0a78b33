"""What a second shard gives: a node with two shards beside a node with one, in one cluster on this
machine (docs/SHARDS.md).

Shards are processes that share nothing, so a second shard helps as far as there is a core for it.
On two cores it competes with the clients, which need about as much CPU time as the node. So each
row is measured in two ways:

* limited: each process of a node may use only a part of a core, and a watcher stops the process
  (SIGSTOP) while it has used more. Clients are not limited. While "cores used" is less than the
  number of cores, shards and clients do not compete. The ratio compares rates.
* whole cores: no process is limited, and clients and shards compete. The ratio of the rates says
  what this machine gives. The capacity is the number of messages for each second of CPU time of the
  node's busiest process: the rate that the node reaches if each of its processes has a core, and
  the clients have others.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import qmq
from bench.everyday import FIRST, Measured, Watch, receive_columns
from bench.processes import BATCH, Figures, cpu_s, etcd_at, in_loop, limited, together
from qmq.model import Order, SubjectConfig

GROUPS: Final = {1: ("one",), 2: ("two.1", "two.2")}
"""The broker groups of the node with so many shards."""
BODIES: Final = [os.urandom(100) for _ in range(BATCH)]
KEYS: Final = [b"%d" % number for number in range(BATCH)]


@dataclass(frozen=True, slots=True)
class Row:
    """Messages of 100 B from one producer to one consumer. `core_part` is the part of a core that
    each process of a node may use when it is limited. `partitions` above 0: an ordered subject.
    """

    name: str
    count: int
    core_part: float = 0.3
    batch: int = BATCH
    partitions: int = 0
    replicas: int = 1


ROWS: Final = [
    Row("100 B", 2_000_000),
    Row("100 B, batches of 50", 500_000),
    Row("100 B, ordered, 8 partitions", 1_000_000, core_part=0.15, partitions=8),
    Row("100 B, three replicas", 600_000, core_part=0.15, replicas=3),
]


# --- the clients ----------------------------------------------------------------------------------


async def produce(address: str, row: Row, subject: str, count: int) -> Measured:
    """Send `count` messages in bulk."""
    async with qmq.connect(address) as mq:
        producer: Any = (
            mq.ordered_producer(subject)
            if row.partitions
            else mq.producer(subject, batch_messages=row.batch)
        )
        send = (
            partial(producer.send_many, BODIES, KEYS)
            if row.partitions
            else partial(producer.send_many, BODIES)
        )
        await producer.send(FIRST, key=b"first")
        await asyncio.sleep(0.3)
        watch = Watch()
        for _ in range(count // BATCH):
            send()
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return watch.stop()


async def consume(address: str, row: Row, subject: str, count: int) -> Measured:
    """Consume all messages in bulk."""
    async with qmq.connect(address) as mq:
        make: Any = mq.ordered_consumer if row.partitions else mq.consumer
        async with make(subject, "g") as consumer:
            return await receive_columns(consumer, count)


# --- the nodes ------------------------------------------------------------------------------------


class TwoNodes:
    """A node with one shard and a node with two, in one cluster. With several replicas, each node
    is that many brokers.
    """

    def __init__(self, replicas: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="qmq-bench-"))
        self._errors = self._folder / "errors"
        self._etcd = etcd_at(self._folder)
        self._etcd.start()
        names = "abc"[:replicas]
        self._brokers = {
            shards: [self._broker(shards, name, names) for name in names] for shards in GROUPS
        }
        self._meta = self._run("meta", "--port", "0")
        self.address = self._line(self._meta).split("ready at ")[1].split()[0]
        for shards, brokers in self._brokers.items():
            for broker in brokers:
                # a line of each shard, and one of their supervisor
                for _ in range(shards if shards == 1 else shards + 1):
                    self._line(broker)
        in_loop(_wait_for_masters, self.address)

    def _broker(self, shards: int, replica: str, replicas: str) -> subprocess.Popen[str]:
        group = GROUPS[shards][0].partition(".")[0]
        place = (
            "--group",
            group,
            "--replica",
            replica,
            "--replicas",
            ",".join(replicas),
            "--shards",
            str(shards),
        )
        return self._run(
            "broker",
            *place,
            "--data",
            str(self._folder / group / replica),
            "--data-port",
            "0",
            "--control-port",
            "0",
        )

    def _run(self, *words: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "qmq.cli",
            *words,
            "--etcd",
            self._etcd.endpoint.removeprefix("http://"),
        ]
        with self._errors.open("a") as errors:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " ready" not in line:
            raise SystemExit(f"{process.args!r} did not start: {self._errors.read_text()}")
        return line

    def processes(self, shards: int) -> list[int]:
        """The ids of the processes that serve the node with so many shards."""
        brokers = [broker.pid for broker in self._brokers[shards]]
        return brokers if shards == 1 else [child for pid in brokers for child in _children(pid)]

    def stop(self) -> None:
        """Stop all processes, and delete their data."""
        for process in [
            self._meta,
            *(broker for brokers in self._brokers.values() for broker in brokers),
        ]:
            with process:  # closes its output
                process.terminate()
        self._etcd.stop()
        shutil.rmtree(self._folder)


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def _wait_for_masters(address: str) -> None:
    wanted = {group for groups in GROUPS.values() for group in groups}
    async with qmq.connect(address) as mq, asyncio.timeout(60):
        while {
            group.broker_group for group in (await mq.metadata.cluster()).groups if group.master
        } != wanted:
            await asyncio.sleep(0.1)


async def _create(address: str, row: Row, subject: str, groups: Sequence[str]) -> None:
    order, places = (Order.STRICT, 1024) if row.partitions else (Order.NONE, 0)
    async with qmq.connect(address) as mq:
        config = SubjectConfig(
            subject, order=order, logical_partitions=places, groups=tuple(groups)
        )
        await mq.metadata.create_subject(config, partitions=row.partitions)


# --- the figures ----------------------------------------------------------------------------------


def _measured(nodes: TwoNodes, shards: int, row: Row, count: int, way: str) -> Figures:
    """Send and consume on one of the nodes."""
    subject, pids = f"{way}-{shards}", nodes.processes(shards)
    in_loop(_create, nodes.address, row, subject, GROUPS[shards])
    before_s = [cpu_s(pid) for pid in pids]
    words = (nodes.address, row, subject, count)
    if way == "limited":
        with limited(pids, row.core_part):
            consumed, produced = together((consume, *words), (produce, *words))
    else:
        consumed, produced = together((consume, *words), (produce, *words))
    used_s = [cpu_s(pid) - before for pid, before in zip(pids, before_s, strict=True)]
    took_s = consumed.end - produced.begin
    client_s = consumed.cpu_s + produced.cpu_s
    return {
        "messages/s": count / took_s,
        "capacity": count / max(used_s),
        "node us": sum(used_s) / count * 1e6,
        "client us": client_s / count * 1e6,
        "cores used": (client_s + sum(used_s)) / took_s,
    }


def compared(row: Row, count: int, order: Sequence[int]) -> Figures:
    """Both nodes, in this order, in both ways."""
    load = os.getloadavg()[0]
    nodes = TwoNodes(row.replicas)
    try:
        found = {
            (way, shards): _measured(nodes, shards, row, count, way)
            for way in ("limited", "whole")
            for shards in order
        }
    finally:
        nodes.stop()

    def ratio(way: str, figure: str) -> float:
        return found[way, 2][figure] / found[way, 1][figure]

    return {
        "load of the machine before": load,
        "limited, one shard, /s": found["limited", 1]["messages/s"],
        "limited, two shards, /s": found["limited", 2]["messages/s"],
        "limited, two to one": ratio("limited", "messages/s"),
        f"limited, two shards, cores used of {os.cpu_count()}": found["limited", 2]["cores used"],
        "whole cores, one shard, /s": found["whole", 1]["messages/s"],
        "whole cores, two shards, /s": found["whole", 2]["messages/s"],
        "whole cores, two to one": ratio("whole", "messages/s"),
        "capacity, one shard, /s": found["whole", 1]["capacity"],
        "capacity, two shards, /s": found["whole", 2]["capacity"],
        "capacity, two to one": ratio("whole", "capacity"),
        "node, one shard, us": found["whole", 1]["node us"],
        "node, two shards, us": found["whole", 2]["node us"],
        "client, one shard, us": found["whole", 1]["client us"],
        "client, two shards, us": found["whole", 2]["client us"],
    }


def scenarios(scale: float) -> dict[str, Callable[[], Figures]]:
    """The rows by name. Runs alternate between the nodes' orders."""
    return {
        row.name: partial(
            _run,
            row,
            max(int(row.count * scale) // BATCH * BATCH, 2 * BATCH),
            cycle([(1, 2), (2, 1)]),
        )
        for row in ROWS
    }


def _run(row: Row, count: int, orders: Iterator[Sequence[int]]) -> Figures:
    return compared(row, count, next(orders))
