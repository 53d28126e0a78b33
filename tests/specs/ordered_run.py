"""A run of a real cluster with an ordered subject: its partitions are split, merged and moved under load, and a master is killed."""

from __future__ import annotations

import asyncio
from typing import Final

from ordersim.tracer import Tracer
from qmq_ordering.hashing import logical_partition

import qmq
from qmq import OrderedMessage, OrderedProducer
from qmq.proto.v1 import meta_pb2 as pb
from specs.traced_cluster import traced_cluster

KEYS: Final = tuple(b"k%d" % number for number in range(6))
LOGICAL: Final = 8
ROUNDS: Final = 12
"""Messages of each key."""


class Application:
    """A producer and two consumers of one subject, which show the tracer what they send, are told and get."""

    def __init__(self, mq: qmq.Client, tracer: Tracer) -> None:
        self._mq = mq
        self._tracer = tracer
        self.handled: set[bytes] = set()
        self.is_whole = asyncio.Event()

    async def send(self, producer: OrderedProducer, number: int) -> None:
        """The next message of each key, acknowledged."""
        await asyncio.gather(*[self._send(producer, key, number) for key in KEYS])

    async def _send(self, producer: OrderedProducer, key: bytes, number: int) -> None:
        ticket = producer.send(b"%s/%d" % (key, number), key)
        place = producer.place_of_last(ticket)
        self._tracer.made(producer, key, number, logical_partition(key, LOGICAL))
        receipt = (await ticket).receipt(place)
        self._tracer.acked(key, number, receipt.partition)

    async def consume(self, name: str) -> None:
        """Handle messages until cancelled."""

        async def handle(message: OrderedMessage) -> None:
            self._tracer.given("g", name, message.partition, message.sequence)
            await asyncio.sleep(0)
            self._tracer.handled("g", name, message.partition, message.sequence)
            self.handled.add(message.body)
            if len(self.handled) == len(KEYS) * ROUNDS:
                self.is_whole.set()

        async with self._mq.ordered_consumer("s", "g", name=name) as consumer:
            await consumer.run(handle)


async def change(mq: qmq.Client, number: int) -> None:
    """A split, a merge, a move to the other broker group, and another split."""
    described = await mq.metadata.describe_route("s")
    parts = list(described.route.partitions)
    first, last = parts[0], parts[-1]
    if number == 1:
        await mq.metadata.change_route("s", merge=pb.MergeOperation(partitions=[first.number, parts[1].number]))
    elif number == 2:
        other = "group-2" if last.broker_group == "group-1" else "group-1"
        await mq.metadata.change_route("s", move=pb.MoveOperation(partition=last.number, broker_group=other))
    else:
        middle = (first.lps.first + first.lps.end) // 2
        await mq.metadata.change_route("s", split=pb.SplitOperation(partition=first.number, at=[middle]))


async def an_ordered_run() -> Tracer:
    """What is seen of four changes and an election, under load, until everything is handled."""
    tracer = Tracer("s", "g", 10_000, lambda body: int(body.rpartition(b"/")[2]))
    async with traced_cluster(tracer, brokers=3, groups=2) as cluster, cluster.client() as mq:
        config = qmq.SubjectConfig("s", order=qmq.Order.STRICT, logical_partitions=LOGICAL)
        await mq.metadata.create_subject(config, partitions=2)
        application = Application(mq, tracer)
        consumers = [asyncio.create_task(application.consume(name)) for name in ("r1", "r2")]
        async with mq.ordered_producer("s") as producer:
            for number in range(1, ROUNDS + 1):
                beside = [application.send(producer, number)]
                if number % 3 == 0:
                    beside.append(change(mq, number // 3))
                if number == ROUNDS // 2 + 1:
                    beside.append(cluster.kill(cluster.master("group-1")))
                await asyncio.gather(*beside)
        await application.is_whole.wait()
        for task in consumers:
            task.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
    return tracer
