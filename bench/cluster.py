"""What a message costs a whole cluster of three replicas: the CPU time of all broker processes,
with many subjects and small batches, beside three brokers of Kafka.

    scripts/bench cluster [--peer kafka] [--subjects 200] [--acks flushed] [--rate 100000]

One process publishes whole batches of 100 messages of 256 B, to one subject after another, at a
rate that does not saturate the machine. Another process reads and acknowledges, in bulk: once
everything from the backlog, once while the first one publishes. Etcd, the metaserver and the
clients are not counted. Subjects exist before the clock starts.

Kafka has a topic of one partition for each subject, three replicas, min.insync.replicas=2 and
acks=all; `flushed` is flush.messages=1. Its clients are librdkafka's
(bench/peers/clients/kafka_cluster.py).
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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import qmq
from bench.everyday import GROUP
from bench.processes import Figures, ReplicaSet, cpu_s, together

REPLICAS: Final = 3
SIZE: Final = 256
TICK_S: Final = 0.01
REST_S: Final = 1.0
"""After which flushes and commits in the background are over."""
PEERS: Final = Path(__file__).parent / "peers"


@dataclass(frozen=True, slots=True)
class Load:
    """Messages to subjects NAME-0, NAME-1, ..., which exist and have one message each."""

    name: str
    subjects: int
    acks: str
    rate: int
    count: int
    batch: int = 100

    @property
    def names(self) -> list[str]:
        return [f"{self.name}-{number}" for number in range(self.subjects)]


# --- the clients: each returns its process's CPU time -------------------------------------------


async def prepare(address: str, load: Load) -> float:
    """Create the subjects: one message to each."""
    async with qmq.connect(address) as mq:
        await asyncio.gather(*[mq.send(name, b"first") for name in load.names])
    return time.process_time()


async def publish(address: str, load: Load) -> float:
    """Send batches to the subjects in turns."""
    bodies = [os.urandom(SIZE) for _ in range(load.batch)]
    async with qmq.connect(address) as mq:
        producers = [
            mq.producer(name, acks=load.acks, batch_messages=load.batch) for name in load.names
        ]
        used_s, begin, sent = time.process_time(), time.monotonic(), 0
        while sent < load.count:
            due = min(int((time.monotonic() - begin) * load.rate), load.count)
            while sent + load.batch <= due:
                producer = producers[sent // load.batch % load.subjects]
                if producer.full:
                    await producer.drain()
                producer.send_many(bodies)
                sent += load.batch
            await asyncio.sleep(TICK_S)
        for producer in producers:
            await producer.flush()
        return time.process_time() - used_s


async def consume(address: str, load: Load) -> float:
    """Read everything, and acknowledge it."""
    async with qmq.connect(address) as mq:
        used_s, left, over = time.process_time(), load.count + load.subjects, asyncio.Event()

        async def read(name: str) -> None:
            nonlocal left
            async with mq.consumer(name, GROUP, start="earliest") as consumer:
                async for messages in consumer.batches():
                    left -= len(messages.bodies)
                    if left <= 0:
                        over.set()

        work = [asyncio.create_task(read(name)) for name in load.names]
        await over.wait()
        for each in work:
            each.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        assert left == 0, f"{-left} messages came twice"
        return time.process_time() - used_s


_WORK: Final = {work.__name__: work for work in (prepare, publish, consume)}


# --- the clusters ---------------------------------------------------------------------------------


class QmqCluster:
    warm_s = 0.0

    def __init__(self, stack: ExitStack) -> None:
        group = ReplicaSet(REPLICAS)
        stack.callback(group.stop)
        self._address = group.address
        self.brokers = [group.processes[name].pid for name in group.names]

    def run(self, load: Load, *works: str) -> list[float]:
        """Do the works at the same time, each in its process. Returns their CPU times."""
        return together(*[(_WORK[work], self._address, load) for work in works])


class KafkaCluster:
    warm_s = 150.0
    """After which its compilers use little CPU time."""

    def __init__(self, stack: ExitStack) -> None:
        sys.path.append(str(PEERS))
        import fetch
        import servers

        cache = fetch.cache_folder()
        self._python = fetch.clients(cache)
        server = servers.kafka(cache, nodes=REPLICAS)
        stack.callback(server.stop)
        self._address = server.address
        self.brokers = [process.pid for process in server.processes]

    def run(self, load: Load, *works: str) -> list[float]:
        """As `QmqCluster.run`."""
        program = str(PEERS / "clients" / "kafka_cluster.py")
        given = json.dumps(asdict(load) | {"names": load.names, "size": SIZE})
        children = [
            subprocess.Popen(
                [str(self._python), program, work, self._address, given],
                stdout=subprocess.PIPE,
                text=True,
            )
            for work in works
        ]
        return [float(child.communicate()[0]) for child in children]


Cluster = QmqCluster | KafkaCluster
_CLUSTERS: Final[dict[str, type[Cluster]]] = {"qmq": QmqCluster, "kafka": KafkaCluster}


# --- the figures ----------------------------------------------------------------------------------


def measured(cluster: Cluster, load: Load) -> Figures:
    """Publish, then read the backlog; then publish while another process reads."""
    live = replace(load, name=f"{load.name}-live")
    for each in (load, live):
        cluster.run(each, "prepare")

    def used(load: Load, *works: str) -> tuple[float, list[float]]:
        time.sleep(REST_S)
        before_s = sum(map(cpu_s, cluster.brokers))
        found = cluster.run(load, *works)
        time.sleep(REST_S)
        used_s = sum(map(cpu_s, cluster.brokers)) - before_s
        print(f"{load.name}: {' and '.join(works)}: {used_s:.2f} s", file=sys.stderr, flush=True)
        return used_s, found

    published, (publisher,) = used(load, "publish")
    delivered, (consumer,) = used(load, "consume")
    both, _ = used(live, "publish", "consume")
    return {
        figure: value / load.count * 1e6
        for figure, value in {
            "brokers: published, us": published,
            "brokers: delivered from the backlog, us": delivered,
            "brokers: published and delivered at once, us": both,
            "publisher, us": publisher,
            "consumer, us": consumer,
        }.items()
    }


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "scripts/bench cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peer", choices=sorted(_CLUSTERS), default="qmq")
    parser.add_argument("--subjects", type=int, default=200)
    parser.add_argument("--acks", choices=("quorum", "flushed"), default="quorum")
    parser.add_argument("--rate", type=int, default=100_000, help="messages a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of publishing")
    parser.add_argument("--runs", type=int, default=3, help="after one that warms the brokers")
    asked = parser.parse_args(words)
    load = Load("", asked.subjects, asked.acks, asked.rate, int(asked.rate * asked.seconds))
    load = replace(load, count=load.count // load.batch * load.batch)
    with ExitStack() as stack:
        cluster = _CLUSTERS[asked.peer](stack)
        warm = replace(load, name="warm")
        measured(cluster, warm)
        end_s = time.monotonic() + cluster.warm_s
        while time.monotonic() < end_s:
            cluster.run(warm, "publish")
        runs = [
            measured(cluster, replace(load, name=f"run{number}")) for number in range(asked.runs)
        ]
    print(f"CPU time a message, medians (least to most) of {asked.runs}")
    for name in runs[0]:
        values = [each[name] for each in runs]
        print(
            f"{name:48} {statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"
        )
