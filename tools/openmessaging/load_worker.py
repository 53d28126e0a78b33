"""One worker of the OpenMessaging Benchmark: producers and consumers of QMQ's own client, as its
coordinator orders.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from secrets import token_urlsafe
from typing import Any, Final

import yaml
from pace import Pace, keys_of
from qmq_ordering.hashing import LOGICAL_PARTITIONS
from worker_stats import Sent, WorkerStats

import qmq
from qmq.client.client import Client
from qmq.client.producing.producer import Producer
from qmq.client.producing.receipts import Ticket
from qmq.errors import QmqError
from qmq.model import Order, SubjectConfig

ROUND_MESSAGES: Final = 1_000
"""Messages that are sent before the event loop does something else."""
PAUSE_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class DriverConfig:
    """The driver's file, as the coordinator sends it.
    Settings of other names are for other workers.
    """

    server: str = "127.0.0.1:20880"
    topicNamePrefix: str = "omb"  # noqa: N815 - the benchmark's name
    ordered: bool = False
    acks: str = "quorum"
    compression: str | None = None

    @classmethod
    def parse(cls, text: bytes) -> DriverConfig:
        """Raises ValueError if it is not a mapping in YAML."""
        given = yaml.safe_load(text)
        if not isinstance(given, dict):
            raise ValueError(
                "a driver's file is a mapping: server, topicNamePrefix, ordered, acks, compression"
            )
        return cls(**{name: value for name, value in given.items() if name in cls.__slots__})


class LoadWorker:
    """Runs the coordinator's calls, one at a time.
    `stop_all` ends the load and forgets everything.
    """

    def __init__(self) -> None:
        self.stats = WorkerStats()
        self._config: DriverConfig | None = None
        self._client: Client | None = None
        self._producers: list[Producer | qmq.OrderedProducer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._pace = Pace(1.0, 0)
        self._running = asyncio.Event()

    async def initialize(self, driver: bytes) -> None:
        """Connect. Raises ValueError, QmqError."""
        if self._client is not None:
            raise ValueError("there is a driver already: POST /stop-all first")
        self._config = DriverConfig.parse(driver)
        self._client = qmq.connect(self._config.server)
        await (
            self._client.metadata.list_subjects()
        )  # an unreachable cluster is an error of this call
        self._running.set()

    async def create_topics(self, topics: int, partitions: int) -> list[str]:
        """Create subjects with new names. Only ordered ones have partitions: others are consumed
        from one backlog.
        """
        config, mq = self._connected()
        names = [
            f"{config.topicNamePrefix}-{token_urlsafe(5)}-{number:04d}" for number in range(topics)
        ]
        for name in names:
            if config.ordered:
                await mq.metadata.create_subject(
                    SubjectConfig(name, order=Order.STRICT, logical_partitions=LOGICAL_PARTITIONS),
                    partitions=partitions,
                )
            else:
                await mq.metadata.create_subject(SubjectConfig(name))
        return names

    async def create_producers(self, topics: Sequence[str]) -> None:
        """One producer for each name in the list; a name may be there several times."""
        config, mq = self._connected()
        for topic in topics:
            if config.ordered:
                self._producers.append(
                    mq.ordered_producer(topic, acks=config.acks, compression=config.compression)
                )
            else:
                self._producers.append(
                    mq.producer(topic, acks=config.acks, compression=config.compression)
                )

    async def create_consumers(self, subscriptions: Sequence[tuple[str, str]]) -> None:
        """One consumer for each pair of subject and group."""
        config, mq = self._connected()
        for topic, group in subscriptions:
            consumer = (
                mq.ordered_consumer(topic, group)
                if config.ordered
                else mq.consumer(topic, group, start="earliest")
            )
            self._tasks.append(asyncio.create_task(self._consume(consumer)))

    async def probe(self) -> None:
        """Send one small message by each producer, and wait until all are stored."""
        for producer in self._producers:
            await producer.send(bytes(10), "key")
            self.stats.probed()

    async def start_load(self, payloads: Sequence[bytes], rate: float, key_kind: str) -> None:
        """Send from now on, at `rate` messages a second over all producers.

        A worker without producers sends nothing: the coordinator starts the load at all workers,
        also when a topic has fewer producers. Raises ValueError.
        """
        if not payloads:
            raise ValueError("a load needs payloads")
        if not self._producers:
            return
        source = random.Random(0)
        self._pace = Pace(rate, time.perf_counter_ns())
        self._tasks.append(
            asyncio.create_task(self._publish(payloads, keys_of(key_kind, source), source))
        )

    async def adjust(self, rate: float) -> None:
        """Change the rate."""
        self._pace = Pace(rate, time.perf_counter_ns())

    async def pause(self) -> None:
        """Stop consuming. Producers continue and a backlog grows."""
        self._running.clear()

    async def resume(self) -> None:
        """Consume again."""
        self._running.set()

    async def stop_all(self) -> None:
        """End the load, close the connection, and forget the counts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks, self._producers = [], []
        if self._client is not None:
            await self._client.close()
        self._client = self._config = None
        self.stats.reset()

    def _connected(self) -> tuple[DriverConfig, Client]:
        if self._client is None or self._config is None:
            raise ValueError("there is no driver yet: POST /initialize-driver")
        return self._config, self._client

    async def _publish(
        self, payloads: Sequence[bytes], keys: Iterator[str | None], source: random.Random
    ) -> None:
        producers = itertools.cycle(self._producers)
        while True:
            due = self._pace.due(time.perf_counter_ns(), ROUND_MESSAGES)
            sending: dict[Ticket, list[Sent]] = {}
            for intended_ns in due:
                body, producer, sent_ns = (
                    source.choice(payloads),
                    next(producers),
                    time.perf_counter_ns(),
                )
                if producer.full:
                    await producer.drain()
                ticket = producer.send(body, next(keys))  # type: ignore[arg-type]  # an ordered one refuses a message without a key
                sending.setdefault(ticket, []).append((len(body), intended_ns, sent_ns))
            for ticket, messages in sending.items():
                ticket.when_decided(
                    lambda ticket=ticket, messages=messages: self._decided(ticket, messages)
                )  # type: ignore[misc]
            await asyncio.sleep(0 if len(due) == ROUND_MESSAGES else PAUSE_S)

    def _decided(self, ticket: Ticket, messages: list[Sent]) -> None:
        if isinstance(ticket.decided, QmqError):
            self.stats.failed(len(messages))
        else:
            self.stats.sent(messages, time.perf_counter_ns())

    async def _consume(self, consumer: Any) -> None:
        async with consumer:
            async for message in consumer:
                self.stats.received(
                    len(message.body), time.time_ns() // 1_000_000 - message.create_time_ms
                )
                if not self._running.is_set():
                    await self._running.wait()
